"""Optimizers in experiments: named there, or added by the optimizer's own file; and nothing else changes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from impl.errors import ConfigError
from impl.harness import balance_spec, experiments, optimizer_files
from impl.harness.optimizer_files import OptimizerEntry
from impl.harness.pipeline_spec import PipelineSpec
from impl.harness.spec import RunSpec
from impl.harness.tidy import collect
from impl.optimizers.base import registry
from paper_figures import balance, precision, step_time
from tests.unit import fake_runs
from tests.unit.test_figures import PUBLISHED, overlaps, texts

SOAP = {"name": "soap", "display_name": "SOAP (ours)", "settings": {"period": 4, "eps": 1e-6}}


def folder(tmp_path: Path, *files: dict[str, Any], **own: dict[str, Any]) -> Path:
    """A folder of experiments with the optimizers ``files``."""
    found = {"step_time": fake_runs.step_time_data(), "precision": fake_runs.precision_data()}
    found |= {"rotation": fake_runs.pipeline_data(), **own}
    (tmp_path / "optimizers").mkdir()
    for name, data in found.items():
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(data))
    for data in files:
        (tmp_path / "optimizers" / f"{data['name']}.yaml").write_text(yaml.safe_dump(data))
    return tmp_path


def with_soap(tmp_path: Path, **named: Any) -> Path:
    return folder(tmp_path, {**SOAP, "experiments": named})


def specs(path: Path) -> dict[str, RunSpec]:
    """The settings of a training or timing experiment's runs by the run's name."""
    return {run.name: run.base for run in experiments.runs_of(path, "ci")}


def test_every_file_of_the_project_is_valid_and_has_an_optimizer():
    assert set(optimizer_files.read()) == set(registry())


def test_a_file_adds_runs_and_leaves_the_others_as_they_are(tmp_path):
    plain = experiments.all_runs(folder(_sub(tmp_path, "a")), "ci")
    before = {name: [run.id for run in runs] for name, runs in plain.items()}
    named = {"step_time": None, "precision": {"lr": 1e-3}, "rotation": {"lr": 4e-3, "settings": {"period": 1}}}
    after = experiments.all_runs(with_soap(_sub(tmp_path, "b"), **named), "ci")
    for name, runs in after.items():
        ids = [run.id for run in runs]
        assert set(before[name]) < set(ids)
        assert len(ids) == len(set(ids))
    new = {k: [r for r in v if r.id not in before[k]] for k, v in after.items()}
    assert [r.name for r in new["step_time"]] == ["soap-dp2-tp1", "soap-dp2-tp2"]
    assert len(new["precision"]) == 2 * 4 + 2 * 3
    assert new["precision"][0].name == "soap-sc-dp2-tp1-s0"
    assert [r.name for r in new["rotation"]] == [f"soap-p8-s{seed}" for seed in (0, 1, 2)]
    assert {r.base.optimizer for r in new["step_time"]} == {"soap"}
    assert {(r.base.lr, r.base.optimizer_settings["period"]) for r in new["precision"]} == {(1e-3, 4)}
    for run in new["rotation"]:
        assert isinstance(run.spec, PipelineSpec)
        assert (run.spec.method, run.spec.lr) == ("soap", 4e-3)
        assert run.spec.method_settings == {"period": 1, "eps": 1e-6}
        assert run.system is not None
        assert run.system.name == "SOAP (ours)"


def _sub(tmp_path: Path, name: str) -> Path:
    (tmp_path / name).mkdir()
    return tmp_path / name


def test_an_experiment_names_optimizers_with_settings_over_those_of_their_files(tmp_path):
    listed = ["soap", {"id": "muon", "name": "Muon", "lr": 3e-3, "base": {"clip": 0.5}}]
    data = fake_runs.step_time_data() | {
        "optimizers": [*listed, {"id": "adamw", "name": "AdamW", "settings": {"eps": 1}}]
    }
    data["base"] = data["base"] | {"optimizer_settings": {"momentum": 0.9}, "adamw_settings": {"eps": 1e-7}}
    found = specs(folder(tmp_path, SOAP, step_time=data) / "step_time.yaml")
    assert [name.rpartition("-dp")[0] for name in found] == ["soap", "muon", "adamw"] * 2
    assert found["soap-dp2-tp1"].optimizer_settings == {"period": 4, "eps": 1e-6}
    assert found["adamw-dp2-tp1"].optimizer_settings == {"eps": 1}
    assert (found["muon-dp2-tp1"].lr, found["muon-dp2-tp1"].clip) == (3e-3, 0.5)
    assert found["muon-dp2-tp1"].optimizer_settings == {}  # those of base belong to base's own optimizer
    assert {spec.adamw_settings["eps"] for spec in found.values()} == {1e-7}


def test_settings_of_a_tier_give_way_to_the_optimizers_own():
    entry = OptimizerEntry(id="soap", name="SOAP", lr=1e-3)
    assert entry.over({"lr": 5.0, "batch": 2})["lr"] == 1e-3
    assert OptimizerEntry(id="soap", name="SOAP").over({"lr": 5.0})["lr"] == 5.0


def test_balance_plans_it_on_the_points_mesh(tmp_path):
    data = yaml.safe_load((Path(__file__).parents[2] / "experiments" / "balance.yaml").read_text())
    data["tiers"]["ci"] |= {"models": ["qwen3-tiny"], "meshes": {"dp": [2], "tp": [1]}, "alpha": [1.0]}
    data["tiers"]["ci"] |= {"point": {"model": "qwen3-tiny", "dp": 2, "tp": 1}}
    data["tiers"]["ci"] |= {"capacity": {"bytes": [], "modes": [], "dp": []}, "cost": {"models": [], "costs": []}}
    place = folder(tmp_path, {**SOAP, "experiments": {"balance": {"settings": {"period": 1}}}}, balance=data)
    spec = balance_spec.load(place / "balance.yaml")
    frame = balance_spec.table(list(balance_spec.rows(spec, "ci")))
    assert list(frame[frame["optimizer"] == "soap"]["sweep"].unique()) == ["optimizer"]
    assert len(frame[frame["optimizer"] == "soap"]) == len(spec.systems)
    assert "Other optimizers" in balance.table(frame, PUBLISHED)
    (place / "optimizers" / "soap.yaml").unlink()
    without = experiments.settings_digest(place / "balance.yaml", "ci")
    (place / "optimizers" / "soap.yaml").write_text(yaml.safe_dump({**SOAP, "experiments": {"balance": None}}))
    assert experiments.settings_digest(place / "balance.yaml", "ci") != without


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({**SOAP, "experiments": {"step_tyme": None}}, "optimizers/soap.yaml 'step_tyme': did you mean 'step_time'"),
        ({**SOAP, "experiments": {"step_time": None, "precisoin": None}}, "did you mean 'precision'"),
        ({**SOAP, "experiments": {"notes": None}}, "optimizers/soap.yaml: notes.yaml is no experiment that compares"),
        ({**SOAP, "experiments": {"step_time": {"lrs": 1}}}, "optimizers.0 'lrs'"),
        ({**SOAP, "setings": {}}, "soap.yaml: unknown setting 'setings': did you mean 'settings'"),
        ({**SOAP, "name": "Soap!"}, "name"),
        ({"name": "muon", "display_name": "Muon", "experiments": {"step_time": None}}, "'muon' is listed twice"),
    ],
)
def test_bad_files_get_one_clear_line(tmp_path, files, message):
    place = folder(tmp_path, files)
    (place / "notes.yaml").write_text("title: of something else\n")
    step_time_file = yaml.safe_load((place / "step_time.yaml").read_text())
    step_time_file["base"]["optimizer"] = "muon"
    (place / "step_time.yaml").write_text(yaml.safe_dump(step_time_file))
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        experiments.all_runs(place, "ci")
    assert "\n" not in str(caught.value)


def test_a_file_is_named_after_its_optimizer(tmp_path):
    place = folder(tmp_path, SOAP)
    (place / "optimizers" / "soap.yaml").rename(place / "optimizers" / "soup.yaml")
    with pytest.raises(ConfigError, match="name must be that of the file, soup, got 'soap'"):
        experiments.all_runs(place, "ci")


def test_an_unknown_optimizer_in_an_experiment_names_the_nearest(tmp_path):
    place = folder(tmp_path, SOAP, step_time=fake_runs.step_time_data() | {"optimizers": ["saop"]})
    with pytest.raises(ConfigError, match="unknown optimizer 'saop': did you mean 'soap'"):
        experiments.all_runs(place, "ci")


def test_tables_and_figures_show_each_optimizer_apart(tmp_path):
    place = with_soap(tmp_path, step_time=None, precision=None)
    for name, write, module in (
        ("step_time", fake_runs.step_time_run, step_time),
        ("precision", fake_runs.precision_run, precision),
    ):
        experiment = experiments.load(place / f"{name}.yaml")
        for run in experiment.runs("ci"):
            write(tmp_path / "runs", run)
        frame = collect(experiment, "ci", tmp_path / "runs")
        assert set(frame["optimizer_name"]) == {"muon", "SOAP (ours)"}
        text = module.main_table(frame)
        shared = " (shared cores)" if name == "step_time" else ""
        for mesh in ("DP2 x TP1", f"DP2 x TP2{shared}"):
            assert text.count(f"| {mesh}, muon ") == text.count(f"| {mesh}, SOAP (ours) ")
            assert f"| {mesh}, muon " in text
        figure = module.figure(frame, PUBLISHED)
        assert "SOAP (ours), DP2 x TP1" in texts(figure)
        assert overlaps(figure) == []
