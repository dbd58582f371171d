"""`snakemake --profile slurm` on a real Slurm: virtual nodes with fake GPUs on loopback, started and stopped here."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from tests.workflow.checkouts import ROOT, checkout, command, edit, environment
from tests.workflow.processes import kill, until, working_in

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "squeue", "scancel")
STEPS = 600
QUICK = ("--slurm-init-seconds-before-status-checks", "1", "--latency-wait", "5")


@pytest.fixture
def slurm() -> Iterator[Path]:
    """A cluster of two nodes with four GPUs each; gives the folder of its state."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        pytest.skip(f"no Slurm here ({', '.join(missing)}): apt-get install slurmctld slurmd slurm-client munge")
    if os.geteuid() != 0:
        pytest.skip("a Slurm of its own needs root")
    if not socket.gethostbyname(socket.gethostname()).startswith("127."):
        pytest.skip("the host name does not resolve to loopback, where the daemons must listen")
    if Path("/etc/slurm/slurm.conf").exists():
        pytest.skip("this machine has a Slurm of its own, which the tests leave alone")
    state = Path(tempfile.mkdtemp(prefix="slurm-"))
    scripts = ROOT / "tests" / "slurm"
    subprocess.run([scripts / "up.sh", state], check=True, timeout=120)
    try:
        yield state
    finally:
        subprocess.run([scripts / "down.sh", state], check=True, timeout=120)
        shutil.rmtree(state, ignore_errors=True)


@pytest.fixture
def sweep(tmp_path: Path, slurm: Path) -> Iterator[Path]:
    """A checkout whose cluster is the virtual one: a job of four ranks on two nodes, and one of one rank."""
    folder = checkout(tmp_path / "sweep")
    hardware = folder / "experiments" / "hardware"
    virtual = yaml.safe_load((hardware / "h100.yaml").read_text())
    virtual |= {"id": "virtual", "jobs": {"cpus": 1, "memory_mb": 4000, "minutes": {"default": 10}}}
    virtual["node"]["devices"] = 2
    (hardware / "virtual.yaml").write_text(yaml.safe_dump(virtual))
    site = {"tier": "ci", "slurm": {"hardware": "virtual", "partition": "main", "gres": "gpu:fake", "nodes": 2}}
    (folder / "slurm" / "site.yaml").write_text(yaml.safe_dump(site))
    edit(folder / "experiments" / "precision.yaml", two_jobs)
    yield folder
    for pid in working_in(folder, "-m snakemake", "--profile slurm"):  # of a test that failed half-way
        kill(pid)


def two_jobs(experiment: dict[str, Any]) -> None:
    without = [s["id"] for s in experiment["systems"] if s["id"] not in ("sc", "canzona")]
    experiment["tiers"]["ci"] = {
        "meshes": [
            {"dp": 2, "tp": 2, "without": [*without, "sc"]},
            {"dp": 1, "tp": 1, "without": [*without, "canzona"]},
        ],
        "base": {"steps": STEPS, "layers": 2, "eval_every": STEPS, "checkpoint_every": 20},
    }
    experiment["reference"] = "canzona"


class Scheduler:
    """One `snakemake --profile slurm precision` and what it prints."""

    def __init__(self, folder: Path, name: str) -> None:
        self.log = folder / f"{name}.log"
        words = command("--profile", "slurm", "--verbose", *QUICK, "--", "precision")
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                words,
                cwd=folder,
                env=environment(),
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # in the background of a shell Ctrl-C is ignored, and so it would be here
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def end(self, seconds: float = 180) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGINT)
            raise AssertionError(self.text[-4000:]) from None


def jobs(state: str = "R") -> dict[str, str]:
    """Jobs in ``state``: id to comment, which names rule and wildcards."""
    done = subprocess.run(["squeue", "-h", "-t", state, "-o", "%A %k"], capture_output=True, text=True, check=True)
    return dict(line.split(" ", 1) for line in done.stdout.splitlines())


