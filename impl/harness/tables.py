"""Tables on disk: each as parquet for programs and as CSV for people, never half written."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pandas as pd

from impl.errors import ConfigError


def write_table(frame: pd.DataFrame, path: Path) -> None:
    """Write ``frame`` to the parquet file ``path`` and to a CSV file beside it; missing folders are created.

    Raises :class:`ConfigError` that names the file or folder that cannot be written.
    """
    csv = path.with_suffix(".csv")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, lambda beside: frame.to_parquet(beside, index=False))
        write_atomically(csv, lambda beside: frame.to_csv(beside, index=False))
    except OSError as error:
        raise ConfigError(f"cannot write {error.filename or path}: {error.strerror or error}") from None


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` fill a file beside ``path``, then put it in its place: no half-written file is ever seen."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write(beside)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
