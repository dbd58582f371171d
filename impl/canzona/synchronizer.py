"""Brings updated parameters to all data-parallel ranks, and makes the forward wait for them only where it must."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any

from torch import nn

from impl.canzona.buffers import FamilyBuffer
from impl.canzona.clock import Clock
from impl.canzona.collectives import Communicator, Pending
from impl.canzona.plan import Bucket

PHASE = "param_sync"
Key = tuple[int, int]
"""Number of the family's buffer, number of the bucket."""


class ParameterSynchronizer:
    """Gathers per bucket what its owners updated.

    Gathers start in the order in which the forward needs the buckets; a hook before each module waits for the buckets
    that hold the module's own parameters.
    """

    def __init__(
        self, model: nn.Module, buffers: Sequence[FamilyBuffer], communicator: Communicator, clock: Clock
    ) -> None:
        self._buffers, self._comm, self._clock = buffers, communicator, clock
        per_bucket: list[tuple[Key, Bucket]] = [
            ((b, n), bucket)
            for b, buffer in enumerate(buffers)
            for n, bucket in enumerate(buffer.family.buckets)
            if buffer.family.synchronization == "per-bucket"
        ]
        self._order = sorted(per_bucket, key=lambda item: min(slot.parameter for slot in item[1].slots))
        self._once = [b for b in buffers if b.family.synchronization == "once"]
        self._pending: dict[Key, Pending] = {}
        owned = [
            [(buffer, piece) for buffer in self._once for piece in buffer.family.pieces(rank)]
            for rank in range(communicator.size)
        ]
        self._once_cuts = [0, *accumulate(sum(piece.end - piece.start for _, piece in pieces) for pieces in owned)]
        self._once_views = [
            (buffer.parameters[piece.start : piece.end], rank) for rank, ps in enumerate(owned) for buffer, piece in ps
        ]
        home = {
            id(buffers[b].module_parameters[key]): (b, n)
            for (b, n), bucket in per_bucket
            for key in buffers[b].keys(bucket)
        }
        for module in model.modules():
            keys = {home[id(p)] for p in module.parameters(recurse=False) if id(p) in home}
            if keys:
                module.register_forward_pre_hook(partial(self._before_forward, keys))

    def start(self) -> None:
        """Start to gather every bucket; what a plan synchronizes at once is gathered here and now."""
        if self._comm.size == 1:
            return
        for key, bucket in self._order:
            self._pending[key] = self._comm.all_gather(self._buffers[key[0]].parameters, bucket.cuts, PHASE)
        if self._once:
            self._gather_once()

    def wait(self) -> None:
        """Wait for every bucket."""
        self._wait(self._pending.keys())

    def _before_forward(self, keys: set[Key], _module: nn.Module, _args: Any) -> None:
        if self._pending:
            self._wait(keys & self._pending.keys())

    def _wait(self, keys: Any) -> None:
        due = [key for key, _ in self._order if key in keys]
        if due:
            with self._clock(PHASE):
                for key in due:
                    self._pending.pop(key).wait()

    def _gather_once(self) -> None:
        """One blocking uneven all-gather of whole parameters, flattened by owner (NV-layerwise, ping-pong)."""
        views, cuts = self._once_views, self._once_cuts
        flat = views[0][0].new_empty(cuts[-1])
        parts = flat.split([len(view) for view, _ in views])
        for part, (view, rank) in zip(parts, views, strict=True):
            if rank == self._comm.rank:
                part.copy_(view)
        self._comm.all_gather(flat, cuts, PHASE).wait()
        for part, (view, rank) in zip(parts, views, strict=True):
            if rank != self._comm.rank:
                view.copy_(part)
