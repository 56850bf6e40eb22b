#!/bin/bash
# A real Slurm (slurmctld, one slurmd per node, munge) for tests of job prologues.
#
#   slurm.sh up [NODES] [BANDWIDTH]   e.g. up 4 1gbit; each node a host of testbed.cluster
#   slurm.sh up --flat [NODES]        no namespaces: several slurmd on this machine
#   slurm.sh do COMMAND...            srun, sbatch, scontrol ... (from the controller)
#   slurm.sh node NODE COMMAND...     look into a node from outside any job
#   slurm.sh kill NODE | boot NODE    node death, and the node (with slurmd) back
#   slurm.sh down                     stops and removes everything; fine to repeat
#
# Needs root and: apt-get install --no-install-recommends slurm-wlm munge  (15 s)
# Hooks: set PROLOG, EPILOG, TASK_PROLOG, TASK_EPILOG to script paths before `up`.
# PROLOG and EPILOG run as root on every node of a job, TASK_* as the user per task.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
dir=${SLURM_TESTBED_DIR:?a folder to make and remove, not below /tmp or /run: all nodes see it}
python=${PYTHON:-python3}
cluster() { (cd "$here/.." && "$python" -m testbed.cluster --name "${dir##*/}" "$@"); }
export SLURM_CONF=$dir/slurm.conf

write_conf() {  # flat? nodes
    local flat=$1 nodes=$2 i
    cat >"$dir/slurm.conf" <<CONF
ClusterName=testbed
SlurmctldHost=$([ "$flat" = 1 ] && echo "$(hostname)(127.0.0.1)" || echo "ctl(10.77.0.$((nodes + 1)))")
SlurmctldPort=16817
SlurmdPort=16818
AuthType=auth/munge
# A requeued job waits until its credential has expired, by default two minutes.
AuthInfo=socket=$dir/munge.socket,cred_expire=5
CredType=cred/munge
SlurmUser=root
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool.%n
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd.%n.pid
SlurmctldLogFile=$dir/slurmctld.log
SlurmdLogFile=$dir/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
# The nodes may claim more than this machine has:
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=20
KillWait=2
InactiveLimit=0
# Alloc: PROLOG runs on all nodes as soon as the job has them, not at its first step.
PrologFlags=Alloc
CONF
    local pair
    for pair in Prolog=${PROLOG:-} Epilog=${EPILOG:-} TaskProlog=${TASK_PROLOG:-} TaskEpilog=${TASK_EPILOG:-}; do
        if [ -n "${pair#*=}" ]; then echo "$pair" >>"$dir/slurm.conf"; fi
    done
    for ((i = 0; i < nodes; i++)); do
        if [ "$flat" = 1 ]; then
            echo "NodeName=n$i NodeHostname=$(hostname) NodeAddr=127.0.0.1 Port=$((17000 + i)) CPUs=2 RealMemory=1000"
        else
            echo "NodeName=n$i NodeAddr=10.77.0.$((i + 1)) CPUs=2 RealMemory=1000"
        fi
    done >>"$dir/slurm.conf"
    echo "PartitionName=test Nodes=n[0-$((nodes - 1))] Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO" >>"$dir/slurm.conf"
}

up() {
    local flat=0 nodes i rate
    if [ "${1:-}" = --flat ]; then flat=1; shift; fi
    nodes=${1:-2} rate=${2:-}
    down
    mkdir -p "$dir/state"
    chmod 755 "$dir"
    dd if=/dev/urandom of="$dir/munge.key" bs=128 count=1 status=none
    chmod 600 "$dir/munge.key"
    echo "$flat" >"$dir/flat"
    write_conf "$flat" "$nodes"
    # One munged for all: nodes reach its socket through the shared file system.
    munged --force --socket="$dir/munge.socket" --key-file="$dir/munge.key" --num-threads=2 \
        --pid-file="$dir/munged.pid" --log-file="$dir/munged.log" --seed-file="$dir/munge.seed"
    if [ "$flat" = 1 ]; then
        slurmctld -c
        for ((i = 0; i < nodes; i++)); do slurmd -N "n$i"; done
    else
        # The hosts see all of this checkout, wherever it lies.
        cluster up --hosts "$nodes" --host ctl --keep "$(cd "$here/../.." && pwd)" \
            ${rate:+--bandwidth "$rate"} >/dev/null
        cluster run ctl -- slurmctld -c
        for ((i = 0; i < nodes; i++)); do cluster run "n$i" -- slurmd; done
    fi
    for ((i = 0; i < 100; i++)); do
        [ "$(in_ctl sinfo -h -N -o %T 2>/dev/null | grep -c idle)" = "$nodes" ] && return
        sleep 0.1
    done
    echo "slurm.sh: nodes did not come up; see $dir/*.log" >&2
    exit 1
}

in_ctl() {
    if [ "$(cat "$dir/flat")" = 1 ]; then "$@"; else cluster run ctl -- "$@"; fi
}

in_node() {
    local node=$1
    shift
    if [ "$(cat "$dir/flat")" = 1 ]; then "$@"; else cluster run "$node" -- "$@"; fi
}

stop_pids() {  # terminates our daemons by their pid files, waits, then kills
    local file pid pids=() i
    for file in "$@"; do
        pid=$(cat "$file" 2>/dev/null) || continue
        case $(cat "/proc/$pid/comm" 2>/dev/null) in slurmctld* | slurmd* | munged) pids+=("$pid") ;; esac
    done
    [ ${#pids[@]} -gt 0 ] || return 0
    kill "${pids[@]}" 2>/dev/null || true
    for ((i = 0; i < 20; i++)); do kill -0 "${pids[@]}" 2>/dev/null || break; sleep 0.1; done
    kill -9 "${pids[@]}" 2>/dev/null || true
}

down() {
    [ -d "$dir" ] || return 0
    if [ "$(cat "$dir/flat" 2>/dev/null)" = 1 ]; then
        stop_pids "$dir"/slurmctld.pid "$dir"/slurmd.*.pid
    else
        cluster down  # their pid files hold pids of the hosts' own namespaces
    fi
    stop_pids "$dir/munged.pid"
    rm -rf "$dir"
}

verb=${1:-}
shift || true
case $verb in
up) up "$@" ;;
down) down ;;
do) in_ctl "$@" ;;
node) in_node "$@" ;;
kill) cluster kill "$1" ;;
boot) cluster boot "$1" && cluster run "$1" -- slurmd ;;
*) sed -n '2,14s/^# \?//p' "$0"; exit 2 ;;
esac
