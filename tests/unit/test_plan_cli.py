"""``python -m impl plan`` and ``balance``: what they print and write, and what they refuse."""

import argparse
import json
from pathlib import Path

import pandas as pd
import pytest

from impl.canzona.plan import Plan, validate
from impl.canzona.strategies import PlanOptions
from impl.cli import balance, plan
from impl.errors import ConfigError
from impl.harness.balance_spec import COLUMNS, load, rows, table

POINT = "--model qwen3-32b --tp 8 --dp 32 --bucket-elements 400000000"
FIELDS = {
    *("flops_ratio", "flops_ratio_tp_local", "memory_ratio", "per_gpu_flops_ratio", "lower_bound"),
    *("fallback_used", "loads", "plan_seconds", "kind", "strategy", "model", "micro_groups", "warnings"),
}


def run(command, line):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args([str(word) for word in (line.split() if isinstance(line, str) else line)]))


def test_json_at_the_published_point(capsys):
    assert run(plan, f"{POINT} --strategy canzona --optimizer muon --alpha 1.0 --json") == 0
    got = json.loads(capsys.readouterr().out)
    assert got.keys() >= FIELDS
    assert (round(got["flops_ratio_tp_local"], 4), round(got["memory_ratio"], 4)) == (1.4342, 1.1129)
    assert round(got["lower_bound"]["gpu"], 3) == 2.039
    assert len(got["loads"]["flops"]) == len(got["loads"]["memory_bytes"]) == len(got["loads"]["elements"]) == 32
    assert 95.6e6 < min(got["loads"]["elements"]) < max(got["loads"]["elements"]) < 135.7e6
    assert got["kind"] == "planned"
    print(f"planned in {got['plan_seconds']:.3f} s")


def test_options_reach_the_plan(capsys):
    line = "--strategy nv-layerwise --nv-version lpt-numel --no-fallback --cost flops --tp-mode slot --alpha 0.5"
    run(plan, f"{POINT} {line} --capacity-bytes 1000000 --json")
    got = json.loads(capsys.readouterr().out)
    assert got["version"] == "lpt-numel"
    assert got["options"] == PlanOptions(
        bucket_elements=400_000_000,
        nv_version="lpt-numel",
        fallback=False,
        cost="flops",
        tp_mode="slot",
        alpha=0.5,
        capacity_bytes=1_000_000,
    ).model_dump(mode="json")
    assert len(got["over_capacity"]) == 256


def test_fallback_is_reported_and_can_be_switched_off(capsys):
    line = "--model qwen3-1.7b --tp 1 --dp 8 --bucket-elements 400000000 --json"  # alpha 1: 1.071 against 1.061
    found = []
    for extra in ("", " --no-fallback"):
        run(plan, line + extra)
        found.append(json.loads(capsys.readouterr().out))
    assert [f["fallback_used"] for f in found] == [True, False]
    assert found[0]["flops_ratio"] < found[1]["flops_ratio"]


def test_readable_report(capsys):
    run(plan, f"{POINT} --strategy asc")
    text = capsys.readouterr().out
    assert "3.2384" in text
    assert "[planned]" in text
    assert "warning: matrix FLOPs: the busiest DP rank has 2.34 times the mean" in text
    run(plan, "--model qwen3-tiny --dp 40 --optimizer adamw")
    text = capsys.readouterr().out
    assert "adamw: 0 matrices" in text
    assert "8 more ranks" in text


@pytest.mark.parametrize("extra", ["", "--strategy sc", "--optimizer adamw", "--strategy nv-layerwise --dp 1"])
@pytest.mark.parametrize("suffix", ["png", "pdf"])
def test_plan_and_picture_files(tmp_path, capsys, suffix, extra):
    picture, file = tmp_path / "a" / f"plan.{suffix}", tmp_path / "b" / "plan.json"
    options = ["--model", "qwen3-tiny", "--tp", 2, "--dp", 3, "--bucket-elements", 20_000, *extra.split()]
    run(plan, [*options, "--draw", picture, "--out", file])
    capsys.readouterr()
    validate(Plan.from_json(json.loads(file.read_text())))
    assert picture.read_bytes()[:4] == (b"%PDF" if suffix == "pdf" else b"\x89PNG")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--model qwen3-32b --tp 3", "TP=3 does not divide"),
        ("--model qwen3-32b --tp 16", "TP=16 does not divide 8 KV heads"),
        ("--model qwen3-32b --tp 0", "at least 1"),
        ("--model qwen3-32b --dp 0", "at least 1"),
        ("--model qwen3-33b", "did you mean 'qwen3-32b'"),
        ("--model qwen3-tiny --strategy canzone", "did you mean 'canzona'"),
        ("--model qwen3-tiny --optimizer moun", "did you mean 'muon'"),
        ("--model qwen3-tiny --capacity-bytes 0", "capacity_bytes: Input should be greater than 0"),
        ("--model qwen3-tiny --bucket-elements -5", "bucket_elements: Input should be greater than 0"),
        ("--model qwen3-tiny --alpha 1.5", "alpha: Input should be less than or equal to 1"),
        ("--model qwen3-tiny --alpha nan", "alpha: Input should be"),
        ("--model qwen3-tiny --cost flop", "cost: Input should be 'numel', 'memory' or 'flops'"),
        ("--model qwen3-tiny --tp-mode best", "tp_mode: Input should be"),
        ("--model qwen3-tiny --nv-version lpt", "nv_version: Input should be"),
        ("--model qwen3-tiny --layers 0", "at least 1"),
        ("--model qwen3-tiny --draw plan.svg", "end the name in .png or .pdf"),
        ("--model qwen3-tiny --out /proc/nowhere/plan.json", "cannot write"),
    ],
)
def test_bad_input_is_one_clear_line(line, message, capsys):
    with pytest.raises(ConfigError) as error:
        run(plan, line)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


