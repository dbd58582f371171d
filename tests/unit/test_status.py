"""The status of a sweep: what it says of every kind of run folder, and that looking disturbs nothing."""

from __future__ import annotations

import fcntl
import io
import json
import os
import re
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from impl.__main__ import main
from impl.cli import status as command
from impl.harness import run_state
from impl.harness.processes import this_process
from impl.harness.record import RunFolder
from impl.harness.run import Run
from impl.harness.run_state import read_state
from impl.harness.status import DEFAULT, Sweep
from impl.harness.step_time_spec import StepTimeSpec
from tests.unit import fake_runs

ROOT = Path(__file__).parents[2]
ENDED = "2026-11-29T12:01:00+00:00"


@pytest.fixture
def files(tmp_path) -> Path:
    """Four experiments: 7 training runs, 2 timing jobs, and pipeline runs of which two experiments share 9."""
    folder = tmp_path / "experiments"
    folder.mkdir()
    deep = {"grids": [{"stages": [8]}], "seeds": [0, 1, 2, 3]}
    for name, data in {
        "precision": fake_runs.precision_data(seeds=[0]),
        "step_time": fake_runs.step_time_data(),
        "rotation": fake_runs.pipeline_data(),
        "sweep": fake_runs.pipeline_data(**deep),
    }.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(data))
    (folder / "balance.yaml").write_text("tiers: {}\n")
    return folder


@pytest.fixture
def sweep(files, tmp_path) -> Sweep:
    return Sweep(files, "ci", tmp_path / "results")


def at(seconds_ago: float) -> str:
    return datetime.fromtimestamp(time.time() - seconds_ago, UTC).isoformat(timespec="milliseconds")


def attempt(folder: Path, holder: str, rows: list[dict] = (), *, begun: float = 60.0) -> Path:  # type: ignore[assignment]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".attempt.json").write_text(json.dumps({"run_id": "x", "started": at(begun)}))
    (folder / ".lock").write_text(f"{holder}\n")
    if rows:
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def training_rows(steps: int, seconds: float = 0.5) -> list[dict]:
    rows: list[dict] = [
        {"event": "step", "step": i, "loss": 5.0 - i / 10, "slowed": i == 1, "seconds": {"iteration": seconds}}
        for i in range(1, steps + 1)
    ]
    rows[0]["seconds"] = {"iteration": 60.0}
    return [*rows, {"event": "heldout", "step": steps, "loss": 9.0}]


def dead() -> str:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return this_process().replace(str(os.getpid()), str(process.pid))


def first(sweep: Sweep, experiment: str) -> Run:
    return sweep.runs[experiment][0]


def folder_of(sweep: Sweep, tmp_path: Path, experiment: str, number: int = 0) -> Path:
    return sweep.runs[experiment][number].place(tmp_path / "results", experiment)


def test_default_experiments_are_those_of_the_workflow():
    text = (ROOT / "workflows/rules/common.smk").read_text()
    found = re.search(r"^DEFAULT = \(([^)]*)\)", text, re.MULTILINE)
    assert found, "the workflow's DEFAULT moved: change this test and see that status.DEFAULT still follows it"
    names = re.findall(r'"(\w+)"', found[1])
    made_of_runs = [n for n in names if "kind" in yaml.safe_load((ROOT / "experiments" / f"{n}.yaml").read_text())]
    assert made_of_runs == list(DEFAULT)


def test_without_results_everything_waits(sweep, tmp_path):
    status = sweep.read()
    assert {entry.state.name for entry in status.entries} == {"waiting"}
    assert status.eta_s is None
    assert status.runs_per_hour is None
    assert status.experiments == ("step_time", "precision", "rotation")
    (tmp_path / "results").mkdir()
    assert len(sweep.read().entries) == 2 + 7 + 21
    assert not any((tmp_path / "results").iterdir())


def test_a_live_process_is_running_with_speed_and_eta(sweep, tmp_path):
    run, path = first(sweep, "precision"), folder_of(sweep, tmp_path, "precision")
    attempt(path, this_process(), training_rows(10))
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"event": "step", "step": 11, "lo')  # what a reader may catch of a write
    state = read_state(run, path)
    assert (state.name, state.done, state.of, state.unit) == ("running", 10, 30, "step")
    assert state.loss == pytest.approx(4.0)
    assert state.samples_per_s == pytest.approx(16 / 0.5)  # the slowed first step does not count
    assert state.eta_s == pytest.approx(20 * 0.5)
    assert state.sign_s == pytest.approx(0, abs=30)


