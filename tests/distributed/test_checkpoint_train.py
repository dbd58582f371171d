"""Checkpoints of whole training runs: killed while saving, gone on from by other runs, damaged, and refused."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from impl.__main__ import main
from impl.harness.record import read_rows
from tests.distributed.test_checkpoint_reshard import assembled, different
from tests.distributed.test_train import LINUX, ROOT, alive, arguments, manifest, rank_pids, wait_until

pytestmark = pytest.mark.distributed
EXECUTE = """
import sys
from pathlib import Path
from impl.harness import launch
from tests.distributed.test_train import spec
s = spec(checkpoint_every=3, steps=9)
target = "tests.distributed.faults:kill_launcher_while_step_6_is_saved"
sys.exit(launch.execute(target, s, Path(sys.argv[1]), ranks=2, runtime=s.runtime))
"""


def losses(out: Path) -> list[float]:
    return [row["loss"] for row in read_rows(out / "metrics.jsonl") if row["event"] == "step"]


@LINUX
def test_killed_while_saving_it_resumes_from_the_checkpoint_before(tmp_path: Path) -> None:
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    assert main(arguments(straight, checkpoint_every=3, steps=9)) == 0
    process = subprocess.Popen([sys.executable, "-c", EXECUTE, str(killed)], cwd=ROOT)
    assert process.wait(120) == -signal.SIGKILL
    pids = rank_pids(killed)
    wait_until(lambda: not any(map(alive, pids)), 10)
    assert len(losses(killed)) == 7  # training went on while the checkpoint was being written
    assert sorted(p.name for p in (killed / "checkpoint").iterdir()) == ["latest", "step-000003", "step-000006.tmp"]
    assert (killed / "checkpoint" / "latest").read_text() == "step-000003\n"
    assert main(arguments(killed, checkpoint_every=3, steps=9)) == 0
    a, b = manifest(straight)["result"], manifest(killed)["result"]
    assert (b["resumed_from"], b["params_digest"]) == (3, a["params_digest"])
    assert losses(killed) == losses(straight)
    kept = ["latest", "step-000006", "step-000009"]
    for out in (straight, killed):
        assert sorted(p.name for p in (out / "checkpoint").iterdir()) == kept
    for step in kept[1:]:
        folders = [out / "checkpoint" / step for out in (straight, killed)]
        assert different(*map(assembled, folders)) == []
        assert {p.name for p in folders[0].iterdir()} == {
            "index.json", "meta.json", "rank-0.safetensors", "rank-1.safetensors"}  # fmt: skip


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps of DP2 x TP1 under Canzona, with a checkpoint after the third."""
    out = tmp_path_factory.mktemp("first") / "run"
    assert main(arguments(out, checkpoint_every=3, reduction="rank-order")) == 0
    return out


TOLERANCE = 1e-5
"""Of losses, relative, where another mesh sums in another order (largest found: 1.3e-7)."""


@pytest.mark.parametrize(
    "changes",
    [{"strategy": "sc"}, {"dp": 1, "tp": 2}, {"strategy": "nv-layerwise", "reduction": "native"}],
    ids=["sc", "tp2", "nv-layerwise"],
)
def test_another_run_goes_on_from_it(first: Path, tmp_path: Path, changes: dict, capfd) -> None:
    out, source = tmp_path / "run", first / "checkpoint" / "step-000003"
    again = {"checkpoint_every": 2, "reduction": "rank-order", "resume_from": source, **changes}
    assert main(arguments(out, **again)) == 0
    shown = capfd.readouterr().out
    assert f"going on from {source} (canzona, DP 2 x TP 1)" in shown
    result, expected = manifest(out)["result"], manifest(first)["result"]
    assert (result["resumed_from"], result["steps"]) == (3, 6)
    assert losses(out) == pytest.approx(losses(first)[3:], rel=TOLERANCE)
    assert result["heldout"][-1][1] == pytest.approx(expected["heldout_loss"], rel=TOLERANCE)
    if changes == {"strategy": "sc"}:  # the same sums in the same order
        assert losses(out) == losses(first)[3:]
        assert result["params_digest"] == expected["params_digest"]
        assert (
            different(assembled(out / "checkpoint" / "step-000006"), assembled(source.with_name("step-000006"))) == []
        )


