"""What a worker does, stage by stage, and what a wait for its batch is put down to.

A worker shows its stage on the board to whoever looks, and sends each batch with the times at which
its stages began. So a wait is divided by what was done meanwhile, though nobody looked. All times
are ns of the monotonic clock, which all processes of a node share.
"""

from __future__ import annotations

from typing import TypeAlias

#: A worker's stages, as numbers on the board.
IDLE, READING, SENDING, STARTING, WAITING, COLLATING = range(6)
STAGES = (
    "waiting for work",
    "reading",
    "handing over",
    "starting",
    "waiting for the daemon",
    "collating",
)
#: What a wait for a worker is put down to that ended without its batch. Without work, starting: it
#: is creel that keeps both waiting.
CAUSE_OF = {READING: "decode", SENDING: "collate", WAITING: "source", COLLATING: "collate"}

#: Of one batch: began, was ready to be read, began to collate, was packed (times); of the reading,
#: ns at the source; whether the daemon was lost while it was waited for (0 or 1).
Times: TypeAlias = tuple[int, int, int, int, int, int]


class StallWarning(UserWarning):
    """A batch does not come, and this is where it hangs."""


def divide(times: Times, since: int, until: int) -> tuple[int, int, int, int]:
    """A wait for a batch by cause: ns of source, decode, collate, daemon.

    Reads at the source alternate with decoding, sample by sample: they get their share of
    whatever part of the reading was waited for. What no stage covers is on creel: the way to the
    worker and back, and whatever else the worker was at.

    Args:
        times: of the batch that came.
        since, until: when the wait began, and when the batch was there.

    >>> divide((10, 20, 60, 70, 30, 0), since=0, until=75)
    (40, 10, 10, 15)
    >>> divide((10, 20, 60, 70, 30, 0), since=40, until=75)
    (15, 5, 10, 5)
    >>> divide((10, 20, 60, 70, 0, 1), since=0, until=75)
    (0, 40, 10, 25)
    >>> divide((10, 20, 60, 70, 30, 0), since=80, until=90)
    (0, 0, 0, 10)
    """
    began, ready, collating, packed = (max(time, since) for time in times[:4])
    reading, direct, lost = collating - ready, times[4], times[5]
    at_source = 0
    if direct and reading:
        whole = times[2] - times[1]
        at_source = reading * min(direct, whole) // whole
    source = at_source if lost else at_source + ready - began
    decode, collate = reading - at_source, packed - collating
    return source, decode, collate, until - since - source - decode - collate