def test_only_the_tail_of_long_metrics_is_read(sweep, tmp_path, monkeypatch):
    run, path = first(sweep, "precision"), folder_of(sweep, tmp_path, "precision")
    attempt(path, this_process(), training_rows(25))
    whole = (path / "metrics.jsonl").read_bytes()
    (path / "metrics.jsonl").write_bytes(b"not JSON at all\n" * 10_000 + whole)
    assert len(run_state.tail(path / "metrics.jsonl")) == 26
    monkeypatch.setattr(run_state, "TAIL_BYTES", 300)
    assert 0 < len(run_state.tail(path / "metrics.jsonl")) < 4
    assert read_state(run, path).done == 25
    assert run_state.tail(tmp_path) == []


@pytest.mark.parametrize("experiment", ["step_time", "rotation"])
def test_timing_jobs_and_pipelines_have_progress_too(sweep, tmp_path, experiment):
    run, path = first(sweep, experiment), folder_of(sweep, tmp_path, experiment)
    if experiment == "rotation":
        rows = [{"event": "step", "step": i, "loss": 3.5, "elapsed": 100 + 0.25 * i} for i in range(1, 5)]
        rows += [{"event": "step", "step": i, "loss": 3.0, "elapsed": 0.25 * i} for i in range(5, 41)]  # resumed
        expected = ("update", 40, 400, 3.0, 16 / 0.25, 360 * 0.25)
    else:
        assert isinstance(run.spec, StepTimeSpec)
        ids = [system.id for system in run.spec.systems]
        rows = [
            {"event": "step_time", "repetition": r, "system": s, "seconds": {"iteration": 0.1}, "losses": [4.5]}
            for r in range(3)
            for s in ids
        ]
        repetition = 0.1 * len(ids) * 2
        expected = ("repetition", 2, 8, 4.5, 16 / 0.1, 6 * repetition)
        rows.pop()  # the third repetition is not whole
    attempt(path, this_process(), rows)
    state = read_state(run, path)
    assert (state.unit, state.done, state.of, state.loss) == expected[:4]
    assert (state.samples_per_s, state.eta_s) == pytest.approx(expected[4:])


def test_rows_of_an_earlier_attempt_are_no_progress(sweep, tmp_path):
    path = attempt(folder_of(sweep, tmp_path, "precision"), this_process(), training_rows(10))
    os.utime(path / "metrics.jsonl", (1, time.time() - 3600))
    state = read_state(first(sweep, "precision"), path)
    assert (state.name, state.done, state.eta_s) == ("running", None, None)


def test_a_dead_process_is_interrupted(sweep, tmp_path):
    path = attempt(folder_of(sweep, tmp_path, "precision"), dead(), training_rows(10))
    state = read_state(first(sweep, "precision"), path)
    assert state.name == "interrupted"
    assert "is no more" in state.detail


@pytest.mark.skipif(not Path("/proc/uptime").exists(), reason="only Linux tells when a process began")
def test_a_process_number_that_is_used_again_is_not_the_holder(sweep, tmp_path):
    path = attempt(folder_of(sweep, tmp_path, "precision"), this_process())
    assert read_state(first(sweep, "precision"), path).name == "running"
    os.utime(path / ".lock", (1, time.time() - 1e7))  # long before this process began
    assert read_state(first(sweep, "precision"), path).name == "interrupted"


def test_another_machine_is_running_then_silent_and_never_dead(sweep, tmp_path):
    path = attempt(folder_of(sweep, tmp_path, "precision"), "process 4 on node7", training_rows(10), begun=4000.0)
    assert read_state(first(sweep, "precision"), path).name == "running"
    for file in path.iterdir():
        os.utime(file, (1, time.time() - 700))
    state = read_state(first(sweep, "precision"), path)
    assert (state.name, state.detail) == ("silent", "nothing written for 12 min by process 4 on node7")
    (path / "rank-3.log").write_text("alive")
    assert read_state(first(sweep, "precision"), path).name == "running"


