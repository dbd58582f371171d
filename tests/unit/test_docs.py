"""README and docs: every command in a block runs, prints what the page says, and every link leads somewhere."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from impl.__main__ import commands
from tests.workflow.checkouts import ROOT, checkout, environment
from tests.workflow.documents import PAGES, Block, anchors, blocks, files, links, spans

PARTS = ("impl", "baselines", "paper_figures", "tests", "scripts", "docs", "Makefile", "README.md", "pyproject.toml")
QUICK = ("status", "why", "cost", "tables", "retry")
"""Targets of make whose commands are run; of all others `make -n` is."""
ELSEWHERE = {
    "git clone REPOSITORY ricercar",
    "cd ricercar",
    "source .venv/bin/activate",
    "sinfo -o %P %N %G %m %c",
    "squeue --me -o %i %T %M %r %k",
    "rsync -a CLUSTER:ricercar/results/report.html CLUSTER:ricercar/paper_figures/out .",
}
"""Commands that need another machine, word by word."""
STARTS = ("nohup", "srun")
"""What starts another command."""
PACKAGES = ("impl", "paper_figures")
SAID = {
    "another workflow makes ": "impl/harness/sweep_lock.py",
    "is in use by ": "impl/harness/record.py",
    ", which runs it": "impl/harness/record.py",
    "is in use by ranks of an earlier start: stop them first": "impl/harness/record.py",
    "cannot lock run folder": "impl/harness/record.py",
    "was killed by SIGKILL (by a user, or by the kernel when memory ran out)": "impl/harness/diagnosis.py",
    "was stopped (SIGSTOP or a debugger) and kept the others waiting": "impl/harness/diagnosis.py",
    " unreadable line(s)": "impl/harness/tidy.py",
    ": raise it in slurm/site.yaml or choose a smaller tier": "impl/harness/site.py",
}
"""Messages that a page quotes without a command that prints them, and where they are written."""
DRIVER = """
import io, json, os, subprocess, sys, tempfile
from impl.__main__ import main as impl
from paper_figures.__main__ import main as paper_figures
known, done = {"impl": impl, "paper_figures": paper_figures}, []
for words in json.load(open(sys.argv[1])):
    with tempfile.TemporaryFile() as out:
        sys.stdout.flush(); sys.stderr.flush()
        kept = os.dup(1), os.dup(2)
        os.dup2(out.fileno(), 1); os.dup2(out.fileno(), 2)
        try:
            code = known[words[0]](words[1:]) if words[0] in known else subprocess.run(words).returncode
        except SystemExit as error:
            code = error.code
        finally:
            sys.stdout.flush(); sys.stderr.flush()
            os.dup2(kept[0], 1); os.dup2(kept[1], 2)
        out.seek(0)
        done.append([code, out.read().decode(errors="replace")])
