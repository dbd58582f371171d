"""The workflow itself: lint, dry runs of every tier, the smallest tier end to end, and what makes it run again."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from impl.harness.tiers import TIERS
from tests.workflow.checkouts import ROOT, checkout, edit, snakemake


@pytest.fixture
def copy(tmp_path) -> Path:
    """A checkout with nothing but the workflow, in a path with a space."""
    return checkout(tmp_path / "a checkout")


def planned(folder: Path, *options: str, **environment: str) -> dict[str, int]:
    """The jobs of a dry run: rule to number."""
    output = snakemake(folder, "--dryrun", *options, **environment)
    if "Nothing to be done" in output:
        return {}
    table = output.rpartition("Job stats:")[2].partition("\n\n")[0]
    return {name: int(count) for name, count in re.findall(r"^(\w+) +(\d+)$", table, re.MULTILINE)}


def shuffle(data: Any, seed: int) -> Any:
    if isinstance(data, dict):
        items = [(key, shuffle(value, seed)) for key, value in data.items()]
        random.Random(seed).shuffle(items)
        return dict(items)
    return [shuffle(value, seed) for value in data] if isinstance(data, list) else data


def small(experiment: dict[str, Any], **base: Any) -> None:
    """Cut an experiment's ci tier down to two systems on one rank."""
    names = [system["id"] for system in experiment["systems"] if system["id"] not in ("sc", "canzona")]
    experiment["tiers"]["ci"]["meshes"] = [{"dp": 1, "tp": 1, "without": names}]
    experiment["tiers"]["ci"].setdefault("base", {}).update({"layers": 1, **base})


def test_lint_and_format():
    assert "good condition" in snakemake(ROOT, "--lint")
    command = [sys.executable, "-m", "snakefmt", "--check", "Snakefile", "workflows"]
    assert subprocess.run(command, cwd=ROOT, capture_output=True).returncode == 0


@pytest.mark.parametrize("tier", TIERS)
def test_dry_run_of_every_tier(copy, tier):
    jobs = planned(copy, "--config", f"tier={tier}")
    assert jobs["table"] == jobs["figure"] == 9
    assert jobs["project"] == 3
    assert jobs["plan_balance"] == jobs["claims"] == jobs["ledger"] == 1
    full = planned(copy, "--config", f"tier={tier}", "--", "full")
    assert full["measure_kernels"] == full["replay_ranks"] == full["validate"] == full["claims"] == 1
    assert full["table"] == full["figure"] == 19


def test_named_targets(copy):
    assert set(planned(copy, "--", "balance")) == {"plan_balance", "table", "figure", "balance", "total"}
    assert "time_steps" not in planned(copy, "--", "precision")
    assert "train" not in planned(copy, "--", "step_time")
    assert set(planned(copy, "--config", "tier=ci", "--", "sweep")) == {
        *("pipeline", "tidy", "table", "figure", "sweep", "total")
    }


def test_experiments_share_pipeline_runs(copy):
    staleness, rotation, both = (
        planned(copy, "--", *names)["pipeline"] for names in (["staleness"], ["rotation"], ["staleness", "rotation"])
    )
    assert both == staleness + rotation - 6  # AdamW, P = 1 and 8, three seeds


def test_full_is_more_than_the_default(copy):
    default, full = planned(copy), planned(copy, "--", "full")
    assert full["table"] > default["table"]
    assert full["pipeline"] > 3 * default["pipeline"]


def test_timed_jobs_hold_every_core(copy):
    output = snakemake(copy, "--dryrun", "--config", "tier=laptop", "--", "step_time")
    blocks = [block for block in output.split("\n\n") if "rule time_steps:" in block] or [output]
    assert len(re.findall(r"rule time_steps:.*?threads: 2\b", "\n".join(blocks), re.DOTALL)) >= 1
    assert output.count("rule time_steps:") == output.count("threads: 2")


def test_bad_configuration_is_one_clear_line(copy):
    assert "unknown tier 'labtop': did you mean 'laptop'?" in snakemake(
        copy, "--dryrun", "--config", "tier=labtop", check=False
    )
    edit(copy / "experiments" / "precision.yaml", lambda d: d["base"].update(optimiser="muon"))
    output = snakemake(copy, "--dryrun", check=False)
    assert "precision.yaml: unknown setting 'optimiser': did you mean 'optimizer'?" in output.replace("\n", " ")
    assert "Traceback" not in output


