"""A Gantt chart of a schedule: one row per stage, grey where a stage waits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from impl.rotation.schedule import Action, Kind, Schedule, in_order

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DURATIONS: Mapping[Kind, float] = {"F": 1.0, "B": 2.0, "U": 0.5}
"""Lengths relative to a forward, for a picture without measurements."""
COLOURS: Mapping[Kind, str] = {"F": "#9ecae1", "B": "#a1d99b", "U": "#fdae6b"}
WAITING = "0.93"
LABELS: Mapping[Kind, str] = {"F": "forward", "B": "backward", "U": "update"}
LABELLED = 40
"""Up to so many bars in a row have room for the number of their microbatch."""


@dataclass(frozen=True)
class Bar:
    """When a stage runs an action, in units of the durations."""

    stage: int
    action: Action
    start: float
    end: float


def timeline(schedule: Schedule, durations: Mapping[Kind, float] = DURATIONS) -> list[Bar]:
    """Return when every action runs if each begins as soon as its stage and its input are ready; messages are free."""
    free = [0.0] * schedule.stages
    ends: dict[tuple[int, Kind, int], float] = {}
    bars = []
    for stage, action in in_order(schedule):
        start = free[stage]
        if action.kind != "U":
            source = stage - 1 if action.kind == "F" else stage + 1
            start = max(start, ends.get((source, action.kind, action.number), 0.0))
        end = start + durations[action.kind]
        free[stage] = ends[stage, action.kind, action.number] = end
        bars.append(Bar(stage, action, start, end))
    return bars


def bubble(bars: list[Bar]) -> float:
    """Return the share of all stages' time, up to the end of the last bar, in which they wait."""
    stages = 1 + max(bar.stage for bar in bars)
    return 1.0 - sum(bar.end - bar.start for bar in bars) / (stages * max(bar.end for bar in bars))


def draw(schedule: Schedule, durations: Mapping[Kind, float] = DURATIONS) -> Figure:
    """Return a figure of ``schedule``; bars of forwards and backwards carry the number of their microbatch."""
    bars = timeline(schedule, durations)
    label = "time (forward of one microbatch = 1)" if durations is DURATIONS else "time"
    return draw_bars(bars, title=f"{name_of(schedule)}: bubble {bubble(bars):.0%}", label=label)


def name_of(schedule: Schedule) -> str:
    """Return the schedule's name, with its mode where there are several."""
    return schedule.name + ("" if schedule.mode == "sync" else f", {schedule.mode}")


def draw_bars(bars: Sequence[Bar], *, title: str, label: str, unit: float = 1.0) -> Figure:
    """Return a figure of ``bars``, whatever decided when they run; ``unit`` of time is about one forward."""
    from matplotlib.figure import Figure  # slow to import
    from matplotlib.patches import Patch

    stages, length = 1 + max(bar.stage for bar in bars), max(bar.end for bar in bars)
    labelled = max(sum(bar.stage == stage for bar in bars) for stage in range(stages)) <= LABELLED
    width = min(16.0, 2.0 + 0.22 * length / unit)
    figure = Figure(figsize=(width, 1.3 + 0.34 * stages), layout="constrained")
    axes = figure.add_subplot()
    axes.barh(range(stages), length, height=0.8, color=WAITING)
    for kind, colour in COLOURS.items():
        own = [bar for bar in bars if bar.action.kind == kind]
        axes.barh(
            [bar.stage for bar in own],
            [bar.end - bar.start for bar in own],
            left=[bar.start for bar in own],
            height=0.8,
            color=colour,
            edgecolor="white",
            linewidth=0.4,
        )
        for bar in own if labelled and kind != "U" else ():
            middle = (bar.start + bar.end) / 2
            axes.text(middle, bar.stage, str(bar.action.number), ha="center", va="center", fontsize=6)
    axes.set_yticks(range(stages), [f"stage {k}" for k in range(stages)])
    axes.invert_yaxis()
    axes.set_xlim(0, length)
    axes.set_xlabel(label)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(title, fontsize=9, loc="left")
    handles = [Patch(color=COLOURS[kind], label=label) for kind, label in LABELS.items()]
    handles.append(Patch(color=WAITING, label="waiting (bubble)"))
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=7, frameon=False)
    return figure
