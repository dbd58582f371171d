# What the rules share: the tier, the experiments as data, and the paths that follow from them.
import os
import shlex
import sys

from snakemake.exceptions import WorkflowError

from impl.errors import ConfigError
from impl.harness import experiments, validation_spec

# Jobs run in the environment that runs snakemake, also where it was not activated.
shell.prefix(f"set -euo pipefail; export PATH={shlex.quote(os.path.dirname(sys.executable))}:$PATH; ")

EXPERIMENTS = os.path.relpath(os.path.join(workflow.basedir, "experiments"))
PUBLISHED = os.path.relpath(os.path.join(workflow.basedir, "results", "published"))
TIER = str(config.get("tier", "laptop"))
HERE = "results/generated/{tier}/{experiment}"
# Runs of pipelines are named by their settings alone, so that experiments share them.
SHARED = "results/generated/{tier}/pipelines"

try:
    RUNS = experiments.all_runs(EXPERIMENTS, TIER)
    BALANCE = experiments.settings_digest(f"{EXPERIMENTS}/balance.yaml", TIER)
except ConfigError as error:
    raise WorkflowError(str(error)) from None

RANKS = {run.id: run.spec.world_size for runs in RUNS.values() for run in runs}
PIPELINES = [name for name, runs in RUNS.items() if runs[0].command == "pipeline"]
# Any experiment that wants a shared run can write its settings: the first one by name.
OWNERS = {run.id: name for name in reversed(PIPELINES) for run in RUNS[name]}
# Timed jobs hold every core, so that nothing runs beside them; without a core limit (a cluster) those they use.
ALL_CORES = workflow.cores or max(RANKS.values())


def ranks(wildcards):
    return RANKS[wildcards.run]


def pipeline_threads(wildcards):
    return ALL_CORES if RANKS[wildcards.run] > 1 else 1


def folder(experiment):
    return SHARED if experiment in PIPELINES else HERE


def manifests(wildcards):
    ids = dict.fromkeys(r.id for r in RUNS[wildcards.experiment])
    return expand(f"{folder(wildcards.experiment)}/runs/{{run}}/manifest.json", run=ids, **wildcards)


def published(wildcards):
    return f"{PUBLISHED}/{'rotation' if wildcards.experiment in (*PIPELINES, 'hessian') else 'canzona'}.csv"


def executed_by(*commands):
    return "|".join(name for name, runs in RUNS.items() if runs[0].command in commands)


def rendered(experiment):
    return [path.format(tier=TIER, experiment=experiment) for path in RENDERED]


RENDERED = [f"{HERE}/{{experiment}}{suffix}" for suffix in (".parquet", ".csv", ".md", ".pdf", ".png")]


wildcard_constraints:
    tier=TIER,
    experiment="[a-z0-9_]+",
    run="[a-z0-9-]+",
