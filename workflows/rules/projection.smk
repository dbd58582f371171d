# Projections: plans and schedules on hardware that is described, not used.  What triggers them are the hashes of the
# settings and of the hardware files that they name.
rule project:
    input:
        ancient(f"{EXPERIMENTS}/{{experiment}}.yaml"),
    output:
        parquet=f"{HERE}/{{experiment}}.parquet",
        csv=f"{HERE}/{{experiment}}.csv",
    log:
        f"{HERE}/logs/{{experiment}}.log",
    benchmark:
        f"{HERE}/benchmarks/{{experiment}}.tsv"
    wildcard_constraints:
        experiment="|".join(PROJECTED),
    conda:
        "../envs/ricercar.yaml"
    resources:
        **SUBMISSION,
        mem_mb=3000,
        runtime=20,
    params:
        settings=lambda wildcards: PROJECTIONS[wildcards.experiment],
        hardware=lambda wildcards: DESCRIBED[wildcards.experiment],
        command=lambda wildcards: "pipeline-projection" if wildcards.experiment.startswith("pipeline") else "projection",
        folder=subpath(output.parquet, parent=True),
    shell:
        "python -m impl {params.command} --config {input:q} --tier {wildcards.tier} --out {params.folder:q}"
        " 2>&1 | tee {log:q}"


# Kernel times of this machine, measured as the validated runs execute them; the runs' hashes are what triggers it.
rule measure_kernels:
    input:
        ancient(expand(f"{EXPERIMENTS}/{{name}}.yaml", name=VALIDATED.experiments)),
    output:
        "results/generated/{tier}/validation/kernels.csv",
    log:
        "results/generated/{tier}/validation/logs/kernels.log",
    benchmark:
        "results/generated/{tier}/validation/benchmarks/kernels.tsv"
    conda:
        "../envs/ricercar.yaml"
    threads: node_of("validation").cpus if CLUSTER else ALL_CORES
    resources:
        **SUBMISSION,
        gres=node_of("validation").gres if CLUSTER else "",
        mem_mb=node_of("validation").memory_mb if CLUSTER else 8000,
        runtime=node_of("validation").minutes if CLUSTER else 60,
    params:
        runs=[run.id for name in VALIDATED.experiments for run in RUNS[name]],
        experiments=lambda wildcards, input: " ".join(f"--experiment {shlex.quote(path)}" for path in input),
    shell:
        "python -m impl kernels {params.experiments} --tier {wildcards.tier} --out {output:q} 2>&1 | tee {log:q}"


rule replay_ranks:
    input:
        ancient(f"{EXPERIMENTS}/validation.yaml"),
    output:
        "results/generated/{tier}/validation/replays.json",
    log:
        "results/generated/{tier}/validation/logs/replays.log",
    benchmark:
        "results/generated/{tier}/validation/benchmarks/replays.tsv"
    conda:
        "../envs/ricercar.yaml"
    threads: node_of("validation").cpus if CLUSTER else ALL_CORES
    resources:
        **SUBMISSION,
        gres=node_of("validation").gres if CLUSTER else "",
        mem_mb=node_of("validation").memory_mb if CLUSTER else 8000,
        runtime=node_of("validation").minutes if CLUSTER else 30,
    params:
        settings=VALIDATION,
        runs=[run.id for run in RUNS[VALIDATED.replay.experiment]],
    shell:
        "python -m impl validation-replay --config {input:q} --tier {wildcards.tier} --out {output:q}"
        " 2>&1 | tee {log:q}"


rule validate:
    input:
        experiment=ancient(f"{EXPERIMENTS}/validation.yaml"),
        kernels="results/generated/{tier}/validation/kernels.csv",
        replays="results/generated/{tier}/validation/replays.json",
        tables=expand("results/generated/{{tier}}/{name}/{name}.parquet", name=VALIDATED.compared),
    output:
        parquet="results/generated/{tier}/validation/validation.parquet",
        csv="results/generated/{tier}/validation/validation.csv",
    log:
        "results/generated/{tier}/validation/logs/validation.log",
    conda:
        "../envs/ricercar.yaml"
    resources:
        **SUBMISSION,
        mem_mb=2000,
        runtime=10,
    params:
        settings=VALIDATION,
        folder=subpath(output.parquet, parent=True),
        results=lambda wildcards, input: os.path.dirname(os.path.dirname(input.kernels)),
    shell:
        "python -m impl validation --config {input.experiment:q} --tier {wildcards.tier} --results {params.results:q}"
        " --kernels {input.kernels:q} --replays {input.replays:q} --out {params.folder:q} 2>&1 | tee {log:q}"
