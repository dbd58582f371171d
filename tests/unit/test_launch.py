import io
import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from torch import distributed as dist

from impl.harness import progress, rank_checkpoint, step_folders
from impl.harness.diagnosis import diagnose
from impl.harness.processes import is_stopped, signal_name
from impl.harness.rank_checkpoint import Checkpoint
from impl.harness.record import CorruptRecord, RunFolder
from impl.harness.results import from_rows, largest, quartiles
from impl.harness.training import Trainer
from impl.harness.worker import _lost_another


def report(folder, rank: int, at: float, kind: str = "ValueError", status: str = "failed") -> None:
    data = {"rank": rank, "time": at, "status": status, "type": kind, "message": f"{kind}\nsaid more"}
    (folder / f"rank-{rank}.error.json").write_text(json.dumps({**data, "traceback": f"Traceback of {rank}"}))


def test_the_earliest_exception_is_the_cause(tmp_path):
    report(tmp_path, 0, 5.0, "RuntimeError")
    report(tmp_path, 1, 4.0, "OutOfMemoryError", "out-of-memory")
    run = RunFolder(tmp_path)
    run.exits.write_text(json.dumps({"0": 1, "1": 1, "2": -15}))
    status, error, lost = diagnose(run, 1, [])
    assert (status, lost) == ("out-of-memory", False)
    assert error == "rank 1: OutOfMemoryError: OutOfMemoryError\n\nTraceback of 1"


def test_a_rank_that_vanished_is_the_cause_of_the_exceptions_of_others(tmp_path):
    report(tmp_path, 0, 4.0, "RuntimeError")
    (tmp_path / "rank-1.log").write_text("last words\n")
    run = RunFolder(tmp_path)
    run.exits.write_text(json.dumps({"0": 1, "1": -9}))
    status, error, lost = diagnose(run, 1, [])
    assert (status, lost) == ("failed", True)
    assert error.startswith("rank 1 was killed by SIGKILL")
    assert "last words" in error
    assert diagnose(run, 1, [2])[1].startswith("rank 2 was stopped")


def test_a_dead_agent_is_named(tmp_path):
    run = RunFolder(tmp_path)
    run.agent_log.write_text("ImportError: no such thing\n")
    assert diagnose(run, 1, []) == (
        "failed",
        "torchrun's agent ended with exit code 1 and no exception\n\nImportError: no such thing",
        False,
    )
    assert diagnose(run, -9, []).error.startswith("torchrun's agent was killed by SIGKILL")
    assert diagnose(run, -9, []).lost
    assert not diagnose(run, -11, []).lost


def test_signal_names():
    assert signal_name(-11) == "SIGSEGV"
    assert signal_name(-200) == "signal 200"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_stopped_processes_are_seen():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        assert not is_stopped(process.pid)
        process.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + 10
        while not is_stopped(process.pid):
            assert time.monotonic() < deadline
    finally:
        process.kill()
        process.wait()
    assert not is_stopped(process.pid)


