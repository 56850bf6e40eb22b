#!/bin/sh
# Slurm task prolog: tells each task the name of the daemon that prolog.sh has started for its job.
bin=/usr/bin
if "$bin/creel" --name "slurm-$SLURM_JOB_ID" status >/dev/null 2>&1; then
    echo "export CREEL_SOCKET=slurm-$SLURM_JOB_ID"
fi
exit 0
