"""A new system, and a new pipeline method, is one module and some lines: those of docs/adding-a-baseline.md."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from impl.harness import balance_spec, projection_spec
from impl.harness.experiments import all_runs
from tests.workflow.checkouts import ROOT, checkout, environment
from tests.workflow.documents import added_lines, files

PAGE = ROOT / "docs" / "adding-a-baseline.md"
MODULES = {"baselines/round_robin.py", "baselines/pipeline/gap_aware.py"}
SYSTEMS = {f"experiments/{name}.yaml" for name in ("precision", "step_time", "balance", "projection")}
SMALL = ("--model=qwen3-tiny", "--layers=2", "--set=eval_every=0")

pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    """The project with the modules and lines of the page."""
    folder = checkout(tmp_path_factory.mktemp("baseline") / "project", "impl", "baselines", "paper_figures")
    for name, text in files(PAGE).items():
        (folder / name).write_text(text)
    for name, lines in added_lines(PAGE):
        path = folder / name
        above = "methods:\n" if "method:" in lines else "systems:\n"
        assert path.read_text().count(f"\n{above}") == 1, f"{name} has no {above}"
        path.write_text(path.read_text().replace(f"\n{above}", f"\n{above}{lines}"))
    return folder


def run(project: Path, *words: str) -> str:
    """Run ``python -m ...`` of the copy; return what it printed on standard output."""
    more = {"PYTHONPATH": str(project), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", *words]
    done = subprocess.run(command, cwd=project, env=environment(**more), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_page_shows_two_modules_and_their_lines():
    assert set(files(PAGE)) == MODULES
    assert {path for path, _ in added_lines(PAGE)} == SYSTEMS | {"experiments/rotation.yaml"}


def test_the_system_is_planned_and_projected(project):
    words = ("--model=qwen3-32b", "--tp=8", "--dp=32", "--strategy=round-robin", "--json")
    plan = json.loads(run(project, "impl", "plan", *words))
    assert plan["flops_ratio"] == 1.0
    assert plan["per_gpu_flops_ratio"] == 8.0  # all TP ranks repeat the work
    assert json.loads(run(project, "impl", "project", *words, "--hardware=h100x256"))["iteration_s"]
    for kind in (balance_spec, projection_spec):
        name = kind.__name__.rpartition(".")[2].removesuffix("_spec")
        spec = kind.load(project / "experiments" / f"{name}.yaml")
        assert "round-robin" in [system.id for system in spec.systems]


def test_the_system_computes_what_synchronous_compute_does(project):
    found = {}
    for strategy in ("sc", "round-robin"):
        words = ("--dp=2", "--steps=3", f"--strategy={strategy}")
        run(project, "impl", "train", *SMALL, *words, f"--out={strategy}")
        found[strategy] = json.loads((project / strategy / "manifest.json").read_text())["result"]["params_digest"]
    assert found["round-robin"] == found["sc"]


def test_the_method_gives_the_same_in_the_simulator_and_from_processes(project):
    words = ("pipeline", *SMALL, "--steps=8", "--stages=2", "--json")
    gap_aware = (*words, "--method=gap-aware", "--set=decay=0.5")
    ways = ((*gap_aware, "--runtime=simulator"), (*gap_aware, "--runtime=processes"), (*words, "--method=pipedream"))
    here, apart, plain = (json.loads(run(project, "impl", *way)) for way in ways)
    assert here["status"] == apart["status"] == "done"
    assert here["params_digest"] == apart["params_digest"]
    assert here["params_digest"] != plain["params_digest"]


def test_the_tables_get_their_runs_and_others_keep_theirs(project):
    before, after = (runs(folder) for folder in (ROOT, project))
    added = {name: set(after[name]) - set(before[name]) for name in after}
    assert {name for name, found in added.items() if found} == {"precision", "step_time", "rotation"}
    assert all("round-robin" in run for run in added["precision"])
    assert all("gap-aware" in run for run in added["rotation"])
    assert all(set(before[name]) <= set(after[name]) for name in after if name != "step_time")


def runs(folder: Path) -> dict[str, list[str]]:
    """The ids of the runs of tier laptop, by experiment."""
    return {name: [run.id for run in found] for name, found in all_runs(folder / "experiments", "laptop").items()}
