"""The registry: all datasets and sessions, and the shared memory of each.

Only the loop thread writes it. The core has the same sessions by number; the registry holds their
descriptors, mappings, tokens and pending waits, which the core must not touch.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from creel.cache.memory.memfd import F_ADD_SEALS, F_SEAL_FUTURE_WRITE, sealed_memfd
from creel.cache.memory.shared_words import (
    DONE,
    FAILED,
    HEARTBEAT,
    KNOWN,
    READY,
    REVOKED,
    STATE,
    TRUNCATED,
    WANTED,
    WORDS_NBYTES,
    LocationTable,
    SharedWords,
)
from creel.cache.storage.manifest import Manifest
from creel.cache.storage.source import Source
from creel.daemon.core.versions import Versions
from creel.errors import MalformedError, UnavailableError
from creel.messages import Open
from creel.policies.arrays import Ids, Ints
from creel.policies.cluster.job_order import SampleObjects, hash_of

DRAINING, CLOSED = 1, 2
_MAX_WAITERS = 4096  # most pending waits of a session; workers x threads stays far below
_MAX_NAME = 4096  # most characters of a job's name
#: Bytes per object, and per record of one length: in the table, in the core's columns (state, pins)
#: and in those of the eviction policy (fewer except during planning).
_OBJECT_NBYTES = 5 + 16
#: Bytes per object for a disk tier: in the core, and in the store's index.
_DISK_NBYTES = 1 + 6
#: Bytes per manifest row beside the row: derived columns, a version and its generation.
_ROW_NBYTES = 48
#: A dataset whose tables take at most this part of the limit is kept for the whole `daemon.idle_s`.
_SMALL = 1 / 16


@dataclass(eq=False)
class DatasetRecord:
    """A registered dataset; clients can map `table_fd` only for reading."""

    key: str  # of its manifest
    manifest: Manifest
    source: Source
    table: LocationTable
    table_fd: int  # which its clients map
    record: int  # as in `LocationTable`
    tables_nbytes: int  # as the function `tables_nbytes` counts
    versions: Versions  # only the core writes it
    begins_with: tuple[str, ...] = ()  # keys of the datasets that it begins with, the longest first
    drained: bool = False  # whether another took over its residents since it was rehearsed last
    claims: set[str] = field(default_factory=set)  # tokens of clients without a session yet
    used_at: float = 0.0  # monotonic seconds when the last claim or session began or ended

    @classmethod
    def create(
        cls, manifest: Manifest, source: Source, record: int, tables_nbytes: int
    ) -> DatasetRecord:
        """Create a dataset with its location table: no residents, lengths from the manifest.

        This alone takes time proportional to the number of objects (except for records, whose table
        is all zeros). It may run in any thread.

        Args:
            record: result of `LocationTable.record_of`.
            tables_nbytes: result of the function `tables_nbytes`.
        """
        n = len(manifest)
        fd = sealed_memfd("creel-table", LocationTable.nbytes(n, record))
        try:
            table = LocationTable(fd, n, record, write=True)
            if not record:
                manifest.fill_lengths(table.length)
            fcntl.fcntl(fd, F_ADD_SEALS, F_SEAL_FUTURE_WRITE)
        except BaseException:
            os.close(fd)
            raise
        versions = Versions(n, manifest.file_bounds, manifest.remote)
        return cls(manifest.key, manifest, source, table, fd, record, tables_nbytes, versions)

    def claim(self, token: str) -> None:
        """Keep the dataset until the owner of `token` opens a session."""
        self.claims.add(token)
        self.used_at = time.monotonic()

    def unclaim(self, token: str) -> None:
        """Drop the claim of `token`, whose owner has opened a session or disconnected."""
        if token in self.claims:
            self.claims.remove(token)
            self.used_at = time.monotonic()

    def publish(self, ids: Ids | slice, place: Ints | int) -> None:
        """Publish where objects lie now: (k,) places, or NOWHERE.

        First the versions of their files: who sees the place sees of which version its bytes are.
        """
        version = self.table.version
        if version is not None and isinstance(ids, np.ndarray) and isinstance(place, np.ndarray):
            version[ids] = self.versions.held(ids.astype(np.intp))
        self.table.offset[ids] = place

    def close(self) -> None:
        self.source.close()
        self.table.close()
        os.close(self.table_fd)


def tables_nbytes(manifest: Manifest, record: int, *, disk: bool) -> int:
    """Return the bytes that a daemon keeps for all objects and rows of a manifest.

    disk: whether there is a disk tier.
    """
    rows: int = manifest.table.num_rows
    each = LocationTable.each_nbytes(record) + _OBJECT_NBYTES + disk * _DISK_NBYTES
    return len(manifest) * each + int(manifest.table.nbytes) + rows * _ROW_NBYTES


@dataclass(eq=False)
class SessionRecord:
    """One session: its shared words and the clients that wait; the core has its plan and cursors.

    Clients can write to the words, so that what the daemon has written there is kept here, too.
    """

    id: int  # as clients name it
    token: str  # of its client
    dataset: DatasetRecord
    opened: Open
    words: SharedWords
    words_fd: int  # which its clients map
    epoch: int = -1  # epoch of the latest planned step
    ready: int = 0  # READY, as it was published
    early: tuple[int, ...] = ()  # steps after READY that are ready before it
    truncates: int = 0  # number of times that its plan was cut short
    revoked: int = 0  # number of times that READY was lowered
    asked: int = 0  # highest step + 1 in a Wait
    waiters: dict[tuple[bytes, int], int] = field(default_factory=dict)  # (client, call) -> step
    #: (samples,) the object of each sample, of which the first `sampled` are known.
    samples: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    sampled: int = 0  # how many are known
    hashed: blake2b = field(default_factory=hash_of)  # of these
    object_of: SampleObjects | None = None  # the same, once all are known
    own_file: str = ""  # one that the dataset reads itself, past creel
    own_remedy: str = ""  # what would help
    rehearses: bool = False  # whether its job replays earlier data

    def remove_samples(self) -> None:
        """Forget which object each sample is: others follow, or none."""
        self.samples, self.sampled, self.object_of = np.empty(0, np.int32), 0, None

    def learn(self, first: int, samples: int, objects: NDArray[np.int32]) -> None:
        """Take the objects of the next of `samples` samples; does nothing if it leaves a gap.

        `object_of` is never written to again, as plans may use it in other threads.
        """
        if first == 0:
            self.samples, self.hashed = np.empty(samples, np.int32), hash_of()
        if first != self.sampled or samples != len(self.samples):
            return
        self.samples[first : first + len(objects)] = objects
        self.hashed.update(objects.data)
        self.sampled = first + len(objects)
        if self.sampled == samples:
            self.object_of = SampleObjects(self.samples, self.hashed)

    def claimed(self) -> tuple[int, int]:
        """Return the steps that are done and wanted as the client says: any numbers."""
        return self.words[DONE], max(self.words[WANTED], self.asked)

    def wait(self, client: bytes, call: int, step: int) -> bool:
        """Add a wait; return False if there are too many."""
        if len(self.waiters) >= _MAX_WAITERS:
            return False
        self.waiters[client, call] = step
        self.asked = max(self.asked, step + 1)
        return True

    def unready(self, step: int) -> None:
        """Lower READY to `step`, before the bytes of later steps may be overwritten."""
        self.ready = min(self.ready, step)
        self.words[READY] = self.ready
        self._set_early([k for k in self.early if k < step])
        self.revoked += 1
        self.words[REVOKED] = self.revoked

    def truncate(self, step: int) -> None:
        """End the plan at `step`."""
        self.unready(step)
        self.asked = min(self.asked, step)  # no client has asked for steps of the next plan

    def acknowledge(self, steps: int) -> None:
        """Announce that READY refers to the new plan from now on, of which `steps` are known."""
        self.words[KNOWN] = steps
        self.truncates += 1  # counted here, as the client may have written to the shared word
        self.words[TRUNCATED] = self.truncates

    def set_ready(
        self, ready: int, failed: int, early: Sequence[int]
    ) -> list[tuple[bytes, int, int]]:
        """Publish READY and the early steps; return (client, call, step) of waits that are over."""
        lost = [k for k in self.early if k >= ready and k not in early]
        if ready < self.ready or lost:
            self.unready(min((ready, *lost)))
        self.ready = ready
        self.words[FAILED] = failed
        self.words[READY] = ready
        self._set_early(early)
        return self.over()

    def _set_early(self, steps: Sequence[int]) -> None:
        if tuple(steps) != self.early:
            self.early = tuple(steps)
            self.words.set_early(steps)

    def over(self) -> list[tuple[bytes, int, int]]:
        """Remove all waits that are over; return their (client, call, step)."""
        over = [
            (client, call, s)
            for (client, call), s in self.waiters.items()
            if s < self.ready or s in self.early
        ]
        for client, call, _ in over:
            del self.waiters[client, call]
        return over

    def close(self) -> None:
        """Mark the session as closed in its shared words and unmap them."""
        self.words[STATE] = CLOSED
        self.words.close()
        os.close(self.words_fd)


def _new_words() -> tuple[SharedWords, int]:
    """Make shared words and their descriptor; raise UnavailableError if the system gives none."""
    fd = -1
    try:
        fd = sealed_memfd("creel-words", WORDS_NBYTES)
        return SharedWords(fd), fd
    except OSError as e:  # the mapping takes a descriptor, too
        if fd >= 0:
            os.close(fd)
        raise UnavailableError(f"no room for a session here: {e}") from e


class Registry:
    """All datasets and sessions, within their limits."""

    def __init__(self, *, max_datasets: int, max_sessions: int) -> None:
        self.datasets: dict[str, DatasetRecord] = {}
        self.sessions: dict[int, SessionRecord] = {}
        #: Failed reads by kind, of removed datasets.
        self.past_errors: Counter[str] = Counter()
        #: Which objects samples are, by digest: of the sessions, and of orders that the core keeps.
        self._among: weakref.WeakValueDictionary[int, SampleObjects] = weakref.WeakValueDictionary()
        self._max_datasets = max_datasets
        self._max_sessions = max_sessions
        self._ids = itertools.count(1)

    def check_room(self) -> None:
        """Raise UnavailableError if one more dataset would be too many."""
        if len(self.datasets) >= self._max_datasets:
            raise UnavailableError(
                f"the limit of {self._max_datasets} registered datasets is reached:"
                " raise daemon.max_datasets"
            )

    def add(self, dataset: DatasetRecord) -> None:
        self.datasets[dataset.key] = dataset

    def idle(self) -> list[DatasetRecord]:
        """Return datasets without claims and sessions, those longest unused first."""
        used = {s.dataset.key for s in self.sessions.values()}
        idle = [d for d in self.datasets.values() if not d.claims and d.key not in used]
        return sorted(idle, key=lambda d: d.used_at)

    def expired(
        self, now: float, linger_s: float, max_idle: int, *, tables_limit: int, room: int
    ) -> list[DatasetRecord]:
        """Return idle datasets to forget: unused for `linger_s`, or beyond `max_idle` in number.

        A dataset with large tables expires sooner, in inverse proportion to its part of the limit.

        Args:
            tables_limit: most bytes of all tables and plans.
            room: number of further datasets that must fit within `max_datasets`.
        """
        idle = self.idle()
        max_idle = min(max_idle, self._max_datasets - room - (len(self.datasets) - len(idle)))
        over = max(len(idle) - max_idle, 0)
        small = _SMALL * tables_limit
        return idle[:over] + [
            d
            for d in idle[over:]
            if now - d.used_at > linger_s * min(1.0, small / max(d.tables_nbytes, 1))
        ]

    def remove_dataset(self, dataset: DatasetRecord) -> None:
        del self.datasets[dataset.key]
        self.past_errors.update(dataset.source.counters.snapshot().errors)
        dataset.close()

    def open(self, token: str, request: Open) -> SessionRecord:
        """Open a session.

        Raises:
            UnavailableError: the dataset is unknown, there are too many sessions, or the system
                gives no descriptor for another one.
            MalformedError: the name of the job is longer than any that a loader makes.
        """
        if len(request.job) > _MAX_NAME:
            raise MalformedError(f"a job of more than {_MAX_NAME} characters")
        dataset = self.datasets.get(request.dataset)
        if dataset is None:
            raise UnavailableError(f"dataset {request.dataset!r} is not registered here")
        if len(self.sessions) >= self._max_sessions:
            raise UnavailableError(
                f"the limit of {self._max_sessions} open sessions is reached:"
                " raise daemon.max_sessions"
            )
        words, fd = _new_words()
        words[HEARTBEAT] = time.monotonic_ns()
        session = SessionRecord(next(self._ids), token, dataset, request, words, fd)
        self.sessions[session.id] = session
        dataset.unclaim(token)
        return session

    def owned(self, token: str, session_id: int) -> SessionRecord:
        """Return a session of the owner of `token`.

        Raises:
            UnavailableError: the owner has no such session.
        """
        session = self.sessions.get(session_id)
        if session is None or session.token != token:
            raise UnavailableError(f"you have no session {session_id}")
        return session

    def sessions_of(self, token: str) -> list[SessionRecord]:
        return [s for s in self.sessions.values() if s.token == token]

    def share_samples(self, session: SessionRecord) -> None:
        """Keep what samples are only once for all ranks and epochs that say the same."""
        if session.object_of is not None:
            session.object_of = self._among.setdefault(session.object_of.digest, session.object_of)
            session.samples = session.object_of.objects

    def samples_nbytes(self) -> int:
        """Return the bytes of what samples are, as sessions have said and orders refer to."""
        coming = sum(s.samples.nbytes for s in self.sessions.values() if s.object_of is None)
        return coming + sum(samples.objects.nbytes for samples in list(self._among.values()))

    def client_left(self, token: str) -> None:
        """Drop all claims of the owner of `token`, who has disconnected."""
        for dataset in self.datasets.values():
            dataset.unclaim(token)

    def remove(self, session: SessionRecord) -> None:
        del self.sessions[session.id]
        session.dataset.used_at = time.monotonic()
        session.close()

    def beat(self) -> None:
        """Write the heartbeat in the shared words of all sessions."""
        now = time.monotonic_ns()
        for session in self.sessions.values():
            session.words[HEARTBEAT] = now

    def drain(self) -> None:
        """Mark all sessions as draining: no further step will become ready."""
        for session in self.sessions.values():
            session.words[STATE] = DRAINING

    def close(self) -> None:
        for session in list(self.sessions.values()):
            self.remove(session)
        for dataset in self.datasets.values():
            dataset.close()
        self.datasets.clear()
