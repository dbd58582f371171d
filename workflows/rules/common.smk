# What the rules share: the tier, the experiments as data, and the paths and resources that follow from them.
import hashlib
import os
import shlex
import sys
from pathlib import Path

from snakemake.exceptions import WorkflowError

from impl.errors import ConfigError
from impl.harness import experiments, projection_inputs, site, sweep_lock, tiers, validation_spec
from impl.harness.spec import load_yaml

# Jobs run in the environment that runs snakemake, also where it was not activated.
shell.prefix(f"set -euo pipefail; export PATH={shlex.quote(os.path.dirname(sys.executable))}:$PATH; ")

EXPERIMENTS = os.path.relpath(os.path.join(workflow.basedir, "experiments"))
PUBLISHED = os.path.relpath(os.path.join(workflow.basedir, "results", "published"))
START = shlex.quote(os.path.relpath(os.path.join(workflow.basedir, "workflows", "scripts", "start.sh")))

try:
    SETTINGS = site.settings(config)
except ConfigError as error:
    raise WorkflowError(str(error)) from None

TIER = SETTINGS.tier
CONFIGURE = f"python -m impl configs --experiments {shlex.quote(EXPERIMENTS)} --tier {TIER}"
RESULTS = f"results/generated/{TIER}"
HERE = "results/generated/{tier}/{experiment}"
# Runs of pipelines are named by their settings alone, so that experiments share them.
SHARED = "results/generated/{tier}/pipelines"
RENDERED = [f"{HERE}/{{experiment}}{suffix}" for suffix in (".parquet", ".csv", ".md", ".html", ".tex", ".pdf", ".png")]

# What `all` makes, and what takes hours on two cores: sweeps, deep pipelines, ablations.
PROJECTED = ("projection", "scaling", "pipeline_projection")
DEFAULT = ("balance", "step_time", "precision", "generality", "staleness", "rotation", *PROJECTED)
DEEP = ("sweep", "sweep_full", "rotation_full", "rotation_ablation", "no_stash", "stage_aware", "pipeline_time")
FULL = (*DEFAULT, *DEEP, "llama", "hessian", "validation")

try:
    RUNS = experiments.all_runs(EXPERIMENTS, TIER)
    BALANCE = experiments.settings_digest(f"{EXPERIMENTS}/balance.yaml", TIER)
    HESSIAN = experiments.settings_digest(f"{EXPERIMENTS}/hessian.yaml", TIER)
    PROJECTIONS = {name: experiments.settings_digest(f"{EXPERIMENTS}/{name}.yaml", TIER) for name in PROJECTED}
    DESCRIBED = {
        name: projection_inputs.digest(f"{EXPERIMENTS}/{name}.yaml", Path(workflow.basedir)) for name in PROJECTED
    }
    VALIDATED = validation_spec.load(f"{EXPERIMENTS}/validation.yaml").tier(TIER)
    VALIDATION = experiments.settings_digest(f"{EXPERIMENTS}/validation.yaml", TIER)
    ASKED = tiers.canonical_digest(load_yaml(f"{EXPERIMENTS}/claims.yaml"))
    CLUSTER = site.cluster(SETTINGS.slurm, Path(EXPERIMENTS, "hardware")) if SETTINGS.slurm else None
except ConfigError as error:
    raise WorkflowError(str(error)) from None

RANKS = {run.id: run.spec.world_size for runs in RUNS.values() for run in runs}
PIPELINES = [name for name, runs in RUNS.items() if runs[0].command == "pipeline"]
# A shared run has the time limit of the first experiment, by name, that wants it.
OWNERS = {run.id: name for name in reversed(PIPELINES) for run in RUNS[name]}
# Timed jobs hold every core, so that nothing runs beside them; without a core limit (a cluster) those they use.
ALL_CORES = workflow.resource_settings.cores or max(RANKS.values())
# On a GPU machine of one's own nobody hands out devices: one job at a time has them all.
ALONE = TIER in ("gpu1", "node8", "cluster") and not CLUSTER
if CLUSTER:
    site.use_own_squeue(Path(workflow.basedir))
