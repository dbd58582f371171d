"""What each rank of a plan does in one optimizer step, as counts of equal pieces of work."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from impl.canzona.buffers import Run, runs_of
from impl.canzona.plan import EVERY, Family, MicroGroup, Plan
from impl.projection.timeline import Array
from impl.projection.uncertain import DRAWS, Cost, shares

GRADIENT_BYTES = 4
"""Of an element of gradients, updates and masters, which are fp32."""


class Amounts:
    """How often each rank of a mesh does pieces of work that are told apart by a key."""

    def __init__(self, mesh: tuple[int, ...]) -> None:
        self.mesh = mesh
        self._counts: dict[Hashable, Array] = defaultdict(lambda: np.zeros(mesh))

    def add(self, key: Hashable, where: Any, count: float = 1.0) -> None:
        """Let the ranks at index ``where`` do the work ``key`` ``count`` times more."""
        self._counts[key][where] += count

    def cost(self, price: Callable[[Any], Cost]) -> tuple[Array, dict[str, float]]:
        """Return each rank's seconds ``[1 + DRAWS, *mesh]`` and the evidence of the slowest rank's.

        An axis along which all ranks do the same has length 1.  price: the cost of a key's work, done once.
        """
        if not self._counts:
            return np.zeros((1 + DRAWS, *(1 for _ in self.mesh))), {}
        counts = np.stack(list(self._counts.values()))
        for axis in range(1, counts.ndim):
            first = counts.take([0], axis)
            counts = first if (counts == first).all() else counts
        costs = [price(key) for key in self._counts]
        seconds = np.tensordot(np.stack([cost.seconds for cost in costs]), counts, axes=(0, 0))
        slowest = np.unravel_index(int(seconds[0].argmax()), seconds[0].shape)
        times = counts[(slice(None), *slowest)]
        return seconds, shares([(c.evidence, float(n * c.seconds[0])) for c, n in zip(costs, times, strict=True)])

    def largest(self, size: Callable[[Any], float]) -> Array:
        """Return the size of each rank's largest piece ``[*mesh]``, 0 where it has none."""
        sizes = [np.where(count > 0, size(key), 0.0) for key, count in self._counts.items()]
        return np.max(sizes, axis=0) if sizes else np.zeros(self.mesh)

    def total(self, size: Callable[[Any], float]) -> Array:
        """Return the sum of each rank's sizes ``[*mesh]``."""
        return sum((count * size(key) for key, count in self._counts.items()), np.zeros(self.mesh))


