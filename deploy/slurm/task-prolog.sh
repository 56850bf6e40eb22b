#!/bin/sh
# Slurm task prolog: tells each task the name of the daemon that prolog.sh has started for its job,
# and where the job's key is.
bin=/usr/bin
if timeout 5 "$bin/creel" --name "slurm-$SLURM_JOB_ID" status >/dev/null 2>&1; then
    echo "export CREEL_SOCKET=slurm-$SLURM_JOB_ID"
fi
key=/run/creel-slurm/$SLURM_JOB_ID.key
if [ -z "$CREEL_CLUSTER__KEY_FILE$CREEL_CLUSTER_KEY" ] && [ -r "$key" ]; then
    echo "export CREEL_CLUSTER__KEY_FILE=$key"
fi
exit 0
