"""Experiments of pipeline runs: which runs, with which settings, and what tables and figures say about them."""

from __future__ import annotations

import argparse
import json
import math
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from scipy import stats

from impl.cli import tuned
from impl.errors import ConfigError
from impl.harness import experiments, sweeps
from impl.harness.pipeline_results import FILLING
from impl.harness.pipeline_spec import PipelineSpec
from impl.harness.run import Run
from impl.harness.tidy import collect
from paper_figures import (
    common,
    markdown,
    no_stash,
    pipeline_time,
    pipelines,
    rotation,
    stage_aware,
    staleness,
    statistics,
    style,
    sweep,
)
from tests.unit import fake_runs
from tests.unit.test_figures import overlaps, texts
from tests.unit.test_tables import cells

PUBLISHED = pd.read_csv(Path(__file__).parents[2] / "results" / "published" / "rotation.csv")
MODULES = [rotation, staleness, sweep, no_stash, stage_aware]


def spec_of(run: Run) -> PipelineSpec:
    assert isinstance(run.spec, PipelineSpec)
    return run.spec


def frame(folder: Path, finished: bool = True, **tier: object) -> pd.DataFrame:
    experiment = fake_runs.pipeline_experiment(**tier)
    for run in experiment.runs("ci") if finished else ():
        fake_runs.pipeline_run(folder, run)
    return collect(experiment, "ci", folder)


# which runs


def test_a_run_for_every_method_stage_seed_and_learning_rate():
    runs = fake_runs.pipeline_experiment().runs("ci")
    assert len(runs) == 3 * (2 + 5)
    assert {run.command for run in runs} == {"pipeline"}
    found = {(r.system.id, spec_of(r).stages): spec_of(r) for r in runs if r.system}
    assert found["adamw", 1].lr == 8e-3
    assert found["adamw", 8].lr == 4e-3
    assert (found["muon", 8].lr, found["muon", 8].method_settings) == (8e-3, {"momentum": 0.8})
    assert found["rotation", 8].method_settings == {"period": 1}


def test_entries_settings_win_over_tuned_ones_and_own_rates_over_both():
    data = fake_runs.pipeline_data()
    data["methods"] = [{"id": "muon", "name": "Muon", "method": "muon", "settings": {"momentum": 0.5}}]
    data["reference"] = "muon"
    data["tiers"]["ci"]["grids"] = [{"stages": [8]}]
    run = experiments.parse(experiments.PipelineExperiment, data).runs("ci")[0]
    assert (spec_of(run).lr, spec_of(run).method_settings) == (8e-3, {"momentum": 0.5})
    data["methods"][0]["lr"] = [1e-3, 2e-3]
    runs = experiments.parse(experiments.PipelineExperiment, data).runs("ci")
    assert sorted({spec_of(r).lr for r in runs}) == [1e-3, 2e-3]
    data["tiers"]["ci"]["grids"] = [{"stages": [8], "lr": [3e-3]}, {"stages": [1]}]
    runs = experiments.parse(experiments.PipelineExperiment, data).runs("ci")
    assert {(spec_of(r).stages, spec_of(r).lr) for r in runs} == {(8, 3e-3), (1, 1e-3), (1, 2e-3)}


def test_experiments_share_the_runs_that_both_want():
    folder = Path(__file__).parents[2] / "experiments"
    of = {
        name: {r.id for r in experiments.runs_of(folder / f"{name}.yaml", "laptop")}
        for name in ("staleness", "rotation")
    }
    assert len(of["staleness"] & of["rotation"]) == 6  # AdamW at P = 1 and 8, three seeds


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reference": "adam"}, "is not one of the methods"),
        ({"methods": fake_runs.PIPELINE_METHODS + fake_runs.PIPELINE_METHODS[:1]}, "listed twice"),
        ({"tiers": {"ci": {"grids": [{"stages": [8], "methods": ["rotaton"]}]}}}, "did you mean 'rotation'"),
        ({"tiers": {"ci": {"grids": [{"stages": []}]}}}, "grids.0.stages"),
        ({"tiers": {"ci": {"grids": [{"stages": [4]}]}}}, "no learning rate for adamw on 4 stages of qwen3-tiny"),
        ({"base": {"model": "qwen3-tiny", "stpes": 3}}, "did you mean 'steps'"),
        ({"tuned": "nowhere.yaml"}, "cannot read"),
    ],
)
def test_bad_input_gets_one_clear_line(tmp_path, change, message):
    path = tmp_path / "experiment.yaml"
    path.write_text(yaml.safe_dump(fake_runs.pipeline_data() | change))
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        experiments.load(path).runs("ci")
    assert "\n" not in str(caught.value)


# sweeps


