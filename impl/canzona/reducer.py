"""Sums gradients over data-parallel ranks, bucket by bucket, while the backward is still running."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from impl.canzona.buffers import FamilyBuffer
from impl.canzona.collectives import Pending, Reduction
from impl.canzona.plan import Bucket

PHASE = "grad_reduce"


class GradientReducer:
    """Starts the reduction of a bucket as soon as its last gradient is there.

    Buckets start in one fixed order, that in which a full backward completes them, and none overtakes another.  So
    every rank issues the same collectives in the same order even if some gradients are missing on one of them; whatever
    is still waiting when the backward ends goes out then.
    """

    def __init__(self, buffers: Sequence[FamilyBuffer], reduction: Reduction, dp: int) -> None:
        self._buffers = buffers
        self._reduction = reduction
        self._scale = 1.0 / dp
        work = [(buffer, bucket) for buffer in buffers for bucket in buffer.family.buckets]
        # The backward runs against registration order: a bucket is complete with its first registered parameter.
        self._order = sorted(work, key=lambda item: -min(slot.parameter for slot in item[1].slots))
        self._position = {
            key: number for number, (buffer, bucket) in enumerate(self._order) for key in buffer.keys(bucket)
        }
        self._missing: list[set[int]] = []
        self._open = self._last = False
        self._fresh = True
        self._next = 0
        self._pending: list[Pending] = []
        for buffer in buffers:
            for index, parameter in buffer.module_parameters.items():
                parameter.register_post_accumulate_grad_hook(partial(self._arrived, buffer, index))

    def open(self, *, last: bool) -> None:
        """Begin a microbatch; reductions start only in the last one of a step.

        Raises ``RuntimeError`` if the last one has been and its step is still due.
        """
        if self._next:
            raise RuntimeError("microbatch() after the last one of a step: call engine.step() first")
        if self._fresh:
            for buffer in self._buffers:
                buffer.gradients.zero_()
        self._fresh = False
        self._open, self._last = True, last
        self._missing = [buffer.keys(bucket) for buffer, bucket in self._order]

    def close(self) -> None:
        """End a microbatch; after the last one every bucket is on its way."""
        if self._last:
            while self._next < len(self._order):
                self._launch(*self._order[self._next])
        self._open = False

    def wait(self) -> None:
        """Wait for all reductions of the step, in the order in which they started.

        The next microbatch starts from zero.  Raises ``RuntimeError`` if there was no last microbatch.
        """
        if self._next < len(self._order):
            raise RuntimeError("engine.step() needs a microbatch(last=True) before it: gradients are not reduced")
        for pending in self._pending:
            pending.wait()
        self._pending = []
        self._fresh, self._next = True, 0

    def _arrived(self, buffer: FamilyBuffer, index: int, _: Tensor) -> None:
        if not self._open:
            raise RuntimeError("backward ran outside engine.microbatch(): its gradients would be lost")
        buffer.accumulate(index)
        if self._last:
            self._missing[self._position[index]].discard(index)
            while self._next < len(self._order) and not self._missing[self._next]:
                self._launch(*self._order[self._next])

    def _launch(self, buffer: FamilyBuffer, bucket: Bucket) -> None:
        self._next += 1
        flat = buffer.gradients[bucket.start : bucket.end]
        flat.mul_(self._scale)
        if bucket.cuts:
            pending = self._reduction.reduce_scatter(buffer.gradients, bucket.cuts, PHASE)
        else:
            pending = self._reduction.all_reduce(flat, PHASE)
        self._pending.append(pending)
