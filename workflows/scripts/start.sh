#!/usr/bin/env bash
# start.sh LAUNCHER NODES RANKS CPUS COMMAND... - run `python -m impl COMMAND...`, whose ranks are on one node or several.
#
# LAUNCHER '': on this machine; impl starts the ranks itself.  LAUNCHER srun: inside a Slurm job of NODES nodes, one
# torchrun on each starts RANKS ranks there.  The counts come from the rule: Snakemake takes Slurm's own variables out of
# the job's environment, and only inside srun they are all set again.
set -euo pipefail
launcher=$1 nodes=$2 ranks=$3 cpus=$4
shift 4
if [ -z "$launcher" ]; then
    exec python -m impl "$@"
fi
# srun does not inherit --cpus-per-task; without --kill-on-bad-exit the other nodes would wait for a dead one.
exec "$launcher" --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 --cpus-per-task="$cpus" --kill-on-bad-exit=1 \
    bash -c '
        ranks=$1
        shift
        head=$(scontrol show hostnames "$SLURM_STEP_NODELIST" | head -n 1)
        port=$((20000 + SLURM_JOB_ID % 10000)) # jobs may share the head node
        exec python -m torch.distributed.run --nnodes="$SLURM_NNODES" --nproc-per-node="$ranks" --max-restarts=0 \
            --local-addr="$SLURMD_NODENAME" --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" \
            --rdzv-endpoint="$head:$port" -m impl "$@"
    ' _ "$ranks" "$@"
