"""Records become tidy tables and Markdown: right numbers, statuses in cells, intervals that mean something."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from impl.cli import retry, settle
from impl.harness import balance_spec
from impl.harness.tidy import collect, read_record
from paper_figures import balance, common, markdown, precision, statistics, step_time
from paper_figures.__main__ import main
from tests.unit import fake_runs

CSV = str(Path(__file__).parents[2] / "results" / "published" / "canzona.csv")
PUBLISHED = pd.read_csv(CSV)


@pytest.fixture
def timed(tmp_path):
    experiment = fake_runs.step_time_experiment()
    for run in experiment.runs("ci"):
        fake_runs.step_time_run(tmp_path, run)
    return collect(experiment, "ci", tmp_path)


def cells(text: str, *labels: str) -> list[str]:
    """The cells of the one table row that starts with ``labels``."""
    rows = [[c.strip() for c in line.strip("| ").split(" | ")] for line in text.splitlines() if line.startswith("|")]
    found = [row for row in rows if row[: len(labels)] == list(labels)]
    assert len(found) == 1, (labels, found)
    return found[0][len(labels) :]


# statistics


def test_median_is_the_median_with_quartiles_and_ignores_nan():
    assert statistics.median([4, 1, 3, 2, 5, math.nan]) == statistics.Estimate(3, 2, 4, 5)
    assert statistics.median([math.nan]).n == 0


def test_paired_ratio_cancels_a_common_drift():
    drift = np.linspace(1, 3, 20)
    ratio = statistics.paired_ratio(0.5 * drift, drift)
    assert (ratio.value, ratio.low, ratio.high, ratio.n) == (0.5, 0.5, 0.5, 20)


def test_paired_ratio_interval_covers_the_truth_as_often_as_it_says():
    rng = np.random.default_rng(1)
    inside = 0
    for _ in range(100):
        reference = rng.lognormal(0, 0.3, 21)
        found = statistics.paired_ratio(0.8 * reference * rng.lognormal(0, 0.1, 21), reference)
        inside += found.low <= 0.8 <= found.high
    assert 85 <= inside <= 100


def test_paired_ratio_is_reproducible_and_drops_broken_pairs():
    values, reference = [1.0, 2.0, 3.5, math.nan, 5.0], [1.0, 1.0, 1.0, 1.0, 0.0]
    with_zero = statistics.paired_ratio(values, reference)
    assert with_zero == statistics.paired_ratio(values, reference)
    assert with_zero.n == 3
    assert math.isnan(statistics.paired_ratio([1.0, 2.0], [1.0, 1.0]).low)
    assert statistics.paired_ratio([], []).n == 0
    with pytest.raises(ValueError, match="cannot be paired"):
        statistics.paired_ratio([1.0], [1.0, 2.0])


# Markdown


def test_markdown_table_is_aligned_and_escaped():
    lines = markdown.table(["name", "x"], [["a|b", "1"], ["c\nd", "22"]]).splitlines()
    assert lines[1] == "|------|---:|"
    assert lines[2] == "| a\\|b |  1 |"
    assert len({len(line) for line in lines}) == 1


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (1, "1 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (5 * 2**30, "5.00 GiB"), (math.nan, "–")],
)
def test_sizes_are_in_binary_units(count, text):
    assert markdown.size(count) == text


# step_time


def test_step_time_rows_carry_kind_run_and_unit(timed):
    assert set(timed["kind"]) == {"measured"}
    assert set(timed["status"]) == {"done"}
    assert len(common.where(timed, quantity="time", phase="iteration")) == 8 * (4 + 3)
    assert set(common.where(timed, quantity="time")["unit"]) == {"s"}
    assert (
        common.numbers(common.where(timed, quantity="state", system="canzona", dp=2, tp=1), "value").max() == 2_000_000
    )
    assert not common.where(timed, tp=1)["shared_cores"].any()
    assert common.where(timed, tp=2)["shared_cores"].all()


def test_step_time_table_shows_medians_ratios_and_n(timed):
    row = cells(step_time.main_table(timed), "DP2 x TP1", "Canzona")
    assert row[-1] == "8/8"
    assert float(row[-2].split()[0]) == pytest.approx(0.5, abs=0.02)
    median = 1e3 * np.median(
        list(step_time.times(common.where(timed, dp=2, tp=1), "canzona", "optimizer_step").values())
    )
    assert row[1].startswith(f"**{median:.1f} [")
    text = step_time.table(timed, PUBLISHED)
    assert cells(text.split("## Logical bytes")[1].split("## Masters")[0], "DP2 x TP1", "Canzona")[1:3] == [
        "world 8 B",
        "0",
    ]
    assert "measured" in text
    assert "DP2 x TP2 (shared cores)" in text
    assert "cores*: more ranks" in text
    assert cells(text.split("(published)")[1].split("## Runs")[0], "C3")[3:5] == ["0.383 s", "0.066 s"]
    assert all(run in text for run in set(timed["run"]))


@pytest.mark.parametrize(
    ("value", "low", "high", "n", "said"),
    [
        (0.52, 0.4, 0.6, 20, "48% faster"),
        (1.5, 1.4, 1.6, 20, "50% slower"),
        (1.0, 0.9, 1.1, 20, "no difference shown"),
        (0.5, 0.4, 0.6, 4, "no verdict below n = 5"),
        (math.nan, math.nan, math.nan, 0, "no verdict below n = 5"),
    ],
)
def test_verdicts_need_an_interval_on_one_side(value, low, high, n, said):
    assert step_time.verdict(statistics.Estimate(value, low, high, n)) == said


@pytest.mark.parametrize("status", ["failed", "diverged", "unfinished", "out-of-memory"])
def test_a_bad_run_is_a_cell_and_a_reason(tmp_path, status):
    experiment = fake_runs.step_time_experiment()
    good, bad = experiment.runs("ci")
    fake_runs.step_time_run(tmp_path, good)
    fake_runs.write(tmp_path, bad, {}, [], status=status, error="Traceback (most recent call last):\n x\nBoom: rank 1")
    text = step_time.table(collect(experiment, "ci", tmp_path), PUBLISHED)
    assert cells(step_time.main_table(collect(experiment, "ci", tmp_path)), "DP2 x TP2 (shared cores)", "Canzona") == [
        *[status] * 4,
        "0/8",
    ]
    assert f"- `{bad.id}`: **{status}**: Boom: rank 1" in text
    assert cells(step_time.main_table(collect(experiment, "ci", tmp_path)), "DP2 x TP1", "Canzona")[-1] == "8/8"


def test_missing_and_corrupt_runs_are_cells_too(tmp_path):
    experiment = fake_runs.step_time_experiment()
    _, corrupt = experiment.runs("ci")
    fake_runs.step_time_run(tmp_path, corrupt)
    (tmp_path / corrupt.id / "manifest.json").write_text('{"status": "do')
    text = step_time.main_table(collect(experiment, "ci", tmp_path))
    assert cells(text, "DP2 x TP1", "SC")[:3] == ["missing"] * 3
    assert cells(text, "DP2 x TP2", "SC")[:3] == ["corrupt"] * 3


def test_truncated_metrics_of_a_finished_run_are_corrupt(tmp_path):
    run = fake_runs.step_time_experiment().runs("ci")[0]
    target = fake_runs.step_time_run(tmp_path, run)
    assert read_record(target).status == "done"
    metrics = target / "metrics.jsonl"
    metrics.write_text(metrics.read_text()[:-20])
    assert read_record(target).status == "corrupt"


def test_a_system_without_rows_in_a_finished_job_is_unfinished(tmp_path):
    experiment = fake_runs.step_time_experiment()
    for run in experiment.runs("ci"):
        target = fake_runs.step_time_run(tmp_path, run)
        lines = (target / "metrics.jsonl").read_text().splitlines(keepends=True)
        (target / "metrics.jsonl").write_text("".join(line for line in lines if json.loads(line)["system"] != "asc"))
    text = step_time.main_table(collect(experiment, "ci", tmp_path))
    assert cells(text, "DP2 x TP1", "ASC")[0] == "unfinished"


# precision


def test_precision_finds_the_largest_difference_and_its_first_step(tmp_path):
    experiment = fake_runs.precision_experiment(seeds=[0])
    for run in experiment.runs("ci"):
        late = run.name.startswith("asc")
        fake_runs.precision_run(tmp_path, run, offset=1e-3 if late else 0.0, after=20)
    table = precision.main_table(collect(experiment, "ci", tmp_path))
    assert cells(table, "DP2 x TP1", "SC")[3:] == ["reference"] * 3
    assert cells(table, "DP2 x TP1", "Canzona")[3:] == ["0", "never", "equal"]
    assert cells(table, "DP2 x TP1", "ASC")[3:] == ["1.0e-03", "21", "differ"]


def test_precision_counts_seeds_and_shows_a_diverged_run(tmp_path):
    experiment = fake_runs.precision_experiment()
    for run in experiment.runs("ci"):
        if run.name == "canzona-dp2-tp1-s1":
            rows = [{"event": "step", "step": 1, "loss": 5.0}, {"event": "step", "step": 2, "loss": math.nan}]
            fake_runs.write(tmp_path, run, {}, rows, status="diverged", error="loss is nan at step 2")
        elif run.name == "asc-dp2-tp1-s0":
            fake_runs.write(tmp_path, run, {}, [], status="failed", error="rank 0 died")
        elif run.name != "asc-dp2-tp1-s1":
            fake_runs.precision_run(tmp_path, run)
    table = precision.table(collect(experiment, "ci", tmp_path), PUBLISHED)
    main = table.split("##")[0]
    assert cells(main, "DP2 x TP1", "SC")[0] == "2/2"
    assert cells(main, "DP2 x TP1", "Canzona")[:2] == ["1/2", "2.2000"]
    assert cells(main, "DP2 x TP1", "ASC")[:3] == ["0/2", "failed, missing", "failed, missing"]
    assert "loss is nan at step 2" in table


def test_a_resumed_step_counts_once(tmp_path):
    experiment = fake_runs.precision_experiment(seeds=[0], meshes=[{"dp": 2, "tp": 1}])
    for run in experiment.runs("ci"):
        target = fake_runs.precision_run(tmp_path, run)
        lines = (target / "metrics.jsonl").read_text().splitlines(keepends=True)
        (target / "metrics.jsonl").write_text("".join(lines[:20] + lines[10:]))
    frame = collect(experiment, "ci", tmp_path)
    assert len(common.where(frame, system="sc")) == 30


# balance and published


@pytest.fixture(scope="module")
def plans() -> pd.DataFrame:
    spec = balance_spec.load(Path(__file__).parents[2] / "experiments" / "balance.yaml")
    return balance_spec.table(list(balance_spec.rows(spec, "ci")))


def test_balance_table_puts_planned_beside_published(plans):
    text = balance.claims_table(plans, PUBLISHED)
    rows = [[c.strip() for c in line.strip("| ").split(" | ")] for line in text.splitlines()[2:]]
    assert [(r[0], r[2], r[3], r[4]) for r in rows] == [
        ("C1", "ASC", "3.24", "3.2384"),
        ("C1", "Canzona", "1.43", "1.4342"),
        ("C2", "ASC", "2.46", "2.4624"),
        ("C2", "Canzona", "1.11", "1.1129"),
    ]
    main = balance.main_table(plans)
    assert cells(main, "Qwen3-32B", "DP32 x TP8", "Canzona") == ["1.434", "1.160", "1.113", "2.039", "2.039"]
    document = balance.table(plans, PUBLISHED)
    for claim in ("C1, C2", "C7", "C8", "C11"):
        assert f"claim {claim})" in document or f"claims {claim})" in document
    assert "## Not planned" in document  # TP16 does not divide the heads
    assert len(plans) > 50


def test_published_claims_are_tidy():
    assert set(PUBLISHED["kind"]) == {"published"}
    assert list(PUBLISHED["id"]) == [f"C{i}" for i in range(1, 15)]
    assert PUBLISHED["source"].notna().all()


# commands


def test_commands_write_and_show_tables(tmp_path, timed, capsys):
    folder = tmp_path / "with space" / "step_time"
    folder.mkdir(parents=True)
    timed.to_parquet(folder / "step_time.parquet")
    source, out = str(folder / "step_time.parquet"), folder / "step_time.md"
    assert main(["table", "step_time", "--in", source, "--published", CSV, "--out", str(out)]) == 0
    assert out.read_text() == step_time.table(pd.read_parquet(source), PUBLISHED)
    assert main(["show", "--results", str(folder.parent)]) == 0
    shown = capsys.readouterr().out
    assert "step_time (measured)" in shown
    assert f"are in {folder.parent}:\n  step_time/step_time.html" in shown
    assert step_time.main_table(timed) in shown
    assert main(["table", "step_tme", "--in", source, "--published", CSV, "--out", str(out)]) == 2
    assert "did you mean 'step_time'" in capsys.readouterr().err
    assert main(["show", "--results", str(tmp_path / "nothing")]) == 2


@pytest.mark.parametrize(
    ("status", "code"),
    [("done", 0), ("failed", 0), ("diverged", 0), ("out-of-memory", 0), ("corrupt", 0), ("unfinished", 1), (None, 1)],
)
def test_settle_accepts_what_a_table_can_show(tmp_path, status, code):
    run = fake_runs.precision_experiment().runs("ci")[0]
    if status:
        fake_runs.precision_run(tmp_path, run, status=status, error="rank 0: RuntimeError: no\n\nTraceback ...")
    assert settle.run(argparse.Namespace(out=tmp_path / run.id)) == code
    assert (tmp_path / run.id / "ended").exists() == (code == 0)


def test_a_run_that_lost_a_process_is_no_result(tmp_path):
    run = fake_runs.precision_experiment().runs("ci")[0]
    folder = fake_runs.precision_run(tmp_path, run, status="failed", error="rank 0 was killed by SIGKILL")
    manifest = json.loads((folder / "manifest.json").read_text())
    for lost, code in ((True, 1), (False, 0)):
        (folder / "manifest.json").write_text(json.dumps(manifest | {"lost": lost}))
        assert settle.run(argparse.Namespace(out=folder)) == code


def test_retry_forgets_failed_runs_only(tmp_path, capsys):
    runs = fake_runs.precision_experiment(seeds=[0]).runs("ci")
    statuses = ["done", "failed", "diverged", "out-of-memory"]
    targets = [fake_runs.precision_run(tmp_path, r, status=s) for r, s in zip(runs, statuses, strict=False)]
    for target in targets:
        (target / "ended").write_text("")
    assert retry.run(argparse.Namespace(results=tmp_path)) == 0
    assert [(t / "ended").exists() for t in targets] == [True, False, True, False]
    assert [(t / "manifest.json").exists() for t in targets] == [True, False, True, False]
    assert "2 run(s)" in capsys.readouterr().out
