"""A queue of the fetcher: the reads from one source, and the threads that do them."""

from __future__ import annotations

import heapq
import math
import resource
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from creel.cache.storage.reads import Read, WholeObject
from creel.cache.storage.source import Source
from creel.daemon.core.events import CheckVersions, FetchObjects
from creel.daemon.peers.peer_source import PeerSource
from creel.daemon.service.storage.disk import DiskSource
from creel.policies.concurrency import Concurrency
from creel.system.limits import cores

#: A source of a queue: a dataset's storage, a peer, or the disk.
Readable: TypeAlias = Source | PeerSource | DiskSource

#: By object id: objects in private memory.
Held: TypeAlias = dict[int, WholeObject]


@dataclass(eq=False)
class FetchJob:
    """A fetch or a check in flight; each part fills its own slice of `read`."""

    action: FetchObjects | CheckVersions
    objects: int  # number of objects, or of files of a check
    held: Held = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.read = Read.failed(self.objects)
        self.left = self.objects  # objects of unfinished parts

    @property
    def fetch(self) -> FetchObjects:
        """The action, if this is a fetch."""
        assert isinstance(self.action, FetchObjects)  # noqa: S101
        return self.action

    def part_done(self, objects: int) -> bool:
        """Note the end of a part of `objects` objects; return whether it was the last one."""
        with self.lock:
            self.left -= objects
            return self.left == 0


def _user_s() -> float:
    """Return the CPU seconds of this thread in user mode."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_utime


class FetchQueue:
    """The queue and the threads of one source.

    `Concurrency` decides how many threads work; each takes one part at a time.

    Args:
        run: reads a part; returns the number of objects in it that measure the source's speed.
        limit: most threads.
        free_threads: has a permit for each thread that all queues may start beside their first.
        owned: whether the source is closed with the queue.
        far: whether each read is a request to a server.
    """

    def __init__(
        self,
        name: str,
        source: Readable,
        run: Callable[[FetchJob, slice], int],
        limit: int,
        free_threads: threading.Semaphore,
        *,
        owned: bool = False,
        far: bool = False,
    ) -> None:
        self.source = source
        self._owned = owned
        self.threads: list[threading.Thread] = []
        self._name = name
        self._run = run
        self._limit = limit
        self._free_threads = free_threads
        #: Deadline, order of arrival, job, and the first object of it that no thread has taken.
        self._heap: list[tuple[float, int, FetchJob, int]] = []
        self._waiting = 0  # objects in the heap
        self._count = 0  # of requests so far, which orders equal deadlines
        self._idle = 0  # threads that wait for a request
        self._began: dict[int, float] = {}  # by thread that reads: when it began its part
        self._closed = False
        self._ready = threading.Condition()
        self.speed = Concurrency(math.ceil(cores()), limit, far=far)

    def put(self, deadline: float, job: FetchJob) -> None:
        with self._ready:
            heapq.heappush(self._heap, (deadline, self._count, job, 0))
            self._count += 1
            self._waiting += job.left
            self._grow()
            no_threads = not self.threads
        if no_threads:
            self._work_in_caller()

    def _work_in_caller(self) -> None:
        """Read all queued jobs in the calling thread, as the system gives no thread at all."""
        while True:
            with self._ready:
                if not self._heap:
                    return
                job, part = self._part()
            self._run(job, part)

    def tick(self) -> None:
        """Wake or start threads, also in place of threads that hang."""
        with self._ready:
            self._grow()

    def close(self) -> list[tuple[FetchJob, int]]:
        """End all threads that do not hang; return the jobs that were queued.

        With each job comes the number of its objects that no thread has taken.
        """
        with self._ready:
            self._closed = True
            queued = [(job, job.objects - start) for _, _, job, start in self._heap]
            self._heap.clear()
            self._waiting = 0
            self._ready.notify_all()
            for _ in self.threads[1:]:
                self._free_threads.release()
        if self._owned:
            self.source.close()
        return queued

    def cancel(self, fetches: frozenset[int]) -> list[tuple[FetchJob, int]]:
        """Forget queued fetches; return as `close` does."""
        with self._ready:
            gone = [entry for entry in self._heap if entry[2].fetch.fetch in fetches]
            if gone:
                self._heap = [entry for entry in self._heap if entry not in gone]
                heapq.heapify(self._heap)
            dropped = [(job, job.objects - start) for _, _, job, start in gone]
            self._waiting -= sum(objects for _, objects in dropped)
        return dropped

    def _more_threads(self) -> int:
        began = self._began.values()
        return self.speed.more_threads(waiting=self._waiting, began=began, now=time.monotonic())

    def _grow(self) -> None:
        """Wake or start threads for queued objects; the lock is held."""
        more = self._more_threads()
        if more <= 0:
            return
        self._ready.notify(more)
        for _ in range(min(more - self._idle, self._limit - len(self.threads))):
            if self.threads and not self._free_threads.acquire(blocking=False):
                return
            name = f"creel-fetch-{self._name[:8]}-{len(self.threads)}"
            thread = threading.Thread(target=self._work, name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError:  # a limit of the system: `tick` tries again
                if self.threads:
                    self._free_threads.release()
                return
            self.threads.append(thread)

    def _work(self) -> None:
        me = threading.get_ident()
        while (work := self._take(me)) is not None:
            job, part = work
            start, cpu, user = time.perf_counter(), time.thread_time(), _user_s()
            objects = self._run(job, part)
            cpu, user = time.thread_time() - cpu, _user_s() - user
            if objects:  # a lost update between threads does no harm
                seconds = time.perf_counter() - start
                self.speed.measured(objects, seconds, cpu, user, len(self._began))

    def _take(self, me: int) -> tuple[FetchJob, slice] | None:
        with self._ready:
            self._began.pop(me, None)
            while self._more_threads() <= 0:
                if self._closed:
                    return None
                self._idle += 1
                self._ready.wait()
                self._idle -= 1
            self._began[me] = time.monotonic()
            return self._part()

    def _part(self) -> tuple[FetchJob, slice]:
        """Take the next part of the most urgent job; the measured speed determines its size.

        What lies after its last object in a file, and is wanted too, belongs to it: one read has
        both.
        """
        deadline, count, job, start = self._heap[0]
        stop = min(start + self.speed.part_objects(self._waiting), job.objects)
        if isinstance(self.source, Source) and isinstance(job.action, FetchObjects):
            ids, length = job.action.ids[stop - 1 :], job.action.length[stop - 1 :]
            stop += self.source.neighbours(ids, length)
        if stop < job.objects:
            heapq.heapreplace(self._heap, (deadline, count, job, stop))
        else:
            heapq.heappop(self._heap)
        self._waiting -= stop - start
        return job, slice(start, stop)
