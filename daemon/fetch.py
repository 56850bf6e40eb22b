"""Fetching: threads that carry out the core's `Fetch` actions, earliest deadline first.

Every dataset has a lane of its own (queue and threads), so a thread that sits in a dead mount,
where no signal reaches it, holds up nobody else and not the exit either (threads are daemonic).
Versions of files are asked for in a lane of their own, behind no read.

A fetch is cut into parts that take about 2 ms each at the lane's present speed: many small records
to a part where reads are quick, one object to a part where each is a round trip. One `Fetched` goes
out per fetch, when its last part is through.
"""

from __future__ import annotations

import errno
import heapq
import logging
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from creel.cache.arena import Arena
from creel.cache.board import ABSENT
from creel.cache.source import Read, Source
from creel.cache.version import CHANGING, UNKNOWN
from creel.daemon.events import Check, Checked, Discard, Fetch, Fetched, Ids, Move, Store

log = logging.getLogger("creel.fetch")

#: A part shorter than this is eaten by hand-over costs (about 30 us), a longer one by poor spread.
_PART_S = 0.002
_PART_OBJECTS = 256
#: Read before it is written to the arena; stays within a core's cache.
_SCRATCH_NBYTES = 512 << 10
#: Up to this an object goes through such a buffer where the arena was never written to.
_LARGE_NBYTES = 1 << 20
_FIRST_GUESS_S = 0.001  # per object, before anything was measured
_FIRST_CPU_S = 0.0001
_FORGET = 0.005  # of what is known of CPU, a part: user time is counted in ticks of milliseconds
_TICKS = 0.3  # by how much their ratio may be wrong
_OF_WAIT = 0.7  # the part of a thread's waiting that other threads' computing may fill
_HUNG_S = 1.0  # a part that takes longer is not counted on
_CORES = len(os.sched_getaffinity(0))


@dataclass(eq=False)
class _Job:
    """A fetch or a check under way: filled in by its parts, each its own slice."""

    action: Fetch | Check
    nbytes: NDArray[np.int64]
    version: NDArray[np.int64]
    left: int  # objects of parts that are not through
    held: dict[int, bytes] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def fetch(self) -> Fetch:
        """What is read, where this is no check."""
        assert isinstance(self.action, Fetch)  # noqa: S101
        return self.action

    def part_done(self, objects: int) -> bool:
        """Whether a part of so many objects was the last one."""
        with self.lock:
            self.left -= objects
            return self.left == 0