@pytest.mark.parametrize(
    ("status", "error", "name", "detail"),
    [
        ("done", None, "done", ""),
        ("diverged", None, "diverged", ""),
        ("failed", "rank 1: ValueError: no\n\nTraceback", "failed", "rank 1: ValueError: no"),
        ("failed", "Traceback (most recent call last):\n  x\nValueError: no\n", "failed", "ValueError: no"),
        ("out-of-memory", "too big", "out-of-memory", "too big"),
        ("unfinished", "interrupted by SIGTERM", "unfinished", "interrupted by SIGTERM"),
        ("running", None, "corrupt", "manifest.json cannot be read"),
    ],
)
def test_manifests(sweep, tmp_path, status, error, name, detail):
    run = first(sweep, "precision")
    folder = fake_runs.precision_run(tmp_path, run, status=status, error=error)
    state = read_state(run, folder)
    assert (state.name, state.detail) == (name, detail)


def test_a_run_that_lost_a_process_is_interrupted_and_not_failed(sweep, tmp_path):
    run = first(sweep, "precision")
    folder = fake_runs.precision_run(tmp_path, run, status="failed", lost=True, error="rank 1 was killed by SIGKILL")
    state = read_state(run, folder)
    assert (state.name, state.detail) == ("interrupted", "rank 1 was killed by SIGKILL")


@pytest.mark.parametrize("text", ["", "{", '{"status": "do', "[]", "\x00"])
def test_a_truncated_manifest_is_corrupt(sweep, tmp_path, text):
    (tmp_path / "manifest.json").write_text(text)
    assert read_state(first(sweep, "precision"), tmp_path).name == "corrupt"


def test_looking_takes_no_lock_and_writes_nothing(sweep, tmp_path, monkeypatch):
    path = attempt(folder_of(sweep, tmp_path, "precision"), this_process(), training_rows(3))
    fake_runs.precision_run(path.parent, sweep.runs["precision"][1])
    holder = os.open(path / ".lock", os.O_RDWR)
    fcntl.flock(holder, fcntl.LOCK_EX)  # the run's own: nothing waits for it

    def snapshot() -> dict[str, int]:
        return {str(p): p.stat().st_mtime_ns for p in [tmp_path, *tmp_path.rglob("*")]}

    before = snapshot()
    taken: list[int] = []
    for name in ("flock", "lockf"):
        monkeypatch.setattr(fcntl, name, lambda descriptor, _mode, *_: taken.append(descriptor))
    begin = time.monotonic()
    assert sweep.read().chosen("running")[0].folder == path
    assert time.monotonic() - begin < 5
    assert (taken, snapshot()) == ([], before)
    RunFolder(tmp_path / "control").claim(sweep.runs["precision"][0].spec)  # the control: this one is seen
    assert taken
    os.close(holder)


def test_counts_rate_and_eta_of_the_sweep(sweep, tmp_path):
    results = tmp_path / "results"
    ended: dict[str, Any] = {"started": "2026-11-29T12:00:00+00:00", "ended": ENDED, "seconds": 60.0}
    changes: list[dict[str, Any]] = [{}, {"seconds": 90.0}, {"status": "failed", "error": "why"}]
    for number, change in enumerate(changes):
        run = sweep.runs["precision"][number]
        fake_runs.precision_run(results / "precision" / "runs", run, **{**ended, **change})
    old: dict[str, Any] = {"started": "2026-11-29T10:00:00+00:00", "ended": "2026-11-29T10:01:00+00:00"}
    fake_runs.precision_run(results / "precision" / "runs", sweep.runs["precision"][3], **(ended | old))
    status = sweep.read()
    assert status.left_s(status.of("precision")) == pytest.approx(3 * 60.0)  # median of 60, 90, 60
    assert status.runs_per_hour == pytest.approx(3 * 60)  # the one of two hours before is of another sweep
    assert status.eta_s is None  # nothing of the other experiments has finished
    alone = Sweep(tmp_path / "experiments", "ci", results, ["precision"])
    assert alone.read().eta_s == pytest.approx(180)
    for number in (4, 5):
        attempt(folder_of(sweep, tmp_path, "precision", number), this_process(), training_rows(10))
    status = alone.read()
    assert status.described()["total"] == {
        **dict.fromkeys(run_state.STATES, 0), "runs": 7, "done": 3, "failed": 1, "running": 2, "waiting": 1
    }  # fmt: skip
    assert status.eta_s == pytest.approx((60 + 2 * 10.0) / 2)  # two run at a time


