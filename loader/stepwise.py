"""Stepwise: a dataset read through the node's daemon by a loader that is not creel's.

Nobody tells us the order, so there is no look-ahead: each batch is asked for when it is read. The
daemon is told of one step, reads what is missing (many at a time, once per node), pins the step's
objects while they are read, and keeps them for later epochs. Nothing is read that is not pinned:
an object that moves during a copy could come out torn. Everything here may fail at any time: the
samples are the same, only read directly.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import multiprocessing.context
import multiprocessing.reduction
import os
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
from creel.forks import at_fork
from creel.loader.feed import client_of
from creel.loader.ranks import job_name, rank_and_world
from creel.loader.reading import hearing, leasing
from creel.loader.unmet import warn_of_unmet

if TYPE_CHECKING:
    from torch.utils.data import Dataset

    from creel.loader.base import Sample
    from creel.loader.client import Client
    from creel.loader.learn import Learner
    from creel.loader.learnt import Learnt
    from creel.loader.reading import Lease
    from creel.loader.session import Session
    from creel.loader.sources import Binding

T = TypeVar("T")


class Handle(Protocol):
    """A descriptor on its way into a process that is being spawned."""

    def detach(self) -> int:
        """The descriptor, there."""
        ...


#: A learner's journal in a pickle: its token and, for a process that is being spawned, a handle.
Journal = tuple[str, Handle | None]
_log = logging.getLogger("creel.loader")

#: A step waits this long at most. Only the source can be so slow (a dead or stopped daemon is known
#: within 3 s), and reading it a second time from here costs no more than it cost the daemon.
_WAIT_S = 10.0
#: After a refusal, seconds until the daemon is asked again.
_RETRY_S = 30.0


class Pinned(NamedTuple):
    """(k,) objects that lie in the arena, and the stamp under which they may be copied."""

    ids: NDArray[np.int32]
    stamp: int


class Link:
    """One process's session over a dataset; its steps may be open in several threads at once."""

    def __init__(self, client: Client, session: Session, binding: Binding, wait_s: float) -> None:
        self.client = client
        self.session = session
        self.binding = binding
        self._wait_s = wait_s
        self._lock = threading.Lock()
        self._next = 0
        self._open: set[int] = set()
        self._epoch = 0
        self._told = np.zeros(len(session.table.offset), np.bool_)  # in this epoch

    def begin(self, indices: Sequence[int]) -> tuple[int, Pinned | None]:
        """Have the objects of these samples brought into the arena and pinned.

        Returns:
            The step, for `end`, or -1; what may be read from the arena until then, or None when
            all is to be read directly.
        """
        try:
            ids = self.binding.objects(np.asarray(indices, np.int64))[0]
        except Exception:  # noqa: BLE001  the person learns from the read what is wrong with them
            return -1, None
        with self._lock:
            self._turn(ids)
            step = self._next
            if not self.session.extend(self._epoch, step, ids, np.array([len(ids)]), blind=True):
                return -1, None
            self._next += 1
            self._open.add(step)
        try:
            if self.session.ready(step) or self._wait(step):
                stamp = self.session.hold(step)
                return step, Pinned(ids, stamp) if stamp >= 0 else None
        except BaseException:  # Ctrl-C: an open step would pin all that come after it for good
            self.end(step)
            raise
        if self.session.alive:
            _log.warning("a batch was not ready in %g s; it is read directly", self._wait_s)
        return step, None

    def _wait(self, step: int) -> bool:
        start = time.monotonic_ns()
        ready = self.session.wait(step, self._wait_s)
        # In a worker of torch's nobody can tell who waits for it.
        kind = "stall" if get_worker_info() is None else "busy"
        cause = "source" if ready or self.session.alive or kind == "busy" else "daemon"
        self._count(**{f"{kind}_{cause}_ns": time.monotonic_ns() - start})
        return ready

    def _count(self, **counters: int) -> None:
        # Another thread may be hanging up on a lost daemon: then nobody reads these words.
        with self._lock, contextlib.suppress(ValueError):
            if self.client.alive:
                for name, value in counters.items():
                    self.session.board.add(name, value)

    def counted(self, samples: int, lengths: NDArray[np.int64] | None, lease: Lease) -> None:
        """Samples were read in one go: for `creel stats`; `lengths` of what was in the arena."""
        self._count(
            batches=1,
            samples=samples,
            nbytes=lease.direct_nbytes if lengths is None else int(lengths.clip(0).sum()),
            direct_reads=lease.direct_reads,
            direct_nbytes=lease.direct_nbytes,
        )

    def _turn(self, ids: NDArray[np.int32]) -> None:
        """A sample that comes again begins an epoch, as far as we can see."""
        if self._told[ids].any():
            self._epoch += 1
            self._told[:] = False
        self._told[ids] = True

    def end(self, step: int) -> None:
        """The step was read. The daemon takes back all steps below the first open one."""
        if step < 0:
            return
        with self._lock:
            self._open.discard(step)
            self.session.done(min(self._open, default=self._next))


