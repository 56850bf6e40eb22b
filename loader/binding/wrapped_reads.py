"""WrappedReads: reading a dataset through the node's daemon in a loader that is not creel's.

The order is unknown, so nothing is fetched ahead: each batch is requested when it is read, as an
unplanned step. The daemon fetches what is absent (many objects at a time, once per node), pins the
step's objects while they are read, and keeps them for later epochs. Only pinned objects are copied,
as a copy of an object that moves meanwhile could be torn. Whatever fails here only leads to direct
reads; samples are the same.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import multiprocessing.context
import multiprocessing.reduction
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar, cast

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import get_worker_info

from creel.config import Config
from creel.errors import UnavailableError
from creel.forks import at_fork, forget_in_child
from creel.loader.client.connections import client_of, daemon_starting
from creel.loader.client.ranks import job_name, rank_and_world
from creel.loader.client.unmet_settings import warn_of_unmet
from creel.loader.reading.lease import hearing, leasing
from creel.policies.direct import DirectReads

if TYPE_CHECKING:
    from torch.utils.data import Dataset

    from creel.loader.binding.access_recorder import AccessRecorder
    from creel.loader.binding.access_trace import AccessTrace
    from creel.loader.binding.bind import Binding
    from creel.loader.client.client import Client
    from creel.loader.client.session import Session
    from creel.loader.datasets.base import Sample
    from creel.loader.reading.lease import Lease

T = TypeVar("T")


class Handle(Protocol):
    """A descriptor that is passed to a process being spawned."""

    def detach(self) -> int:
        """The descriptor in that process."""
        ...


#: A recorder's journal in a pickle: its token and, for a process being spawned, a handle.
Journal = tuple[str, Handle | None]
_log = logging.getLogger("creel.loader")

#: Longest wait for a step. Only the source can take this long (a dead or stopped daemon is noticed
#: within 3 s), and a direct read costs no more than the daemon's own read.
_WAIT_S = 10.0
#: Seconds until the daemon is tried again after a failure.
_RETRY_S = 30.0


class Pinned(NamedTuple):
    """(k,) objects that are pinned in the arena, and the stamp for copying them."""

    ids: NDArray[np.int32]
    stamp: int


class DaemonLink:
    """One process's session for a dataset; several threads may have steps open at once."""

    def __init__(
        self, client: Client, session: Session, binding: Binding, wait_s: float, *, direct: bool
    ) -> None:
        """`direct`: whether a fast source may be read without asking the daemon."""
        self.client = client
        self.session = session
        self.binding = binding
        self._wait_s = wait_s
        self._direct = DirectReads(allowed=direct)
        self._object_nbytes = 0  # average size of the objects last requested
        self._lock = threading.Lock()
        self._next = 0
        self._open: set[int] = set()
        self._epoch = 0
        self._read_ids = np.zeros(len(session.table.offset), np.bool_)  # read in this epoch

    def begin(self, indices: Sequence[int]) -> tuple[int, Pinned | None]:
        """Request the objects of these samples and wait until they are pinned in the arena.

        Returns:
            The step, for `end`, or -1; the objects that may be read from the arena until then, or
            None when all are to be read directly.
        """
        if self._direct.choose(1, self._object_nbytes, self.session.object_ns):
            return -1, None  # not worth the daemon's time either
        try:
            ids = self.binding.objects(np.asarray(indices, np.int64))[0]
        except Exception:  # noqa: BLE001  the read itself raises what is wrong with them
            return -1, None
        with self._lock:
            self._begin_epoch_on_repeat(ids)
            self._object_nbytes = self.session.nbytes(ids) // max(len(ids), 1)
            step = self._next
            if not self.session.extend(
                self._epoch, step, ids, np.array([len(ids)]), unplanned=True
            ):
                return -1, None
            self._next += 1
            self._open.add(step)
        try:
            if self.session.ready(step) or self._wait(step):
                stamp = self.session.hold(step)
                return step, Pinned(ids, stamp) if stamp >= 0 else None
        except BaseException:  # Ctrl-C: an open step would keep all later ones pinned
            self.end(step)
            raise
        if self.session.alive:
            _log.warning("a batch was not ready in %g s; it is read directly", self._wait_s)
        return step, None

    def _wait(self, step: int) -> bool:
        start = time.monotonic_ns()
        ready = self.session.wait(step, self._wait_s)
        # Whether the trainer waits for one of torch's workers is unknown.
        kind = "stall" if get_worker_info() is None else "busy"
        cause = "source" if ready or self.session.alive or kind == "busy" else "daemon"
        self._count(**{f"{kind}_{cause}_ns": time.monotonic_ns() - start})
        return ready

    def _count(self, **counters: int) -> None:
        # Another thread may be closing the session of a lost daemon; then these words are not read.
        with self._lock, contextlib.suppress(ValueError):
            if self.client.alive:
                for name, value in counters.items():
                    self.session.words.add(name, value)

    def counted(self, samples: int, lengths: NDArray[np.int64] | None, lease: Lease) -> None:
        """Count a batch for `creel stats`; `lengths`: (k,) bytes of its objects in the arena."""
        if lease.without_daemon:
            seen = lease.direct_reads, lease.direct_nbytes, lease.direct_ns
            self._direct.saw(*seen, lease.blocked)
        self._count(
            batches=1,
            samples=samples,
            nbytes=lease.direct_nbytes if lengths is None else int(lengths.clip(0).sum()),
            direct_reads=lease.direct_reads,
            direct_nbytes=lease.direct_nbytes,
        )

    def _begin_epoch_on_repeat(self, ids: NDArray[np.int32]) -> None:
        """Begin an epoch when an object is read again: the loader's own epochs are unknown."""
        if self._read_ids[ids].any():
            self._epoch += 1
            self._read_ids[:] = False
        self._read_ids[ids] = True

    def end(self, step: int) -> None:
        """Mark a step as read. The daemon may unpin all steps below the first open one."""
        if step < 0:
            return
        with self._lock:
            self._open.discard(step)
            self.session.done(min(self._open, default=self._next))


