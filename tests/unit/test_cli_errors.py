import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from impl.__main__ import main
from impl.cli import train
from impl.harness import launch
from impl.harness.spec import RunSpec, parse

BASE = ["train", "--model", "qwen3-tiny", "--dp", "2", "--set", "runtime.device=cpu"]


@pytest.fixture(autouse=True)
def nothing_is_started(monkeypatch):
    def refuse(*_args, **_more):
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)


def refused(capsys, words: list[str]) -> str:
    """The only line on stderr of a command line that must be refused."""
    capsys.readouterr()
    assert main(words) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    (line,) = shown.err.splitlines()
    assert line.startswith("error: ")
    return line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tp", "3"], "TP=3 does not divide 4 attention heads"),
        (["--tp", "4"], "TP=4 does not divide 2 KV heads"),
        (["--model", "qwen3-tinny"], "unknown model 'qwen3-tinny': did you mean 'qwen3-tiny'?"),
        (["--optimizer", "moun"], "unknown optimizer 'moun': did you mean 'muon'?"),
        (["--strategy", "canzone"], "unknown strategy 'canzone': did you mean 'canzona'?"),
        (["--set", "bacth=8"], "unknown setting 'bacth': did you mean 'batch'?"),
        (["--set", "plan.alfa=1"], "unknown setting of plan 'alfa': did you mean 'alpha'?"),
        (["--set", "optimizer_settings.momentun=0.9"], "unknown hyper-parameter of muon 'momentun': did you mean"),
        (["--set", "adamw_settings.beta=0.9"], "unknown hyper-parameter of adamw 'beta': did you mean"),
        (["--nv-version", "ping"], "plan.nv_version: "),
        (["--set", "plan.capacity_bytes=0"], "plan.capacity_bytes: Input should be greater than 0 (got 0)"),
        (["--set", "plan.capacity_bytes=-5"], "plan.capacity_bytes: Input should be greater than 0 (got -5)"),
        (["--set", "plan.alpha=2"], "plan.alpha: Input should be less than or equal to 1"),
        (["--dp", "0"], "dp: Input should be greater than 0"),
        (["--steps", "-1"], "steps: Input should be greater than 0"),
        (["--lr", "0"], "lr: Input should be greater than 0"),
        (["--lr", "fast"], "argument --lr: invalid float value: 'fast'"),
        (["--batch", "5"], "batch 5 is not a multiple of dp x microbatches (2 x 1)"),
        (["--microbatches", "3"], "batch 16 is not a multiple of dp x microbatches (2 x 3)"),
        (["--sequence", "1000000"], "sequence 1000000 is longer than qwen3-tiny's"),
        (["--set", "data.source=missing.txt"], "data source 'missing.txt' does not exist"),
        (["--set", "data.heldout_sequences=100000"], "data.heldout_sequences asks for 100000"),
        (["--set", "data.tokenizer=./nowhere"], "cannot load tokenizer './nowhere'"),
        (["--set", "init_from=nowhere"], "nowhere is not a Hugging Face model folder"),
        (["--set", "frozen=[nothing*]"], "frozen pattern 'nothing*' matches no parameter"),
        (["--set", "frozen=['*']"], "leave no parameter to train"),
        (["--set", "clip"], "--set 'clip': write key=value"),
        (["--set", "model.name=x"], "--set 'model.name=x': model is not a group of settings"),
        (["--set", "dtype=float16"], "dtype: Input should be 'float32' or 'bfloat16' (got 'float16')"),
        (["--config", "nowhere.yaml"], "cannot read nowhere.yaml: No such file or directory"),
        (["--step", "3"], "unrecognized arguments: --step 3"),
        (
            ["--optimizer", "adamw", "--set", "optimizer_settings.eps=1e-8", "--set", "adamw_settings.eps=1e-8"],
            "not both",
        ),
    ],
)
def test_bad_input_is_one_line_and_starts_nothing(tmp_path, capsys, words, message):
    line = refused(capsys, [*BASE, "--out", str(tmp_path / "run"), *words])
    assert message in line
    assert not (tmp_path / "run").exists()