def sweep_data() -> dict:
    methods = [
        {"id": "adamw", "name": "AdamW", "method": "pipedream", "lr": [2e-3, 4e-3, 8e-3]},
        {"id": "muon", "name": "Muon 0.95", "settings": {"momentum": 0.95}},
        {"id": "muon-80", "name": "Muon 0.8", "tuned": "muon", "settings": {"momentum": 0.8}},
    ]
    methods[1:] = [{**entry, "method": "muon", "lr": [4e-3, 8e-3]} for entry in methods[1:]]
    return fake_runs.pipeline_data() | {
        "methods": methods,
        "tuned": [],
        "tiers": {"ci": {"grids": [{"stages": [2]}], "base": {"steps": 40}}},
    }


def test_the_best_of_a_sweep_is_recorded_and_read_back(tmp_path):
    path, out = tmp_path / "sweep.yaml", tmp_path / "rates.yaml"
    path.write_text(yaml.safe_dump(sweep_data()))
    losses = {("adamw", 2e-3): 2.0, ("adamw", 4e-3): 1.9, ("adamw", 8e-3): 1.95}
    losses |= {("muon", 4e-3): 1.8, ("muon", 8e-3): 1.7, ("muon-80", 4e-3): 1.75, ("muon-80", 8e-3): 1.6}
    for run in experiments.load(path).runs("ci"):
        status = "diverged" if run.system and run.system.id == "muon-80" and spec_of(run).lr == 8e-3 else "done"
        loss = losses[run.system.id, spec_of(run).lr] if run.system else math.nan
        fake_runs.write(tmp_path / "runs", run, {"heldout_loss": loss}, [], status=status)
    out.write_text("- {name: other, stages: 3, lr: 0.001}\n- {name: adamw, stages: 2, lr: 0.5}\n")
    args = argparse.Namespace(sweep=path, tier="ci", runs=tmp_path / "runs", out=out)
    assert tuned.run(args) == 0
    rows = {row["name"]: row for row in yaml.safe_load(out.read_text())}
    assert rows["other"] == {"name": "other", "stages": 3, "lr": 0.001}
    assert rows["adamw"] == {"name": "adamw", "stages": 2, "lr": 4e-3, "heldout_loss": 1.9, "runs": 3}
    best = {"name": "muon", "stages": 2, "lr": 8e-3, "settings": {"momentum": 0.95}}
    assert rows["muon"] == best | {"heldout_loss": 1.7, "runs": 3, "edge": "largest"}  # what diverged does not count
    assert str(path) in out.read_text()
    for name, content in (("one", "name: adamw\n"), ("empty", ""), ("new/rates", None), ("rates.yaml/x", None)):
        args.out = tmp_path / f"{name}.yaml"
        if content is not None:
            args.out.write_text(content)
        if name in ("one", "rates.yaml/x"):
            with pytest.raises(ConfigError, match=r"not a record of sweeps|cannot write"):
                tuned.run(args)
        else:
            assert tuned.run(args) == 0
            assert len(yaml.safe_load(args.out.read_text())) == 2


def test_a_sweep_without_runs_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no finished run"):
        sweeps.best(fake_runs.pipeline_experiment(), "ci", tmp_path)


# statistics


def test_mean_has_its_t_interval():
    found = statistics.mean([1.0, 2.0, 3.0, math.nan])
    low, high = stats.t.interval(0.95, 2, loc=2.0, scale=stats.sem([1, 2, 3]))
    assert (found.value, found.low, found.high, found.n) == pytest.approx((2.0, low, high, 3))
    assert math.isnan(statistics.mean([1.0]).low)
    assert statistics.mean([]).n == 0


def test_paired_tests_are_scipys():
    ours, theirs = [1.0, 2.5, 2.0], [2.0, 3.0, 4.0]
    found = statistics.paired_difference(ours, theirs)
    assert found.p == pytest.approx(stats.ttest_rel(ours, theirs).pvalue)
    assert found.estimate.value == pytest.approx(np.mean(np.subtract(ours, theirs)))
    ratio = statistics.paired_quotient(ours, theirs)
    assert ratio.estimate.value == pytest.approx(stats.gmean(np.divide(ours, theirs)))
    assert ratio.p == pytest.approx(stats.ttest_rel(np.log(ours), np.log(theirs)).pvalue)
    assert math.isnan(statistics.paired_quotient([1.0], [2.0]).p)
    assert statistics.paired_quotient([], []).estimate.n == 0


# tables


def test_target_is_what_the_slowest_at_the_largest_p_reaches(tmp_path):
    found = pipelines.lines(frame(tmp_path))
    worst = 5.5 / (1 + 0.02 / 3.1 * 400) + 0.02  # AdamW, P = 8, seed 2
    assert pipelines.common_target(found) == math.ceil(100 * worst) / 100
    adamw = pipelines.find(found, "adamw", 8)
    assert adamw is not None
    assert len(adamw.iterations_if_all(pipelines.common_target(found))) == 3
    assert not adamw.iterations_if_all(worst - 0.005)  # seed 2 never gets there


