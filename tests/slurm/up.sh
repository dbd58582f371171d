#!/usr/bin/env bash
# up.sh STATE_DIR - start a private Slurm cluster of virtual nodes on
# loopback, without systemd.  Idempotent: what already runs is left as it is.
#
# All state (config, keys, spool, logs, pids) lives under STATE_DIR.  Outside it
# there are two things, both undone by down.sh: the node names n1..nN in
# /etc/hosts, and the link /run/slurm/conf/slurm.conf, where clients look when
# neither SLURM_CONF nor /etc/slurm/slurm.conf exists.  (SLURM_CONF alone will
# not do: Snakemake's slurm-jobstep drops SLURM_* before it calls srun.)
#
#   up.sh   "$PWD/.slurm" && sinfo
#   down.sh "$PWD/.slurm"
#
# Needs root and the Debian packages slurmctld slurmd slurm-client munge
# INSTALL=1 installs them.
set -euo pipefail

STATE=$(realpath -m "${1:?usage: up.sh STATE_DIR}")
NODES=${NODES:-2}                # virtual nodes n1..nN, one slurmd each
CPUS=${CPUS:-8}                  # CPUs per node, need not exist
MEM_MB=${MEM_MB:-32768}          # memory per node, need not exist
GPUS=${GPUS:-4}                  # fake GPUs per node, 0 for none
GPU_TYPE=${GPU_TYPE:-fake}
PORT=${PORT:-17000}              # PORT slurmctld, +1.. slurmd
INSTALL=${INSTALL:-0}
HOST=$(hostname -s)
ME=$(id -un)

die() { echo "slurm up: $*" >&2; exit 1; }
say() { echo "slurm up: $*"; }

[ "$(id -u)" = 0 ] || die "must run as root"
# The daemons bind to the address that the host name resolves to.
ADDR=$(getent ahostsv4 "$(hostname)" | awk 'NR == 1 { print $1 }')
case $ADDR in
127.*) ;;
*) die "host name resolves to '${ADDR:-nothing}', not to loopback: add '127.0.0.1 $(hostname)' to /etc/hosts" ;;
esac

# running PIDFILE - does the process that PIDFILE names run?  A zombie does not
# (in a container pid 1 may reap late or never), nor does another program that
# got the same pid after a reboot.
running() {
    local pid want
    pid=$(cat "$1" 2>/dev/null) && [ -n "$pid" ] || return 1
    want=$(basename "$1" .pid)
    [[ $(ps -o stat=,comm= -p "$pid") == [!Z]*" ${want%%.*}" ]]
}

# retry SECONDS COMMAND... - until the command succeeds or time is up
retry() {
    local end=$((SECONDS + $1)); shift
    until "$@" >/dev/null 2>&1; do
        [ "$SECONDS" -lt "$end" ] || die "timed out: $*; see $STATE/log"
        sleep 0.1
    done
}

# --- packages ---------------------------------------------------------------
want=(slurmctld slurmd slurm-client munge)
missing=()
for p in "${want[@]}"; do
    dpkg-query -W -f='${Status}' "$p" 2>/dev/null | grep -q 'ok installed' || missing+=("$p")
