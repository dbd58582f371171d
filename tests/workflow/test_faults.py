"""The fault drill: a sweep whose processes are killed at random gives, started once more, what a calm one gives."""

from __future__ import annotations

import json
import random
import subprocess
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from impl.harness import experiments, pipeline_run, tidy
from impl.harness.pipeline_spec import PipelineSpec
from tests.workflow.checkouts import checkout, command, edit, environment
from tests.workflow.processes import kill, until, working_in

RUNS = 12
STEPS = 40
KILLS_OF_JOBS = 5
NOT_REPEATED = ("elapsed",)
"""Quantities that are times."""
WHEN = ["started", "commit", "dirty"]


def twelve(experiment: dict[str, Any]) -> None:
    """Two methods, two numbers of stages, three seeds; a checkpoint every few updates."""
    experiment["tiers"]["ci"] = {
        "grids": [{"stages": [1, 2], "methods": ["adamw", "rotation"]}],
        "seeds": [0, 1, 2],
        "base": {"steps": STEPS, "layers": 2, "eval_every": 10, "lr": 4.0e-3, "checkpoint_every": 5},
    }


def start(folder: Path, log: Path) -> subprocess.Popen[bytes]:
    words = command("--cores", "2", "--config", "tier=ci", "--", "rotation")
    with log.open("ab") as out:
        return subprocess.Popen(words, cwd=folder, env=environment(), stdout=out, stderr=subprocess.STDOUT)


def undisturbed(folder: Path, out: Path) -> pd.DataFrame:
    """The tidy table of the same runs, one after the other in this process, without a workflow."""
    experiment = experiments.load(folder / "experiments" / "rotation.yaml")
    for run in experiment.runs("ci"):
        assert isinstance(run.spec, PipelineSpec)
        assert pipeline_run.execute(run.spec, out / run.id) == 0
    return tidy.collect(experiment, "ci", out)


def deterministic(frame: pd.DataFrame) -> pd.DataFrame:
    """The columns of a tidy table that are the same each time, in an order of their own."""
    frame = frame[~frame["quantity"].isin(NOT_REPEATED)].drop(columns=WHEN)
    return frame.sort_values(["run", "quantity", "update", "stage"], kind="stable").reset_index(drop=True)


def rows(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The rows of every run's metrics; fails for a line that is not whole."""
    found = (folder / "results/generated/ci/pipelines/runs").glob("*/metrics.jsonl")
    return {path.parent.name: [json.loads(line) for line in path.read_text().splitlines()] for path in found}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_disturbed_sweep_ends_as_an_undisturbed_one(tmp_path):
    wild = checkout(tmp_path / "wild")
    edit(wild / "experiments" / "rotation.yaml", twelve)
    log, chance = tmp_path / "log", random.Random(0)

    scheduler = start(wild, log)
    until(lambda: scheduler.poll() is not None or working_in(wild, "-m impl pipeline"), 120)
    assert start(wild, tmp_path / "second").wait() == 1
    assert "another workflow makes results/generated/ci (process" in (tmp_path / "second").read_text()
    for _ in range(KILLS_OF_JOBS):
        until(lambda: scheduler.poll() is not None or working_in(wild, "-m impl pipeline"), 120)
        time.sleep(chance.uniform(0, 5))
        jobs = working_in(wild, "-m impl pipeline")
        if jobs:
            kill(chance.choice(jobs))
    until(lambda: scheduler.poll() is not None or working_in(wild, "-m impl pipeline"), 120)
    scheduler.kill()
    scheduler.wait()
    assert len(list(wild.rglob("ended"))) < RUNS, "the sweep ended before it was disturbed"

    assert start(wild, log).wait() == 0, log.read_text()[-4000:]  # jobs of the dead scheduler may still run

    found = pd.read_parquet(wild / "results/generated/ci/rotation/rotation.parquet")
    calm = undisturbed(wild, tmp_path / "calm")
    pd.testing.assert_frame_equal(deterministic(found), deterministic(calm), check_exact=True, check_dtype=False)
    assert len(rows(wild)) == RUNS
    for run, written in rows(wild).items():
        steps = [row["step"] for row in written if row["event"] == "step"]
        assert steps == list(range(1, STEPS + 1)), f"{run} was written by two processes"
    for manifest in wild.rglob("manifest.json"):
        assert json.loads(manifest.read_text())["status"] == "done"
    assert not list(wild.rglob("*.parquet.*"))
