"""The fetcher: threads that execute `FetchObjects` actions, earliest deadline first.

Every dataset has a queue with threads of its own. A thread that hangs in a dead mount, where no
signal reaches it, delays neither other datasets nor the exit (threads are daemonic). Checks of file
versions have queues of their own, so they wait for no read.

A fetch is cut into parts that take about 2 ms each at the queue's current speed: many small records
per part if reads are quick, one object per part if each is a round trip. One `Fetched` is posted
per fetch, after its last part.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from creel.cache.memory.arena import Arena
from creel.cache.memory.pools.free_ranges import NOWHERE
from creel.cache.storage.source import Source
from creel.cache.storage.uris import is_remote
from creel.cache.storage.version import CHANGING
from creel.daemon.core.events import (
    DISK,
    HELD,
    SOURCE,
    CancelFetches,
    Checked,
    CheckVersions,
    Fetched,
    FetchObjects,
)
from creel.daemon.peers.peer_source import PeerSource
from creel.daemon.service.storage.arena_writer import ArenaWriter
from creel.daemon.service.storage.disk import DiskSource
from creel.daemon.service.storage.fetch_queue import FetchJob, FetchQueue, Held, Readable
from creel.policies.arrays import Ints

log = logging.getLogger("creel.fetch")

#: Held objects are joined up to this size: beyond it, another copy costs more than a system call.
_JOINED_NBYTES = 64 << 10
#: Threads that copy held objects, which were read before their lengths were known.
_COPIERS = 2
#: Threads that read from one peer: one copies while the other waits.
_PEER_THREADS = 2
#: Threads that read a dataset from disk: eight have 1.6 times the rate of one (benchmarks/disk.py).
_DISK_THREADS = 8
#: So many of the latest parts are recorded, for `creel trace`.
_RECORDED = 4096
#: What an origin is called there; others are peers.
_NAMES = {SOURCE: "source", DISK: "disk", HELD: "copy"}


class FetchedPart(NamedTuple):
    """A part that was read: by which thread, from `began` to `ended` (monotonic ns), from where."""

    thread: int
    began: int
    ended: int
    objects: int
    origin: str


class Fetcher:
    """All fetch queues of a daemon.

    Args:
        arena: the memory that objects are written to.
        post: called with each `Fetched` and `Checked`, from any thread.
        other: returns the reader for an origin (peer or disk) and a dataset.
        threads: most threads of all queues together, and of one; each queue gets at least one.
    """

    def __init__(
        self,
        arena: Arena,
        post: Callable[[Fetched | Checked], None],
        other: Callable[[int, str], PeerSource | DiskSource],
        *,
        threads: int,
    ) -> None:
        self._writer = ArenaWriter(arena)
        self._post = post
        self._free_threads = threading.Semaphore(threads)
        self._threads = threads
        self._other = other
        self._queues: dict[str, FetchQueue] = {}  # by dataset
        self._other_queues: dict[tuple[str, int], FetchQueue] = {}  # by dataset and other origin
        self._checks: dict[str, FetchQueue] = {}  # the same, for versions
        self._held: dict[int, Held] = {}  # by fetch
        self._landed: Held = {}
        self._short = False  # whether the machine ran out of memory
        self.recent: deque[FetchedPart] = deque(maxlen=_RECORDED)  # what was fetched last
        self._writing: set[int] = set()  # threads that may write to the arena now
        self.pending = 0  # unanswered fetches and checks; only the loop thread writes it

    def add(self, dataset: str, source: Source) -> None:
        """Add a dataset whose fetches read from `source`, which the caller closes."""
        threads = self._threads, self._free_threads
        # By the first address: to look at all of a million takes a second.
        far = len(source.manifest) > 0 and is_remote(source.manifest.uri(0))
        self._queues[dataset] = FetchQueue(
            dataset, source, partial(self._run, source), *threads, far=far
        )
        self._checks[dataset] = FetchQueue(
            f"check-{dataset}", source, partial(self._check_part, source), *threads
        )

    def remove(self, dataset: str) -> None:
        """Remove a dataset's queues; no fetch of it may be in flight or follow."""
        more = [key for key in self._other_queues if key[0] == dataset]
        queues = [self._queues.pop(dataset), self._checks.pop(dataset)]
        for queue in queues + [self._other_queues.pop(key) for key in more]:
            queue.close()

    def remove_peer(self, origin: int) -> None:
        """End the queues of a peer: objects not read yet fail, and `origin` can be reused.

        Reads in progress also fail, at once or within the deadline to connect (2 s).
        """
        for key in [key for key in self._other_queues if key[1] == origin]:
            for job, objects in self._other_queues.pop(key).close():
                self._part_done(job, objects)

    def object_ns(self, dataset: str) -> int:
        """Return the best recent time of a thread for one object, in ns; 0: not known yet."""
        return self._queues[dataset].speed.object_ns

    def submit(self, fetch: FetchObjects) -> None:
        """Start a fetch; `Fetched` is always posted at its end."""
        self.pending += 1
        job = FetchJob(fetch, len(fetch.ids))
        if fetch.origin == HELD:
            self._held[fetch.fetch] = {i: self._landed.pop(i) for i in fetch.ids.tolist()}
        if job.left:
            self._queue(fetch.dataset, fetch.origin).put(fetch.deadline, job)
        else:
            self._finish(job)

    def cancel(self, action: CancelFetches) -> None:
        """Do not read the objects of these fetches that no thread has taken."""
        others = (queue for key, queue in self._other_queues.items() if key[0] == action.dataset)
        for queue in (self._queues[action.dataset], *others):
            for job, objects in queue.cancel(action.fetches):
                self._part_done(job, objects)

    def _queue(self, dataset: str, origin: int) -> FetchQueue:
        if origin == SOURCE:
            return self._queues[dataset]
        queue = self._other_queues.get((dataset, origin))
        if queue is None:
            if origin == HELD:
                source, threads = self._queues[dataset].source, _COPIERS
            else:
                source = self._other(origin, dataset)
                threads = _DISK_THREADS if origin == DISK else _PEER_THREADS
            run = partial(self._run, source)
            queue = FetchQueue(
                f"from{origin}", source, run, threads, self._free_threads, owned=origin != HELD
            )
            self._other_queues[dataset, origin] = queue
        return queue

    def check(self, check: CheckVersions) -> None:
        """Start a check of versions; `Checked` is always posted at its end."""
        self.pending += 1
        self._checks[check.dataset].put(check.deadline, FetchJob(check, len(check.files)))

    @contextmanager
    def landing(self, event: Fetched | Checked) -> Iterator[None]:
        """Allow the objects held for this event to be fetched from HELD while the loop handles it.

        The other held objects are freed at the end: they have no room, or are out of date.
        """
        self.pending -= 1
        self._landed = self._held.pop(event.fetch, {}) if isinstance(event, Fetched) else {}
        try:
            yield
        finally:
            self._landed = {}

    def held_nbytes(self) -> int:
        """Return the bytes in private memory that are not copied to the arena yet."""
        return sum(len(data) for held in list(self._held.values()) for data, *_ in held.values())

    def _all(self) -> list[FetchQueue]:
        return [*self._queues.values(), *self._checks.values(), *self._other_queues.values()]

    def tick(self) -> None:
        """Replace threads that hang; called periodically."""
        for queue in self._all():
            queue.tick()

    def close(self) -> None:
        """Make all threads end after their current part, without waiting for them."""
        for queue in self._all():
            queue.close()

    def join(self, timeout_s: float) -> None:
        """Wait for threads after `close`, for at most `timeout_s`: a dead mount may hold one."""
        deadline = time.monotonic() + timeout_s
        for thread in [t for queue in self._all() for t in queue.threads]:
            thread.join(max(deadline - time.monotonic(), 0))

    @property
    def ended(self) -> bool:
        """Whether, after `close`, no thread will write to the arena any more."""
        threads = [t for queue in self._all() for t in queue.threads]
        return not self._writing and not any(t.is_alive() for t in threads)

    def _run(self, source: Readable, job: FetchJob, part: slice) -> int:
        """Read or copy one part, in a queue's thread; return its number of objects."""
        objects: int = part.stop - part.start
        began = time.monotonic_ns()
        self._writing.add(threading.get_ident())
        try:
            if job.fetch.origin == HELD:
                self._copy(job, part)
            else:
                self._read(source, job, part)
        except OSError as e:  # from the arena, as sources raise none
            self._no_memory(e)
        except Exception:  # a bug of ours: the objects fail and are read directly
            log.exception("fetch %d failed", job.fetch.fetch)
        self._writing.discard(threading.get_ident())
        origin = _NAMES.get(job.fetch.origin, "peer")
        self.recent.append(
            FetchedPart(threading.get_native_id(), began, time.monotonic_ns(), objects, origin)
        )
        self._part_done(job, part.stop - part.start)
        return objects

    def _part_done(self, job: FetchJob, objects: int) -> None:
        if job.part_done(objects):
            self._finish(job)

    def _check_part(self, source: Source, job: FetchJob, part: slice) -> int:
        """Check one part, in a queue's thread; return its number of files."""
        assert isinstance(job.action, CheckVersions)  # noqa: S101
        files: int = part.stop - part.start
        try:
            job.read.version[part] = source.versions(job.action.files[part])
        except Exception:  # a bug of ours: all files count as changed and are fetched again
            log.exception("a check failed")
            job.read.version[part] = CHANGING
        if job.part_done(files):
            self._post(Checked(job.action.check, job.read.version))
        return files

    def _no_memory(self, error: OSError) -> None:
        """Log that the arena cannot be written; log a lack of memory only once, as it repeats."""
        if error.errno not in {errno.ENOSPC, errno.ENOMEM}:
            log.error("the arena cannot be written", exc_info=error)
        elif not self._short:
            self._short = True
            log.error("the machine has no memory for the arena (%s): lower memory.budget", error)

    def _finish(self, job: FetchJob) -> None:
        fetch = job.fetch
        self._held.pop(fetch.fetch, None)
        if job.held:
            self._held[fetch.fetch] = job.held
        self._post(Fetched(fetch.fetch, *job.read))

    def _read(self, source: Readable, job: FetchJob, part: slice) -> None:
        """Read one part."""
        fetch = job.fetch
        ids, offset, lengths = fetch.ids[part], fetch.offset[part], fetch.length[part]
        read = job.read.part(part)
        known = offset != NOWHERE
        if fetch.runs:
            self._writer.link(offset, lengths, fetch.runs)
        if known.all():
            read.enter(slice(None), self._writer.fill(source, ids, offset, lengths))
            return
        if known.any():
            read.enter(known, self._writer.fill(source, ids[known], offset[known], lengths[known]))
        unknown = np.flatnonzero(~known)
        for i, whole in zip(unknown.tolist(), source.read_whole(ids[unknown]), strict=True):
            if whole is not None:
                read.nbytes[i], read.version[i] = len(whole.data), whole.version
                read.asked[i] = whole.asked
                job.held[int(ids[i])] = whole

    def _copy(self, job: FetchJob, part: slice) -> None:
        """Copy held objects to their places."""
        fetch, held = job.fetch, self._held[job.fetch.fetch]
        wholes = [held[object_id] for object_id in fetch.ids[part].tolist()]
        data, offset = [whole.data for whole in wholes], fetch.offset[part]
        nbytes, version, _ = job.read.part(part)
        for first, last in _neighbours(data, offset):
            # One system call writes many small objects.
            joined = data[first] if last == first + 1 else b"".join(data[first:last])
            self._writer.write(int(offset[first]), memoryview(joined), fetch.runs)
            nbytes[first:last] = fetch.length[part][first:last]
            version[first:last] = [whole.version for whole in wholes[first:last]]


def _neighbours(data: list[bytes], offset: Ints) -> Iterator[tuple[int, int]]:
    """Yield (first, last + 1) of adjacent objects, of up to _JOINED_NBYTES together.

    >>> list(_neighbours([b"ab", b"c", b"d"], np.array([4, 6, 9])))
    [(0, 2), (2, 3)]
    """
    ends = offset + np.array([len(d) for d in data])
    separate = (offset[1:] != ends[:-1]) | (offset[1:] < NOWHERE) | (offset[:-1] < NOWHERE)
    separate |= np.diff((ends - ends[0]) // _JOINED_NBYTES) != 0
    cuts = [0, *(np.flatnonzero(separate) + 1).tolist(), len(data)]
    yield from pairwise(cuts)