class Stepwise:
    """A dataset and this process's link to the daemon, made at the first read."""

    def __init__(self, dataset: Dataset[Sample]) -> None:
        self._dataset = dataset
        self._config: tuple[Config, dict[str, str]] | None = None
        self._binding: Binding | None = None
        self._bound = False
        self._learner: Learner | None = None  # where nothing else is known
        self._learnt: Learnt | None = None
        self._token = ""  # of the journal of the process that spawned this one
        self._renew()
        _alive.add(self)

    def _renew(self) -> None:
        """What belongs to one process."""
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._link: Link | None = None
        self._not_before = 0.0

    def _renew_if_forked(self) -> None:
        if self._pid != os.getpid():
            self._renew()

    def read(self, indices: Sequence[int], fetch: Callable[[Dataset[Sample]], T]) -> T:
        """`fetch(dataset)`, which reads these samples, through the arena where that is possible."""
        if hearing() is not None:  # inside of another proxy, which minds what is read here
            return fetch(self._dataset)
        if leasing():  # inside of creel's own loader: as it says
            return self._listened(fetch)
        link = self._linked()
        if link is not None and not _still(link.binding, indices):
            self._unbind(link)
            link = self._linked()
        if link is None:
            return self._listened(fetch)
        step, pinned = link.begin(indices)
        binding, lengths = link.binding, None
        lease = binding.counting()
        try:
            if pinned is not None:
                lengths = link.session.table.length[pinned.ids]
                lease = binding.reading(link.session, pinned.ids, pinned.stamp)
            with lease:
                return fetch(binding.dataset)
        finally:
            link.counted(len(indices), lengths, lease)
            link.end(step)

    def learnt(self) -> Learnt | None:
        """What the dataset was heard to read, once that is known (see `creel.loader.learn`).

        Who asks wants it heard from here on; not one that says itself what it reads.
        """
        from creel.loader.sources import bindable  # knows of wrap, too

        self._renew_if_forked()
        with self._lock:
            if not self._bound and bindable(self._dataset):
                return None
            self._bind()
            return self._learnt

    def _listened(self, fetch: Callable[[Dataset[Sample]], T]) -> T:
        """`fetch(dataset)`, heard as long as it is not known what the dataset reads."""
        learner = self._learner
        if learner is None:
            return fetch(self._dataset)
        try:
            return fetch(cast("Dataset[Sample]", learner))
        finally:
            learner.write()

    def journal(self) -> Journal | None:
        """What a pickle of the dataset needs to listen for us elsewhere; None where nobody does."""
        if self._learner is None:
            return None
        handle = multiprocessing.reduction.DupFd(self._learner.fd) if spawning() else None
        return self._learner.token, handle

    def goes_on(self, journal: Journal) -> None:
        """Listen for the process that this one was spawned by; a copy in the same one learns anew.

        A worker may be sent its dataset again: then it has the handle already.
        """
        self._token, handle = journal
        if handle is not None:
            _journals[self._token] = handle.detach()

    def prepare(self) -> None:
        """Before workers are made: do once what each of them would. Nothing is started or asked."""
        self._renew_if_forked()
        link = self._link
        if link is not None and not link.binding.current():
            self._unbind(link)
        with self._lock:
            binding = self._bind()
            if binding is not None:
                _ = binding.manifest.key  # kept from now on

    def _linked(self) -> Link | None:
        self._renew_if_forked()
        link = self._link
        if link is not None and link.session.alive:
            return link
        with self._lock:
            link = self._link
            if link is not None and link.client.alive:
                # Stopped for a while, perhaps; or another thread was quicker.
                return link if link.session.alive else None
            self._link = None
            if time.monotonic() < self._not_before or self._bind() is None:
                return None
            self._link = self._connected()
            if self._link is None:
                self._not_before = time.monotonic() + _RETRY_S
            return self._link

    def _unbind(self, link: Link) -> None:
        """The person has changed the dataset: its samples are made of other objects now."""
        with self._lock:
            if self._link is link:
                link.session.close()
                self._link = None
                self._binding, self._bound, self._learner, self._learnt = None, False, None, None

    def _connected(self) -> Link | None:
        binding = self._bind()
        client = None if binding is None else self._client()
        if binding is None or client is None:
            return None
        try:
            session = self._session(client, binding)
        except UnavailableError as e:
            _log.warning("creel reads directly, without a cache: %s", e)
            return None
        return Link(client, session, binding, min(self._settings().loader.wait_s, _WAIT_S))

    def _session(self, client: Client, binding: Binding) -> Session:
        rank, world = rank_and_world()
        recheck = self._settings().loader.recheck
        if recheck == "epoch":
            recheck = "step"  # where an epoch begins is known to the loader alone
        who = job_name(), rank, world
        # Workers of torch's come anew each epoch, and mostly the daemon knows their dataset.
        with contextlib.suppress(UnavailableError):
            return client.open(binding.manifest.key, *who, recheck=recheck)
        return client.open(client.register(binding.manifest), *who, recheck=recheck)

    def _bind(self) -> Binding | None:
        from creel.loader.learn import learner_of  # these know of wrap, too
        from creel.loader.sources import bind, bound

        if not self._bound and not self._settings().loader.disable:
            self._binding = bind(self._dataset)
            self._bound = True
            if self._binding is None:
                self._learner = learner_of(self._dataset, _journals.get(self._token))
        if self._binding is None and self._learner is not None:
            self._learnt = self._learner.learnt()
            if self._learnt is not None:
                self._binding = bound(self._dataset, self._learnt)
                self._learner = None  # and the memory of its journal
        return self._binding

    def _client(self) -> Client | None:
        if self._settings().loader.disable:
            return None
        # A daemon goes with its last client: torch's workers, which end with their epoch, ask it to
        # stay for the process that makes the next ones.
        trainer = multiprocessing.parent_process() if get_worker_info() is not None else None
        patron = trainer.pid if trainer is not None else None
        client = client_of(self._settings(), patron=patron or 0)
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
    except Exception:  # noqa: BLE001  the person learns from the read what is wrong with them
        return True


_journals: dict[str, int] = {}  # descriptors by token, of the process that spawned this one
_alive: weakref.WeakSet[Stepwise] = weakref.WeakSet()


def spawning() -> bool:
    """Whether a pickle is being made for a process that multiprocessing is starting."""
    return multiprocessing.context.get_spawning_popen() is not None


def _before_fork() -> None:
    """torch's loader forks its workers without a word to the dataset."""
    try:
        for stepwise in list(_alive):
            stepwise.prepare()
    except Exception:  # noqa: BLE001  a fork must go on; the first read will raise it
        _log.debug("cannot prepare for workers", exc_info=True)


at_fork(before=_before_fork)
