# The Hessian of single matrices: one job that trains and measures, resumable matrix by matrix, and its table.  The
# settings' hash is what triggers it.
localrules:
    hessian,


try:
    HESSIAN = experiments.settings_digest(f"{EXPERIMENTS}/hessian.yaml", TIER)
except ConfigError as error:
    raise WorkflowError(str(error)) from None


rule hessian:
    input:
        rendered("hessian"),


rule measure_hessian:
    input:
        ancient(f"{EXPERIMENTS}/hessian.yaml"),
    output:
        parquet="results/generated/{tier}/hessian/hessian.parquet",
        csv="results/generated/{tier}/hessian/hessian.csv",
    log:
        "results/generated/{tier}/hessian/logs/hessian.log",
    benchmark:
        "results/generated/{tier}/hessian/benchmarks/hessian.tsv"
    conda:
        "../envs/ricercar.yaml"
    resources:
        mem_mb=4000,
        runtime=120,
    params:
        settings=HESSIAN,
        folder=subpath(output.parquet, parent=True),
    shell:
        "python -m impl hessian --config {input:q} --tier {wildcards.tier} --out {params.folder:q} 2>&1 | tee -i {log:q}"
