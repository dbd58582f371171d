"""The progress of a run on a terminal, or as plain lines in a log."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO


class Progress:
    """Shows how far a run is and the time that is left, at most once in ``interval`` seconds.

    unit: what ``steps`` counts.  samples: sequences that one unit trains on, 0 where that says nothing.  On a terminal
    one line is rewritten; elsewhere every report is a line of its own.
    """

    def __init__(self, out: TextIO, steps: int, interval: float, unit: str = "step", samples: float = 0.0) -> None:
        self._out, self._steps, self._interval, self._unit, self._samples = out, steps, interval, unit, samples
        self._rewrite = out.isatty()
        self._begin = self._shown = time.monotonic()
        self._done_here = self._shown_here = 0
        self._open = False

    def step(self, step: int, loss: float, samples_per_s: float, tokens_per_s: float) -> None:
        """Report that training step ``step`` is done."""
        self.advance(step, f"loss {loss:.4f}  {samples_per_s:,.1f} samples/s  {tokens_per_s:,.0f} tokens/s  ")

    def advance(self, done: int, detail: str | Callable[[], str] = "") -> None:
        """Report that ``done`` units are done.

        detail: what else is shown, or a function that returns it, called only for what is shown.  Samples per second
        are those since the last line.
        """
        self._done_here += 1
        now = time.monotonic()
        if now - self._shown < self._interval and done != self._steps:
            return
        said = detail if isinstance(detail, str) else detail()
        if self._samples and now > self._shown:
            speed = self._samples * (self._done_here - self._shown_here) / (now - self._shown)
            said += f"{speed:,.1f} samples/s  "
        self._shown, self._shown_here = now, self._done_here
        left = (now - self._begin) / self._done_here * (self._steps - done)
        self._write(f"{self._unit} {done}/{self._steps}  {said}ETA {duration(left)}")

    def line(self, text: str) -> None:
        """Print a line that stays."""
        if self._open:
            self._out.write("\n")
            self._open = False
        self._out.write(text + "\n")
        self._out.flush()

    def _write(self, text: str) -> None:
        if not self._rewrite:
            self.line(text)
            return
        self._out.write("\r" + text + "\x1b[K")
        self._out.flush()
        self._open = True


def duration(seconds: float) -> str:
    """Return ``m:ss`` or ``h:mm:ss``."""
    whole = round(seconds)
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