# What every job asks Slurm for beside its size: account and partition.
SUBMISSION = CLUSTER.site.submission if CLUSTER else {}


def code_of(*left_out):
    """A hash of what draws tables and figures, so that they are made again when it changes."""
    paths = sorted(Path(workflow.basedir, "paper_figures").glob("*.py"))
    texts = [path.read_bytes() for path in paths if path.name not in left_out]
    return hashlib.sha256(b"".join(texts)).hexdigest()


TABLES_CODE, FIGURES_CODE = code_of("style.py"), code_of()


def request(wildcards):
    """What a run's job asks Slurm for."""
    experiment = OWNERS.get(wildcards.run) or wildcards.experiment
    try:
        return CLUSTER.request(RANKS[wildcards.run], experiment)
    except ConfigError as error:
        raise WorkflowError(str(error)) from None


def node_of(experiment, devices=None):
    """What a job on one node asks for: all its devices, or so many."""
    return CLUSTER.request(devices or CLUSTER.devices, experiment)


def nodes(wildcards):
    return request(wildcards).nodes if CLUSTER else 1


def launcher(wildcards):
    return "srun" if nodes(wildcards) > 1 else ""


def ranks_of_a_node(wildcards):
    return request(wildcards).ranks if CLUSTER else RANKS[wildcards.run]


def devices(wildcards):
    return request(wildcards).gres if CLUSTER else ""


def limit(minutes):
    """The time limit of a run's job: the hardware file's on Slurm, else ``minutes``."""

    def of_run(wildcards):
        return request(wildcards).minutes if CLUSTER else minutes

    return of_run


def memory(mb):
    """The host memory of a run's job on one node: the hardware file's on Slurm, else ``mb``."""

    def of_run(wildcards):
        return request(wildcards).memory_mb if CLUSTER else mb

    return of_run


def cores(wildcards):
    return request(wildcards).cpus if CLUSTER else ALL_CORES if ALONE else RANKS[wildcards.run]


def timed_cores(wildcards):
    return request(wildcards).cpus if CLUSTER else ALL_CORES


def pipeline_cores(wildcards):
    if CLUSTER:
        return request(wildcards).cpus
    return ALL_CORES if ALONE or RANKS[wildcards.run] > 1 else 1


def folder(experiment):
    return SHARED if experiment in PIPELINES else HERE


def records(experiment):
    """The mark of every run of an experiment that it has ended; none for what is not made of runs."""
    ids = dict.fromkeys(r.id for r in RUNS.get(experiment, ()))
    return expand(f"{folder(experiment)}/runs/{{run}}/ended", run=ids, tier=TIER, experiment=experiment)


def ended(wildcards):
    return records(wildcards.experiment)


def published(wildcards):
    return f"{PUBLISHED}/{'rotation' if wildcards.experiment in (*PIPELINES, 'hessian') else 'canzona'}.csv"


def executed_by(*commands):
    return "|".join(name for name, runs in RUNS.items() if runs[0].command in commands)


def made(experiment):
    """Tables and figures of an experiment, and its runs: where a table is there, nothing else asks for a lost run."""
    return [path.format(tier=TIER, experiment=experiment) for path in RENDERED] + records(experiment)


FRONT = f"{RESULTS}/claims/claims.rst"
CLAIMS = [path.format(tier=TIER, experiment="claims") for path in RENDERED] + [FRONT]
LEDGER = [f"results/claims{suffix}" for suffix in (".md", ".html", ".tex")]
ANSWERING = [name for name in FULL if name != "validation"]


def is_made(experiment):
    targets = {str(target) for target in workflow.dag_settings.targets}
    return experiment in DEFAULT or bool({"full", experiment} & targets)


def answers(wildcards):
    found = [f"{RESULTS}/{name}/{name}.parquet" for name in ANSWERING]
    return [path for name, path in zip(ANSWERING, found) if is_made(name) or os.path.exists(path)]


wildcard_constraints:
    tier=TIER,
    experiment="[a-z0-9_]+",
    run="[a-z0-9-]+",