class Fetcher:
    """All lanes of a daemon.

    Args:
        arena: where objects go.
        post: takes each `Fetched` and `Checked`; called from any thread.
        threads: most threads over all lanes (a lane always gets one).
        per_source: most threads of one lane.
    """

    def __init__(
        self,
        arena: Arena,
        post: Callable[[Fetched | Checked], None],
        *,
        threads: int = 32,
        per_source: int = 32,
    ) -> None:
        self._arena = arena
        self._scratch = _Scratch()
        self._post = post
        self._room = _Room(threads)
        self._per_source = per_source
        self._lanes: dict[str, _Lane] = {}
        self._checks: dict[str, _Lane] = {}
        self._held: dict[int, dict[int, bytes]] = {}
        self._short = False  # whether the machine ran out of memory
        self.pending = 0  # fetches that were not answered yet; only the loop thread counts

    def add(self, dataset: str, source: Source) -> None:
        """Fetches of `dataset` read from `source` from now on."""
        threads = self._per_source, self._room
        self._lanes[dataset] = _Lane(dataset, source, self._run, *threads)
        self._checks[dataset] = _Lane(f"check-{dataset}", source, self._look, *threads)

    def remove(self, dataset: str) -> None:
        """No fetch of `dataset` is under way, and none will come."""
        for lane in (self._lanes.pop(dataset), self._checks.pop(dataset)):
            lane.close()
            self._room.give(len(lane.threads) - 1)

    def source(self, dataset: str) -> Source:
        """The source of a dataset."""
        return self._lanes[dataset].source

    def submit(self, fetch: Fetch) -> None:
        """Begin a fetch; `Fetched` is posted at its end, whatever happens."""
        self.pending += 1
        job = _job(fetch, len(fetch.ids))
        if job.left:
            self._lanes[fetch.dataset].put(fetch.deadline, job)
        else:
            self._finish(job)

    def check(self, check: Check) -> None:
        """Begin to ask for versions; `Checked` is posted at its end, whatever happens."""
        self.pending += 1
        self._checks[check.dataset].put(check.deadline, _job(check, len(check.files)))

    def finished(self, event: Fetched | Checked) -> None:
        """The loop took this event off its queue."""
        del event
        self.pending -= 1

    def store(self, action: Store, offset: NDArray[np.int64]) -> int:
        """Copy held bytes into the arena, now, then say in the dataset's table where they are.

        Returns how many objects, of the first ones, the machine had memory for.
        """
        held = self._held[action.fetch]
        data = [held.pop(object_id) for object_id in action.ids.tolist()]
        stored = 0
        try:
            for first, last in _neighbours(data, action.offset):
                # one call of the system for many small ones
                joined = data[first] if last == first + 1 else b"".join(data[first:last])
                self._arena.write(int(action.offset[first]), memoryview(joined))
                stored = last
        except OSError as e:
            self._no_memory(e)
        offset[action.ids[:stored]] = action.offset[:stored]
        if not held:
            del self._held[action.fetch]
        return stored

    def move(self, action: Move, offset: NDArray[np.int64]) -> None:
        """Copy within the arena, now, then say in the dataset's table where the objects are."""
        arena = self._arena.array
        places = (action.src.tolist(), action.dst.tolist(), action.nbytes.tolist())
        for src, dst, nbytes in zip(*places, strict=True):
            arena[dst : dst + nbytes] = arena[src : src + nbytes]  # numpy minds overlaps
        offset[action.ids] = action.dst

    def discard(self, action: Discard) -> None:
        """Forget what is still held for a fetch."""
        self._held.pop(action.fetch, None)

    def held_nbytes(self) -> int:
        """Bytes in private memory that wait for the core's word."""
        return sum(len(data) for held in list(self._held.values()) for data in held.values())

    def _all(self) -> list[_Lane]:
        return [*self._lanes.values(), *self._checks.values()]

    def tick(self) -> None:
        """Time passed: replace threads that hang."""
        for lane in self._all():
            lane.tick()

    def close(self) -> None:
        """Tell all threads to end after their present part; waits for none of them."""
        for lane in self._all():
            lane.close()

    def join(self, timeout_s: float) -> bool:
        """Wait for the threads after `close`; whether all ended (a dead mount may hold one)."""
        deadline = time.monotonic() + timeout_s
        threads = [t for lane in self._all() for t in lane.threads]
        for thread in threads:
            thread.join(max(deadline - time.monotonic(), 0))
        return not any(thread.is_alive() for thread in threads)

    def _run(self, source: Source, job: _Job, part: slice) -> None:
        """One part, in a lane's thread."""
        try:
            self._read(source, job, part)
        except OSError as e:  # sources raise none: this is the arena
            self._no_memory(e)
        except Exception:  # our bug: the objects count as failed, readers go to the source
            log.exception("fetch %d failed", job.fetch.fetch)
        if job.part_done(part.stop - part.start):
            self._finish(job)

    def _look(self, source: Source, job: _Job, part: slice) -> None:
        """One part of a check, in a lane's thread."""
        assert isinstance(job.action, Check)  # noqa: S101
        try:
            job.version[part] = source.versions(job.action.files[part])
        except Exception:  # our bug: all count as changed, and are read anew
            log.exception("a check failed")
            job.version[part] = CHANGING
        if job.part_done(part.stop - part.start):
            self._post(Checked(job.action.check, job.version))

    def _no_memory(self, error: OSError) -> None:
        """The objects count as failed; said once, since it goes on and on."""
        if error.errno not in {errno.ENOSPC, errno.ENOMEM}:
            log.error("the arena cannot be written", exc_info=error)
        elif not self._short:
            self._short = True
            log.error("the machine has no memory for the arena (%s): lower memory.budget", error)

    def _finish(self, job: _Job) -> None:
        fetch = job.fetch
        if job.held:
            self._held[fetch.fetch] = job.held
        self._post(Fetched(fetch.fetch, job.nbytes, job.version))

    def _read(self, source: Source, job: _Job, part: slice) -> None:
        fetch = job.fetch
        ids, offset, lengths = fetch.ids[part], fetch.offset[part], fetch.length[part]
        nbytes, version = job.nbytes[part], job.version[part]
        known = offset != ABSENT
        if known.all():
            nbytes[:], version[:] = self._fill(source, ids, offset, lengths)
            return
        nbytes[known], version[known] = self._fill(
            source, ids[known], offset[known], lengths[known]
        )
        strange = np.flatnonzero(~known)
        for i, found in zip(strange.tolist(), source.read_whole(ids[strange]), strict=True):
            if found is not None:
                nbytes[i], version[i] = len(found[0]), found[1]
                job.held[int(ids[i])] = found[0]

    def _fill(
        self, source: Source, ids: Ids, offset: NDArray[np.int64], length: NDArray[np.int64]
    ) -> Read:
        """Read objects to their places, straight or by way of a buffer.

        All small ones go one way: neighbours are one read.
        """
        nbytes, version = np.full(len(ids), -1, np.int64), np.zeros(len(ids), np.int64)
        straight = length > _LARGE_NBYTES
        straight |= self._arena.written(offset[~straight], length[~straight])
        where = np.flatnonzero(straight)
        if len(where):
            parts = self._arena.parts(offset[where], length[where])
            nbytes[where], version[where] = source.read_parts(ids[where], length[where], parts)
        for where in _portions(np.flatnonzero(~straight), length):
            found = self._fill_buffered(source, ids[where], offset[where], length[where])
            nbytes[where], version[where] = found
        return Read(nbytes, version)

    def _fill_buffered(
        self, source: Source, ids: Ids, offset: NDArray[np.int64], length: NDArray[np.int64]
    ) -> Read:
        ends = length.cumsum()
        scratch = self._scratch.view(int(ends[-1]))
        read = source.read_into(ids, length, scratch[: int(ends[-1])])
        self._put(scratch, ends - length, offset, np.where(read.nbytes < 0, 0, length))
        return read

    def _put(
        self,
        scratch: memoryview,
        begins: NDArray[np.int64],
        offset: NDArray[np.int64],
        length: NDArray[np.int64],
    ) -> None:
        """Write objects that were read to their places; neighbours in both at once."""
        ends = begins + length
        joined = (ends[:-1] == begins[1:]) & (offset[:-1] + length[:-1] == offset[1:])
        first = np.flatnonzero(np.append(True, ~joined))
        last = np.append(first[1:], len(begins)) - 1
        runs = (begins[first].tolist(), ends[last].tolist(), offset[first].tolist())
        for begin, end, to in zip(*runs, strict=True):
            self._arena.write(to, scratch[begin:end])


