"""What the workflow would make again and why, from what a dry run of Snakemake prints, in plain words."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from impl.errors import ConfigError
from impl.harness.record import differences
from impl.harness.run import Run
from impl.harness.run_state import ACTIVE, read_state
from impl.harness.spec import load_yaml

REASONS = {
    "forced": "Forced execution",
    "always": "Rules with",
    "missing": "Missing output files",
    "incomplete": "Incomplete output files",
    "newer": "Updated input files",
    "follows": "Input files updated by another job",
    "pipe": "Output file is a pipe",
    "service": "Job provides a service",
    "inputs": "Set of input files has changed",
    "code": "Code has changed",
    "params": "Params have changed",
    "software": "Software environment definition has changed",
}
"""How each of Snakemake's reasons begins (its class ``Reason``), by our name for it."""
_SPLIT = re.compile("; (?=" + "|".join(map(re.escape, REASONS.values())) + ")")
_PRODUCT = re.compile(r"^results/generated/[^/]+/(?P<place>[^/]+)/(?P<rest>.+)$")
TABLES = (".md", ".html", ".tex")
FIGURES = (".pdf", ".png", ".svg")
KINDS = ("run", "settings", "tidy table", "table", "figure")
SHARED = "pipelines"
"""The folder of runs that experiments share."""


@dataclass(frozen=True)
class Job:
    """A job of a dry run.

    reasons: Snakemake's, by our names of :data:`REASONS`, each with what follows the colon; ``other`` is one that has
        no name here, and then the whole text.
    """

    rule: str
    outputs: tuple[str, ...]
    reasons: Mapping[str, str]


@dataclass(frozen=True)
class Thing:
    """What a job makes, as a reader sees it.

    place: the experiment, or :data:`SHARED`, or the rule for what belongs to no experiment.
    kind: ``run``, ``settings``, ``tidy table``, ``table``, ``figure`` or the name of the file.  run: its id, for runs.
    """

    place: str
    kind: str
    run: str = ""


def parse(output: str) -> list[Job]:
    """Return the jobs that a dry run printed, without those that make no file."""
    jobs: dict[tuple[str, tuple[str, ...]], Job] = {}
    for block in re.split(r"^(?=(?:local)?(?:rule|checkpoint) \w+:$)", output, flags=re.MULTILINE)[1:]:
        rule = re.match(r"(?:local)?(?:rule|checkpoint) (\w+):", block)
        fields = dict(re.findall(r"^    (\w+): (.*)$", block.partition("\n[")[0], re.MULTILINE))
        if rule is None or "output" not in fields:
            continue
        job = Job(rule[1], tuple(fields["output"].split(", ")), split_reasons(fields.get("reason", "")))
        jobs[job.rule, job.outputs] = job
    return list(jobs.values())


def split_reasons(text: str) -> dict[str, str]:
    """Return Snakemake's text of reasons by our names, each with its detail."""
    found: dict[str, str] = {}
    for part in _SPLIT.split(text.strip()):
        name = next((name for name, start in REASONS.items() if part.startswith(start)), "other")
        found[name] = part if name == "other" else part.partition(": ")[2].strip()
    return found


def thing(job: Job) -> Thing:
    """Return what ``job`` makes."""
    found = _PRODUCT.match(job.outputs[0])
    if found is None:
        return Thing(job.rule, Path(job.outputs[0]).name)
    place, rest = found["place"], found["rest"]
    if run := re.fullmatch(r"runs/([^/]+)/ended", rest):
        return Thing(place, "run", run[1])
    if settings := re.fullmatch(r"configs/([^/]+)\.yaml", rest):
        return Thing(place, "settings", settings[1])
    if Path(rest).stem == place:
        for kind, endings in (("tidy table", (".parquet", ".csv")), ("table", TABLES), ("figure", FIGURES)):
            if rest.endswith(endings):
                return Thing(place, kind)
    return Thing(place, rest)