def test_a_run_that_went_on_from_another_resumes_by_itself(first: Path, tmp_path: Path, capfd) -> None:
    """From its own first checkpoint, which holds what it loaded: the other run may be gone by then."""
    other, out = tmp_path / "other", tmp_path / "run"
    shutil.copytree(first, other)
    shutil.rmtree(other / "checkpoint" / "step-000006")
    again = {"checkpoint_every": 3, "reduction": "rank-order", "resume_from": other, "dp": 1, "tp": 2}
    assert main(arguments(out, **again)) == 0
    source = other / "checkpoint" / "step-000003"
    assert different(assembled(out / "checkpoint" / "step-000003"), assembled(source)) == []
    expected = manifest(out)["result"]["params_digest"]
    (out / "manifest.json").unlink()
    shutil.rmtree(out / "checkpoint" / "step-000006")
    shutil.rmtree(other)
    capfd.readouterr()
    assert main(arguments(out, **again)) == 0
    assert "resuming after step 3" in capfd.readouterr().out
    assert manifest(out)["result"]["params_digest"] == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"resume_from": "/no/such/run"}, "resume_from '/no/such/run' does not exist: give the folder of a run"),
        ({"resume_from": "/"}, "resume_from '/' has no finished checkpoint: give a run that was started with"),
        ({"steps": 3}, "steps is 3 but {source} is after step 3 already: ask for more steps"),
        ({"batch": 16}, "batch is 16 but 8 in {source}: a run that goes on from it may differ in dp, tp, strategy,"),
        ({"layers": 3}, "layers is 3 but 2 in"),
        ({"model": "llama-tiny"}, "model is 'llama-tiny' but 'qwen3-tiny' in"),
        ({"optimizer": "soap"}, "optimizer is 'soap' but 'muon' in"),
        ({"optimizer_settings.momentum": 0.5}, "settings of muon.momentum is 0.5 but 0.95 in"),
        ({"data.heldout_sequences": 8}, "data.heldout_sequences is 8 but 64 in"),
        ({"lr": 1.0}, "lr is 1.0 but 0.002 in"),
        ({"schedule.warmup_steps": 1}, "schedule.warmup_steps is 1 but 20 in"),
        ({"plan.split": "update"}, "plan.split is 'matrices' but 'none' in"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_starts(
    first: Path, tmp_path: Path, changes: dict, message: str, capfd
) -> None:
    source = first / "checkpoint" / "step-000003"
    assert main(arguments(tmp_path / "run", **{"resume_from": source, "tp": 2, **changes})) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("error: " + message.format(source=source))
    assert not (tmp_path / "run").exists()


def break_file(path: Path, how: str) -> None:
    file = path / "rank-1.safetensors"
    if how == "missing":
        file.unlink()
    elif how == "cut short":
        os.truncate(file, file.stat().st_size - 10)
    elif how == "meta":
        (path / "meta.json").write_text('{"step": 3}')
    elif how == "one bit":
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    elif how == "other tensors":  # the length of a valid file, but not what the index says
        save_file({name + "x": tensor for name, tensor in load_file(file).items()}, file)


@pytest.mark.parametrize("how", ["missing", "cut short", "meta", "other tensors"])
def test_a_damaged_checkpoint_of_another_run_is_refused(first: Path, tmp_path: Path, how: str, capfd) -> None:
    path = tmp_path / "step-000003"
    shutil.copytree(first / "checkpoint" / path.name, path)
    break_file(path, how)
    assert main(arguments(tmp_path / "run", resume_from=path, tp=2)) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert f"checkpoint {path.name} cannot be read (" in line
    assert line.endswith("): give another one")


@pytest.mark.parametrize("how", ["cut short", "one bit"])
def test_a_damaged_checkpoint_of_its_own_ends_the_run_as_corrupt(first: Path, tmp_path: Path, how: str, capfd) -> None:
    out = tmp_path / "run"
    shutil.copytree(first, out)
    (out / "manifest.json").unlink()
    path = out / "checkpoint" / "step-000006"
    break_file(path, how)
    again = arguments(out, checkpoint_every=3, reduction="rank-order")
    assert main(again) == 1
    record = manifest(out)
    assert record["status"] == "corrupt"
    said = capfd.readouterr().err
    assert f"CorruptRecord: checkpoint {path} cannot be read (rank " in said
    assert f"delete {path} to resume from the one before" in said
    shutil.rmtree(path)  # as it says
    assert main(again) == 0
    assert manifest(out)["result"]["params_digest"] == manifest(first)["result"]["params_digest"]


def test_meta_says_where_a_checkpoint_comes_from(first: Path) -> None:
    meta = json.loads((first / "checkpoint" / "step-000003" / "meta.json").read_text())
    record = manifest(first)
    assert (meta["step"], meta["spec"]) == (3, record["config_digest"])
    assert meta["settings"] == record["config"]
    assert meta["plan"] == record["result"]["plan"]["digest"]
    tensors = assembled(first / "checkpoint" / "step-000003")
    assert int(tensors["step"]) == 3
    assert all(t.dtype == torch.float32 for name, t in tensors.items() if name.startswith("master/"))
