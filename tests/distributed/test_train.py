import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from impl.__main__ import main
from impl.harness import launch
from impl.harness.record import read_rows
from impl.harness.spec import RunSpec, RuntimeSpec

pytestmark = pytest.mark.distributed
ROOT = Path(__file__).resolve().parents[2]
LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
SETTINGS = {"model": "qwen3-tiny", "dp": 2, "layers": 2, "steps": 6, "batch": 8, "sequence": 16, "eval_every": 3}
RUNTIME = {"device": "cpu", "collective_timeout_s": 10.0}


def spec(**changes) -> RunSpec:
    return RunSpec(**{"runtime": RuntimeSpec(**RUNTIME), **SETTINGS, **changes})


def arguments(out: Path, **changes) -> list[str]:
    """The command line of ``spec(**changes)``."""
    settings = {**SETTINGS, **changes}
    words = [f"--set=runtime.{k}={v}" for k, v in RUNTIME.items()]
    return ["train", "--out", str(out), *words, *(f"--set={k}={v}" for k, v in settings.items())]


def manifest(out: Path) -> dict:
    return json.loads((out / "manifest.json").read_text())


def execute(out: Path, fault: str, **runtime) -> tuple[int, dict, float]:
    """Run a target of ``faults``; return exit code, manifest and seconds."""
    settings = spec(runtime=RuntimeSpec(**{**RUNTIME, **runtime}))
    begin = time.monotonic()
    target = f"tests.distributed.faults:{fault}"
    code = launch.execute(target, settings, out, ranks=2, runtime=settings.runtime)
    return code, manifest(out), time.monotonic() - begin


def rank_pids(out: Path) -> list[int]:
    return [int(p.read_text()) for p in out.glob("rank-*.pid")]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def test_train_ends_with_a_full_record(tmp_path, capfd):
    out = tmp_path / "a run [1] 'x'"
    assert main([*arguments(out, microbatches=2), "--strategy", "canzona", "--optimizer", "muon"]) == 0
    shown = capfd.readouterr()
    assert "step 6/6  loss " in shown.out
    assert "tokens/s  ETA 0:00" in shown.out
    assert shown.err == ""
    record = manifest(out)
    result = record["result"]
    assert (record["status"], record["kind"], record["error"]) == ("done", "measured", None)
    assert record["config_digest"] == spec(microbatches=2).digest
    assert len(result["params_digest"]) == 64
    rows = [r for r in read_rows(out / "metrics.jsonl") if r["event"] == "step"]
    assert [r["step"] for r in rows] == [1, 2, 3, 4, 5, 6]
    assert rows[-1]["loss"] == result["final_loss"] < rows[0]["loss"]
    assert [step for step, _ in result["heldout"]] == [3, 6]
    assert result["heldout_loss"] == result["heldout"][-1][1]
    assert {"forward", "backward", "grad_reduce", "grad_norm", "optimizer_step", "param_sync"} <= set(
        result["phase_seconds"]
    )
    assert result["phase_seconds"]["forward"]["n"] == 5  # the audited step does not count
    assert result["bytes"]["optimizer_step"] == {"dp": 0, "tp": 0, "world": 0}
    assert result["bytes"]["grad_reduce"]["dp"] > 0
    assert "optimizer_step" not in result["audit"]
    assert len(result["state_bytes"]) == 2
    assert result["plan"]["strategy"] == "canzona"
    assert {"muon", "adamw"} == {optimizer for _, optimizer, _ in result["routing"]}
    assert not list(out.glob("*.pid"))
    before = (out / "manifest.json").read_bytes()
    assert main(arguments(out, microbatches=2)) == 0
    assert "nothing to do" in capfd.readouterr().out
    assert (out / "manifest.json").read_bytes() == before


@LINUX
def test_resumed_after_kill_9_equals_a_straight_run(tmp_path):
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    assert main(arguments(straight, checkpoint_every=3)) == 0
    assert start(killed, "kill_launcher_at_step_5").wait(60) == -signal.SIGKILL
    pids = rank_pids(killed)
    assert len(pids) == 2
    wait_until(lambda: not any(map(alive, pids)), 10)
    assert not (killed / "manifest.json").exists()
    assert [r["step"] for r in read_rows(killed / "metrics.jsonl") if r["event"] == "step"] == [1, 2, 3, 4]
    assert main(arguments(killed, checkpoint_every=3)) == 0
    a, b = manifest(straight)["result"], manifest(killed)["result"]
    assert (a["resumed_from"], b["resumed_from"]) == (None, 3)
    assert b["params_digest"] == a["params_digest"]
    assert b["heldout"] == a["heldout"]
    losses = [
        [r["loss"] for r in read_rows(out / "metrics.jsonl") if r["event"] == "step"] for out in (straight, killed)
    ]
    assert losses[0] == losses[1]
    assert sorted(p.name for p in (killed / "checkpoint").iterdir()) == ["latest", "step-000003", "step-000006"]


