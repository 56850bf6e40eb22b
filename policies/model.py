"""What a rank will wait for, from what it did in the last seconds: one law. Pure.

A rank's workers supply a batch every `busy seconds per batch / workers` (the utilisation law of
queueing theory). Training takes one every `(time - waits) / batches`. Where the first is longer,
the difference is the wait. Ranks that train together step as fast as the slowest of them, and the
time that one rank trains includes its wait for the others: the least over the ranks is training
itself. Storage reads ahead beside the workers: a batch takes the longer of both times, not the sum.

`benchmarks/model.py` compares forecasts with what came.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from creel.policies import memory
from creel.policies.arrays import Ints

#: A rank that waited for more than this part of its time was short of batches: the pace at which
#: they came is then measured, not computed.
_WAITED = 0.02
#: A straggler is later than the next rank by this part of a step, or nobody is.
_BEHIND = 0.05
#: Below this part of the time in `dataset[i]` on a processor, samples wait for something else.
_IDLE = 0.5
#: Above this multiple of their time, workers run threads of their own.
_THREADS = 1.3

#: A change that leaves more than this part of a wait does not help.
_HELPS = 0.8
#: Waits that differ by less than this part are equal.
_ALIKE = 0.05

#: Times that are known by looks are right within this factor.
_LOOKS_ERR = 1.1

#: Stages whose time is a worker's own work.
_WORK = ("decode", "collate")
#: What a rank did recently is what it did in so many seconds, but in so many batches at least.
RECENT_S, RECENT_BATCHES = 10.0, 32


@dataclass(frozen=True)
class RankWindow:
    """What one rank did in some seconds: differences of its counters.

    Attributes:
        seconds: how long.
        batches: taken by training.
        workers: processes that make batches; 0: training does it itself.
        busy_s: by stage, seconds of all workers, or without workers of the trainer.
        cpu_s: seconds of a processor that workers used; negative if unknown.
        stall_s: by cause, seconds that training waited.
        finished: finished batches that wait for training now.
        extra_s: seconds between two batches beyond the workers' work, which no change takes away:
            each epoch starts its workers, or one of them has the long batches.
    """

    seconds: float
    batches: int
    workers: int
    busy_s: Mapping[str, float]
    stall_s: Mapping[str, float]
    cpu_s: float = -1.0
    finished: float = 0.0
    extra_s: float = 0.0

    @property
    def waited_s(self) -> float:
        """Seconds that training waited in all."""
        return sum(self.stall_s.values())

    @property
    def train_s(self) -> float:
        """Seconds of one step without its wait for data, but with the wait for other ranks."""
        return max(self.seconds - self.waited_s, 0.0) / self.batches

    @property
    def demand_s(self) -> float:
        """Seconds of work in one batch."""
        return sum(self.busy_s.values()) / self.batches


@dataclass(frozen=True)
class Forecast:
    """What one rank does next if nothing changes.

    Attributes:
        supply_s: seconds between two batches that its workers can make.
        step_s: seconds of a step of the whole job.
        wait_s: seconds of each step that this rank waits for its batch.
        in_steps: steps until that wait begins, as finished batches last so long; inf: never.
        cause: the stage that takes longest; "waiting" and "threads" stand for "decode" where
            `dataset[i]` uses no processor, or several.
    """

    supply_s: float
    step_s: float
    wait_s: float
    in_steps: float
    cause: str


def forecast(ranks: Sequence[RankWindow], cores: float = math.inf) -> list[Forecast]:
    """Return what each rank that trains together with the others does next.

    Args:
        ranks: one window each, with a batch at least.
        cores: of the node on which all of them run.

    >>> one = RankWindow(16.0, 64, 2, {"decode": 32.0}, {"decode": 8.0})
    >>> forecast([one])[0]
    Forecast(supply_s=0.25, step_s=0.25, wait_s=0.125, in_steps=0.0, cause='decode')
    """
    if not ranks:
        return []
    floor = node_s(ranks, cores)
    supplies = [max(supply_s(rank), floor) for rank in ranks]
    train = min(rank.train_s for rank in ranks)
    both = list(zip(ranks, supplies, strict=True))
    waits = [max(s - train, 0.0) if rank.workers else s for rank, s in both]
    return [
        Forecast(s, train + max(waits), wait, _lasts(rank, train, s), cause(rank))
        for (rank, s), wait in zip(both, waits, strict=True)
    ]


def supply_s(rank: RankWindow) -> float:
    """Return the seconds between two batches that a rank's workers can make.

    Where training waited, the pace was seen. It is slower than the law says if workers take
    batches in a fixed order and one of them has the long ones.
    """
    computed = _work_s(rank) + rank.extra_s
    return max(computed, _seen_s(rank)) if rank.workers else computed


def _work_s(rank: RankWindow) -> float:
    """Return the seconds between two batches by the workers' work alone."""
    return rank.demand_s / max(rank.workers, 1)