def made(folder: Path) -> Path:
    """Make the smallest tier in ``folder``: copied from this checkout if it is complete here, as in CI, else run."""
    shutil.copytree(
        ROOT / "paper_figures", folder / "paper_figures", ignore=shutil.ignore_patterns("out", "__pycache__")
    )
    here = ROOT / "results" / "generated" / "ci"
    if here.exists() and (ROOT / ".snakemake").exists() and planned(ROOT, "--nolock", "--config", "tier=ci") == {}:
        shutil.copytree(here, folder / "results" / "generated" / "ci", symlinks=True)
        for ledger in (ROOT / "results").glob("claims.*"):
            shutil.copy2(ledger, folder / "results")
        shutil.copytree(ROOT / ".snakemake", folder / ".snakemake", ignore=shutil.ignore_patterns("log", "locks"))
    else:
        assert "(100%) done" in snakemake(folder, "--config", "tier=ci")
    return folder


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_smallest_tier_end_to_end_and_what_runs_again(copy):
    tier = ("--config", "tier=ci")
    made(copy)
    results = copy / "results" / "generated" / "ci"
    manifests = [json.loads(path.read_text()) for path in results.rglob("manifest.json")]
    assert len(manifests) == 17
    assert {m["status"] for m in manifests} == {"done"}
    for name in ("balance", "step_time", "precision", "generality", "staleness", "rotation"):
        sizes = {path.suffix: path.stat().st_size for path in (results / name).glob(f"{name}.*")}
        assert set(sizes) == {".parquet", ".csv", ".md", ".html", ".tex", ".pdf", ".png"}
        assert min(sizes.values()) > 500
        frame = pd.read_parquet(results / name / f"{name}.parquet")
        assert set(frame["kind"]) == {"planned" if name == "balance" else "measured"}
    precision = pd.read_parquet(results / "precision" / "precision.parquet")
    assert precision.groupby("tp")["params_digest"].nunique().eq(1).all()  # DP = 2: bitwise equal systems
    measured = pd.read_parquet(results / "step_time" / "step_time.parquet")
    family = pd.read_parquet(results / "generality" / "generality.parquet")
    assert family["optimizer"].nunique() == 5
    assert family.groupby("optimizer")["params_digest"].nunique().eq(1).all()
    in_step = measured.query("quantity == 'bytes' and phase == 'optimizer_step' and axis == 'dp'")["value"]
    assert in_step.sum() == 0

    assert planned(copy, *tier) == {}
    for seed in range(2):
        for path in (copy / "experiments").glob("*.yaml"):
            data = yaml.safe_load(path.read_text())
            path.write_text(yaml.safe_dump(shuffle(data, seed), sort_keys=False))
        assert planned(copy, *tier, PYTHONHASHSEED=str(seed)) == {}
    assert planned(copy, *tier, "--cores", "1") == {}

    claims = pd.read_parquet(results / "claims" / "claims.parquet")
    assert {"reproduced", "same direction", "not testable here"} <= set(claims["verdict"])
    assert "](generated/ci/" in (copy / "results" / "claims.md").read_text()

    look = copy / "paper_figures" / "style.py"
    look.write_text(look.read_text().replace('"font.size": 8', '"font.size": 9'))
    redrawn = planned(copy, *tier)
    assert redrawn == {"figure": 9, "claims": 1, "ledger": 1, "all": 1, "total": 12}
    shutil.copy2(ROOT / "paper_figures" / "style.py", look)
    assert planned(copy, *tier) == {}

    (lost,) = (results / "pipelines" / "runs").glob("pipedream-p1-*")
    (lost / "ended").rename(lost / "kept")  # its tables are there, and yet it is asked for
    assert planned(copy, *tier)["pipeline"] == 1
    (lost / "kept").rename(lost / "ended")

    edit(copy / "experiments" / "precision.yaml", lambda d: d["tiers"]["ci"]["base"].update(lr=1e-3))
    assert planned(copy, *tier) == {
        "train": 6, "tidy": 1, "table": 1, "figure": 1, "claims": 1, "ledger": 1, "all": 1, "total": 12
    }  # fmt: skip
    edit(copy / "experiments" / "balance.yaml", lambda d: d["tiers"]["ci"].update(alpha=[1.0]))
    assert set(planned(copy, *tier, "--", "balance")) == {"plan_balance", "table", "figure", "balance", "total"}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_diverged_run_still_gives_table_and_figure(copy):
    edit(copy / "experiments" / "precision.yaml", lambda d: small(d, lr=1e30, steps=8))
    snakemake(copy, "--config", "tier=ci", "--", "precision")
    results = copy / "results" / "generated" / "ci" / "precision"
    statuses = {json.loads(path.read_text())["status"] for path in results.rglob("manifest.json")}
    assert statuses == {"diverged"}
    assert "0/1 |  diverged |" in re.sub(" +", " ", (results / "precision.md").read_text()).replace("| d", "|  d")
    assert (results / "precision.png").stat().st_size > 1000
    assert planned(copy, "--config", "tier=ci", "--", "precision") == {}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_refused_run_stops_its_branch_and_no_other(copy):
    edit(copy / "experiments" / "precision.yaml", lambda d: small(d, data={"source": "no/such/file.txt"}))
    output = snakemake(copy, "--config", "tier=ci", "--keep-going", "--", "precision", "balance", check=False)
    assert "no/such/file.txt" in output
    results = copy / "results" / "generated" / "ci"
    assert (results / "balance" / "balance.md").exists()
    assert not (results / "precision" / "precision.md").exists()
