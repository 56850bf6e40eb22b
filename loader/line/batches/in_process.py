"""Batches made in the training process: what makes them, and how long it waits for the daemon."""

from __future__ import annotations

import time
import warnings
from typing import TYPE_CHECKING, Any, Protocol

from creel.cache.memory.pools.free_ranges import NOWHERE
from creel.cache.storage.stores.retry import public
from creel.loader.client.log_lines import with_rank
from creel.loader.making.maker import BatchMaker, Waits
from creel.loader.making.seeding.by_sample import Seeded, kept_generators
from creel.loader.making.stages import StallWarning
from creel.loader.making.task import Made, Task
from creel.loader.making.transport.pinning import Pinning, pinned
from creel.policies.direct import DirectReads

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from creel.loader.client.session import Session
    from creel.loader.data.binding.bind import Binding
    from creel.loader.data.reading.lease import Lease
    from creel.loader.line.batches.epoch_run import EpochRun
    from creel.loader.line.batches.state import LoaderState
    from creel.loader.line.observers.meter import Meter
    from creel.policies.arrays import Ids


class TrainerWaits(Waits):
    """Waits of a training process: for the daemon, unless a direct read takes no longer."""

    def __init__(self, loader_state: LoaderState, direct: DirectReads, binding: Binding) -> None:
        """`direct`: says when not to wait for the daemon."""
        options = loader_state.config.loader
        super().__init__(options.wait_s)
        self._quiet_s = min(options.wait_s, options.hung_s)
        self._direct, self._binding = direct, binding
        self._warned = False

    def wait(self, session: Session, step: int, ids: Ids) -> bool:
        own_s = self._direct.wait_s(len(ids), session.nbytes(ids), session.object_ns)
        if not own_s:
            return False
        began, quiet_s = time.monotonic(), self._quiet_s
        ready = session.wait(step, min(quiet_s, own_s))
        if not ready and own_s < quiet_s:
            self._direct.waited_in_vain()
        elif not ready and session.alive and time.monotonic() - began >= quiet_s:
            left_s = self._wait_s - quiet_s
            self._warn(session, ids, left_s)
            ready = left_s > 0 and session.wait(step, left_s)
        return ready

    def saw(self, lease: Lease) -> None:
        self._direct.saw(lease.direct_reads, lease.direct_ns, lease.use)

    def _warn(self, session: Session, ids: Ids, left_s: float) -> None:
        if self._warned:
            return
        self._warned = True
        absent = ids[session.table.offset[ids] == NOWHERE]
        what = "it"
        if len(absent):
            what = public(self._binding.manifest.location(int(absent[0]))[0])
        then = f"up to {left_s:g} s more" if left_s > 0 else "then creel reads it directly"
        text = f"no batch for {self._quiet_s:g} s: waiting for the daemon to read {what}; {then}"
        warnings.warn(with_rank(text), StallWarning, stacklevel=2)


def maker_in_process(
    loader: DataLoader[Any],
    loader_state: LoaderState,
    run: EpochRun,
    *,
    frozen: Binding | None = None,
    as_worker: bool = False,
    direct: DirectReads | None = None,
    pinning: Pinning | None = None,
) -> BatchMaker:
    """Return what makes a loader's batches in one thread of this process.

    Args:
        frozen: a copy of the dataset's binding, for a maker that is `as_worker`.
        as_worker: like a worker, the maker ignores later changes to the person's dataset; it runs
            none of their code, which alone draws random numbers.
        direct: says when not to wait for the daemon; by default the loader's own choice.
        pinning: how batches are pinned later; batches that are bytes of the arena are then built in
            pinned memory. None: batches are not pinned.
    """
    binding = frozen or run.serving.binding
    dataset: Any = loader.dataset if binding is None else binding.dataset
    collate: Any = loader.collate_fn
    seeded = None
    if loader_state.args.seeding is not None and not as_worker:
        seeded = Seeded(dataset)
        collate = seeded.collating(collate)
    memory = loader_state.buffers.take
    if pinning is not None and pinning.for_cuda():
        memory = pinned
    waits = Waits(0.0)
    if binding is not None:
        waits = TrainerWaits(loader_state, direct or loader_state.direct, binding)
    maker = BatchMaker(
        dataset,
        collate,
        torch_flags=(loader._auto_collation, loader.drop_last),  # noqa: SLF001  torch's
        tolerance=loader_state.tolerance,
        seeded=seeded,
        binding=binding,
        plain=loader_state.collates_plainly(loader),
        live=not as_worker,
        memory=memory,
        waits=waits,
    )
    if run.serving.builder is not None:
        gather, builds = run.serving.builder
        maker.builder = builds.batch_builder(gather, memory, as_worker)
    return maker


class MakerPlace(Protocol):
    """Where an iterator without workers has its batches made."""

    def read(self, task: Task, session: Session | None) -> Made:
        """Return a batch. Raises what the person's code raises.

        Args:
            session: of the task's claim; None: there is none.
        """
        ...

    def close(self) -> None:
        """End the epoch: no more batches are asked for."""


class Here:
    """The training process's own thread; counts what it waits for."""

    def __init__(self, maker: BatchMaker, meter: Meter) -> None:
        self.maker, self._meter = maker, meter

    def read(self, task: Task, session: Session | None) -> Made:
        maker = self.maker
        try:
            if maker.seeded is None:
                data = maker.make(task, session)
            else:
                with kept_generators():  # the trainer's own stay as they are
                    data = maker.make(task, session)
        finally:
            times = maker.times(time.monotonic_ns())
            self._meter.made(times, maker.counts)
        return Made(data, times, maker.counts)

    def close(self) -> None:
        """Do nothing: no resource is held between batches."""
