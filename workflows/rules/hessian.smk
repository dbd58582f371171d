# The Hessian of single matrices: one job that trains and measures, resumable matrix by matrix, and its table.  The
# settings' hash is what triggers it.
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
    threads: node_of("hessian", 1).cpus if CLUSTER else 1
    resources:
        **SUBMISSION,
        gres=node_of("hessian", 1).gres if CLUSTER else "",
        mem_mb=node_of("hessian", 1).memory_mb if CLUSTER else 4000,
        runtime=node_of("hessian", 1).minutes if CLUSTER else 120,
    params:
        settings=HESSIAN,
        folder=subpath(output.parquet, parent=True),
    shell:
        "python -m impl hessian --config {input:q} --tier {wildcards.tier} --out {params.folder:q} 2>&1 | tee -i {log:q}"