def test_rotation_table_pairs_seeds_and_says_what_holds(tmp_path):
    table = frame(tmp_path)
    found = pipelines.lines(table)
    target = pipelines.common_target(found)
    main = rotation.main_table(table)
    assert cells(main, "AdamW (PipeDream)", "8")[3] == "reference"
    ours, theirs = (pipelines.find(found, s, 8) for s in ("rotation", "adamw"))
    assert ours is not None
    assert theirs is not None
    ratio = pipelines.quotient(ours, theirs, target)
    assert cells(main, "Basis rotation", "8")[3] == markdown.paired(ratio)
    assert ratio.estimate.value == pytest.approx(0.25, abs=0.05)
    assert cells(main, "Muon", "8")[1] == "momentum 0.8"
    assert cells(main, "Basis rotation", "8")[-1] == "3/3"
    checks = rotation.checks(found)
    assert [limit for _, _, limit in checks] == [1 / 3, 0.5, 1, 1]
    assert checks[0][1].value == pytest.approx(1 / 3.1, abs=0.03)
    assert [ratio.value for _, ratio, _ in checks[1:]] == pytest.approx([0.25, 0.5, 0.625], abs=0.06)
    document = rotation.table(table, PUBLISHED)
    assert "5.81 times" in document
    assert "measured" in document


@pytest.mark.parametrize(
    ("ratio", "says"),
    [
        ((0.8, 0.7, 0.9, 3), "holds"),
        ((0.8, 0.5, 1.2, 3), "holds, within the uncertainty"),
        ((1.1, 0.9, 1.3, 3), "does not hold at this scale, within the uncertainty"),
        ((1.2, 1.1, 1.3, 3), "does not hold at this scale"),
        ((0.8, math.nan, math.nan, 1), "holds, n = 1"),
        ((math.nan, math.nan, math.nan, 0), "not decided"),
    ],
)
def test_a_verdict_says_how_sure_it_is(ratio, says):
    assert rotation.verdict(statistics.Estimate(*ratio), 1.0) == says


def test_runs_of_different_lengths_are_different_lines(tmp_path):
    grids = [{"stages": [8], "methods": ["adamw"]}, {"stages": [8], "methods": ["adamw"], "base": {"steps": 200}}]
    found = pipelines.lines(frame(tmp_path, grids=grids))
    assert [(line.steps, len(line.curves)) for line in found] == [(400, 3), (200, 3)]
    assert [max(u for u, _ in line.curves[0]) for line in found] == [400, 200]


def test_a_target_that_is_never_reached_is_a_cell(tmp_path):
    line = pipelines.find(pipelines.lines(frame(tmp_path)), "adamw", 8)
    assert line is not None
    assert pipelines.iterations_cell(line, 0.1) == "> 400"
    seed0 = line.finals[0]
    assert pipelines.iterations_cell(line, seed0) == "> 400 (1 of 3 reach it)"


def test_staleness_table_puts_measured_beside_published(tmp_path):
    grids = [{"stages": [1, 8], "methods": ["adamw"]}]
    text = staleness.table(frame(tmp_path, grids=grids), PUBLISHED)
    row = cells(text.split("## For")[0], "AdamW (PipeDream)", "8")
    assert row[0] == "7"
    assert float(row[3].split()[0]) == pytest.approx(3.1, abs=0.4)
    assert row[-1] == "–"
    assert cells(text.split("## For")[0], "AdamW (PipeDream)", "32")[-1] == "5.81"


def test_depths_have_targets_of_their_own(tmp_path):
    grids = [
        {"stages": [8], "methods": ["pipedream-lr"]},
        {"stages": [8], "methods": ["nesterov"], "base": {"layers": 32}},
    ]
    text = pipelines.main_table(frame(tmp_path, grids=grids))
    assert "## 32 layers (measured)" in text
    assert len(set(re.findall(r"iterations to [\d.]+", text))) == 2


@pytest.mark.parametrize("status", ["failed", "diverged", "missing"])
def test_a_bad_run_is_a_cell_and_a_reason(tmp_path, status):
    experiment = fake_runs.pipeline_experiment()
    for run in experiment.runs("ci"):
        bad = run.system is not None and run.system.id == "nesterov"
        if not bad:
            fake_runs.pipeline_run(tmp_path, run)
        elif status != "missing":
            rows = [{"event": "step", "step": 1, "loss": None, "lr": 1.0}]
            fake_runs.write(tmp_path, run, {}, rows, status=status, error="loss is nan at update 1")
    table = collect(experiment, "ci", tmp_path)
    text = rotation.table(table, PUBLISHED)
    row = cells(text.split("## Other")[0], "Nesterov", "8")
    assert (row[2], row[4], row[-1]) == (status, status, "0/3")
    assert "not decided" in text
    assert status in texts(rotation.figure(table, PUBLISHED))
    assert ("loss is nan" in text) == (status != "missing")


