"""The experiments ``projection`` and ``scaling``: their cases, their table, cells without a number, claims, figures."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from impl.__main__ import main
from impl.errors import ConfigError
from impl.harness import planning, projection_rows, projection_spec
from impl.harness.projection_spec import ProjectionSpec
from impl.harness.spec import load_yaml, parse
from impl.models import catalogue
from impl.projection import hardware
from impl.projection.machine import Roofline
from impl.projection.training import Workload, project
from paper_figures import common, projected, projection, scaling
from tests.unit.test_figures import overlaps, texts

pytestmark = pytest.mark.timeout(300)
ROOT = Path(__file__).parents[2]
PUBLISHED = pd.read_csv(ROOT / "results/published/canzona.csv")


def experiment(**change) -> ProjectionSpec:
    """The experiment ``projection`` with a small grid in the place of its own."""
    data = load_yaml(ROOT / "experiments/projection.yaml")
    data["optimizers"] = [{"id": name, "name": name.capitalize()} for name in ("muon", "soap")]
    grids = [
        {"id": "main", "models": ["qwen3-1.7b", "qwen3-32b"], "meshes": [{"dp": 32, "tp": 8}], "hardware": "h100"},
        {"id": "split", "models": ["qwen3-1.7b"], "meshes": [{"dp": 8, "tp": 8}], "hardware": "h100"},
    ]
    grids[0]["systems"] = ["sc", "nv-ping-pong", "nv-ping-pong-blockwise", "asc", "canzona"]
    grids[1] |= {"systems": ["canzona"], "optimizers": ["muon"], "vary": {"split": ["none", "atoms"]}}
    data["claims"] = [c for c in data["claims"] if c["id"] in ("C3", "C13")]
    data["tiers"] = {"ci": {"grids": grids}}
    data["notes"] = {"main": "A note."}
    return parse(ProjectionSpec, {**data, **change})


@pytest.fixture(scope="module")
def frame() -> pd.DataFrame:
    return projection_rows.table(list(projection_rows.rows(experiment(), "ci", "projection", ROOT)))


def value(frame: pd.DataFrame, quantity: str, column: str = "value", **keys) -> float:
    rows = common.where(frame, quantity=quantity, **keys)
    assert len(rows) == 1, (quantity, keys, len(rows))
    return float(rows.iloc[0][column])


MUON_32B = {"grid": "main", "model": "qwen3-32b", "optimizer": "muon"}


def test_a_row_is_what_the_projection_of_the_same_plan_says(frame):
    config = catalogue.load("qwen3-32b")
    options = projection_spec.PlanOptions(bucket_elements=400_000_000)
    load = planning.workload(config, "muon", 8, options=options)
    planned = planning.plan_workload(load, "canzona", 32, options)
    found = project(planned.plan, planned.costs, config, Workload(), Roofline(hardware.load("h100x256")))
    assert value(frame, "iteration", system="canzona", **MUON_32B) == found.iteration[0]
    assert value(frame, "optimizer", system="canzona", **MUON_32B) == found.optimizer[0]
    assert value(frame, "memory", system="canzona", **MUON_32B) == found.memory.total


def test_ratios_pair_the_draws_of_both_systems(frame):
    keys = {"system": "asc", **MUON_32B}
    low, middle, high = (value(frame, "optimizer", c, **keys) for c in ("ratio_low", "ratio", "ratio_high"))
    band = [value(frame, "optimizer", c, **keys) for c in ("low", "value", "high")]
    assert low <= middle <= high
    assert middle == pytest.approx(band[1] / value(frame, "optimizer", system="canzona", **MUON_32B))
    # both rest on the same products, so their ratio is far surer than either
    assert (high - low) / middle < 0.3 * (band[2] - band[0]) / band[1]
    assert value(frame, "optimizer", "ratio_high", system="canzona", **MUON_32B) == 1


def test_what_does_not_fit_has_a_reason_and_memory_but_no_time(frame):
    mine = common.where(frame, system="sc", **MUON_32B)
    (row,) = common.records(mine.loc[mine["status"] != "done"])
    assert row["status"] == "does not fit"
    assert "needs" in row["reason"]
    assert "the card has 85.0 GB" in row["reason"]
    assert set(mine.loc[mine["status"] == "done", "kind"]) == {"planned"}
    assert value(frame, "memory", system="sc", **MUON_32B) > 85e9
    assert common.where(
        frame, system="sc", grid="main", model="qwen3-1.7b", optimizer="muon", quantity="iteration"
    ).size


def test_an_update_that_an_optimizer_does_not_have_is_not_possible(frame):
    mine = common.where(frame, system="nv-ping-pong-blockwise", optimizer="soap")
    assert {row["status"] for row in common.records(mine)} == {"not possible"}
    assert all("muon" in row["reason"] for row in common.records(mine))


def test_sweeps_change_one_setting(frame):
    mine = common.where(frame, grid="split", quantity="optimizer")
    assert list(mine["varied"]) == ["split=none", "split=atoms"]
    none, atoms = mine["value"]
    assert atoms < none


def test_every_time_has_a_band_around_it_and_evidence(frame):
    times = frame.loc[(frame["kind"] == "projected") & (frame["status"] == "done") & frame["value"].notna()]
    assert (times["low"] <= times["value"]).all()
    assert (times["value"] <= times["high"]).all()
    shares = [json.loads(e) for e in common.where(frame, quantity="iteration")["evidence"].dropna()]
    assert all(abs(sum(s.values()) - 1) < 1e-9 for s in shares)
    assert any(source.startswith("roofline") for s in shares for source in s)


def test_claims_have_ours_beside_the_published(frame):
    rows = common.records(common.where(frame, grid="claims", varied="C3"))
    assert [row["system"] for row in rows] == ["nv-ping-pong", "canzona"]
    ours = value(frame, "optimizer", system="nv-ping-pong", **MUON_32B)
    assert rows[0]["value"] == ours
    assert rows[1]["ratio"] == pytest.approx(ours / rows[1]["value"])
    text = projected.claims(frame, PUBLISHED)
    assert "0.383 -> 0.066" in text
    assert "5.80" in text
    assert rows[1]["reason"] in text


def test_a_claim_whose_system_does_not_fit_says_so():
    data = experiment().model_dump(mode="json")
    claims = [{**data["claims"][0], "baseline": "sc"}]
    frame = projection_rows.table(list(projection_rows.rows(experiment(claims=claims), "ci", "projection", ROOT)))
    first = common.records(common.where(frame, grid="claims"))[0]
    assert first["status"] == "not projected"
    assert np.isnan(first["value"])
    assert "not projected" in projected.claims(frame, PUBLISHED)


@pytest.mark.parametrize(("grid", "why"), [("split", "varies something"), ("mian", "is none of the grids")])
def test_a_claim_is_about_one_projection_of_a_grid_that_there_is(grid, why):
    claims = [{**experiment().model_dump(mode="json")["claims"][0], "grid": grid}]
    with pytest.raises(ConfigError, match=f"claim C3 is about grid '{grid}', which {why}: write one of main"):
        experiment(claims=claims)


def test_tables_and_figures_show_statuses_and_bands(frame):
    text = projection.table(frame, PUBLISHED)
    assert "does not fit" in text
    assert "needs" in text
    assert "**projected**" in text
    assert "roofline" in text
    drawn = projection.figure(frame, PUBLISHED)
    assert "does not fit" in texts(drawn)
    assert "Projected" in texts(drawn)
    assert not overlaps(drawn)


def test_scaling_table_and_figure():
    spec = projection_spec.load(ROOT / "experiments/scaling.yaml")
    frame = projection_rows.table(list(projection_rows.rows(spec, "ci", "scaling", ROOT)))
    batches = {int(row["dp"]): int(row["batch"]) for row in common.records(frame)}
    assert batches == {8: 32, 128: 512}  # four sequences a rank
    assert "optimizer step" in scaling.table(frame, PUBLISHED).lower()
    assert "Projected" in texts(scaling.figure(frame, PUBLISHED))


@pytest.mark.parametrize("tier", ["ci", "laptop", "cluster"])
@pytest.mark.parametrize("name", ["projection", "scaling"])
def test_every_case_of_a_tier_is_valid(name, tier):
    cases = list(projection_spec.load(ROOT / f"experiments/{name}.yaml").cases(tier))
    assert cases
    assert len({(c.comparison, c.system.id) for c in cases}) == len(cases)


def test_wrong_settings_are_one_clear_line():
    with pytest.raises(ConfigError, match="unknown system of this experiment 'ascc': did you mean 'asc'"):
        list(_changed(systems=["ascc"]).cases("ci"))
    with pytest.raises(ConfigError, match="alpha"):
        list(_changed(options={"alpha": 2.0}).cases("ci"))
    with pytest.raises(ConfigError, match="did you mean 'hardware'"):
        _changed(hardwear="h100")


def test_notes_about_no_grid_are_refused():
    with pytest.raises(ConfigError, match="notes are about grids, and mian is none of main, split"):
        experiment(notes={"mian": "x"})


def test_unknown_hardware_is_an_error():
    with pytest.raises(ConfigError, match="unknown hardware 'h1000x1'"):
        list(_changed(hardware="h1000").cases("ci"))


@pytest.mark.parametrize("name", ["projection", "scaling"])
def test_every_grid_of_the_laptop_tier_has_times(name):
    spec = projection_spec.load(ROOT / f"experiments/{name}.yaml")
    frame = projection_rows.table(list(projection_rows.rows(spec, "laptop", name, ROOT)))
    for grid in spec.tiers["laptop"].grids:
        mine = common.where(frame, grid=grid.id, quantity="iteration", status="done")
        assert set(mine["model"]) == set(grid.models)
        assert len(set(mine["varied"])) == max(1, *(len(values) for values in grid.vary.values()), 1)
    claims = common.where(frame, grid="claims")
    assert set(claims["status"]) <= {"done"}
    assert set(claims["varied"]) == {claim.id for claim in spec.claims}


def _changed(**grid) -> ProjectionSpec:
    data = experiment().model_dump(mode="json")["tiers"]
    data["ci"]["grids"] = [{**data["ci"]["grids"][0], "models": ["qwen3-1.7b"], **grid}]
    return experiment(tiers=data)


def test_the_command_writes_the_table(tmp_path, capsys):
    path = tmp_path / "projection.yaml"
    data = load_yaml(ROOT / "experiments/scaling.yaml")
    data |= {"optimizers": [{"id": "muon", "name": "Muon"}], "notes": {}}
    data["tiers"] = {"ci": {"grids": [{**data["tiers"]["ci"]["grids"][0], "models": ["qwen3-1.7b"]}]}}
    path.write_text(json.dumps(data))
    assert main(["projection", "--config", str(path), "--tier", "ci", "--out", str(tmp_path / "out")]) == 0
    assert "[projected]" in capsys.readouterr().out
    assert len(pd.read_parquet(tmp_path / "out/projection.parquet")) == len(
        pd.read_csv(tmp_path / "out/projection.csv")
    )
    assert main(["projection", "--config", str(path), "--tier", "node8", "--out", str(tmp_path / "out")]) == 2
    assert "no tier 'node8'" in capsys.readouterr().err