@pytest.mark.parametrize(
    ("fault", "status", "first_line", "inside"),
    [
        ("raise_on_rank_1", "failed", "rank 1: ValueError: no such luck", 'raise ValueError("no such luck'),
        ("killed_on_rank_1", "failed", "rank 1 was killed by SIGKILL", ""),
        ("exit_on_rank_0", "failed", "rank 0 ended with exit code 7 and no exception", ""),
        ("segfault_on_rank_1", "failed", "rank 1 was killed by SIGSEGV", "string_at"),
        ("killed_before_joining", "failed", "rank 1 was killed by SIGKILL", ""),
        ("out_of_memory_on_rank_1", "out-of-memory", "rank 1: RuntimeError: ", "torch.empty"),
    ],
)
def test_a_rank_that_dies_ends_the_run_with_its_traceback(tmp_path, capfd, fault, status, first_line, inside):
    code, record, seconds = execute(tmp_path, fault)
    assert code == 1
    assert record["status"] == status
    assert record["error"].splitlines()[0].startswith(first_line)
    assert inside in record["error"]
    assert seconds < 60
    shown = capfd.readouterr().err.splitlines()
    assert len(shown) == 1
    assert first_line in shown[0]


@LINUX
@pytest.mark.parametrize("fault", ["stopped_on_rank_1", "all_stopped"])
def test_a_stopped_rank_ends_the_run(tmp_path, fault):
    code, record, seconds = execute(tmp_path, fault, collective_timeout_s=3.0)
    assert (code, record["status"]) == (1, "failed")
    ranks = "1" if fault == "stopped_on_rank_1" else "0, 1"
    assert record["error"].splitlines()[0].startswith(f"rank {ranks} was stopped")
    assert seconds < 60


def test_a_diverged_run_keeps_what_was_there_and_is_not_repeated(tmp_path, capfd):
    bad = {"lr": "1e30", "clip": 0, "schedule.warmup_steps": 2}
    assert main(arguments(tmp_path, **bad)) == 3
    record = manifest(tmp_path)
    assert record["status"] == "diverged"
    assert record["result"]["params_digest"] is None
    rows = [r for r in read_rows(tmp_path / "metrics.jsonl") if r["event"] == "step"]
    assert 1 <= len(rows) < 6
    assert rows[0]["loss"] > 0
    assert None in (rows[-1]["loss"], rows[-1]["grad_norm"])
    assert record["result"]["steps"] == len(rows)
    capfd.readouterr()
    assert main(arguments(tmp_path, **bad)) == 3
    assert "nothing to do" in capfd.readouterr().out


EXECUTE = """
import sys
from pathlib import Path
from impl.harness import launch
from tests.distributed.test_train import spec
s = spec(checkpoint_every=3)
sys.exit(launch.execute("tests.distributed.faults:" + sys.argv[1], s, Path(sys.argv[2]), ranks=2, runtime=s.runtime))
"""


def start(out: Path, fault: str) -> subprocess.Popen:
    """Start a launcher of its own."""
    return subprocess.Popen([sys.executable, "-c", EXECUTE, fault, str(out)], cwd=ROOT, stderr=subprocess.PIPE)


def start_waiting(out: Path) -> subprocess.Popen:
    process = start(out, "wait")
    wait_until(lambda: len(list(out.glob("ready-*"))) == 2 or process.poll() is not None)
    assert process.poll() is None
    return process


def children(pid: int) -> list[int]:
    return [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def listening(pid: int) -> set[str]:
    """Local addresses, in hexadecimal, of the sockets on which process ``pid`` listens."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            name = os.readlink(descriptor)
        except OSError:
            continue
        if name.startswith("socket:["):
            inodes.add(name[8:-1])
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            columns = line.split()
            if columns[3] == "0A" and columns[9] in inodes:
                found.add(columns[1].partition(":")[0])
    return found


@LINUX
def test_everything_listens_on_loopback_and_dies_with_a_killed_launcher(tmp_path, capfd):
    process = start_waiting(tmp_path)
    try:
        (agent,) = children(process.pid)
        family = [process.pid, agent, *rank_pids(tmp_path)]
        assert len(family) == 4
        addresses = set.union(*map(listening, family))
        assert addresses == {"0100007F"}  # 127.0.0.1
        assert main(arguments(tmp_path, checkpoint_every=3)) == 2
        refused = capfd.readouterr().err.splitlines()
        assert len(refused) == 1
        assert f"is in use by process {process.pid} on " in refused[0]
    finally:
        process.kill()
        process.wait()
    wait_until(lambda: not any(map(alive, family[1:])), 10)
    assert not (tmp_path / "manifest.json").exists()


@LINUX
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_launcher_leaves_nothing_running_and_a_record(tmp_path, number):
    process = start_waiting(tmp_path)
    family = [*children(process.pid), *rank_pids(tmp_path)]
    process.send_signal(number)
    _, shown = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert shown.decode().splitlines() == [f"interrupted by {number.name}: start the same command again to continue"]
    assert not any(map(alive, family))
    assert manifest(tmp_path)["status"] == "unfinished"


@pytest.mark.slow
def test_ranks_of_the_users_own_torchrun(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d"]
    command += ["--rdzv-endpoint=127.0.0.1:0", "-m", "impl", *arguments(tmp_path / "run")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert manifest(tmp_path / "run")["status"] == "done"
    again = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100)
    assert again.returncode == 0, again.stderr
    assert "nothing to do" in again.stdout


@pytest.mark.slow
def test_data_and_weights_do_not_depend_on_the_mesh(tmp_path):
    losses = []
    for dp, tp in ((2, 1), (1, 2)):
        out = tmp_path / f"dp{dp}-tp{tp}"
        assert main(arguments(out, dp=dp, tp=tp, steps=1)) == 0
        losses.append([row["loss"] for row in read_rows(out / "metrics.jsonl")])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)  # of the step, and held out after it
