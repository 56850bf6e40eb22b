"""PBS hook: a daemon of the job's user on each of the job's hosts, named after the job.

    creel pbs show > creel-hook.py
    qmgr -c "create hook creel event = 'execjob_begin,execjob_launch,execjob_end', alarm = 60"
    qmgr -c "import hook creel application/x-python default creel-hook.py"

creel must be installed at the same path on all hosts. Where PBS has the event execjob_abort, add
it to the list: it ends the daemon of a job that could not begin.

Written from PBS's documentation (pbs_module, pbs_hook_attributes), and never run under PBS.

`qsub -v CREEL_WARM=/shared/images` loads that folder, file or address ahead. The job waits for it
WARM_S seconds at most; the daemon goes on meanwhile.

The daemon is charged to pbs_mom's cgroup and sees the host's mounts: in a container for each job,
use `creel run -- python train.py` instead. A task that ssh starts is not told of the daemon, and
starts one of its own.

It never fails a job: without a daemon, the job's first loader starts one.
"""

import hashlib
import os
import re
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pbs

BIN = "/usr/bin"
ENV = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
START_S, WARM_S, END_S = 10, 20, 15  # longest times that the job waits
SECRET = Path("/etc/pbs-creel.key")  # optional, the same on all hosts, mode 0600: for jobs' keys
KEYS = Path("/run/creel-pbs")  # of all jobs


def name_of(job):
    """Return the name of the job's daemon; an id may be 7.server or 7[3].server."""
    return "pbs-" + re.sub(r"[^A-Za-z0-9.-]", "-", job.id)


def number(which, job):
    """Return the number of the job's user ("-u") or group ("-g"), wherever accounts are kept."""
    return subprocess.check_output(["id", which, job.euser], env=ENV).decode().strip()


def start(job, program, *words):
    """Start a program as the job's user, in a session of its own, which outlives the hook."""
    user = ["--reuid", number("-u", job), "--regid", number("-g", job), "--init-groups"]
    command = ["setpriv", *user, "--reset-env", "setsid", f"{BIN}/{program}", *words]
    none = subprocess.DEVNULL
    return subprocess.Popen(command, env=ENV, stdin=none, stdout=none, stderr=none)


def creel(job, seconds, *words):
    """Run a command on the job's daemon, so long at most; return whether all was well."""
    process = start(job, "creel", "--name", name_of(job), *words)
    try:
        return process.wait(seconds) == 0
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return False


def begin(job):
    if SECRET.exists():
        write_key(job)
    daemon = start(job, "creeld", "--name", name_of(job))
    until = time.time() + START_S
    while not creel(job, 5, "status"):
        if time.time() > until or daemon.poll() is not None:
            return
        time.sleep(0.2)
    target = (job.Variable_List or {}).get("CREEL_WARM")
    if target:
        creel(job, WARM_S, "warm", target)


def write_key(job):
    """Derive a key for the daemons of a job without torch.distributed (cluster.key_file)."""
    KEYS.mkdir(mode=0o711, exist_ok=True)
    path = KEYS / name_of(job)
    path.touch(mode=0o600)
    path.write_text(hashlib.sha256(SECRET.read_bytes() + job.id.encode()).hexdigest() + "\n")
    os.chown(path, int(number("-u", job)), -1)


def launch(job, environment):
    """Tell a task of the job the daemon's name, and where the job's key is."""
    if creel(job, 5, "status"):
        environment["CREEL_SOCKET"] = name_of(job)
    given = "CREEL_CLUSTER__KEY_FILE" in environment or "CREEL_CLUSTER_KEY" in environment
    if (KEYS / name_of(job)).exists() and not given:
        environment["CREEL_CLUSTER__KEY_FILE"] = str(KEYS / name_of(job))


def end(job):
    creel(job, 5, "stop", "--now")
    until = time.time() + END_S
    while daemons(job) and time.time() < until:
        time.sleep(0.2)
    for pid in daemons(job):
        os.kill(pid, signal.SIGKILL)
    if (KEYS / name_of(job)).exists():
        (KEYS / name_of(job)).unlink()


def daemons(job):
    """Return the process ids of the job's daemon while it lives."""
    words, owner = f"/creeld\0--name\0{name_of(job)}\0".encode(), int(number("-u", job))
    pids = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            if process.stat().st_uid == owner and words in (process / "cmdline").read_bytes():
                pids.append(int(process.name))
    return pids


def main(event):
    try:
        if event.type == pbs.EXECJOB_BEGIN:
            begin(event.job)
        elif event.type == pbs.EXECJOB_LAUNCH:
            launch(event.job, event.env)
        else:
            end(event.job)
    except Exception as error:  # noqa: BLE001  a hook that fails would fail the job
        pbs.logmsg(pbs.LOG_WARNING, f"creel: {error!r}")


main(pbs.event())
