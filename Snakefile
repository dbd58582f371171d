# The front door: `snakemake --cores all [--config tier=ci|laptop|gpu1|node8|cluster] [all|full|EXPERIMENT]`.
# Science is in experiments/*.yaml, code in the Python packages; the rules only connect them.
from snakemake.utils import min_version

min_version("9.27")


include: "workflows/rules/common.smk"
include: "workflows/rules/runs.smk"
include: "workflows/rules/balance.smk"
include: "workflows/rules/hessian.smk"
include: "workflows/rules/projection.smk"
include: "workflows/rules/tables.smk"


report: "workflows/report/workflow.rst"


localrules:
    all,
    full,
    balance,
    step_time,
    precision,
    generality,
    staleness,
    rotation,
    sweep,
    sweep_full,
    rotation_full,
    rotation_ablation,
    no_stash,
    stage_aware,
    pipeline_time,


rule all:
    default_target: True
    input:
        rendered("balance"),
        rendered("step_time"),
        rendered("precision"),
        rendered("generality"),
        rendered("staleness"),
        rendered("rotation"),
        rendered("projection"),
        rendered("scaling"),
        rendered("pipeline_projection"),


# Hours on two cores: sweeps, deep pipelines and ablations.
rule full:
    input:
        rendered("balance"),
        rendered("step_time"),
        rendered("precision"),
        rendered("generality"),
        rendered("staleness"),
        rendered("rotation"),
        rendered("sweep"),
        rendered("sweep_full"),
        rendered("rotation_full"),
        rendered("rotation_ablation"),
        rendered("no_stash"),
        rendered("stage_aware"),
        rendered("pipeline_time"),
        rendered("hessian"),
        rendered("projection"),
        rendered("scaling"),
        rendered("pipeline_projection"),
        rendered("validation"),


rule balance:
    input:
        rendered("balance"),


rule step_time:
    input:
        rendered("step_time"),


rule precision:
    input:
        rendered("precision"),


rule generality:
    input:
        rendered("generality"),


rule staleness:
    input:
        rendered("staleness"),


rule rotation:
    input:
        rendered("rotation"),


rule sweep:
    input:
        rendered("sweep"),


rule sweep_full:
    input:
        rendered("sweep_full"),


rule rotation_full:
    input:
        rendered("rotation_full"),


rule rotation_ablation:
    input:
        rendered("rotation_ablation"),


rule no_stash:
    input:
        rendered("no_stash"),


rule stage_aware:
    input:
        rendered("stage_aware"),


rule pipeline_time:
    input:
        rendered("pipeline_time"),
