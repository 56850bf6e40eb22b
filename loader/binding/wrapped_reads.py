"""WrappedReads: reads a dataset through the node's daemon in a loader that is not creel's.

The order is unknown, so nothing is fetched ahead: each batch is requested when it is read, as an
unplanned step. The daemon fetches absent objects (many at a time, once per node), pins the step's
objects while they are read, and keeps them for later epochs. Only pinned objects are copied, since
a copy of an object that moves meanwhile could be torn. Any failure only leads to direct reads, with
the same samples.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import multiprocessing
import multiprocessing.context
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar, cast

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import get_worker_info

from creel.addresses import startable
from creel.config import Config, switched_off
from creel.loader.binding.access_recorder import AccessRecorder, recordable
from creel.loader.binding.access_trace import AccessTrace
from creel.loader.binding.bind import Binding, bind, bound
from creel.loader.binding.gather import StepReader
from creel.loader.binding.joint_recording import JointMemory
from creel.loader.binding.journal import Shared
from creel.loader.binding.recording import KeptTrace, memory_of_ranks, recorder_on
from creel.loader.binding.tree import bindable
from creel.loader.binding.wrapped import AS_IT_IS, Wrapping
from creel.loader.client.connections import daemon_starting, open_session
from creel.loader.cluster.ranks import job_name, rank_and_world
from creel.loader.reading.intercept import Intercepted
from creel.loader.reading.lease import Lease
from creel.loader.reading.observer import passes_on
from creel.loader.reading.this_thread import this_thread, thread_use
from creel.policies.bypass import Bypass
from creel.policies.direct import DirectReads
from creel.system.forks import at_fork, forget_in_child

if TYPE_CHECKING:
    from torch.utils.data import Dataset

    from creel.loader.client.session import Session
    from creel.loader.datasets.base import Sample

T = TypeVar("T")
_log = logging.getLogger("creel.loader")

#: Longest wait for a step. Only the source can take this long (a dead or stopped daemon is noticed
#: within 3 s), and a direct read costs no more than the daemon's own read.
_WAIT_S = 10.0
#: Seconds until the daemon is tried again after a failure, or the page cache is checked again.
_RETRY_S = 30.0


class DaemonLink:
    """One process's session for a dataset; several threads may have steps open at once."""

    def __init__(self, session: Session, binding: Binding, wait_s: float, *, direct: bool) -> None:
        """`direct`: whether a fast source may be read without asking the daemon."""
        self.session = session
        self.binding = binding
        #: Time (`time.monotonic`) before which no new session is opened.
        self.not_before = 0.0
        self._wait_s = wait_s
        self._direct = DirectReads(allowed=direct)
        self._object_nbytes = 0  # mean size of the objects last requested
        self._lock = threading.Lock()
        self._next = 0
        self._open: set[int] = set()
        self._epoch = 0
        self._read_ids = np.zeros(len(session.table.offset), np.bool_)  # read in this epoch

    def read(self, indices: Sequence[int], fetch: Callable[[Dataset[Sample]], T]) -> T:
        """Call `fetch(dataset)`, which reads these samples, through the arena if that is faster."""
        step, ids, wait_s = self._request(indices)
        try:
            reader = _LinkReader(self, ids, wait_s, fetch)
            return cast(T, reader.read_step(self.binding, self.session, step, ids, indices))
        finally:
            self._end(step)

    def _request(self, indices: Sequence[int]) -> tuple[int, NDArray[np.int32], float]:
        """Request these samples' objects.

        Returns:
            The step in which the daemon makes them ready, -1 if a direct read takes no longer than
                a request; their (k,) ids; and how many seconds to wait for the step.
        """
        none = -1, np.empty(0, np.int32), 0.0
        wait_s = self._direct.wait_s(1, self._object_nbytes, self.session.object_ns)
        if not wait_s:
            return none
        try:
            ids = self.binding.objects(np.asarray(indices, np.int64))[0]
        except Exception:  # noqa: BLE001  the read itself then raises the error
            return none
        with self._lock:
            self._begin_epoch_on_repeat(ids)
            self._object_nbytes = self.session.nbytes(ids) // max(len(ids), 1)
            step, ends = self._next, np.array([len(ids)])
            if not self.session.extend(self._epoch, step, ids, ends, unplanned=True):
                return none
            self._next += 1
            self._open.add(step)
        return step, ids, wait_s * max(len(ids), 1)

    def _begin_epoch_on_repeat(self, ids: NDArray[np.int32]) -> None:
        """Begin an epoch when an object is read again: the loader's own epochs are unknown."""
        if self._read_ids[ids].any():
            self._epoch += 1
            self._read_ids[:] = False
        self._read_ids[ids] = True

    def wait(self, step: int, wait_s: float) -> bool:
        """Wait until the step's objects are pinned in the arena; False to read them directly."""
        start = time.monotonic_ns()
        ready = self.session.wait(step, min(wait_s, self._wait_s))
        # A wait in a worker of torch's counts as busy: the trainer may not wait for it.
        kind = "stall" if get_worker_info() is None else "busy"
        cause = "source" if ready or self.session.alive or kind == "busy" else "daemon"
        self._count(**{f"{kind}_{cause}_ns": time.monotonic_ns() - start})
        if not ready and wait_s < self._wait_s:
            self._direct.waited_in_vain()
        elif not ready and self.session.ended:  # a new session might be waited for as long
            self.not_before = time.monotonic() + _RETRY_S
        elif not ready and self.session.alive:
            _log.warning("a batch was not ready in %g s; it is read directly", self._wait_s)
        return ready

    def counted(self, samples: int, ids: NDArray[np.int32], lease: Lease) -> None:
        """Learn from a batch of these (k,) objects that was read; count it for `creel stats`."""
        if not lease.serves:
            self._direct.saw(lease.direct_reads, lease.direct_ns, lease.use)
        self._count(
            batches=1,
            samples=samples,
            nbytes=self.session.nbytes(ids) if lease.serves else lease.direct_nbytes,
            direct_reads=lease.direct_reads,
            direct_nbytes=lease.direct_nbytes,
        )

    def _count(self, **counters: int) -> None:
        """Add to this rank's counters in `creel stats`."""
        # Another thread may be closing the session of a lost daemon, whose words are not read any
        # more.
        with self._lock, contextlib.suppress(ValueError):
            if self.session.client.alive:
                for name, value in counters.items():
                    self.session.words.add(name, value)

    def _end(self, step: int) -> None:
        """Mark a step as read. The daemon may unpin all steps below the first open one."""
        if step < 0:
            return
        with self._lock:
            self._open.discard(step)
            self.session.done(min(self._open, default=self._next))


