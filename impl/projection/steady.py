"""The timeline of one training step in its steady state: what the engine does, in the engine's own order.

Time 0 is when the global gradient norm is known on all ranks.  The optimizer steps, parameters are gathered under the
next forward, gradients are reduced under the last backward, and the next norm ends it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Literal

import numpy as np

from impl.canzona.norm import vector_length
from impl.canzona.plan import Bucket, Family, Plan
from impl.models.catalogue import ModelConfig
from impl.optimizers.base import Optimizer
from impl.projection import ranks
from impl.projection.hardware import Group
from impl.projection.machine import Block, Collective, Machine
from impl.projection.program import TP, Program
from impl.projection.timeline import Array, Op, Timeline
from impl.projection.uncertain import Cost, total
from impl.projection.updates import Updates
from impl.projection.workload import TpUpdate, Uneven, Workload, blocks, talks


class Step(Program):
    """Fills the timeline of ``plan`` on ``machine``; :meth:`run` once.

    costs: the optimizer of each parameter of the plan.  tp_update, uneven: see
        :func:`impl.projection.training.project`.

    once: the waits for parameters that are gathered in one blocking call after the optimizer.
    """

    def __init__(
        self,
        plan: Plan,
        costs: Sequence[Optimizer],
        config: ModelConfig,
        work: Workload,
        machine: Machine,
        tp_update: TpUpdate = "exchange",
        uneven: Uneven = "rooted",
    ) -> None:
        super().__init__((plan.dp, plan.tp), machine)
        self.plan, self.work, self.uneven = plan, work, uneven
        self.tp_update: TpUpdate = tp_update
        self.optimizers = {cost.name: cost for cost in costs}
        self.tp, self.dp = Group(plan.tp), Group(plan.dp, plan.tp)
        self.once: list[Op] = []
        self._blocks = blocks(config, work, plan.dp, plan.tp)
        self._blocked: dict[tuple[str, str], tuple[Cost, Cost, int]] = {}

    def run(self) -> Timeline:
        """Return the filled timeline."""
        self._optimizer()
        waiting = self._gather_parameters()
        for number in range(self.work.microbatches):
            last = number == self.work.microbatches - 1
            self._forward(number, waiting)
            self._backward(number, last=last)
        self._norm()
        return self.timeline

    def _optimizer(self) -> None:
        for family in self.plan.families:
            optimizer = self.optimizers[family.optimizer]
            if not family.atomic:
                self._elementwise(family, optimizer)
                continue
            updates = Updates(self.machine, optimizer, self.plan.tp, self.tp_update)
            groups = ranks.micro_groups(self.plan)
            (self._pipelined if self.tp_update == "exchange" else self._on_shards)(groups, updates)

    def _elementwise(self, family: Family, optimizer: Optimizer) -> None:
        amounts = ranks.Amounts(self.timeline.mesh)
        for rank, runs in enumerate(ranks.elementwise_runs(self.plan, family)):
            for run in runs:
                amounts.add(run.end - run.start, rank)

        def price(elements: int) -> Cost:
            return self.machine.update(optimizer, (elements,)) + self.machine.apply(elements, self.work.dtype)

        self.do(family.optimizer, "optimizer_step", *amounts.cost(price))

    def _pipelined(self, groups: Sequence[ranks.GroupWork], updates: Updates) -> None:
        """Micro-groups in order, the next gather and the last scatter in flight (:func:`run_pipelined`)."""
        scatters: list[Op | None] = []
        gather = self._exchange("gather", 0, groups[0].gather_bytes) if groups else None
        for number, group in enumerate(groups):
            self.wait([gather] if gather else [], "tp_exchange")
            if number + 1 < len(groups):
                gather = self._exchange("gather", number + 1, groups[number + 1].gather_bytes)
            name = f"{updates.optimizer.name}, group {number}"
            self.do(name, "optimizer_step", *group.updates.cost(updates.compute))
            scatters.append(self._exchange("scatter", number, group.scatter_bytes))
            if number > 0:
                self._land(number - 1, groups, scatters)
        if groups:
            self._land(len(groups) - 1, groups, scatters)

    def _exchange(self, name: str, number: int, count: Array) -> Op | None:
        """Start an all-to-all over TP in which each rank moves ``count`` bytes; None if nobody moves any."""
        if not count.any():
            return None
        busiest = count.max(axis=TP, keepdims=True)
        seconds, evidence = self.each(busiest, lambda n: self.collective("all-to-all", [n], self.tp))
        return self.start("tp", f"{name} {number}", "tp_exchange", seconds, count, evidence=evidence)

    def _land(self, number: int, groups: Sequence[ranks.GroupWork], scatters: Sequence[Op | None]) -> None:
        op = scatters[number]
        self.wait([op] if op else [], "tp_exchange")
        self._apply(f"apply group {number}", groups[number].local)

    def _apply(self, name: str, local: ranks.Amounts) -> None:
        self.do(name, "optimizer_step", *local.cost(lambda m: self.machine.apply(m.elements, self.work.dtype)))

    def _on_shards(self, groups: Sequence[ranks.GroupWork], updates: Updates) -> None:
        """Every TP rank updates its own shards; sums of Gram matrices stand between the products and block."""
        for number, group in enumerate(groups):
            name = f"{updates.optimizer.name} {updates.mode}, group {number}"
            self.do(name, "optimizer_step", *group.local.cost(updates.compute))
            count = group.local.total(updates.counted)
            if count.any():
                seconds, evidence = group.local.cost(updates.communicate)
                name = f"sums of Gram matrices {number}"
                self.wait([self.start("tp", name, "tp_exchange", seconds, count, evidence=evidence)], "tp_exchange")
            self._apply(f"apply group {number}", group.local)

    def _segments(self, kind: Collective, cuts: Sequence[int], size: int) -> tuple[Cost, Array]:
        """Return cost and each rank's bytes ``[dp, 1]`` of a reduce-scatter or all-gather along ``cuts``."""
        lengths = [size * (high - low) for low, high in pairwise(cuts)]
        if self.uneven == "padded":
            lengths = [max(lengths)] * len(lengths)
        count = sum(lengths) - np.array(lengths, dtype=float)[:, None]
        return self.collective(kind, lengths, self.dp), count

    def _gather_parameters(self) -> dict[int, list[Op]]:
        """Start the gathers in the forward's order; return by block those that it has to wait for."""
        plan, waiting = self.plan, {}
        if plan.dp == 1:
            return waiting
        due = [(b, bucket) for b, bucket in self._buckets() if b.synchronization == "per-bucket"]
        for family, bucket in sorted(due, key=lambda item: min(slot.parameter for slot in item[1].slots)):
            cost, count = self._segments("all-gather", bucket.cuts, self.work.size)
            op = self.start("dp", f"gather {_name(family, bucket)}", "param_sync", cost, count)
            for block in {self._block_of(slot.parameter) for slot in bucket.slots}:
                waiting.setdefault(block, []).append(op)
        if any(family.synchronization == "once" for family in plan.families):
            lengths = ranks.gathered_once(plan)
            cuts = np.concatenate([[0], np.cumsum(lengths)]).tolist()
            cost, count = self._segments("all-gather", cuts, self.work.size)
            op = self.start("dp", "gather all parameters", "param_sync", cost, count)
            waited = self.wait([op], "param_sync")
            self.once.append(waited or op)
        return waiting

    def _buckets(self) -> list[tuple[Family, Bucket]]:
        return [(family, bucket) for family in self.plan.families for bucket in family.buckets]

    def _block_of(self, parameter: int) -> int:
        """Return the number of the block that holds a parameter."""
        words = self.plan.parameters[parameter].module.split(".")
        if words[0] == "embedding":
            return 0
        return 1 + int(words[2]) if words[:2] == ["decoder", "layers"] else len(self._blocks) - 1

    def _reductions(self) -> list[tuple[Family, Bucket, int]]:
        """Return the buckets in the reducer's order, each with the block whose backward completes it."""
        order = sorted(self._buckets(), key=lambda item: -min(slot.parameter for slot in item[1].slots))
        return [(f, b, min(self._block_of(slot.parameter) for slot in b.slots)) for f, b in order]

    def _reduce(self, family: Family, bucket: Bucket) -> Op:
        name = f"reduce {_name(family, bucket)}"
        if bucket.cuts:
            return self.start("dp", name, "grad_reduce", *self._segments("reduce-scatter", bucket.cuts, 4))
        whole, dp = 4 * (bucket.end - bucket.start), self.plan.dp
        cost = self.collective("all-reduce", [whole], self.dp)
        return self.start("dp", name, "grad_reduce", cost, round(2 * (dp - 1) / dp * whole))

    def _cost(self, block: Block, direction: Literal["forward", "backward"]) -> tuple[Cost, Cost, int]:
        """Return compute, blocking communication and its bytes of a block's forward or backward."""
        key = block.kind, direction
        if key not in self._blocked:
            compute = self.machine.forward(block) if direction == "forward" else self.machine.backward(block)
            spoken = talks(block, self.work, direction)
            if direction == "backward" and block.kind == "layer":
                if self.work.recompute == "full":
                    compute = self.machine.forward(block) + compute
                    spoken = talks(block, self.work, "forward") + spoken
                elif self.work.recompute == "selective-attention":
                    compute = self.machine.attention(block) + compute
            tp = self.plan.tp
            cost = total([self.collective(t.kind, t.sizes(tp), self.tp) for t in spoken])
            self._blocked[key] = compute, cost, sum(t.counted(tp) for t in spoken)
        return self._blocked[key]

    def _model(
        self,
        name: str,
        direction: Literal["forward", "backward"],
        blocks: Sequence[Block],
        between: Callable[[], None] | None = None,
        extra: Sequence[Cost] = (),
    ) -> None:
        """Run ``blocks`` and ``extra``, then ``between``; their blocking communication follows as one."""
        parts = [self._cost(block, direction) for block in blocks]
        self.do(f"{direction} {name}", direction, total([*(part[0] for part in parts), *extra]))
        if between is not None:
            between()
        if count := sum(part[2] for part in parts):
            cost = total([part[1] for part in parts])
            self.wait([self.start("tp", f"activations {name}", direction, cost, count)], direction)

    def _forward(self, number: int, waiting: dict[int, list[Op]]) -> None:
        """One microbatch; in the first, blocks wait for their parameters."""
        if number > 0:
            self._model(f"microbatch {number}", "forward", self._blocks)
            return
        for place, block in enumerate(self._blocks):
            self.wait(waiting.get(place, []), "param_sync")
            self._model(_block_name(place, block), "forward", [block])

    def _backward(self, number: int, *, last: bool) -> None:
        """One microbatch; in the last, buckets are reduced as soon as they are complete, and awaited."""
        if not last:
            self._model(f"microbatch {number}", "backward", self._blocks[::-1])
            return
        due = self._reductions() if self.plan.dp > 1 else []
        pending: list[Op] = []

        def launch(place: int) -> None:
            while due and due[0][2] >= place:
                family, bucket, _ = due.pop(0)
                pending.append(self._reduce(family, bucket))

        for place, block in reversed(list(enumerate(self._blocks))):
            extra = [self.machine.gradients(block)]
            self._model(_block_name(place, block), "backward", [block], partial(launch, place), extra)
        assert not due, "every bucket is complete after the embedding's backward"
        self.wait(pending, "grad_reduce")

    def _norm(self) -> None:
        """Sum q/k-norm gradients over TP, then take the global norm."""
        plan, tp = self.plan, self.plan.tp
        summed = ranks.partial_elements(plan)[:, None] * 4.0
        if tp > 1 and summed.any():
            seconds, evidence = self.each(summed, lambda n: self.collective("all-gather", [n] * tp, self.tp))
            count = (tp - 1) * summed
            op = self.start("tp", "partial gradients", "grad_reduce", seconds, count, evidence=evidence)
            self.wait([op], "grad_reduce")
        for exact in (False, True):
            elements = ranks.counted_elements(plan, atomic=not exact)
            price = partial(_norm_of, self.machine, exact)
            self.do("exact sums of squares" if exact else "sums of squares", "grad_norm", *self.each(elements, price))
        world = plan.dp * tp
        if world > 1:
            whole = 8 * vector_length(plan)
            cost = self.collective("all-reduce", [whole], Group(world))
            op = self.start("world", "norm", "grad_norm", cost, round(2 * (world - 1) / world * whole))
            self.wait([op], "grad_norm")


def _norm_of(machine: Machine, exact: bool, elements: float) -> Cost:
    return machine.norm(int(elements), exact=exact)


def _name(family: Family, bucket: Bucket) -> str:
    return f"{family.name} bucket {family.buckets.index(bucket)}"


def _block_name(place: int, block: Block) -> str:
    return f"layer {place - 1}" if block.kind == "layer" else block.kind
