"""What each job of this node will wait for, by `creel.policies.model`, for `creel top`. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import groupby
from typing import NamedTuple

from creel.cli.watching.view import Values, job_of
from creel.policies.model import (
    Forecast,
    RankWindow,
    enough_workers,
    forecast,
    straggler,
    with_workers,
)

#: Fewer batches say nothing of the next ones.
BATCHES = 8
#: Seconds after which a step that was foretold is compared with what came.
_JUDGED_S = 10.0
#: Waits below this share of a step are not worth a change.
HARDLY = 0.02
#: A wait that begins within fewer steps has begun.
_SOON = 3
#: Causes as a sentence about a rank.
_BECAUSE = {
    "source": "waits for storage",
    "decode": "decodes and transforms",
    "waiting": "waits inside dataset[i] for something that creel does not see",
    "threads": "runs threads inside its workers, which take each other's cores",
    "collate": "collates",
    "handover": "hands batches over",
}


class Foretold(NamedTuple):
    """A step that was foretold of a job: when, and seconds."""

    at: float
    step_s: float


class Forecasts:
    """Keeps what was foretold, to say how wrong it was."""

    def __init__(self, cores: float) -> None:
        """`cores`: of this node."""
        self._cores = cores
        self._workers: dict[int, int] = {}  # of each stream, when it had some
        self._foretold: dict[str, Foretold] = {}
        self._errors: dict[str, float] = {}
        #: What each stream of batches will wait for in a step, since the last call of `rows`.
        self.waits_s: dict[int, float] = {}

    def rows(
        self, answer: Values, before: Mapping[int, tuple[Values, float]], now: float
    ) -> list[tuple[str, str]]:
        """Return (job, sentence) for each job of which enough is known.

        Args:
            before: for each open stream its first counters of late, and how many seconds ago.
            now: seconds, on any clock.
        """
        sessions = sorted(map(self._with_workers, answer["sessions"]), key=_by_job)
        rows = []
        self.waits_s = {}
        for job, group in groupby(sessions, key=job_key):
            members = list(group)
            if any(s.get("overdue_s") for s in members):
                continue  # nobody knows when its next step comes
            ranks = [s for s in members if _news(s, before) >= BATCHES and _known(s, before)]
            windows = [window(s, *before[s["session"]]) for s in ranks]
            forecasts = forecast(windows, self._cores)
            if forecasts:
                self.waits_s |= {
                    s["session"]: forecast.wait_s
                    for s, forecast in zip(ranks, forecasts, strict=True)
                }
                self._judge(job, windows, forecasts, now)
                text = sentence([s["rank"] for s in ranks], windows, forecasts, self._cores)
                error = self._errors.get(job)
                also = "" if error is None else f" (last forecast: {100 * error:.0f} % off)"
                rows.append((f"job {job_of(ranks[0])}", text + also))
        return rows

    def _with_workers(self, session: Values) -> Values:
        """Return a stream with the workers that it had last: between two epochs none run."""
        now = int(session.get("workers", 0)) or self._workers.get(session["session"], 0)
        self._workers[session["session"]] = now
        return {**session, "workers": now}

    def _judge(
        self, job: str, windows: list[RankWindow], forecasts: list[Forecast], now: float
    ) -> None:
        """Compare a step that was foretold with the steps since, and foretell the next."""
        was = self._foretold.get(job)
        if was is None or now - was.at >= _JUDGED_S:
            if was is not None:
                came = max(rank_window.seconds / rank_window.batches for rank_window in windows)
                self._errors[job] = abs(was.step_s - came) / came
            self._foretold[job] = Foretold(now, forecasts[0].step_s)


def job_key(session: Values) -> str:
    """Return what the ranks of a job have in common: its name, or their process."""
    return session["job"] or str(session["pid"])


def _by_job(session: Values) -> tuple[str, int]:
    return job_key(session), session["rank"]


def _known(session: Values, before: Mapping[int, tuple[Values, float]]) -> bool:
    """Whether it is known how many workers a stream has, if any have worked for it."""
    old, now = before[session["session"]][0]["busy_s"], session["busy_s"]
    return session["workers"] > 0 or not sum(now.values()) > sum(old.values())


def _news(session: Values, before: Mapping[int, tuple[Values, float]]) -> int:
    old = before.get(session["session"])
    return 0 if old is None else int(session["batches"] - old[0]["batches"])


def window(session: Values, old: Values, seconds: float) -> RankWindow:
    """Return what one stream of batches did since its counters were `old`, `seconds` ago."""

    def news(name: str) -> dict[str, float]:
        return {k: max(n - old[name].get(k, 0.0), 0.0) for k, n in session[name].items()}

    workers, stall = int(session.get("workers", 0)), news("stall_s")
    # Without workers, training makes its batches itself, and waits as long.
    busy = news("busy_s") if workers else {k: s for k, s in stall.items() if k in _BECAUSE}
    cpu = session["cpu_s"] - old["cpu_s"] if workers and "cpu_s" in session else -1.0
    batches = int(session["batches"] - old["batches"])
    finished = session.get("made", 0)
    return RankWindow(seconds, batches, workers, busy, stall, cpu_s=cpu, finished=finished)


def sentence(
    ranks: list[int], windows: list[RankWindow], forecasts: list[Forecast], cores: float
) -> str:
    """Say how long the next steps take, who is late and why, and what would help."""
    step_s = forecasts[0].step_s
    late = straggler(forecasts)
    slowest = max(range(len(forecasts)), key=lambda k: forecasts[k].wait_s)
    text = f"{ms(step_s)} a step"
    if forecasts[slowest].wait_s <= HARDLY * step_s:
        return f"{text}, no wait for data"
    why = _BECAUSE.get(forecasts[slowest].cause, "")
    subject = f"rank {ranks[slowest]} is late" if late is not None else "ranks wait alike"
    if len(ranks) == 1:
        subject = f"rank {ranks[slowest]} waits"
    left = forecasts[slowest].in_steps
    when = f" in {left:.0f} steps" if _SOON <= left < math.inf else ""
    text += f", {ms(forecasts[slowest].wait_s)} of it for data{when}; {subject}" + (
        why and f": it {why}"
    )
    return text + _helped(windows, slowest, cores)


def _helped(windows: list[RankWindow], rank: int, cores: float) -> str:
    """Say how many workers would end most of a rank's wait, if any number does."""
    workers = enough_workers(windows, cores)
    if workers is None:
        return ""
    outlook = forecast([with_workers(rank_window, workers) for rank_window in windows], cores)[rank]
    return f"; num_workers={workers}: {ms(outlook.wait_s)}"


def ms(seconds: float) -> str:
    """Format the time of a step.

    >>> ms(0.0042), ms(3.2)
    ('4 ms', '3.2 s')
    """
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
