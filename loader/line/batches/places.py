"""Where a loader's batches are made, and how long the training process waits for the daemon."""

from __future__ import annotations

import math
import time
import warnings
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch

from creel.cache.memory.pools.free_ranges import NOWHERE
from creel.cache.storage.stores.retry import public
from creel.loader.client.log_lines import with_rank
from creel.loader.data.binding.tree import reads_singly
from creel.loader.making.batch_times import StallWarning
from creel.loader.making.maker import BatchMaker, Waits
from creel.loader.making.places.here import Here
from creel.loader.making.places.processes import WorkerPool
from creel.loader.making.places.shared_processes import SharedPool
from creel.loader.making.places.threads import Threads
from creel.loader.making.transport.pinning import Pinning, pinned
from creel.loader.making.workers.init_fn import init_of
from creel.loader.making.workers.worker import WorkerArgs
from creel.policies.direct import DirectReads
from creel.system.limits import cores

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.utils.data import DataLoader

    from creel.loader.client.session import Session
    from creel.loader.data.binding.bind import Binding
    from creel.loader.data.reading.lease import Lease
    from creel.loader.line.batches.iterator_session import IteratorSession
    from creel.loader.line.batches.state import LoaderState
    from creel.loader.making.places.other_ranks import Followers
    from creel.loader.making.places.place import BatchPlace
    from creel.loader.torch_private import BaseDataLoaderIter
    from creel.policies.arrays import Ids

#: Smaller batches are copied on request: 2 MB take 0.2 ms, about as long as waking a thread
#: (benchmarks/cost_per_batch.py, tokens x 256). Larger ones are copied ahead of use.
INLINE_NBYTES = 4 << 20
#: How long to wait for a daemon that has all of a batch to say so: it takes a turn of its loop.
_ANSWER_S = 0.5


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
        if not own_s and self._direct.supposes and NOWHERE not in session.table.offset[ids]:
            own_s = _ANSWER_S  # all is in memory: only the daemon's answer is not there yet
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
        subject = "it"
        if len(absent):
            subject = public(self._binding.manifest.location(int(absent[0]))[0])
        then = f"up to {left_s:g} s more" if left_s > 0 else "then creel reads it directly"
        text = f"no batch for {self._quiet_s:g} s: waiting for the daemon to read {subject}; {then}"
        warnings.warn(with_rank(text), StallWarning, stacklevel=2)


def place_of(
    it: BaseDataLoaderIter,
    loader: DataLoader[Any],
    state: LoaderState,
    serving: IteratorSession,
    ahead: int,
) -> BatchPlace:
    """Return the place where the batches of an iterator are made.

    Batches of plain bytes are copied out of the arena by this process, large ones by threads.
    Without workers nothing observable changes, since no user code would run in them. It saves the
    fork, and worker memory that each epoch must map and zero (150 KB x 256: 2.1 times as fast as
    torch with workers, 6 with threads).

    Args:
        ahead: how many batches are made ahead of use; 0: there are no workers.
    """
    others, options = state.other_ranks(loader), state.config.loader
    if (place := others.place(options.max_leased)) is not None:
        return place
    pinning, counted = Pinning.of(it), state.observers.meter.count_batch
    if not ahead:
        maker = maker_in_process(loader, state, serving, pinning=pinning)
        it._dataset_fetcher = maker.fetcher  # type: ignore[attr-defined]  # noqa: SLF001  torch's
        tee = others.tee(options.slots)
        anew = partial(_waits, state, state.direct)
        return Here(maker, serving, pinning, counted=counted, tee=tee, waits=anew)
    copies = serving.builder is not None
    if serving.stream is not None:
        copies = copies or state.only_copies(loader, serving.stream.binding)
    if others.share or not copies:
        return _processes(it, loader, state, serving.binding, others.followers(ahead))
    frozen = None if serving.stream is None else serving.stream.binding.frozen()
    maker_args: Any = {"frozen": frozen, "as_worker": True, "pinning": pinning}
    maker_of = partial(maker_in_process, loader, state, serving, **maker_args)
    if not _is_large(loader, serving):
        return Here(maker_of(), serving, pinning, counted=counted, ahead=ahead)
    # Threads do not read directly: large objects fill fresh memory, so that would only cost CPU
    # time.
    waits, count = DirectReads(allowed=False), min(loader.num_workers, math.ceil(cores()))
    return Threads([maker_of(direct=waits) for _ in range(count)], serving, pinning)


def _is_large(loader: DataLoader[Any], serving: IteratorSession) -> bool:
    """Whether batches are large enough for threads; True if a batch sampler sets their sizes."""
    gather = None if serving.stream is None else serving.stream.binding.gather()
    if serving.builder is not None:
        gather = serving.builder[0]
    if gather is None:
        return False
    nbytes = max(gather.nbytes, gather.batch_nbytes)
    return loader.batch_size is None or nbytes * loader.batch_size >= INLINE_NBYTES


def _processes(
    it: Any,
    loader: DataLoader[Any],
    state: LoaderState,
    binding: Binding | None,
    followers: Followers | None,
) -> WorkerPool:
    """Start worker processes. As in torch, they see no later changes of what they start with."""
    options, plain = state.config.loader, state.collates_plainly(loader)
    stages = state.args.stages(state.tolerance)
    args = WorkerArgs(
        dataset=it._dataset,  # noqa: SLF001  torch's, as below
        collate_fn=it._collate_fn,  # noqa: SLF001
        auto_collation=it._auto_collation,  # noqa: SLF001
        drop_last=it._drop_last,  # noqa: SLF001
        base_seed=int(it._base_seed),  # noqa: SLF001
        init_fn=init_of(loader.dataset, loader.worker_init_fn),
        worker_id=0,
        num_workers=loader.num_workers,
        binding=binding,
        tolerance=state.tolerance,
        plain=plain,
        wait_s=options.wait_s,
        slots=options.slots,
        stages=stages,
    )
    context: Any = loader.multiprocessing_context or torch.multiprocessing
    spare, state.spare = state.spare, ()
    pool_args = context, args, loader.num_workers, options.max_leased, spare, followers
    if state.args.workers == "own":
        return WorkerPool(*pool_args)
    cuts = followers is None and plain and reads_singly(loader.dataset)
    cuts = cuts and all(stage.in_parts for stage in stages)
    return SharedPool(*pool_args, cuts=cuts)


def _waits(state: LoaderState, direct: DirectReads, binding: Binding | None) -> Waits:
    """Return how a maker in this process waits for objects of a binding; None: for none."""
    return Waits(0.0) if binding is None else TrainerWaits(state, direct, binding)


def maker_in_process(
    loader: DataLoader[Any],
    state: LoaderState,
    serving: IteratorSession,
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
    binding = frozen or serving.binding
    dataset: Any = loader.dataset if binding is None else binding.dataset
    own_memory = pinning is not None and pinning.for_cuda()
    memory: Callable[[int], torch.Tensor] = pinned if own_memory else state.buffers
    maker = BatchMaker(
        dataset,
        cast("Any", loader.collate_fn),
        torch_flags=(loader._auto_collation, loader.drop_last),  # noqa: SLF001  torch's
        stages=() if as_worker else state.args.stages(state.tolerance),
        binding=binding,
        plain=state.collates_plainly(loader),
        live=not as_worker,
        memory=memory,
        waits=_waits(state, direct or state.direct, binding),
    )
    if serving.builder is not None:
        gather, builds = serving.builder
        maker.builder = builds.batch_builder(gather, memory, as_worker)
    return maker
