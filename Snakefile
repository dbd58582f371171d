# The front door: `snakemake --cores all [--config tier=ci|laptop|gpu1|node8|cluster] [all|balance|step_time|precision]`.
# Science is in experiments/*.yaml, code in the Python packages; the rules only connect them.
from snakemake.utils import min_version

min_version("9.27")


include: "workflows/rules/common.smk"
include: "workflows/rules/runs.smk"
include: "workflows/rules/balance.smk"
include: "workflows/rules/tables.smk"


report: "workflows/report/workflow.rst"


localrules:
    all,
    balance,
    step_time,
    precision,


rule all:
    default_target: True
    input:
        rendered("balance"),
        rendered("step_time"),
        rendered("precision"),


rule balance:
    input:
        rendered("balance"),


rule step_time:
    input:
        rendered("step_time"),


rule precision:
    input:
        rendered("precision"),
