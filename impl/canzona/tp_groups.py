"""Micro-groups: which tensor-parallel rank hosts which matrix, and which matrices travel together.

The matrices that one DP rank owns are cut over its tensor-parallel group.  A host gathers the shards of a matrix,
computes the update of the whole and scatters it.  A group is gathered, computed and scattered as one, so its size
bounds the memory that the exchange needs: the capacity, in bytes of fused fp32 gradient shards per host and source.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from impl.canzona.costs import weights
from impl.canzona.plan import EVERY, MicroGroup
from impl.canzona.strategies import Problem

GRADIENT_BYTES = 4
"""Bytes of one fp32 gradient element as it is exchanged."""


@dataclass(frozen=True)
class Item:
    """A matrix to be hosted.

    weight: its load on a host, in the unit of the chosen cost, of the whole matrix.
    size: bytes of its fp32 gradient shard, which count against the capacity.
    """

    parameter: int
    weight: float
    size: int


def micro_groups(problem: Problem, owned: Sequence[Sequence[int]], mode: str) -> list[tuple[MicroGroup, ...]]:
    """Return for each DP rank the micro-groups of the matrices that it owns.

    owned: for each DP rank its matrices in registration order.
    mode: ``no``, ``single``, ``slot``, ``global``, or ``every`` where all tensor-parallel ranks repeat the compute.

    Matrices that tensor parallelism does not cut need no exchange: every rank computes them, in groups of their own at
    the end.  At TP=1 nothing is exchanged and the capacity bounds only how many matrices are updated at once.
    """
    weight = weights(problem)

    def groups_of(matrices: Sequence[int]) -> tuple[MicroGroup, ...]:
        items = [Item(p, weight(p), GRADIENT_BYTES * problem.parameters[p].local_numel(problem.tp)) for p in matrices]
        capacity = problem.options.capacity_bytes
        if problem.tp == 1:
            return tuple(consecutive(items, capacity, host=0))
        if mode == "every":
            return tuple(consecutive(items, capacity, host=EVERY))
        cut = [i for i in items if problem.parameters[i.parameter].tp_dim is not None]
        whole = [i for i in items if problem.parameters[i.parameter].tp_dim is None]
        return (*MODES[mode](cut, problem.tp, capacity), *consecutive(whole, capacity, host=EVERY))

    made: dict[tuple[int, ...], tuple[MicroGroup, ...]] = {}  # under SC all ranks own the same
    for matrices in owned:
        if tuple(matrices) not in made:
            made[tuple(matrices)] = groups_of(matrices)
    return [made[tuple(matrices)] for matrices in owned]


def consecutive(items: Iterable[Item], capacity: int, host: int) -> list[MicroGroup]:
    """Return groups of consecutive items whose sizes together stay within the capacity, all hosted by ``host``."""
    groups: list[list[Item]] = []
    room = 0
    for item in items:
        if not groups or item.size > room:
            groups.append([])
            room = capacity
        groups[-1].append(item)
        room -= item.size
    return [
        MicroGroup(tuple(i.parameter for i in g), (host,) * len(g), over_capacity=g[0].size > capacity) for g in groups
    ]


def by_arrival(items: Sequence[Item], tp: int, capacity: int) -> list[MicroGroup]:
    """Mode ``no``: chunks of ``tp`` items in their order, the j-th of a chunk on rank j."""
    groups: list[list[int]] = []
    out: list[MicroGroup] = []
    for item in items:
        if item.size > capacity:
            out.append(_lone(item, out, tp))
            continue
        if not groups or len(groups[-1]) == tp:
            groups.append([])
        groups[-1].append(item.parameter)
    return out + [MicroGroup(tuple(g), tuple(range(len(g)))) for g in groups]


def by_weight(items: Sequence[Item], tp: int, capacity: int) -> list[MicroGroup]:
    """Mode ``single``: heaviest first, then as ``no``; rank 0 always gets the heaviest of a chunk."""
    return by_arrival(sorted(items, key=lambda i: -i.weight), tp, capacity)


def filled_slots(items: Sequence[Item], tp: int, capacity: int) -> list[MicroGroup]:
    """Mode ``slot``: heaviest first onto the least loaded host; a group closes once a host has reached the capacity.

    Nothing is rolled back, so a host may exceed the capacity by less than its last item.
    """
    out: list[MicroGroup] = []
    for item in items:
        if item.size > capacity:
            out.append(_lone(item, out, tp))
    packing = _Packing(tp)
    for item in sorted((i for i in items if i.size <= capacity), key=lambda i: -i.weight):
        packing.push(item)
        if packing.largest >= capacity:
            out.append(packing.group())
            packing = _Packing(tp)
    return out + ([packing.group()] if packing.parameters else [])


def balanced(items: Sequence[Item], tp: int, capacity: int) -> list[MicroGroup]:
    """Mode ``global`` (Canzona, algorithm 2): heaviest first, packed by LPT; a group closes before it overflows.

    Items come in falling order of weight, and LPT takes them in that order; so the packing of a group with one more
    item is the packing of the group plus that item on its least loaded host, and nothing is packed again.
    """
    out: list[MicroGroup] = []
    packing = _Packing(tp)
    for item in sorted(items, key=lambda i: (i.weight, i.parameter), reverse=True):
        if packing.parameters and not packing.fits(item, capacity):
            out.append(packing.group())
            packing = _Packing(tp)
        if item.size > capacity:
            out.append(_lone(item, out, tp))
        else:
            packing.push(item)
    return out + ([packing.group()] if packing.parameters else [])


Mode = Callable[[Sequence[Item], int, int], list[MicroGroup]]
MODES: dict[str, Mode] = {"no": by_arrival, "single": by_weight, "slot": filled_slots, "global": balanced}


class _Packing:
    """Longest-processing-time packing of one group: each item goes to the least loaded host, the lowest on a tie."""

    def __init__(self, tp: int) -> None:
        self._hosts = [(0.0, host) for host in range(tp)]
        self._sizes = [0] * tp
        self.parameters: list[int] = []
        self.hosts: list[int] = []

    @property
    def largest(self) -> int:
        """Bytes on the fullest host."""
        return max(self._sizes)

    def fits(self, item: Item, capacity: int) -> bool:
        """Whether ``item`` leaves its host within the capacity."""
        return self._sizes[self._hosts[0][1]] + item.size <= capacity

    def push(self, item: Item) -> None:
        """Host ``item``."""
        load, host = self._hosts[0]
        heapq.heapreplace(self._hosts, (load + item.weight, host))
        self._sizes[host] += item.size
        self.parameters.append(item.parameter)
        self.hosts.append(host)

    def group(self) -> MicroGroup:
        """Return the group as it is."""
        return MicroGroup(tuple(self.parameters), tuple(self.hosts))


def _lone(item: Item, groups: Sequence[MicroGroup], tp: int) -> MicroGroup:
    """Return the group of an item that is larger than the capacity.

    Hosts take turns over such groups, so that the states of large matrices do not all end up on one of them.
    """
    host = sum(group.over_capacity for group in groups) % tp
    return MicroGroup((item.parameter,), (host,), over_capacity=True)