def _job(action: Fetch | Check, size: int) -> _Job:
    return _Job(action, np.full(size, -1, np.int64), np.full(size, UNKNOWN, np.int64), size)


def _user_s() -> float:
    """CPU seconds of this thread outside the system."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_utime


def _neighbours(data: list[bytes], offset: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """(first, last + 1) of objects that lie one after the other, up to _SCRATCH_NBYTES at a time.

    >>> list(_neighbours([b"ab", b"c", b"d"], np.array([4, 6, 9])))
    [(0, 2), (2, 3)]
    """
    ends = offset + np.array([len(d) for d in data])
    apart = offset[1:] != ends[:-1]
    apart |= np.diff((ends - ends[0]) // _SCRATCH_NBYTES) != 0
    cuts = [0, *(np.flatnonzero(apart) + 1).tolist(), len(data)]
    yield from pairwise(cuts)


def _portions(where: NDArray[np.intp], length: NDArray[np.int64]) -> list[NDArray[np.intp]]:
    """`where` cut into stretches of _SCRATCH_NBYTES and what is left of the first object."""
    if not len(where):
        return []
    cut = np.flatnonzero(np.diff((length[where].cumsum() - 1) // _SCRATCH_NBYTES)) + 1
    return np.split(where, cut)


class _Scratch(threading.local):
    """A buffer for each thread, as large as was asked for."""

    _view = memoryview(bytearray())  # to be written to, also by who has nothing to write

    def view(self, nbytes: int) -> memoryview:
        """At least so many bytes of memory that this thread alone uses."""
        if len(self._view) < nbytes:
            self._view = memoryview(bytearray(max(nbytes, _SCRATCH_NBYTES)))
        return self._view


class _Room:
    """How many more threads there may be."""

    def __init__(self, threads: int) -> None:
        self._free = threads
        self._lock = threading.Lock()

    def take(self) -> bool:
        with self._lock:
            if self._free <= 0:
                return False
            self._free -= 1
            return True

    def give(self, threads: int) -> None:
        with self._lock:
            self._free += max(threads, 0)


class _Lane:
    """The queue and the threads of one source.

    As many threads work as is worth while. Where reads come from the page cache that is the number
    that can compute at once, as only one can hold the interpreter: one or two for small records,
    for large files, which the system copies, up to one a core. Where a read is a far round trip it
    is all that are allowed. Threads that hang do not count, so that one dead
    server does not take its lane along.
    """

    def __init__(
        self,
        name: str,
        source: Source,
        run: Callable[[Source, _Job, slice], None],
        limit: int,
        room: _Room,
    ) -> None:
        self.source = source
        self.threads: list[threading.Thread] = []
        self._name = name
        self._run = run
        self._limit = limit
        self._room = room
        self._heap: list[tuple[float, int, _Job, int]] = []  # from which object on
        self._waiting = 0  # objects in it
        self._count = 0
        self._idle = 0
        self._began: dict[int, float] = {}  # by thread, while it reads
        self._closed = False
        self._ready = threading.Condition()
        self._object_s = _FIRST_GUESS_S
        # Few threads until reads are seen to wait: many threads on a quick source make each other
        # wait for the interpreter, which looks like a slow source and would keep them all.
        self._wait_s = 0.0
        self._cpu_s = _FIRST_CPU_S
        self._user_s = self._total_s = 10 * _PART_S  # CPU of late: ours, and with the system's

    def put(self, deadline: float, job: _Job) -> None:
        """Queue a job."""
        with self._ready:
            heapq.heappush(self._heap, (deadline, self._count, job, 0))
            self._count += 1
            self._waiting += job.left
            self._grow()
            alone = not self.threads
        if alone:
            self._work_alone()

    def _work_alone(self) -> None:
        """The system gives no thread at all: what waits is read here, late for all, but done."""
        while True:
            with self._ready:
                if not self._heap:
                    return
                job, part = self._part()
            self._run(self.source, job, part)

    def tick(self) -> None:
        """Look whether threads hang that others must replace."""
        with self._ready:
            self._grow()

    def close(self) -> None:
        """End all threads that still listen."""
        with self._ready:
            self._closed = True
            self._heap.clear()
            self._waiting = 0
            self._ready.notify_all()
        self.source.close()

    def _part_objects(self) -> int:
        """So many objects take about _PART_S."""
        return int(min(max(_PART_S / self._object_s, 1), _PART_OBJECTS))

    def _spare(self) -> int:
        """How many more threads should be reading now."""
        hung = time.monotonic() - _HUNG_S
        busy = sum(began > hung for began in self._began.values())
        # n threads that only compute wait n - 1 times as long as they compute: no reason for more.
        at_once = self._total_s / self._user_s - _TICKS
        useful = max(int(_OF_WAIT * self._wait_s / self._cpu_s), min(int(at_once), _CORES))
        return min(-(-self._waiting // self._part_objects()), max(useful, 1) - busy)

    def _grow(self) -> None:
        """Wake or start threads for what waits; the lock is held."""
        spare = self._spare()
        if spare <= 0:
            return
        self._ready.notify(spare)
        for _ in range(min(spare - self._idle, self._limit - len(self.threads))):
            if self.threads and not self._room.take():
                return
            name = f"creel-fetch-{self._name[:8]}-{len(self.threads)}"
            thread = threading.Thread(target=self._work, name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError:  # a limit of the system's: with those there are, until `tick`
                self._room.give(min(len(self.threads), 1))
                return
            self.threads.append(thread)

    def _work(self) -> None:
        me = threading.get_ident()
        while (work := self._take(me)) is not None:
            job, part = work
            start, cpu, user = time.perf_counter(), time.thread_time(), _user_s()
            self._run(self.source, job, part)
            cpu, user = time.thread_time() - cpu, _user_s() - user
            self._measure(part.stop - part.start, time.perf_counter() - start, cpu, user)

    def _measure(self, objects: int, seconds: float, cpu: float, user: float) -> None:
        """Learn from a part; that threads may lose an update harms nobody."""
        self._user_s += user - _FORGET * self._user_s
        self._total_s += cpu - _FORGET * self._total_s
        self._object_s += (seconds / objects - self._object_s) * 0.3
        self._cpu_s += (cpu / objects - self._cpu_s) * 0.1
        wait = max(seconds - cpu, 0.0) / objects
        # Below the mean: a thread that waits for the interpreter must not look like a slow disk.
        # Not far below: where the page cache has some of what is read, the far rest needs threads.
        self._wait_s += (wait - self._wait_s) * (0.06 if wait < self._wait_s else 0.03)

    def _take(self, me: int) -> tuple[_Job, slice] | None:
        with self._ready:
            self._began.pop(me, None)
            while self._spare() <= 0:
                if self._closed:
                    return None
                self._idle += 1
                self._ready.wait()
                self._idle -= 1
            self._began[me] = time.monotonic()
            return self._part()

    def _part(self) -> tuple[_Job, slice]:
        """Cut the next part off the most urgent job; its size is what was learnt up to now."""
        deadline, count, job, start = self._heap[0]
        stop = min(start + self._part_objects(), len(job.nbytes))
        if stop < len(job.nbytes):
            heapq.heapreplace(self._heap, (deadline, count, job, stop))
        else:
            heapq.heappop(self._heap)
        self._waiting -= stop - start
        return job, slice(start, stop)
