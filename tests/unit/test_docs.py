"""README and docs: every command in a block runs, prints what the page says, and every link leads somewhere."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from impl.__main__ import commands
from tests.workflow.checkouts import ROOT, checkout, environment
from tests.workflow.checkouts import command as snakemake
from tests.workflow.documents import PAGES, anchors, blocks, files, links, spans

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
import json, os, subprocess, sys, tempfile
from impl.__main__ import main as impl
from impl.harness import launch
from paper_figures.__main__ import main as paper_figures

class Started(BaseException):
    pass

def execute(target, spec, out, *, ranks, **more):
    if ranks > 1:
        raise Started
    return of_one(target, spec, out, ranks=ranks, **more)

of_one, launch.execute = launch.execute, execute
known, done = {"impl": impl, "paper_figures": paper_figures}, []
for words in json.load(open(sys.argv[1])):
    with tempfile.TemporaryFile() as out:
        kept = os.dup(1), os.dup(2)
        os.dup2(out.fileno(), 1); os.dup2(out.fileno(), 2)
        try:
            code = known[words[0]](words[1:]) if words[0] in known else subprocess.run(words).returncode
        except Started:
            code = 0
        finally:
            sys.stdout.flush(); sys.stderr.flush()
            os.dup2(kept[0], 1); os.dup2(kept[1], 2)
        out.seek(0)
        done.append([code, out.read().decode(errors="replace")])
json.dump(done, open(sys.argv[2], "w"))
"""
"""Runs command lines one after the other in one process, which imports torch once.

Of several ranks only that they would be started: tests/distributed and tests/workflow start some.
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    """A copy of the project with the modules that docs/adding-*.md show."""
    folder = checkout(tmp_path_factory.mktemp("docs") / "project", *PARTS)
    for page in PAGES:
        for name, text in files(page).items():
            (folder / name).write_text(text)
    return folder


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
        return None  # a dry run of all of them: test_snakemake_plans_what_pages_ask_for
    if words[0].startswith("scripts/"):
        assert (project / words[0]).exists(), words[0]
        return [words[0], *words[1:], "--dry-run"]
    if program == "python" and words[1] == "-c":
        return [sys.executable, *words[1:]]
    if program == "python" and words[1:3] == ("-m", "pytest"):
        assert all((project / word).exists() for word in words[3:] if word.startswith("tests"))
        return None  # test_new_optimizer runs it
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
        resumed = any(word.startswith("resume_from=") for word in words)
        words += [f"--layers={max(2, stages)}", f"--steps={6 if resumed else 4}", "--set=eval_every=0"]
        words += ["--set=checkpoint_every=2", "--dp=1"] if "checkpoint_every=20" in words else []  # one that is there
    return [*words, "rotation"] if words[1] == "cost" and "generality" not in words else words


def run(project: Path, lines: list[list[str]]) -> list[tuple[int, str]]:
    """Run command lines in the project's folder; return exit codes and what was printed."""
    asked, done = project.parent / "asked.json", project.parent / "done.json"
    asked.write_text(json.dumps(lines))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    more = {"PYTHONPATH": str(project), "PYTHONDONTWRITEBYTECODE": "1", "PATH": path}
    words = [sys.executable, "-c", DRIVER, str(asked), str(done)]
    ran = subprocess.run(words, cwd=project, env=environment(**more), capture_output=True, text=True, timeout=280)
    assert ran.returncode == 0, ran.stderr
    return [(code, text) for code, text in json.loads(done.read_text())]


def plain(text: str, project: Path) -> str:
    """A text without what differs from run to run: numbers, hashes, the folder, spaces."""
    text = text.replace(f"{project}/", "")
    text = re.sub(r"\b[0-9a-f]{8,}\b", "H", text)
    return re.sub(r"\s+", " ", re.sub(r"\d+([.,]\d+)*(e[+-]?\d+)?", "N", text)).strip()


def not_printed(promised: tuple[str, ...], printed: str, project: Path) -> list[str]:
    """The lines of a page that are not among what was printed."""
    shown = plain(printed, project)
    return [line for line in promised if plain(line, project) not in shown]


def test_only_what_differs_from_run_to_run_may_differ(tmp_path):
    printed = f"done: 4 steps, loss 5.53, parameters 735c0b974e16; record in {tmp_path}/run/manifest.json\n"
    same = "done: 8 steps,  loss 1e-3, parameters 0123456789ab; record in run/manifest.json"
    assert not_printed((same,), printed, tmp_path) == []
    assert not_printed((same.replace("loss", "lost"),), printed, tmp_path)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_every_command_runs_and_prints_what_the_page_says(project):
    found = [
        (block, number, what_runs(words, project))
        for page in PAGES
        for block in blocks(page)
        for number, words in enumerate(block.commands, 1)
    ]
    assert len(found) > 40
    results, printed, wrong = iter(run(project, [words for *_, words in found if words is not None])), "", []
    for block, number, words in found:
        code, text = next(results) if words is not None else (0, "")
        is_last, printed = number == len(block.commands), printed + text
        if words is not None and code != (block.code if is_last else 0):
            wrong.append(f"{block.page.name}: {' '.join(words)} ended with {code}: {text[-800:]}")
        if is_last:
            lost = not_printed(block.printed, printed, project) if words is not None else []
            wrong += [f"{block.page.name}: not printed any more: {line}\n{printed[-1500:]}" for line in lost]
            printed = ""
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
def test_snakemake_plans_what_pages_ask_for(project):
    asked: dict[tuple[str, ...], list[str]] = {}
    for words in (words for page in PAGES for block in blocks(page) for words in block.commands):
        if Path(words[0]).name in (*STARTS, "snakemake"):
            inner = words[next((i for i, word in enumerate(words) if Path(word).name == "snakemake"), len(words)) :]
            options, targets = options_of(inner[1:])
            asked.setdefault(options, []).extend(targets)
    asked.pop((), None)
    assert ("--profile", "slurm") in asked
    for options, targets in asked.items():
        more = ["--dryrun", "--quiet", "rules", "--", *dict.fromkeys(targets)]
        done = subprocess.run(
            snakemake(*options, *more), cwd=project, env=environment(), capture_output=True, text=True
        )
        assert done.returncode == 0, f"snakemake {' '.join(options)}: {done.stdout}{done.stderr}"


def options_of(words: tuple[str, ...]) -> tuple[tuple[str, ...], list[str]]:
    """Options, and targets behind them, of a command line of snakemake; --dryrun is always given."""
    end = next((i for i, word in enumerate(words) if word in (">", "2>&1", "&")), len(words))
    options = [word for word in words[:end] if word not in ("--dryrun", "--")]
    targets = []
    while options and re.fullmatch("[a-z_]+", options[-1]) and options[-2:-1] not in (["--cores"], ["--profile"]):
        targets.insert(0, options.pop())
    return tuple(options), targets


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
