"""Bytes that every stage of a pipeline needs, part by part, from shapes and the schedule alone.

Weights, stash and optimizer state are exact; activations are counted tensor by tensor
(:mod:`impl.projection.activations`); ``working`` memory is an estimate.  What an allocator loses to fragments and
what a driver takes is not counted; hardware files leave the latter out of a device's memory.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from impl.canzona.strategies import DEFAULT_CAPACITY_BYTES
from impl.harness.pipeline_run import PipelineSetup
from impl.harness.pipeline_spec import PipelineSpec
from impl.models.parameters import ParamSpec
from impl.optimizers.routing import is_matrix
from impl.projection import pipeline_costs
from impl.projection.activations import activation_bytes, boundary_bytes, embedding_bytes, head_bytes
from impl.projection.machine import BYTES
from impl.projection.pipeline_costs import Full, full

ELEMENTWISE_RUN = 40_000_000
"""Elements after which a bucket closes: what an elementwise optimizer updates at once."""
COPIES = 4
"""fp32 copies of what is updated at once: gradient, momentum, second moment and direction of a batch of matrices."""


@dataclass(frozen=True)
class StageMemory:
    """Bytes of one stage.

    weights: that forward and backward read.  masters: fp32 ones where the weights are not fp32.  gradients: fp32 sums.
    stash: versions kept beside the newest; early: one more, where the newest is copied before a forward whose graph
        will still be in use after the next update (without ``recompute: stage``).
    state: of the optimizers.  activations: the most that is kept of microbatches between forward and backward.
    update, backward: the most that an update, or the end of a backward, needs for itself; not at one time.
    host: of the stash, in host memory; not part of ``total``.
    """

    stage: int
    weights: int
    masters: int
    gradients: int
    stash: int
    early: int
    state: int
    activations: float
    update: float
    backward: float
    host: int = 0

    @property
    def working(self) -> float:
        """The larger of what an update and what a backward needs for itself."""
        return max(self.update, self.backward)

    @property
    def total(self) -> float:
        """Bytes on the device."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, float]:
        """Return the parts of ``total`` by name."""
        names = ("weights", "masters", "gradients", "stash", "early", "state", "activations", "working")
        return {name: float(getattr(self, name)) for name in names}


def memory(
    spec: PipelineSpec,
    dtype: str = "float32",
    *,
    capacity_bytes: int = DEFAULT_CAPACITY_BYTES,
    known: Full | None = None,
) -> tuple[StageMemory, ...]:
    """Return the bytes of every stage of the pipeline of ``spec``, once it is full.

    dtype: of weights, activations and stash; gradients, masters and state are fp32.  All microbatches count as the
        largest.
    capacity_bytes: of a micro-group, whose matrices of equal shapes are updated as one batch; of one matrix at least.
    known: what :func:`impl.projection.pipeline_costs.full` returns for a spec that differs in ``batch`` at most.

    Raises :class:`ConfigError` for settings that cannot work or are not modelled.
    """
    found = known or full(spec, dtype)
    return tuple(_stage(spec, found, stage, dtype, capacity_bytes) for stage in range(spec.stages))


def misfit(stages: tuple[StageMemory, ...], limit: int | None) -> str | None:
    """Return why the fullest stage does not fit into ``limit`` bytes, None if it does or the limit is not known."""
    fullest = max(stages, key=lambda stage: stage.total)
    if limit is None or fullest.total <= limit:
        return None
    return f"needs {fullest.total / 1e9:.1f} GB on stage {fullest.stage}, the card has {limit / 1e9:.1f} GB"


def largest_rows(
    spec: PipelineSpec, dtype: str, limits: Sequence[int], *, capacity_bytes: int = DEFAULT_CAPACITY_BYTES
) -> list[int]:
    """Return for each of ``limits`` the most sequences of a microbatch with which every stage fits, 0 for none.

    Activations, and all of a backward's working memory but the largest weight's gradient, are proportional to the
    sequences; everything else does not depend on them.
    """
    found = full(spec.model_copy(update={"batch": max(spec.batch, spec.microbatches or spec.stages)}), dtype)
    one, two = (
        memory(
            spec.model_copy(update={"batch": rows * found.setup.microbatches}),
            dtype,
            capacity_bytes=capacity_bytes,
            known=found,
        )
        for rows in (1, 2)
    )
    return [min(_most_rows(a, b, limit) for a, b in zip(one, two, strict=True)) for limit in limits]


