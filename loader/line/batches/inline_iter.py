"""InlineIter: the iterator for `num_workers=0`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from creel.loader.data.buffers import keep_freed_memory
from creel.loader.line.batches.epoch_run import EpochRun
from creel.loader.line.batches.in_process import Here, MakerPlace, maker_in_process
from creel.loader.line.batches.state import LoaderState
from creel.loader.line.batches.unprofiled import UnprofiledIter
from creel.loader.making.groups.follower import ReplicaReader
from creel.loader.making.groups.leader import Leader, LeaderReader
from creel.loader.making.transport.pinning import Pinning
from creel.loader.torch_private import SingleProcessDataLoaderIter

if TYPE_CHECKING:
    from torch.utils.data import DataLoader


class InlineIter(UnprofiledIter, SingleProcessDataLoaderIter):
    """`num_workers=0`: torch's own iterator, with its samples read through the daemon."""

    _run: EpochRun  # unset until an epoch has begun

    def __init__(self, loader: DataLoader[Any], loader_state: LoaderState) -> None:
        keep_freed_memory()
        moment = loader_state.before(loader)
        super().__init__(loader)
        self._meter = loader_state.meter
        self._tolerance = loader_state.tolerance
        self._given = 0
        run = self._run = EpochRun(loader_state, loader)
        self._pinning = Pinning.of(self)
        maker = maker_in_process(loader, loader_state, run, pinning=self._pinning)
        self._dataset_fetcher = maker.fetcher
        options, role = loader_state.config.loader, loader_state.role(loader)
        self._place: MakerPlace = Here(maker, self._meter)
        if isinstance(role, Leader):
            self._place = LeaderReader(self._place, role, options.slots)
        elif role is not None:
            self._place = ReplicaReader(role, options.max_leased, options.hung_s)
        run.begin(loader, self, moment)

    def _next_data(self) -> Any:
        run = self._run
        try:
            index = self._next_index()
        except StopIteration:
            self._place.close()
            run.finished = True
            run.leave()
            raise
        i = self._given
        self._given = i + 1
        run.serving.await_daemon()
        try:
            task, stream = run.task(i, index), run.serving.stream
            made = self._place.read(task, None if stream is None else stream.session)
        except BaseException:
            run.lost(i)
            raise
        finally:
            run.done(i + 1)
            if self._tolerance.wanted:
                run.note_bad(self._tolerance.take_new())
        data = made.data if self._pinning is None else self._pinning.pin(made.data)
        run.deliver(i + 1, made.times)
        return data

    def __del__(self, ends: Callable[[], bool] = sys.is_finalizing) -> None:
        # At interpreter exit the modules needed here may be gone.
        if "_run" in self.__dict__ and not ends():
            self._place.close()
            self._run.leave(deleted=True)