def _extra_s(rank: RankWindow, demand_s: float) -> float:
    """Return the seconds between two batches beyond the work in them, if that becomes `demand_s`.

    The edges of the window make up to one batch of a worker of it: two workers that deliver
    together look slower where one of both batches lies outside. That part shrinks with the work.
    """
    extra_s = supply_s(rank) - _work_s(rank)
    edges_s = min(extra_s, rank.demand_s / rank.batches)
    return extra_s - edges_s * max(1 - demand_s / max(rank.demand_s, 1e-9), 0.0)


def _seen_s(rank: RankWindow) -> float:
    """Return the seconds between two batches that training had to wait for; 0 if it did not."""
    return rank.seconds / rank.batches if rank.waited_s > _WAITED * rank.seconds else 0.0


def node_s(ranks: Sequence[RankWindow], cores: float) -> float:
    """Return the least seconds of a step for which the node's cores suffice; 0 if unknown."""
    known = [rank.cpu_s / rank.batches for rank in ranks if rank.cpu_s > 0]
    return sum(known) / cores if known else 0.0


def _lasts(rank: RankWindow, train: float, supply: float) -> float:
    """Return how many steps finished batches last if each takes `train` and they come slower."""
    if not rank.workers:
        return 0.0
    return rank.finished / (1 - train / supply) if supply > train else math.inf


def cause(rank: RankWindow) -> str:
    """Return the stage of a batch that takes longest, "" if none takes any time.

    >>> cause(RankWindow(1.0, 10, 1, {"source": 0.1, "decode": 0.8}, {}, cpu_s=0.1))
    'waiting'
    """
    stage = max(rank.busy_s, key=lambda name: rank.busy_s[name], default="")
    if not stage or not rank.busy_s[stage]:
        return ""
    own = sum(rank.busy_s.get(name, 0.0) for name in _WORK)
    if stage != "decode" or rank.cpu_s < 0 or not rank.workers:
        return stage
    if rank.cpu_s < _IDLE * own:
        return "waiting"
    return "threads" if rank.cpu_s > _THREADS * own else stage


def straggler(forecasts: Sequence[Forecast]) -> int | None:
    """Return which rank holds the others up; None if none is later than the next by 5 %.

    >>> def waits(s: float) -> Forecast:
    ...     return Forecast(s, 0.2, s - 0.1, 0.0, "decode")
    >>> straggler([waits(0.1), waits(0.2)]), straggler([waits(0.2), waits(0.2)])
    (1, None)
    """
    order = sorted(range(len(forecasts)), key=lambda k: -forecasts[k].wait_s)
    if len(order) < 2 or not forecasts[order[0]].wait_s:
        return None
    first, second = (forecasts[k] for k in order[:2])
    late = first.wait_s - second.wait_s
    return order[0] if late > _BEHIND * max(first.step_s, 1e-9) else None


# --- from the last batches of a rank (`cache.memory.batch_log`) ---------------------------------


def recent(taken_ns: Ints) -> slice:
    """Return which batches are recent, of those that training took at (k,) moments, in order.

    The first one of the slice is only where the time of the others begins.

    >>> recent(np.arange(0, 100 * 10**9, 10**9))
    slice(67, 100, None)
    """
    if not len(taken_ns):
        return slice(0, 0)
    since = int(np.searchsorted(taken_ns, taken_ns[-1] - int(1e9 * RECENT_S)))
    return slice(max(min(since, len(taken_ns) - RECENT_BATCHES - 1), 0), len(taken_ns))