done
if [ ${#missing[@]} -gt 0 ]; then
    [ "$INSTALL" = 1 ] || die "missing packages: ${missing[*]} (INSTALL=1 installs them)"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
fi

# --- directories and config -------------------------------------------------
umask 022
mkdir -p "$STATE"/{run,log,ctld,dev,munge}
chmod 0755 "$STATE"; chmod 0711 "$STATE/munge"
CONF=$STATE/slurm.conf
export SLURM_CONF=$CONF

if ! running "$STATE/run/slurmctld.pid"; then
    gres=
    : >"$STATE/gres.conf"
    if [ "$GPUS" -gt 0 ]; then
        # Character devices that behave like /dev/null; the trailing digit
        # becomes the index in CUDA_VISIBLE_DEVICES.
        for ((i = 0; i < GPUS; i++)); do
            [ -e "$STATE/dev/gpu$i" ] || mknod -m 0666 "$STATE/dev/gpu$i" c 1 3
        done
        gres="Gres=gpu:$GPU_TYPE:$GPUS"
        echo "AutoDetect=off
NodeName=n[1-$NODES] Name=gpu Type=$GPU_TYPE File=$STATE/dev/gpu[0-$((GPUS - 1))]" >"$STATE/gres.conf"
    fi
    cat >"$CONF" <<CONF
ClusterName=local
SlurmctldHost=$HOST($ADDR)
SlurmctldPort=$PORT
# Bind to the host name's address, not to all addresses.
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
AuthType=auth/munge
AuthInfo=socket=$STATE/munge/socket
CredType=cred/munge
SlurmUser=$ME
SlurmdUser=$ME
SlurmctldPidFile=$STATE/run/slurmctld.pid
SlurmctldLogFile=$STATE/log/slurmctld.log
SlurmdPidFile=$STATE/run/slurmd.%n.pid
SlurmdLogFile=$STATE/log/slurmd.%n.log
SlurmdSpoolDir=$STATE/spool.%n
StateSaveLocation=$STATE/ctld
MailProg=/bin/true
# No cgroups: plain process tracking.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=1
JobAcctGatherParams=OverMemoryKill
MpiDefault=none
SwitchType=switch/none
# CPUs, memory and GPUs are consumable; the counts below are believed.
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmdParameters=config_overrides
GresTypes=gpu
PropagateResourceLimits=NONE
# Quick turnaround for tests.  MinJobAge keeps ended jobs visible to squeue.
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
MinJobAge=3600
KillWait=2
ReturnToService=2
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc=$STATE/log/jobcomp.log
$(for ((i = 1; i <= NODES; i++)); do
    echo "NodeName=n$i NodeHostname=localhost NodeAddr=$ADDR Port=$((PORT + i)) CPUs=$CPUS RealMemory=$MEM_MB $gres State=UNKNOWN"
done)
PartitionName=main Nodes=n[1-$NODES] Default=YES DefaultTime=10 MaxTime=60 DefMemPerCPU=$((MEM_MB / CPUS)) State=UP
CONF
fi
LINK=/run/slurm/conf/slurm.conf
if [ -L "$LINK" ] && [ ! -e "$LINK" ]; then rm "$LINK"; fi # its cluster is gone
[ ! -e /etc/slurm/slurm.conf ] || die "/etc/slurm/slurm.conf exists and would hide $LINK"
case $(readlink "$LINK" || true) in
"$CONF") ;;
"") mkdir -p "${LINK%/*}" && ln -s "$CONF" "$LINK" ;;
*) die "$LINK leads to another cluster: $(readlink "$LINK")" ;;
esac

# --- node names must resolve, as on a real cluster (MASTER_ADDR and the like) --
for ((i = 1; i <= NODES; i++)); do
    getent hosts "n$i" >/dev/null || echo "$ADDR n$i # ricercar-slurm" >>/etc/hosts
done

# --- munged: a private one, its key and socket in the state directory --------
if ! running "$STATE/run/munged.pid"; then
    [ -s "$STATE/munge/key" ] || (umask 077; head -c 1024 /dev/urandom >"$STATE/munge/key")
    munged --force --socket="$STATE/munge/socket" --key-file="$STATE/munge/key" \
        --pid-file="$STATE/run/munged.pid" --log-file="$STATE/log/munged.log" \
        --seed-file="$STATE/munge/seed"
fi

# --- Slurm -------------------------------------------------------------------
running "$STATE/run/slurmctld.pid" || slurmctld
for ((i = 1; i <= NODES; i++)); do
    running "$STATE/run/slurmd.n$i.pid" && continue
    mkdir -p "$STATE/spool.n$i"
    slurmd -N "n$i"
done
all_idle() { [ "$(sinfo -h -N -t idle,mix,alloc -o %N | sort -u | wc -l)" = "$NODES" ]; }
retry 60 all_idle
say "up: $NODES node(s) x $CPUS CPUs, $GPUS GPUs"
