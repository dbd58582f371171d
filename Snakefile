# The front door: `snakemake --cores all [--config tier=ci|laptop|gpu1|node8|cluster] [all|full|EXPERIMENT]`, or
# `snakemake --profile slurm`.  Science is in experiments/*.yaml, code in the packages; the rules only connect them.
from snakemake.utils import min_version

min_version("9.27")


include: "workflows/rules/common.smk"
include: "workflows/rules/runs.smk"
include: "workflows/rules/balance.smk"
include: "workflows/rules/hessian.smk"
include: "workflows/rules/projection.smk"
include: "workflows/rules/tables.smk"
include: "workflows/rules/claims.smk"
include: "workflows/rules/sweep.smk"


# The first page of the report: the claims, once they have been judged.
report: FRONT if os.path.exists(FRONT) else "workflows/report/workflow.rst"


localrules:
    all,
    full,


rule all:
    default_target: True
    input:
        [made(experiment) for experiment in DEFAULT],
        LEDGER,


# Hours on two cores.
rule full:
    input:
        [made(experiment) for experiment in FULL],
        LEDGER,


# Each experiment is a target: `snakemake ... step_time`.
for experiment in FULL:

    rule:
        name:
            experiment
        input:
            made(experiment),
        localrule: True
