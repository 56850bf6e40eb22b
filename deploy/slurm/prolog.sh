#!/bin/sh
# Slurm prolog: a daemon of the job's user on each of the job's nodes, named after the job.
#
#     creel slurm show prolog      > /etc/slurm/creel-prolog.sh         # chmod 755, on all nodes
#     creel slurm show task-prolog > /etc/slurm/creel-task-prolog.sh
#     creel slurm show epilog      > /etc/slurm/creel-epilog.sh
#
# and in slurm.conf: PrologFlags=Alloc, Prolog=, TaskProlog= and Epilog= with these paths. creel
# must be installed at the same path on all nodes.
#
# `sbatch --comment=creel:warm=/shared/images` loads that folder, file or address ahead. The job
# waits for it `warm_s` seconds at most; the daemon goes on meanwhile.
#
# The daemon is charged to slurmd's cgroup and sees the node's mounts: with job_container/tmpfs, or
# a container for each job, use `creel run -- python train.py` in the job instead (docs/slurm.md).
#
# It never fails a job: without a daemon, the job's first loader starts one.

bin=/usr/bin
PATH=/usr/sbin:/usr/bin:/sbin:/bin
start_s=10 warm_s=20           # longest times that the job waits
secret=/etc/slurm/creel.key    # optional, the same on all nodes, mode 0600: a key for each job
folder=/run/creel-slurm

name=slurm-$SLURM_JOB_ID
as_user="setpriv --reuid $SLURM_JOB_UID --regid $SLURM_JOB_GID --init-groups --reset-env"

# A key for the daemons of jobs without torch.distributed (cluster.key_file); no job learns another's.
if [ -r "$secret" ]; then
    mkdir -p -m 711 "$folder"
    key=$folder/$SLURM_JOB_ID.key
    (umask 077 && { cat "$secret" && echo "$SLURM_JOB_ID"; } | sha256sum | cut -c -64 >"$key")
    chown "$SLURM_JOB_UID" "$key"
fi

# In a session of its own: slurmd kills what is left of the prolog's process group. A requeued job
# may find its daemon still there.
$as_user setsid "$bin/creeld" --name "$name" </dev/null >/dev/null 2>&1 &

# Until it serves: one that is still starting when this script ends may be killed.
until=$(($(date +%s) + start_s))
until timeout 5 $as_user "$bin/creel" --name "$name" status >/dev/null 2>&1; do
    [ "$(date +%s)" -lt "$until" ] || exit 0
    kill -0 $! 2>/dev/null || exit 0
    sleep 0.2
done

case $SLURM_JOB_COMMENT in
creel:warm=*)
    timeout "$warm_s" $as_user "$bin/creel" --name "$name" warm "${SLURM_JOB_COMMENT#creel:warm=}" \
        </dev/null >/dev/null 2>&1
    ;;
esac
exit 0
