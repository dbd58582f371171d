"""The distributed step: executes a plan on a DP x TP mesh, whichever strategy made it.

One step is ``begin_step()``, ``microbatch()`` for each microbatch, then ``step()``:

- gradients are summed per bucket *during* the last backward, in an order that is the same on every rank;
- the global norm takes one small reduction;
- every owner updates what it owns, with no DP communication; TP micro-groups gather, compute and scatter in a pipeline;
- updated parameters are gathered per bucket and awaited by the module that needs them first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from impl.canzona.buffers import FamilyBuffer, trainable
from impl.canzona.clock import Clock
from impl.canzona.collectives import (
    Communicator,
    Ledger,
    make_reduction,
    same_on_all_ranks,
    sum_in_order,
)
from impl.canzona.health import counters
from impl.canzona.mesh import Mesh
from impl.canzona.norm import clip_scale, global_norm, not_finite
from impl.canzona.plan import Plan
from impl.canzona.reducer import GradientReducer
from impl.canzona.synchronizer import ParameterSynchronizer
from impl.canzona.updater import Updater
from impl.optimizers.base import Optimizer, State


@dataclass(frozen=True)
class EngineOptions:
    """Settings of the step that a plan does not decide.

    reduction: ``native`` or ``rank-order`` (see :mod:`impl.canzona.collectives`).
    clip: limit of the global gradient norm over every trainable parameter, 0 for none.  The factor is applied to
        optimizers whose update depends on the gradient's scale.
    weight_decay: decoupled, ``p <- (1 - lr * weight_decay) p`` before the update, on every parameter.
    offload: keep the optimizer state in host memory between steps (:class:`impl.canzona.states.StateStore`).
    """

    reduction: Literal["native", "rank-order"] = "native"
    clip: float = 1.0
    weight_decay: float = 0.01
    offload: bool = False


@dataclass(frozen=True)
class StepInfo:
    """What a step reports, the same on every rank.

    grad_norm: global, before clipping.  clip_scale: the factor that clipping applied.
    not_finite: parameters with a gradient that is not finite.  If there are any the step was skipped: parameters, all
        optimizer state and the count of steps are what they were.
    """

    grad_norm: float
    clip_scale: float
    not_finite: tuple[str, ...] = ()

    @property
    def skipped(self) -> bool:
        """Whether nothing was updated."""
        return bool(self.not_finite)


class Engine:
    """Steps the parameters of ``model`` as ``plan`` says.

    Every rank of ``mesh`` makes one with the same plan and calls its methods in the same order.  A trainable parameter
    without a gradient counts as zero gradient: its momentum and weight decay go on, and no rank waits for another.
    Parameters are updated in place behind autograd's back: no graph may be kept from before a step to after it.

    model: this rank's TP shards; after construction its trainable parameters are views into flat buffers.
    optimizers: by the names that the plan's families carry.

    skips: steps skipped in a row, the last one included.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        optimizers: Mapping[str, Optimizer],
        mesh: Mesh,
        options: EngineOptions | None = None,
    ) -> None:
        self.plan, self.mesh, self.options = plan, mesh, options or EngineOptions()
        if (plan.dp, plan.tp) != (mesh.dp, mesh.tp):
            raise ValueError(f"the plan is for {plan.dp} x {plan.tp} ranks, the mesh is {mesh.dp} x {mesh.tp}")
        if not same_on_all_ranks(plan.digest, mesh.world_group, mesh.device):
            raise RuntimeError("the ranks made different plans: models or settings differ between them")
        self.clock, self.ledger = Clock(mesh.device), Ledger()
        self._dp = Communicator(mesh.dp_group, "dp", self.ledger)
        self._tp = Communicator(mesh.tp_group, "tp", self.ledger)
        self.world = Communicator(mesh.world_group, "world", self.ledger)
        modules = trainable(model, plan)
        self._buffers = [FamilyBuffer(plan, family, modules, mesh.dp_rank) for family in plan.families]
        rules = {family.name: optimizers[family.optimizer] for family in plan.families}
        decay, offload = self.options.weight_decay, self.options.offload
        self.updater = Updater(plan, mesh, self._buffers, rules, self._tp, weight_decay=decay, offload=offload)
        self.skips = 0
        self._reducer = GradientReducer(self._buffers, make_reduction(self.options.reduction, self._dp), mesh.dp)
        self._synchronizer = ParameterSynchronizer(model, self._buffers, self._dp, self.clock)

    @contextmanager
    def microbatch(self, *, last: bool) -> Iterator[None]:
        """Run one microbatch's ``backward`` in the body; with ``last`` the bucket reductions start inside it.

        The gradients of all microbatches of a step are summed, then averaged over DP ranks: scale the loss by the
        number of microbatches.
        """
        self._reducer.open(last=last)
        with self.clock("backward"):
            yield
            self._reducer.close()

    @torch.no_grad()
    def step(self, lr: float, adjust: Callable[[], None] | None = None, *, measure: bool = False) -> StepInfo:
        """Finish the reductions, update what this rank owns and start to gather the new parameters.

        With a gradient that is not finite nothing is updated (:class:`StepInfo`).

        adjust: called when the gradients are final and before their norm is taken; may change :attr:`gradients`.
        measure: also let the optimizers measure their health, for :meth:`worst_health`.
        """
        with self.clock("grad_reduce"):
            self._reducer.wait()
            self._sum_partial_gradients()
        if adjust is not None:
            adjust()
        with self.clock("grad_norm"):
            norm = global_norm(self._buffers, self.plan, self.mesh, self.world)
            bad = () if math.isfinite(norm) else not_finite(self._buffers, self.plan, self.mesh, self.world)
        self.updater.health.start(measure=measure)
        self.skips = self.skips + 1 if bad else 0
        if bad:
            return StepInfo(norm, 1.0, bad)
        scale = clip_scale(norm, self.options.clip)
        self.updater.steps += 1
        with self.clock("param_sync"):
            self._synchronizer.wait()  # buckets that no forward needed are still on their way
        with self.clock("optimizer_step"):
            self._update(lr, scale)
        with self.clock("param_sync"):
            self._publish()
        return StepInfo(norm, scale)

    def synchronize(self) -> None:
        """Wait for the gathered parameters; call it before reading them outside a forward."""
        self._synchronizer.wait()

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """The newest parameters, a flat tensor per family; waits for none in flight."""
        return tuple(buffer.parameters for buffer in self._buffers)

    @property
    def gradients(self) -> tuple[Tensor, ...]:
        """The fp32 gradients, a flat tensor per family in the layout of :attr:`weights`."""
        return tuple(buffer.gradients for buffer in self._buffers)

    def bind(self, weights: Sequence[Tensor]) -> None:
        """Let the module compute with ``weights``, another version in the layout of :attr:`weights` (weight stash)."""
        for buffer, flat in zip(self._buffers, weights, strict=True):
            buffer.bind(flat)

    def begin_step(self) -> None:
        """Start a step's account: reset the clock and the ledger."""
        self.clock.reset()
        self.ledger.reset()

    def _update(self, lr: float, scale: float) -> None:
        """Update what this rank owns."""
        self.updater.update(lr, scale)

    def _publish(self) -> None:
        """Start to bring the new parameters to the other DP ranks."""
        self._synchronizer.start()

    def _sum_partial_gradients(self) -> None:
        """Sum the gradients that cover only one TP rank's heads (q/k-norm), in rank order."""
        if self.mesh.tp == 1:
            return
        parts = [
            buffer.gradient(piece.start, piece.end)
            for buffer in self._buffers
            for piece in buffer.family.pieces(self.mesh.dp_rank)
            if self.plan.parameters[piece.parameter].partial_over_tp
        ]
        if not parts:
            return
        flat = torch.cat(parts)
        size = len(flat)
        rows = flat.new_empty(self.mesh.tp * size)
        rows[self.mesh.tp_rank * size : (self.mesh.tp_rank + 1) * size] = flat
        cuts = [rank * size for rank in range(self.mesh.tp + 1)]
        self._tp.all_gather(rows, cuts, "grad_reduce").wait()
        total = sum_in_order(rows.view(self.mesh.tp, -1))
        for part, summed in zip(parts, total.split([len(p) for p in parts]), strict=True):
            part.copy_(summed)

    def state_bytes(self) -> dict[str, int]:
        """Return the bytes of fp32 masters and of optimizer state on this rank."""
        return {"master": sum(buffer.master_bytes() for buffer in self._buffers), "state": self.updater.states.bytes()}

    @property
    def buffers(self) -> tuple[FamilyBuffer, ...]:
        """The flat buffers, one per family of the plan."""
        return tuple(self._buffers)

    @property
    def states(self) -> Mapping[str, State]:
        """The state of what this rank updates: by run, of a split matrix by :func:`state_names`."""
        self.updater.states.settle()
        return self.updater.states

    @property
    def steps(self) -> int:
        """Steps that were not skipped."""
        return self.updater.steps

    def counters(self) -> dict[str, int]:
        """Return what the optimizers of matrices counted so far, as ``optimizer.counter``; all ranks must call."""
        return counters(self.updater.counted_here(), self.updater.rules, self.world, self.mesh.device)

    def worst_health(self) -> dict[str, float]:
        """Return the worst of what a step with ``measure`` measured (:meth:`Health.worst`); all ranks must call."""
        return self.updater.health.worst(self.world, self.mesh.device)

    def alarms(self, worst: Mapping[str, float]) -> list[str]:
        """Return a line for each value of :meth:`worst_health` that is not healthy."""
        return self.updater.health.alarms(worst)

    def state_dict(self) -> dict[str, Tensor]:
        """Return this rank's own part: counts, masters of what it owns, states of what it hosts.  No copies."""
        out = {"step": torch.tensor(self.steps), "skips": torch.tensor(self.skips)}
        for buffer in self._buffers:
            out |= {f"master/{name}": master for name, master in buffer.masters.items()}
        for name, state in self.states.items():
            out |= {f"state/{name}/{key}": tensor for key, tensor in state.items()}
        return out

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over what :meth:`state_dict` returned on this rank of an equal mesh and plan; all ranks must call.

        Raises ``KeyError`` if the parts do not match.
        """
        own = self.state_dict()
        if own.keys() != state.keys():
            raise KeyError(f"checkpoint and plan differ in {sorted(own.keys() ^ state.keys())[:3]}")
        for name, tensor in own.items():
            tensor.copy_(state[name])
        self.adopt(int(own["step"]), int(own["skips"]))

    @torch.no_grad()
    def adopt(self, steps: int, skips: int) -> None:
        """Go on after ``steps`` steps from masters and states that were just written; all ranks must call."""
        self.updater.steps, self.skips = steps, skips
        for buffer in self._buffers:
            for run in buffer.runs:
                buffer.publish(run)
        self._synchronizer.start()
        self.synchronize()
