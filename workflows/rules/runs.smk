# One run: a job that writes the run's settings and leaves its record.  A run id ends in the hash of the run's settings, so
# it alone says what is run: there are no inputs, and editing an experiment makes new runs where settings changed and
# touches nothing else.  (Settings as files with a rule of their own would be rewritten, and all runs with them, whenever
# that rule changes; `ancient` inputs keep snakemake 9.27 from seeing that anything behind them is still to do.)
# A run that fails or diverges with a record is a result (`settle`): the tables are built and its cells say so.  The output
# is settle's mark and not the record itself, which snakemake would remove before every try.
# `--wait`: a job of a killed scheduler may still run; this one then waits for it and finds the run done.


rule train:
    output:
        f"{HERE}/runs/{{run}}/ended",
    log:
        f"{HERE}/logs/{{run}}.log",
    benchmark:
        f"{HERE}/benchmarks/{{run}}.tsv"
    wildcard_constraints:
        experiment=executed_by("train"),
    conda:
        "../envs/ricercar.yaml"
    threads: cores
    resources:
        **SUBMISSION,
        mpi=launcher,
        nodes=nodes,
        tasks=nodes,
        tasks_per_gpu=0,
        ranks=ranks_of_a_node,
        gres=devices,
        mem_mb=memory(4000),
        runtime=limit(60),
    params:
        folder=subpath(output[0], parent=True),
        config=f"{HERE}/configs/{{run}}.yaml",
    shell:
        f"{CONFIGURE} --run {{wildcards.run}} --out {{params.config:q}} >> {{log:q}} 2>&1; "
        f'{START} "{{resources.mpi}}" {{resources.nodes}} {{resources.ranks}} {{threads}} train'
        " --config {params.config:q} --wait --out {params.folder:q} 2>&1 | tee -ia {log:q} || true; "
        "python -m impl settle --out {params.folder:q}"


rule time_steps:
    output:
        f"{HERE}/runs/{{run}}/ended",
    log:
        f"{HERE}/logs/{{run}}.log",
    benchmark:
        f"{HERE}/benchmarks/{{run}}.tsv"
    wildcard_constraints:
        experiment=executed_by("step-time"),
    conda:
        "../envs/ricercar.yaml"
    threads: timed_cores
    resources:
        **SUBMISSION,
        mpi=launcher,
        nodes=nodes,
        tasks=nodes,
        tasks_per_gpu=0,
        ranks=ranks_of_a_node,
        gres=devices,
        mem_mb=memory(8000),
        runtime=limit(60),
    params:
        folder=subpath(output[0], parent=True),
        config=f"{HERE}/configs/{{run}}.yaml",
    shell:
        f"{CONFIGURE} --run {{wildcards.run}} --out {{params.config:q}} >> {{log:q}} 2>&1; "
        f'{START} "{{resources.mpi}}" {{resources.nodes}} {{resources.ranks}} {{threads}} step-time'
        " --config {params.config:q} --wait --out {params.folder:q} 2>&1 | tee -ia {log:q} || true; "
        "python -m impl settle --out {params.folder:q}"


rule pipeline:
    output:
        f"{SHARED}/runs/{{run}}/ended",
    log:
        f"{SHARED}/logs/{{run}}.log",
    benchmark:
        f"{SHARED}/benchmarks/{{run}}.tsv"
    conda:
        "../envs/ricercar.yaml"
    threads: pipeline_cores
    resources:
        **SUBMISSION,
        mpi=launcher,
        nodes=nodes,
        tasks=nodes,
        tasks_per_gpu=0,
        ranks=ranks_of_a_node,
        gres=devices,
        mem_mb=memory(4000),
        runtime=limit(120),
    params:
        folder=subpath(output[0], parent=True),
        config=f"{SHARED}/configs/{{run}}.yaml",
    shell:
        f"{CONFIGURE} --run {{wildcards.run}} --out {{params.config:q}} >> {{log:q}} 2>&1; "
        f'{START} "{{resources.mpi}}" {{resources.nodes}} {{resources.ranks}} {{threads}} pipeline'
        " --config {params.config:q} --wait --out {params.folder:q} 2>&1 | tee -ia {log:q} || true; "
        "python -m impl settle --out {params.folder:q}"
