"""What would help the jobs of a node, in numbers: `creel stats --why`. Pure.

The model (`creel.policies.model`) answers for the last batches of each open stream of batches: how
long a step takes, how much of it is a wait, and what would be left of it with more workers, with
samples kept decoded, and with everything in memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from creel.cache.memory.batch_log import columns
from creel.cli.watching.forecasts import BATCHES, HARDLY, job_key, ms
from creel.cli.watching.view import Values
from creel.policies.memory import decoded_room, reserve
from creel.policies.model import (
    RankWindow,
    enough_workers,
    finished,
    forecast,
    pace,
    recent,
    straggler,
    with_decoded,
    with_memory,
    with_workers,
)
from creel.units import format_size

#: A change that makes steps less than this many times as fast is not named.
_GAIN = 1.05
#: Seconds for a copy of a kept sample, and bytes a second beyond: one of 196 KB takes 0.12 ms, of
#: 562 KB 0.27 (docs/measured/decoding.md).
_COPY_S, _COPY_BPS = 40e-6, 2.4e9


class Machine(NamedTuple):
    """What a node has: processors, bytes of memory, and those that processes may still take."""

    cores: float
    memory_nbytes: int
    available_nbytes: int


class Change(NamedTuple):
    """What a change would bring to a rank.

    Attributes:
        words: what the change is.
        values: the same for programs.
        step_s, wait_s: seconds of each step of the job, and of the rank's wait in it.
        faster: how many times as fast the job would step.
    """

    words: str
    values: dict[str, Any]
    step_s: float
    wait_s: float
    faster: float

    def __str__(self) -> str:
        if self.wait_s <= HARDLY * self.step_s:
            return f"{self.words} no wait"
        return f"{self.words} {ms(self.wait_s)} ({self.faster:.1f}x)"


class Outlook(NamedTuple):
    """What the steps of a rank take as it is, and what would help; `late`: it holds up the job."""

    step_s: float
    wait_s: float
    late: bool
    changes: list[Change]

    def __str__(self) -> str:
        text = f"now {ms(self.step_s)} a step"
        if self.wait_s <= HARDLY * self.step_s:
            return f"{text}, no wait"
        text += f", {ms(self.wait_s)} of it this wait"
        text += ", which holds up the other ranks" * self.late
        return text + "".join(f"; {change}" for change in self.changes)

    def values(self) -> dict[str, Any]:
        """Return the keys of `--json`."""
        changes = [
            {**change.values, "step_s": change.step_s, "wait_s": change.wait_s}
            for change in self.changes
        ]
        return {"step_s": self.step_s, "wait_s": self.wait_s, "late": self.late, "changes": changes}


def outlooks(
    answer: Values, rows: Mapping[int, Sequence[Sequence[int]]], machine: Machine
) -> dict[int, Outlook]:
    """Return what each open stream of batches will wait for, if enough of them is known.

    Args:
        answer: that of `creel stats --json`.
        rows: the last batches by session, see `BatchRow`.
    """
    by_session: dict[int, Outlook] = {}
    sessions = sorted(answer["sessions"], key=lambda s: (job_key(s), s["rank"]))
    for _, group in groupby(sessions, key=job_key):
        known = [(s, w) for s in group if (w := window(s, rows.get(s["session"], ()))) is not None]
        if known:
            by_session |= _of_job([s for s, _ in known], [w for _, w in known], answer, machine)
    return by_session


def window(session: Values, rows: Sequence[Sequence[int]]) -> RankWindow | None:
    """Return what a stream of batches did lately; None if it took too few."""
    table = columns(rows)
    lately = recent(table["taken"])
    taken = table["taken"][lately]
    last = {name: column[lately][1:] for name, column in table.items()}
    if len(taken) <= BATCHES:
        return None
    moments = ("source", "began", "ready"), ("decode", "ready", "collating")
    busy = {
        stage: float((last[until] - last[since]).clip(0).sum() / 1e9)
        for stage, since, until in (*moments, ("collate", "collating", "packed"))
    }
    made_by = set(last["worker"].tolist())
    workers = 0 if made_by == {-1} else int(session["workers"] or len(made_by))
    own, counted = busy["decode"] + busy["collate"], session["busy_s"]
    share = session["cpu_s"] / max(counted["decode"] + counted["collate"], 1e-9)
    return RankWindow(
        seconds=float(taken[-1] - taken[0]) / 1e9,
        batches=len(taken) - 1,
        workers=workers,
        busy_s=busy,
        stall_s={"all": float((last["taken"] - last["wait_began"]).sum() / 1e9)},
        cpu_s=share * own if workers else -1.0,
        finished=finished(last["packed"], last["taken"]),
    )


def _of_job(
    sessions: Sequence[Values], windows: Sequence[RankWindow], answer: Values, machine: Machine
) -> dict[int, Outlook]:
    """Return the outlooks of the ranks of one job; a change is one of all ranks."""
    now = forecast(windows, machine.cores)
    late = straggler(now)
    changed = [(words, values, forecast(ranks, machine.cores)) for words, values, ranks in (
        *_more_workers(windows, machine.cores),
        *_kept_decoded(sessions, windows, answer, machine),
        *_all_in_memory(sessions, windows, answer),
    )]  # fmt: skip
    return {
        session["session"]: Outlook(
            was.step_s,
            was.wait_s,
            k == late,
            [
                Change(words, values, will[k].step_s, will[k].wait_s, was.step_s / will[k].step_s)
                for words, values, will in changed
                if was.step_s > _GAIN * will[k].step_s
            ],
        )
        for k, (session, was) in enumerate(zip(sessions, now, strict=True))
    }


#: A change in words and in values, and the windows as they would have been.
Tried = tuple[str, dict[str, Any], list[RankWindow]]


def _more_workers(windows: Sequence[RankWindow], cores: float) -> list[Tried]:
    workers = enough_workers(windows, cores)
    if workers is None:
        return []
    words = f"with {workers} worker{'s' * (workers > 1)}"
    values = {"what": "workers", "workers": workers}
    return [(words, values, [with_workers(rank_window, workers) for rank_window in windows])]


def _kept_decoded(
    sessions: Sequence[Values], windows: Sequence[RankWindow], answer: Values, machine: Machine
) -> list[Tried]:
    """Return what `keep_decoded="auto"` would bring; nothing if the files are worth more."""
    held = answer["core"]["datasets"]
    if not all(
        session.get("decoded_measured", 0) and session["dataset"] in held for session in sessions
    ):
        return []
    means = [session["decoded_call_nbytes"] / session["decoded_measured"] for session in sessions]
    each = {
        session["dataset"]: int(mean * held[session["dataset"]]["objects"])
        for session, mean in zip(sessions, means, strict=True)
    }
    whole = sum(each.values())
    parts_of = []
    for session, mean in zip(sessions, means, strict=True):
        calls = session["decoded_calls"]
        again_s = calls * session["decoded_call_s"] / session["decoded_measured"]
        counted = session["busy_s"]["decode"] or session["stall_s"]["decode"]  # without workers
        copies_s = calls * (_COPY_S + mean / _COPY_BPS)
        parts_of.append([min(s / max(counted, 1e-9), 1.0) for s in (again_s, copies_s)])
    both = list(zip(windows, parts_of, strict=True))
    paces = [pace(seen, *parts) for seen, parts in both]
    slowest = max(paces, key=lambda pace: max(pace.work_s, pace.storage_s))
    encoded = sum(int(held[name]["nbytes"]) for name in each)
    room = decoded_room(
        None,
        0,
        machine.available_nbytes,
        reserve(machine.memory_nbytes),
        whole=whole,
        encoded=encoded,
        pace=slowest,
    )
    share = min(room / max(whole, 1), 1.0)
    ranks = [with_decoded(seen, share, *parts) for seen, parts in both]
    words = f"with keep_decoded ({format_size(whole)}, fits {100 * share:.0f} %)"
    return [(words, {"what": "keep_decoded", "nbytes": whole, "fits": share}, ranks)]


def _all_in_memory(
    sessions: Sequence[Values], windows: Sequence[RankWindow], answer: Values
) -> list[Tried]:
    """Return what memory for everything would bring; nothing where everything is in memory."""
    held = answer["core"]["datasets"]
    names = {session["dataset"] for session in sessions}
    known = [held[name] for name in names & held.keys()]
    if len(known) == len(names) and all(d.get("resident_objects") == d["objects"] for d in known):
        return []
    nbytes = sum(int(d["nbytes"]) for d in known)
    words = f"with all in memory ({format_size(nbytes)})" if nbytes else "with all in memory"
    values = {"what": "memory", "nbytes": nbytes}
    return [(words, values, [with_memory(rank_window) for rank_window in windows])]
