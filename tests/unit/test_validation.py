"""The validation experiment: runs projected from a table of known kernel times, beside runs of known times."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from impl.__main__ import main
from impl.errors import ConfigError
from impl.harness import setup, validation, validation_spec, validation_verdict
from impl.harness.experiments import StepTimeExperiment
from impl.harness.spec import load_yaml, parse
from impl.harness.tidy import collect
from impl.harness.validation_spec import Limits
from impl.projection import kernel_needs
from impl.projection.kernel_table import Row, Table
from impl.projection.uncertain import Range
from paper_figures import common
from paper_figures import validation as figures
from tests.unit import fake_runs
from tests.unit.test_figures import overlaps, texts

pytestmark = pytest.mark.timeout(300)
ROOT = Path(__file__).parents[2]
PUBLISHED = pd.read_csv(ROOT / "results/published/canzona.csv")
LIMITS = validation_spec.load(ROOT / "experiments/validation.yaml").limits
SECONDS = {"forward": 1e-3, "backward": 2e-3, "update": 4e-3}
"""Of these kernels; all others take a microsecond."""


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> tuple[StepTimeExperiment, Path, Path]:
    """An experiment, the folder of its tidy table, and a kernel table of made-up times for all that it needs."""
    folder = tmp_path_factory.mktemp("validation")
    experiment = fake_runs.step_time_experiment()
    runs = experiment.runs("ci")
    for run in runs:
        fake_runs.step_time_run(folder / "runs", run)
    (folder / "step_time").mkdir()
    collect(experiment, "ci", folder / "runs").to_parquet(folder / "step_time/step_time.parquet")
    rows = [
        kernel(*name, processes) for processes, needs in kernel_needs.of_runs(runs).items() for name in names(needs)
    ]
    Table(()).merged({row.identity: row for row in rows}.values()).write(folder / "kernels.csv")
    return experiment, folder, folder / "kernels.csv"


def names(needs: kernel_needs.Needs) -> list[tuple[str, str, int]]:
    return [name for case in needs.cases() for name in case.names()]


def kernel(name: str, key: str, size: int, processes: int) -> Row:
    seconds = SECONDS.get(name, 1e-6)
    times = {"seconds": seconds, "q25": 0.9 * seconds, "q75": 1.1 * seconds, "n": 9, "spike": math.nan}
    place = {"backend": "cpu", "device": "Some CPU, 2 cores", "torch": "2.13.0", "threads": 1, "cores": 2}
    found = {"kernel": name, "key": key, "size": size, "processes": processes, "dtype": "float32"}
    return Row(**found, **times, **place, commit="abc", date="2026-01-01")


@pytest.fixture(scope="module")
def frame(measured) -> pd.DataFrame:
    experiment, folder, kernels = measured
    return validation.table(list(validation.rows({"step_time": experiment.runs("ci")}, folder, kernels)), LIMITS)


def test_every_run_system_and_quantity_is_there_once(measured, frame):
    experiment, _, _ = measured
    expected = {(run.id, s.id, q) for run in experiment.runs("ci") for s in run.spec.systems for q in validation.PHASES}
    found = [(r["run"], r["system"], r["quantity"]) for r in common.records(frame)]
    assert sorted(found) == sorted(expected)
    assert set(frame["status"]) == {"done"}


def test_the_prediction_is_the_busiest_ranks_kernels_and_the_measurement_the_runs_median(measured, frame):
    experiment, folder, _ = measured
    run = experiment.runs("ci")[0]
    tidy = pd.read_parquet(folder / "step_time/step_time.parquet")
    for system in run.spec.systems:
        plan = setup.prepare(system.run_spec(run.spec.base)).plan
        matrices = plan.family("matrix")
        busiest = max(len(matrices.pieces(rank)) for rank in range(plan.dp))
        keys = {"run": run.id, "system": system.id}
        (row,) = common.records(common.where(frame, quantity="optimizer_step", **keys))
        elementwise = max(len(plan.family("elementwise").buckets), 1)
        # matrices, elementwise runs of at most one a bucket, and microseconds of everything else
        assert row["predicted"] == pytest.approx(
            SECONDS["update"] * busiest, abs=SECONDS["update"] * elementwise + 1e-3
        )
        times = common.where(tidy, phase="optimizer_step", quantity="time", **keys)["value"]
        assert row["measured"] == times.median()
        assert row["error"] == pytest.approx(row["predicted"] / row["measured"] - 1)
        assert row["low"] <= row["predicted"] <= row["high"]
        assert "measured: Some CPU" in row["evidence"]


def test_a_plan_with_more_on_one_rank_is_predicted_to_be_slower(measured, frame):
    experiment, _, _ = measured
    run = experiment.runs("ci")[0]
    mine = common.where(frame, run=run.id, quantity="optimizer_step").set_index("system")["predicted"]
    # 16, 24 and 32 matrices on the busiest rank; elementwise runs, of another number in each plan, decide nothing here
    assert mine["canzona"] < mine["nv-lpt-ns"] < min(mine["asc"], mine["sc"])


def test_a_missing_kernel_is_a_reason_not_a_number(measured, tmp_path):
    experiment, folder, kernels = measured
    lines = kernels.read_text().splitlines()
    (tmp_path / "kernels.csv").write_text("\n".join(line for line in lines if not line.startswith("forward")) + "\n")
    runs = {"step_time": experiment.runs("ci")}
    frame = validation.table(list(validation.rows(runs, folder, tmp_path / "kernels.csv")), LIMITS)
    assert set(frame["status"]) == {"not projected"}
    assert frame["reason"].str.contains("no measurement of forward").all()
    assert frame["predicted"].isna().all()


def test_measurements_that_are_missing_say_what_to_run(measured, tmp_path):
    experiment, _, kernels = measured
    with pytest.raises(ConfigError, match="TARGETS=step_time"):
        list(validation.rows({"step_time": experiment.runs("ci")}, tmp_path, kernels))


def test_replays_stand_beside_the_measured_step(measured):
    experiment, folder, _ = measured
    run = experiment.runs("ci")[0]
    share = {"rank": 1, "seconds": 0.02, "q25": 0.018, "q75": 0.025, "n": 10}
    replays = [{"run": run.id, "system": "canzona", "step_s": 0.021, "shares": [share, {**share, "seconds": 0.01}]}]
    (row,) = validation.replay_rows({"step_time": (run,)}, folder, replays)
    assert row["method"] == "replay"
    assert row["predicted"] == pytest.approx(0.021)
    assert row["error"] == pytest.approx(0.021 / row["measured"] - 1)
    # the slowest share's quartiles, as wide as a band of 90 of 100: what the limits of 48 draws come near
    edges = Range.of_quartiles(0.021 * 0.9, 0.021, 0.021 * 1.25)
    assert (edges.low, edges.high) == pytest.approx((0.021 * 0.9**2.4387, 0.021 * 1.25**2.4387), rel=1e-4)
    drawn = edges.draws("replay")[1:]
    assert (row["low"], row["high"]) == pytest.approx(tuple(np.quantile(drawn, (0.05, 0.95))))
    assert row["low"] < 0.021 * 0.9, "quartiles taken for the band would end here"
    assert row["high"] > 0.021 * 1.25
    assert list(validation.replay_rows({"step_time": (run,)}, folder, [])) == []


@pytest.mark.parametrize("others", [[], [{"rank": 0, "seconds": 0.02, "q25": 0.018, "q75": 0.025, "n": 10}]])
def test_a_replay_that_does_not_fit_is_a_reason_not_a_number(measured, others):
    experiment, folder, _ = measured
    run = experiment.runs("ci")[0]
    shares = [*others, {"rank": 1, "note": "needs 9.0 GB, 1.0 GB are free"}]
    replays = [{"run": run.id, "system": "canzona", "shares": shares, **({"step_s": 0.02} if others else {})}]
    frame = validation.table(list(validation.replay_rows({"step_time": (run,)}, folder, replays)), LIMITS)
    (row,) = common.records(frame)
    assert (row["status"], row["reason"]) == ("not projected", "needs 9.0 GB, 1.0 GB are free")
    assert (row["method"], row["system"]) == ("replay", "canzona")
    assert common.is_missing(row["predicted"])
    assert common.is_missing(row["error"])


def made_up(limits: Limits = LIMITS, method: str = "timeline", **systems: tuple[float, float]) -> pd.DataFrame:
    """Rows of one run: measured and predicted optimizer steps by system, measured intervals of 10 % either way."""
    rows = [
        {"experiment": "e", "run": "r", "system": s, "system_name": s.upper(), "method": method, "status": "done"}
        | {"quantity": "optimizer_step", "measured": m, "measured_low": 0.9 * m, "measured_high": 1.1 * m, "n": 5}
        | {"predicted": p, "low": 0.9 * p, "high": 1.1 * p, "error": p / m - 1, "optimizer": "muon", "dp": 2, "tp": 1}
        for s, (m, p) in systems.items()
    ]
    return validation.table(rows, limits)


def test_order_counts_pairs_whose_intervals_are_apart():
    assert figures.order(made_up(a=(1.0, 1.1), b=(2.0, 1.9), c=(2.1, 0.5))) == (1, 2)  # b and c overlap; a, c are wrong
    assert figures.order(made_up(a=(1.0, 1.1), b=(1.1, 0.9))) == (0, 0)


def test_verdicts_say_whether_the_limits_hold():
    assert "within 20%" in figures.verdicts(made_up(a=(1.0, 1.1), b=(2.0, 2.1)))
    assert "**outside** 20%" in figures.verdicts(made_up(a=(1.0, 1.5), b=(2.0, 2.9)))
    found = figures.verdicts(made_up(method="replay", a=(1.0, 1.15)))
    assert "Rank replay: median error 15.0%, largest 15.0%, over 1: **outside** 10%" in found


def test_table_and_figure_read_the_limits_of_the_experiment():
    """Other limits, other verdicts: nothing is written into the figures."""
    wide = Limits(median=0.6, replay=0.3)
    rows = {"a": (1.0, 1.5), "b": (2.0, 2.9)}
    assert "within 60%" in figures.verdicts(made_up(wide, **rows))
    assert "within 30%" in figures.verdicts(made_up(wide, "replay", a=(1.0, 1.15)))
    assert "within 60%" in texts(figures.figure(made_up(wide, **rows), PUBLISHED))
    assert "within 20%" in texts(figures.figure(made_up(**rows), PUBLISHED))


def test_the_median_is_of_what_is_judged():
    frame = made_up(a=(1.0, 1.1), b=(2.0, 2.2))
    parts = made_up(c=(1.0, 3.0)).assign(quantity="forward_backward")
    both = pd.concat([frame, parts, made_up(method="replay", d=(1.0, 1.9))])
    found = validation_verdict.verdict(both, "timeline")
    assert (found.count, found.limit, found.holds) == (2, 0.2, True)
    assert found.median == found.largest == pytest.approx(0.1)
    assert validation_verdict.verdict(frame, "replay") is None


def test_own_cores_are_those_of_runs_that_do_not_share_them():
    """Of replays, too: only the one whose ranks have a core each."""
    rows = [made_up(method="replay", **{n: (1.0, p)}).assign(shared_cores=s) for n, p, s in
            (("a", 1.1, False), ("b", 1.5, True))]  # fmt: skip
    last = figures.main_table(pd.concat(rows).astype({"shared_cores": "boolean"})).strip().splitlines()[-1]
    cells = [cell.strip() for cell in last.strip("|").split("|")]
    assert cells[0] == "all replays"
    assert cells[3] == "30.0%", "of both"
    assert cells[-1] == "10.0%", "of the one with cores of its own"
    shared = figures.main_table(rows[1].astype({"shared_cores": "boolean"})).strip().splitlines()[-1]
    assert "50.0%" not in shared.rstrip("|").rpartition("|")[2]


def test_table_and_figure(frame):
    text = figures.table(frame, PUBLISHED)
    assert "Order of the systems" in text
    assert "(shared)" in text
    assert "median error" in text
    drawn = figures.figure(frame, PUBLISHED)
    assert "measured, s" in texts(drawn)
    assert "within 20%" in texts(drawn)
    assert not overlaps(drawn)


@pytest.mark.parametrize("tier", ["ci", "laptop", "gpu1", "node8", "cluster"])
def test_the_experiment_names_timed_runs(tier):
    spec = validation_spec.load(ROOT / "experiments/validation.yaml").tier(tier)
    runs = validation_spec.runs_of(ROOT / "experiments", spec.experiments, tier)
    assert list(runs) == list(spec.experiments)
    assert kernel_needs.of_runs([run for found in runs.values() for run in found])


def test_wrong_names_are_one_clear_line(tmp_path, capsys):
    data = load_yaml(ROOT / "experiments/validation.yaml")
    data["tiers"]["ci"]["experiments"] = ["step_tme"]
    path = ROOT / "experiments/validation.yaml"
    with pytest.raises(ConfigError, match="did you mean 'step_time'"):
        validation_spec.runs_of(path.parent, ("step_tme",), "ci")
    arguments = ["--config", str(path), "--tier", "ci", "--results", str(tmp_path), "--out", str(tmp_path / "o")]
    assert main(["validation", *arguments, "--kernels", str(tmp_path / "none.csv")]) == 2
    assert "error:" in capsys.readouterr().err
    parse(validation_spec.ValidationSpec, {**data, "limits": {"median": 0.2, "replay": 0.1}})


def test_the_command_writes_the_table(measured, tmp_path, capsys):
    _, folder, kernels = measured
    replays = tmp_path / "replays.json"
    replays.write_text(json.dumps([]))
    config = tmp_path / "experiments"
    config.mkdir()
    (config / "step_time.yaml").write_text(json.dumps(fake_runs.step_time_data()))
    data = load_yaml(ROOT / "experiments/validation.yaml")
    data["tiers"] = {"ci": {**data["tiers"]["ci"], "experiments": ["step_time"]}}
    (config / "validation.yaml").write_text(json.dumps(data))
    arguments = ["--config", str(config / "validation.yaml"), "--tier", "ci", "--results", str(folder)]
    arguments += ["--kernels", str(kernels), "--replays", str(replays), "--out", str(tmp_path / "out")]
    assert main(["validation", *arguments]) == 0
    printed = capsys.readouterr().out
    written = pd.read_parquet(tmp_path / "out/validation.parquet")
    (said,) = (line for line in figures.verdicts(written).splitlines() if "Timeline" in line)
    assert said.partition(": ")[2].partition(": ")[0] in printed, "the command says what the document says"
    assert (written["limit"].iloc[0], written["replay_limit"].iloc[0]) == (0.2, 0.1)
    assert np.isfinite(written["error"]).all()
