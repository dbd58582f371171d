"""What one training step costs on a machine: the timeline of a plan, its memory, and the numbers read off them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from impl.canzona.plan import Plan
from impl.models.catalogue import ModelConfig
from impl.optimizers.base import Optimizer
from impl.projection import memory
from impl.projection.hardware import Hardware
from impl.projection.machine import Machine
from impl.projection.memory import Memory
from impl.projection.steady import Step
from impl.projection.timeline import COMPUTE, Op, Timeline, slowest, sources
from impl.projection.uncertain import Samples
from impl.projection.workload import TpUpdate, Uneven, Workload, blocks

__all__ = ["Projection", "TpUpdate", "Uneven", "Workload", "model_flops", "peak_flops", "project"]

FORWARD_BACKWARD = ("forward", "backward", "grad_reduce")
OPTIMIZER = ("optimizer_step", "tp_exchange")
NAMES = ("iteration", "forward_backward", "optimizer", "exposed_communication")
"""Times that a projection has evidence for, beside its phases."""


@dataclass(frozen=True)
class Projection:
    """One step of ``work`` under a plan, in its steady state.  Times are samples ``[1 + DRAWS]`` in seconds.

    misfit: the line that says by how much the memory is too small; None if it fits or is not known.
    flops: model FLOPs of the step.  devices: how many share them.  peak: bf16 FLOP/s of one, None if not known.
    once: the waits for parameters that are gathered in one blocking call.
    """

    timeline: Timeline
    memory: Memory
    misfit: str | None
    work: Workload
    flops: float
    devices: int
    peak: float | None
    once: tuple[Op, ...]

    @property
    def iteration(self) -> Samples:
        """From one global norm to the next."""
        return self.timeline.end()

    @property
    def forward_backward(self) -> Samples:
        """Forwards, backwards and waiting for reduced gradients, of the slowest rank."""
        return slowest(self._of(*FORWARD_BACKWARD))

    @property
    def optimizer_step(self) -> Samples:
        """The optimizer step with its exchange over TP, of the slowest rank; without any gather of parameters."""
        return slowest(self._of(*OPTIMIZER))

    @property
    def parameter_gather(self) -> Samples:
        """One blocking gather of all parameters where the plan has it; waiting for slower owners is not part of it."""
        return slowest(list(self.once))

    @property
    def optimizer(self) -> Samples:
        """:attr:`optimizer_step`, and the blocking gather as far as it follows: published steps contain it."""
        return slowest([*self._of(*OPTIMIZER), *self.once])

    @property
    def exposed_communication(self) -> Samples:
        """Communication that a compute stream waits for or blocks on: activations, gradients, parameters.

        Of the rank that has most; without :attr:`waiting_for_ranks`.
        """
        return slowest(self._exposed)

    @property
    def waiting_for_ranks(self) -> Samples:
        """How long the rank with least to do waits for others before a collective can begin: imbalance."""
        return slowest([op for op in self._compute if op.idle])

    @property
    def rest(self) -> Samples:
        """The iteration less :attr:`optimizer`: what the published times of forward and backward are."""
        return self.iteration - self.optimizer

    @property
    def phases(self) -> dict[str, Samples]:
        """The slowest rank's time in each phase of the engine's clock."""
        names = dict.fromkeys(op.phase for op in self._compute)
        return {name: slowest(self._of(name)) for name in names}

    @property
    def tokens_per_s(self) -> Samples:
        """Tokens of all ranks a second."""
        return self.work.tokens / self.iteration

    @property
    def mfu(self) -> Samples | None:
        """Model FLOPs (:func:`model_flops`) over bf16 peak FLOPs; None where no peak is known."""
        return None if self.peak is None else self.flops / (self.iteration * self.devices * self.peak)

    def evidence(self, name: str) -> dict[str, float]:
        """Return the share of time by source of ``name``, one of :data:`NAMES` or a phase, of the slowest rank."""
        parts: dict[str, Callable[[], Sequence[Op]]] = {
            "iteration": lambda: [op for op in self._compute if not op.idle],  # of the rank that has most to do
            "forward_backward": lambda: self._of(*FORWARD_BACKWARD),
            "optimizer": lambda: [*self._of(*OPTIMIZER), *self.once],
            "exposed_communication": lambda: self._exposed,
        }
        ops = parts[name]() if name in parts else self._of(name)
        return sources(ops)

    @cached_property
    def _compute(self) -> list[Op]:
        return [op for op in self.timeline.ops if op.stream == COMPUTE]

    @property
    def _exposed(self) -> list[Op]:
        return [op for op in self._compute if (op.waiting and not op.idle) or op.dimension]

    def _of(self, *phases: str) -> list[Op]:
        return [op for op in self._compute if op.phase in phases]


def project(
    plan: Plan,
    costs: Sequence[Optimizer],
    config: ModelConfig,
    work: Workload,
    machine: Machine,
    *,
    tp_update: TpUpdate = "exchange",
    uneven: Uneven = "rooted",
) -> Projection:
    """Return one step of ``plan`` on ``machine``.

    costs: the optimizer of each parameter of the plan (:attr:`impl.harness.planning.Planned.costs`).
    tp_update: see :class:`impl.projection.updates.Updates`.
    uneven: collectives over unequal segments are ``rooted`` calls, one a segment, or one native call over segments
        ``padded`` to the largest.

    Raises :class:`ConfigError` if the batch does not divide, ``tp_update`` does not suit the optimizer, or the machine
    does not know a kernel.
    """
    step = Step(plan, costs, config, work, machine, tp_update, uneven)
    timeline = step.run()
    need = memory.needed(plan, costs, config, work, tp_update=tp_update, uneven=uneven)
    return Projection(
        timeline=timeline,
        memory=need,
        misfit=memory.fits(need, machine),
        work=work,
        flops=model_flops(config, work),
        devices=plan.dp * plan.tp,
        peak=peak_flops(machine),
        once=tuple(step.once),
    )


def model_flops(config: ModelConfig, work: Workload) -> float:
    """Return the FLOPs of a step without recomputation: 6 a token and parameter, and causal attention.

    The input embedding is looked up, not multiplied, and does not count; the output matrix does.
    """
    whole = work.model_copy(update={"microbatches": 1})
    return sum(3.0 * (block.product_flops + block.attention_flops) for block in blocks(config, whole, 1, 1))


def peak_flops(machine: Machine) -> float | None:
    """Return the bf16 FLOP/s of one device on its data sheet, or its fallback's; None for a machine without one."""
    described = getattr(machine, "hardware", None) or getattr(getattr(machine, "fallback", None), "hardware", None)
    return described.spec.device.peak_flops.get("bfloat16") if isinstance(described, Hardware) else None
