"""A picture of a timeline: compute and communication of a few ranks, a colour for each phase."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from impl.projection.timeline import COMPUTE, Op, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Rank = tuple[int, ...]
SUFFIXES = (".png", ".pdf")
COLOURS = {
    "forward": "#4e79a7",
    "backward": "#59a14f",
    "grad_reduce": "#e15759",
    "grad_norm": "#79706e",
    "optimizer_step": "#f28e2b",
    "tp_exchange": "#b07aa1",
    "param_sync": "#d4a6c8",
}
OTHER = "#9c755f"
"""Of phases that are not the engine's."""


def draw(timeline: Timeline, path: Path, *, title: str = "", ranks: Sequence[Rank] | None = None) -> None:
    """Write the picture to ``path`` (its suffix names the format); ``ranks`` as in :func:`figure`."""
    figure(timeline, title=title, ranks=ranks).savefig(path, dpi=150)


def telling(timeline: Timeline, phase: str = "optimizer_step", count: int = 3) -> list[Rank]:
    """Return ``count`` ranks that show how work in ``phase`` differs: the busiest, the idlest, and some between."""
    busy = np.zeros(timeline.mesh)
    for op in timeline.ops:
        if op.stream == COMPUTE and op.phase == phase and not op.waiting:
            busy = busy + op.seconds[0]
    order = np.argsort(-busy, axis=None, kind="stable")
    places = np.unique(np.linspace(0, len(order) - 1, min(count, len(order))).round().astype(int))
    return [tuple(int(i) for i in np.unravel_index(order[place], timeline.mesh)) for place in places]


def label(rank: Rank) -> str:
    """Return the name of a rank of a (dp, tp) mesh."""
    return f"dp {rank[0]} tp {rank[1]}" if len(rank) == 2 else f"rank {', '.join(map(str, rank))}"


def figure(timeline: Timeline, *, title: str = "", ranks: Sequence[Rank] | None = None) -> Figure:
    """Return the picture: for each rank a row of its compute stream and one of each communicator, nominal seconds.

    ranks: which to show, by default a few :func:`telling` ones.
    """
    from matplotlib.figure import Figure  # slow to import
    from matplotlib.patches import Patch

    shown = list(ranks) if ranks is not None else telling(timeline)
    used = dict.fromkeys(op.stream for op in timeline.ops)
    streams = [COMPUTE, *sorted(name for name in used if name != COMPUTE)]
    rows = [(rank, stream) for rank in shown for stream in streams]
    out = Figure(figsize=(11, 1.6 + 0.34 * len(rows)), layout="constrained")
    axes = out.add_subplot()
    for number, (rank, stream) in enumerate(rows):
        _bars(axes, number, [op for op in timeline.ops if op.stream == stream], rank, timeline.mesh)
    axes.set_yticks(range(len(rows)), [f"{label(rank)}  {stream}" for rank, stream in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, float(timeline.end()[0]) or 1.0)
    axes.set_xlabel("seconds")
    axes.spines[["top", "right"]].set_visible(False)
    for edge in range(len(streams), len(rows), len(streams)):
        axes.axhline(edge - 0.5, color="0.8", linewidth=0.6)
    phases = dict.fromkeys(op.phase for op in timeline.ops)
    handles = [Patch(color=_colour(phase), label=phase) for phase in phases]
    handles.append(Patch(facecolor="white", edgecolor="0.5", hatch="////", label="waiting"))
    out.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    axes.set_title(f"{title}   [projected]" if title else "[projected]", fontsize=9, loc="left")
    return out


def _bars(axes: Axes, row: int, ops: Sequence[Op], rank: Rank, mesh: tuple[int, ...]) -> None:
    """Draw what one rank does on one stream; waits are hatched in the colour of their phase."""
    for waiting in (False, True):
        found = [(op, _at(op.start[0], rank, mesh), _at(op.seconds[0], rank, mesh)) for op in ops]
        found = [(op, start, length) for op, start, length in found if op.waiting is waiting and length > 0]
        colours = [_colour(op.phase) for op, _, _ in found]
        axes.barh(
            [row] * len(found),
            [length for _, _, length in found],
            left=[start for _, start, _ in found],
            height=0.8,
            color="white" if waiting else colours,
            edgecolor=colours,
            hatch="////" if waiting else None,
            linewidth=0.0,
        )


def _at(times: np.ndarray, rank: Rank, mesh: tuple[int, ...]) -> float:
    return float(np.broadcast_to(times, mesh)[rank])


def _colour(phase: str) -> str:
    return COLOURS.get(phase, OTHER)
