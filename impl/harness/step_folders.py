"""The folders of a run's checkpoints: ``step-000020`` is whole as soon as it has its name, ``latest`` names the newest.

While it is written a folder is a draft, ``step-000020.tmp``, which counts for nothing.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from impl.harness.record import sync_folder, write_atomically

KEPT = 2
"""Older checkpoints are deleted."""
_STEP = re.compile(r"step-(\d{6,})")


def path_of(folder: Path, step: int) -> Path:
    """Return where the checkpoint of ``step`` is."""
    return folder / f"step-{step:06d}"


def step_of(path: Path) -> int | None:
    """Return the step of a checkpoint's folder, None for any other path."""
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match else None


def draft_of(folder: Path, step: int) -> Path:
    """Return where the checkpoint of ``step`` is written before it is whole."""
    return folder / f"step-{step:06d}.tmp"


def publish(folder: Path, step: int) -> None:
    """Give the draft of ``step`` its name, once all its files are on disk, and delete old checkpoints and drafts."""
    final, draft = path_of(folder, step), draft_of(folder, step)
    sync_folder(draft)
    if final.exists():
        shutil.rmtree(final)
    draft.rename(final)
    sync_folder(folder)
    write_atomically(folder / "latest", final.name + "\n")
    for old in steps(folder)[:-KEPT]:
        shutil.rmtree(path_of(folder, old))
    for left in folder.glob("step-*.tmp"):  # of a process that was killed
        shutil.rmtree(left)


def steps(folder: Path) -> list[int]:
    """Return the steps of all complete checkpoints, rising."""
    if not folder.is_dir():
        return []
    return sorted(step for p in folder.iterdir() if (step := step_of(p)) is not None)


def latest(folder: Path) -> int | None:
    """Return the step of the newest complete checkpoint, None if there is none.

    A crash between naming a folder and updating ``latest`` leaves a newer whole folder, which counts.
    """
    return max(steps(folder), default=None)
