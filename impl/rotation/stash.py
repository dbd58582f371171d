"""The stashed versions of a stage's weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from impl.rotation.schedule import Action, uses

Weights = tuple[Tensor, ...]
"""The weights of a stage: a flat tensor for each of its families."""


class Stash:
    """Holds the versions that some later forward or backward still runs on; the newest is the live weights themselves.

    A version is copied only if it is needed after the update that replaces it, and dropped with its last use; both
    follow from ``actions``, those of the stage's schedule.  Buffers of dropped versions are used again.

    newest: number of the newest version.
    peak: most versions held at one time so far, the newest included.
    """

    def __init__(self, actions: Sequence[Action], live: Weights, *, on_cpu: bool = False) -> None:
        self.newest, self.peak = 0, 1
        self._live = live
        self._left = uses(actions)
        self._copies: dict[int, Weights] = {}
        self._free: list[Weights] = []
        self._place = torch.device("cpu") if on_cpu else None

    @property
    def versions(self) -> dict[int, Weights]:
        """The copies by version; the newest is among them only if it had to be copied ahead of its update."""
        return dict(self._copies)

    def weights(self, version: int) -> Weights:
        """Return ``version`` on the stage's device; raises ``RuntimeError`` if it is not held (any more)."""
        if version in self._copies:
            copies = self._copies[version]
            if self._place is None:
                return copies
            return tuple(t.to(live.device) for t, live in zip(copies, self._live, strict=True))
        if version != self.newest:
            raise RuntimeError(f"version {version} is not in the stash, which has {sorted(self._copies)}")
        return self._live

    def copy_newest(self) -> None:
        """Copy the newest version, unless that has been done."""
        if self.newest in self._copies:
            return
        buffers = self._free.pop() if self._free else tuple(map(self._buffer, self._live))
        for buffer, live in zip(buffers, self._live, strict=True):
            buffer.copy_(live)
        self._copies[self.newest] = buffers

    def used(self, version: int, times: int = 1) -> None:
        """Count forwards and backwards that are done with ``version``."""
        self._left[version] -= times
        self._drop_unused(version)

    def before_update(self) -> None:
        """Copy the newest version if it is still needed after the update that is about to change it in place."""
        if self._left[self.newest] > 0:
            self.copy_newest()

    def after_update(self) -> None:
        """Count the update."""
        self.newest += 1
        self._drop_unused(self.newest - 1)
        self._count()

    def restore(self, newest: int, copies: dict[int, Weights], used: Sequence[int], *, peak: int) -> None:
        """Take over a state: ``copies`` by version, and the version of each forward and backward done so far."""
        self.newest, self.peak, self._copies = newest, peak, {}
        for version, weights in copies.items():
            pairs = zip(self._live, weights, strict=True)
            self._copies[version] = tuple(self._buffer(live).copy_(t) for live, t in pairs)
        self._left.subtract(used)

    def bytes(self) -> int:
        """Return the bytes of all buffers of copies, those waiting to be used again included."""
        held = [*self._copies.values(), *self._free]
        return sum(t.numel() * t.element_size() for weights in held for t in weights)

    def _buffer(self, live: Tensor) -> Tensor:
        """Return memory for a copy of ``live``; CPU memory that a GPU copies from is pinned."""
        return torch.empty_like(live, device=self._place, pin_memory=self._place is not None and live.is_cuda)

    def _drop_unused(self, version: int) -> None:
        if self._left[version] <= 0 and version in self._copies and version != self.newest:
            self._free.append(self._copies.pop(version))

    def _count(self) -> None:
        self.peak = max(self.peak, len(self._copies.keys() | {self.newest}))