json.dump(done, open(sys.argv[2], "w"))
"""
"""Runs command lines one after the other in one process, which imports torch once."""


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    """A copy of the project with the modules that docs/adding-*.md show."""
    folder = checkout(tmp_path_factory.mktemp("docs") / "project", *PARTS)
    for page in PAGES:
        for name, text in files(page).items():
            (folder / name).write_text(text)
    return folder


@dataclass(frozen=True)
class Command:
    """What is run for a command of a page: words of the driver, or None where it was only looked at."""

    block: Block
    words: list[str] | None
    is_last: bool


def what_runs(words: tuple[str, ...], project: Path) -> list[str] | None:
    """The command line to run for ``words``, made short; fails for one that this test does not know."""
    if " ".join(words) in ELSEWHERE:
        return None
    if words[0] in STARTS:
        inner = next(i for i, word in enumerate(words[1:], 1) if word in ("make", "snakemake"))
        end = next((i for i, word in enumerate(words) if word in (">", "2>&1", "&")), len(words))
        return what_runs(words[inner:end], project)
    program = Path(words[0]).name
    if program == "make":
        return of_make(words[1:], project)
    if program == "snakemake":
        return [sys.executable, "-m", "snakemake", "--dryrun", "--quiet", "rules", *words[1:]]
    if words[0].startswith("scripts/"):
        assert (project / words[0]).exists(), words[0]
        return [words[0], *words[1:], "--dry-run"]
    if program == "python" and words[1] == "-c":
        return [sys.executable, *words[1:]]
    if program == "python" and words[1:3] == ("-m", "pytest"):
        assert all((project / word).exists() for word in words[3:] if word.startswith("tests"))
        rest = [word for word in words[3:] if word != "tests"]
        return [sys.executable, "-m", "pytest", "-q", "--collect-only", "tests/unit/test_optimizer_contract.py", *rest]
    if program == "python" and words[1] == "-m" and words[2] in PACKAGES:
        return shortened(list(words[2:]))
    raise AssertionError(f"{' '.join(words)}: this test does not know how to check it")


def of_make(words: tuple[str, ...], project: Path) -> list[str] | None:
    """The command behind a quick target, None for another one, of which it is enough that make would run it."""
    told = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}
    done = subprocess.run(["make", "-n", *words], cwd=project, env=told, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    if not words or words[0] not in QUICK:
        return None
    line = next(line for line in done.stdout.replace("\\\n", " ").splitlines() if " python -m " in line)
    found = line.partition(" python -m ")[2].replace('"', "").split()
    return found[: found.index("--watch")] if "--watch" in found else found


def shortened(words: list[str]) -> list[str]:
    """The same command of less work."""
    stages = int(words[words.index("--stages") + 1]) if "--stages" in words else 1
    steps = int(words[words.index("--steps") + 1]) if "--steps" in words else 20
    if words[1] in ("train", "pipeline") and steps > 12:
        resumed = any(word.startswith("resume_from") for word in words)
        words += [f"--layers={max(2, stages)}", f"--steps={6 if resumed else 4}", "--set=eval_every=0"]
        words += ["--set=checkpoint_every=2"] if any("checkpoint_every" in word for word in words) else []
    return [*words, "--layers=1", "--samples=1"] if words[1] == "replay" else words


def run(project: Path, name: str, lines: list[list[str]]) -> list[tuple[int, str]]:
    """Run command lines in a folder of their own with the project's parts; return exit codes and what was printed."""
    asked, done = project.parent / f"{name}.in.json", project.parent / f"{name}.out.json"
    asked.write_text(json.dumps(lines))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    more = {"PYTHONPATH": str(project), "PYTHONDONTWRITEBYTECODE": "1", "PATH": path}
    words = [sys.executable, "-c", DRIVER, str(asked), str(done)]
    ran = subprocess.run(words, cwd=project, env=environment(**more), capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr
    return [(code, text) for code, text in json.loads(done.read_text())]


def plain(text: str, project: Path) -> str:
    """A text without what differs from run to run: numbers, hashes, the folder, spaces."""
    text = text.replace(f"{project}/", "")
    text = re.sub(r"\b[0-9a-f]{8,}\b", "H", text)
    return re.sub(r"\s+", " ", re.sub(r"\d[\d.,]*(e[+-]?\d+)?", "N", text)).strip()


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_every_command_runs_and_prints_what_the_page_says(project):
    by_page = {
        page: [
            (block, number == len(block.commands) - 1, what_runs(words, project))
            for block in blocks(page)
            for number, words in enumerate(block.commands)
        ]
        for page in PAGES
    }
    assert sum(map(len, by_page.values())) > 40

    def check(page: Path) -> list[str]:
        found = by_page[page]
        results = iter(run(project, page.stem, [words for *_, words in found if words is not None]))
        wrong, printed = [], ""
        for block, is_last, words in found:
            code, text = next(results) if words is not None else (0, "")
            printed += text
            if code != (block.code if is_last else 0):
                wrong.append(f"{page.name}: {' '.join(words or [])} ended with {code}: {text[-800:]}")
            if is_last:
                ran = words is not None
                shown = plain(printed, project)
                lost = [line for line in block.printed if ran and plain(line, project) not in shown]
                wrong += [f"{page.name}: not printed any more: {line}\n{printed[-1500:]}" for line in lost]
                printed = ""
        return wrong

    with ThreadPoolExecutor(2) as pool:
        wrong = [line for lines in pool.map(check, PAGES) for line in lines]
    assert not wrong, "\n".join(wrong)


def test_an_unknown_command_is_not_passed_over(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```\nmake reproduce  # a comment\nfrobnicate --all\n```\n\n```text\nno command\n```\n")
    (block,) = blocks(page)
    assert block.commands == (("make", "reproduce"), ("frobnicate", "--all"))
    with pytest.raises(AssertionError, match="frobnicate --all: this test does not know"):
        what_runs(block.commands[1], ROOT)
    with pytest.raises(AssertionError, match="No rule to make target"):
        what_runs(("make", "unmake"), ROOT)


@cache
def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_targets_and_commands_exist(page):
    for file, anchor in links(page):
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), f"{page.name} links to {file}"
        assert not anchor or anchor in anchors(target), f"{page.name} links to {file}#{anchor}"
    named = {m for span in spans(page) for m in re.findall(r"^make ([a-z-]+)", span)}
    assert named <= make_targets(), f"{page.name} names {named - make_targets()}"
    known = commands()
    for span in spans(page):
        for command in re.findall(r"^(?:(?:\S*python )?-m )?impl ([a-z][a-z-]*)", span):
            assert command in known, f"{page.name} names the command {command}"
        for name in re.findall(r"^(?:docs|experiments|impl|baselines|tests|workflows|scripts)/[\w./-]+$", span):
            there = (ROOT / name).exists() or (name in files(page))
            assert there or re.search(r"[A-Z]{4}|normuon|/NAME", name), f"{page.name} names {name}"


def test_messages_that_a_page_quotes_are_ours():
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    for words, source in SAID.items():
        assert words in text, words
        code = re.sub(r'"\s*\n\s*f?"', "", (ROOT / source).read_text())  # a text over several lines
        assert words in re.sub(r"\{[^{}]*\}", "", code) or words in code, f"{source} does not say {words!r}"


def test_the_slurm_plugin_is_in_every_list_of_requirements():
    for name in ("pyproject.toml", "requirements-gpu.txt", "requirements-ci.txt"):
        assert "snakemake-executor-plugin-slurm" in (ROOT / name).read_text(), name


def test_the_site_file_that_is_shown_is_the_one_that_is_there():
    shown = re.findall(r"^```yaml\n(.*?)^```$", (ROOT / "docs" / "cluster.md").read_text(), re.MULTILINE | re.DOTALL)
    assert shown[0] in (ROOT / "slurm" / "site.yaml").read_text()
    assert all(line in (ROOT / "experiments/hardware/h100.yaml").read_text() for line in shown[1].splitlines()[1:])
