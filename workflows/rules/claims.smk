# The ledger: every published claim beside ours, from the tables that are there.  What `all` makes is always among them,
# the experiments that take hours as soon as they have been made, or are being made by this call.
localrules:
    claims,
    ledger,


rule claims:
    input:
        answers=answers,
        ledger=ancient(f"{EXPERIMENTS}/claims.yaml"),
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
        rst=f"{RESULTS}/claims/claims.rst",
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
        results=subpath(output.md, ancestor=2),
        tier=TIER,
        asked=ASKED,
        code=FIGURES_CODE,
    shell:
        "python -m paper_figures claims --ledger {input.ledger:q} --results {params.results:q} --tier {params.tier}"
        " --out {output.md:q} > {log:q} 2>&1"


# The ledger of the tier that was made last, where one looks for it first.
rule ledger:
    input:
        md=f"{RESULTS}/claims/claims.md",
        rest=CLAIMS,
    output:
        md="results/claims.md",
        html="results/claims.html",
        tex="results/claims.tex",
    log:
        "results/generated/ledger.log",
    conda:
        "../envs/ricercar.yaml"
    resources:
        mem_mb=500,
        runtime=5,
    shell:
        "python -m paper_figures move-claims --in {input.md:q} --out {output.md:q} > {log:q} 2>&1"
