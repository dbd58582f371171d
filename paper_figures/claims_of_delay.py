"""What trainings under delay say about published claims (R1 to R5, R7, R9, R14, R20), the deepest first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pandas as pd

from paper_figures import common, pipelines, statistics
from paper_figures.findings import About, Finding, joined, runs_of, saving, scaled, why_not
from paper_figures.pipelines import Line
from paper_figures.statistics import Estimate

ADAMW, ROTATION = "adamw", "rotation"
RIVALS = (ADAMW, "pipedream-lr", "nesterov")
"""Asynchronous baselines of the paper."""
SLOWDOWNS = {"R1": ADAMW, "R2": "pipedream-lr", "R3": ROTATION}
VARIANTS = {"R4a": "uni-2nd", "R4b": "bi-1st", "R4c": "uni-1st", "R20a": "k10"}
"""Variants of rotation whose iterations are compared with those of the first line of the ablation."""
PLAIN = "bi-2nd"
NO_STASH = "-no-stash"
STAGES = 8
"""Of claim R14."""


def rotation(frame: pd.DataFrame) -> list[Finding]:
    """Return the findings on R1, R2, R3 (slowdown over one stage) and R5a (iterations saved against the best rival)."""
    found = [finding for group in _groups(frame) for finding in _of_group(group)]
    return found or [About("measured", "").missing(c, "no run on this tier") for c in (*SLOWDOWNS, "R5a")]


def _of_group(group: list[Line]) -> Iterator[Finding]:
    for claim, system in SLOWDOWNS.items():
        lines = _at(group, (system, _deepest(group)), (system, 1))
        about = _about(group, lines, f"P = {_deepest(group)} over P = 1")
        ratio = _quotient(group, *lines)
        if not ratio.n:
            yield about.missing(claim, _why(group, (system, _deepest(group)), (system, 1)))
            continue
        yield about.found(claim, "value", ratio, "times", _target_text(group))
        yield _against_adamw(group, about) if claim == "R3" else about.found(claim, "effect", ratio, "times")
    yield from _saved(group)


def _against_adamw(group: list[Line], about: About) -> Finding:
    """Return AdamW's slowdown over rotation's, paired by seed: above 1, rotation suffers less from delay."""
    asked = ((ADAMW, _deepest(group)), (ADAMW, 1), (ROTATION, _deepest(group)), (ROTATION, 1))
    lines = _at(group, *asked)
    if len(lines) < 4:
        return replace(about.missing("R3", _why(group, *asked)), part="effect")
    slow, alone, ours, ours_alone = (line.iterations_if_all(pipelines.common_target(group)) for line in lines)
    seeds = sorted(slow.keys() & alone.keys() & ours.keys() & ours_alone.keys())
    top, bottom = [slow[s] / alone[s] for s in seeds], [ours[s] / ours_alone[s] for s in seeds]
    if not seeds:
        return replace(about.missing("R3", _why(group, *asked)), part="effect")
    text = "effect: AdamW's slowdown over rotation's"
    return about.found("R3", "effect", statistics.paired_quotient(top, bottom).estimate, "times", text)


def _saved(group: list[Line]) -> Iterator[Finding]:
    deepest, target = _deepest(group), pipelines.common_target(group)
    ours = pipelines.find(group, ROTATION, deepest)
    rivals = _at(group, *((system, deepest) for system in RIVALS))
    means = {line.system: statistics.mean(list(line.iterations_if_all(target).values())) for line in rivals}
    reached = [line for line in rivals if means[line.system].n]
    about = _about(group, [*reached, *([ours] if ours else [])], f"P = {deepest}")
    if ours is None or not reached:
        yield about.missing("R5a", _why(group, (ROTATION, deepest), *((r, deepest) for r in RIVALS)))
        return
    best = min(reached, key=lambda line: means[line.system].value)
    ratio = _quotient(group, ours, best)
    if not ratio.n:
        yield about.missing("R5a", _why(group, (ROTATION, deepest), (best.system, deepest)))
        return
    text = f"best of {joined([line.name for line in reached])}: {best.name}; {_target_text(group)}"
    yield about.found("R5a", "value", saving(ratio), "%", text)
    yield about.found("R5a", "effect", _inverse(ratio), "times")


def staleness(frame: pd.DataFrame) -> list[Finding]:
    """Return the findings on R1 and R14b: slowdown of AdamW, at the largest number of stages and at 8."""
    found = []
    for group in _groups(frame):
        for claim, stages in (("R1", _deepest(group)), ("R14b", STAGES)):
            lines = _at(group, (ADAMW, stages), (ADAMW, 1))
            about = _about(group, lines, f"P = {stages} over P = 1")
            ratio = _quotient(group, *lines)
            if not ratio.n:
                found.append(about.missing(claim, _why(group, (ADAMW, stages), (ADAMW, 1))))
                continue
            value, unit = (ratio, "times") if claim == "R1" else (scaled(_more(ratio), 100), "%")
            text = _target_text(group) + ("" if claim == "R1" else "; iterations, not hours")
            found += [about.found(claim, "value", value, unit, text), about.found(claim, "effect", ratio, "times")]
    return found or [About("measured", "").missing(c, "no run on this tier") for c in ("R1", "R14b")]


def sweep(frame: pd.DataFrame) -> list[Finding]:
    """Return the finding on R14a: AdamW's best learning rate at 8 stages over that at one, by seed."""
    found = pipelines.lines(frame)
    best = {
        stages: _best_rates([line for line in found if line.system == ADAMW and line.stages == stages])
        for stages in (1, STAGES)
    }
    lines = [line for line in found if line.system == ADAMW and line.stages in best]
    about = _about(found, lines, f"P = {STAGES} over P = 1")
    ratio = statistics.paired_quotient(*pipelines.pairs(best[STAGES], best[1])).estimate
    if not ratio.n:
        return [about.missing("R14a", why_not(_rows(lines), f"AdamW at P = 1 and P = {STAGES}"))]
    text = "the best of the learning rates that were tried, by seed"
    return [
        about.found("R14a", "value", ratio, "times", text),
        about.found("R14a", "effect", _inverse(ratio), "times"),
    ]


