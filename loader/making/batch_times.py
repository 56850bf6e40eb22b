"""Times of a batch: the stages of its worker, and the division of a wait for it by cause.

A worker writes its stage to its shared words, and sends each batch with the times at which its
stages began. These times divide a wait among the stages that took it. All times are ns of the
monotonic clock, which all processes of a node share.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from creel.counters import CAUSES

#: A worker's stages, as numbers in its shared words.
IDLE, READING, SENDING, STARTING, WAITING, COLLATING = range(6)
STAGE_NAMES = (
    "waiting for work",
    "reading",
    "handing over",
    "starting",
    "waiting for the daemon",
    "collating",
)
#: Causes of a wait for a batch, in the order of `divide`: all but the sampler.
BATCH_CAUSES = tuple(cause for cause in CAUSES if cause != "sampler")
#: Cause of a wait that ended without the worker's batch, by stage. The other stages, idle and
#: starting, count as daemon, since the worker then waits for creel.
CAUSE_OF = {READING: "decode", SENDING: "collate", WAITING: "source", COLLATING: "collate"}


class BatchTimes(msgspec.Struct, frozen=True):
    """When a batch began, was ready to be read, began to collate, and was packed.

    Also the ns of direct reads during reading, and whether (0 or 1) the daemon was lost meanwhile.
    """

    began: int = 0
    ready: int = 0
    collating: int = 0
    packed: int = 0
    direct_ns: int = 0
    lost: int = 0


#: Those of a batch that no worker made.
NO_TIMES = BatchTimes()


def busy(times: BatchTimes) -> dict[str, int]:
    """Return how long a worker was busy with a batch before it was packed, by counter.

    >>> busy(BatchTimes(10, 20, 60, 70, direct_ns=30))
    {'busy_source_ns': 40, 'busy_decode_ns': 10, 'busy_collate_ns': 10}
    """
    return {
        "busy_source_ns": times.ready - times.began + times.direct_ns,
        "busy_decode_ns": max(times.collating - times.ready - times.direct_ns, 0),
        "busy_collate_ns": times.packed - times.collating,
    }


def recorded_moments(times: BatchTimes) -> tuple[int, int, int, int]:
    """Return when a batch began, was ready, began to collate and was packed, for the recorder.

    Those of `times` themselves without direct reads.

    Direct reads alternate with decoding, sample by sample. They count as waiting for objects, as if
    all of them came first.

    >>> recorded_moments(BatchTimes(10, 20, 60, 70, direct_ns=30))
    (10, 50, 60, 70)
    """
    ready = min(times.ready + times.direct_ns, max(times.collating, times.ready))
    return times.began, ready, times.collating, times.packed


def merged(parts: Sequence[BatchTimes]) -> BatchTimes:
    """Return the times of a batch that was made in parts, at the same time.

    >>> merged([BatchTimes(1, 2, 5, 6), BatchTimes(2, 2, 9, 10)])
    BatchTimes(began=1, ready=2, collating=9, packed=10, direct_ns=0, lost=0)
    """
    rows = map(msgspec.structs.astuple, parts)
    columns = list(zip(*rows, strict=True))
    return BatchTimes(*map(min, columns[:2]), *map(max, columns[2:]))


class StallWarning(UserWarning):
    """A batch is overdue; the message names the stage."""


def divide(times: BatchTimes, since: int, until: int) -> tuple[int, int, int, int]:
    """Divide a wait for a batch by cause: ns of source, decode, collate, daemon.

    Direct reads alternate with decoding, sample by sample. If the wait overlaps only part of the
    reading, direct reads get their share of that part. Time outside all stages counts as daemon:
    transfer to and from the worker, and other work of the worker.

    Args:
        times: of the batch that arrived.
        since, until: when the wait began and when the batch arrived, ns.

    >>> divide(BatchTimes(10, 20, 60, 70, direct_ns=30), since=0, until=75)
    (40, 10, 10, 15)
    >>> divide(BatchTimes(10, 20, 60, 70, direct_ns=30), since=40, until=75)
    (15, 5, 10, 5)
    >>> divide(BatchTimes(10, 20, 60, 70, lost=1), since=0, until=75)
    (0, 40, 10, 25)
    >>> divide(BatchTimes(10, 20, 60, 70, direct_ns=30), since=80, until=90)
    (0, 0, 0, 10)
    """
    began, ready = max(times.began, since), max(times.ready, since)
    collating, packed = max(times.collating, since), max(times.packed, since)
    reading, at_source = collating - ready, 0
    if times.direct_ns and reading:
        whole = times.collating - times.ready
        at_source = reading * min(times.direct_ns, whole) // whole
    source = at_source if times.lost else at_source + ready - began
    decode, collate = reading - at_source, packed - collating
    return source, decode, collate, until - since - source - decode - collate