class Explainer:
    """Says why jobs would run, with the runs of the tier's experiments (``runs``) and what is in ``results``."""

    def __init__(self, runs: Mapping[str, Sequence[Run]], results: Path) -> None:
        self._results = results
        self._asking: dict[str, list[str]] = defaultdict(list)
        self._runs: dict[str, Run] = {}
        for experiment, found in runs.items():
            for run in found:
                self._runs[run.id] = run
                if experiment not in self._asking[run.id]:
                    self._asking[run.id].append(experiment)

    def lines(self, jobs: Iterable[Job]) -> list[str]:
        """Return one line per experiment and cause, with what is made for it, experiments in alphabetic order."""
        things = [(thing(job), job) for job in jobs]
        remade = {made.run for made, _ in things if made.kind == "run"}
        places = {made.place for made, _ in things}
        grouped: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
        for made, job in sorted(things, key=lambda item: KINDS.index(item[0].kind) if item[0].kind in KINDS else 9):
            if made.kind == "settings" and made.run in remade:
                continue  # said with the run
            owner = self._owner(made, places) if made.place == SHARED else made.place
            cause = self._run_cause(made, job) if made.kind == "run" else file_cause(made, job)
            grouped[owner, cause][made.kind] += 1
        lines = [f"{owner}: {_counted(found)}: {cause}" for (owner, cause), found in grouped.items()]
        return sorted(lines, key=lambda line: line.partition(":")[0])  # stable: runs before tables and figures

    def _owner(self, made: Thing, places: set[str]) -> str:
        """Return the experiments that ask for a shared run, of those that are made now if there are any."""
        asking = self._asking.get(made.run, [])
        return ", ".join([name for name in asking if name in places] or asking) or made.place

    def _run_cause(self, made: Thing, job: Job) -> str:
        folder, reasons = self._results / made.place / "runs" / made.run, job.reasons
        run = self._runs.get(made.run)
        if run is not None and not (folder / "manifest.json").exists():
            state = read_state(run, folder)
            if state.name in ACTIVE:
                return f"{state.name} now ({state.detail})"
            if (folder / "config.yaml").exists():
                return "not finished: goes on from its last checkpoint, if it has one"
            changed = self.changed(run, folder)
            return f"settings changed: {changed}" if changed else "never made"
        if "incomplete" in reasons:
            return "the job was killed while it ran: goes on from its last checkpoint, if it has one"
        if "code" in reasons or "params" in reasons or "software" in reasons:
            return f"{changes(reasons, made)}; a run that is done or diverged stays as it is and is only looked at"
        if "missing" in reasons:
            return "its record is not there"
        return "it is looked at again; a run that is done or diverged stays as it is"

    def changed(self, run: Run, folder: Path) -> str:
        """Return what differs from the most similar run of the same name that nobody asks for any more; else empty."""
        found: list[list[str]] = []
        for old in sorted(folder.parent.glob(f"{run.name}-{'[0-9a-f]' * 8}")):
            if old.name in self._runs or not (old / "config.yaml").exists():
                continue
            try:
                settings = load_yaml(old / "config.yaml")
            except ConfigError:
                continue
            if isinstance(settings, dict):
                found.append(list(differences(settings, run.spec.resolved())))
        return ", ".join(min(found, key=len)) if found else ""


def file_cause(made: Thing, job: Job) -> str:
    """Return why a file would be made again."""
    reasons = job.reasons
    if reasons.keys() & {"code", "params", "inputs", "software"}:
        return changes(reasons, made)
    if "incomplete" in reasons:
        return "the job that wrote it was killed: it may be half-written"
    if "newer" in reasons:
        return f"older than {_short(reasons['newer'])}"
    if "missing" in reasons:
        return "not there yet"
    if "follows" in reasons:
        before = "runs that it is made of are" if made.kind == "tidy table" else "what it is made of is"
        return f"because {'its tidy table is' if made.kind in ('table', 'figure') else before} made"
    if "forced" in reasons:
        return "asked for by force"
    return reasons.get("other") or "always made"


def changes(reasons: Mapping[str, str], made: Thing) -> str:
    """Return what has changed since something was made, of its rule, settings, inputs and software."""
    said = []
    if "code" in reasons:
        said.append("the command of its rule changed (workflows/rules)")
    if "params" in reasons:
        if made.kind == "run":
            said.append("the options that its rule gives to the command changed (workflows/rules)")
        elif made.kind in ("table", "figure") or made.place == "claims":
            said.append("the code that draws it changed (paper_figures)")
        else:
            said.append(f"the settings in experiments/{made.place}.yaml changed, or a file that they name")
    if "inputs" in reasons:
        said.append("it is made of other files than before: runs came or went")
    if "software" in reasons:
        said.append("the list of software changed (workflows/envs)")
    return "; ".join(said)


def _counted(found: Mapping[str, int]) -> str:
    names = {"run": "run", "settings": "settings file"}
    return ", ".join(
        f"{count} {names[kind]}{'s' if count > 1 else ''}" if kind in names else kind for kind, count in found.items()
    )


def _short(files: str) -> str:
    names = files.split(", ")
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
