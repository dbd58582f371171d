"""Bytes that the fullest process of a job holds at its worst moment, planned from shapes before anything is started.

What the planners leave out is left out here: temporaries of an optimizer, and what an allocator loses to fragments
(:mod:`impl.projection.memory`, :mod:`impl.projection.pipeline_memory`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from impl.errors import ConfigError
from impl.harness.job_plans import PipelinePlans, TrainingPlans, like_pipedream
from impl.harness.pipeline_spec import PipelineSpec
from impl.harness.spec import RunSpec
from impl.projection import memory


@dataclass(frozen=True)
class Need:
    """Planned bytes of one process.

    where: the process that needs most.  parts: bytes by name, which add up to ``total``.
    note: what else should be known about the number.
    """

    total: int
    where: str
    parts: dict[str, int]
    note: str = ""


def of_training(systems: Sequence[tuple[str, RunSpec]], plans: TrainingPlans) -> Need:
    """Return what a rank needs on which all ``systems`` (id and settings, on one mesh) live side by side.

    Each has its own parameters, gradients, masters and state all the time; only one of them works at a time, so that
    the largest moment of a step counts once.  Raises :class:`ConfigError` for settings that cannot work.
    """
    held, moments = {}, {}
    for name, spec in systems:
        parts = plans.parts(spec)
        held[name] = np.sum([parts[part] for part in memory.STATIC], axis=0)
        for together in memory.MOMENTS:
            moments[name, " + ".join(together)] = np.sum([parts[part] for part in together], axis=0)
    total = np.sum(list(held.values()), axis=0) + np.max(list(moments.values()), axis=0)
    dp, tp = (int(i) for i in np.unravel_index(int(total.argmax()), total.shape))
    (worst, moment), most = max(((key, value[dp, tp]) for key, value in moments.items()), key=lambda item: item[1])
    found = {f"{name} held": round(value[dp, tp]) for name, value in held.items()}
    found[f"{worst} {moment}"] = round(most)
    return Need(sum(found.values()), f"rank dp {dp} tp {tp}", found)


def of_pipeline(spec: PipelineSpec, plans: PipelinePlans) -> Need:
    """Return what the fullest stage of a pipeline needs; of a simulation all stages, which are in one process.

    Raises :class:`ConfigError` for settings that cannot work.
    """
    modelled, note = _modelled(spec, plans)
    stages = plans.stages(modelled)
    if spec.runtime == "processes":
        fullest = max(stages, key=lambda stage: stage.total)
        parts = {name: round(value) for name, value in fullest.parts().items()}
        return Need(sum(parts.values()), f"stage {fullest.stage}", parts, note)
    parts = {f"stage {stage.stage} held": round(stage.total - stage.working) for stage in stages}
    parts["working"] = round(max(stage.working for stage in stages))
    return Need(sum(parts.values()), "the process of all stages", parts, note)


def stored(spec: PipelineSpec, plans: PipelinePlans) -> int:
    """Return the bytes of one checkpoint of a pipeline: weights, state and stash of all stages, and their inputs."""
    modelled, _ = _modelled(spec, plans)
    parts = ("weights", "masters", "state", "stash", "early", "host")
    kept = round(sum(getattr(stage, part) for stage in plans.stages(modelled) for part in parts))
    return spec.replicas * (kept + plans.inputs(modelled))


def _modelled(spec: PipelineSpec, plans: PipelinePlans) -> tuple[PipelineSpec, str]:
    """Return ``spec``, or PipeDream in its place if the method itself is not modelled, and a note that says so."""
    try:
        plans.stages(spec)
    except ConfigError:
        like = like_pipedream(spec)
        return like, f"as PipeDream in mode {like.mode}: what {spec.method} keeps itself is not counted"
    return spec, ""
