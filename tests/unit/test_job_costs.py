"""Costs of jobs before they run: bytes counted by hand, refusals, seconds and disk, and what the command prints."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from impl.__main__ import dispatch, main
from impl.errors import ConfigError
from impl.harness import experiments, job_memory, job_seconds, job_times, sweep_costs
from impl.harness.job_costs import DEFAULT_HARDWARE, JobCosts, checkpoints_kept, misfit, record_bytes
from impl.harness.job_plans import PipelinePlans, TrainingPlans
from impl.harness.pipeline_spec import PipelineSpec
from impl.harness.run import Run
from impl.harness.spec import RunSpec, parse
from impl.harness.step_time_spec import StepTimeSpec
from impl.harness.tiers import Label
from impl.models import catalogue
from impl.projection import hardware, memory
from impl.projection.hardware import HardwareSpec
from impl.projection.workload import Workload
from tests.unit import fake_runs

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "experiments"
H100 = hardware.load_kind("h100")
HEADS, QK_HEADS, WIDTH, MLP, VOCABULARY = 4, 2, 32, 96, 256  # of qwen3-tiny, 8 a head
LAYER = WIDTH * (8 * (HEADS + 2 * QK_HEADS)) + WIDTH * 8 * HEADS + 3 * WIDTH * MLP
"""Elements of the matrices of one layer."""
REST = 2 * VOCABULARY * WIDTH + 2 * WIDTH + 2 * 8 + WIDTH
"""Elements that AdamW updates in a model of one layer: embedding, head and norms."""


def small(**changed: Any) -> dict[str, Any]:
    """Settings of a model of one layer on one rank."""
    base = {"model": "qwen3-tiny", "layers": 1, "optimizer": "muon", "batch": 2, "sequence": 16, "dtype": "bfloat16"}
    return {**base, "plan": {"bucket_elements": 4000}, **changed}


def timing(*ids: str, **changed: Any) -> Run:
    """Return a timing job of some systems."""
    systems = [system for system in fake_runs.SYSTEMS if system["id"] in ids]
    spec = parse(StepTimeSpec, {"base": small(**changed), "systems": systems, "repetitions": 4, "warmup": 1})
    return Run(name="dp1-tp1", command="step-time", spec=spec)


def pipeline(**changed: Any) -> Run:
    """Return a pipeline run."""
    spec = parse(PipelineSpec, {"model": "qwen3-tiny", "method": "pipedream", "stages": 2, "steps": 40, **changed})
    return Run(name="pipedream-p2-s0", command="pipeline", spec=spec, system=Label(id="adamw", name="AdamW"))


def with_memory(count: int, spec: HardwareSpec = H100) -> HardwareSpec:
    """Return hardware whose devices have so many bytes."""
    return spec.model_copy(update={"device": spec.device.model_copy(update={"memory_bytes": count})})


def held_by_hand() -> int:
    """Bytes that one system holds all the time: bf16 parameters, fp32 gradients and masters, momentum, two moments."""
    return (2 + 4 + 4) * (LAYER + REST) + 4 * LAYER + 8 * REST


def test_memory_of_one_system_is_the_count_by_hand():
    need = JobCosts(H100).need(timing("sc"))
    assert need.parts["sc held"] == held_by_hand()
    config, work = catalogue.load("qwen3-tiny", 1), Workload(sequence=16, batch=2, sequence_parallel=False)
    loss = memory.activation_bytes(config, work, 1, 1) + memory.logit_bytes(config, work, 1, 1)
    (moment,) = (count for name, count in need.parts.items() if not name.endswith("held"))
    assert moment == max(loss, moment) > 0
    assert need.total == held_by_hand() + moment
    assert need.where == "rank dp 0 tp 0"


def test_systems_side_by_side_hold_the_sum_and_the_largest_moment_counts_once():
    costs = JobCosts(H100)
    alone = [costs.need(timing(name)) for name in ("sc", "asc", "canzona")]
    together = costs.need(timing("sc", "asc", "canzona"))
    held = [need.parts[f"{name} held"] for name, need in zip(("sc", "asc", "canzona"), alone, strict=True)]
    assert held[0] == held_by_hand(), "buckets of the others have gaps"
    assert held_by_hand() <= min(held) <= max(held) < 1.02 * held_by_hand()
    moments = [need.total - mine for need, mine in zip(alone, held, strict=True)]
    assert together.total == sum(held) + max(moments)
    assert together.total < sum(need.total for need in alone)


def test_the_fullest_rank_is_that_of_the_sum():
    """On two ranks the systems' fullest ranks may differ: what counts is what one rank holds of all of them."""
    plans = TrainingPlans()
    systems = [(s, parse(RunSpec, small(dp=2, strategy=s, layers=3))) for s in ("nv-layerwise", "asc", "canzona")]
    together = job_memory.of_training(systems, plans)
    held = np.sum([plans.parts(spec)[part] for _, spec in systems for part in memory.STATIC], axis=0)
    sums = [round(value) for value in held[:, 0]]
    assert sum(count for name, count in together.parts.items() if name.endswith("held")) in sums
    assert together.total <= sum(job_memory.of_training([one], plans).total for one in systems)


