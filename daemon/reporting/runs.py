"""Counters of the latest run alone: `creel stats --run` of a daemon that serves many."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from creel.counters import GAUGES, OF_RANKS

#: Numbers that are no counters: of tiers and of ranks what is now, of sources the bounds of times.
_OF_TIERS = frozenset({"used_nbytes", "budget_nbytes", "samples"})
_OF_ROWS = frozenset({"le"} | {one.key for one in OF_RANKS if GAUGES & set(one.words)})

Answer = Mapping[str, Any]


class Runs:
    """When the latest run began, and what was counted by then.

    A run begins with a session of a job (without a scheduler: of a process) that was not among
    those of the last run, when no other is open. Jobs that overlap in time are one run.
    """

    def __init__(self) -> None:
        self.began = 0.0  # monotonic seconds; 0: there was none
        self._who: set[str | int] = set()
        self._before: Answer = {}

    def opened(
        self, who: str | int, now: float, count: Callable[[], Answer], *, alone: bool
    ) -> None:
        """Note a session that is about to be opened.

        Args:
            who: the job's name, or the process.
            count: returns the answer of `stats`.
            alone: whether no other session is open.
        """
        if alone and who not in self._who:
            self._who, self.began, self._before = set(), now, count()
        self._who.add(who)

    def since(self, answer: Answer, now: float) -> dict[str, Any]:
        """Return an answer of `stats` with the counters of this run, and `run_s`, its age."""
        before = self._before
        told = dict(answer) | {
            "tiers": _difference(answer["tiers"], before.get("tiers", {}), _OF_TIERS),
            "run_s": now - self.began if self.began else 0.0,
        }
        for key, names in (("sources", ("dataset",)), ("ranks", ("job", "rank"))):
            told[key] = list(_rows(answer[key], before.get(key, ()), names))
        return told


def _rows(
    rows: Iterable[Answer], before: Iterable[Answer], names: tuple[str, ...]
) -> Iterable[dict[str, Any]]:
    """Yield the rows in which something was counted since, without what was counted before."""
    old = {tuple(row[name] for name in names): row for row in before}
    for row in rows:
        was = old.get(tuple(row[name] for name in names), {})
        if row != was:
            yield _difference(row, was, _OF_ROWS) | {name: row[name] for name in names}


def _difference(now: Any, before: Any, leave: frozenset[str]) -> Any:
    """Subtract the numbers in one value from those in another of the same form.

    >>> _difference({"hits": 5, "used_nbytes": 9, "of": {"a": [1, 2]}}, {"hits": 3}, _OF_TIERS)
    {'hits': 2, 'used_nbytes': 9, 'of': {'a': [1, 2]}}
    """
    if isinstance(now, dict):
        was = before if isinstance(before, Mapping) else {}
        return {k: v if k in leave else _difference(v, was.get(k), leave) for k, v in now.items()}
    if isinstance(now, list):
        old = before if isinstance(before, list) and len(before) == len(now) else [None] * len(now)
        return [_difference(v, w, leave) for v, w in zip(now, old, strict=True)]
    is_count = isinstance(now, (int, float)) and not isinstance(now, bool)
    return now - before if is_count and isinstance(before, (int, float)) else now
