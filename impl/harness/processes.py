"""Facts about processes that only the operating system knows; Linux has them all, other systems fewer."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import socket
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent, the process ``parent``, dies (Linux; elsewhere no effect).

    Exits at once if the parent is gone already.  The parent must start this process from a thread that lives on.
    """
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def is_stopped(pid: int) -> bool:
    """Return whether process ``pid`` is stopped (SIGSTOP, a debugger); False where the system does not tell."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] in ("T", "t")


def this_process() -> str:
    """Return a name of this process that :func:`has_ended` understands and people too."""
    return f"process {os.getpid()} on {socket.gethostname()}"


def has_ended(name: str) -> bool:
    """Return whether ``name``, of :func:`this_process`, is of a process of this machine that is no more."""
    found = re.fullmatch(r"process (\d+) on (.+)", name)
    if found is None or found[2] != socket.gethostname():
        return False
    try:
        os.kill(int(found[1]), 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # it lives, as another user's
        return False
    return False


def signal_name(exit_code: int) -> str:
    """Return the name of the signal of a negative exit code, such as ``SIGKILL``."""
    try:
        return signal.Signals(-exit_code).name
    except ValueError:
        return f"signal {-exit_code}"
