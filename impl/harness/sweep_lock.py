"""One workflow at a time for one folder of results, with a lock that ends with the process that holds it."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from impl.errors import ConfigError
from impl.harness.processes import this_process

NAME = ".workflow.lock"


def hold(folder: Path) -> int:
    """Take the lock of ``folder`` for the life of this process; return its descriptor, which must stay open.

    A killed process holds nothing: there is never a stale lock to remove.  Raises :class:`ConfigError` if another
    process holds it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / NAME, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
        os.close(descriptor)
        raise ConfigError(
            f"another workflow makes {folder} ({holder or 'holder not known'}): wait for it, or stop it first"
        ) from None
    except OSError as error:
        os.close(descriptor)
        raise ConfigError(f"cannot lock {folder}: {error.strerror}: use a file system with locks") from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{this_process()}\n".encode(), 0)
    return descriptor
