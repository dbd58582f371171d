"""`make` and the script behind `make venv`: clear messages, and nothing is touched when there is nothing to do."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def copy(tmp_path) -> Path:
    """Makefile, script and requirements alone, without a `.venv`."""
    folder = tmp_path / "a checkout"
    (folder / "scripts").mkdir(parents=True)
    for name in ("Makefile", "pyproject.toml", "requirements-ci.txt", "requirements-gpu.txt", "scripts/make_venv.sh"):
        shutil.copy(ROOT / name, folder / name)
    return folder


def make(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}
    return subprocess.run(["make", *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=60)


def fake_python(folder: Path, version: str) -> Path:
    """A program that answers like a Python of ``version`` that supports nothing."""
    path = folder / "python-fake"
    path.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo "Python {version}" && exit 0\nexit 1\n')
    path.chmod(0o755)
    return path


def test_help_lists_the_targets(copy):
    shown = make(copy, "help").stdout
    for target in ("venv", "reproduce", "full", "test", "lint", "clean", "retry"):
        assert f"  make {target} " in shown


def test_an_old_python_gets_a_clear_message(copy):
    done = make(copy, "venv", f"PYTHON={fake_python(copy.parent, '3.9.2')}")
    assert done.returncode != 0
    assert "Python 3.11 or 3.12 is needed, found: Python 3.9.2" in done.stderr
    assert not (copy / ".venv").exists()


def test_an_unknown_set_gets_a_clear_message(copy):
    done = make(copy, "venv", "EXTRA=gpus")
    assert done.returncode != 0
    assert "EXTRA=gpus is unknown: write EXTRA=ci or EXTRA=gpu" in done.stderr


def test_a_stamped_environment_is_left_alone(copy):
    bin_folder = copy / ".venv" / "bin"
    bin_folder.mkdir(parents=True)
    shutil.copy("/bin/true", bin_folder / "python")
    inputs = ("requirements-gpu.txt", "pyproject.toml", "scripts/make_venv.sh")
    text = b"".join((copy / name).read_bytes() for name in inputs)
    key = subprocess.run(["cksum"], input=text, capture_output=True, check=True).stdout.decode().strip()
    (copy / ".venv" / ".installed").write_text(f"gpu {key} {copy}\n")
    done = make(copy, "venv")  # no EXTRA: the set that it was made with
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert make(copy, "venv", f"PYTHON={fake_python(copy.parent, '3.9')}", "EXTRA=ci").returncode != 0


def test_clean_keeps_reference_results(copy):
    for name in ("published", "gpu", "laptop", "generated"):
        (copy / "results" / name).mkdir(parents=True)
    for name in ("impl", "baselines", "paper_figures", "tests"):
        (copy / name / "__pycache__").mkdir(parents=True)
    assert make(copy, "clean").returncode == 0
    assert sorted(p.name for p in (copy / "results").iterdir()) == ["gpu", "laptop", "published"]
    assert not list(copy.rglob("__pycache__"))
