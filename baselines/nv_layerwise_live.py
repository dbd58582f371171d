"""NV-layerwise, live: the step is Megatron-core's own ``LayerWiseDistributedOptimizer`` (0.16.1, ping-pong).

It steps like :class:`impl.canzona.engine.Engine` under the plan ``nv-layerwise`` of version ``ping-pong``, and so can
stand beside it as one more row of a table.  The engine lends what Megatron ties to CUDA: flat buffers, their all-reduce
during backward, norm and clipping.  Megatron itself decides the owners, steps what a rank owns and gathers the result.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import ModuleType

from torch import Tensor, nn

from impl.canzona.buffers import FamilyBuffer
from impl.canzona.engine import Engine, EngineOptions
from impl.canzona.exchange import Exchange, run_pipelined
from impl.canzona.mesh import Mesh
from impl.canzona.plan import EVERY, MicroGroup, Plan
from impl.errors import ConfigError
from impl.optimizers.base import Optimizer, State


class LiveLayerWise(Engine):
    """The engine's interface on Megatron's layer-wise optimizer; see :class:`Engine` for the arguments.

    Every tensor-parallel rank computes whole matrices (Megatron's mode ``duplicated``), one exchange a matrix.

    Raises :class:`ConfigError` if the plan is not ``nv-layerwise`` in its version ``ping-pong`` or Megatron's class is
    missing, and RuntimeError if Megatron's owners are not the plan's.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        optimizers: Mapping[str, Optimizer],
        mesh: Mesh,
        options: EngineOptions | None = None,
    ) -> None:
        if (plan.strategy, plan.version) != ("nv-layerwise", "ping-pong"):
            raise ConfigError(
                f"the live NV baseline runs the plan nv-layerwise with nv_version ping-pong, not {plan.strategy}"
                + (f" with {plan.version}" if plan.version else "")
            )
        megatron = _megatron()
        super().__init__(model, plan, optimizers, mesh, options)
        self._home: dict[nn.Parameter, tuple[FamilyBuffer, int]] = {}
        bases = []
        for buffer in self._buffers:  # matrices first, as Megatron chains them; lists in registration order
            parameters = [buffer.module_parameters[i] for i in sorted(buffer.module_parameters)]
            for slot in buffer.family.slots:
                parameter = buffer.module_parameters[slot.parameter]
                parameter.main_grad = buffer.gradient(slot.start, slot.end)  # type: ignore[attr-defined]
                self._home[parameter] = buffer, slot.parameter
            bases.append(megatron.RuleOptimizer(parameters, self._rule, self.options.weight_decay))
        self.layer_wise = megatron.PortableLayerWise(bases, mesh.dp_group)
        self._check_owners()
        self.layer_wise.attach(self._master, self._state)

    def owners(self) -> dict[str, int]:
        """Return the DP rank to which Megatron gave each parameter."""
        names = [spec.name for spec in self.plan.parameters]
        if self.mesh.dp == 1:
            return dict.fromkeys(names, 0)
        lists = enumerate(self.layer_wise.owned_by_rank)
        return {names[self._home[p][1]]: rank for rank, parameters in lists for p in parameters}

    def _update(self, lr: float, scale: float) -> None:
        """Let Megatron update what this rank owns."""
        self._clip(scale)
        for group in self.layer_wise.param_groups:
            group["lr"] = lr
        self.layer_wise.prepare_grads()
        self.layer_wise.step_with_ready_grads()

    def _publish(self) -> None:
        """Let Megatron gather the new parameters, here and now."""
        self.layer_wise.allgather_params()
        self._count_gather()

    def _clip(self, scale: float) -> None:
        for buffer in self._buffers:
            if scale != 1.0 and not self.updater.optimizers[buffer.family.name].scale_invariant:
                for piece in buffer.family.pieces(self.mesh.dp_rank):
                    buffer.gradient(piece.start, piece.end).mul_(scale)

    def _count_gather(self) -> None:
        if self.mesh.dp == 1:
            return
        for buffer in self._buffers:
            own = sum(piece.end - piece.start for piece in buffer.family.pieces(self.mesh.dp_rank))
            whole = sum(slot.end - slot.start for slot in buffer.family.slots)
            self._dp.count("param_sync", (whole - own) * buffer.parameters.element_size())

    def _check_owners(self) -> None:
        planned = {self.plan.parameters[s.parameter].name: s.owner for f in self.plan.families for s in f.slots}
        for name, owner in self.owners().items():
            if planned[name] != owner:
                raise RuntimeError(f"Megatron gives {name} to DP rank {owner}, the plan to {planned[name]}")

    def _master(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the master of an owned parameter: its part of the engine's, in the shape of this rank's shard."""
        buffer, index = self._home[parameter]
        name, low, high = _place(buffer, index)
        master = nn.Parameter(buffer.masters[name][low:high].view(parameter.shape))
        self._home[master] = buffer, index
        return master

    def _state(self, master: nn.Parameter) -> State:
        buffer, index = self._home[master]
        name, low, high = _place(buffer, index)
        state = self.updater.states[name]
        return state if buffer.family.atomic else {key: tensor[low:high] for key, tensor in state.items()}

    def _rule(self, master: nn.Parameter, gradient: Tensor, state: State) -> Tensor:
        buffer, index = self._home[master]
        rule = self.updater.optimizers[buffer.family.name]
        if not buffer.family.atomic:
            return rule.update(gradient.view(-1), state, self.steps).view(master.shape)
        exchange = Exchange(MicroGroup((index,), (EVERY,)), self.plan.parameters, {index: gradient}, self._tp)
        result: dict[int, Tensor] = {}
        run_pipelined([exchange], lambda whole: {index: rule.update(whole[index], state, self.steps)}, result.update)
        return result[index]


def _place(buffer: FamilyBuffer, index: int) -> tuple[str, int, int]:
    """Return the run of this rank that holds a parameter, and the parameter's range inside the run."""
    slot = next(s for s in buffer.family.slots if s.parameter == index)
    run = next(r for r in buffer.runs if r.start <= slot.start and slot.end <= r.end)
    return run.name, slot.start - run.start, slot.end - run.start


def _megatron() -> ModuleType:
    try:
        return importlib.import_module("baselines.megatron.layer_wise")
    except ImportError as error:
        raise ConfigError(
            f"the live NV baseline needs LayerWiseDistributedOptimizer of megatron-core: install megatron-core==0.16.1 "
            f"({error})"
        ) from error