def test_a_job_that_does_not_fit_is_refused_with_advice():
    run, costs = timing("sc", "canzona"), JobCosts(H100)
    need = costs.need(run).total
    assert misfit(run, with_memory(need)) is None, "it just fits"
    line = misfit(run, with_memory(need - 1))
    assert line is not None
    assert line.startswith("step-time dp1-tp1 (qwen3-tiny): needs 0.0 GB on rank dp 0 tp 0, H100 SXM5 80 GB has 0.0 GB")
    assert "pairs_with" in line, "each fits alone"
    alone = costs.need(timing("sc")).total
    assert "leave canzona (alone 0.0 GB) out" in (misfit(run, with_memory(alone)) or ""), "its buckets have gaps"
    assert "leave sc (alone 0.0 GB), canzona" in (misfit(run, with_memory(alone - 1)) or "")
    assert JobCosts(with_memory(need - 1)).of(run).seconds is None, "what cannot run has no time"


def test_a_pipeline_needs_its_fullest_stage_and_a_simulation_all_of_them():
    costs = JobCosts(H100)
    apart = costs.need(pipeline(runtime="processes", stages=4))
    here = costs.need(pipeline(stages=4))
    assert apart.where == "stage 0", "it stashes most"
    assert apart.total < here.total < 4 * apart.total
    line = misfit(pipeline(runtime="processes", stages=4), with_memory(apart.total - 1))
    assert line is not None
    assert "pipeline pipedream-p2-s0 (qwen3-tiny, AdamW): needs" in line
    assert "with recompute: stage" in line
    note = costs.need(pipeline(method="pipemare")).note
    assert "as PipeDream in mode no-stash-recompute" in note, "what is not modelled is said"


@pytest.mark.parametrize("tier", DEFAULT_HARDWARE)
def test_every_job_of_a_tier_fits_its_hardware(tier):
    costs = JobCosts(hardware.load_kind(DEFAULT_HARDWARE[tier]))
    runs = [run for group in experiments.all_runs(FOLDER, tier).values() for run in group]
    assert [line for run in runs if (line := costs.misfit(run))] == []
    shrunk = JobCosts(with_memory(10**9))
    assert any(shrunk.misfit(run) for run in runs if run.command == "step-time"), "the check can fail"


@pytest.mark.parametrize(
    ("name", "fitting"),
    [
        ("rtx3090", {("llama-7b", "1f1b-flush"), ("llama-7b", "2bw")}),
        (
            "a100-40",
            {("llama-7b", name) for name in ("1f1b-flush", "2bw", "pipedream-host", "rotation-host")}
            | {("llama-13b", "1f1b-flush"), ("llama-13b", "2bw")},
        ),
    ],
)
def test_what_of_llama_fits_smaller_cards(name, fitting):
    costs = JobCosts(hardware.load_kind(name))
    runs = experiments.runs_of(FOLDER / "llama.yaml", "node8")
    found = {(run.spec.model, run.system.id) for run in runs if costs.misfit(run) is None}  # type: ignore[union-attr]
    assert found == fitting


def test_seconds_are_those_of_every_step_of_every_system():
    plans = TrainingPlans()
    times = job_times.JobTimes(H100, plans, PipelinePlans())
    run = timing("sc", "canzona")
    assert isinstance(run.spec, StepTimeSpec)
    assert job_times.steps_of_a_system(run.spec) == 1 + (4 + 1) * 2, "audited, and two of each repetition"
    steps = [times.step(system.run_spec(run.spec.base))[0] for system in run.spec.systems]
    assert times.seconds(run)[0] == pytest.approx(11 * sum(steps))
    trained = Run(name="sc", command="train", spec=parse(RunSpec, small(steps=7, strategy="sc")))
    assert times.seconds(trained)[0] == pytest.approx(7 * steps[0])
    real, simulated = (times.seconds(pipeline(runtime=how)) for how in ("processes", "simulator"))
    assert simulated[0] > real[0], "one process does the work of both stages"
    assert times.seconds(pipeline(steps=80))[0] == pytest.approx(2 * simulated[0])


