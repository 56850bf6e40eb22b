#!/bin/sh
# Slurm epilog: ends the daemon that prolog.sh has started for this job. All its memory is freed.
bin=/usr/bin
PATH=/usr/sbin:/usr/bin:/sbin:/bin
folder=/run/creel-slurm  # of all jobs: it stays, as another prolog may be about to write there
name=slurm-$SLURM_JOB_ID
end_s=15  # for a last answer, and for writing what belongs on the disk tier

daemon() {  # prints its process id while it lives
    for process in /proc/[0-9]*; do
        [ "$(stat -c %u "$process" 2>/dev/null)" = "$SLURM_JOB_UID" ] || continue
        case $(tr '\0' ' ' <"$process/cmdline") in
        *"/creeld --name $name "*) echo "${process#/proc/}" ;;
        esac
    done 2>/dev/null
}

timeout 5 setpriv --reuid "$SLURM_JOB_UID" --regid "$SLURM_JOB_GID" --init-groups --reset-env \
    "$bin/creel" --name "$name" stop --now >/dev/null 2>&1
until=$(($(date +%s) + end_s))
while [ -n "$(daemon)" ] && [ "$(date +%s)" -lt "$until" ]; do
    sleep 0.2
done
pids=$(daemon)
[ -z "$pids" ] || kill -KILL $pids 2>/dev/null
rm -f "$folder/$SLURM_JOB_ID.key"
exit 0
