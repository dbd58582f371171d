"""The command ``pipeline``: what it refuses, what it prints, and what its record holds."""

from __future__ import annotations

import json
import signal

import pytest
import yaml

from impl.__main__ import main
from impl.cli import pipeline
from impl.harness import pipeline_run
from impl.harness.pipeline_results import iterations_to
from impl.harness.pipeline_spec import PipelineSpec
from impl.harness.spec import parse

TINY = ["pipeline", "--model", "qwen3-tiny", "--layers", "2", "--set", "batch=2", "--set", "sequence=8"]
TINY += ["--set", "data.heldout_sequences=3", "--set", "eval_every=2"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--stages", "3"], "2 layers, too few for 3 stages"),
        (["--stages", "0"], "stages"),
        (["--method", "basis-rotatoin"], "did you mean 'basis-rotation'"),
        (["--set", "perod=2"], "did you mean 'period'"),
        (["--set", "method_settings.perod=2"], "did you mean 'period'"),
        (["--set", "period=0"], "period: Input should be greater than or equal to 1"),
        (["--set", "layer_counts=[1, 2]", "--stages", "2"], "add up to 2 layers"),
        (["--set", "layer_counts=[1, 1, 1]", "--stages", "2"], "3 numbers for 2 stages"),
        (["--target", "low"], "--target"),
        (["--set", "target=low"], "target: Input should be a valid number"),
        (["--set", "target=.nan"], "target: Input should be a finite number"),
        (["--lr", "inf"], "lr: Input should be a finite number"),
        (["--set", "clip=.inf"], "clip: Input should be a finite number"),
        (["--set", "lr_slope=.inf"], "lr_slope: Input should be a finite number"),
        (["--set", "method=[1]", "--set", "period=1"], "unknown method '[1]'"),
        (["--runtime", "threads"], "runtime"),
        (["--mode", "stsh"], "mode"),
        (["--method", "gpipe", "--mode", "stash"], "gpipe runs in mode sync, not stash"),
        (["--method", "pipemare", "--mode", "stash"], "runs in mode no-stash-recompute"),
        (["--stages", "2", "--set", "microbatches=3"], "microbatches"),
        (["--method", "pipedream-2bw", "--stages", "2", "--set", "microbatches=1"], "microbatches"),
        (["--method", "pipedream", "--set", "beta1_rule=article"], "0/0"),
        (["--method", "pipedream", "--layers", "40", "--stages", "35", "--set", "lr_slope=0.03"], "fewer stages"),
        (["--set", "allocation=stage-aware", "--set", "period=500"], "max_period"),
        (["--method", "gpipe", "--stages", "2", "--set", "drain_every=2"], "leave drain_every out"),
        (["--set", "drain_every=-1"], "drain_every"),
        (["--set", "recompute=all"], "recompute"),
        (["--set", "stash_on_cpu=true"], "stash_on_cpu needs recompute=stage"),
        (["--set", "checkpoint_every=-1"], "checkpoint_every"),
        (["--model", "qwen3-1.7b", "--layers", "28", "--stages", "2"], "ties its head to the embedding"),
        (["--set", "replicas=2"], "simulator computes one replica"),
        (["--set", "sequence=100000"], "longer than"),
        (["--set", "data.source=./nowhere.txt"], "does not exist"),
    ],
)
def test_refused_in_one_line(words, says, capfd):
    assert main([*TINY, *words, "--json"]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert says in err


def test_a_file_that_is_no_text_is_refused_in_one_line(tmp_path, capfd):
    (tmp_path / "run.yaml").write_bytes(b"\xff\xfe")
    assert main(["pipeline", "--config", str(tmp_path / "run.yaml")]) == 2
    err = capfd.readouterr().err
    assert "is not plain YAML" in err
    assert err.count("\n") == 1


def test_no_model():
    assert main(["pipeline", "--stages", "2"]) == 2


def arguments(*words):
    from impl.__main__ import Parser

    parser = Parser()
    pipeline.add_arguments(parser)
    return pipeline.settings(parser.parse_args([*TINY[1:], *words]))


def test_settings_rise_from_file_to_options_to_set(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({"method": "soap", "stages": 4, "lr": 1.0, "method_settings": {"period": 7}}))
    found = arguments("--config", str(file), "--stages", "2", "--set", "lr=3e-3", "--set", "beta1=0.5")
    assert (found["method"], found["stages"], found["lr"]) == ("soap", 2, 3e-3)
    assert found["method_settings"] == {"period": 7, "beta1": 0.5}


def test_digest_is_of_what_decides_the_result():
    base = {"model": "qwen3-tiny", "stages": 2}
    spec = parse(PipelineSpec, base)
    assert parse(PipelineSpec, {**base, "process": {"heartbeat_s": 9.0}}).digest == spec.digest
    assert parse(PipelineSpec, {**base, "method_settings": {"period": 1}}).digest != spec.digest
    assert parse(PipelineSpec, {**base, "checkpoint_every": 5}).digest == spec.digest
    assert parse(PipelineSpec, {**base, "drain_every": 5}).digest != spec.digest
    assert parse(PipelineSpec, spec.resolved()) == spec


def test_defaults_are_those_of_the_definitions():
    spec = PipelineSpec(model="qwen3-tiny")
    assert (spec.batch, spec.sequence, spec.clip, spec.weight_decay, spec.eval_every) == (16, 48, 1.0, 0.01, 20)
    assert (spec.schedule.warmup_steps, spec.schedule.final_fraction) == (20, 0.1)


@pytest.mark.parametrize(
    ("target", "expected"),
    [(5.0, 20.0), (3.0, 20.0), (2.5, 30.0), (2.0, 40.0), (1.9, 60 + 20 * 2 / 3), (1.5, None)],
)
def test_iterations_to_target(target, expected):
    """Linear between points, the first crossing, the first point if it is there already, None if censored."""
    curve = [[20, 3.0], [40, 2.0], [60, 2.1], [80, 1.8], [100, None]]
    assert iterations_to(target, curve) == (None if expected is None else pytest.approx(expected))


def simulated(capfd, *words) -> tuple[int, str, str]:
    code = main([*TINY, "--steps", "5", *words])
    out, err = capfd.readouterr()
    return code, out, err


def test_json_is_one_object_and_progress_goes_elsewhere(capfd):
    words = ["--stages", "2", "--method", "pipedream", "--target", "5.6", "--json"]
    code, out, err = simulated(capfd, *words)
    found = json.loads(out)
    assert code == 0
    assert "update 5/5" in err
    assert found["status"] == "done"
    assert found["staleness"] == [1, 0]
    assert found["peak_stash_versions"] == [2, 1]
    assert len(found["losses"]) == found["steps"] == 5
    assert found["final_loss"] == found["losses"][-1]
    assert [step for step, _ in found["heldout"]] == [2, 4, 5]
    assert found["iterations_to_target"] == iterations_to(5.6, found["heldout"])
    assert len(found["params_digest"]) == 64
    assert simulated(capfd, *words)[1].partition('"seconds"')[0] == out.partition('"seconds"')[0], "runs repeat exactly"


def test_target_that_is_not_reached_is_null_and_said(capfd):
    _, out, _ = simulated(capfd, "--target", "0.1", "--json")
    assert json.loads(out)["iterations_to_target"] is None
    code, out, _ = simulated(capfd, "--target", "0.1")
    assert code == 0
    assert "iterations to held-out loss 0.1: > 5 (not reached)" in out


def test_diverged_run_says_so(capfd):
    words = ["--method", "pipedream", "--stages", "2", "--lr", "1e30", "--set", "schedule.warmup_steps=0"]
    code, out, _ = simulated(capfd, *words, "--json")
    found = json.loads(out)
    assert code == 3
    assert found["status"] == "diverged"
    assert found["params_digest"] is None
    assert None in found["losses"] or None in [loss for _, loss in found["heldout"]]
    code, out, _ = simulated(capfd, *words)
    assert code == 3
    assert "diverged: pipedream on 2 stages, a loss or the weights were not finite" in out


def test_record(tmp_path, capfd):
    """The folder holds the run; the same settings do nothing, others are refused."""
    words = ["--stages", "2", "--out", str(tmp_path / "run")]
    assert simulated(capfd, *words)[0] == 0
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["config"]["method"] == "basis-rotation"
    assert manifest["result"]["staleness"] == [1, 0]
    versions = json.loads((tmp_path / "run" / "versions.json").read_text())
    assert [entry for entry in versions[0] if entry[0] == "F"] == [["F", t, max(0, t - 1)] for t in range(5)]
    assert [entry for entry in versions[1] if entry[0] == "B"] == [["B", t, t] for t in range(5)]
    assert "nothing to do" in simulated(capfd, *words)[1]
    code, _, err = simulated(capfd, *words, "--seed", "1")
    assert code == 2
    assert "seed 0 -> 1" in err


def test_one_stage_is_the_same_whatever_the_method_of_delay(capfd):
    """Without delay, PipeDream, its corrections and the synchronous schedules are AdamW."""
    same = ["pipedream", "pipedream-lr", "delay-compensation", "weight-prediction", "pipemare", "gpipe", "1f1b-flush"]
    digests = {name: json.loads(simulated(capfd, "--method", name, "--json")[1])["params_digest"] for name in same}
    assert len(set(digests.values())) == 1, digests
    other = json.loads(simulated(capfd, "--method", "adamw-beta1-zero", "--json")[1])["params_digest"]
    assert other not in digests.values()


def test_failed_run_leaves_its_reason(tmp_path, capfd, monkeypatch):
    def fail(*_args, **_more):
        raise MemoryError("too much")

    monkeypatch.setattr(pipeline_run, "simulate", fail)
    code, out, err = simulated(capfd, "--out", str(tmp_path / "run"), "--json")
    assert code == 1
    assert json.loads(out)["status"] == "out-of-memory"
    assert "error: out-of-memory: MemoryError: too much" in err
    assert "in fail" in json.loads((tmp_path / "run" / "manifest.json").read_text())["error"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("keep", [True, False], ids=["out", "no-out"])
def test_an_interrupted_simulator_leaves_a_record(tmp_path, capfd, monkeypatch, number, keep):
    """Whatever ends it, as with processes: batch systems send SIGTERM, closed terminals SIGHUP."""
    monkeypatch.setattr(pipeline_run, "simulate", lambda *_args, **_more: signal.raise_signal(number))
    before = signal.signal(number, lambda *_: None)  # so that the test outlives what is not handled
    try:
        code, out, err = simulated(capfd, *(["--out", str(tmp_path / "run")] if keep else []))
    finally:
        signal.signal(number, before)
    assert code == 128 + number
    assert f"interrupted by {number.name}" in err
    if keep:
        assert json.loads((tmp_path / "run" / "manifest.json").read_text())["status"] == "unfinished"
    else:
        assert out == "unfinished; without --out nothing is kept\n"
