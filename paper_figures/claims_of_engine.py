"""What runs of the engine say about published claims (C3 to C6, C9, C10, C12)."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from paper_figures import common, precision
from paper_figures import generality as general
from paper_figures import step_time as timing
from paper_figures.findings import About, Finding, joined, runs_of, why_not
from paper_figures.statistics import Estimate, median

MODEL = "qwen3-32b"
"""Of the published times."""

SUBJECT, BASELINE = "canzona", "nv-ping-pong"
PHASES = {"C3": "optimizer_step", "C4": "iteration", "C5": "forward_backward"}
"""Phase whose time each claim is about."""
SPEEDUPS = {"C9": "shampoo", "C10": "soap"}
BETWEEN = ("optimizer_step", "tp_exchange")
"""Phases between the reduction of gradients and the gather of parameters, the gradient norm apart."""
CROSSING = ("dp", "world")
"""Axes whose collectives go through the DP dimension."""


def step_time(frame: pd.DataFrame) -> list[Finding]:
    """Return the findings on C3, C4, C5 (times of NV-layerwise and Canzona) and C12 (bytes).

    Times are of a job that has both systems: with cores of its own for every rank if there is one, of the published
    model if it was run, then of the most ranks, then of the model that the experiment lists last.
    """
    found = [f for claim, phase in PHASES.items() for f in _times(frame, claim, phase)]
    return [*found, *bytes_between(frame)]


def _times(frame: pd.DataFrame, claim: str, phase: str) -> list[Finding]:
    meshes = [
        (label, rows)
        for label, rows in common.meshes(frame)
        if all(len(common.where(rows, system=system)) for system in (BASELINE, SUBJECT))
    ]
    if not meshes:
        return [About("measured", "").missing(claim, f"no run of {BASELINE} and {SUBJECT} on this tier")]
    models = [model for (model,) in common.distinct(frame, "model")]  # small ones first, as experiments list them

    def rank(item: tuple[str, pd.DataFrame]) -> tuple[bool, bool, int, int, int]:
        label, rows = item
        ((dp, tp, model),) = common.distinct(rows, "dp", "tp", "model")
        return "shared" not in label, model == MODEL, int(dp) * int(tp), int(dp), models.index(model)

    label, rows = max(meshes, key=rank)
    ours, theirs = (common.where(rows, system=s) for s in (SUBJECT, BASELINE))
    about = About("measured", f"{_model(rows)}, {label}", runs_of(ours, theirs))
    for own, name in ((ours, SUBJECT), (theirs, BASELINE)):
        if common.status_of(own) != common.DONE:
            return [about.missing(claim, why_not(own, name))]
    times = [median(1e-3 * timing.milliseconds(rows, s, phase)) for s in (BASELINE, SUBJECT)]
    if not all(t.n for t in times):
        return [about.missing(claim, why_not(ours, f"the time of {timing.PHASES[phase]}"))]
    ratio = timing.ratio(rows, BASELINE, SUBJECT, phase)
    return [
        about.found(claim, "baseline", times[0], "s", "NV-layerwise (ping-pong)"),
        about.found(claim, "value", times[1], "s"),
        about.found(claim, "effect", ratio, "times"),
    ]


def bytes_between(frame: pd.DataFrame) -> list[Finding]:
    """Return the finding on C12: bytes that Canzona moves through the DP dimension between reduction and gather."""
    own = common.where(frame, system=SUBJECT)
    counted = common.where(own, quantity="bytes", status=common.DONE)
    counted = counted.loc[counted["dp"] > 1]  # one rank has nobody to send to
    jobs = common.distinct(counted, "run", "dp", "tp")
    labels = [common.mesh_label(dp, tp) for _, dp, tp in jobs]
    about = About("measured", f"{_model(own)}, {joined(labels)}", runs_of(counted))
    if counted.empty:
        return [
            About("measured", "", runs_of(own)).missing("C12", why_not(own, "bytes of Canzona over several DP ranks"))
        ]
    most = max(_bytes(common.where(counted, run=run), BETWEEN) for run, _, _ in jobs)
    norm = max(_bytes(common.where(counted, run=run), ("grad_norm",)) for run, _, _ in jobs)
    text = f"every collective counted; the gradient norm, a phase of its own, moves {norm:.0f} B over all ranks"
    return [about.found("C12", "value", Estimate(most, most, most, len(jobs)), "B", text)]


def _bytes(rows: pd.DataFrame, phases: tuple[str, ...]) -> float:
    chosen = rows.loc[rows["phase"].isin(phases) & rows["axis"].isin(CROSSING)]
    return float(common.numbers(chosen, "value").sum())


def precision_losses(frame: pd.DataFrame) -> list[Finding]:
    """Return the finding on C6: the largest difference of Canzona's losses to SC's over meshes, seeds and steps."""
    return _differences(frame, [(label, rows) for label, rows in common.meshes(frame)])


def generality(frame: pd.DataFrame) -> list[Finding]:
    """Return the findings on C6 (losses of every optimizer) and C9, C10 (Canzona's speed-up over SC)."""
    groups = [(f"{name} on {mesh}", general.losses(rows)) for name, mesh, rows in general.groups(frame)]
    found = _differences(frame, groups)
    for claim, optimizer in SPEEDUPS.items():
        mine = [
            (mesh, rows)
            for _, mesh, rows in general.groups(frame)
            if {o for (o,) in common.distinct(rows, "optimizer")} == {optimizer}
        ]
        if not mine:
            found.append(About("measured", "").missing(claim, f"no run of {optimizer} on this tier"))
            continue
        mesh, rows = mine[-1]
        about = About("measured", f"{_model(rows)}, {optimizer}, {mesh}", runs_of(rows))
        ratio = general.speedup(rows)
        if not ratio.n:
            found.append(
                about.missing(claim, why_not(common.where(rows, system=SUBJECT), f"{optimizer} under {SUBJECT}"))
            )
            continue
        ranks = int(rows["dp"].iloc[0]) * int(rows["tp"].iloc[0])
        text = f"an even division over {ranks} ranks gives {ranks}"
        found += [about.found(claim, part, ratio, "times", text) for part in ("value", "effect")]
    return found


def _differences(frame: pd.DataFrame, groups: list[tuple[str, pd.DataFrame]]) -> list[Finding]:
    compared, largest, words, other = 0, 0.0, [], []
    used: list[pd.DataFrame] = []
    for label, rows in groups:
        if rows.empty or int(rows["dp"].iloc[0]) * int(rows["tp"].iloc[0]) == 1:  # one rank has nothing to distribute
            continue
        reference = str(rows["reference"].iloc[0])
        if SUBJECT not in {system for system, _ in common.systems(rows)}:
            continue
        bad = common.status_of(common.where(rows, system=SUBJECT)).replace(common.DONE, "")
        lost = [len(common.where(rows, system=system, status="diverged")) for system in (SUBJECT, reference)]
        if lost[0] > lost[1]:
            other.append(f"{label}: diverged under {SUBJECT}, not under {reference}")
        rows = common.where(rows, status=common.DONE)  # a run that stopped early agrees as far as it got
        if rows.empty:
            continue
        found = precision.difference(rows, SUBJECT, reference)
        if not found.seeds:
            continue
        used.append(rows.loc[rows["system"].isin([SUBJECT, reference])])
        compared += found.seeds
        largest = float(np.fmax(largest, found.largest))
        if found.largest > 0:
            words.append(f"{label}: {found.largest:.1e}, first at step {found.first}")
        elif found.equal_parameters is False:
            words.append(f"{label}: equal losses, other parameters at the end")
    references = [reference for (reference,) in common.distinct(frame, "reference")]
    both = frame.loc[frame["system"].isin([SUBJECT, *references])]
    labels = joined([label for label, rows in groups if len(rows)])
    about = About("measured", f"{_model(frame)}, {labels}", runs_of(*used))
    if other:
        return [About("measured", about.scale, runs_of(both)).missing("C6", "; ".join(other))]
    if not compared:
        return [
            About("measured", "", runs_of(both)).missing(
                "C6", why_not(both, "losses of Canzona and SC on several ranks")
            )
        ]
    text = "largest |difference| of a loss; " + ("; ".join(words) if words else "0 at every step")
    if bad := common.status_of(both).replace(common.DONE, ""):
        text += f"; without runs that are {bad}"
    return [about.found("C6", "value", Estimate(largest, math.nan, math.nan, compared), "nats", text)]


def _model(frame: pd.DataFrame) -> str:
    return joined([model for (model,) in common.distinct(frame, "model")])