class WrappedReads:
    """A dataset and this process's `DaemonLink`, made at the first read."""

    def __init__(self, dataset: Dataset[Sample]) -> None:
        self._dataset = dataset
        self._config: tuple[Config, dict[str, str]] | None = None
        self._binding: Binding | None = None
        self._bound = False
        self._recorder: AccessRecorder | None = None  # while the objects are unknown
        self._trace: AccessTrace | None = None
        self._token = ""  # of the journal of the process that spawned this one
        self.forget()
        forget_in_child(self)
        _alive.add(self)

    def forget(self) -> None:
        """Create the state that belongs to one process."""
        self._lock = threading.RLock()
        self._link: DaemonLink | None = None
        self._not_before = 0.0

    def read(self, indices: Sequence[int], fetch: Callable[[Dataset[Sample]], T]) -> T:
        """Call `fetch(dataset)`, which reads these samples, through the arena if possible."""
        if hearing() is not None:  # inside another proxy, which records what is read here
            return fetch(self._dataset)
        if leasing():  # inside creel's own loader, which decides
            return self._fetch_recorded(fetch)
        link = self._usable_link()
        if link is not None and not _still(link.binding, indices):
            self._unbind(link)
            link = self._usable_link()
        if link is None:
            return self._fetch_recorded(fetch)
        step, pinned = link.begin(indices)
        binding, lengths = link.binding, None
        lease = binding.counting(without_daemon=pinned is None)
        try:
            if pinned is not None:
                lengths = link.session.table.length[pinned.ids]
                lease = binding.reading(link.session, pinned.ids, pinned.stamp)
            with lease:
                return fetch(binding.dataset)
        finally:
            link.counted(len(indices), lengths, lease)
            link.end(step)

    def trace(self) -> AccessTrace | None:
        """The trace of the dataset once it is complete (see `access_recorder`), else None.

        The first call starts recording, unless `bind` finds the dataset's objects.
        """
        from creel.loader.binding.bind import bindable  # it imports wrap, which imports this module

        with self._lock:
            if not self._bound and bindable(self._dataset):
                return None
            self._bind()
            return self._trace

    def _fetch_recorded(self, fetch: Callable[[Dataset[Sample]], T]) -> T:
        """Call `fetch(dataset)`, recording its reads while there is a recorder."""
        recorder = self._recorder
        if recorder is None:
            return fetch(self._dataset)
        try:
            return fetch(cast("Dataset[Sample]", recorder))
        finally:
            recorder.write()

    def journal(self) -> Journal | None:
        """What a pickle needs to record into our journal elsewhere; None without a recorder."""
        if self._recorder is None:
            return None
        handle = multiprocessing.reduction.DupFd(self._recorder.fd) if spawning() else None
        return self._recorder.token, handle

    def resume_journal(self, journal: Journal) -> None:
        """Record into the journal of the process that spawned this one.

        A copy within one process has no handle and records anew. A worker that is sent its dataset
        again has the descriptor already.
        """
        self._token, handle = journal
        if handle is not None:
            _journals[self._token] = handle.detach()

    def prepare(self) -> None:
        """Bind before workers are made, so that each need not; does not contact a daemon."""
        link = self._link
        if link is not None and not link.binding.current():
            self._unbind(link)
        with self._lock:
            binding = self._bind()
            if binding is not None:
                _ = binding.manifest.key  # cached in the manifest

    def _usable_link(self) -> DaemonLink | None:
        link = self._link
        if link is not None and link.session.alive:
            return link
        with self._lock:
            link = self._link
            if link is not None and link.client.alive:
                # The daemon may be stopped for a while; or another thread has just made the link.
                return link if link.session.alive else None
            self._link = None
            if time.monotonic() < self._not_before or self._bind() is None:
                return None
            if self._is_trainer() and daemon_starting(self._settings()):
                return None
            self._link = self._connected()
            if self._link is None:
                self._not_before = time.monotonic() + _RETRY_S
            return self._link

    def _unbind(self, link: DaemonLink) -> None:
        """Drop the binding of a dataset that the user has changed, and the link for it."""
        with self._lock:
            if self._link is link:
                link.session.close()
                self._link = None
                self._binding, self._bound, self._recorder, self._trace = None, False, None, None

    def _connected(self) -> DaemonLink | None:
        binding = self._bind()
        client = None if binding is None else self._client()
        if binding is None or client is None:
            return None
        try:
            session = self._session(client, binding)
        except UnavailableError as e:
            _log.warning("creel reads directly, without a cache: %s", e)
            return None
        settings = self._settings().loader
        wait_s, direct = min(settings.wait_s, _WAIT_S), settings.direct == "auto"
        return DaemonLink(client, session, binding, wait_s, direct=direct)

    def _session(self, client: Client, binding: Binding) -> Session:
        rank, world = rank_and_world()
        recheck = self._settings().loader.recheck
        if recheck == "epoch":
            recheck = "step"  # only a loader knows where an epoch begins
        who = job_name(), rank, world
        # torch starts workers each epoch; mostly the daemon has their dataset already.
        with contextlib.suppress(UnavailableError):
            return client.open(binding.manifest.key, *who, recheck=recheck)
        return client.open(client.register(binding.manifest), *who, recheck=recheck)

    def _bind(self) -> Binding | None:
        from creel.loader.binding.access_recorder import recorder_of  # these import wrap, too
        from creel.loader.binding.bind import bind, bound

        if not self._bound and not self._settings().loader.disable:
            self._binding = bind(self._dataset)
            self._bound = True
            if self._binding is None:
                self._recorder = recorder_of(self._dataset, _journals.get(self._token))
        if self._binding is None and self._recorder is not None:
            self._trace = self._recorder.trace()
            if self._trace is not None:
                self._binding = bound(self._dataset, self._trace)
                self._recorder = None  # frees the memory of its journal
        return self._binding

    def _is_trainer(self) -> bool:
        """Whether this is not a worker and may read directly while a daemon starts."""
        options = self._settings().loader
        return get_worker_info() is None and options.direct == "auto" and not options.disable

    def _client(self) -> Client | None:
        if self._settings().loader.disable:
            return None
        # An embedded daemon ends with its last client. torch's workers end with their epoch, so
        # they ask it to stay as long as the process that will make the next ones.
        trainer = multiprocessing.parent_process() if get_worker_info() is not None else None
        trainer_pid = trainer.pid if trainer is not None else None
        client = client_of(self._settings(), trainer_pid=trainer_pid or 0)
        if client is not None and trainer is None and self._config is not None:
            warn_of_unmet(client, *self._config)
        return client

    def _settings(self) -> Config:
        if self._config is None:
            self._config = Config.load()
        return self._config[0]


def _still(binding: Binding, indices: Sequence[int]) -> bool:
    try:
        return binding.still(np.asarray(indices, np.int64))
    except Exception:  # noqa: BLE001  the read itself raises what is wrong with them
        return True


_journals: dict[str, int] = {}  # descriptors by token, of the process that spawned this one
_alive: weakref.WeakSet[WrappedReads] = weakref.WeakSet()


def spawning() -> bool:
    """Whether the current pickle is for a process that multiprocessing is starting."""
    return multiprocessing.context.get_spawning_popen() is not None


def _before_fork() -> None:
    """Prepare all datasets: torch's loader forks workers without notifying them."""
    try:
        for reads in list(_alive):
            reads.prepare()
    except Exception:  # noqa: BLE001  a fork must go on; the first read raises the error
        _log.debug("cannot prepare for workers", exc_info=True)


at_fork(before=_before_fork)
