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
# The daemon is charged to slurmd's cgroup and sees the node's mounts: with job_container/tmpfs, or
# a container for each job, use `creel run -- python train.py` in the job instead (docs/operations.md).
#
# It never fails a job: without a daemon, the job's first loader starts one.

bin=/usr/bin
PATH=/usr/sbin:/usr/bin:/sbin:/bin
name=slurm-$SLURM_JOB_ID
tries=20  # a fifth of a second between them, and what a try takes

as_user="setpriv --reuid $SLURM_JOB_UID --regid $SLURM_JOB_GID --init-groups --reset-env"

# In a session of its own: slurmd kills what is left of the prolog's process group.
$as_user setsid "$bin/creeld" --name "$name" </dev/null >/dev/null 2>&1 &

# Until it serves: one that is still starting when this script ends may be killed.
until $as_user "$bin/creel" --name "$name" status >/dev/null 2>&1; do
    tries=$((tries - 1))
    [ "$tries" -gt 0 ] || break
    kill -0 $! 2>/dev/null || break
    sleep 0.2
done
exit 0
