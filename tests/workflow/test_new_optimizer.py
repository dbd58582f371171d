"""A new optimizer is one module and one YAML file: those of docs/adding-an-optimizer.md, in a copy of the project."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest

ROOT = Path(__file__).parents[2]
PARTS = (
    *("Snakefile", "workflows", "experiments", "results/published", "impl", "baselines", "paper_figures", "tests"),
    *("docs", "pyproject.toml"),
)
ADDED = {"impl/optimizers/normuon.py", "experiments/optimizers/normuon.yaml"}
JUNK = shutil.ignore_patterns("__pycache__", ".snakemake", ".pytest_cache")

pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.timeout(900)]


def files_of_the_document() -> dict[str, str]:
    """Every file that the document shows in full, by its path."""
    text = (ROOT / "docs" / "adding-an-optimizer.md").read_text()
    return dict(re.findall(r"^`([\w./-]+)`\n\n```\w+\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file of the project, by its path."""
    found = (path for part in PARTS for path in [folder / part, *(folder / part).rglob("*")] if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in found}


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Iterator[Path]:
    """The project with the two files; afterwards nothing else may have changed."""
    folder = tmp_path_factory.mktemp("project")
    for part in PARTS:
        source, target = ROOT / part, folder / part
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, target, ignore=JUNK) if source.is_dir() else shutil.copy(source, target)
    before = digests(folder)
    for name, text in files_of_the_document().items():
        (folder / name).write_text(text)
    yield folder
    after = digests(folder)
    assert {name for name in after if after[name] != before.get(name)} == ADDED
    assert set(before) <= set(after)


def run(project: Path, *words: str, code: int = 0) -> str:
    """Run ``python -m ...`` of the copy; return what it printed on standard output."""
    environment = {**os.environ, "PYTHONPATH": str(project), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", *words]
    done = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, timeout=840)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def test_the_document_shows_two_files():
    assert set(files_of_the_document()) == ADDED


def test_it_is_listed_planned_and_keeps_the_contract(project):
    listed = json.loads(run(project, "impl", "optimizers", "normuon", "--json", "--shape", "6x4"))["normuon"]
    assert listed["display_name"] == "NorMuon"
    assert [h["name"] for h in listed["hyper_parameters"]] == ["momentum", "beta2", "eps", "ns_steps", "ns_dtype"]
    assert all(h["description"] for h in listed["hyper_parameters"])
    assert listed["shapes"]["6x4"]["state_bytes"] == 4 * (24 + 6)
    plan = json.loads(run(project, "impl", "plan", "--model", "qwen3-tiny", "--dp=2", "--optimizer=normuon", "--json"))
    assert plan["optimizer"] == "normuon"
    assert plan["flops_ratio"] < 1.5
    tests = ("tests/unit/test_optimizer_contract.py", "tests/distributed/test_optimizer_family.py")
    shown = run(project, "pytest", "-q", *tests, "-k", "normuon")
    assert int(re.search(r"(\d+) passed", shown)[1]) > 20  # pyright: ignore[reportOptionalSubscript]
    run(project, "pytest", "-q", "tests/unit/test_optimizer_contract.py", "-k", "no-such-optimizer", code=5)


def test_every_system_computes_the_same_and_the_table_has_its_rows(project, tmp_path):
    """As the workflow does it: settings, job, tidy table, Markdown table and figure."""
    experiment = "experiments/generality.yaml"
    runs = json.loads(run_ids(project, "ci"))["generality"]
    (job,) = [name for name in runs if name.startswith("normuon-")]
    common = ["--experiment", experiment, "--tier", "ci"]
    found = ["--experiments", "experiments", "--tier", "ci", "--run", job]
    run(project, "impl", "configs", *found, "--out", str(tmp_path / "config.yaml"))
    folder = tmp_path / "runs" / job
    run(project, "impl", "step-time", "--config", str(tmp_path / "config.yaml"), "--out", str(folder))
    systems = json.loads((folder / "manifest.json").read_text())["result"]["systems"]
    assert set(systems) == {"sc", "nv-lpt-ns", "asc", "canzona"}
    assert len({facts["params_digest"] for facts in systems.values()}) == 1
    out = tmp_path / "generality.parquet"
    run(project, "impl", "tidy", *common, "--runs", str(tmp_path / "runs"), "--out", str(out))
    files = ["--in", str(out), "--published", "results/published/canzona.csv"]
    run(project, "paper_figures", "table", "generality", *files, "--out", str(tmp_path / "g.md"))
    run(project, "paper_figures", "figure", "generality", *files, "--out", str(tmp_path / "g.pdf"))
    rows = [line for line in (tmp_path / "g.md").read_text().splitlines() if line.startswith("| NorMuon")]
    others = [line for line in rows[:4] if " SC " not in line]
    assert len(others) == 3
    assert all(line.count(" equal |") == 2 for line in others)


def test_it_trains_and_runs_on_a_pipeline(project, tmp_path):
    small = ["--model=qwen3-tiny", "--layers=2", "--steps=4", "--set=eval_every=0"]
    run(project, "impl", "train", *small, "--optimizer=normuon", "--dp=2", "--out", str(tmp_path / "run"))
    result = json.loads((tmp_path / "run" / "manifest.json").read_text())["result"]
    assert {optimizer for _, optimizer, _ in result["routing"]} == {"normuon", "adamw"}
    words = ["pipeline", *small, "--method=normuon", "--stages=2", "--set=beta2=0.9", "--json"]
    assert json.loads(run(project, "impl", *words))["status"] == "done"
    assert json.loads(run(project, "impl", *words, "--set=lr_slope=0.1"))["status"] == "done"


def test_balance_has_its_rows(project, tmp_path):
    run(project, "impl", "balance", "--config=experiments/balance.yaml", "--tier=ci", "--out", str(tmp_path))
    plans = pd.read_parquet(tmp_path / "balance.parquet")
    assert len(plans[plans["optimizer"] == "normuon"]) == 2 * 6  # models x systems
    files = ["--in", str(tmp_path / "balance.parquet"), "--published", "results/published/canzona.csv"]
    run(project, "paper_figures", "table", "balance", *files, "--out", str(tmp_path / "b.md"))
    assert (tmp_path / "b.md").read_text().count("| normuon") == 12


def test_the_workflow_plans_its_runs_and_only_those(project):
    for tier in ("ci", "laptop"):
        known, new = (json.loads(run_ids(where, tier)) for where in (ROOT, project))
        added = {name: [run for run in runs if run not in known[name]] for name, runs in new.items()}
        assert all(set(known[name]) <= set(runs) for name, runs in new.items())
        assert {name for name, runs in added.items() if runs} >= {"step_time", "precision", "generality"}
        assert all("normuon" in run for runs in added.values() for run in runs)
    assert len(added["rotation"]) == 3  # P = 8, three seeds
    shown = run(project, "snakemake", "--dryrun", "--cores=2", "--workflow-profile=none", "--", "all")
    jobs = set(re.findall(r"runs/(normuon-[\w-]+)/ended", shown))
    assert jobs == {run for name in ("step_time", "precision", "generality", "rotation") for run in added[name]}


def run_ids(where: Path, tier: str) -> str:
    """The ids of every experiment's runs, as JSON."""
    code = "import json, sys; from impl.harness.experiments import all_runs; " + (
        "print(json.dumps({k: [r.id for r in v] for k, v in all_runs('experiments', sys.argv[1]).items()}))"
    )
    environment = {**os.environ, "PYTHONPATH": str(where), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, tier], cwd=where, env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout
