"""A picture of a plan: which DP rank owns what in each bucket, and how much each rank has to do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from impl.canzona.balance import ratio, report
from impl.canzona.costs import flops_of, memory_bytes
from impl.canzona.plan import EVERY, Family, Plan
from impl.canzona.strategies import Cost

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".pdf")
COLOURS = "turbo"
REPEATED = "0.6"
"""Grey of what every rank computes."""


def draw(plan: Plan, costs: Sequence[Cost], path: Path, title: str = "") -> None:
    """Write the picture of ``plan`` to ``path`` (its suffix names the format)."""
    figure(plan, costs, title).savefig(path, dpi=150)


def figure(plan: Plan, costs: Sequence[Cost], title: str = "") -> Figure:
    """Return the picture of ``plan``: buckets above, loads of the DP ranks below."""
    # Planners are found by importing every module of this package, so matplotlib waits until a picture is asked for.
    from matplotlib.figure import Figure

    family = next((f for f in plan.families if f.atomic), plan.families[0])
    buckets = len(family.buckets)
    top = min(12.0, 1.2 + 0.28 * buckets)
    bottom = 3.0 if family.atomic else 0.0
    out = Figure(figsize=(11, top + bottom + 0.6), layout="constrained")
    grid = out.add_gridspec(2, 2, height_ratios=[top, bottom]) if family.atomic else out.add_gridspec(1, 2)
    version = f" {plan.version}" if plan.version else ""
    out.suptitle(f"{title + ': ' if title else ''}{plan.strategy}{version}, DP {plan.dp} x TP {plan.tp} [planned]")
    _owners(out, out.add_subplot(grid[0, :]), family, plan.dp)
    if family.atomic:
        _loads(plan, costs, out.add_subplot(grid[1, 0]), out.add_subplot(grid[1, 1]))
    return out


def _owners(out: Figure, axes: Axes, family: Family, dp: int) -> None:
    """One bar per bucket, a box per parameter, coloured by owner; ticks mark the cuts."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import BoundaryNorm
    from matplotlib.ticker import MaxNLocator

    norm = BoundaryNorm([r - 0.5 for r in range(dp + 1)], 256, extend="neither") if dp > 1 else None
    colours = colormaps[COLOURS]
    unit, scale = _unit(max(b.end - b.start for b in family.buckets))

    def colour(rank: int) -> tuple[float, ...] | str:
        return REPEATED if rank == EVERY else colours(norm(rank) if norm else 0.5)

    for row, bucket in enumerate(family.buckets):
        boxes, fills = [], []
        for slot in bucket.slots:
            if slot.owner is not None:
                boxes.append(((slot.start - bucket.start) / scale, (slot.end - slot.start) / scale))
                fills.append(colour(slot.owner))
        for rank in range(dp) if bucket.slots[0].owner is None else ():
            low, high = bucket.cuts[rank], bucket.cuts[rank + 1]
            boxes.append(((low - bucket.start) / scale, (high - low) / scale))
            fills.append(colour(rank))
        axes.broken_barh(boxes, (row - 0.4, 0.8), facecolors=fills, edgecolor="white", linewidth=0.4)
        cuts = [(c - bucket.start) / scale for c in sorted(set(bucket.cuts))]
        axes.vlines(cuts, row - 0.48, row + 0.48, colors="black", linewidth=0.9)
    axes.set(
        xlabel=f"{unit} elements of one TP rank's flat buffer", ylabel="bucket", ylim=(len(family.buckets) - 0.4, -0.6)
    )
    axes.set_xlim(left=0)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    cut = ", black: where the bucket is cut" if family.buckets[0].cuts else ""
    axes.set_title(f"owner of each {'matrix' if family.atomic else 'segment'}{cut}", fontsize="medium", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    if all(s.owner == EVERY for s in family.slots):
        axes.set_title("grey: every DP rank updates it", fontsize="medium", loc="left")
    elif norm is not None:
        bar = out.colorbar(ScalarMappable(norm, colours), ax=axes, pad=0.01, aspect=15, label="DP rank")
        bar.locator = MaxNLocator(integer=True, nbins=8)
        bar.minorticks_off()
        bar.update_ticks()


def _loads(plan: Plan, costs: Sequence[Cost], left: Axes, right: Axes) -> None:
    """Work and memory of each DP rank (its TP ranks together) with mean and lower bound."""
    from matplotlib.ticker import MaxNLocator

    balance = report(plan, costs)
    matrices = [s.parameter for f in plan.families if f.atomic for s in f.slots]
    work = [flops_of(plan.parameters[i], costs[i]) for i in matrices]
    memory = [memory_bytes(plan.parameters[i], costs[i]) for i in matrices]
    panels = (left, "FLOP of whole matrices", "flops", work), (right, "bytes of state", "memory_bytes", memory)
    for axes, label, key, atoms in panels:
        loads = balance["loads"][key]
        unit, scale = _unit(max(loads))
        mean = sum(loads) / plan.dp
        axes.bar(range(plan.dp), [v / scale for v in loads], width=0.85 if plan.dp <= 64 else 1.0, color="0.45")
        axes.axhline(mean / scale, color="tab:blue", linewidth=1.2, label="mean")
        bound = max(sum(atoms) / plan.dp, *atoms) / scale
        axes.axhline(bound, color="tab:red", linewidth=1.2, linestyle="--", label="the least possible maximum")
        axes.set(xlabel="DP rank", ylabel=f"{unit} {label}".strip(), ylim=(0, max(max(loads) / scale, bound) * 1.28))
        axes.set_title(f"largest / mean = {ratio(loads):.3f}", fontsize="medium", loc="left")
        axes.set_xlim(-0.7, plan.dp - 0.3)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend(loc="upper right", ncols=2, frameon=False, fontsize="small")
        axes.spines[["top", "right"]].set_visible(False)


def _unit(value: float) -> tuple[str, float]:
    """Return the prefix and divisor that make ``value`` readable."""
    for prefix, scale in (("10^15", 1e15), ("10^12", 1e12), ("10^9", 1e9), ("10^6", 1e6), ("10^3", 1e3)):
        if value >= scale:
            return f"$\\times\\,{prefix.replace('^', '^{')}}}$", scale
    return "", 1.0
