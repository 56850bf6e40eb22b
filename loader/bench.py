"""The bench: where a loader's workers wait between its iterators."""

from __future__ import annotations

import os
from dataclasses import dataclass

from creel.loader.alike import Snapshot, UnlikeError, snapshot, steady
from creel.loader.pool import Context, Pool
from creel.loader.worker import Outfit


class Held:
    """Objects, compared by being the same; held, so that no other one takes their place."""

    def __init__(self, *things: object) -> None:
        self._things = things

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Held) or len(other._things) != len(self._things):
            return False
        return all(a is b for a, b in zip(self._things, other._things, strict=True))

    __hash__ = None  # type: ignore[assignment]  # compared only


@dataclass(frozen=True)
class Wanted:
    """What kind of workers an iterator needs."""

    context: Context
    outfit: Outfit
    workers: int
    #: Arguments that must be the same for workers to be used again; None: they never are.
    key: tuple[object, ...] | None
    max_leased: int

    def pool(self) -> Pool:
        """New workers."""
        return Pool(self.context, self.outfit, self.workers, self.max_leased)

    def freeze(self) -> Snapshot:
        """What new workers would be born with.

        Raises:
            UnlikeError: living ones cannot become that.
        """
        outfit = self.outfit
        if outfit.code is not None:
            return steady((outfit.code(), outfit.collate_fn), self.context.get_start_method())
        what = (outfit.dataset, outfit.collate_fn, outfit.binding)
        return snapshot(what, self.context.get_start_method())


class Bench:
    """Where a loader's workers wait between its iterators.

    Belongs to one loader and to the process that made it.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        #: Why workers cannot outlive an epoch, once that is known.
        self.unlike = ""
        #: Epochs begun ahead whose base seed or dataset turned out to be another.
        self.wasted = 0
        self._closed = False
        self._idle: list[tuple[tuple[object, ...], Pool]] = []

    def seat(self, wanted: Wanted) -> tuple[Pool, int]:
        """Workers that are as good as new, and the tag of their epoch.

        If the pool's `ahead` is still there then, that epoch has begun with its first batches.
        """
        pool = self._take(wanted)
        if pool is None:
            return wanted.pool(), 0
        try:
            return pool, self._seated(pool, wanted, wanted.freeze())
        except UnlikeError as e:
            self.unlike = str(e)
            pool.close()
            return wanted.pool(), 0
        except BaseException:  # Ctrl-C: nobody else knows of these workers
            pool.close()
            raise

    def _seated(self, pool: Pool, wanted: Wanted, frozen: Snapshot) -> int:
        ahead = pool.ahead
        if ahead is not None:
            same = (ahead.base_seed, ahead.frozen.digest, ahead.frozen.world)
            now = (wanted.outfit.base_seed, frozen.digest, frozen.world)
            if same == now and not pool.unfit(ahead.tag):
                return ahead.tag
            pool.take_ahead(wanted=False)
            self.wasted += 1
        return self.renew(pool, wanted, frozen)

    @staticmethod
    def renew(pool: Pool, wanted: Wanted, frozen: Snapshot) -> int:
        """Make all workers as good as new; the tag of their epoch."""
        tag = pool.begin(frozen, wanted.outfit.base_seed)
        pool.void(tag)
        for worker in pool.unfit(tag):
            pool.replace(worker, wanted.outfit)
        return tag

    def _take(self, wanted: Wanted) -> Pool | None:
        """An idle pool for these arguments; those for others will never be asked for again."""
        idle, self._idle = self._idle, []
        fitting = None
        for key, pool in idle:
            if key == wanted.key and fitting is None and wanted.key is not None:
                fitting = pool
            else:
                pool.close()
        return fitting

    def leave(self, pool: Pool, key: tuple[object, ...] | None) -> None:
        """An iterator is done with its workers. Finalisers call it."""
        pool.void(pool.tag + 1 if pool.ahead is None else pool.ahead.tag)
        usable = not (self._closed or self.unlike or self._idle)
        if key is not None and usable and not any(m.dead for m in pool.members):
            self._idle.append((key, pool))
        else:
            pool.close()

    def close(self) -> None:
        """End all idle workers; those still in use end with their iterator."""
        self._closed = True
        idle, self._idle = self._idle, []
        for _, pool in idle:
            pool.close()
