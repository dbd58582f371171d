"""``scripts/gpu_check.sh``: what it would run, what it refuses, and that its parts work on a CPU with a tiny model."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from impl.errors import ConfigError
from impl.projection import kernel_table
from impl.projection.kernel_table import Table
from scripts import rotation_overhead
from tests.unit.test_kernel_table import row

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "gpu_check.sh"
BUDGET_S = 8 * 60


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(
        ["bash", str(SCRIPT), *words], capture_output=True, text=True, env=variables, timeout=280, check=False
    )


def test_the_limits_add_up_to_eight_minutes_and_every_command_is_known() -> None:
    done = run("--dry-run")
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("timeout ")]
    assert sum(int(line.split()[1]) for line in lines) <= BUDGET_S
    commands = "\n".join(lines)
    for word in (
        "tests/gpu",
        "qwen3-1.7b",
        "qwen3-32b --tp 8",
        "basis-rotation",
        "asc",
        "canzona",
        "rotation_overhead",
    ):
        assert word in commands
    for line in lines:
        if found := re.search(r"--seconds (\d+)", line):
            assert int(found[1]) + 25 <= int(line.split()[1]), "the table is written before the limit"


def test_without_a_gpu_it_is_one_line_and_exit_code_2() -> None:
    if shutil.which("nvidia-smi") is not None:
        pytest.skip("this machine has a GPU")
    done = run()
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "no GPU" in done.stderr
    for words in (("--device", "tpu"), ("--wrong",), ("--out",)):
        done = run(*words)
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_all_parts_on_a_cpu(tmp_path: Path) -> None:
    done = run("--device", "cpu", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    table = kernel_table.read(tmp_path / "kernels.csv")
    assert {"update", "apply", "norm", "copy", "product", "launch"} <= {r.kernel for r in table.rows}
    overhead = pd.read_csv(tmp_path / "rotation_overhead.csv")
    assert (overhead["ratio"] > 1).all()
    for strategy in ("canzona", "asc"):
        assert json.loads((tmp_path / f"replay-qwen3-tiny-{strategy}.json").read_text())["step_s"] > 0
    assert json.loads((tmp_path / "provenance.json").read_text())["versions"]["torch"]
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 200_000, "small enough to commit"


@pytest.mark.timeout(120)
def test_a_part_that_fails_does_not_stop_the_others_and_is_told(tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text('#!/bin/sh\n[ "$2" = pytest ] && exit 1\necho ran "$@"\n')
    broken.chmod(0o755)
    done = run("--device", "cpu", "--out", str(tmp_path / "out"), PYTHON=str(broken))
    assert done.returncode == 1
    assert "failed: tests that need a GPU" in done.stderr
    assert done.stdout.count("ran ") == 5, "kernels, two replays, overhead, provenance"


def test_the_overhead_is_the_ratio_of_both_updates() -> None:
    rotation, adamw = (
        kernel_table.update_key(rotation_overhead.create(n), (4, 8)) for n in ("basis-rotation", "adamw")
    )
    one = {"kernel": "update", "processes": 1}
    rows = [row(**one, key=rotation[0], size=0, seconds=4e-3, spike=9e-3), row(**one, key=adamw[0], size=32)]
    found = rotation_overhead.overhead(Table(tuple(rows)))
    assert found[["shape", "ratio", "spike_s"]].to_dict("records") == [{"shape": "4x8", "ratio": 2.0, "spike_s": 9e-3}]
    with pytest.raises(ConfigError, match="no update of basis rotation"):
        rotation_overhead.overhead(Table((rows[1],)))
    with pytest.raises(ConfigError, match="no measurement of update adamw"):
        rotation_overhead.overhead(Table((rows[0],)))
