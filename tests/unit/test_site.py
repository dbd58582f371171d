"""What jobs ask Slurm for, and one workflow at a time."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from impl.errors import ConfigError
from impl.harness import projection_inputs, site, sweep_lock
from impl.harness.site import Request
from impl.projection import hardware

ROOT = Path(__file__).parents[2]


def cluster(section: Any, folder: Path = hardware.FOLDER) -> site.Cluster:
    found = site.settings({"tier": "ci", "slurm": section}).slurm
    assert found is not None
    return site.cluster(found, folder)


def test_a_job_fills_one_node_after_the_other():
    h100 = cluster({"hardware": "h100", "nodes": 32, "gres": "gpu:h100"})
    each = h100.jobs
    assert h100.request(1, "anything") == Request(
        1, 1, each.cpus, each.memory_mb, each.minutes["default"], "gpu:h100:1"
    )
    assert h100.request(8, "precision").minutes == each.minutes["precision"]
    whole = h100.request(256, "step_time")
    assert (whole.nodes, whole.ranks, whole.gres, whole.cpus) == (32, 8, "gpu:h100:8", 8 * each.cpus)
    assert h100.request(12, "step_time").ranks == 6  # two nodes, equally
    assert h100.site.submission == {}


def test_account_and_partition_are_asked_for_where_they_are_set():
    found = cluster({"hardware": "h100", "account": "physics", "partition": "gpu", "gres": None})
    assert found.site.submission == {"slurm_account": "physics", "slurm_partition": "gpu"}
    assert found.request(2, "x").gres == ""


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"hardware": "h10"}, "unknown hardware 'h10': did you mean 'h100'?"),
        ({"hardware": "h100", "acount": "x"}, "unknown setting of slurm 'acount': did you mean 'account'?"),
        ({"hardware": "h100", "gres": "gpu --evil"}, "gres"),
        ("h100", "slurm"),
    ],
)
def test_a_wrong_section_is_one_line(section, message):
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")) as caught:
        cluster(section)
    assert "\n" not in str(caught.value)


def test_jobs_that_cannot_be_are_refused():
    small = cluster({"hardware": "h100", "nodes": 2})
    with pytest.raises(ConfigError, match=r"needs 32 nodes of h100, slurm\.nodes is 2"):
        small.request(256, "step_time")
    odd = replace(small, devices=4)
    with pytest.raises(ConfigError, match="ask for a multiple of 4 ranks"):
        odd.request(7, "step_time")


def test_hardware_without_a_section_jobs_is_named(tmp_path):
    text = (hardware.FOLDER / "h100.yaml").read_text()
    (tmp_path / "h100.yaml").write_text(text[: text.index("jobs:")])
    with pytest.raises(ConfigError, match=r"h100\.yaml has no section jobs"):
        cluster({"hardware": "h100"}, tmp_path)


def test_what_jobs_ask_for_moves_no_projection(tmp_path, monkeypatch):
    text = (hardware.FOLDER / "h100.yaml").read_text()
    monkeypatch.setattr(hardware, "FOLDER", tmp_path)
    monkeypatch.setattr(hardware.names, "__defaults__", (tmp_path,))
    (tmp_path / "e.yaml").write_text("hardware: h100\n")
    digests = []
    for written in (
        text,
        text.replace("default: 240", "default: 99"),
        text.replace("launch: 5.0e-06", "launch: 6.0e-06"),
    ):
        (tmp_path / "h100.yaml").write_text(written)
        digests.append(projection_inputs.digest(tmp_path / "e.yaml", tmp_path))
    assert digests[0] == digests[1] != digests[2]


HOLDER = """
import sys, pathlib
from impl.harness import sweep_lock
sweep_lock.hold(pathlib.Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_one_workflow_at_a_time_and_no_stale_lock(tmp_path):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(ConfigError, match=f"another workflow makes .* \\(process {holder.pid} on "):
        sweep_lock.hold(tmp_path)
    holder.kill()
    holder.wait()
    assert sweep_lock.hold(tmp_path) >= 0


def test_a_misspelt_setting_of_the_workflow_is_one_line():
    with pytest.raises(ConfigError, match="unknown setting 'teir': did you mean 'tier'"):
        site.settings({"teir": "ci"})
    with pytest.raises(ConfigError, match="fit"):
        site.settings({"fit": "maybe"})
    assert site.settings({"fit": False}).fit is site.settings({"fit": "false"}).fit is False
