"""Batches read in the training process itself: BatchReader, and InlineIter over it."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from creel.cache.memory.pools.free_ranges import NOWHERE
from creel.cache.storage.stores.retry import public
from creel.loader.binding.gather import Gatherer, StepReader
from creel.loader.client.claim import DIRECT, Claim
from creel.loader.decoded import worth
from creel.loader.groups.follower import ReplicaReader
from creel.loader.groups.leader import Leader, LeaderReader
from creel.loader.iterators.epoch_run import EpochRun
from creel.loader.iterators.state import LoaderState
from creel.loader.iterators.unprofiled import UnprofiledIter
from creel.loader.log_lines import with_rank
from creel.loader.reading.bad_samples import Tolerant, without_skipped
from creel.loader.reading.lease import Lease
from creel.loader.seeding.by_sample import Seeded, kept_generators
from creel.loader.torch_private import SingleProcessDataLoaderIter
from creel.loader.transport.buffers import keep_freed_memory
from creel.loader.transport.pinning import Pinning, pinned
from creel.loader.workers.stages import StallWarning
from creel.policies.direct import DirectReads

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from creel.loader.binding.bind import Binding, Gather
    from creel.loader.client.session import Session
    from creel.loader.datasets.base import BatchBuilder
    from creel.loader.iterators.meter import Meter
    from creel.loader.plan.batch_stream import BatchStream
    from creel.policies.arrays import Ids


class BatchReader(StepReader):
    """Reads batches in this process: as rows of the arena if possible, else sample by sample."""

    def __init__(
        self,
        loader: DataLoader[Any],
        loader_state: LoaderState,
        run: EpochRun,
        fetcher: Any,
        *,
        frozen: Binding | None = None,
        as_worker: bool = False,
        meter: Meter | None = None,
        direct: DirectReads | None = None,
        pinning: Pinning | None = None,
    ) -> None:
        """Make a reader for one thread.

        Args:
            fetcher: torch's, for the loader's dataset.
            frozen: a copy of the dataset's binding, for a reader that is `as_worker`.
            as_worker: the reader, like a worker, ignores later changes to the user's dataset.
            meter: receives the times and counts; by default the loader's own meter.
            direct: says when not to wait for the daemon; by default the loader's own choice.
            pinning: how batches are pinned later; batches that are bytes of the arena are then
                built in pinned memory. None: batches are not pinned.
        """
        self._run = run
        self._fetcher = fetcher
        self._as_worker = as_worker
        self._meter = meter or loader_state.meter
        self._memory = loader_state.buffers.take
        if pinning is not None and pinning.for_cuda():
            self._memory = pinned
        self._wait_s = loader_state.config.loader.wait_s
        self._warn_after_s = loader_state.config.loader.hung_s
        self._direct = direct or loader_state.direct
        self._gatherer: Gatherer | None = None
        self._gatherer_stream: BatchStream | None = None  # the stream whose rows `_gatherer` reads
        self._warned = False
        self._gather: Gather | None = None
        self._labels: list[object] = []  # the binding's labels when `_gather` was made
        self._binding: Binding | None = None
        self._copying = 0  # when copying of rows began, monotonic ns
        self._collating = [0]  # when the batch's collation began, monotonic ns
        # A reader that is `as_worker` runs no user code, which alone draws random numbers.
        seeding = loader_state.args.seeding
        self.seeded = Seeded(None) if seeding is not None and not as_worker else None
        if self.seeded is not None:
            fetcher.collate_fn = self.seeded.collating(fetcher.collate_fn)
        fetcher.collate_fn = _timed(fetcher.collate_fn, self._collating)
        self._plainly = loader_state.collates_plainly(loader)
        self._tolerance = loader_state.tolerance
        self._builder: BatchBuilder | None = None
        if run.direct is not None:
            gather, dataset = run.direct
            self._builder = dataset.batch_builder(gather, self._memory, self._as_worker)
        if run.binding is not None:
            self._binding = frozen or run.binding
            fetcher.dataset = self._binding.dataset  # the frozen one, if any
            self._inspect(self._binding)
        if self.seeded is not None:
            self.seeded.dataset = fetcher.dataset
        if self._tolerance.wanted:
            fetcher.dataset = Tolerant(fetcher.dataset, self._tolerance, reads=self.seeded)
            if fetcher.auto_collation:
                fetcher.collate_fn = without_skipped(fetcher.collate_fn)
        elif self.seeded is not None:
            fetcher.dataset = self.seeded

    def read(self, index: Any, claim: Claim, asked: BatchStream | None = None) -> Any:
        """Read the batch of `index`.

        Args:
            index: what the sampler yielded.
            claim: the batch's step and objects.
            asked: the stream of the claim, if another one may have replaced it since.
        """
        stream, binding = self._run.stream, self._binding
        if self._builder is not None and (batch := self._built(index)) is not None:
            return batch
        if binding is None:
            return self.fetch(index, None)
        if stream is None:
            return self.fetch(index, Lease())
        if claim.step >= 0 and (asked or stream) is not stream:
            claim = DIRECT
        if claim.step >= 0 and not self._as_worker:
            changed = not binding.still(np.atleast_1d(np.asarray(index)))
            claim = DIRECT if changed else claim
        gatherer = self._gatherer_of(stream, binding) if claim.step >= 0 else None
        return self.read_step(binding, stream.session, *claim, index, gatherer)

    def _built(self, index: Any) -> Any:
        """Return a batch built from the files of a stream; None if it must be fetched."""
        assert self._builder is not None  # noqa: S101  the caller has looked
        start = time.monotonic_ns()
        try:
            return self._builder.batch(index)
        finally:
            self._meter["stall_source_ns"] += time.monotonic_ns() - start

    def copying(self, *, decodes: bool) -> None:  # noqa: ARG002  collation notes its own start
        """Note when copying begins: it counts as collation, unless samples are made of the rows."""
        self._collating[0] = 0
        self._copying = time.monotonic_ns()

    def copied(self, *, done: bool) -> None:  # noqa: ARG002  the time is spent either way
        collating = self._collating[0] or self._copying
        self._meter["stall_decode_ns"] += collating - self._copying
        self._meter["stall_collate_ns"] += time.monotonic_ns() - collating

    def _gatherer_of(self, stream: BatchStream, binding: Binding) -> Gatherer | None:
        """Return the gatherer of this session's rows, made anew for each session; or None."""
        if not self._as_worker and self._changed(binding):
            self._inspect(binding)
            self._gatherer_stream = None
        if self._gatherer_stream is not stream:
            self._gatherer_stream = stream
            self._gatherer = None
            if self._gather is not None:
                how = self._memory, self._fetcher.collate_fn
                self._gatherer = Gatherer(self._gather, stream.session, *how)
        return self._gatherer

    def _changed(self, binding: Binding) -> bool:
        """Whether the user has assigned attributes or labels since `_inspect`."""
        if any(a is not b for a, b in zip(self._labels, binding.labels(), strict=True)):
            return True
        return self._gather is not None and not binding.gathers(self._gather)

    def _inspect(self, binding: Binding) -> None:
        """Record the present labels, and how batches are made from bytes."""
        self._labels = binding.labels()
        self._gather = binding.gather() if self._plainly else None
        if self._gather is not None and self._gather.has_code and self.seeded is not None:
            self._gather = None  # samples are seeded one by one

    def wait_for(self, session: Session, step: int, ids: Ids) -> bool:
        """Wait for the step; True if its objects are pinned, else the table may be out of date."""
        own_s = self._direct.wait_s(len(ids), session.nbytes(ids), session.object_ns)
        if not own_s:
            return False
        start = time.monotonic_ns()
        quiet_s = min(self._wait_s, self._warn_after_s)
        ready = session.wait(step, min(quiet_s, own_s))
        waited = time.monotonic_ns() - start
        if not ready and own_s < quiet_s:
            self._direct.waited_in_vain()
        elif not ready and session.alive and waited >= quiet_s * 1e9:
            left_s = self._wait_s - quiet_s
            self._warn(session, ids, quiet_s, left_s)
            ready = left_s > 0 and session.wait(step, left_s)
            waited = time.monotonic_ns() - start
        if ready or session.alive:
            self._meter["stall_source_ns"] += waited
        else:
            self._meter["stall_daemon_ns"] += waited
        return ready

    def _warn(self, session: Session, ids: Ids, waited_s: float, left_s: float) -> None:
        if self._warned:
            return
        self._warned = True
        absent = ids[session.table.offset[ids] == NOWHERE]
        what = "it"
        if len(absent) and self._binding is not None:
            what = public(self._binding.manifest.location(int(absent[0]))[0])
        then = f"up to {left_s:g} s more" if left_s > 0 else "then creel reads it directly"
        text = f"no batch for {waited_s:g} s: waiting for the daemon to read {what}; {then}"
        warnings.warn(with_rank(text), StallWarning, stacklevel=2)

    def close(self) -> None:
        """Do nothing: no resource is held between batches."""

    def fetch(self, index: Any, lease: Lease | None) -> Any:
        """Fetch as torch does, under the lease, and count times and direct reads."""
        start = time.monotonic_ns()
        self._collating[0] = 0
        try:
            if lease is None:
                return self._fetcher.fetch(self._as_torch_has_it(index))
            with lease:
                return self._fetcher.fetch(self._as_torch_has_it(index))
        finally:
            end = time.monotonic_ns()
            collating = self._collating[0] or end
            direct_ns = 0 if lease is None else lease.direct_ns
            self._meter["stall_source_ns"] += direct_ns
            self._meter["stall_decode_ns"] += collating - start - direct_ns
            self._meter["stall_collate_ns"] += end - collating
            if lease is not None:
                self._meter.direct(lease.direct_reads, lease.direct_nbytes)
                self._meter.decoded(lease.decoded_hits, lease.decoded_misses)
                self._meter.add(worth.counts(lease))
                self._direct.saw(lease.direct_reads, direct_ns, lease.use)

    def _as_torch_has_it(self, index: Any) -> Any:
        """Return the index as torch has it: an array of the order becomes a list of ints."""
        return index.tolist() if self._run.slices and isinstance(index, np.ndarray) else index


