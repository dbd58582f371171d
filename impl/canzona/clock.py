"""Wall time per phase of a step."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Clock:
    """Accumulates seconds per phase; phases may nest, and an inner one is counted in both.

    On a GPU the device is synchronized at both ends of a phase, so that a phase is charged with its own kernels.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds: dict[str, float] = defaultdict(float)
        self._running: list[str] = []

    @property
    def phase(self) -> str:
        """The innermost phase that is running, empty if none is."""
        return self._running[-1] if self._running else ""

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Time the body as part of ``phase``."""
        begin = self._now()
        self._running.append(phase)
        try:
            yield
        finally:
            self._running.pop()
            self._seconds[phase] += self._now() - begin

    def reset(self) -> None:
        """Start a new step."""
        self._seconds.clear()

    def seconds(self) -> dict[str, float]:
        """Return the seconds of every phase since the last reset."""
        return dict(self._seconds)

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
