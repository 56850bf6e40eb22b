"""How many threads read from one source, how many workers make samples, and in what parts. Pure.

Only as many threads work as are useful. Reads from the page cache are useful in as many threads as
can compute at once. Only one can hold the interpreter: for small records that is one or two
threads, for large files, which the kernel copies, up to one per core. Where a read is a long round
trip, as many work as its link takes (`InFlight`). Threads that hang do not count, so a dead server
does not block its queue.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

#: Duration of a part. Shorter ones lose time to hand-over (about 30 us each); longer ones spread
#: unevenly over the threads.
PART_S = 0.002
#: Longest part where enough objects wait for all useful threads: at each hand-over threads wait for
#: the interpreter (1 KB files from a cold local disk come 1.2 times as fast).
LONG_PART_S = 0.01
_PART_OBJECTS = 256
#: Least work of a part of a batch. Each part is a message of its own, and is copied once more: if
#: all batches were cut, parts of 5 ms would cost a ninth of the speed on busy cores
#: (benchmarks/shared.py, even).
_LEAST_PART_S = 0.004
#: Samples whose times count.
_SAMPLES = 640
#: Least coefficient of variation of the time of a batch at which all are cut. At .25 it gains a
#: twentieth (benchmarks/shared.py, heavy x64).
_UNEVEN = 0.15
#: Most time to join a batch, which the trainer needs, as a part of what workers need for one.
_JOIN = 0.05
_FIRST_GUESS_S = 0.001  # per object, before any measurement
_FIRST_CPU_S = 0.0001
_CPU_DECAY = 0.005  # decay of CPU times, per part; user time is counted in ticks of milliseconds
_TICK_ERROR = 0.3  # error of the ratio of user time to all CPU time
_WAIT_FILLED_PART = 0.7  # share of a thread's waiting that other threads' computing may fill
#: Reads shorter than this, such as a `stat`, take longer in two threads than in one, as the threads
#: hand the interpreter over at each read (benchmarks/two_commits.py, files 150 KB).
_HANDED_OVER_S = 8e-6
#: Growth of the least time per part, so that a source that became slow is noticed.
_MIN_GROWTH = 1.02
#: Threads that read where a read waits, whatever the source makes of it.
SURE = 32
#: Of InFlight: by how much it grows at a time, and the answers per second at least for it to stay.
_GROWTH = 1.5
_GAIN = 1.15
#: Rounds at a limit that a larger one did not better: at first, and at most.
_FIRST_PAUSE, _LONGEST_PAUSE = 2, 16
#: Share of the requests of a round, the quickest, whose time counts: one that hangs says nothing.
_COUNTED = 0.9
#: Share of the limit from which on it is what limits.
_REACHED = 0.9
#: Of a far source: first guess of a read, and from what wait on it is a round trip. Then as many as
#: its link takes are useful, whatever CPU they cost: bare threads of obstore had 420 answers a
#: second of radosgw with 16 in flight and 1,100 with 64, and the rule of files gives 17.
_FIRST_FAR_S = 0.05
_ROUND_TRIP_S = 0.005
_MAX_READING_S = 1.0  # a thread in a longer part does not count as reading


class InFlight:
    """How many requests to a far source are in flight: as many as its link needs.

    n requests that take L seconds each give n / L answers a second (Little's law). While neither
    link nor server is full, that grows with n. From the bound of bandwidth times latency on only L
    does: the answers come no sooner, and what is urgent waits behind the rest. So the limit climbs
    while it gains, keeps the last one that did, and climbs anew from the one below after a pause,
    as links change.

    Args:
        sure: requests that are permitted whatever they take.
        most: the limit of the limit.

    >>> link = InFlight(sure=32, most=128)
    >>> for _ in range(1000):
    ...     link.landed(flying=link.limit, seconds=0.05)
    >>> link.limit
    128
    >>> for _ in range(9000):
    ...     link.landed(flying=link.limit, seconds=max(0.05, link.limit / 1000))
    >>> 40 <= link.limit <= 80
    True
    """

    def __init__(self, sure: int, most: int) -> None:
        self._sure = min(sure, most)
        self._most = most
        self._seconds: list[float] = []  # of the requests of this round
        self._below, self._below_rate = self._sure, 0.0  # the limit before this one, and its rate
        self._kept = 0  # the limit that was best when it last climbed
        self._pause = self._pauses = 0  # rounds of the pause: those left, and all
        self.limit = self._sure

    def landed(self, flying: int, seconds: float) -> None:
        """Enter a request: how long it took, and how many were in flight at its end."""
        if self._most == self._sure or flying < _REACHED * self.limit:
            return  # the limit was not reached
        self._seconds.append(seconds)
        if len(self._seconds) < 2 * self.limit:  # the first ones began under another limit
            return
        took = sorted(self._seconds[self.limit :])[: math.ceil(_COUNTED * self.limit)]
        self._seconds.clear()
        if self._pause:
            self._pause -= 1
            if not self._pause:
                self.limit = max(int(self.limit / _GROWTH), self._sure)
            return
        rate = self.limit * len(took) / sum(took)
        if rate < _GAIN * self._below_rate:
            self._keep(self._below)
        elif self.limit == self._most:
            self._keep(self._most)
        else:
            self._below, self._below_rate = self.limit, rate
            self.limit = min(math.ceil(_GROWTH * self.limit), self._most)

    def _keep(self, limit: int) -> None:
        """Stay at a limit for some rounds: for longer, the more often it was the best one."""
        again = limit == self._kept
        self._pauses = min(2 * self._pauses, _LONGEST_PAUSE) if again else _FIRST_PAUSE
        self._pause, self._below_rate = self._pauses, 0.0
        self._kept = self.limit = limit


class Concurrency:
    """Measurements of one source, and the number of threads and part size that follow from them.

    Args:
        cores: CPUs that this process may use.
        most: threads of the source; more than SURE only while they gain answers.
        far: whether each read is a request to a server, over a network: then the first reads go
            out at once, SURE of them.

    >>> far = Concurrency(cores=2)
    >>> for _ in range(100):
    ...     far.measured(objects=1, seconds=0.1, cpu=0.001, user=0.001)
    >>> far.part_objects(waiting=50), far.more_threads(waiting=50, began=[], now=0.0)
    (1, 32)
    """

    def __init__(self, cores: int, most: int = SURE, *, far: bool = False) -> None:
        self._cores = cores
        self._far = far
        self._inflight = InFlight(SURE, most)
        self._object_s = _FIRST_FAR_S if far else _FIRST_GUESS_S
        self._min_s = 0.0  # shortest time per object: a busy machine is no slow source
        # Few threads until reads are seen to wait: many threads on a quick source make each other
        # wait for the interpreter, which looks like a slow source and would keep them all.
        self._wait_s = _FIRST_FAR_S if far else 0.0
        self._cpu_s = _FIRST_CPU_S
        self._user_s = self._total_s = 10 * PART_S  # recent CPU seconds: user mode, and in all

    @property
    def object_ns(self) -> int:
        """Recent time of an undisturbed thread per object, in ns; 0 before any was read."""
        return int(self._min_s * 1e9)

    def part_objects(self, waiting: int) -> int:
        """Return how many of `waiting` objects to take: PART_S of work, more if many wait."""
        most = min(LONG_PART_S / self._object_s, waiting / self._useful)
        return int(min(max(PART_S / self._object_s, most, 1), _PART_OBJECTS))

    @property
    def _useful(self) -> int:
        """Return the number of threads that should read if enough objects wait."""
        if self._far and self._wait_s > _ROUND_TRIP_S:
            return self._inflight.limit
        # n threads that only compute wait n - 1 times as long as they compute: more do not help.
        quick = 0 < self._min_s < _HANDED_OVER_S
        at_once = 1 if quick else self._total_s / self._user_s - _TICK_ERROR
        waits = int(_WAIT_FILLED_PART * self._wait_s / self._cpu_s)
        return max(min(waits, self._inflight.limit), min(int(at_once), self._cores), 1)

    def more_threads(self, *, waiting: int, began: Iterable[float], now: float) -> int:
        """Return how many more threads should be reading now.

        Args:
            waiting: number of objects not yet being read.
            began: when each reading thread began its part, in seconds, on the clock of `now`.
        """
        busy = sum(start > now - _MAX_READING_S for start in began)
        return min(-(-waiting // self.part_objects(waiting)), self._useful - busy)

    def measured(
        self, objects: int, seconds: float, cpu: float, user: float, reading: int = 0
    ) -> None:
        """Enter a part's wall time and CPU time (in all, and in user mode), in seconds.

        `reading`: threads that were reading at its end.
        """
        self._inflight.landed(reading, seconds / objects)
        self._user_s += user - _CPU_DECAY * self._user_s
        self._total_s += cpu - _CPU_DECAY * self._total_s
        self._object_s += (seconds / objects - self._object_s) * 0.3
        self._min_s = min(self._min_s * _MIN_GROWTH or math.inf, seconds / objects)
        self._cpu_s += (cpu / objects - self._cpu_s) * 0.1
        wait = max(seconds - cpu, 0.0) / objects
        # A value below the mean, as waiting for the interpreter must not look like a slow disk. Not
        # far below, as files that are only partly in the page cache need threads for the rest.
        self._wait_s += (wait - self._wait_s) * (0.06 if wait < self._wait_s else 0.03)


def workers_auto(cores: float, ranks_here: int) -> int:
    """Return how many workers a rank should have: twice its share of the node's cores.

    A rank whose samples take longer then finds cores that others leave idle, and the kernel gives
    them to it (two ranks with decode cost 1 : 4 on 2 cores: 1.17 to 1.21 of the ideal step with two
    workers each, 1.55 to 1.73 with one each). More than the cores would only take memory.

    Args:
        cores: what this process may use, as `limits.cores` says.
        ranks_here: ranks of the job on this node, at least 1.

    >>> workers_auto(16, 8), workers_auto(16, 1), workers_auto(2, 8), workers_auto(1.5, 1)
    (4, 16, 1, 2)
    """
    return max(min(math.ceil(cores), math.ceil(2 * cores / ranks_here)), 1)


class SampleTimes:
    """How long samples take, and into how many parts a batch is cut for it.

    The running mean and variance of the last samples, as far as times of batches or parts show
    them: with samples of one cost, the time of a part varies by little.
    """

    def __init__(self) -> None:
        self._count = 0
        self._mean_s = self._variance = self._join_s = 0.0

    def measured(self, rows: int, seconds: float) -> None:
        """Enter the time in which one worker made `rows` samples."""
        self._count = min(self._count + rows, _SAMPLES)
        weight = min(rows / self._count, 1.0)  # a batch may have more samples than are kept
        off_s = seconds / rows - self._mean_s
        if weight == 1:
            self._mean_s = seconds / rows
            return
        self._mean_s += weight * off_s
        self._variance += weight * (rows * off_s**2 - self._variance)

    def joined(self, seconds: float) -> None:
        """Enter the time in which the trainer joined the parts of a batch."""
        self._join_s += 0.2 * (seconds - self._join_s)

    def parts(self, rows: int, workers: int, *, awaited: bool) -> int:
        """Return into how many parts a batch of `rows` samples is cut; workers make them at once.

        A batch is cut if it is awaited: workers begin, and have no other. Later ones are cut if
        their times differ so much that batches, which come in order, would wait for a long one
        while workers are idle: each is at most `prefetch_factor` batches ahead.

        Args:
            workers: of the rank.
            awaited: whether training waits for this batch, as for the first ones of an epoch.

        >>> times = SampleTimes()
        >>> times.parts(64, 8, awaited=True)  # not known yet
        8
        >>> for ms in (20, 20, 20, 20):
        ...     times.measured(4, 4 * ms / 1000)
        >>> times.parts(4, 8, awaited=True), times.parts(4, 8, awaited=False)
        (4, 1)
        >>> for ms in (5, 90, 3, 40):
        ...     times.measured(4, 4 * ms / 1000)
        >>> times.parts(4, 8, awaited=False)
        4
        """
        if not self._count:
            return min(rows, workers) if awaited else 1
        batch_s = rows * self._mean_s
        if not awaited:
            uneven = (rows * self._variance) ** 0.5 > _UNEVEN * batch_s
            if not uneven or self._join_s * workers > _JOIN * batch_s:
                return 1
        return max(int(min(rows, workers, batch_s / _LEAST_PART_S)), 1)
