"""The progress of a run on a terminal, or as plain lines in a log."""

from __future__ import annotations

import time
from typing import TextIO


class Progress:
    """Shows how far a run is and the time that is left, at most once in ``interval`` seconds.

    unit: what ``steps`` counts.  On a terminal one line is rewritten; elsewhere every report is a line of its own.
    """

    def __init__(self, out: TextIO, steps: int, interval: float, unit: str = "step") -> None:
        self._out, self._steps, self._interval, self._unit = out, steps, interval, unit
        self._rewrite = out.isatty()
        self._begin = self._shown = time.monotonic()
        self._done_here = 0
        self._open = False

    def step(self, step: int, loss: float, tokens_per_s: float) -> None:
        """Report that training step ``step`` is done."""
        self.advance(step, f"loss {loss:.4f}  {tokens_per_s:,.0f} tokens/s  ")

    def advance(self, done: int, detail: str = "") -> None:
        """Report that ``done`` units are done."""
        self._done_here += 1
        now = time.monotonic()
        if now - self._shown < self._interval and done != self._steps:
            return
        self._shown = now
        left = (now - self._begin) / self._done_here * (self._steps - done)
        self._write(f"{self._unit} {done}/{self._steps}  {detail}ETA {duration(left)}")

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