def _most_rows(one: StageMemory, two: StageMemory, limit: int) -> int:
    """Return the most sequences with which a stage fits that needs ``one`` with one and ``two`` with two of them."""
    fixed = one.total - one.activations - one.working
    each, grown = two.activations - one.activations, two.backward - one.backward
    during_update = (limit - fixed - one.update) / each
    during_backward = (limit - fixed - (one.backward - grown)) / (each + grown)
    return max(0, math.floor(min(during_update, during_backward)))


def _stage(spec: PipelineSpec, found: Full, stage: int, dtype: str, capacity: int) -> StageMemory:
    setup, flight = found.setup, found.flights[stage]
    parameters = setup.model.parameters(1, setup.parts[stage])
    elements, size = sum(p.numel for p in parameters), BYTES[dtype]
    context = setup.contexts[stage]
    matrix, elementwise = setup.method.matrix_optimizer(context), setup.method.elementwise_optimizer(context)
    state = sum((matrix if is_matrix(p) else elementwise).state_bytes(p.shape) for p in parameters)
    older = flight.versions - 1
    stash, early = older * size * elements, max(flight.buffers - older, 0) * size * elements
    loaded = size * elements if spec.stash_on_cpu and stash else 0  # a version on its way through
    update = _update_bytes(parameters, {True: matrix.atomic, False: elementwise.atomic}, capacity)
    return StageMemory(
        stage=stage,
        weights=size * elements,
        masters=0 if dtype == "float32" else 4 * elements,
        gradients=4 * elements,
        stash=loaded if spec.stash_on_cpu else stash,
        early=0 if spec.stash_on_cpu else early,
        state=state,
        activations=_activations(spec, found, stage, size),
        update=update,
        backward=_backward_bytes(spec, setup, stage, size),
        host=stash + early if spec.stash_on_cpu else 0,
    )


def _activations(spec: PipelineSpec, found: Full, stage: int, size: int) -> float:
    """Return the most bytes kept at one time: of whole graphs, or of a stage's input where the forward runs again."""
    part, arch = found.setup.parts[stage], found.setup.model.arch
    tokens = max(pipeline_costs.rows_of(spec, found.setup)) * spec.sequence
    recompute = "selective-attention" if spec.recompute == "selective-attention" else "none"
    ids = embedding_bytes(tokens) if part.embedding else 0.0
    whole = part.layers * activation_bytes(arch, tokens, size, 1, recompute, False) + ids
    if part.head:
        whole += head_bytes(arch, tokens, size, 1).kept
    given = ids if part.embedding else boundary_bytes(arch, tokens, size)
    whole = max(whole, given)  # the first layer's graph holds the stage's input; a stage without layers has just that
    return max(graphs * whole + inputs * given for graphs, inputs in found.flights[stage].peaks)


def _backward_bytes(spec: PipelineSpec, setup: PipelineSetup, stage: int, size: int) -> float:
    """Return the largest weight's gradient before it is added up, the loss's gradient, and two messages."""
    part, arch = setup.parts[stage], setup.model.arch
    tokens = max(pipeline_costs.rows_of(spec, setup)) * spec.sequence
    largest = max((p.numel for p in setup.model.parameters(1, part)), default=0)
    head = head_bytes(arch, tokens, size, 1).working if part.head else 0.0
    return size * largest + head + 2 * boundary_bytes(arch, tokens, size)


def _update_bytes(parameters: tuple[ParamSpec, ...], atomic: dict[bool, bool], capacity: int) -> float:
    """Return what the update of the largest batch of equal matrices, or of the largest elementwise run, needs."""
    matrices = Counter(p.shape for p in parameters if atomic[is_matrix(p)])
    needs = [0.0]
    for (rows, columns), count in matrices.items():
        numel = rows * columns
        needs.append(4.0 * COPIES * numel * max(1, min(count, capacity // (4 * numel))))
    runs = [[p.numel for p in parameters if is_matrix(p) is kind and not atomic[kind]] for kind in (True, False)]
    for sizes in runs:
        if sizes:
            needs.append(8.0 * max(min(sum(sizes), ELEMENTWISE_RUN), *itertools.chain(sizes, [0])))
    return max(needs)
