#!/bin/sh
# Slurm epilog: ends the daemon that prolog.sh has started for this job. All its memory is freed.
bin=/usr/bin
PATH=/usr/sbin:/usr/bin:/sbin:/bin
setpriv --reuid "$SLURM_JOB_UID" --regid "$SLURM_JOB_GID" --init-groups --reset-env \
    "$bin/creel" --name "slurm-$SLURM_JOB_ID" stop --now >/dev/null 2>&1
exit 0
