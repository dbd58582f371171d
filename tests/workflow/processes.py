"""Processes that a test started, found by what they are and where they work; for tests that kill some."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path


def working_in(folder: Path, *words: str) -> list[int]:
    """Ids of the living processes whose working folder is ``folder`` and whose command line has all ``words``."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            here = os.readlink(entry / "cwd")
        except OSError:  # ended meanwhile, or not ours
            continue
        if here == str(folder) and all(word in command for word in words):
            found.append(int(entry.name))
    return sorted(found)


def kill(pid: int) -> None:
    """Send SIGKILL to a process that may have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def until(condition: Callable[[], object], seconds: float = 90.0, every: float = 0.1) -> None:
    """Wait until ``condition`` holds; raises AssertionError after ``seconds``."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{getattr(condition, '__doc__', None) or condition} did not come about"
        time.sleep(every)
