# The ledger: every published claim beside ours, from the tables that are there.  What `all` makes is always among them,
# the experiments that take hours as soon as they have been made, or are being made by this call.
CLAIMS = [f"{RESULTS}/claims/claims{suffix}" for suffix in (".parquet", ".csv", ".md", ".html", ".tex", ".pdf", ".png")]
LEDGER = [f"results/claims{suffix}" for suffix in (".md", ".html", ".tex")]
ANSWERING = [name for name in FULL if name != "validation"]


def is_made(experiment):
    targets = {str(target) for target in workflow.dag_settings.targets}
    return experiment in DEFAULT or bool({"full", experiment} & targets)


def answers(wildcards):
    found = [f"{RESULTS}/{name}/{name}.parquet" for name in ANSWERING]
    return [path for name, path in zip(ANSWERING, found) if is_made(name) or os.path.exists(path)]


localrules:
    claims,
    ledger,


rule claims:
    input:
        answers=answers,
        ledger=f"{EXPERIMENTS}/claims.yaml",
    output:
        parquet=f"{RESULTS}/claims/claims.parquet",
        csv=f"{RESULTS}/claims/claims.csv",
        md=f"{RESULTS}/claims/claims.md",
        html=report(
            f"{RESULTS}/claims/claims.html",
            caption="../report/claims.rst",
            category="1. Was the paper reproduced?",
            labels={"what": "claims, ours beside the published"},
        ),
        tex=f"{RESULTS}/claims/claims.tex",
        pdf=f"{RESULTS}/claims/claims.pdf",
        png=report(
            f"{RESULTS}/claims/claims.png",
            caption="../report/claims.rst",
            category="1. Was the paper reproduced?",
            labels={"what": "figure: ours over the published"},
        ),
    log:
        f"{RESULTS}/claims/logs/claims.log",
    conda:
        "../envs/ricercar.yaml"
    resources:
        mem_mb=1000,
        runtime=5,
    params:
        results=RESULTS,
        tier=TIER,
        code=FIGURES_CODE,
    shell:
        "python -m paper_figures claims --ledger {input.ledger:q} --results {params.results:q} --tier {params.tier}"
        " --out {output.md:q} > {log:q} 2>&1"


# The ledger of the tier that was made last, where one looks for it first.
rule ledger:
    input:
        CLAIMS,
    output:
        LEDGER,
    log:
        "results/generated/ledger.log",
    conda:
        "../envs/ricercar.yaml"
    resources:
        mem_mb=500,
        runtime=5,
    params:
        ledger=f"{RESULTS}/claims/claims.md",
    shell:
        "python -m paper_figures move-claims --in {params.ledger:q} --out {output[0]:q} > {log:q} 2>&1"
