import json
import math
import os
import subprocess
import sys
import threading
from typing import Any

import pytest

from impl.errors import ConfigError
from impl.harness import provenance, record
from impl.harness.record import CorruptRecord, RunFolder, append_row, cut_rows, read_rows
from impl.harness.spec import RunSpec, parse

SPEC = RunSpec(model="qwen3-tiny")


def test_life_of_a_run_folder(tmp_path):
    path = tmp_path / "a b" / "run"
    run = RunFolder(path)
    assert not path.exists()
    assert run.claim(SPEC) is None
    assert parse(RunSpec, record.load_yaml(path / "config.yaml")) == SPEC
    run.begin()
    assert run.manifest() is None
    run.finish(SPEC, "failed", error="rank 1: no")
    run.release()

    again = RunFolder(path)
    assert again.claim(SPEC) is None  # a failed run is started again
    again.begin()
    assert again.manifest() is None  # and its old end forgotten
    written = again.finish(SPEC, "done", result={"loss": math.nan})
    again.release()
    found = RunFolder(path).claim(SPEC)
    assert found is not None
    assert found["status"] == "done"
    assert found["result"] == {"loss": None}
    assert found["run_id"] == written["run_id"]
    assert found["config"] == SPEC.resolved()
    assert found["config_digest"] == SPEC.digest
    assert found["seconds"] >= 0
    assert {"schema", "kind", "git", "versions", "hardware", "started", "ended", "error"} <= found.keys()


def test_a_claimed_folder_is_refused_to_others_until_every_holder_is_gone(tmp_path):
    first = RunFolder(tmp_path)
    first.claim(SPEC)
    with pytest.raises(ConfigError, match=f"is in use by process {os.getpid()} on"):
        RunFolder(tmp_path).claim(SPEC)
    inherited = os.dup(first.lock)  # as a child process has it
    first.release()
    with pytest.raises(ConfigError, match="is in use by"):
        RunFolder(tmp_path).claim(SPEC)
    os.close(inherited)
    assert RunFolder(tmp_path).claim(SPEC) is None


def test_a_second_one_that_waits_goes_on_when_the_first_has_ended(tmp_path, capfd):
    first = RunFolder(tmp_path)
    first.claim(SPEC)
    first.begin()
    claimed: list[Any] = []
    second = threading.Thread(target=lambda: claimed.append(RunFolder(tmp_path).claim(SPEC, wait=True)))
    second.start()
    second.join(1.5)
    assert second.is_alive()
    assert not claimed
    first.finish(SPEC, "done")
    first.release()
    second.join(30)
    assert claimed[0]["status"] == "done"
    assert capfd.readouterr().out.count("waiting for process") == 1


def test_the_folder_of_a_killed_launcher_is_free_when_its_processes_have_ended(tmp_path):
    """They end a moment after the launcher, and until then they hold the lock that they inherited."""
    claim_and_leave_a_child = f"""
import subprocess, sys
from impl.harness.record import RunFolder
from impl.harness.spec import RunSpec
run = RunFolder({str(tmp_path)!r})
run.claim(RunSpec(model="qwen3-tiny"))
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1)"], pass_fds=[run.lock])
"""
    subprocess.run([sys.executable, "-c", claim_and_leave_a_child], check=True, timeout=60, stdout=subprocess.DEVNULL)
    assert RunFolder(tmp_path).claim(SPEC) is None


def test_a_live_rank_keeps_a_new_launcher_waiting(tmp_path):
    run = RunFolder(tmp_path)
    rank = run.hold_as_rank()
    assert not run.wait_for_ranks(0.2)
    os.close(rank)
    assert run.wait_for_ranks(0.2)


def test_refusal_of_another_configuration_releases_the_lock(tmp_path):
    run = RunFolder(tmp_path)
    run.claim(SPEC)
    run.release()
    other = SPEC.model_copy(update={"seed": 5})
    for _ in range(2):
        with pytest.raises(ConfigError, match="different: seed 0 -> 5"):
            RunFolder(tmp_path).claim(other)
    assert RunFolder(tmp_path).claim(SPEC) is None


def test_settings_that_do_not_decide_the_result_may_change(tmp_path):
    run = RunFolder(tmp_path)
    run.claim(SPEC)
    run.release()
    quiet = parse(RunSpec, {"model": "qwen3-tiny", "runtime": {"heartbeat_s": 60, "collective_timeout_s": 99}})
    assert RunFolder(tmp_path).claim(quiet) is None


def test_unreadable_settings_are_not_overwritten(tmp_path):
    (tmp_path / "config.yaml").write_text("model: qwen3-tiny\nfuture: 1\n")
    with pytest.raises(ConfigError, match=r"cannot be continued .*unknown setting 'future'"):
        RunFolder(tmp_path).claim(SPEC)
    assert "future" in (tmp_path / "config.yaml").read_text()


@pytest.mark.parametrize("tail", ["", '{"event": "step", "st', '{"event": "step", "step": 9, "loss": 1.0}'])
def test_a_last_line_cut_short_is_ignored_and_removed_on_resume(tmp_path, tail):
    path = tmp_path / "metrics.jsonl"
    for step in (1, 2, 3, 4):
        append_row(path, {"event": "step", "step": step, "loss": 1 / step})
    append_row(path, {"event": "heldout", "step": 4, "loss": math.inf})
    whole = read_rows(path)
    assert whole[-1] == {"event": "heldout", "step": 4, "loss": None}
    with path.open("a") as file:
        file.write(tail)
    assert read_rows(path) == whole
    assert cut_rows(path, 3) == whole[:3]
    append_row(path, {"event": "step", "step": 4, "loss": 0.5})
    assert [r["step"] for r in read_rows(path)] == [1, 2, 3, 4]


def test_a_broken_line_in_the_middle_is_corrupt(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"event": "step", "step": 1}\n{"event": \n{"event": "step", "step": 3}\n')
    with pytest.raises(CorruptRecord, match="line 2"):
        read_rows(path)


def test_manifest_is_replaced_as_a_whole(tmp_path, monkeypatch):
    """A crash while the new one is written leaves the old one."""
    path = tmp_path / "manifest.json"
    record.write_atomically(path, "old")

    def crash(_descriptor):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", crash)
    with pytest.raises(KeyboardInterrupt):
        record.write_atomically(path, "new and longer")
    assert path.read_text() == "old"


def test_provenance_names_code_libraries_and_machine(tmp_path, monkeypatch):
    found = provenance.collect()
    json.dumps(found, allow_nan=False)
    assert found["versions"]["torch"]
    assert found["versions"]["python"].startswith("3.")
    assert found["hardware"]["cores"] >= 1
    assert found["hardware"]["memory_bytes"] > 2**28
    assert found["hardware"]["cpu"]
    commit = found["git"]["commit"]
    assert commit is None or len(commit) == 40
    assert provenance.now().endswith("+00:00")
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "impl" / "harness" / "provenance.py"))
    assert provenance.git() == {"commit": None, "dirty": None}
