# What the rules share: the tier, the experiments as data, and the paths that follow from them.
import os
import shlex
import sys

from snakemake.exceptions import WorkflowError

from impl.errors import ConfigError
from impl.harness import experiments

# Jobs run in the environment that runs snakemake, also where it was not activated.
shell.prefix(f"set -euo pipefail; export PATH={shlex.quote(os.path.dirname(sys.executable))}:$PATH; ")

EXPERIMENTS = os.path.relpath(os.path.join(workflow.basedir, "experiments"))
PUBLISHED = os.path.relpath(os.path.join(workflow.basedir, "results", "published", "canzona.csv"))
TIER = str(config.get("tier", "laptop"))
HERE = "results/generated/{tier}/{experiment}"

try:
    RUNS = experiments.all_runs(EXPERIMENTS, TIER)
    BALANCE = experiments.settings_digest(f"{EXPERIMENTS}/balance.yaml", TIER)
except ConfigError as error:
    raise WorkflowError(str(error)) from None

RANKS = {run.id: run.base.world_size for runs in RUNS.values() for run in runs}
# Timed jobs hold every core, so that nothing runs beside them; without a core limit (a cluster) those they use.
ALL_CORES = workflow.cores or max(RANKS.values())


def ranks(wildcards):
    return RANKS[wildcards.run]


def manifests(wildcards):
    return expand(f"{HERE}/runs/{{run}}/manifest.json", run=[r.id for r in RUNS[wildcards.experiment]], **wildcards)


def executed_by(command):
    return "|".join(name for name, runs in RUNS.items() if runs[0].command == command)


def rendered(experiment):
    return [path.format(tier=TIER, experiment=experiment) for path in RENDERED]


RENDERED = [f"{HERE}/{{experiment}}{suffix}" for suffix in (".parquet", ".csv", ".md", ".pdf", ".png")]


wildcard_constraints:
    tier=TIER,
    experiment="[a-z0-9_]+",
    run="[a-z0-9-]+",
