"""How much memory the cache gives back to others, and how much is for decoded samples. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

#: Share of the memory limit that is kept free, and the most bytes.
_FREE_SHARE, _MAX_FREE_NBYTES = 1 / 16, 4 << 30
#: Seconds between two looks at the free memory, which read some files of /proc: least and most.
_MIN_LOOK_S, MAX_POLL_S = 0.02, 0.25
#: Bytes per second by which other processes grow, at most: a few cores that fill fresh pages.
_MAX_GROWTH_BPS = 4e9
#: Shares that are tried, and a step that is no shorter than this part of another is as long.
_STEPS, _ALIKE = 50, 0.001
#: Classes of samples by the time that a byte of them saves, from 1 ns to 29 us: each is above the
#: last by this factor.
SAVINGS, _APART = 46, 1.25
#: Workers that wait for storage for more than this part of their time have to go at its pace.
BOUND = 0.1


class SampleCost(NamedTuple):
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
UNKNOWN = SampleCost(1.0, 1.0, 1e6)


def reserve(total: int) -> int:
    """Return the bytes to keep free for other processes, of `total` that all may use.

    >>> reserve(16 << 30) >> 20, reserve(1 << 40) >> 30
    (1024, 4)
    """
    return min(int(total * _FREE_SHARE), _MAX_FREE_NBYTES)


def next_poll_s(available: int, reserve: int) -> float:
    """Return the seconds until the free memory is to be looked at again.

    >>> next_poll_s(600 << 20, 500 << 20), next_poll_s(100 << 30, 4 << 30)
    (0.0262144, 0.25)
    """
    return min(max((available - reserve) / _MAX_GROWTH_BPS, _MIN_LOOK_S), MAX_POLL_S)


def given_back(available: int, reserve: int, withheld: int) -> int:
    """Return the bytes that the cache gives back; less than 0: those that it may use again.

    Args:
        available: bytes that all processes may still take.
        reserve: bytes of these that stay free.
        withheld: bytes that the cache has given back before.

    It gives back twice what is missing at once, and takes again half of what is there beyond twice
    the reserve, so that the next look does not find too little once more.

    >>> given_back(900, 1000, 0), given_back(1500, 1000, 700), given_back(4400, 1000, 700)
    (1100, 0, -700)
    """
    if available < reserve:
        return 2 * reserve - available
    if available > 4 * reserve:
        return -min((available - 2 * reserve) // 2, withheld)
    return 0


def storage_s(waits_s: float, own_s: float) -> float:
    """Return the seconds that storage takes for what workers did, 0 where it keeps up.

    It reads ahead while workers work. So where they wait for it, samples come at its pace.

    >>> storage_s(0.5, 10.0), storage_s(5.0, 10.0)
    (0.0, 15.0)
    """
    return waits_s + own_s if waits_s > BOUND * (waits_s + own_s) else 0.0


def decoded_share(room: float, whole: float, encoded: float, pace: SampleCost) -> float:
    """Return the share of the samples to keep decoded, while `room` has files of the others.

    Workers and storage work at the same time: a sample takes the longer of both. If cores are the
    bottleneck, all room is best for decoded samples; if storage is, files are, as they are
    smaller; a mixture where both are level. Of shares that are as good, the least.

    Args:
        room: bytes of memory for both forms.
        whole: bytes of all samples, decoded.
        encoded: bytes of all files; 0 if samples are not made of files that could be kept.

    >>> decoded_share(50, 200, 100, SampleCost(work_s=4.0, again_s=3.5, storage_s=0.0))
    0.25
    >>> decoded_share(50, 200, 100, SampleCost(work_s=4.0, again_s=3.5, storage_s=40.0))
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


def saving(ns: int, nbytes: int) -> int:
    """Return the class of a sample of `nbytes` that takes `ns` to make.

    >>> saving(10, 100), saving(4_000_000, 196_608), saving(1 << 40, 1)
    (0, 13, 45)
    """
    per_byte = ns / max(nbytes, 1)
    return min(int(math.log(per_byte, _APART)), SAVINGS - 1) if per_byte > 1 else 0


def least_saving(nbytes: Sequence[int], share: float) -> float:
    """Return from which class on samples are kept, where there is room for a share of all bytes.

    Args:
        nbytes: of the samples so far, by class.

    Returns:
        A class, and the part of its samples that is not kept.

    >>> least_saving([10, 20, 10], 0.5), least_saving([10, 20, 10], 1.0)
    (1.5, 0.0)
    """
    room = share * sum(nbytes)
    for number in reversed(range(len(nbytes))):
        if nbytes[number] and room <= nbytes[number]:
            return number + 1 - room / nbytes[number]
        room -= nbytes[number]
    return 0.0


def decoded_room(
    limit: int | None,
    used: int,
    available: int,
    reserve: int,
    *,
    whole: int,
    encoded: int,
    pace: SampleCost = UNKNOWN,
) -> int:
    """Return the bytes by which a store of decoded samples may grow now, 0 or more.

    Args:
        limit: bytes that the user allows; None: what makes training fastest.
        used: bytes that it has.
        available: bytes that all processes may still take.
        reserve: bytes of these that stay free.
        whole: bytes of all samples, decoded.
        encoded: bytes of all files. Without a limit, room is left for those of other samples as
            far as storage is what training waits for.
        pace: what a sample takes, as it was measured.

    It keeps away from twice the reserve, which is what remains after memory was given back.

    >>> decoded_room(800, 500, 9000, 100, whole=10**6, encoded=0)
    300
    >>> decoded_room(None, 500, 9000, 100, whole=2000, encoded=5000)
    8800
    >>> decoded_room(None, 500, 9000, 100, whole=20_000, encoded=5000)
    5080
    >>> cores = SampleCost(work_s=4.0, again_s=3.5, storage_s=0.0)
    >>> decoded_room(None, 500, 9000, 100, whole=20_000, encoded=5000, pace=cores)
    8800
    """
    free = available - 2 * reserve
    if limit is not None:
        free = min(free, limit - used)
    elif whole - used > free:
        free = min(free, int(decoded_share(used + free, whole, encoded, pace) * whole) - used)
    return max(free, 0)
