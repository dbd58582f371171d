"""What a pipeline run's settings say before it runs: idle time by the schedule, bytes of stashed weights and state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from impl.harness.pipeline_run import prepare
from impl.harness.pipeline_spec import PipelineSpec
from impl.optimizers.routing import is_matrix
from impl.rotation.gantt import bubble, timeline
from impl.rotation.schedule import peak_versions

WEIGHT_BYTES = 4
"""Weights and stashed versions are fp32."""


@dataclass(frozen=True)
class Planned:
    """One planned number; stage is None for one of the whole pipeline."""

    quantity: str
    stage: int | None
    value: float
    unit: str


def planned(spec: PipelineSpec) -> Iterator[Planned]:
    """Yield the bubble share of the run, and per stage the bytes of weights, stash and optimizer state.

    ``bubble``: share of all stages' time, first to last action, in which they wait, if a backward takes twice and an
    update half of a forward's time and messages none.  ``stash_bytes``: of the versions kept beside the newest.
    ``state_bytes``: of the optimizers' state, the fp32 master of the weights not counted.
    """
    setup = prepare(spec)
    yield Planned("bubble", None, bubble(timeline(setup.schedule)), "share")
    for context, part, versions in zip(setup.contexts, setup.parts, peak_versions(setup.schedule), strict=True):
        parameters = setup.model.parameters(1, part)
        weights = WEIGHT_BYTES * sum(p.numel for p in parameters)
        matrix, elementwise = setup.method.matrix_optimizer(context), setup.method.elementwise_optimizer(context)
        state = sum((matrix if is_matrix(p) else elementwise).state_bytes(p.shape) for p in parameters)
        yield Planned("weight_bytes", context.stage, weights, "B")
        yield Planned("stash_bytes", context.stage, (versions - 1) * weights, "B")
        yield Planned("state_bytes", context.stage, state, "B")