def utilisation(wait_began_ns: Ints, taken_ns: Ints) -> float | None:
    """Return the share of its recent time in which training did not wait; None if it is unknown.

    Args:
        wait_began_ns, taken_ns: (k,) when training began to wait for each batch and when it got it,
            in the order in which it got them, whichever loaders they are of.

    >>> utilisation(np.array([0, 15, 20]), np.array([10, 15, 30]))
    0.5
    """
    lately = recent(taken_ns)
    began, taken = wait_began_ns[lately], taken_ns[lately]
    if len(taken) < 2 or taken[-1] <= taken[0]:
        return None
    waits = taken[1:] - np.maximum(began[1:], taken[:-1])
    return 1 - float(np.clip(waits.sum() / (taken[-1] - taken[0]), 0, 1))


def finished(packed_ns: Ints, taken_ns: Ints) -> int:
    """Return how many other batches lay finished when the last of them was finished.

    Args:
        packed_ns, taken_ns: (k,) when each batch was finished and taken, in order. Training has all
            of them now, but at that moment some waited.

    >>> finished(np.array([1, 2, 3, 4]), np.array([2, 5, 6, 7]))
    2
    """
    if not len(packed_ns):
        return 0
    at = packed_ns[-1]
    return int(((packed_ns < at) & (taken_ns > at)).sum())


# --- what if: each returns the window as it would have been -------------------------------------
#
# A change is worth what it takes away of the workers' work: one that changes nothing is worth
# 1.00x, however long training waited for other reasons (`RankWindow.extra_s`).


def with_workers(rank: RankWindow, workers: int) -> RankWindow:
    """Return the window with another number of workers, whose waits are not known yet.

    Storage gives no more to more workers: each of them then waits longer for it. (The daemon reads
    with as many threads as help, whatever the workers do.)

    >>> bound = RankWindow(10.0, 100, 2, {"source": 15.0, "decode": 5.0}, {"source": 9.0})
    >>> [supply_s(with_workers(bound, n)) for n in (2, 4)]
    [0.1, 0.1]
    """
    storage = storage_s(rank)
    more = replace(rank, workers=workers)
    return _waiting(rank, more, storage, otherwise=rank.busy_s.get("source", 0.0))


def with_memory(rank: RankWindow, hits: float = 1.0) -> RankWindow:
    """Return the window if this share of what is read now were in memory.

    >>> bound = RankWindow(10.0, 100, 2, {"source": 15.0, "decode": 5.0}, {"source": 9.0})
    >>> [supply_s(with_memory(bound, share)) for share in (0.5, 0.75, 1.0)]
    [0.05, 0.025, 0.025]
    """
    left = 1 - hits
    waits = rank.busy_s.get("source", 0.0)
    return _waiting(rank, rank, storage_s(rank) * left, otherwise=waits * left)


def with_storage(rank: RankWindow, share: float, asleep: float = 0.0) -> RankWindow:
    """Return the window with what samples waited for storage counted as "source".

    What is left of decoding is a small part where storage takes nearly all the time, so it must not
    be a difference of two numbers by looks: the processor time of workers is known exactly.

    Args:
        share: how many of the workers wait for reads of their own at a time, on average.
        asleep: how many wait for something else, by the same looks.

    >>> own = RankWindow(10.0, 100, 2, {"decode": 20.0}, {"decode": 9.0}, cpu_s=4.0)
    >>> [round(with_storage(own, 1.5, asleep).busy_s["decode"], 1) for asleep in (0.0, 0.5)]
    [4.0, 6.4]
    """
    decode, waits = rank.busy_s.get("decode", 0.0), share * rank.seconds
    if rank.cpu_s >= 0 and share:
        others_s = rank.workers * rank.seconds - rank.cpu_s
        exact = min(others_s * share / (share + asleep), decode - rank.cpu_s)
        waits = min(max(exact, waits / _LOOKS_ERR), waits * _LOOKS_ERR)
    waits = min(waits, decode)
    source = rank.busy_s.get("source", 0.0) + waits
    return replace(rank, busy_s={**rank.busy_s, "decode": decode - waits, "source": source})


