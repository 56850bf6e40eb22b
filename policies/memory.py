"""How much memory the cache gives back when other processes need it. Pure."""

from __future__ import annotations

from creel.policies.forms import UNKNOWN, Pace, decoded_share

#: Share of the memory limit that is kept free, and the most bytes.
_FREE_SHARE, _MAX_FREE_NBYTES = 1 / 16, 4 << 30
#: Seconds between two looks at the free memory, which read some files of /proc: least and most.
_MIN_LOOK_S, MAX_LOOK_S = 0.02, 0.25
#: Bytes per second by which other processes grow, at most: a few cores that fill fresh pages.
_MAX_GROWTH_BPS = 4e9


def reserve(total: int) -> int:
    """Return the bytes to keep free for other processes, of `total` that all may use.

    >>> reserve(16 << 30) >> 20, reserve(1 << 40) >> 30
    (1024, 4)
    """
    return min(int(total * _FREE_SHARE), _MAX_FREE_NBYTES)


def next_look_s(available: int, reserve: int) -> float:
    """Return the seconds until the free memory is to be looked at again.

    >>> next_look_s(600 << 20, 500 << 20), next_look_s(100 << 30, 4 << 30)
    (0.0262144, 0.25)
    """
    return min(max((available - reserve) / _MAX_GROWTH_BPS, _MIN_LOOK_S), MAX_LOOK_S)


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


def decoded_room(
    limit: int | None,
    used: int,
    available: int,
    reserve: int,
    *,
    whole: int,
    encoded: int,
    pace: Pace = UNKNOWN,
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
    >>> decoded_room(None, 500, 9000, 100, whole=20_000, encoded=5000, pace=Pace(4.0, 3.5, 0.0))
    8800
    """
    free = available - 2 * reserve
    if limit is not None:
        free = min(free, limit - used)
    elif whole - used > free:
        free = min(free, int(decoded_share(used + free, whole, encoded, pace) * whole) - used)
    return max(free, 0)
