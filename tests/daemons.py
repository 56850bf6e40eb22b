"""Real daemons for system tests: each has a name of its own, is started, watched and ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import psutil
from numpy.typing import NDArray

from creel.cache.storage.manifest import Manifest
from creel.errors import NoDaemonError
from creel.loader.client.client import Client
from creel.loader.client.session import Session
from creel.loader.data.tracing.journal import JOURNAL
from forks import Forked, prepare
from kit import until


class Running:
    """A daemon process that serves when the constructor returns."""

    def __init__(
        self,
        name: str,
        *flags: str,
        memory: str = "32MiB",
        env: Mapping[str, str] | None = None,
        fresh: bool = False,
    ) -> None:
        """`fresh`: start a new process instead of a fork, with its own memory (see forks.py)."""
        self.name = name
        arguments = ["--name", name, "--memory", memory, *flags]
        env = {**os.environ, **(env or {})}
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed by `kill`; a pipe could fill up
        self.process: subprocess.Popen[bytes] | Forked
        if fresh or COMMAND != _PREPARED:
            command = [sys.executable, *COMMAND, *arguments]
            self.process = subprocess.Popen(command, stderr=self._log, env=env)
        else:
            fds = [0, 1, self._log.fileno()]
            self.process = Forked(_LINE, ["creel.daemon", *arguments], fds, env)
        try:
            until(self._serves, 90, event="the daemon serves")
        except BaseException:
            self.kill()
            raise

    @property
    def pid(self) -> int:
        return self.process.pid

    def client(self, role: str = "trainer", token: str = "") -> Client:
        return Client.connect(self.name, role, token)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def log(self) -> str:
        """Return what the daemon has logged so far."""
        return os.pread(self._log.fileno(), 1 << 24, 0).decode()

    def end(self) -> str:
        """Send SIGTERM and wait for a clean exit; return the log."""
        self.process.terminate()
        assert self.process.wait(60) == 0, self.log()
        return self.log()

    def kill(self) -> None:
        """Kill the daemon if it has not ended; pytest shows its log if a test fails."""
        if self.process.poll() is None:
            self.process.kill()
        else:
            sys.stderr.write(f"{self.log()}(the daemon ended: {self.process.returncode})\n")
        self.process.wait()
        self._log.close()

    def fds(self) -> int:
        return int(psutil.Process(self.pid).num_fds())

    def journals(self) -> int:
        """Return how many descriptors of journals the daemon has."""
        journals = 0
        for link in Path(f"/proc/{self.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                journals += f"memfd:{JOURNAL} " in str(link.readlink())
        return journals

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def _serves(self) -> bool:
        if self.process.poll() is not None:
            raise AssertionError(f"the daemon ended: {self.log()}")
        try:
            self.client("cli").close()
        except NoDaemonError:
            return False
        return True


#: Arguments of Python; if they are these, a prepared process is forked instead.
COMMAND = _PREPARED = ("-m", "creel.daemon")
_LINE = prepare("daemon")


def status(daemon: Running) -> dict[str, object]:
    """Return the daemon's answer to `creel status`."""
    with daemon.client("cli") as client:
        return client.ask("status")


def folder(path: Path, sizes: Sequence[int], *, known: bool = True) -> Manifest:
    """Write files of random bytes, `path/0000`, ...; return their manifest."""
    rng = np.random.default_rng(len(sizes))
    for i, size in enumerate(sizes):
        (path / f"{i:04}").write_bytes(rng.bytes(size))
    names = [f"{i:04}" for i in range(len(sizes))]
    return Manifest.of_files(names, root=str(path), lengths=list(sizes) if known else None)


def opened(
    client: Client,
    dataset: Manifest | str,
    job: str = "",
    rank: int = 0,
    world: int = 1,
    recheck: str = "never",
) -> Session:
    """A session over a dataset; a manifest is registered first."""
    key = dataset if isinstance(dataset, str) else client.register(dataset)
    return client.open(key, job, rank, world, recheck)


def plan(
    session: Session, ids: NDArray[np.integer], batch: int, epoch: int = 0, at: int = 0
) -> int:
    """Extend the plan by one epoch of batches; return the step after it."""
    ends = np.append(np.arange(batch, len(ids), batch), len(ids))
    assert session.extend(epoch, at, ids, ends)
    return at + len(ends)


def content(session: Session, object_id: int) -> bytes | None:
    """Return an object's bytes in the arena, or None if it is not there."""
    pieces = session.pieces(np.array([object_id])).get(object_id)
    return None if pieces is None else b"".join(pieces)


def read_steps(
    session: Session, manifest: Manifest, ids: NDArray[np.integer], batch: int, at: int = 0
) -> int:
    """Read all batches as a trainer does, check every byte; return how many came from the arena."""
    hits = 0
    for step, start in enumerate(range(0, len(ids), batch), at):
        assert session.wait(step, 20), f"step {step} is not ready"
        for i in ids[start : start + batch].tolist():
            data = content(session, i)
            if data is not None:
                hits += 1
                assert data == Path(manifest.uri(i)).read_bytes(), f"object {i}"
        session.done(step + 1)
    return hits