def test_missing_gpus_are_named(tmp_path, capsys, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    words = ["train", "--model", "qwen3-tiny", "--dp", "2", "--out", str(tmp_path / "run")]
    for device in ("auto", "cuda"):
        line = refused(capsys, [*words, "--set", f"runtime.device={device}"])
        assert "2 ranks need 2 GPUs but this machine has 1" in line


def test_no_model_and_no_out(tmp_path, capsys):
    assert "--model qwen3-tiny" in refused(capsys, ["train", "--out", str(tmp_path / "run")])
    assert "--out" in refused(capsys, ["train", "--model", "qwen3-tiny"])


def test_unknown_command_names_the_nearest(capsys):
    assert "unknown command 'trian': did you mean 'train'?" in refused(capsys, ["trian"])


def test_configuration_file_is_data_only(tmp_path, capsys):
    marker = tmp_path / "executed"
    unsafe = tmp_path / "unsafe.yaml"
    unsafe.write_text(f"model: !!python/object/apply:os.mknod ['{marker}']\n")
    words = ["train", "--out", str(tmp_path / "run"), "--config"]
    assert "is not plain YAML" in refused(capsys, [*words, str(unsafe)])
    assert not marker.exists()
    (tmp_path / "list.yaml").write_text("- a\n")
    assert "must hold settings" in refused(capsys, [*words, str(tmp_path / "list.yaml")])
    (tmp_path / "empty.yaml").write_text("")
    assert refused(capsys, [*words, str(tmp_path / "empty.yaml")])
    (tmp_path / "nested.yaml").write_text("model: qwen3-tiny\nplan: 3\n")
    assert "plan" in refused(capsys, [*words, str(tmp_path / "nested.yaml")])


def test_run_folder_that_cannot_be_used(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert "cannot write to run folder" in refused(capsys, [*BASE, "--out", str(tmp_path / "file" / "run")])
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "metrics.jsonl").write_text("")
    assert "holds metrics.jsonl but no config.yaml" in refused(capsys, [*BASE, "--out", str(tmp_path / "foreign")])


def test_run_folder_of_another_configuration_is_left_alone(tmp_path, capsys):
    old = parse(RunSpec, {"model": "qwen3-tiny", "dp": 2, "seed": 1, "runtime": {"device": "cpu"}})
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(old.resolved()))
    (tmp_path / "manifest.json").write_text(json.dumps({"status": "done"}))
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    line = refused(capsys, [*BASE, "--out", str(tmp_path)])
    assert old.digest[:12] in line
    assert parse(RunSpec, old.resolved() | {"seed": 0}).digest[:12] in line
    assert "different: seed 1 -> 0" in line
    assert {name: (tmp_path / name).read_bytes() for name in before} == before


def test_world_size_of_torchrun_must_be_dp_times_tp(tmp_path, capsys, monkeypatch):
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)
    line = refused(capsys, [*BASE, "--out", str(tmp_path / "run")])
    assert "torchrun started 3 ranks but dp x tp is 2 x 1 = 2" in line
    assert launch.inside_torchrun()


def resolved(words: list[str]) -> RunSpec:
    import argparse

    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    return parse(RunSpec, train.settings(parser.parse_args(["--out", "x", *words])))


def test_options_override_the_file_and_set_overrides_options(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("model: llama-tiny\nsteps: 7\nlr: 4.0e-3\nplan: {alpha: 0.5, fallback: true}\n")
    spec = resolved(["--config", str(path), "--steps", "9", "--set", "plan.fallback=false", "--set", "lr=1e-3"])
    assert (spec.model, spec.steps, spec.lr, spec.plan.alpha) == ("llama-tiny", 9, 1e-3, 0.5)
    assert spec.plan.fallback is False
    assert resolved(["--model", "qwen3-tiny", "--steps", "9", "--set", "steps=11"]).steps == 11


@pytest.mark.parametrize("key", ["plan.fallback", "runtime.deterministic"])
@pytest.mark.parametrize(("text", "value"), [("false", False), ("False", False), ("no", False), ("true", True)])
def test_false_is_false(key, text, value):
    spec = resolved(["--model", "qwen3-tiny", "--set", f"{key}={text}"])
    group, name = key.split(".")
    assert getattr(getattr(spec, group), name) is value


def test_help_is_readable_and_imports_nothing_slow(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert "train" in text
    assert "resumes its own checkpoint" in text
    assert main([]) == 2
    code = "import sys; from impl.__main__ import main; main(['--help']); sys.exit('torch' in sys.modules)"
    assert subprocess_run([sys.executable, "-c", code]) == 0


def subprocess_run(command: list[str]) -> int:
    """Run without ``subprocess.Popen``, which these tests forbid."""
    import os

    root = str(Path(__file__).resolve().parents[2])
    return os.spawnve(os.P_WAIT, command[0], command, {**os.environ, "PYTHONPATH": root})
