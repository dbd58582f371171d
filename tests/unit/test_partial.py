"""Tables of half-made sweeps, the files for a paper, and the ledger in other places."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pandas as pd
import pytest

from impl.errors import ConfigError
from impl.harness import experiments
from paper_figures import __main__ as figures
from paper_figures import ledger_document, paper_set, reference

ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT / "results" / "published"


@pytest.fixture
def folder(tmp_path) -> Path:
    """Experiments of which one is made of two runs."""
    path = tmp_path / "experiments"
    path.mkdir()
    shutil.copy(ROOT / "experiments" / "claims.yaml", path)
    text = (ROOT / "experiments" / "staleness.yaml").read_text()
    (path / "staleness.yaml").write_text(text)
    shutil.copytree(ROOT / "experiments" / "optimizers", path / "optimizers")
    for name in ("learning_rates.yaml",):
        shutil.copy(ROOT / "experiments" / name, path)
    return path


def write_run(place: Path, run: experiments.Run, loss: float) -> None:
    (place / run.id).mkdir(parents=True)
    rows = [{"event": "heldout", "step": step, "loss": loss - 0.01 * step} for step in (5, 10)]
    (place / run.id / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    manifest = {"status": "done", "result": {}, "config": run.spec.resolved(), "config_digest": run.spec.digest}
    (place / run.id / "manifest.json").write_text(json.dumps(manifest))


def test_what_is_there_becomes_tables_in_a_folder_of_its_own(tmp_path, folder):
    results = tmp_path / "results" / "ci"
    runs = experiments.all_runs(folder, "ci")["staleness"]
    assert len(runs) == 2
    place = results / "pipelines" / "runs"
    assert figures.write_incomplete(folder, "ci", results, PUBLISHED) == "no experiment is half made"
    assert not (results / "partial").exists()

    write_run(place, runs[0], 3.0)
    text = figures.write_incomplete(folder, "ci", results, PUBLISHED)
    assert "staleness: table and figure of 1 of 2 runs" in text
    made = results / "partial" / "staleness"
    assert {path.suffix for path in made.iterdir()} == {".parquet", ".csv", ".md", ".html", ".tex", ".pdf", ".png"}
    assert sorted(set(pd.read_parquet(made / "staleness.parquet")["status"])) == ["done", "missing"]
    assert not (results / "staleness").exists()  # there they would count as made
    assert (results / "partial" / "claims" / "claims.md").exists()
    assert os.readlink(results / "partial" / "pipelines") == "../pipelines"

    write_run(place, runs[1], 3.5)
    assert figures.write_incomplete(folder, "ci", results, PUBLISHED) == "no experiment is half made"
    assert not (results / "partial").exists()
    assert (place / runs[0].id / "manifest.json").exists()  # behind the link that was removed


def test_a_ledger_in_another_folder_leads_to_the_same_files(tmp_path, folder):
    results = tmp_path / "generated" / "ci"
    out = results / "claims" / "claims.md"
    command = ["claims", "--ledger", str(folder / "claims.yaml"), "--results", str(results), "--tier", "ci"]
    assert figures.main([*command, "--out", str(out)]) == 0
    out.write_text("[a table](../balance/balance.html)\n\n![picture](claims.png)\n")
    figures.move_claims(out, tmp_path / "claims.md")
    text = (tmp_path / "claims.md").read_text()
    assert text == "[a table](generated/ci/balance/balance.html)\n\n![picture](generated/ci/claims/claims.png)\n"
    assert "data:image/png;base64" in (tmp_path / "claims.html").read_text()


def test_the_first_page_of_the_report_has_every_claim(tmp_path, folder):
    out = tmp_path / "ci" / "claims" / "claims.md"
    command = ["claims", "--ledger", str(folder / "claims.yaml"), "--results", str(tmp_path / "ci"), "--tier", "ci"]
    assert figures.main([*command, "--out", str(out)]) == 0
    page = out.with_suffix(".rst").read_text()
    assert page.startswith(".. raw:: html\n\n   ")
    frame = pd.read_parquet(out.with_suffix(".parquet"))
    assert page.count("<tr>") == len(frame) + 1
    assert all(not line or line.startswith("   ") for line in page.splitlines()[1:])
    assert ledger_document.front(frame, "ci") == page


def test_files_for_a_paper_replace_nothing_else(tmp_path):
    results = tmp_path / "ci"
    (results / "balance").mkdir(parents=True)
    for suffix in (".pdf", ".tex", ".png"):
        (results / "balance" / f"balance{suffix}").write_text(suffix)
    out = tmp_path / "out"
    paper_set.gather(results, out)
    assert sorted(path.name for path in out.iterdir()) == ["README.tex", "balance.pdf", "balance.tex"]
    (results / "balance" / "balance.tex").unlink()
    paper_set.gather(results, out)
    assert sorted(path.name for path in out.iterdir()) == ["README.tex", "balance.pdf"]
    with pytest.raises(ConfigError, match="holds other files"):
        paper_set.gather(results, results / "balance")
    with pytest.raises(ConfigError, match="run `make reproduce` first"):
        paper_set.gather(tmp_path / "nothing", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_reference_run_puts_its_claims_into_the_readme(tmp_path, folder):
    results, out, readme = tmp_path / "laptop", tmp_path / "kept", tmp_path / "README.md"
    out.mkdir()
    command = ["claims", "--ledger", str(folder / "claims.yaml"), "--results", str(results), "--tier", "laptop"]
    assert figures.main([*command, "--out", str(results / "claims" / "claims.md")]) == 0
    readme.write_text("before\n")
    with pytest.raises(ConfigError, match="write the lines"):
        reference.keep(results, out, readme)
    readme.write_text(f"before\n{reference.BEGIN}\nold\n{reference.END}\nafter\n")
    for _ in range(2):
        reference.keep(results, out, readme)
    text = readme.read_text()
    assert text.startswith("before\n")
    assert text.endswith(f"{reference.END}\nafter\n")
    assert "**52 not testable here**" in text
    assert "old" not in text
    assert {path.name for path in out.iterdir()} == {"claims.md", "claims.png", "claims.csv"}


def test_the_readme_shows_the_committed_reference_run():
    """Its claims are those of results/laptop, not edited by hand."""
    frame = pd.read_csv(ROOT / "results" / "laptop" / "claims.csv")
    readme = (ROOT / "README.md").read_text()
    assert reference.with_head(readme, frame, ROOT / "README.md") == readme
