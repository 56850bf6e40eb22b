"""A booted systemd to test unit files in: the container of systemd.sh, with a user and creel."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import TracebackType

from kit import unique_name
from testbed.cluster import SCRATCH_DIR

SCRIPT = Path(__file__).with_name("systemd.sh")
CREEL = Path(sys.executable).with_name("creel")
USER = "alice"
_HOME = f"cd /home/{USER} && export HOME=$PWD XDG_RUNTIME_DIR=/run/user/$(id -u)"
_AS_USER = ("runuser", "-u", USER, "--", "sh", "-c", f'{_HOME} && exec "$@"', "sh")


def unavailable() -> str:
    """Return why no systemd can be booted here, or ""."""
    if os.geteuid() != 0:
        return "needs root"
    for program in ("systemd-nspawn", "unshare", "nsenter", "useradd"):
        if not shutil.which(program):
            return f"needs {program} (systemd-container)"
    if not CREEL.with_name("creeld").exists():
        return "needs an environment with creeld"
    return ""


def _hidden() -> list[str]:
    """Return what the container would not see: it has a /run and a /tmp of its own."""
    needed = {SCRIPT.parents[2], Path(sys.prefix), Path(sys.base_prefix)}
    return [str(path) for path in needed if path.parts[1] in {"run", "tmp"}]


class Booted:
    """The container; all that is written in it vanishes with it.

    Attributes:
        failed: why it did not boot, or "".
    """

    def __init__(self) -> None:
        folder = SCRATCH_DIR / unique_name()
        self._env = os.environ | {"SYSTEMD_TESTBED_DIR": str(folder), "BIND": ":".join(_hidden())}
        done = self._script("up")
        self.failed = "" if done.returncode == 0 else done.stderr
        if not self.failed:
            home = Path(sys.base_prefix)
            paths = {path for place in (home, CREEL) for path in place.parents}
            self.run("chmod", "a+x", *map(str, paths))
            self.run("useradd", "--create-home", USER)

    def _script(self, *words: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(SCRIPT), *words],
            env=self._env,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def run(self, *words: str, check: bool = True, timeout_s: float = 60) -> str:
        """Run a command as root; return its output."""
        done = self._script("do", *words, timeout_s=timeout_s)
        assert not check or done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    def run_as_user(self, *words: str, check: bool = True, timeout_s: float = 60) -> str:
        """Run a command as the user, in the user's home; return its output."""
        return self.run(*_AS_USER, *words, check=check, timeout_s=timeout_s)

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Start a command as the user."""
        command = [str(SCRIPT), "do", *_AS_USER, *words]
        return subprocess.Popen(command, env=self._env, stdout=subprocess.PIPE, text=True)

    def property(self, unit: str, name: str) -> str:
        return self.run("systemctl", "show", unit, "-p", name, "--value").strip()

    def __enter__(self) -> Booted:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, at: TracebackType | None
    ) -> None:
        self._script("down")