class Matrix(NamedTuple):
    """What matters of a matrix of the plan; equal ones are one piece of work.

    shapes: of what an optimizer updates one by one (:attr:`impl.models.parameters.ParamSpec.matrices`), all whole.
    tp_dim: the side that TP cuts, None for none.  elements: of the shard on one TP rank.
    """

    shapes: tuple[tuple[int, ...], ...]
    tp_dim: int | None
    elements: int

    def shards(self, tp: int) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of one TP rank's shards of :attr:`shapes`."""
        return tuple(
            tuple(max(1, n // tp) if side == self.tp_dim else n for side, n in enumerate(shape))
            for shape in self.shapes
        )


@dataclass
class GroupWork:
    """The k-th micro-group of every DP rank; ranks that have fewer do nothing.

    updates: the :class:`Matrix` pieces that a rank computes whole.  local: those of which it holds a shard.
    hosted: elements ``[dp, tp]`` of one shard of all that a rank is the one host of.
    everywhere: elements ``[dp, 1]`` of one shard of all that TP cuts and every rank computes whole.
    """

    mesh: tuple[int, int]
    updates: Amounts = field(init=False)
    local: Amounts = field(init=False)
    hosted: Array = field(init=False)
    everywhere: Array = field(init=False)

    def __post_init__(self) -> None:
        self.updates, self.local = Amounts(self.mesh), Amounts(self.mesh)
        self.hosted, self.everywhere = np.zeros(self.mesh), np.zeros((self.mesh[0], 1))

    @property
    def gathered(self) -> Array:
        """Elements ``[dp, tp]`` that a rank receives from every other rank of its TP group, and from itself."""
        return self.hosted + self.everywhere

    @property
    def gather_bytes(self) -> Array:
        """Logical bytes ``[dp, tp]`` of the gather, as the ledger counts them."""
        return self._exchanged(self.gathered)

    @property
    def scatter_bytes(self) -> Array:
        """Logical bytes ``[dp, tp]`` of the scatter."""
        return self._exchanged(self.hosted)

    def _exchanged(self, elements: Array) -> Array:
        sent = elements.sum(axis=1, keepdims=True) - elements
        return GRADIENT_BYTES * np.maximum(sent, (self.mesh[1] - 1) * elements)


def micro_groups(plan: Plan) -> list[GroupWork]:
    """Return the k-th micro-groups of all DP ranks, for each k."""
    mesh = plan.dp, plan.tp
    alike: dict[tuple[MicroGroup, ...], list[int]] = {}
    by_identity: dict[int, list[int]] = defaultdict(list)  # under SC all ranks share one long tuple
    for rank, groups in enumerate(plan.micro_groups):
        by_identity[id(groups)].append(rank)
    for ranks in by_identity.values():
        alike[plan.micro_groups[ranks[0]]] = alike.get(plan.micro_groups[ranks[0]], []) + ranks
    out = [GroupWork(mesh) for _ in range(max(map(len, plan.micro_groups), default=0))]
    for groups, ranks in alike.items():
        for work, group in zip(out, groups, strict=False):
            _fill(work, plan, group, ranks)
    return out


def _fill(work: GroupWork, plan: Plan, group: MicroGroup, ranks: Sequence[int]) -> None:
    for parameter, host in zip(group.parameters, group.hosts, strict=True):
        spec = plan.parameters[parameter]
        elements = spec.local_numel(plan.tp)
        cut = plan.tp > 1 and spec.tp_dim is not None
        matrix = Matrix(spec.matrices, spec.tp_dim if cut else None, elements)
        work.local.add(matrix, (ranks,))
        work.updates.add(matrix, (ranks, host) if cut and host != EVERY else (ranks,))
        if cut and host == EVERY:
            work.everywhere[ranks] += elements
        elif cut:
            work.hosted[ranks, host] += elements


def elementwise_runs(plan: Plan, family: Family) -> list[tuple[Run, ...]]:
    """Return the runs of an elementwise family for each DP rank."""
    if all(slot.owner == EVERY for slot in family.slots):
        return [runs_of(plan, family, 0)] * plan.dp
    return [runs_of(plan, family, rank) for rank in range(plan.dp)]


def counted_elements(plan: Plan, *, atomic: bool) -> Array:
    """Return the elements ``[dp, tp]`` whose squares a rank sums for the global norm (:mod:`impl.canzona.norm`).

    atomic: of matrices, or of what may be cut.
    """
    out = np.zeros((plan.dp, plan.tp))
    for family in (f for f in plan.families if f.atomic is atomic):
        for bucket in family.buckets:
            for slot in bucket.slots:
                where: Any = slice(None) if plan.parameters[slot.parameter].tp_dim is not None else slice(0, 1)
                if slot.owner is None:
                    cuts = np.clip(bucket.cuts, slot.start, slot.end)
                    out[:, where] += np.diff(cuts)[:, None]
                else:
                    out[max(slot.owner, 0), where] += slot.end - slot.start
    return out


def partial_elements(plan: Plan) -> Array:
    """Return the elements ``[dp]`` of owned gradients that cover only one TP rank's heads, summed over TP."""
    out = np.zeros(plan.dp)
    for family in plan.families:
        for bucket in family.buckets:
            for slot in bucket.slots:
                if not plan.parameters[slot.parameter].partial_over_tp:
                    continue
                if slot.owner is None:
                    out += np.diff(np.clip(bucket.cuts, slot.start, slot.end))
                else:
                    out[slice(None) if slot.owner == EVERY else slot.owner] += slot.end - slot.start
    return out


def gathered_once(plan: Plan) -> list[int]:
    """Return the elements of each DP rank's segment of the one gather of the families synchronized ``once``."""
    out = [0] * plan.dp
    for family in plan.families:
        for slot in family.slots if family.synchronization == "once" else ():
            assert slot.owner is not None, "a cut parameter is gathered per bucket"
            for rank in range(plan.dp) if slot.owner == EVERY else (slot.owner,):
                out[rank] += slot.end - slot.start
    return out
