# Records to a tidy table, the tidy table to a Markdown table and a figure.
localrules:
    tidy,
    table,
    figure,


rule tidy:
    input:
        records=ended,
        experiment=ancient(f"{EXPERIMENTS}/{{experiment}}.yaml"),
    output:
        parquet=f"{HERE}/{{experiment}}.parquet",
        csv=f"{HERE}/{{experiment}}.csv",
    log:
        f"{HERE}/logs/tidy.log",
    wildcard_constraints:
        experiment="|".join(RUNS),
    conda:
        "../envs/ricercar.yaml"
    resources:
        mem_mb=1000,
        runtime=5,
    params:
        runs=lambda wildcards: expand(f"{folder(wildcards.experiment)}/runs", **wildcards)[0],
    shell:
        "python -m impl tidy --experiment {input.experiment:q} --tier {wildcards.tier} --runs {params.runs:q}"
        " --out {output.parquet:q} > {log:q} 2>&1"


rule table:
    input:
        tidy=f"{HERE}/{{experiment}}.parquet",
        published=published,
    output:
        html=report(
            f"{HERE}/{{experiment}}.html",
            caption="../report/table.rst",
            category="{experiment}",
            labels={"what": "table"},
        ),
        md=f"{HERE}/{{experiment}}.md",
        tex=f"{HERE}/{{experiment}}.tex",
    log:
        f"{HERE}/logs/table.log",
    conda:
        "../envs/ricercar.yaml"
    resources:
        mem_mb=1000,
        runtime=5,
    params:
        code=TABLES_CODE,
    shell:
        "python -m paper_figures table {wildcards.experiment} --in {input.tidy:q} --published {input.published:q}"
        " --out {output.md:q} > {log:q} 2>&1"


rule figure:
    input:
        tidy=f"{HERE}/{{experiment}}.parquet",
        published=published,
    output:
        pdf=f"{HERE}/{{experiment}}.pdf",
        png=report(
            f"{HERE}/{{experiment}}.png",
            caption="../report/figure.rst",
            category="{experiment}",
            labels={"what": "figure"},
        ),
    log:
        f"{HERE}/logs/figure.log",
    conda:
        "../envs/ricercar.yaml"
    resources:
        mem_mb=1000,
        runtime=5,
    params:
        code=FIGURES_CODE,
    shell:
        "python -m paper_figures figure {wildcards.experiment} --in {input.tidy:q} --published {input.published:q}"
        " --out {output.pdf:q} > {log:q} 2>&1"
