"""What `make why` says: from samples of what Snakemake 9.27 prints, and from one real dry run."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from impl.__main__ import main
from impl.cli import why as command
from impl.harness import experiments
from impl.harness.processes import this_process
from impl.harness.run import Run
from impl.harness.why import REASONS, Explainer, Job, Thing, parse, split_reasons, thing
from tests.unit import fake_runs
from tests.workflow.test_workflow import checkout, edit

BANNER = """\
Assuming unrestricted shared filesystem usage.

SNAKEMAKE
=========
  Date: 2026-11-29 23:52:44
  Command: snakemake/__main__.py --dryrun --cores 1 --config tier=ci -- precision
  Config file(s): []

Building DAG of jobs...
"""
# Captured from dry runs of this workflow and shortened.
SAMPLE = (
    BANNER
    + """\
Job stats:
job             count
------------  -------
configure           1
train               1
total               2


[Sun Nov 29 23:52:45 2026]
rule configure:
    input: experiments/precision.yaml
    output: results/generated/ci/precision/configs/sc-dp2-tp1-s0-62fad57b.yaml
    log: results/generated/ci/precision/logs/sc-dp2-tp1-s0-62fad57b.configure.log
    jobid: 3
    reason: Missing output files: results/generated/ci/precision/configs/sc-dp2-tp1-s0-62fad57b.yaml
    wildcards: tier=ci, experiment=precision, run=sc-dp2-tp1-s0-62fad57b
    resources: tmpdir=/tmp, runtime=5, mem_mb=500, mem=500 MB, mem_mib=477
[Sun Nov 29 23:52:45 2026]
rule train:
    input: results/generated/ci/precision/configs/sc-dp2-tp1-s0-62fad57b.yaml
    output: results/generated/ci/precision/runs/sc-dp2-tp1-s0-62fad57b/ended
    log: results/generated/ci/precision/logs/sc-dp2-tp1-s0-62fad57b.log
    jobid: 2
    benchmark: results/generated/ci/precision/benchmarks/sc-dp2-tp1-s0-62fad57b.tsv
    reason: Missing output files: results/generated/ci/precision/runs/sc-dp2-tp1-s0-62fad57b/ended; \
Input files updated by another job: results/generated/ci/precision/configs/sc-dp2-tp1-s0-62fad57b.yaml
    wildcards: tier=ci, experiment=precision, run=sc-dp2-tp1-s0-62fad57b
    resources: tmpdir=/tmp, runtime=60, mem_mb=4000, mem=4 GB, mem_mib=3815
[Mon Nov 30 00:04:59 2026]
rule plan_balance:
    input: experiments/balance.yaml
    output: results/generated/ci/balance/balance.parquet, results/generated/ci/balance/balance.csv
    log: results/generated/ci/balance/logs/balance.log
    jobid: 1
    benchmark: results/generated/ci/balance/benchmarks/balance.tsv
    reason: Params have changed since last execution: Union of exclusive params before and now across all output: \
before: 'aeddac66' now: '111d3227'\x20
    wildcards: tier=ci
    resources: tmpdir=/tmp, runtime=10, mem_mb=1000, mem=1 GB, mem_mib=954
[Mon Nov 30 00:04:59 2026]
localrule figure:
    input: results/generated/ci/balance/balance.parquet, results/published/canzona.csv
    output: results/generated/ci/balance/balance.pdf, results/generated/ci/balance/balance.png
    log: results/generated/ci/balance/logs/figure.log
    jobid: 3
    reason: Input files updated by another job: results/generated/ci/balance/balance.parquet
    wildcards: tier=ci, experiment=balance
    resources: tmpdir=/tmp, runtime=5, mem_mb=1000, mem=1 GB, mem_mib=954
[Mon Nov 30 00:04:59 2026]
rule balance:
    input: results/generated/ci/balance/balance.parquet, results/generated/ci/balance/balance.csv
    jobid: 0
    reason: Input files updated by another job: results/generated/ci/balance/balance.csv
    resources: tmpdir=/tmp
Job stats:
job             count
------------  -------
configure           1
total               1

Reasons:
    (check individual jobs above for details)
    output files have to be generated:
        configure, train
