"""When a storage error is followed by another attempt. Pure.

`creel.cache.storage.retry` says which errors may pass, waits, and tries again.
"""

from __future__ import annotations

from creel.settings import FetchSettings


def pause_s(settings: FetchSettings, tries: int, elapsed_s: float, jitter: float) -> float | None:
    """Seconds to wait before the next attempt; None: the last error is final.

    Args:
        tries: attempts that failed, at least 1.
        elapsed_s: seconds since the first of them began.
        jitter: a random number in [0, 1), so that readers do not come back together.

    >>> [pause_s(FetchSettings(attempts=4), tries, 0.5, 0.5) for tries in (1, 2, 3, 4)]
    [0.15000000000000002, 0.25, 0.45, None]
    """
    doubled: float = 2.0 ** (tries - 1)
    pause = min(settings.backoff_s * (doubled + jitter), settings.backoff_max_s)
    over = tries >= settings.attempts or elapsed_s + pause > settings.deadline_s
    return None if over else pause
