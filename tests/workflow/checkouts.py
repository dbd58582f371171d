"""Copies of what the workflow is made of, and snakemake in them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
PARTS = ("Snakefile", "workflows", "experiments", "results/published")
LINKS = ("slurm", "profiles")


def checkout(folder: Path, *more: str) -> Path:
    """Copy the workflow, without the packages, to ``folder``; return it.  ``more`` parts on demand."""
    for part in (*PARTS, *more):
        source, target = ROOT / part, folder / part
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    for link in LINKS:
        (folder / link).symlink_to(os.readlink(ROOT / link))
    return folder


def command(*options: str) -> list[str]:
    """The command line of snakemake in this environment."""
    return [sys.executable, "-m", "snakemake", *options]


def environment(**more: str) -> dict[str, str]:
    """The environment of a test's snakemake."""
    return {**os.environ, "OMP_NUM_THREADS": "1", **more}


def snakemake(folder: Path, *options: str, check: bool = True, **more: str) -> str:
    """Run snakemake with two cores and no profile in ``folder``; return everything that it printed."""
    words = command("--cores", "2", "--workflow-profile", "none", *options)
    done = subprocess.run(words, cwd=folder, env=environment(**more), capture_output=True, text=True, timeout=840)
    output = done.stdout + done.stderr
    assert not check or done.returncode == 0, output
    return output


def edit(path: Path, change: Any) -> None:
    """Let ``change`` change the data of a YAML file in place."""
    data = yaml.safe_load(path.read_text())
    change(data)
    path.write_text(yaml.safe_dump(data, sort_keys=False))
