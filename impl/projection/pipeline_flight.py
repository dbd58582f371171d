"""What the stages of a pipeline have in flight: graphs, inputs and versions of weights, as the runtime keeps them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch

from impl.optimizers.base import HyperParameters
from impl.rotation.method import Method
from impl.rotation.rules import build
from impl.rotation.schedule import Mode, Schedule, peak_versions
from impl.rotation.stage_parts import StageOptions, kept_graphs
from impl.rotation.stash import Stash

PipelineRecompute = Literal["none", "stage", "selective-attention"]


@dataclass(frozen=True)
class PipelineFlight:
    """What one stage keeps over a schedule.

    kept: microbatches whose graph lives from forward to backward.
    copied: indices of the actions that copy the newest weights into the stash.
    stashed: indices of those that run on a copy.
    versions: most versions of the weights that must exist at one time, the newest included.
    buffers: versions that the stash has memory for in the end, the newest among them where it was copied early.
    peaks: microbatches in flight at the fullest moments, ``(with their graph, with their input)``.
    """

    kept: frozenset[int]
    copied: frozenset[int]
    stashed: frozenset[int]
    versions: int
    buffers: int
    peaks: frozenset[tuple[int, int]]


@lru_cache(maxsize=64)  # projections of many methods share a few schedules
def in_flight(
    name: str, mode: Mode, stages: int, per_update: int, segments: tuple[int, ...], recompute: PipelineRecompute
) -> tuple[PipelineFlight, ...]:
    """Return what every stage keeps under the schedule that :func:`impl.rotation.rules.build` makes of these.

    For methods that change neither weights nor gradients by themselves.
    """
    schedule = build(name, stages, segments, mode=None if mode == "sync" else mode, per_update=per_update)
    versions = peak_versions(schedule)
    return tuple(_flight(schedule, stage, recompute, versions[stage]) for stage in range(stages))


def _flight(schedule: Schedule, stage: int, recompute: PipelineRecompute, versions: int) -> PipelineFlight:
    plain = Method(HyperParameters())
    kept, outlives = kept_graphs(schedule, stage, plain, StageOptions(recompute=recompute))
    actions = schedule.actions[stage]
    stash = Stash(actions, (torch.zeros(1, dtype=torch.uint8),))  # one byte a version, to count them
    copied, stashed, held = set[int](), set[int](), 0
    for index, action in enumerate(actions):
        if action.kind == "U":
            stash.before_update()
        elif action.kind == "F" and action.number in outlives and action.version == stash.newest:
            stash.copy_newest()
        versions_held = stash.versions
        if len(versions_held) > held:
            copied.add(index)
        if action.kind == "U":
            stash.after_update()
        else:
            if action.version in versions_held:
                stashed.add(index)
            stash.used(action.version)
        held = len(stash.versions)
    peaks = _peaks(schedule, stage, kept)
    return PipelineFlight(frozenset(kept), frozenset(copied), frozenset(stashed), versions, stash.bytes(), peaks)


def _peaks(schedule: Schedule, stage: int, kept: set[int]) -> frozenset[tuple[int, int]]:
    """Return the counts of microbatches in flight at all moments at which none other has as many of both."""
    graphs, inputs, found = 0, 0, set[tuple[int, int]]()
    for action in schedule.actions[stage]:
        graph = action.number in kept
        if action.kind == "F":
            graphs, inputs = graphs + graph, inputs + (not graph)
            found.add((graphs, inputs))
        elif action.kind == "B":
            found.add((graphs, inputs) if graph else (graphs + 1, inputs - 1))  # the forward runs again
            graphs, inputs = graphs - graph, inputs - (not graph)
    return frozenset(a for a in found if not any(b != a and b[0] >= a[0] and b[1] >= a[1] for b in found))
