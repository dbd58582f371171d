# One run: its settings, then the job that leaves its record.  A run id ends in the hash of the run's settings, so the
# experiment's file is `ancient`: editing it makes new runs where settings changed and touches nothing else.
# A run that fails or diverges with a record is a result (`settle`): the tables are built and its cells say so.
localrules:
    configure,
    configure_pipeline,


rule configure:
    input:
        ancient(f"{EXPERIMENTS}/{{experiment}}.yaml"),
    output:
        f"{HERE}/configs/{{run}}.yaml",
    log:
        f"{HERE}/logs/{{run}}.configure.log",
    wildcard_constraints:
        experiment=executed_by("train", "step-time"),
    conda:
        "../envs/ricercar.yaml"
    resources:
        mem_mb=500,
        runtime=5,
    shell:
        "python -m impl configs --experiment {input:q} --tier {wildcards.tier} --run {wildcards.run}"
        " --out {output:q} > {log:q} 2>&1"


rule train:
    input:
        f"{HERE}/configs/{{run}}.yaml",
    output:
        f"{HERE}/runs/{{run}}/manifest.json",
    log:
        f"{HERE}/logs/{{run}}.log",
    benchmark:
        f"{HERE}/benchmarks/{{run}}.tsv"
    wildcard_constraints:
        experiment=executed_by("train"),
    conda:
        "../envs/ricercar.yaml"
    threads: ranks
    resources:
        mem_mb=4000,
        runtime=60,
    params:
        folder=subpath(output[0], parent=True),
    shell:
        "python -m impl train --config {input:q} --out {params.folder:q} 2>&1 | tee -i {log:q}"
        " || python -m impl settle --out {params.folder:q}"


rule time_steps:
    input:
        f"{HERE}/configs/{{run}}.yaml",
    output:
        f"{HERE}/runs/{{run}}/manifest.json",
    log:
        f"{HERE}/logs/{{run}}.log",
    benchmark:
        f"{HERE}/benchmarks/{{run}}.tsv"
    wildcard_constraints:
        experiment=executed_by("step-time"),
    conda:
        "../envs/ricercar.yaml"
    threads: ALL_CORES
    resources:
        mem_mb=8000,
        runtime=60,
    params:
        folder=subpath(output[0], parent=True),
    shell:
        "python -m impl step-time --config {input:q} --out {params.folder:q} 2>&1 | tee -i {log:q}"
        " || python -m impl settle --out {params.folder:q}"


rule configure_pipeline:
    input:
        ancient(lambda wildcards: f"{EXPERIMENTS}/{OWNERS[wildcards.run]}.yaml"),
    output:
        f"{SHARED}/configs/{{run}}.yaml",
    log:
        f"{SHARED}/logs/{{run}}.configure.log",
    conda:
        "../envs/ricercar.yaml"
    resources:
        mem_mb=500,
        runtime=5,
    shell:
        "python -m impl configs --experiment {input:q} --tier {wildcards.tier} --run {wildcards.run}"
        " --out {output:q} > {log:q} 2>&1"


rule pipeline:
    input:
        ancient(f"{SHARED}/configs/{{run}}.yaml"),
    output:
        f"{SHARED}/runs/{{run}}/manifest.json",
    log:
        f"{SHARED}/logs/{{run}}.log",
    benchmark:
        f"{SHARED}/benchmarks/{{run}}.tsv"
    conda:
        "../envs/ricercar.yaml"
    threads: pipeline_threads
    resources:
        mem_mb=4000,
        runtime=120,
    params:
        folder=subpath(output[0], parent=True),
    shell:
        "python -m impl pipeline --config {input:q} --out {params.folder:q} 2>&1 | tee -i {log:q}"
        " || python -m impl settle --out {params.folder:q}"