def test_a_method_that_is_not_modelled_has_no_time_and_the_reason():
    cost = JobCosts(H100).of(pipeline(method="pipemare"))
    assert cost.seconds is None
    assert "not modelled" in cost.unknown


def test_disk_of_a_training_run_is_its_checkpoints():
    run = Run(name="sc", command="train", spec=parse(RunSpec, small(steps=40, checkpoint_every=10, strategy="sc")))
    cost = JobCosts(H100).disk(run)
    assert cost.checkpoints == 2 * (4 * (LAYER + REST) + 4 * LAYER + 8 * REST), "two are kept: masters and state"
    assert cost.records == record_bytes(run) > 40 * 700
    once = Run(name="sc", command="train", spec=parse(RunSpec, small(steps=40, checkpoint_every=40, strategy="sc")))
    assert checkpoints_kept(once) == 1
    assert checkpoints_kept(pipeline(checkpoint_every=40)) == 0, "a pipeline writes none after its last update"
    assert checkpoints_kept(timing("sc")) == 0
    stashed = [JobCosts(H100).disk(pipeline(checkpoint_every=10, stages=p)).checkpoints for p in (2, 4)]
    assert stashed[0] < stashed[1], "more stages keep more versions"


def test_work_is_the_same_for_runs_that_take_equally_long():
    assert job_seconds.work(pipeline(seed=1, lr=1e-3)) == job_seconds.work(pipeline())
    assert job_seconds.work(pipeline(steps=41)) != job_seconds.work(pipeline())
    assert job_seconds.work(timing("sc", seed=3)) == job_seconds.work(timing("sc"))
    assert job_seconds.work(timing("sc")) != job_seconds.work(timing("canzona"))


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """A folder of experiments: one of timing jobs, and two of pipelines that share a run."""
    folder = tmp_path / "experiments"
    folder.mkdir()
    (folder / "step_time.yaml").write_text(json.dumps(fake_runs.step_time_data()))
    entry = {"id": "adamw", "name": "AdamW", "method": "pipedream"}
    base = {"model": "qwen3-tiny", "steps": 30, "lr": 1e-3}
    for name, seeds in (("one", [0, 1]), ("two", [0])):
        tier = {"grids": [{"stages": [2]}], "seeds": seeds}
        data = {"kind": "pipeline", "title": name, "reference": "adamw", "base": base, "methods": [entry]}
        (folder / f"{name}.yaml").write_text(json.dumps({**data, "tiers": {"ci": tier}}))
    return folder


def asked(folder: Path, *words: str) -> list[str]:
    results = folder.parent / "results"
    return ["cost", "--tier=ci", f"--experiments={folder}", f"--results={results}", *words]


def test_an_empty_results_folder_knows_nothing(sweep, capsys):
    none = f"--seconds={sweep.parent / 'none.csv'}"
    assert main(asked(sweep, none)) == 0
    printed = capsys.readouterr().out
    rows = {line.split()[0]: line.split() for line in printed.splitlines() if line.strip()}
    assert rows["one"][1:6] == ["2", "2", "1", "process", "?"]
    assert rows["step_time"][1:6] == ["2", "2", "4", "processes", "?"]
    assert rows["all"][1:3] == ["4", "4"], "the shared run counts once"
    assert "projected" not in printed
    assert "memory: not checked" in printed
    assert main(asked(sweep, none, "--summary")) == 0
    assert 4 <= len(capsys.readouterr().out.splitlines()) <= 10


