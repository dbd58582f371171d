"""Experiments expand to the runs that they describe, and their ids follow the settings and nothing else."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from impl.__main__ import main
from impl.errors import ConfigError
from impl.harness import experiments, pipeline_run, tidy
from impl.harness.experiments import PrecisionExperiment, StepTimeExperiment
from impl.harness.pipeline_spec import PipelineSpec
from impl.harness.spec import RunSpec, load_yaml, parse
from impl.harness.step_time_spec import StepTimeSpec
from impl.models import catalogue
from paper_figures import common, step_time
from tests.unit import fake_runs

FOLDER = Path(__file__).parents[2] / "experiments"


def shuffled(data: Any, seed: int) -> Any:
    if isinstance(data, dict):
        items = [(k, shuffled(v, seed)) for k, v in data.items()]
        random.Random(seed).shuffle(items)
        return dict(items)
    return [shuffled(v, seed) for v in data] if isinstance(data, list) else data


def written(tmp_path: Path, data: dict[str, Any]) -> Path:
    path = tmp_path / "experiment.yaml"
    path.write_text(yaml.safe_dump(data, sort_keys=False))
    return path


@pytest.mark.parametrize("tier", experiments.TIERS)
def test_every_tier_of_every_experiment_is_valid(tier):
    runs = experiments.all_runs(FOLDER, tier)
    assert set(runs) >= {"step_time", "precision", "staleness", "rotation", "sweep"}
    for group in runs.values():
        ids = [run.id for run in group]
        assert len(ids) == len(set(ids))
        assert all(re.fullmatch(r"[a-z0-9-]+", i) for i in ids)
    for run in (run for group in runs.values() for run in group):
        if isinstance(run.spec, PipelineSpec):
            assert len(pipeline_run.prepare(run.spec.model_copy(update={"steps": 50})).parts) == run.spec.stages
        else:
            catalogue.load(run.base.model, layers=run.base.layers).check(run.base.tp)


def test_step_time_expands_to_one_job_per_mesh():
    runs = fake_runs.step_time_experiment().runs("ci")
    assert [run.name for run in runs] == ["dp2-tp1", "dp2-tp2"]
    assert [run.command for run in runs] == ["step-time"] * 2
    first, second = (run.spec for run in runs)
    assert isinstance(first, StepTimeSpec)
    assert isinstance(second, StepTimeSpec)
    assert [s.id for s in first.systems] == ["sc", "nv-lpt-ns", "asc", "canzona"]
    assert [s.id for s in second.systems] == ["sc", "nv-lpt-ns", "canzona"]
    assert (second.base.dp, second.base.tp, second.world_size, second.repetitions) == (2, 2, 4, 8)


def test_precision_expands_to_one_run_per_mesh_seed_and_system():
    runs = fake_runs.precision_experiment().runs("ci")
    assert len(runs) == 2 * 4 + 2 * 3
    assert {(r.base.dp, r.base.tp, r.base.seed) for r in runs} == {(2, 1, 0), (2, 1, 1), (2, 2, 0), (2, 2, 1)}
    by_system = {r.name: r.spec for r in runs if isinstance(r.spec, RunSpec)}
    assert by_system["nv-lpt-ns-dp2-tp1-s0"].strategy == "nv-layerwise"
    assert by_system["nv-lpt-ns-dp2-tp1-s0"].plan.nv_version == "lpt-ns"
    assert by_system["canzona-dp2-tp1-s1"].strategy == "canzona"
    assert all(spec.plan.bucket_elements == 1000 for spec in by_system.values())


@pytest.mark.parametrize(
    "data", [fake_runs.step_time_data(), fake_runs.precision_data()], ids=["step-time", "precision"]
)
@pytest.mark.parametrize("seed", range(5))
def test_order_of_keys_does_not_change_ids(tmp_path, data, seed):
    ids = [r.id for r in experiments.load(written(tmp_path, data)).runs("ci")]
    assert [r.id for r in experiments.load(written(tmp_path, shuffled(data, seed))).runs("ci")] == ids


def test_ids_do_not_depend_on_the_hash_seed():
    code = f"from impl.harness import experiments; r = experiments.all_runs({str(FOLDER)!r}, 'ci'); print(r)"
    seeds = ({"PYTHONHASHSEED": str(seed)} for seed in (1, 2))
    outputs = {
        subprocess.run([sys.executable, "-c", code], env=e, capture_output=True, check=True).stdout for e in seeds
    }
    assert len(outputs) == 1


def test_a_changed_setting_changes_exactly_its_own_runs():
    before = {r.name: r.id for r in fake_runs.step_time_experiment().runs("ci")}
    meshes = [{"dp": 2, "tp": 1}, {"dp": 2, "tp": 2}]  # ASC now runs on the second mesh too
    after = {r.name: r.id for r in fake_runs.step_time_experiment(meshes=meshes).runs("ci")}
    assert before["dp2-tp1"] == after["dp2-tp1"]
    assert before["dp2-tp2"] != after["dp2-tp2"]
    lr = {r.name: r.id for r in fake_runs.step_time_experiment(base={"lr": 1e-3}).runs("ci")}
    assert not set(lr.values()) & set(before.values())


def test_written_settings_read_back_as_the_same_spec():
    for experiment, cls in (
        (fake_runs.step_time_experiment(), StepTimeSpec),
        (fake_runs.precision_experiment(), RunSpec),
    ):
        for run in experiment.runs("ci"):
            assert parse(cls, yaml.safe_load(yaml.safe_dump(run.spec.resolved()))).digest == run.spec.digest


def test_configs_command_writes_the_run(tmp_path):
    from impl.cli import configs

    path = written(tmp_path, fake_runs.step_time_data())
    run = experiments.load(path).runs("ci")[0]
    parser = __import__("argparse").ArgumentParser()
    configs.add_arguments(parser)
    out = tmp_path / "a folder" / "c.yaml"
    words = [f"--experiments={path.parent}", "--tier=ci", f"--run={run.id}", f"--out={out}"]
    assert configs.run(parser.parse_args(words)) == 0
    assert parse(StepTimeSpec, load_yaml(out)) == run.spec


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "step-tyme"}, "kind must be one of pipeline, precision, step-time"),
        ({"titel": "x"}, "did you mean 'title'"),
        ({"base": {"model": "qwen3-tiny", "optimiser": "muon"}}, "did you mean 'optimizer'"),
        ({"reference": "scc"}, "is not one of the systems"),
        ({"systems": fake_runs.SYSTEMS + fake_runs.SYSTEMS[:1]}, "listed twice"),
        ({"systems": [{"id": "S C", "name": "SC", "strategy": "sc"}]}, "systems.0.id"),
        ({"tiers": {"ci": {"meshes": [{"dp": 2, "tp": 1, "without": ["canzna"]}]}}}, "did you mean 'canzona'"),
        ({"tiers": {"ci": {"meshes": []}}}, "meshes"),
        ({"tiers": {"ci": {"meshes": [{"dp": 0, "tp": 1}]}}}, "meshes.0.dp"),
        ({"tiers": {"ci": {"meshes": [{"dp": 3, "tp": 1}]}}}, "batch 16 is not a multiple"),
        ({"tiers": {"laptop": {"meshes": [{"dp": 2, "tp": 1}]}}}, "no tier 'ci'"),
        ({"base": {"model": "qwen3-tiny", "plan": {"capacity_bytes": 0}}}, "plan.capacity_bytes"),
    ],
)
def test_bad_input_gets_one_clear_line(tmp_path, change, message):
    path = written(tmp_path, fake_runs.step_time_data() | change)
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        experiments.load(path).runs("ci")
    assert "\n" not in str(caught.value)


def test_unknown_tier_and_run_name_the_nearest(capsys):
    with pytest.raises(ConfigError, match="did you mean 'laptop'"):
        fake_runs.step_time_experiment().runs("labtop")
    assert (
        main(["configs", "--experiments", str(FOLDER), "--tier", "ci", "--run", "dp2-tp1-00000000", "--out", "x"]) == 2
    )
    assert "unknown run 'dp2-tp1-00000000': did you mean 'dp2-tp1-" in capsys.readouterr().err


def test_experiment_kinds_are_distinct_classes():
    assert isinstance(experiments.load(FOLDER / "step_time.yaml"), StepTimeExperiment)
    assert isinstance(experiments.load(FOLDER / "precision.yaml"), PrecisionExperiment)


def test_a_mesh_may_have_a_model_of_its_own():
    meshes = [{"model": "qwen3-1.7b", "dp": 2, "tp": 1}, {"model": "qwen3-tiny", "dp": 2, "tp": 1}]
    runs = fake_runs.step_time_experiment(meshes=meshes).runs("ci")
    assert [run.name for run in runs] == ["qwen3-1-7b-dp2-tp1", "qwen3-tiny-dp2-tp1"], "paths have no dots"
    assert [run.base.model for run in runs] == ["qwen3-1.7b", "qwen3-tiny"]
    plain = fake_runs.step_time_experiment(meshes=[{"dp": 2, "tp": 1}]).runs("ci")[0]
    assert runs[1].spec.digest == plain.spec.digest, "the same job under another name"
    trained = fake_runs.precision_experiment(meshes=meshes, seeds=[0]).runs("ci")
    assert {run.base.model for run in trained} == {"qwen3-1.7b", "qwen3-tiny"}
    assert trained[0].name == "sc-qwen3-1-7b-dp2-tp1-s0"


def test_pairs_get_a_job_each_and_ratios_stay_in_it(tmp_path):
    experiment = fake_runs.step_time_experiment(
        meshes=[{"dp": 2, "tp": 1, "without": ["sc"], "pairs_with": "canzona"}, {"dp": 4, "tp": 1}]
    )
    runs = experiment.runs("ci")
    assert [run.name for run in runs] == ["dp2-tp1-canzona-nv-lpt-ns", "dp2-tp1-canzona-asc", "dp4-tp1"]
    for run in runs:
        fake_runs.step_time_run(tmp_path, run)
    groups = common.meshes(tidy.collect(experiment, "ci", tmp_path))
    labels = [
        "DP2 x TP1 (Canzona and NV-layerwise (lpt-ns))",
        "DP2 x TP1 (Canzona and ASC)",
        "DP4 x TP1 (shared cores)",
    ]
    assert [label for label, _ in groups] == labels
    assert [{run for (run,) in common.distinct(rows, "run")} for _, rows in groups] == [{run.id} for run in runs]
    repetitions = step_time.times(groups[1][1], "canzona", "iteration")
    assert len(repetitions) == 8, "those of its job alone"


def test_several_models_are_told_apart_in_labels(tmp_path):
    meshes = [{"model": model, "dp": 2, "tp": 1} for model in ("qwen3-small", "qwen3-tiny")]
    experiment = fake_runs.step_time_experiment(meshes=meshes)
    for run in experiment.runs("ci"):
        fake_runs.step_time_run(tmp_path, run)
    frame = tidy.collect(experiment, "ci", tmp_path)
    assert [label for label, _ in common.meshes(frame)] == ["qwen3-small, DP2 x TP1", "qwen3-tiny, DP2 x TP1"]
    assert step_time.main_table(frame).count("qwen3-small, DP2 x TP1") == 4


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ({"pairs_with": "canzna"}, "did you mean 'canzona'"),
        ({"pairs_with": "sc", "without": ["sc"]}, "unknown system on this mesh for pairs_with 'sc'"),
        ({"pairs_with": "sc", "without": ["nv-lpt-ns", "asc", "canzona"]}, "there is no other system"),
    ],
)
def test_wrong_pairs_are_one_clear_line(mesh, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        fake_runs.step_time_experiment(meshes=[{"dp": 2, "tp": 1, **mesh}]).runs("ci")


def test_training_runs_have_no_pairs():
    with pytest.raises(ConfigError, match="pairs_with is for timing jobs"):
        fake_runs.precision_experiment(meshes=[{"dp": 2, "tp": 1, "pairs_with": "sc"}])


def test_checkpoints_of_a_pipeline_are_no_part_of_its_science():
    run = experiments.runs_of(FOLDER / "rotation.yaml", "gpu1")[0]
    assert isinstance(run.spec, PipelineSpec)
    assert run.spec.checkpoint_every
    assert run.spec.model_copy(update={"checkpoint_every": 0}).digest == run.spec.digest


def test_the_cluster_tier_is_the_papers_grid():
    timed = experiments.runs_of(FOLDER / "step_time.yaml", "cluster")
    sizes = ["qwen3-1.7b", "qwen3-4b", "qwen3-8b", "qwen3-14b", "qwen3-32b"]
    assert list(dict.fromkeys(run.base.model for run in timed)) == sizes
    assert {run.spec.world_size for run in timed} == {256}
    pipelines = experiments.runs_of(FOLDER / "llama.yaml", "cluster")
    assert {(run.spec.model, run.spec.world_size) for run in pipelines} == {("llama-7b", 8), ("llama-13b", 8)}  # type: ignore[union-attr]
