# Plans of every model and mesh, from shapes alone: no runs, one table.  The settings' hash is what triggers it.
rule plan_balance:
    input:
        ancient(f"{EXPERIMENTS}/balance.yaml"),
    output:
        parquet="results/generated/{tier}/balance/balance.parquet",
        csv="results/generated/{tier}/balance/balance.csv",
    log:
        "results/generated/{tier}/balance/logs/balance.log",
    benchmark:
        "results/generated/{tier}/balance/benchmarks/balance.tsv"
    conda:
        "../envs/ricercar.yaml"
    resources:
        **SUBMISSION,
        mem_mb=1000,
        runtime=10,
    params:
        settings=BALANCE,
        folder=subpath(output.parquet, parent=True),
    shell:
        "python -m impl balance --config {input:q} --tier {wildcards.tier} --out {params.folder:q} 2>&1 | tee {log:q}"
