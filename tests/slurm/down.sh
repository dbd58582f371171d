#!/usr/bin/env bash
# down.sh STATE_DIR - stop the cluster that up.sh started there.
# Ends only the processes whose pids STATE_DIR/run holds, clients first.
# Idempotent.  The state stays; remove STATE_DIR for a clean start.
set -euo pipefail

STATE=$(realpath -m "${1:?usage: down.sh STATE_DIR}")
export SLURM_CONF=$STATE/slurm.conf

# running NAME - is the process that run/NAME.pid names a live NAME daemon?
# (A zombie, which pid 1 of a container may reap late, does not count.)
running() {
    local pid
    pid=$(cat "$STATE/run/$1.pid" 2>/dev/null) && [ -n "$pid" ] &&
        [[ $(ps -o stat=,comm= -p "$pid") == [!Z]*" ${1%%.*}" ]]
}

# stop NAME... - signal all of them, then wait for each, at most 30 s
stop() {
    local name n
    for name in "$@"; do
        if running "$name"; then kill "$(cat "$STATE/run/$name.pid")"; fi
    done
    for name in "$@"; do
        for ((n = 0; n < 300; n++)); do
            running "$name" || break
            sleep 0.1
        done
        if running "$name"; then kill -9 "$(cat "$STATE/run/$name.pid")"; fi
        rm -f "$STATE/run/$name.pid"
    done
}

# Jobs first, so that no job step outlives its daemon.
if running slurmctld; then
    squeue -h -o %A | sort -u | xargs -r scancel || true
    for ((n = 0; n < 100; n++)); do
        [ -n "$(squeue -h -t R,CG,S -o %A)" ] || break
        sleep 0.1
    done
fi
nodes=()
for file in "$STATE"/run/slurmd.*.pid; do
    if [ -e "$file" ]; then nodes+=("$(basename "$file" .pid)"); fi
done
stop "${nodes[@]}" slurmctld
stop munged

link=/run/slurm/conf/slurm.conf
if [ "$(readlink "$link")" = "$SLURM_CONF" ]; then rm "$link"; fi
# /etc/hosts may be a bind mount: rewrite it in place.
if grep -q '# ricercar-slurm$' /etc/hosts; then
    hosts=$(grep -v '# ricercar-slurm$' /etc/hosts)
    echo "$hosts" >/etc/hosts
fi
echo "slurm down: stopped"
