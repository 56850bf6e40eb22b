"""The books: which datasets and sessions there are, and the shared memory that belongs to each.

One writer, the loop thread. The core knows the same sessions by number; the books hold what the
core must not touch: descriptors, mappings, tokens, who waits for an answer.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from creel.cache.board import (
    ABSENT,
    BOARD_NBYTES,
    DONE,
    FAILED,
    HEARTBEAT,
    KNOWN,
    READY,
    REVOKED,
    STATE,
    TRUNCATED,
    WANTED,
    Board,
    Table,
    sealed_memfd,
)
from creel.cache.manifest import Manifest
from creel.cache.source import Source
from creel.cache.space import Lengths
from creel.daemon.versions import Versions
from creel.errors import MalformedError, UnavailableError
from creel.messages import Open

DRAINING, CLOSED = 1, 2
#: Linux 5.1: whoever maps the descriptor from now on maps it read-only. `fcntl` has no name for it.
_F_SEAL_FUTURE_WRITE = 0x0010
_MAX_WAITERS = 4096  # of one session; workers x threads stays far below
_MAX_NAME = 4096  # characters of a job or a session
#: What an object costs: 16 bytes in the table, 13 in the core's columns, 16 in its keeper's.
_OBJECT_NBYTES = 45
#: What a row of a manifest costs beside the row itself: columns made of it, a version.
_ROW_NBYTES = 40
#: A dataset whose tables take this part of the limit, or less, is kept for all of `daemon.idle_s`.
_SMALL = 1 / 16


@dataclass(eq=False)
class Dataset:
    """A registered manifest; `table_fd` is read-only for whoever maps it now."""

    key: str
    manifest: Manifest
    source: Source
    table: Table
    table_fd: int
    lengths: Lengths
    tables_nbytes: int  # of all that is kept per object and per row
    versions: Versions  # written by the core alone
    claims: set[str] = field(default_factory=set)  # owners that registered it and opened nothing
    used_at: float = 0.0  # when the last claim or session on it ended or began, monotonic seconds

    @classmethod
    def create(cls, manifest: Manifest, source: Source) -> Dataset:
        """Make the shared table: nothing is resident, lengths are as the manifest says.

        This alone takes time in proportion to the number of objects, and needs no loop.
        """
        fd = sealed_memfd("creel-table", Table.nbytes(len(manifest)))
        try:
            table = Table(fd, len(manifest), write=True)
            table.offset[:] = ABSENT
            manifest.fill_lengths(table.length)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)
        except BaseException:
            os.close(fd)
            raise
        versions = Versions(len(manifest), manifest.file_bounds, manifest.remote)
        sums = manifest.summed(), tables_nbytes(manifest)
        return cls(manifest.key, manifest, source, table, fd, *sums, versions)

    def claim(self, token: str) -> None:
        """The owner of `token` means to open a session; until then the dataset stays."""
        self.claims.add(token)
        self.used_at = time.monotonic()

    def unclaim(self, token: str) -> None:
        """The owner of `token` has opened a session, or is gone."""
        if token in self.claims:
            self.claims.remove(token)
            self.used_at = time.monotonic()

    def close(self) -> None:
        """Give back descriptor and mapping."""
        self.source.close()
        self.table.close()
        os.close(self.table_fd)


def tables_nbytes(manifest: Manifest) -> int:
    """Memory for all that a daemon keeps per object and per row of this manifest, in bytes."""
    rows: int = manifest.table.num_rows
    return len(manifest) * _OBJECT_NBYTES + int(manifest.table.nbytes) + rows * _ROW_NBYTES


@dataclass(eq=False)
class Session:
    """One stream of steps. `steps` are known, `done` and `wanted` what the core was last told."""

    id: int
    token: str
    dataset: Dataset
    opened: Open
    board: Board
    board_fd: int
    steps: int = 0
    epoch: int = -1  # that was told last
    done: int = 0
    wanted: int = 0
    ready: int = 0
    truncates: int = 0
    revoked: int = 0  # how often READY went back
    asked: int = 0  # highest step + 1 that came in a Wait
    waiters: dict[tuple[bytes, int], int] = field(default_factory=dict)  # (who, call) -> step

    def progress(self) -> tuple[int, int] | None:
        """(done, wanted) when the board or a Wait moved them, within what is possible."""
        board = self.board
        done = min(max(board[DONE], self.done), self.steps)
        wanted = min(max(board[WANTED], self.asked, self.wanted), self.steps)
        if done == self.done and wanted == self.wanted:
            return None
        self.done, self.wanted = done, wanted
        return done, wanted

    def wait(self, who: bytes, call: int, step: int) -> bool:
        """Remember who waits; False when too many do."""
        if len(self.waiters) >= _MAX_WAITERS:
            return False
        self.waiters[who, call] = step
        self.asked = max(self.asked, step + 1)
        return True

    def unready(self, step: int) -> None:
        """The bytes of all steps from `step` on may go: who reads them must know before they do."""
        self.ready = min(self.ready, step)
        self.board[READY] = self.ready
        self.revoked += 1
        self.board[REVOKED] = self.revoked

    def truncate(self, step: int) -> None:
        """The plan ends at `step`."""
        self.unready(step)
        self.steps = min(self.steps, step)
        self.done, self.wanted = min(self.done, self.steps), min(self.wanted, self.steps)
        self.asked = min(self.asked, self.steps)  # nobody has asked for steps of the next plan

    def acknowledge(self) -> None:
        """READY speaks of the new plan from now on."""
        self.board[KNOWN] = self.steps
        self.truncates += 1  # the board's own word may have been written by its client
        self.board[TRUNCATED] = self.truncates

    def set_ready(self, ready: int, failed: int) -> list[tuple[bytes, int, int]]:
        """Publish; (who, call, step) of all whose wait is over."""
        self.ready = ready
        self.board[FAILED] = failed
        self.board[READY] = ready
        return self.over()

    def over(self) -> list[tuple[bytes, int, int]]:
        """(who, call, step) of all whose wait is over; they are told once."""
        over = [(who, call, s) for (who, call), s in self.waiters.items() if s < self.ready]
        for who, call, _ in over:
            del self.waiters[who, call]
        return over

    def close(self) -> None:
        """Say so on the board and give it back."""
        self.board[STATE] = CLOSED
        self.board.close()
        os.close(self.board_fd)


def _new_board() -> tuple[Board, int]:
    """A board and its descriptor; UnavailableError where there is none to be had."""
    fd = -1
    try:
        fd = sealed_memfd("creel-board", BOARD_NBYTES)
        return Board(fd), fd
    except OSError as e:  # the mapping takes a descriptor, too
        if fd >= 0:
            os.close(fd)
        raise UnavailableError(f"no room for a session here: {e}", retry_after=10.0) from e


class Registry:
    """All datasets and sessions, within their limits."""

    def __init__(self, *, max_datasets: int, max_sessions: int) -> None:
        self.datasets: dict[str, Dataset] = {}
        self.sessions: dict[int, Session] = {}
        #: Failed reads by kind, of datasets that are known no more.
        self.past_errors: Counter[str] = Counter()
        self._max_datasets = max_datasets
        self._max_sessions = max_sessions
        self._ids = itertools.count(1)

    def check_room(self) -> None:
        """Raise UnavailableError when one more dataset would be too many."""
        if len(self.datasets) >= self._max_datasets:
            raise UnavailableError(
                f"{self._max_datasets} datasets are known, which is the limit:"
                " raise daemon.max_datasets"
            )

    def add(self, dataset: Dataset) -> None:
        """Enter a dataset that is not yet known."""
        self.datasets[dataset.key] = dataset

    def idle(self) -> list[Dataset]:
        """Datasets that nobody uses, those longest unused first."""
        used = {s.dataset.key for s in self.sessions.values()}
        idle = [d for d in self.datasets.values() if not d.claims and d.key not in used]
        return sorted(idle, key=lambda d: d.used_at)

    def spare(
        self, now: float, linger_s: float, most: int, *, limit: int, room: int = 0
    ) -> list[Dataset]:
        """Idle datasets that should go: unused for `linger_s`, or more than `most` of them.

        One with large tables goes sooner: in inverse proportion to its part of the limit.

        Args:
            limit: bytes that all tables and plans may take.
            room: so many more must find a place within the limit on all.
        """
        idle = self.idle()
        most = min(most, self._max_datasets - room - (len(self.datasets) - len(idle)))
        over = max(len(idle) - most, 0)
        small = _SMALL * limit
        return idle[:over] + [
            d
            for d in idle[over:]
            if now - d.used_at > linger_s * min(1.0, small / max(d.tables_nbytes, 1))
        ]

    def forget(self, dataset: Dataset) -> None:
        """Strike a dataset out and give its memory back."""
        del self.datasets[dataset.key]
        self.past_errors.update(dataset.source.counters.snapshot().errors)
        dataset.close()

    def open(self, token: str, request: Open) -> Session:
        """Enter a session.

        Raises:
            UnavailableError: the dataset is unknown, there are too many sessions, or the system
                gives no descriptor for one more.
            MalformedError: a job or a name as long as no loader makes one.
        """
        if max(len(request.job), len(request.name)) > _MAX_NAME:
            raise MalformedError(f"a job or a name of more than {_MAX_NAME} characters")
        dataset = self.datasets.get(request.dataset)
        if dataset is None:
            raise UnavailableError(f"dataset {request.dataset!r} is not registered here")
        if len(self.sessions) >= self._max_sessions:
            raise UnavailableError(
                f"{self._max_sessions} sessions are open, which is the limit:"
                " raise daemon.max_sessions",
                retry_after=10.0,
            )
        board, fd = _new_board()
        board[HEARTBEAT] = time.monotonic_ns()
        session = Session(next(self._ids), token, dataset, request, board, fd)
        self.sessions[session.id] = session
        dataset.unclaim(token)
        return session

    def owned(self, token: str, session_id: int) -> Session:
        """A session of the owner of `token`.

        Raises:
            UnavailableError: there is none.
        """
        session = self.sessions.get(session_id)
        if session is None or session.token != token:
            raise UnavailableError(f"no session {session_id} of yours")
        return session

    def of(self, token: str) -> list[Session]:
        """All sessions of the owner of `token`."""
        return [s for s in self.sessions.values() if s.token == token]

    def left(self, token: str) -> None:
        """The owner of `token` is gone and means to open nothing more."""
        for dataset in self.datasets.values():
            dataset.unclaim(token)

    def remove(self, session: Session) -> None:
        """Strike a session out."""
        del self.sessions[session.id]
        session.dataset.used_at = time.monotonic()
        session.close()

    def beat(self) -> None:
        """Write the heartbeat on all boards."""
        now = time.monotonic_ns()
        for session in self.sessions.values():
            session.board[HEARTBEAT] = now

    def drain(self) -> None:
        """Tell all clients that nothing new will come."""
        for session in self.sessions.values():
            session.board[STATE] = DRAINING

    def progress(self) -> Iterator[tuple[Session, int, int]]:
        """(session, done, wanted) of those that moved."""
        for session in list(self.sessions.values()):
            moved = session.progress()
            if moved is not None:
                yield session, *moved

    def close(self) -> None:
        """Give everything back."""
        for session in list(self.sessions.values()):
            self.remove(session)
        for dataset in self.datasets.values():
            dataset.close()
        self.datasets.clear()
