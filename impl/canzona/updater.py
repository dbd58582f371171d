"""What one rank updates: optimizer states, whole matrices on their way to their hosts, masters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from torch import Tensor

from impl.canzona.buffers import FamilyBuffer, Run
from impl.canzona.collectives import Communicator
from impl.canzona.exchange import Exchange, run_pipelined
from impl.canzona.health import Health
from impl.canzona.mesh import Mesh
from impl.canzona.plan import EVERY, Plan
from impl.canzona.states import StateStore, state_names
from impl.models.sharding import join, split
from impl.optimizers.base import Optimizer, State


class Updater:
    """Applies the optimizers to what ``plan`` gives this rank; the gradients in ``buffers`` are final by then.

    optimizers: by family.  tp: exchanges the shards of matrices; all ranks of the TP group update together.
    weight_decay, offload: see :class:`impl.canzona.engine.EngineOptions`.

    steps: that were done, this one included while it runs.  rules: each optimizer once.
    """

    def __init__(
        self,
        plan: Plan,
        mesh: Mesh,
        buffers: Sequence[FamilyBuffer],
        optimizers: Mapping[str, Optimizer],
        tp: Communicator,
        *,
        weight_decay: float,
        offload: bool,
    ) -> None:
        self.plan, self.mesh, self.optimizers = plan, mesh, optimizers
        self._buffers, self._tp, self._weight_decay = buffers, tp, weight_decay
        self.rules = list({o.name: o for o in optimizers.values()}.values())
        self.health = Health(self.rules)
        self.states = self._init_states(offload)
        self.steps = 0

    def _init_states(self, offload: bool) -> StateStore:
        states = StateStore(self.mesh.device, offload=offload)
        hosts = self._hosts()
        first = [0, *accumulate(len(spec.matrices) for spec in self.plan.parameters)]  # the same for blocks as atoms
        for buffer in self._buffers:
            optimizer = self.optimizers[buffer.family.name]
            for run in buffer.runs:
                if run.parameter is None:
                    states.add(run.name, optimizer.init_state((run.end - run.start,), self.mesh.device))
                elif hosts[run.parameter] in (self.mesh.tp_rank, EVERY):
                    spec = self.plan.parameters[run.parameter]
                    for number, (name, shape) in enumerate(zip(state_names(spec), spec.matrices, strict=True)):
                        state = optimizer.init_state(shape, self.mesh.device)
                        optimizer.place(state, first[run.parameter] + number)
                        states.add(name, state)
        return states

    def update(self, lr: float, scale: float) -> None:
        """Update what this rank owns; the gradients of scale-dependent optimizers are first multiplied by ``scale``."""
        for buffer in self._buffers:
            optimizer = self.optimizers[buffer.family.name]
            factor = 1.0 if optimizer.scale_invariant else scale
            (self._step_atomic if buffer.family.atomic else self._step_elementwise)(buffer, optimizer, lr, factor)

    def _step_elementwise(self, buffer: FamilyBuffer, optimizer: Optimizer, lr: float, factor: float) -> None:
        visit = self.states.visit([[run.name] for run in buffer.runs])
        for run in buffer.runs:
            gradient = buffer.gradient(run.start, run.end)
            if factor != 1.0:
                gradient.mul_(factor)
            states = visit.take()
            update = optimizer.update(gradient, states[0], self.steps)
            self.health.observe(optimizer, states, [update])
            visit.give_back(states)
            self._apply(buffer, run, update, lr)

    def _step_atomic(self, buffer: FamilyBuffer, optimizer: Optimizer, lr: float, factor: float) -> None:
        runs = {run.parameter: run for run in buffer.runs if run.parameter is not None}
        gradients: dict[int, Tensor] = {}
        for index, run in runs.items():
            shape = self.plan.parameters[index].local_shape(self.mesh.tp)
            gradients[index] = buffer.gradient(run.start, run.end).view(shape)
            if factor != 1.0:
                gradients[index].mul_(factor)
        exchanges = [
            Exchange(group, self.plan.parameters, gradients, self._tp)
            for group in self.plan.micro_groups[self.mesh.dp_rank]
            if group.parameters[0] in runs
        ]

        specs = self.plan.parameters
        visit = self.states.visit([[n for i in e.hosted for n in state_names(specs[i])] for e in exchanges])

        def compute(whole: dict[int, Tensor]) -> dict[int, Tensor]:
            matrices = [m for i in whole for m in split(whole[i], specs[i])]
            states = visit.take()
            updates = optimizer.update_many(matrices, states, self.steps)
            self.health.observe(optimizer, states, updates)
            visit.give_back(states)
            parts = iter(updates)
            return {i: join([next(parts) for _ in specs[i].matrices], specs[i]) for i in whole}

        def apply(updates: dict[int, Tensor]) -> None:
            for index, update in updates.items():
                self._apply(buffer, runs[index], update.reshape(-1), lr)

        run_pipelined(exchanges, compute, apply)

    def _apply(self, buffer: FamilyBuffer, run: Run, update: Tensor, lr: float) -> None:
        master = buffer.masters[run.name]
        master.mul_(1.0 - lr * self._weight_decay).add_(update, alpha=-lr)
        buffer.publish(run)

    def _hosts(self) -> dict[int, int]:
        """Return the hosts of the matrices that this DP rank owns."""
        groups = self.plan.micro_groups[self.mesh.dp_rank]
        return {p: host for group in groups for p, host in zip(group.parameters, group.hosts, strict=True)}

    def counted_here(self) -> Iterator[tuple[Optimizer, State]]:
        """Yield the states of this rank's matrices, those that several ranks hold only on the first of them."""
        hosts = self._hosts()
        self.states.settle()
        for buffer in self._buffers:
            repeated = {slot.parameter for slot in buffer.family.slots if slot.owner == EVERY}
            for run in buffer.runs:
                if run.parameter is None or (run.parameter in repeated and self.mesh.dp_rank > 0):
                    continue
                if hosts[run.parameter] == self.mesh.tp_rank or (
                    hosts[run.parameter] == EVERY and not self.mesh.tp_rank
                ):
                    for name in state_names(self.plan.parameters[run.parameter]):
                        yield self.optimizers[buffer.family.name], self.states[name]