This was a dry-run (flag -n). The order of jobs does not reflect the order of execution.
"""
)


def test_jobs_and_their_reasons_are_read():
    jobs = parse(SAMPLE)
    assert [(job.rule, list(job.reasons)) for job in jobs] == [
        ("configure", ["missing"]),
        ("train", ["missing", "follows"]),
        ("plan_balance", ["params"]),
        ("figure", ["follows"]),
    ]
    assert [thing(job) for job in jobs] == [
        Thing("precision", "settings", "sc-dp2-tp1-s0-62fad57b"),
        Thing("precision", "run", "sc-dp2-tp1-s0-62fad57b"),
        Thing("balance", "tidy table"),
        Thing("balance", "figure"),
    ]
    assert parse(BANNER + "Nothing to be done (all requested files are present and up to date).\n") == []


def test_every_reason_of_the_installed_snakemake_has_a_name():
    from snakemake.jobs import Reason
    from snakemake.persistence import ParamsChange

    def text(**flags: object) -> str:
        reason = Reason()
        for name, value in flags.items():
            setattr(reason, name, value)
        return str(reason)

    flags = {"pipe": "pipe", "service": "service", "input_changed": "inputs", "code_changed": "code"}
    flags |= {"software_stack_changed": "software", "forced": "forced", "noio": "always", "nooutput": "always"}
    found = {name: split_reasons(text(**{flag: True})) for flag, name in flags.items()}
    assert {name: list(reasons) for name, reasons in found.items()} == {name: [name] for name in flags.values()}
    change = ParamsChange(only_old={"a; b"}, only_new={"c"})
    everything = text(pipe=True, input_changed=True, code_changed=True, params_changed=change)
    assert list(split_reasons(everything)) == ["pipe", "inputs", "code", "params"]
    source = Path(str(Reason.__init__.__code__.co_filename)).read_text()
    for name in ("missing", "incomplete", "newer", "follows"):
        assert f'f"{REASONS[name]}: ' in source
    assert split_reasons("A new one: x") == {"other": "A new one: x"}


@pytest.fixture
def runs() -> dict[str, tuple[Run, ...]]:
    return {
        "precision": fake_runs.precision_experiment(seeds=[0]).runs("ci"),
        "rotation": fake_runs.pipeline_experiment().runs("ci"),
        "sweep": fake_runs.pipeline_experiment(seeds=[0]).runs("ci"),
    }


def job_of(run: Run, place: str = "precision", reason: str = "") -> Job:
    path = f"results/generated/ci/{place}/runs/{run.id}/ended"
    return Job("train", (path,), split_reasons(reason or f"Missing output files: {path}"))


def made(kind: str, place: str, reason: str) -> Job:
    return Job(kind, (f"results/generated/ci/{place}/{place}.{kind}",), split_reasons(reason))


def begun(folder: Path, run: Run, **settings: object) -> Path:
    path = folder / run.id
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(yaml.safe_dump(run.spec.resolved() | settings))
    return path


def test_runs_say_whether_they_are_new_changed_unfinished_or_running(runs, tmp_path):
    folder = tmp_path / "precision" / "runs"
    fresh, changed, unfinished, running, moved = runs["precision"][:5]
    begun(folder, unfinished)
    path = begun(folder, running)
    (path / ".attempt.json").write_text(json.dumps({"started": "2026-11-29T12:00:00+00:00"}))
    (path / ".lock").write_text(this_process())
    for name, settings in (("0123abcd", {"lr": 0.004, "batch": 32}), ("456789ab", {"lr": 0.001})):
        old = begun(folder, changed, **settings)
        old.rename(old.with_name(f"{changed.name}-{name}"))
    (folder / f"{moved.name}-00000000").mkdir()  # an old folder without settings tells nothing
    explained = Explainer(runs, tmp_path).lines(job_of(run) for run in (fresh, changed, unfinished, running, moved))
    assert explained == [
        "precision: 2 runs: never made",
        "precision: 1 run: settings changed: lr 0.001 -> 0.002",
        "precision: 1 run: not finished: goes on from its last checkpoint, if it has one",
        f"precision: 1 run: running now ({this_process()})",
    ]


def test_a_run_that_is_still_asked_for_is_not_an_old_one(runs, tmp_path):
    """Runs of one method, number of stages and seed differ in their learning rate only."""
    rates = {**fake_runs.PIPELINE_METHODS[0], "lr": [1e-3, 2e-3, 4e-3]}
    grid = {"grids": [{"stages": [8], "methods": ["adamw"]}], "seeds": [0]}
    experiment = fake_runs.pipeline_data(**grid) | {"methods": [rates]}
    swept = fake_runs.parse(fake_runs.PipelineExperiment, experiment).runs("ci")
    assert len({run.name for run in swept}) == 1
    begun(tmp_path / "pipelines" / "runs", swept[0])
    job = job_of(swept[1], "pipelines")
    assert Explainer({"sweep": swept}, tmp_path).lines([job]) == ["sweep: 1 run: never made"]
    explained = Explainer({"sweep": swept[1:]}, tmp_path).lines([job])
    assert explained == ["sweep: 1 run: settings changed: lr 0.001 -> 0.002"]


def test_a_finished_run_that_is_looked_at_again(runs, tmp_path):
    run = runs["precision"][0]
    fake_runs.precision_run(tmp_path / "precision" / "runs", run)
    jobs = [job_of(run, reason="Code has changed since last execution")]
    (line,) = Explainer(runs, tmp_path).lines(jobs)
    assert "the command of its rule changed" in line
    assert "stays as it is" in line
    (line,) = Explainer(runs, tmp_path).lines([job_of(run, reason="Input files updated by another job: a.yaml")])
    assert "it is looked at again" in line


def test_shared_runs_are_named_by_the_experiments_that_are_made(runs, tmp_path):
    job = job_of(runs["sweep"][0], "pipelines")
    assert Explainer(runs, tmp_path).lines([job]) == ["rotation, sweep: 1 run: never made"]
    lines = Explainer(runs, tmp_path).lines([job, made("md", "sweep", "Missing output files: x")])
    assert lines == ["sweep: 1 run: never made", "sweep: table: not there yet"]


@pytest.mark.parametrize(
    ("kind", "place", "reason", "says"),
    [
        ("parquet", "balance", "Params have changed since last execution: x", "experiments/balance.yaml changed"),
        ("md", "balance", "Params have changed since last execution: x", "the code that draws it changed"),
        ("pdf", "rotation", "Code has changed since last execution", "figure: the command of its rule changed"),
        ("parquet", "rotation", "Set of input files has changed since last execution", "runs came or went"),
        ("parquet", "rotation", "Input files updated by another job: a", "because runs that it is made of are made"),
        ("png", "rotation", "Input files updated by another job: a", "figure: because its tidy table is made"),
        ("md", "balance", "Updated input files: a.csv, b, c, d", "older than a.csv, b, c and 1 more"),
        ("md", "balance", "Incomplete output files: a.md", "it may be half-written"),
        ("md", "balance", "Software environment definition has changed since last execution", "list of software"),
        ("md", "balance", "Forced execution", "by force"),
        ("md", "balance", "A new one", "A new one"),
    ],
)
def test_tables_and_figures(runs, tmp_path, kind, place, reason, says):
    (line,) = Explainer(runs, tmp_path).lines([made(kind, place, reason)])
    assert line.startswith(f"{place}: ")
    assert says in line
    assert "params" not in line.lower()


def test_the_command_explains_a_sample_and_failed_runs(tmp_path, monkeypatch, capsys):
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "precision.yaml").write_text(yaml.safe_dump(fake_runs.precision_data(seeds=[0])))
    monkeypatch.chdir(tmp_path)
    run = experiments.runs_of("experiments/precision.yaml", "ci")[0]
    fake_runs.precision_run(tmp_path / "results/generated/ci/precision/runs", run, status="failed", error="why")
    asked: list[list[str]] = []

    def snakemake(words: list[str], **_: object) -> SimpleNamespace:
        asked.append(words)
        return SimpleNamespace(returncode=0, stdout="", stderr=SAMPLE)

    monkeypatch.setattr(subprocess, "run", snakemake)
    assert main(["why", "--tier", "ci", "precision"]) == 0
    shown = capsys.readouterr().out
    assert shown.splitlines()[0].startswith("tier ci: 1 run(s) and 2 table(s)")
    assert "balance: tidy table: the settings in experiments/balance.yaml changed" in shown
    assert "precision: 1 run: its record is not there" in shown  # not one of these experiments
    assert "(1 failed): `make retry` forgets them" in shown
    assert asked[0][-2:] == ["--", "precision"]
    monkeypatch.setattr(command, "parse", lambda _: [])
    assert main(["why", "--tier", "ci"]) == 0
    assert "nothing: everything is up to date" in capsys.readouterr().out


@pytest.mark.slow
def test_a_real_dry_run(tmp_path, monkeypatch, capsys):
    copy = checkout(tmp_path / "a checkout")
    monkeypatch.chdir(copy)
    for run in experiments.runs_of("experiments/precision.yaml", "ci"):
        folder = fake_runs.precision_run(copy / "results/generated/ci/precision/runs", run)
        (folder / "config.yaml").write_text(yaml.safe_dump(run.spec.resolved()))
    edit(copy / "experiments" / "precision.yaml", lambda d: d["tiers"]["ci"]["base"].update(lr=1e-3))
    assert main(["why", "--tier", "ci", "precision"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("tier ci: 6 run(s) and 3 table(s)")
    assert "precision: 6 runs: settings changed: lr 0.002 -> 0.001" in lines
    assert any(line.startswith("precision: tidy table, table, figure: not there yet") for line in lines)
    assert main(["why", "--tier", "ci", "no/such/file"]) == 2
    shown = capsys.readouterr()
    assert "No rule to produce no/such/file" in shown.err
    assert "SNAKEMAKE" not in shown.err
    assert shown.out == ""
