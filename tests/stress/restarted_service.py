"""Two trainings whose service is restarted again and again, with memory for two thirds of the data.

    sudo python -m stress.restarted_service [SECONDS]

Needs what `testbed.booted` needs. Prints for each training its epochs, its wrong batches and its
longest wait; ends with 1 if a batch was wrong.
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path

from testbed.booted import CREEL, USER, Booted

_TRAIN = str(Path(__file__).parents[1] / "testbed" / "train_over_restart.py")
_PYTHON = str(CREEL.with_name("python"))
_UNIT = f"creeld@{USER}"
_SETTINGS = "[memory]\nbudget = '10MiB'\n"


def main(seconds: float) -> int:
    with Booted() as machine:
        assert not machine.failed, machine.failed
        machine.run(str(CREEL), "service", "install", "--system")
        script = 'mkdir -p .config/creel data && printf "$0" > .config/creel/config.toml'
        machine.run_as_user("sh", "-c", script, _SETTINGS)
        machine.run_as_user(_PYTHON, _TRAIN, "make", "data", "800")
        for words in (("daemon-reload",), ("start", _UNIT)):
            machine.run("systemctl", *words)
        trainings = [machine.start(_PYTHON, _TRAIN, "data", "stop") for _ in range(2)]
        until, pauses = time.monotonic() + seconds, random.Random(0)
        while time.monotonic() < until:
            time.sleep(pauses.uniform(1, 8))
            machine.run("systemctl", "reset-failed", _UNIT)  # it allows five starts a minute
            machine.run("systemctl", "restart", _UNIT)
        machine.run_as_user("touch", "stop")
        answers = [
            json.loads(process.communicate(timeout=110)[0].splitlines()[-1])
            for process in trainings
        ]
    for answer in answers:
        print(answer)
    return int(any(answer["wrong"] for answer in answers))


if __name__ == "__main__":
    raise SystemExit(main(float(sys.argv[1]) if len(sys.argv) > 1 else 150))
