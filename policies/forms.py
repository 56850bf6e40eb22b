"""Which part of the samples memory holds decoded, and of which others their files. Pure."""

from __future__ import annotations

from typing import NamedTuple

#: Shares that are tried, and a step that is no shorter than this part of another is as long.
_STEPS, _ALIKE = 50, 0.001
#: Workers that wait for storage for more than this part of their time have to go at its pace.
BOUND = 0.1


class Pace(NamedTuple):
    """Seconds that one sample takes, if nothing of it is in memory.

    Attributes:
        work_s: of a worker's own.
        again_s: the part of these that a decoded sample in memory saves.
        storage_s: of storage, in the time in which each worker makes a sample; 0 where it keeps up.
    """

    work_s: float
    again_s: float
    storage_s: float


#: Before anything was measured: storage is what training waits for, then decoding.
UNKNOWN = Pace(1.0, 1.0, 1e6)


def storage_s(waits_s: float, own_s: float) -> float:
    """Return the seconds that storage takes for what workers did, 0 where it keeps up.

    It reads ahead while workers work. So where they wait for it, samples come at its pace.

    >>> storage_s(0.5, 10.0), storage_s(5.0, 10.0)
    (0.0, 15.0)
    """
    return waits_s + own_s if waits_s > BOUND * (waits_s + own_s) else 0.0


def decoded_share(room: float, whole: float, encoded: float, pace: Pace) -> float:
    """Return the share of the samples to keep decoded, while `room` has files of the others.

    Workers and storage work at the same time: a sample takes the longer of both. If cores are the
    bottleneck, all room is best for decoded samples; if storage is, files are, as they are
    smaller; a mixture where both are level. Of shares that are as good, the least.

    Args:
        room: bytes of memory for both forms.
        whole: bytes of all samples, decoded.
        encoded: bytes of all files; 0 if samples are not made of files that could be kept.

    >>> decoded_share(50, 200, 100, Pace(work_s=4.0, again_s=3.5, storage_s=0.0))
    0.25
    >>> decoded_share(50, 200, 100, Pace(work_s=4.0, again_s=3.5, storage_s=40.0))
    0.0
    """
    most = min(max(room, 0) / whole, 1.0) if whole > 0 else 0.0

    def takes_s(share: float) -> float:
        files = (room - share * whole) / encoded if encoded else 0.0
        from_storage = max(1 - share - files, 0.0) * pace.storage_s
        return max(pace.work_s - share * pace.again_s, from_storage)

    shares = [most * k / _STEPS for k in range(_STEPS + 1)]
    least = min(map(takes_s, shares))
    return next(share for share in shares if takes_s(share) <= least * (1 + _ALIKE))