def test_finished_runs_are_measured_and_not_done_again(sweep, capsys):
    runs = experiments.all_runs(sweep, "ci")
    results = sweep.parent / "results"
    first, second = runs["one"]
    fake_runs.write(results / "pipelines/runs", first, {}, [], seconds=1800.0)
    assert main(asked(sweep)) == 0
    printed = capsys.readouterr().out
    rows = {line.split()[0]: line for line in printed.splitlines() if line.strip()}
    assert rows["one"].split()[1:3] == ["2", "1"]
    assert "0.5 measured" in rows["one"], "half an hour on one core, as the other seed took"
    assert rows["two"].split()[1:5] == ["1", "0", "-", "0"]
    assert "0.5 measured + 2 runs ?" in rows["all"], "nothing is known of the timing jobs"
    fake_runs.write(results / "pipelines/runs", second, {}, [], status="failed")
    for run in runs["step_time"]:
        fake_runs.step_time_run(results / "step_time/runs", run)
    assert main(asked(sweep)) == 0
    (last,) = (line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("all"))
    assert last[1:3] == ["4", "0"], "a failed run is a result"


def test_an_unfinished_or_lost_run_is_still_to_do(sweep):
    results = sweep.parent / "results"
    first, second = experiments.all_runs(sweep, "ci")["one"]
    fake_runs.write(results / "pipelines/runs", first, {}, [], status="unfinished")
    fake_runs.write(results / "pipelines/runs", second, {}, [], status="failed", lost=True)
    found = sweep_costs.sweep(sweep, "ci", results)
    assert len(found.all.costs) == 4
    assert {cost.kind for cost in found.all.costs} == {"?"}, "and says nothing about how long one takes"


def test_times_are_recorded_and_used_where_nothing_else_is_known(sweep, capsys):
    results, table = sweep.parent / "results", sweep.parent / "seconds.csv"
    first, second = experiments.all_runs(sweep, "ci")["one"]
    with pytest.raises(ConfigError, match="no finished run of tier ci"):
        dispatch("cost", asked(sweep, f"--record={table}")[1:])
    for run, seconds in ((first, 60.0), (second, 180.0)):
        fake_runs.write(results / "pipelines/runs", run, {}, [], seconds=seconds)
    assert main(asked(sweep, f"--record={table}")) == 0
    header, row = table.read_text().splitlines()
    assert header == "experiment,run,work,ranks,cores,seconds,n"
    assert row == f"one,pipedream-p2-s0,{job_seconds.work(first)},1,1,120.0,2"
    capsys.readouterr()
    elsewhere = [*asked(sweep, f"--seconds={table}"), f"--results={sweep.parent / 'other'}"]
    assert main(elsewhere) == 0
    assert "0.067 measured before + 2 runs ?" in capsys.readouterr().out
    table.write_text("a,b\n1,2\n")
    assert main(elsewhere) == 2
    assert "is no table of experiment, run" in capsys.readouterr().err


def test_a_job_that_does_not_fit_stops_the_command(sweep, capsys):
    data = yaml.safe_load((FOLDER / "hardware/h100.yaml").read_text())
    data["device"]["memory_bytes"] = 400_000
    (sweep / "hardware").mkdir()
    (sweep / "hardware/h100.yaml").write_text(yaml.safe_dump(data))
    assert main(asked(sweep, "--hardware=h100")) == 2
    out, err = capsys.readouterr()
    assert "jobs do not fit the 0.0 GB of one H100 SXM5 80 GB (planned)" in out
    assert out.count("does not fit: ") == 4
    assert err.startswith("error: 4 of 4 jobs do not fit; the first is ")
    assert main(asked(sweep, "--hardware=h100", "--no-fit")) == 0
    assert "not checked against the 0.0 GB" in capsys.readouterr().out


def test_on_a_described_device_hours_are_projected(sweep):
    found = sweep_costs.sweep(sweep, "ci", sweep.parent / "results", device=H100, names=["step_time"])
    (line,) = found.lines
    run = experiments.all_runs(sweep, "ci")["step_time"][0]
    seconds = JobCosts(H100).of(run).seconds
    assert seconds is not None
    assert line.costs[0].hours == pytest.approx(
        (2 * seconds.value / 3600, 2 * seconds.low / 3600, 2 * seconds.high / 3600)
    )
    assert {cost.kind for cost in line.costs} == {"projected"}
    assert "every job fits the 85.0 GB" in found.text()
    with pytest.raises(ConfigError, match="did you mean 'step_time'"):
        sweep_costs.sweep(sweep, "ci", sweep.parent / "results", names=["step_tme"])


def test_the_cpu_tiers_need_no_planner():
    """Torch takes seconds to import, and a sweep on a CPU is priced without it."""
    code = "import sys; from impl.__main__ import main; main(['cost', '--tier=ci']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
