"""The ``generality`` experiment: its jobs, its table against numbers worked out by hand, and its figure."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from impl.harness import experiments
from impl.harness.experiments import StepTimeExperiment
from impl.harness.spec import parse
from impl.harness.step_time_spec import StepTimeSpec
from impl.harness.tidy import collect
from impl.harness.tiers import TIERS
from paper_figures import generality, style
from tests.unit import fake_runs
from tests.unit.test_figures import PUBLISHED, overlaps, texts
from tests.unit.test_tables import cells

FILE = Path(__file__).parents[2] / "experiments" / "generality.yaml"
OPTIMIZERS = [{"id": "adamw", "name": "AdamW"}, {"id": "soap", "name": "SOAP", "settings": {"period": 2}}]
MESH = "DP2 x TP1"


def experiment(**tier: Any) -> StepTimeExperiment:
    data = fake_runs.step_time_data(timed_steps=2, **{"meshes": [{"dp": 2, "tp": 1}], **tier})
    return parse(StepTimeExperiment, data | {"optimizers": OPTIMIZERS, "compare_parameters": True})


def frame(folder: Path, changes: dict[str, dict[str, Any]] | None = None, **tier: Any) -> pd.DataFrame:
    """The tidy table of made-up jobs; ``changes`` go to :func:`fake_runs.step_time_run`, by optimizer."""
    made = experiment(**tier)
    for run in made.runs("ci"):
        fake_runs.step_time_run(folder, run, **(changes or {}).get(run.base.optimizer, {}))
    return collect(made, "ci", folder)


@pytest.mark.parametrize("tier", TIERS)
def test_every_tier_has_a_job_per_optimizer_with_a_refresh_in_each_repetition(tier):
    runs = experiments.runs_of(FILE, tier)
    meshes = {(run.base.dp, run.base.tp) for run in runs}
    assert {run.base.optimizer for run in runs} == {"adamw", "muon", "shampoo", "soap", "basis-rotation"}
    assert len(runs) == 5 * len(meshes)
    for run in runs:
        assert isinstance(run.spec, StepTimeSpec)
        assert [system.id for system in run.spec.systems] == ["sc", "nv-lpt-ns", "asc", "canzona"]
        assert run.spec.compare_parameters
        period = run.base.optimizer_settings.get("period", 1)
        assert tier == "ci" or run.spec.timed_steps % period == 0


def test_jobs_without_the_new_settings_keep_their_names():
    plain = fake_runs.step_time_experiment().runs("ci")[0].spec
    assert isinstance(plain, StepTimeSpec)
    assert plain.digest != plain.model_copy(update={"timed_steps": 2}).digest
    assert plain.digest != plain.model_copy(update={"compare_parameters": True}).digest
    data = plain.resolved()
    del data["timed_steps"], data["compare_parameters"]
    assert parse(StepTimeSpec, data).digest == plain.digest


def test_table_has_times_ratios_state_and_equality_of_every_optimizer_and_system(tmp_path):
    text = generality.main_table(frame(tmp_path))
    for name in ("AdamW", "SOAP"):
        time, ratio, n, state, losses, parameters = cells(text, name, MESH, "Canzona")
        assert float(time.lstrip("*").split()[0]) == pytest.approx(1e3 * fake_runs.SPEED["canzona"] * 1.15, rel=0.2)
        assert float(ratio.split()[0]) == pytest.approx(0.5, abs=0.02)
        assert "[" in ratio
        assert (n, state, losses, parameters) == ("8/8", "1.91 MiB", "equal", "equal")
        assert cells(text, name, MESH, "SC")[-3:] == ["3.81 MiB", "reference", "reference"]


def test_a_difference_is_seen_and_said_where_it_begins(tmp_path):
    text = generality.main_table(frame(tmp_path, {"soap": {"offset": {"asc": 1e-5}, "after": 7}}))
    losses, parameters = cells(text, "SOAP", MESH, "ASC")[-2:]
    assert losses == "differ by up to 1.0e-05, first at step 8"
    assert parameters == "differ"
    for optimizer, system in (("SOAP", "Canzona"), ("AdamW", "ASC")):
        assert cells(text, optimizer, MESH, system)[-2:] == ["equal", "equal"]


def test_losses_that_are_not_finite_are_a_cell(tmp_path):
    text = generality.main_table(frame(tmp_path, {"soap": {"offset": {"asc": math.inf}}}))
    assert cells(text, "SOAP", MESH, "ASC")[-2:] == ["not finite", "–"]


def test_speed_up_stands_beside_the_published_one(tmp_path):
    table = frame(tmp_path)
    text = generality.table(table, PUBLISHED).split("## Canzona's speed-up")[1]
    measured, ranks, published = cells(text.split("## For")[0], "SOAP", MESH)
    assert float(measured.split()[0]) == pytest.approx(2.0, abs=0.1)
    assert (ranks, published) == ("2", "28")
    assert cells(text.split("## For")[0], "AdamW", MESH)[-1] == "–"
    for claim in ("C6", "C9", "C10"):
        assert f"| {claim} " in text


def test_old_jobs_without_losses_are_a_dash_not_equal(tmp_path):
    made = experiment()
    for run in made.runs("ci"):
        path = fake_runs.step_time_run(tmp_path, run) / "metrics.jsonl"
        path.write_text(path.read_text().replace('"losses"', '"other"'))
    assert cells(generality.main_table(collect(made, "ci", tmp_path)), "SOAP", MESH, "ASC")[-2:] == ["–", "–"]


@pytest.mark.parametrize("status", ["failed", "missing"])
def test_a_job_that_is_not_done_is_a_cell_and_a_reason(tmp_path, status):
    made = experiment()
    for run in made.runs("ci"):
        if run.base.optimizer == "adamw":
            fake_runs.step_time_run(tmp_path, run)
        elif status == "failed":
            fake_runs.write(tmp_path, run, {}, [], status="failed", error="rank 1: no such luck")
    table = collect(made, "ci", tmp_path)
    assert cells(generality.main_table(table), "SOAP", MESH, "Canzona")[:3] == [status, status, "0/8"]
    assert cells(generality.main_table(table), "AdamW", MESH, "Canzona")[-1] == "equal"
    document = generality.table(table, PUBLISHED)
    assert "## Runs that are not done" in document
    assert ("no such luck" in document) == (status == "failed")
    figure = generality.figure(table, PUBLISHED)
    assert f"Canzona: {status}" in texts(figure)
    assert overlaps(figure) == []


def test_figure_is_labelled_says_its_kind_and_nothing_overlaps(tmp_path):
    two = [{"dp": 2, "tp": 1}, {"dp": 2, "tp": 2, "without": ["asc"]}]
    figure = generality.figure(frame(tmp_path, meshes=two), PUBLISHED)
    written = texts(figure)
    for text in ("Measured", "optimizer step, ms", "optimizer step / SC", "AdamW", "SOAP", "Canzona"):
        assert text in written
    assert written.count("ASC: not run here") == 2
    assert "DP2 x TP2 (shared cores)" in written
    assert overlaps(figure) == []


def test_figure_of_nothing_is_made(tmp_path):
    table = collect(experiment(), "ci", tmp_path)
    style.save(generality.figure(table, PUBLISHED), tmp_path / "g.png")
    assert (tmp_path / "g.pdf").stat().st_size > 1000
