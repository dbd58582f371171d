"""Where a number comes from: code, library versions, machine, time."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

LIBRARIES = {
    "torch": "torch",
    "megatron": "megatron-core",
    "transformers": "transformers",
    "datasets": "datasets",
    "numpy": "numpy",
    "ricercar": "ricercar",
}
"""Key in the record -> name of the distribution."""


def now() -> str:
    """Return the time in UTC as ISO 8601, to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def collect() -> dict[str, Any]:
    """Return ``git``, ``versions`` and ``hardware`` of this process as plain data.  Does not initialise CUDA."""
    return {"git": git(), "versions": versions(), "hardware": hardware()}


def git() -> dict[str, Any]:
    """Return ``commit`` and ``dirty`` (the packages differ from it); both None outside a checkout of this project."""
    root = Path(__file__).resolve().parents[2]
    tracked = _output("git", "-C", str(root), "ls-files", "--error-unmatch", "impl/harness/provenance.py")
    commit = _output("git", "-C", str(root), "rev-parse", "HEAD") if tracked else None
    if commit is None:
        return {"commit": None, "dirty": None}
    changes = _output("git", "-C", str(root), "status", "--porcelain", "--", "impl", "baselines", "pyproject.toml")
    return {"commit": commit, "dirty": None if changes is None else bool(changes)}


def versions() -> dict[str, str | None]:
    """Return the versions of Python and of the libraries that decide a result; None for one that is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for key, distribution in LIBRARIES.items():
        try:
            found[key] = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            found[key] = None
    return found


def hardware() -> dict[str, Any]:
    """Return the machine: CPU model, usable cores, memory in bytes, GPU name (None without), all GPUs, driver."""
    gpus = _gpus()
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": _cpu_model(),
        "cores": usable,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpu": gpus[0][0] if gpus else None,
        "gpus": [name for name, _ in gpus],
        "driver": gpus[0][1] if gpus else None,
    }


def _cpu_model() -> str:
    if sys.platform == "darwin":
        return _output("sysctl", "-n", "machdep.cpu.brand_string") or platform.processor()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def _gpus() -> list[tuple[str, str]]:
    """Return (name, driver version) of every NVIDIA GPU, asked from the driver so that CUDA stays uninitialised."""
    if shutil.which("nvidia-smi") is None:
        return []
    text = _output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader") or ""
    rows = (line.rpartition(",") for line in text.splitlines() if "," in line)
    return [(name.strip(), driver.strip()) for name, _, driver in rows]


def _output(*command: str) -> str | None:
    """Return what ``command`` prints, stripped; None if it fails or is not installed."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