def _timed(collate: Callable[[Any], Any], when: list[int]) -> Callable[[Any], Any]:
    """Wrap `collate` to store its call time in `when[0]`.

    A list, not the reader: that would be a reference cycle, which delays freeing the reader.
    """

    def timed(samples: Any) -> Any:
        when[0] = time.monotonic_ns()
        return collate(samples)

    return timed


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
        reader = BatchReader(
            *(loader, loader_state, run, self._dataset_fetcher), pinning=self._pinning
        )
        self._seeded = reader.seeded
        options, role = loader_state.config.loader, loader_state.role(loader)
        self._reader: BatchReader | LeaderReader | ReplicaReader = reader
        if isinstance(role, Leader):
            self._reader = LeaderReader(reader, role, options.slots)
        elif role is not None:
            self._reader = ReplicaReader(role, options.max_leased, options.hung_s)
        run.begin(loader, self, moment)

    def _next_data(self) -> Any:
        run = self._run
        try:
            index = self._next_index()
        except StopIteration:
            self._reader.close()
            run.finished = True
            run.leave()
            raise
        i = self._given
        self._given = i + 1
        run.await_daemon()
        try:
            data = self._read(i, index)
        except BaseException:
            run.lost(i)
            raise
        finally:
            run.done(i + 1)
            if self._tolerance.wanted:
                run.note_bad(self._tolerance.take_new())
        if self._pinning is not None:
            data = self._pinning.pin(data)
        run.deliver(i + 1)
        return data

    def _read(self, i: int, index: Any) -> Any:
        """Read the batch; with seeds per sample, the trainer's own generators stay as they are."""
        claim, seeds = self._run.claim(i, index), self._run.seeds(i)
        if seeds is None or self._seeded is None:
            return self._reader.read(index, claim)
        self._seeded.begin(seeds)
        with kept_generators():
            return self._reader.read(index, claim)

    def __del__(self, ends: Callable[[], bool] = sys.is_finalizing) -> None:
        # At interpreter exit the modules needed here may be gone.
        if "_run" in self.__dict__ and not ends():
            self._reader.close()
            self._run.leave(deleted=True)