def _best_rates(lines: Sequence[Line]) -> dict[int, float]:
    finals: dict[int, dict[float, float]] = {}
    for line in lines:
        for seed, loss in line.finals.items():
            finals.setdefault(seed, {})[line.lr] = loss
    return {seed: min(by_rate, key=lambda lr: by_rate[lr]) for seed, by_rate in finals.items()}


def stage_aware(frame: pd.DataFrame) -> list[Finding]:
    """Return the findings on R7a (stage-aware against uniform refreshes) and R7b (reversed against uniform)."""
    found = []
    for group in _groups(frame):
        deepest = _deepest(group)
        for claim, system in (("R7a", "stage-aware"), ("R7b", "reversed")):
            lines = _at(group, (system, deepest), ("uniform", deepest))
            about, ratio = _about(group, lines, f"P = {deepest}"), _quotient(group, *lines)
            if not ratio.n:
                found.append(about.missing(claim, _why(group, (system, deepest), ("uniform", deepest))))
            elif claim == "R7a":
                found.append(about.found(claim, "value", saving(ratio), "%", _target_text(group)))
                found.append(about.found(claim, "effect", _inverse(ratio), "times"))
            else:
                found.append(about.found(claim, "effect", ratio, "times uniform's", _target_text(group)))
    return found or [About("measured", "").missing(c, "no run on this tier") for c in ("R7a", "R7b")]


def rotation_ablation(frame: pd.DataFrame) -> list[Finding]:
    """Return the findings on R4a to R4c and R20a: iterations over those of the plain rotation at the same P."""
    found = []
    for group in _groups(frame):
        deepest = _deepest(group)
        for claim, system in VARIANTS.items():
            lines = _at(group, (system, deepest), (PLAIN, deepest))
            about, ratio = _about(group, lines, f"P = {deepest}"), _quotient(group, *lines)
            if not ratio.n:
                found.append(about.missing(claim, _why(group, (system, deepest), (PLAIN, deepest))))
                continue
            text = "iterations over those of bilateral/2nd with K = 1 at the same P"
            unit = "times K = 1's" if claim == "R20a" else "times bi/2nd's"
            found.append(about.found(claim, "effect", ratio, unit, text))
    return found or [About("measured", "").missing(c, "no run on this tier") for c in VARIANTS]


def no_stash(frame: pd.DataFrame) -> list[Finding]:
    """Return the finding on R9: perplexity without over with stash, of rotation and of the least hurt baseline."""
    groups = _groups(frame)
    found = [finding for group in groups for finding in _without_stash(group)]
    return found or [About("measured", "").missing("R9", "no run on this tier")]