class _LinkReader(StepReader):
    """Reads one batch of a wrapped dataset."""

    def __init__(
        self,
        link: DaemonLink,
        ids: NDArray[np.int32],
        wait_s: float,
        fetch: Callable[[Dataset[Sample]], object],
    ) -> None:
        self._link, self._ids, self._wait_s, self._fetch = link, ids, wait_s, fetch

    def wait_for(self, session: Session, step: int, ids: object) -> bool:  # noqa: ARG002
        return self._link.wait(step, self._wait_s)

    def fetch(self, index: Sequence[int], lease: Lease) -> object:
        try:
            with lease:
                return self._fetch(self._link.binding.dataset)
        finally:
            self._link.counted(len(index), self._ids, lease)


class WrappedReads:
    """A dataset and this process's `DaemonLink`, made at the first read."""

    def __init__(
        self,
        dataset: Dataset[Sample],
        shared: Shared | None = None,
        wrapping: Wrapping = AS_IT_IS,
        *,
        joint: bool = False,
        config: tuple[Config, dict[str, str]] | None = None,
    ) -> None:
        """`shared`: where the process that spawned this one records the dataset.

        `wrapping`: what `creel.wrap` was asked for. `joint`: whether other ranks share the journal.
        `config`: settings and their origins; None: those of the process, at the first read.
        """
        self.dataset = dataset
        self.wrapping = wrapping
        self.config = config
        self._shared = shared
        self._joint = joint
        self._forget_binding()
        self.forget()
        forget_in_child(self)
        self.number = next(_numbers)
        _alive.add(self)

    def _forget_binding(self) -> None:
        self._bound = False
        self._binding: Binding | None = None
        self._recorder: AccessRecorder | None = None  # while the objects are unknown
        self._memory: JointMemory | None = None  # shared with other ranks while recording
        self._trace: AccessTrace | None = None
        self._kept: KeptTrace | None = None  # of an earlier job, and for later ones

    def forget(self) -> None:
        """Create the state that belongs to one process."""
        self._lock = threading.RLock()
        self._link: DaemonLink | None = None
        self._not_before = 0.0
        self._bypass: Bypass | None = None  # made at the first recorded read

    def of(self, dataset: Dataset[Sample]) -> WrappedReads:
        """Return the same for a copy of the dataset, which begins a record of its own."""
        return WrappedReads(dataset, wrapping=self.wrapping)

    def __reduce__(self) -> tuple[object, ...]:
        """Let a spawned worker record for its trainer; other copies begin a record of their own."""
        made = partial(WrappedReads, wrapping=self.wrapping)
        if multiprocessing.context.get_spawning_popen() is None:
            return made, (self.dataset,)
        self.prepare()
        recorder = self._recorder
        joint = recorder is not None and recorder.joint
        made = partial(made, joint=joint, config=self.config)
        return made, (self.dataset, None if recorder is None else recorder.shared)

    def read(self, indices: Sequence[int], fetch: Callable[[Dataset[Sample]], T]) -> T:
        """Call `fetch(dataset)`, which reads these samples, through the arena if possible."""
        # An outer wrapped dataset records the reads of an inner one.
        if this_thread.observed is not None or switched_off():
            return fetch(self.dataset)
        bypass = self._bypass
        if bypass is not None and bypass.active and self._binding is None and passes_on():
            return self._read_past(bypass, indices, fetch)
        return self._read(indices, lambda dataset: _intercepted(fetch, dataset))

    def _read_past(
        self, bypass: Bypass, indices: Sequence[int], fetch: Callable[[Dataset[Sample]], T]
    ) -> T:
        """Call `fetch(dataset)` as without creel; measure now and then whether it has to wait."""
        if not bypass.measures(len(indices)):
            return fetch(self.dataset)
        began = thread_use()
        sample = fetch(self.dataset)
        bypass.saw(len(indices), thread_use() - began)
        return sample

    def _read(self, indices: Sequence[int], fetch: Callable[[Dataset[Sample]], T]) -> T:
        if this_thread.lease is not None:  # of creel's loader or an outer one, which decides
            return self._fetch_recorded(indices, fetch)
        link = self._usable_link()
        if link is not None and not _still(link.binding, indices):
            self._unbind(link)
            link = self._usable_link()
        if link is None:
            return self._fetch_recorded(indices, fetch)
        return link.read(indices, lambda _: self._fetch_recorded(indices, fetch))

    def _fetch_recorded(self, indices: Sequence[int], fetch: Callable[[Dataset[Sample]], T]) -> T:
        """Call `fetch(dataset)`, recording its reads while there is a recorder."""
        recorder = self._recorder
        if recorder is None:
            return fetch(self.dataset)
        if self._bypass is None:
            self._bypass = Bypass(allowed=self._settings().loader.direct == "auto")
        began = thread_use()
        try:
            return fetch(cast("Dataset[Sample]", recorder))
        finally:
            self._bypass.saw(len(indices), thread_use() - began)
            if self._bypass.active:
                recorder.drop()
                if self._binding is not None:  # what an earlier job recorded still holds
                    with self._lock:
                        self._leave_recorder()
            elif not self._bypass.undecided:
                recorder.write()

    def trace(self) -> AccessTrace | None:
        """Return the trace of the dataset once it is complete (see `access_recorder`), else None.

        The first call starts recording, unless `bind` finds the dataset's objects. While recording,
        the trace is that of an earlier job, if there is one. If files were rewritten since,
        recording starts anew.
        """
        with self._lock:
            if self._bound or not bindable(self.dataset):
                self._bind()
            if self._trace is not None and self._recorder is None and self._trace.outdated():
                self._forget_binding()  # else its files would only be read from the source
                self._bind()
            return self._trace

    def recorded(self) -> bool:
        """Whether this process, or another that shares the journal, has recorded reads."""
        recorder = self._recorder
        return recorder is not None and not recorder.empty

    def _bind(self) -> Binding | None:
        """Return the declared or recorded objects; starts recording if there are neither."""
        if not self._bound and not switched_off() and not self._settings().loader.disable:
            self._binding = bind(self.dataset)
            self._bound = True
            if self._binding is None:
                self._kept = KeptTrace(self.dataset, self._settings(), self.wrapping)
                self._recorder = self._new_recorder()
                if self._recorder is not None:
                    self._use(self._kept.load())
        if self._recorder is not None:
            trace = self._recorder.trace()
            if trace is not None:
                self._use(trace)
                if self._kept is not None and self._binding is not None and not get_worker_info():
                    self._kept.keep(self._recorder, self._binding.manifest.key)
                self._leave_recorder()  # frees the memory of its journal
            elif self._recorder.void:
                _log.info("the ranks' datasets differ: each rank records what its own samples read")
                self._leave_recorder()
                self._joint = False
                self._recorder = recorder_on(None, self.dataset, self._settings(), self.wrapping)
        return self._binding

    def _use(self, trace: AccessTrace | None) -> None:
        """Bind the dataset by a trace, unless it is bound by an equal one."""
        if trace is not None and self._settings().loader.recheck == "never":
            trace.ignore_versions()
        if trace is not None and (self._trace is None or not trace.same(self._trace)):
            self._trace, self._binding = trace, bound(self.dataset, trace)
            if self._link is not None:
                self._link.session.close()
                self._link = None

    def _leave_recorder(self) -> None:
        self._recorder = None
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def _new_recorder(self) -> AccessRecorder | None:
        """Make a recorder on the memory of the parent process, of the node's ranks, or its own.

        None if the reads of single samples cannot be told apart.
        """
        if not recordable(self.dataset):
            return None
        shared, self._shared = self._shared, None
        if shared is None and get_worker_info() is None:
            self._memory = memory_of_ranks(self.dataset, self._settings())
            if self._memory is not None:
                shared, self._joint = self._memory.shared, True
        return recorder_on(shared, self.dataset, self._settings(), self.wrapping, joint=self._joint)

    def prepare(self) -> None:
        """Bind before workers are made, so that they need not; does not contact a daemon."""
        link = self._link
        if link is not None and not link.binding.still():
            self._unbind(link)
        with self._lock:
            binding = self._bind()
            if binding is not None:
                _ = binding.manifest.key  # caches the key in the manifest

    def _unbind(self, link: DaemonLink) -> None:
        """Drop the binding of a dataset that the user has changed, and its link."""
        with self._lock:
            if self._link is link:
                link.session.close()
                self._link = None
                self._forget_binding()

    def _usable_link(self) -> DaemonLink | None:
        link = self._link
        if link is not None and link.session.alive and self._recorder is None:
            return link
        with self._lock:
            if link is not None:  # made with an earlier job's trace; a new one may replace it
                self._bind()
            link = self._link
            if link is not None and link.session.client.alive and not link.session.ended:
                # The daemon may be stopped for a while; or another thread has just made the link.
                return link if link.session.alive else None
            if link is not None:
                link.session.close()
                self._link, self._not_before = None, link.not_before
            binding = None if time.monotonic() < self._not_before else self._bind()
            if binding is None:
                return None
            page_cached = self._page_cached(binding)
            if not page_cached and self._starting():
                return None
            self._link = None if page_cached else self._connected(binding)
            if self._link is None:
                self._not_before = time.monotonic() + _RETRY_S
            return self._link

    def _page_cached(self, binding: Binding) -> bool:
        """Whether files lie in the page cache, and no other rank may depend on this one's reads."""
        auto = self._settings().loader.direct == "auto"
        return auto and rank_and_world()[1] == 1 and binding.in_page_cache()

    def _starting(self) -> bool:
        """Whether a daemon is starting, or must be started; direct reads do not wait for it."""
        config, worker = self._settings(), get_worker_info()
        options = config.loader
        if options.direct != "auto":
            return False
        if worker is None or worker.id == 0:
            return daemon_starting(config)
        return options.embed and startable(config.daemon.name)  # the first worker starts it

    def _connected(self, binding: Binding) -> DaemonLink | None:
        config, origins = self._configured()
        options = config.loader
        # An embedded daemon ends with its last client. torch's workers end with their epoch, so
        # they ask it to stay until the process ends that will make the next ones.
        trainer = multiprocessing.parent_process() if get_worker_info() is not None else None
        trainer_pid = trainer.pid if trainer is not None else None
        rank, world = rank_and_world()
        session = open_session(
            binding.manifest,
            config,
            origins,
            job_name(),
            rank,
            world,
            # Only a loader knows where an epoch begins.
            recheck="step" if options.recheck == "epoch" else options.recheck,
            trainer_pid=trainer_pid or 0,
        )
        if session is None:
            return None
        wait_s, direct = min(options.wait_s, _WAIT_S), options.direct == "auto"
        return DaemonLink(session, binding, wait_s, direct=direct)

    def _settings(self) -> Config:
        return self._configured()[0]

    def _configured(self) -> tuple[Config, dict[str, str]]:
        if self.config is None:
            self.config = Config.load()
        return self.config


def _intercepted(fetch: Callable[[Dataset[Sample]], T], dataset: Dataset[Sample]) -> T:
    with Intercepted():
        return fetch(dataset)


def _still(binding: Binding, indices: Sequence[int]) -> bool:
    try:
        return binding.still(np.asarray(indices, np.int64))
    except Exception:  # noqa: BLE001  the read itself then raises the error
        return True


_numbers = itertools.count()
_alive: weakref.WeakSet[WrappedReads] = weakref.WeakSet()


def _before_fork() -> None:
    """Prepare all datasets: torch's loader forks workers without notifying them."""
    try:
        for reads in sorted(_alive, key=lambda one: one.number):  # the same order in all ranks
            reads.prepare()
    except Exception:  # noqa: BLE001  the fork must go on; the first read raises the error
        _log.debug("cannot prepare for workers", exc_info=True)


at_fork(before=_before_fork)