def test_tidy_rows_are_one_number_each(tmp_path):
    table = frame(tmp_path)
    assert set(table["quantity"]) == {"heldout_loss", "training_loss", "staleness", "peak_stash_versions"}
    one = common.where(table, system="rotation", stages=8, seed=1)
    assert len(common.where(one, quantity="heldout_loss")) == 20
    assert list(common.numbers(common.where(one, quantity="staleness"), "value")) == [7, 6, 5, 4, 3, 2, 1, 0]
    assert json.loads(one["settings"].iloc[0]) == {"period": 1}
    assert set(one["unit"]) == {"nats", "updates", "versions"}


# time on real processes


def timed(folder: Path, finished: bool = True, seeds: tuple[int, ...] = (0,)) -> pd.DataFrame:
    grids = [{"stages": [1, 4], "methods": ["pipedream-lr", "nesterov"]}]
    return frame(folder, finished, grids=grids, seeds=seeds, base={"runtime": "processes", "steps": 40})


def test_rates_are_measured_and_idle_time_is_planned(tmp_path):
    table = timed(tmp_path)
    assert set(common.where(table, quantity="elapsed")["kind"]) == {"measured"}
    for quantity in ("bubble", "weight_bytes", "stash_bytes", "state_bytes"):
        assert set(common.where(table, quantity=quantity)["kind"]) == {"planned"}
    line = pipelines.find(pipelines.lines(table), "nesterov", 4)
    assert line is not None
    assert pipeline_time.rate(line).value == pytest.approx(16 / 0.02)
    assert pipeline_time.rate(line).n == 40 - 1 - FILLING
    weights = pipeline_time.per_stage(line, "weight_bytes")
    assert pipeline_time.per_stage(line, "stash_bytes") == [(3 - k) * w for k, w in enumerate(weights)]
    assert all(state >= 2 * w for state, w in zip(pipeline_time.per_stage(line, "state_bytes"), weights, strict=True))
    alone = pipelines.find(pipelines.lines(table), "nesterov", 1)
    assert alone is not None
    assert pipeline_time.per_stage(alone, "bubble") == pytest.approx([0.0])
    text = pipeline_time.table(table, PUBLISHED)
    assert cells(text.split("## Bytes")[0], "Nesterov", "4 (shared cores)")[0].startswith("800.0")
    assert "*shared cores*" in text


def test_times_are_between_updates_of_one_run(tmp_path):
    """Three seeds: times of different runs are not subtracted, and every stage has one column."""
    table = timed(tmp_path, seeds=(0, 1, 2))
    elapsed = table["quantity"] == "elapsed"
    table.loc[elapsed, "value"] *= 1 + table.loc[elapsed, "seed"]
    line = pipelines.find(pipelines.lines(table), "nesterov", 4)
    assert line is not None
    times = pipeline_time.seconds(line)
    assert len(times) == 3 * (40 - 1 - FILLING)
    assert sorted(set(times.round(6))) == [0.02, 0.04, 0.06]
    assert len(pipeline_time.per_stage(line, "stash_bytes")) == 4
    assert "missing" not in pipeline_time.table(table, PUBLISHED)


def test_timed_figure_and_missing_runs(tmp_path):
    figure = pipeline_time.figure(timed(tmp_path), PUBLISHED)
    assert "samples/s (measured" in texts(figure)
    assert overlaps(figure) == []
    missing = timed(tmp_path / "nothing", finished=False)
    assert "missing" in texts(pipeline_time.figure(missing, PUBLISHED))
    assert "missing" in pipeline_time.table(missing, PUBLISHED)


# figures


@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.__name__.rpartition(".")[2])
def test_figures_are_labelled_and_say_their_kind(tmp_path, module):
    tier = {"grids": [{"stages": [1, 8], "methods": ["adamw"]}]} if module is staleness else {}
    figure = module.figure(frame(tmp_path, **tier), PUBLISHED)
    assert "Measured" in texts(figure)
    assert "held-out loss, nats" in texts(figure)
    assert overlaps(figure) == []


@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.__name__.rpartition(".")[2])
def test_figures_and_tables_of_nothing_are_made(tmp_path, module):
    table = frame(tmp_path, finished=False)
    style.save(module.figure(table, PUBLISHED), tmp_path / "f.png")
    assert (tmp_path / "f.pdf").stat().st_size > 1000
    assert "missing" in module.table(table, PUBLISHED)


def test_published_claims_are_tidy():
    assert set(PUBLISHED["kind"]) == {"published"}
    assert set(PUBLISHED["id"]) >= {f"R{i}" for i in range(1, 10)}
    assert PUBLISHED["source"].notna().all()