def _without_stash(group: list[Line]) -> Iterator[Finding]:
    deepest = _deepest(group)
    losses: dict[str, dict[int, float]] = {}
    lines, words, collapsed = [], [], []
    for system in (ROTATION, *RIVALS):
        both = _at(group, (system + NO_STASH, deepest), (system, deepest))
        lines += both
        if len(both) < 2:
            continue
        without, stashed = (line.finals for line in both)
        losses[system] = {s: without[s] - stashed[s] for s in without.keys() & stashed.keys()}
        if not losses[system]:
            collapsed += [both[1].name] if both[0].status == "diverged" else []
            del losses[system]
        else:
            words.append(f"{both[1].name.partition(',')[0]} {_factor(list(losses[system].values())).value:.2f}")
    about = _about(group, lines, f"P = {deepest}")
    rivals = [system for system in RIVALS if system in losses]
    if ROTATION not in losses or not rivals:
        yield about.missing(
            "R9", _why(group, *((s + end, deepest) for s in (ROTATION, *RIVALS) for end in ("", NO_STASH)))
        )
        return
    least = min(rivals, key=lambda s: statistics.mean(list(losses[s].values())).value)
    pair = pipelines.pairs(losses[least], losses[ROTATION])
    text = "perplexity without over with stash: " + ", ".join(words)
    text += f"; diverged without: {', '.join(collapsed)}" if collapsed else ""
    yield about.found("R9", "baseline", _factor(list(losses[least].values())), "times")
    yield about.found("R9", "value", _factor(list(losses[ROTATION].values())), "times", text)
    difference = statistics.paired_difference(*pair).estimate
    yield about.found("R9", "effect", _exponential(difference), "times", "effect: least hurt baseline over rotation")


def _factor(differences: list[float]) -> Estimate:
    return _exponential(statistics.mean(differences))


def _exponential(found: Estimate) -> Estimate:
    return Estimate(*(math.exp(min(x, 700.0)) for x in (found.value, found.low, found.high)), n=found.n)


def _more(ratio: Estimate) -> Estimate:
    return Estimate(ratio.value - 1, ratio.low - 1, ratio.high - 1, ratio.n)


def _inverse(ratio: Estimate) -> Estimate:
    return Estimate(1 / ratio.value, 1 / ratio.high, 1 / ratio.low, ratio.n)


def _groups(frame: pd.DataFrame) -> list[list[Line]]:
    groups = pipelines.depths(pipelines.lines(frame))
    return sorted(groups, key=_deepest, reverse=True)


def _deepest(group: Sequence[Line]) -> int:
    return max((line.stages for line in group), default=0)


def _at(group: Sequence[Line], *places: tuple[str, int]) -> list[Line]:
    found = (pipelines.find(group, system, stages) for system, stages in places)
    return [line for line in found if line is not None]


def _quotient(group: Sequence[Line], *lines: Line) -> Estimate:
    """Return iterations of the first line over those of the second; nothing unless both are there."""
    if len(lines) != 2:
        return statistics.NOTHING
    return pipelines.quotient(lines[0], lines[1], pipelines.common_target(group)).estimate


def _about(group: Sequence[Line], lines: Sequence[Line], place: str) -> About:
    frames = [line.rows for line in lines]
    of = frames or [line.rows for line in group]
    models = joined([m for rows in of for (m,) in common.distinct(rows, "model")])
    depth = next((f", {line.layers} layers" for line in group if line.layers), "")
    return About("measured", f"{models}{depth}, {place}" if models else place, runs_of(*frames))


def _rows(lines: Sequence[Line]) -> pd.DataFrame:
    return pd.concat([line.rows for line in lines]) if lines else pd.DataFrame({"status": []})


def _why(group: Sequence[Line], *places: tuple[str, int]) -> str:
    """Return why runs at ``places`` give no number."""
    for system, stages in places:
        line = pipelines.find(group, system, stages)
        if line is None:
            return f"{system} is not run at P = {stages} on this tier"
        if line.status != common.DONE:
            return why_not(line.rows, f"{line.name}, P = {stages}")
    return f"not every seed reaches the target of {pipelines.common_target(group):.2f}"


def _target_text(group: Sequence[Line]) -> str:
    return f"to a held-out loss of {pipelines.common_target(group):.2f}"
