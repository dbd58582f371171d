"""Pipelines on described clusters (the ``pipeline_projection`` experiment): projected times, planned memory, claims."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from paper_figures import common, markdown, style
from paper_figures.pipeline_claims import claims_table
from paper_figures.published import block as published_block
from paper_figures.statistics import Estimate

CLAIMS = ("R6", "R11", "R12", "R13", "R16", "R21")
PARTS = ("weights", "masters", "gradients", "stash", "early", "state", "activations", "working", "host")
MARKS = ("o", "x", "D", "^", "v", "P")
"""One for each policy."""
EXACT_BYTES, PLAIN_BYTES = 476, 36
"""Memory traffic of an element's share of the gradient norm (:meth:`impl.projection.machine.Roofline.norm`)."""
GB = 1e9
NO_EDGE = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
TICKS = (3, 10, 30, 100, 300, 1000)


def cases(frame: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield the display name and the rows of every case."""
    rows = common.where(frame, sweep="case")
    for case, name in common.distinct(rows, "case", "case_name"):
        yield str(name), common.where(rows, case=case)


def single(rows: pd.DataFrame, quantity: str) -> Estimate:
    """Return the one number ``quantity`` of a cell with its band; without a value where the cell does not fit."""
    own = common.where(rows, quantity=quantity)
    numbers = [float(common.numbers(own, column)[0]) if len(own) else math.nan for column in ("value", "low", "high")]
    return Estimate(*numbers, n=int(math.isfinite(numbers[0])))


def fullest(rows: pd.DataFrame) -> float:
    """Return the bytes of the fullest stage of a cell."""
    return float(common.numbers(common.where(rows, quantity="memory"), "value").max())


def best(rows: pd.DataFrame) -> pd.DataFrame | None:
    """Return the rows of the policy under which a method is fastest, None if it fits under none."""
    found = [(single(own, "samples_per_s"), own) for own in _policies(rows)]
    fitting = [(rate.value, -number, own) for number, (rate, own) in enumerate(found) if rate.n]
    return max(fitting, key=lambda item: item[:2])[2] if fitting else None


def main_table(frame: pd.DataFrame) -> str:
    """Return the Markdown table of every method's fastest policy that fits, by case.

    Ratios are of the times of an update, to PipeDream under the policy that its own row shows.
    """
    header = ["case", "method", "policy", "samples/s [projected]", "update time over PipeDream's fastest"]
    header += ["bubble, %", "exposed, ms", "gradient norm, %"]
    header += ["fullest stage, GB [planned]", "card, GB"]
    out = []
    for name, rows in cases(frame):
        for method, own in _methods(rows):
            found = best(own)
            if found is None:
                least = min(_policies(own), key=fullest)
                words = ["does not fit under any policy", *[markdown.DASH] * 5]
                out.append([name, method, *words, markdown.number(fullest(least) / GB, 1), _card(least)])
                continue
            ratio = single(found, "ratio")
            cells = [
                str(common.distinct(found, "policy_name")[0][0]),
                markdown.estimate(single(found, "samples_per_s"), 1),
                markdown.estimate(ratio) if ratio.n else "PipeDream fits under no policy",
                markdown.estimate(_scaled(single(found, "bubble"), 100), 0),
                markdown.estimate(_scaled(single(found, "exposed_s"), 1e3), 1),
                markdown.estimate(_scaled(single(found, "norm_share"), 100), 0),
                markdown.number(fullest(found) / GB, 1),
                _card(found),
            ]
            out.append([name, method, *cells])
    return markdown.table(header, out)


def norm_note(frame: pd.DataFrame) -> str:
    """Return what part of an update is the gradient norm, over the cells of the main table; nothing if none fits."""
    fitting = [found for _, rows in cases(frame) for _, own in _methods(rows) if (found := best(own)) is not None]
    shares = [single(found, "norm_share").value for found in fitting]
    if not shares:
        return ""
    return (
        "Updates include the engine's **exact gradient norm**, which does not depend on how gradients are cut: of "
        "everything that is updated elementwise (all of a method with Adam, of a rotation's only what stays unrotated "
        f"as flat ranges) its sum of squares moves {EXACT_BYTES} bytes an element in these projections, where a plain "
        f"one moves {PLAIN_BYTES}. *Gradient norm*: its share of an update on the stage with most of it, projected; "
        f"from {min(shares):.0%} to {max(shares):.0%} here. With a plain norm most of that time would be "
        "saved, by methods with Adam more than by a rotation, and ratios to PipeDream would be further from 1."
    )


def policies_table(rows: pd.DataFrame) -> str:
    """Return the Markdown table of one case: rate under each policy, or what it would need."""
    names = [str(n) for (n,) in common.distinct(rows, "policy_name")]
    out = []
    for method, own in _methods(rows):
        by_name = {str(common.distinct(p, "policy_name")[0][0]): p for p in _policies(own)}
        cells = []
        for name in names:
            if name not in by_name:
                cells.append("no stash")
                continue
            rate, need = single(by_name[name], "samples_per_s"), fullest(by_name[name]) / GB
            reason = next((str(r) for (r,) in common.distinct(by_name[name], "reason") if r), "")
            cells.append(f"{markdown.estimate(rate, 1)}, {need:.1f} GB" if rate.n else reason.split(",")[0])
        out.append([method, *cells])
    return markdown.table(["method", *names], out)


def parts_table(rows: pd.DataFrame) -> str:
    """Return the Markdown table of what the fullest stage of one case holds, in GB."""
    out = []
    for method, own in _methods(rows):
        for policy in _policies(own):
            found = common.where(policy, quantity="memory_part")
            sizes = {p: common.numbers(common.where(found, part=p), "value") for p in PARTS}
            stage = common.distinct(found, "stage")[0][0]
            cells = [markdown.number(size[0] / GB) if size.size and size[0] else "0" for size in sizes.values()]
            name = str(common.distinct(policy, "policy_name")[0][0])
            out.append([method, name, str(stage), markdown.number(fullest(policy) / GB, 1), *cells])
    header = ["method", "policy", "stage", "total", *(p if p != "host" else "host (apart)" for p in PARTS)]
    return markdown.table(header, out)


def largest_table(frame: pd.DataFrame) -> str:
    """Return the Markdown table of the largest microbatch that fits, by card, model and number of stages."""
    rows = common.where(frame, sweep="largest")
    if rows.empty:
        return ""
    stages = sorted(int(p) for (p,) in common.distinct(rows, "stages"))
    out = []
    for hardware, model, name, method, policy in common.distinct(
        rows, "hardware", "model", "model_name", "method_name", "policy_name"
    ):
        own = common.where(rows, hardware=hardware, model=model, method_name=method, policy_name=policy)
        found = {int(p): v for p, v in common.distinct(own, "stages", "value")}
        sizes = (markdown.DASH if found[p] is None else str(int(found[p]) or "does not fit") for p in stages)
        out.append([str(hardware), str(name), str(method), *sizes])
    sequence = ", ".join(str(s) for (s,) in common.distinct(rows, "sequence"))
    policy = ", ".join(str(p) for (p,) in common.distinct(rows, "policy_name"))
    text = f"Sequences of {sequence} tokens in the largest microbatch with which every stage fits ({policy})."
    return text + "\n\n" + markdown.table(["card", "model", "method", *(f"P = {p}" for p in stages)], out)


def table(frame: pd.DataFrame, published: pd.DataFrame) -> str:
    """Return the Markdown document of the experiment from its tidy ``frame``."""
    blocks = [
        "Times are **projected** from data sheets and stated efficiencies, with the band that 90 of 100 draws of these "
        "lead to; they are means over a period of refreshes. Bytes are **planned** from shapes and the schedule, in GB "
        "of 10^9. Every stage has a device of its own. *Bubble*: share of all stages' time in which they do not "
        "compute (recomputing counts as computing), once the pipeline is full; *exposed*: how much shorter an update "
        "would be if messages took no time. "
        "A cell that does not fit has no times. Shown here is each method's fastest policy that fits; ratios are of "
        "the times of an update, to PipeDream under its own fastest policy that fits, with draws of the inputs that "
        "both share.",
        norm_note(frame),
        main_table(frame),
        "## By what a backward recomputes and where the stash is",
        "Rate [projected] and bytes of the fullest stage [planned], or why there is no rate.",
    ]
    for name, rows in cases(frame):
        setup = ", ".join(f"{what} {common.distinct(rows, what)[0][0]}" for what in ("batch", "sequence", "dtype"))
        blocks += [f"### {markdown.literal(name)}\n\n{setup}", policies_table(rows)]
    first = next(iter(cases(frame)), None)
    if first is not None:
        case = markdown.literal(first[0])
        blocks += [f"## What is in memory (planned): {case}, fullest stage, GB", parts_table(first[1])]
    if largest := largest_table(frame):
        blocks += ["## Largest microbatches (planned)", largest]
    if claims := claims_table(frame, published):
        blocks += ["## Beside published numbers", claims]
    blocks += [evidence(frame), published_block(published, CLAIMS, "rotation's")]
    return markdown.document("Pipelines on described clusters", *blocks)


def evidence(frame: pd.DataFrame) -> str:
    """Return on what the projected times rest, by case."""
    import json

    lines = []
    for name, rows in cases(frame):
        sources: dict[str, None] = {}
        for (text,) in common.distinct(rows, "evidence"):
            sources |= dict.fromkeys(json.loads(text) if text else ())
        lines.append(f"- {markdown.literal(name)}: {markdown.literal('; '.join(sources) or 'nothing fits')}")
    return "## What the times rest on\n\n" + "\n".join(lines)


def figure(frame: pd.DataFrame, published: pd.DataFrame) -> Figure:
    """Return the figure: rate of each method's fastest policy that fits, and memory under every policy."""
    style.apply()
    shown = [(name, rows) for name, rows in cases(frame) if common.distinct(rows, "dtype") != [("float32",)]]
    heights = [len(list(_methods(rows))) + 1.6 for _, rows in shown]
    size = (style.TWO_COLUMNS_IN, 0.9 + 0.135 * sum(heights))
    result = Figure(figsize=size, layout="constrained")
    grid = result.subplots(len(shown), 2, squeeze=False, gridspec_kw={"height_ratios": heights})
    pairs = [(str(i), str(n)) for i, n in common.distinct(common.where(frame, sweep="case"), "method", "method_name")]
    colours = style.palette(pairs, ())
    policies = [str(p) for (p,) in common.distinct(common.where(frame, sweep="case"), "policy_name")]
    marks = dict(zip(policies, MARKS, strict=False))
    for (name, rows), (left, right) in zip(shown, grid, strict=True):
        methods = list(_methods(rows))
        for position, (method, own) in enumerate(methods):
            _rate(left, position, best(own), colours[method])
            for policy in _policies(own):
                mark = marks[str(common.distinct(policy, "policy_name")[0][0])]
                look = {"mec": "0.2", "mew": 0.6} if mark == "x" else {"mec": "white", "mew": 0.4}
                right.plot(
                    fullest(policy) / GB, position, mark, ms=3 if mark == "x" else 4, color=colours[method], **look
                )
        card = single(rows, "card").value / GB
        right.axvspan(card, 1e4, color="0.92", zorder=0)
        right.axvline(card, color="0.3", lw=0.8, ls="--")
        right.set_xscale("log")
        right.set_xlim(2, 1000)
        right.set_xticks(TICKS, [str(tick) for tick in TICKS])
        right.minorticks_off()
        left.set_xlim(left=0)
        for axes in (left, right):
            axes.set_ylim(len(methods) - 0.4, -0.6)
            axes.set_yticks(range(len(methods)), [m for m, _ in methods] if axes is left else [""] * len(methods))
            axes.tick_params(labelsize=6)
            axes.grid(visible=False, axis="y")
        left.set_title(name, fontsize=7, loc="left")
    grid[-1][0].set_xlabel("samples/s (projected, 90 % band)\nfastest policy that fits")
    grid[-1][1].set_xlabel("GB on the fullest stage (planned)\ngrey: more than the card has")
    handles = [Line2D([], [], ls="", marker=marks[p], color="0.3", ms=4, label=p) for p in policies]
    result.legend(handles=handles, loc="outside upper center", ncols=2, fontsize=7)
    return result


def _rate(axes: Axes, position: int, rows: pd.DataFrame | None, colour: style.Colour) -> None:
    if rows is None:
        place = axes.get_yaxis_transform()
        axes.text(
            0.01, position, "does not fit", transform=place, va="center", fontsize=6, style="italic", bbox=NO_EDGE
        )
        return
    rate = single(rows, "samples_per_s")
    error = [[rate.value - rate.low], [rate.high - rate.value]]
    axes.barh(position, rate.value, height=0.7, color=colour)
    axes.errorbar(rate.value, position, xerr=error, color="0.2", lw=0.8, capsize=1.5)


def _methods(rows: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    for method, name in common.distinct(rows, "method", "method_name"):
        yield str(name), common.where(rows, method=method)


def _policies(rows: pd.DataFrame) -> list[pd.DataFrame]:
    return [common.where(rows, policy=policy) for (policy,) in common.distinct(rows, "policy")]


def _scaled(value: Estimate, factor: float) -> Estimate:
    return Estimate(factor * value.value, factor * value.low, factor * value.high, n=value.n)


def _card(rows: pd.DataFrame) -> str:
    return markdown.number(single(rows, "card").value / GB, 1)