def running(word: str) -> list[str]:
    return [job for job, comment in jobs().items() if word in comment]


def submissions(scheduler: Scheduler, run: str) -> list[str]:
    """The calls of sbatch for a run."""
    return [line for line in scheduler.text.splitlines() if "sbatch call:" in line and f"run={run}" in line]


def run_folder(folder: Path, word: str) -> Path:
    (found,) = (folder / "results/generated/ci/precision/runs").glob(f"{word}*")
    return found


def has_begun(folder: Path, word: str) -> bool:
    """Whether the run has done a few steps."""
    return any((folder / "results/generated/ci/precision/runs").glob(f"{word}*/checkpoint/step-*"))


def stops_only_its_own(slurm: Path) -> None:
    pids = [int(path.read_text()) for path in (slurm / "run").glob("*.pid")]
    assert len(pids) == 4  # munged, slurmctld, two slurmd
    bystander = subprocess.Popen(["sleep", "60"])
    subprocess.run([ROOT / "tests/slurm/down.sh", slurm], check=True, timeout=120)
    time.sleep(0.5)
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait()
    assert not any(_lives(pid) for pid in pids)
    assert "ricercar-slurm" not in Path("/etc/hosts").read_text()
    assert not Path("/run/slurm/conf/slurm.conf").is_symlink()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_sweep_on_slurm_with_everything_that_happens_to_one(slurm, sweep):
    # A job is killed from outside, as by preemption: it is tried again and goes on from its checkpoint.
    first = Scheduler(sweep, "first")
    until(lambda: first.process.poll() is not None or has_begun(sweep, "sc-dp1-tp1"), 120)
    (killed,) = running("sc-dp1-tp1") or [first.text[-4000:]]
    subprocess.run(["scancel", "--signal=KILL", "--full", killed], check=True)
    until(lambda: [job for job in running("sc-dp1-tp1") if job != killed], 120)
    assert len(submissions(first, "sc-dp1-tp1")) == 2

    # A killed scheduler leaves its jobs to Slurm.
    until(lambda: has_begun(sweep, "canzona-dp2-tp2"), 120)
    first.process.kill()
    first.process.wait()
    (orphan,) = running("canzona-dp2-tp2")

    # The same command again: a second job for the same run waits for the first.  Ctrl-C cancels the new jobs alone.
    second = Scheduler(sweep, "second")
    until(lambda: [job for job in running("canzona-dp2-tp2") if job != orphan], 120)
    second.process.send_signal(signal.SIGINT)
    assert second.end() != 0
    until(lambda: not [job for job in running("") if job not in (orphan, *running("sc-dp1-tp1"))], 60)
    assert not jobs("PD")

    third = Scheduler(sweep, "third")
    assert third.end() == 0, third.text[-4000:]
    (asked,) = submissions(first, "canzona-dp2-tp2")
    assert "-p main -t 10 --mem 8000 --nodes=2 --no-requeue --ntasks=2 --cpus-per-task=2" in asked
    assert "--gres=gpu:fake:2" in asked
    assert json.loads((run_folder(sweep, "sc") / "manifest.json").read_text())["result"]["resumed_from"]

    results = sweep / "results/generated/ci/precision"
    frame = pd.read_parquet(results / "precision.parquet")
    assert set(frame["status"]) == {"done"}
    for word, ranks in (("canzona", 4), ("sc", 1)):
        folder = run_folder(sweep, word)
        manifest = json.loads((folder / "manifest.json").read_text())
        assert manifest["status"] == "done"
        assert len(manifest["result"]["state_bytes"]) == ranks
        steps = [row["step"] for row in map(json.loads, (folder / "metrics.jsonl").open()) if row["event"] == "step"]
        assert steps == list(range(1, STEPS + 1)), f"{word} was written by two jobs"
    assert (results / "precision.html").stat().st_size > 1000

    stops_only_its_own(slurm)


def _lives(pid: int) -> bool:
    """Whether a process runs; one that nobody has waited for yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