@pytest.fixture
def alone(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def part(step: int) -> Checkpoint:
    flat = torch.arange(12.0) * step  # views of one buffer, as the engine's masters are
    return Checkpoint(step, "spec", "plan", {"place": step}, {"a": flat[:4], "b": flat[4:].view(2, 4)})


def test_checkpoints_keep_the_last_two_and_give_back_what_they_got(tmp_path, alone):
    folder = tmp_path / "checkpoint"
    assert step_folders.latest(folder) is None
    for step in (2, 4, 6):
        rank_checkpoint.save(folder, part(step), 0, alone)
    assert step_folders.steps(folder) == [4, 6]
    assert (folder / "latest").read_text() == "step-000006\n"
    found = rank_checkpoint.load(folder, 4, 0, spec="spec", plan="plan")
    assert (found.step, found.data) == (4, {"place": 4})
    assert all(torch.equal(found.tensors[k], v) for k, v in part(4).tensors.items())
    assert {p.suffix for p in (folder / "step-000006").iterdir()} == {".json", ".safetensors"}


def test_a_checkpoint_that_was_not_finished_does_not_count(tmp_path, alone):
    folder = tmp_path / "checkpoint"
    rank_checkpoint.save(folder, part(2), 0, alone)
    (folder / "step-000004.tmp").mkdir()
    (folder / "step-000004.tmp" / "rank-0.json").write_text("{")
    assert step_folders.latest(folder) == 2
    rank_checkpoint.save(folder, part(4), 0, alone)
    assert step_folders.latest(folder) == 4
    assert not (folder / "step-000004.tmp").exists()


@pytest.mark.parametrize(
    ("spec", "plan", "cut", "message"),
    [
        ("other", "plan", False, "written under settings spec"),
        ("spec", "other", False, "this version of the code plans other"),
        ("spec", "plan", True, "cannot be read"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path, alone, spec, plan, cut, message):
    rank_checkpoint.save(tmp_path, part(2), 0, alone)
    if cut:
        os.truncate(tmp_path / "step-000002" / "rank-0.safetensors", 90)
    with pytest.raises(CorruptRecord, match=message):
        rank_checkpoint.load(tmp_path, 2, 0, spec=spec, plan=plan)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_rewrites_one_line_on_a_terminal_only(monkeypatch):
    clock = iter(float(t) for t in range(100))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    log, terminal = io.StringIO(), Terminal()
    for out in (log, terminal):
        shown = progress.Progress(out, steps=4, interval=2.0)
        for step in (1, 2, 3, 4):
            shown.step(step, 2.5, 25.75, 1236.0)
        shown.line("the end")
    assert log.getvalue().splitlines() == [
        "step 2/4  loss 2.5000  25.8 samples/s  1,236 tokens/s  ETA 0:02",
        "step 4/4  loss 2.5000  25.8 samples/s  1,236 tokens/s  ETA 0:00",
        "the end",
    ]
    assert terminal.getvalue().count("\r") == 2
    assert terminal.getvalue().count("\n") == 2
    assert [progress.duration(s) for s in (0, 61.4, 3725)] == ["0:00", "1:01", "1:02:05"]


def test_progress_counts_samples_since_its_last_line(monkeypatch):
    clock = iter([0.0, 1.0, 4.0, 5.0, 6.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    log, asked = io.StringIO(), []
    shown = progress.Progress(log, 4, 2.0, "update", samples=8)
    for update in (1, 2, 3, 4):
        shown.advance(update, lambda done=update: asked.append(done) or f"loss {done}  ")
    assert log.getvalue().splitlines() == [
        "update 2/4  loss 2  4.0 samples/s  ETA 0:04",  # 2 updates of 8 in 4 s
        "update 4/4  loss 4  8.0 samples/s  ETA 0:00",
    ]
    assert asked == [2, 4]


@pytest.mark.parametrize(("failures", "alarms"), [(0, []), (2, ["soap.failures is 2 so far"])])
def test_what_optimizers_count_is_reported_and_an_alarm(failures, alarms):
    rows, said, worst = [], [], {"soap.orthogonality": 1e-6}
    engine = SimpleNamespace(counters=lambda: {"soap.failures": failures, "soap.fallbacks": 0}, alarms=lambda _: [])
    trainer = SimpleNamespace(engine=engine, write=rows.append, say=said.append)
    Trainer.report_health(trainer, 5, worst)
    assert (rows[0]["step"], rows[0]["worst"], rows[0]["alarms"]) == (5, worst, alarms)
    assert rows[0]["counters"]["soap.failures"] == failures
    assert said == [f"alarm at step 5: {alarm}" for alarm in alarms]
    Trainer.report_health(trainer, 6, {})
    assert len(rows) == 1, "nothing was measured"


def test_result_of_rows(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rows = [
        {"event": "step", "step": s, "loss": 5.0 - s, "slowed": s == 1, "seconds": {"forward": float(s)}}
        for s in (1, 2, 3)
    ]
    rows.insert(2, {"event": "heldout", "step": 2, "loss": 3.5})
    rows[-1]["not_finite"] = ["a.weight"]
    rows.append({"event": "health", "step": 3, "worst": {"muon.orthogonality": 2.0}, "alarms": ["too large"]})
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    assert from_rows(path) == {
        "steps": 3,
        "final_loss": 2.0,
        "heldout_loss": 3.5,
        "heldout": [[2, 3.5]],
        "skipped_steps": [3],
        "health": {"muon.orthogonality": 2.0},
        "alarms": ["step 3: too large"],
        "phase_seconds": {"forward": {"median": 2.5, "q25": 2.25, "q75": 2.75, "n": 2}},
    }
    assert quartiles([3.0]) == {"median": 3.0, "q25": 3.0, "q75": 3.0, "n": 1}
    assert largest([{"a": {"dp": 1}}, {"a": {"dp": 3, "tp": 2}, "b": 5}]) == {"a": {"dp": 3, "tp": 2}, "b": 5}


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:544] Connection closed by peer [127.0.0.1]:4711"), True),
        (RuntimeError("recvValueWithTimeout failed on SocketImpl: failed to recv, got 0 bytes"), True),
        (RuntimeError("a matrix of 3 x 4 has no inverse"), False),
        (ValueError("Connection closed by peer"), False),
    ],
)
def test_a_rank_tells_a_lost_neighbour_from_its_own_error(error, lost):
    assert _lost_another(error) is lost