def test_shared_runs_count_once_and_begun_experiments_are_shown(sweep, tmp_path):
    results = tmp_path / "results" / "pipelines" / "runs"
    fake_runs.pipeline_run(results, sweep.runs["sweep"][0])  # which rotation wants too
    assert "sweep" not in sweep.read().experiments
    own = next(run for run in sweep.runs["sweep"] if run.spec.seed == 3)
    fake_runs.pipeline_run(results, own)
    status = sweep.read()
    assert status.experiments[-1] == "sweep"
    assert (len(status.of("rotation")), len(status.of("sweep"))) == (21, 20)
    assert len(status.entries) == 2 + 7 + 21 + 5


def run_command(files: Path, tmp_path: Path, *words: str) -> int:
    return main(["status", "--tier", "ci", "--experiments", str(files), "--results", str(tmp_path / "results"), *words])


def test_plain_text_says_what_runs_and_what_failed(files, sweep, tmp_path, capsys):
    attempt(folder_of(sweep, tmp_path, "precision"), this_process(), training_rows(10))
    runs = tmp_path / "results" / "precision" / "runs"
    fake_runs.precision_run(runs, sweep.runs["precision"][1], status="failed", error="rank 0: lost [it]")
    assert run_command(files, tmp_path) == 0
    shown = capsys.readouterr().out
    assert "tier ci: 0 of 30 runs done, 1 failed, 1 running, 28 waiting" in shown
    assert re.search(r"step 10/30 +4\.0000 +32\.0 +0:10 +\d+ s ago", shown)
    assert "rank 0: lost [it]" in shown
    assert "make retry" in shown
    assert "\x1b" not in shown
    terminal = Console(file=io.StringIO(), force_terminal=True, width=200)
    terminal.print(command.rendered(sweep.read()))
    assert "step 10/30" in terminal.file.getvalue()  # type: ignore[attr-defined]
    assert "rank 0: lost [it]" in terminal.file.getvalue()  # type: ignore[attr-defined]


def test_json_is_one_object(files, sweep, tmp_path, capsys):
    attempt(folder_of(sweep, tmp_path, "precision"), this_process(), training_rows(10))
    assert run_command(files, tmp_path, "--json", "precision") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["experiments"]["precision"]["running"] == 1
    assert [run["done"] for run in data["runs"] if run["name"] == "running"] == [10]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["presicion"], "did you mean 'precision'"),
        (["balance"], "balance is not made of runs"),
        (["--watch", "0"], "above 0"),
        (["--watch", "nan"], "above 0"),
        (["--watch", "1", "--json"], "leave one of them out"),
        (["--tier", "cii"], "did you mean 'ci'"),
    ],
)
def test_bad_input_is_one_line(files, tmp_path, capsys, words, says):
    assert run_command(files, tmp_path, *words) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


def test_watching_in_a_pipe_prints_lines_and_ends_by_itself(files, sweep, tmp_path, monkeypatch, capsys):
    runs = tmp_path / "results" / "step_time" / "runs"
    fake_runs.step_time_run(runs, sweep.runs["step_time"][0])
    last = attempt(folder_of(sweep, tmp_path, "step_time", 1), this_process())

    def finish(seconds: float) -> None:
        assert seconds == 7
        fake_runs.step_time_run(runs, sweep.runs["step_time"][1])
        (last / ".attempt.json").unlink()

    monkeypatch.setattr(command.time, "sleep", finish)
    assert run_command(files, tmp_path, "--watch", "7", "step_time") == 0
    before, after = capsys.readouterr().out.splitlines()
    assert "1 running, 0 waiting" in before
    assert before.endswith(f"| {last.name} starting")
    assert "2 of 2 runs done" in after


def test_ctrl_c_ends_a_watch_quietly(files, tmp_path, monkeypatch, capsys):
    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command.time, "sleep", interrupt)
    assert run_command(files, tmp_path, "--watch", "1") == 130
    shown = capsys.readouterr()
    assert shown.err == ""
    assert len(shown.out.splitlines()) == 1


def test_status_starts_without_torch_and_pandas(files, tmp_path):
    code = (
        "import sys; from impl.__main__ import main; code = main(sys.argv[1:]);"
        "sys.exit(code or sum(name in sys.modules for name in ('torch', 'pandas', 'numpy')))"
    )
    words = ["status", "--tier", "ci", "--experiments", str(files), "--results", str(tmp_path / "none")]
    done = subprocess.run([sys.executable, "-c", code, *words], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "30 waiting" in done.stdout