def with_decoded(rank: RankWindow, share: float, again: float, copies: float) -> RankWindow:
    """Return the window if this share of the samples were kept decoded.

    Args:
        again: part of the time of "decode" that is spent on what need not be done again.
        copies: the same for the copies that are then made instead, of all samples.
    """
    saved = share * max(again - copies, 0.0) * rank.busy_s.get("decode", 0.0)
    busy = {**rank.busy_s, "decode": rank.busy_s.get("decode", 0.0) - saved}
    own = sum(rank.busy_s.get(name, 0.0) for name in _WORK)
    cpu_s = rank.cpu_s * (1 - saved / own) if rank.cpu_s > 0 and own else rank.cpu_s
    left, waits = 1 - share, rank.busy_s.get("source", 0.0)
    changed = replace(rank, busy_s=busy, cpu_s=cpu_s)
    return _waiting(rank, changed, storage_s(rank) * left, otherwise=waits * left)


def pace(rank: RankWindow, again: float, copies: float) -> memory.SampleCost:
    """Return what a batch takes if nothing of it is in memory; for `again`, `copies` see above."""
    each = max(rank.workers, 1) * rank.batches
    own_s = (_cycle_s(rank) - rank.busy_s.get("source", 0.0)) / each
    again_s = max(again - copies, 0.0) * rank.busy_s.get("decode", 0.0) / each
    return memory.SampleCost(own_s, again_s, storage_s(rank))


def storage_s(rank: RankWindow) -> float:
    """Return the seconds that storage takes for each batch; 0 where it keeps up.

    It reads ahead while workers work. So where they wait for it, batches come at its pace.
    """
    waits = rank.busy_s.get("source", 0.0)
    return memory.storage_s(waits, _cycle_s(rank) - waits) / max(rank.workers, 1) / rank.batches


def _cycle_s(rank: RankWindow) -> float:
    """Return the seconds of all workers' turns: without workers training is part of each turn."""
    own = sum(rank.busy_s.values())
    return own if rank.workers else own + rank.train_s * rank.batches


def _waiting(rank: RankWindow, changed: RankWindow, storage: float, otherwise: float) -> RankWindow:
    """Return a changed window whose workers wait for a storage: `storage` seconds for a batch.

    The pace that was seen holds no more, only what was beyond the workers' work.

    Args:
        rank: the window before the change.
        otherwise: seconds that the workers wait, if the storage keeps up.
    """
    own = _cycle_s(changed) - changed.busy_s.get("source", 0.0)
    room = storage * changed.batches * max(changed.workers, 1)
    waits = max(room - own, 0.0) if storage else otherwise
    changed = replace(
        changed,
        seconds=max(rank.seconds - rank.waited_s, 1e-9),
        stall_s={},
        busy_s={**changed.busy_s, "source": waits},
    )
    return replace(changed, extra_s=_extra_s(rank, changed.demand_s))


def enough_workers(ranks: Sequence[RankWindow], cores: float) -> int | None:
    """Return the least number of workers of each rank that helps as much as any; None: none does.

    No more than the node has cores: workers beyond them would only take turns.

    >>> enough_workers([RankWindow(16.0, 64, 2, {"decode": 32.0}, {"decode": 8.0})], cores=8)
    4
    """
    fewest, most = max(rank.workers for rank in ranks) + 1, int(cores)
    if most < fewest:
        return None

    def wait_s(workers: int) -> float:
        return max(
            outlook.wait_s for outlook in forecast([with_workers(r, workers) for r in ranks], cores)
        )

    now, best = max(outlook.wait_s for outlook in forecast(ranks, cores)), wait_s(most)
    if best > _HELPS * now:
        return None
    good = best + _ALIKE * now
    return next(n for n in range(fewest, most + 1) if wait_s(n) <= good)
