"""The collectives of the distributed step, each of which counts its logical bytes.

Only calls that gloo and NCCL both have are used.  Logical bytes are what a bandwidth-optimal algorithm must move
through one rank, for ``N`` bytes over ``R`` ranks: all-reduce ``2 (R - 1) / R N``; reduce-scatter and all-gather ``N``
less the rank's own segment; all-to-all the larger of sent and received, own part excluded.  (gloo moves more: its
reduce-scatter is an all-reduce on the wire, so traffic counted on a CPU would say nothing about NCCL.)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

Totals = dict[str, dict[str, int]]

# torch 2.13 renames these two; older releases know only the second name.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Ledger:
    """Logical bytes of this rank per phase and dimension (``dp``, ``tp`` or ``world``)."""

    def __init__(self) -> None:
        self._bytes: dict[str, dict[str, int]] = defaultdict(lambda: {"dp": 0, "tp": 0, "world": 0})

    def add(self, phase: str, dimension: str, count: float) -> None:
        """Count ``count`` bytes."""
        self._bytes[phase][dimension] += round(count)

    def reset(self) -> None:
        """Start a new step."""
        self._bytes.clear()

    def bytes(self) -> Totals:
        """Return the bytes since the last reset, by phase and dimension."""
        return {phase: dict(by) for phase, by in self._bytes.items()}


class Pending:
    """A collective in flight.  It holds its buffers until :meth:`wait`, which may finish the job with local work."""

    def __init__(self, works: Sequence[dist.Work | None], *buffers: Tensor, then: Callable[[], None] | None = None):
        self._works = [w for w in works if w is not None]
        self._buffers: tuple[Tensor, ...] = buffers
        self._then = then

    def wait(self) -> None:
        """Block until the result is in place; calling it again does nothing."""
        for work in self._works:
            work.wait()
        if self._then is not None:
            self._then()
        self._works, self._buffers, self._then = [], (), None


class Communicator:
    """One process group with a ledger.

    dimension: the label under which its bytes are counted.
    """

    def __init__(self, group: dist.ProcessGroup, dimension: str, ledger: Ledger) -> None:
        self.group = group
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self._dimension = dimension
        self._ledger = ledger

    def count(self, phase: str, count: float) -> None:
        """Add to the ledger."""
        self._ledger.add(phase, self._dimension, count)

    def all_reduce(self, flat: Tensor, phase: str, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Pending:
        """Sum ``flat`` over the group in place, or what else ``op`` does."""
        if self.size == 1:
            return Pending([])
        self.count(phase, 2 * (self.size - 1) / self.size * _bytes(flat))
        return Pending([dist.all_reduce(flat, op=op, group=self.group, async_op=True)], flat)

    def reduce_scatter(self, flat: Tensor, cuts: Sequence[int], phase: str) -> Pending:
        """Sum ``flat`` in place so that rank r holds the result in ``[cuts[r], cuts[r + 1])``; the rest is scratch.

        Equal segments take one native call; unequal ones a rooted reduce each, empty ones none.
        """
        if self.size == 1:
            return Pending([])
        self._count_segments(flat, cuts, phase)
        own = flat[cuts[self.rank] : cuts[self.rank + 1]]
        if _even(cuts):
            whole = flat[cuts[0] : cuts[-1]]
            return Pending([reduce_scatter_single(own, whole, group=self.group, async_op=True)], flat)
        works = [
            dist.reduce(flat[low:high], group=self.group, group_dst=root, async_op=True)
            for root, (low, high) in enumerate(pairwise(cuts))
            if low < high
        ]
        return Pending(works, flat)

    def all_gather(self, flat: Tensor, cuts: Sequence[int], phase: str) -> Pending:
        """Fill ``flat`` in place from the segments ``[cuts[r], cuts[r + 1])`` of every rank r.

        Equal segments take one native call; unequal ones a broadcast each, empty ones none.
        """
        if self.size == 1:
            return Pending([])
        self._count_segments(flat, cuts, phase)
        if _even(cuts):
            own = flat[cuts[self.rank] : cuts[self.rank + 1]]
            whole = flat[cuts[0] : cuts[-1]]
            return Pending([all_gather_single(whole, own, group=self.group, async_op=True)], flat)
        works = [
            dist.broadcast(flat[low:high], group=self.group, group_src=root, async_op=True)
            for root, (low, high) in enumerate(pairwise(cuts))
            if low < high
        ]
        return Pending(works, flat)

    def all_to_all(
        self, out: Tensor, data: Tensor, received: Sequence[int], sent: Sequence[int], phase: str
    ) -> Pending:
        """Send ``sent[r]`` elements of ``data`` to each rank r and receive ``received[r]`` from it into ``out``."""
        other = max(sum(sent) - sent[self.rank], sum(received) - received[self.rank])
        self.count(phase, other * data.element_size())
        work = dist.all_to_all_single(out, data, list(received), list(sent), group=self.group, async_op=True)
        return Pending([work], out, data)

    def _count_segments(self, flat: Tensor, cuts: Sequence[int], phase: str) -> None:
        other = cuts[-1] - cuts[0] - (cuts[self.rank + 1] - cuts[self.rank])
        self.count(phase, other * flat.element_size())


class Reduction(Protocol):
    """How gradients are summed over the DP group."""

    def all_reduce(self, flat: Tensor, phase: str) -> Pending:
        """Sum in place on every rank."""
        ...

    def reduce_scatter(self, flat: Tensor, cuts: Sequence[int], phase: str) -> Pending:
        """Sum in place, each rank its own segment."""
        ...


class RankOrder:
    """Sums in rank order, ``((g0 + g1) + g2) + ...``, whatever the bucket layout (reduction mode ``rank-order``).

    The backends' own order depends on where a buffer is cut, so that at three ranks or more two layouts differ in the
    last bit.  This mode costs a staging buffer of the segment times the group's size.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._comm = communicator

    def reduce_scatter(self, flat: Tensor, cuts: Sequence[int], phase: str) -> Pending:
        """Exchange contributions, then sum this rank's segment locally, in rank order."""
        comm = self._comm
        if comm.size == 1:
            return Pending([])
        own = flat[cuts[comm.rank] : cuts[comm.rank + 1]]
        received = flat.new_empty(comm.size * len(own))
        sent = [high - low for low, high in pairwise(cuts)]
        pending = comm.all_to_all(received, flat[cuts[0] : cuts[-1]], [len(own)] * comm.size, sent, phase)

        def total() -> None:
            pending.wait()
            own.copy_(sum_in_order(received.view(comm.size, -1)))

        return Pending([], flat, received, then=total)

    def all_reduce(self, flat: Tensor, phase: str) -> Pending:
        """Reduce-scatter in rank order, then gather; the gather runs inside ``wait``, in the order of the waits."""
        comm = self._comm
        cuts = [len(flat) * r // comm.size for r in range(comm.size + 1)]
        scattered = self.reduce_scatter(flat, cuts, phase)

        def total() -> None:
            scattered.wait()
            comm.all_gather(flat, cuts, phase).wait()

        return Pending([], flat, then=total)


def make_reduction(mode: str, communicator: Communicator) -> Reduction:
    """Return the reduction of ``mode``: ``native`` (the backend's order) or ``rank-order``."""
    modes: dict[str, Callable[[Communicator], Reduction]] = {"native": lambda c: c, "rank-order": RankOrder}
    return modes[mode](communicator)


def sum_in_order(rows: Tensor) -> Tensor:
    """Return ``rows[0] + rows[1] + ...``, added from the left."""
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _even(cuts: Sequence[int]) -> bool:
    return len({high - low for low, high in pairwise(cuts)}) == 1


def same_on_all_ranks(digest: str, group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether every rank of ``group`` passed the same hexadecimal ``digest``; all of them must call."""
    mine = torch.tensor(list(bytes.fromhex(digest)), dtype=torch.uint8, device=device)
    rows = mine.new_empty(dist.get_world_size(group) * len(mine))
    all_gather_single(rows, mine, group=group)
    return bool((rows.view(-1, len(mine)) == mine).all())
