"""What the cluster tier asks Slurm for: the exact calls of sbatch, from a Slurm that refuses everything."""

from __future__ import annotations

import os
import re
import shlex
import stat
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.workflow.checkouts import ROOT, checkout, command, environment

REFUSING = """\
#!/bin/sh
printf '%s\\n' "$*" >> "$CALLS"
echo 'sbatch: error: refused by a test' >&2
exit 1
"""
SILENT = "#!/bin/sh\nexit 0\n"
SITE = {
    "tier": "cluster",
    "slurm": {"hardware": "h100", "account": "physics", "partition": "gpu", "gres": "gpu:h100", "nodes": 32},
}


@pytest.fixture
def fake_slurm(tmp_path) -> Path:
    """A folder of programs in which no job is ever accepted."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("sbatch", "squeue", "scancel", "sacct", "sacctmgr", "sinfo", "sshare", "scontrol"):
        (folder / name).write_text(REFUSING if name == "sbatch" else SILENT)
        (folder / name).chmod(0o755 | stat.S_IEXEC)
    return folder


def calls(folder: Path, fake: Path, *targets: str) -> dict[str, str]:
    """The options of sbatch by run id."""
    (folder / "slurm" / "site.yaml").write_text(yaml.safe_dump(SITE))
    log = folder / "calls"
    words = command(
        "--profile", "slurm", "--retries", "0", "--slurm-init-seconds-before-status-checks", "1", "--", *targets
    )
    path = f"{fake}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        words, cwd=folder, env=environment(PATH=path, CALLS=str(log)), capture_output=True, text=True, timeout=120
    )
    assert done.returncode != 0
    found = {}
    for line in log.read_text().splitlines():
        run = re.search(r"run=([a-z0-9-]+)", line)
        if run:
            found[run[1]] = line.partition(" --wrap=")[0]
    return found


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_calls_of_sbatch_on_the_cluster_tier(tmp_path, fake_slurm):
    folder = checkout(tmp_path / "cluster")
    found = calls(folder, fake_slurm, "step_time", "llama")
    whole = [options for run, options in found.items() if "dp32-tp8" in run]
    assert len(whole) >= 5  # Qwen3 1.7B to 32B
    for options in whole:
        assert options.endswith(
            f"-A physics -p gpu -t 240 --mem 1840000 --nodes=32 --no-requeue --ntasks=32 --cpus-per-task=96 "
            f"-D {shlex.quote(str(folder))} --gres=gpu:h100:8"
        ), options
    eight = [options for run, options in found.items() if "-p8-" in run]
    assert len(eight) >= 2  # LLaMA 7B and 13B
    for options in eight:
        assert options.endswith(
            f"-A physics -p gpu -t 1440 --mem 1840000 --nodes=1 --no-requeue --cpus-per-task=96 "
            f"-D {shlex.quote(str(folder))} --gres=gpu:h100:8"
        ), options


def test_a_preempted_job_has_failed(tmp_path, fake_slurm):
    """Else the plugin waits for Slurm to start it again, which it does not."""
    ours = ROOT / "workflows" / "scripts" / "slurm"
    (fake_slurm / "squeue").write_text(
        '#!/bin/sh\n[ "$1" = bad ] && exit 3\nprintf "%s\\n" "1|PREEMPTED" "2|RUNNING" "$*"\n'
    )
    path = os.pathsep.join([str(ours), str(fake_slurm), os.environ["PATH"]])
    words = ["squeue", "--format=%i|%T", "--states=all"]
    done = subprocess.run(words, env=environment(PATH=path), capture_output=True, text=True, check=True, timeout=20)
    assert done.stdout.splitlines() == ["1|FAILED", "2|RUNNING", "--format=%i|%T --states=all"]
    assert subprocess.run(["squeue", "bad"], env=environment(PATH=path), timeout=20).returncode == 3
