"""Time per phase of a step."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch

Stamp = float | torch.cuda.Event


class Clock:
    """Charges every moment of a step to the phase that is running; of nested phases to the innermost.

    On a GPU it marks the current stream with events and never waits for the device, so that it disturbs no overlap:
    a phase that waits for a collective is charged with what was not hidden of it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._running: list[str] = []
        self._marks: list[tuple[Stamp, str]] = []
        self.reset()

    @property
    def phase(self) -> str:
        """The innermost phase that is running, empty if none is."""
        return self._running[-1] if self._running else ""

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Time the body as part of ``phase``."""
        self._running.append(phase)
        self._mark()
        try:
            yield
        finally:
            self._running.pop()
            self._mark()

    def reset(self) -> None:
        """Start a new step."""
        self._marks.clear()
        self._mark()

    def seconds(self) -> dict[str, float]:
        """Return the seconds of every phase since the last reset, and of ``iteration``: from there to the last mark.

        Waits for the device.
        """
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        out: dict[str, float] = defaultdict(float)
        for (begin, phase), (end, _) in pairwise(self._marks):
            if phase:
                out[phase] += _between(begin, end)
        return {**out, "iteration": _between(self._marks[0][0], self._marks[-1][0])}

    def _mark(self) -> None:
        """Note that from now on :attr:`phase` runs."""
        if self._device.type == "cuda":
            stamp: Stamp = torch.cuda.Event(enable_timing=True)
            stamp.record(torch.cuda.current_stream(self._device))
        else:
            stamp = time.perf_counter()
        self._marks.append((stamp, self.phase))


def _between(begin: Stamp, end: Stamp) -> float:
    if isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        return begin.elapsed_time(end) / 1e3
    assert isinstance(begin, float)
    assert isinstance(end, float)
    return end - begin