# --- the balance experiment -----------------------------------------------------------------------------------------

CONFIG = Path(__file__).parents[2] / "experiments" / "balance.yaml"


@pytest.fixture(scope="module")
def ci(tmp_path_factory):
    out = tmp_path_factory.mktemp("balance")
    assert run(balance, ["--config", CONFIG, "--tier", "ci", "--out", out]) == 0
    return out


def test_balance_table(ci):
    frame = pd.read_parquet(ci / "balance.parquet")
    assert list(frame.columns) == list(COLUMNS)
    assert sorted(p.name for p in ci.iterdir()) == ["balance.csv", "balance.parquet"]
    assert len(pd.read_csv(ci / "balance.csv")) == len(frame)
    assert set(frame["kind"]) == {"planned"}
    assert set(frame["sweep"]) == {"mesh", "alpha", "capacity", "cost"}
    done = frame[frame["status"] == "done"]
    assert done["flops_ratio"].notna().all()
    assert set(done.loc[done["strategy"] == "nv-layerwise", "nv_version"]) == {"ping-pong", "lpt-numel", "lpt-ns"}
    assert done.loc[done["strategy"] != "nv-layerwise", "nv_version"].isna().all()
    point = done[(done["sweep"] == "mesh") & (done["model"] == "qwen3-32b") & (done["dp"] == 32) & (done["tp"] == 8)]
    ratios = {r.system: round(r.flops_ratio_tp_local, 4) for r in point.itertuples()}
    assert ratios["asc"] == 3.2384
    assert ratios["canzona"] == 1.4342
    alphas = done[done["sweep"] == "alpha"].set_index("alpha")["memory_ratio"].round(2)
    assert alphas.to_dict() == {0.0: 2.46, 0.5: 2.42, 1.0: 1.11}


def test_a_mesh_that_does_not_fit_is_a_row_with_its_reason(ci):
    frame = pd.read_parquet(ci / "balance.parquet")
    skipped = frame[frame["status"] == "skipped"]
    assert set(skipped["tp"]) == {16}
    assert skipped["reason"].str.contains("TP=16 does not divide 8 KV heads").all()
    assert skipped["flops_ratio"].isna().all()


def test_balance_covers_the_catalogue_on_laptop():
    spec = load(CONFIG)
    cases = list(spec.cases("laptop"))
    meshes = {(c.model, c.dp, c.tp) for c in cases if c.sweep == "mesh"}
    assert len({m for m, _, _ in meshes}) == 7
    assert {t for _, _, t in meshes} == {1, 2, 4, 8}
    assert {d for _, d, _ in meshes} >= {4, 8, 16, 32, 64, 128, 256}
    assert {c.options.tp_mode for c in cases if c.sweep == "capacity"} == {"no", "single", "slot", "global"}
    assert {c.options.alpha for c in cases if c.sweep == "alpha"} >= {0.0, 0.5, 1.0}
    for tier in ("gpu1", "node8", "cluster"):
        assert list(spec.cases(tier)) == cases


def test_balance_is_the_same_twice():
    spec = load(CONFIG)
    once, again = (table(list(rows(spec, "ci"))).drop(columns="plan_seconds") for _ in range(2))
    pd.testing.assert_frame_equal(once, again)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("title: x\noptimizer: muon\nsystem: []\n", "did you mean 'systems'"),
        ("- 1\n", "expected a mapping"),
    ],
)
def test_bad_balance_file(tmp_path, text, message):
    path = tmp_path / "balance.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        run(balance, ["--config", path, "--out", tmp_path])


def test_unknown_tier(tmp_path):
    with pytest.raises(ConfigError, match="did you mean 'laptop'"):
        run(balance, ["--config", CONFIG, "--tier", "labtop", "--out", tmp_path])
