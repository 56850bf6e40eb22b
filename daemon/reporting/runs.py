"""Counters of the latest run alone: `creel stats --run` of a daemon that serves many."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from creel.counters import GAUGES, OF_RANKS

#: Numbers of tiers that say what is now, and of sources the bounds of times: no counters.
_OF_TIERS = frozenset({"used_nbytes", "budget_nbytes", "samples"})
_OF_SOURCES = frozenset({"le"})
_OF_RANKS = frozenset(counter.key for counter in OF_RANKS if not GAUGES & set(counter.words))

Answer = Mapping[str, Any]


class Runs:
    """When the latest run began, and what was counted by then.

    A run begins with a session of a job (without a scheduler: of a process) that was not among
    those of the last run, when no other is open. Jobs that overlap in time are one run.
    """

    def __init__(self) -> None:
        self.began = 0.0  # monotonic seconds; 0: there was none
        self._openers: set[str | int] = set()
        self._before: Answer = {}

    def opened(
        self, opener: str | int, now: float, count: Callable[[], Answer], *, alone: bool
    ) -> None:
        """Note a session that was opened.

        Args:
            opener: the job's name, or the process.
            count: returns the answer of `stats`.
            alone: whether no other session was open.
        """
        if alone and opener not in self._openers:
            self._openers, self.began, self._before = set(), now, count()
        self._openers.add(opener)

    def since(self, answer: Answer, now: float) -> dict[str, Any]:
        """Return an answer of `stats` with the counters of this run, and `run_s`, its age."""
        before = self._before
        totals = dict(answer) | {
            "tiers": _difference(answer["tiers"], before.get("tiers", {}), _OF_TIERS),
            "run_s": now - self.began if self.began else 0.0,
        }
        totals["sources"] = [
            _difference(row, was, _OF_SOURCES)
            for row, was in _changed(answer["sources"], before.get("sources", ()), ("dataset",))
        ]
        totals["ranks"] = [
            _difference(row, was, row.keys() - _OF_RANKS)
            for row, was in _changed(answer["ranks"], before.get("ranks", ()), ("job", "rank"))
        ]
        return totals


def _changed(
    rows: Iterable[Answer], before: Iterable[Answer], names: tuple[str, ...]
) -> Iterable[tuple[Answer, Answer]]:
    """Yield the rows in which something was counted since, each with the row as it was."""
    old = {tuple(row[name] for name in names): row for row in before}
    for row in rows:
        was = old.get(tuple(row[name] for name in names), {})
        if row != was:
            yield row, was


def _difference(now: Any, before: Any, leave: AbstractSet[str]) -> Any:
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
