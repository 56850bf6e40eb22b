"""DaemonLink: reads a dataset through the node's daemon in a loader that is not creel's.

The order is unknown, so nothing is fetched ahead: each batch is requested when it is read, as an
unplanned step. The daemon fetches absent objects (many at a time, once per node), pins the step's
objects while they are read, and keeps them for later epochs. Only pinned objects are copied, since
a copy of an object that moves meanwhile could be torn. Any failure only leads to direct reads, with
the same samples.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import get_worker_info

from creel.addresses import startable
from creel.config import Config
from creel.loader.client.cluster.ranks import job_name, rank_and_world
from creel.loader.client.connections import RETRY_S, daemon_starting, open_session
from creel.loader.data.binding.bind import Binding
from creel.loader.data.reading.lease import Lease
from creel.loader.data.rehearsed import numbers_of
from creel.policies.direct import DirectReads

if TYPE_CHECKING:
    from torch.utils.data import Dataset

    from creel.loader.client.session import Session
    from creel.loader.data.datasets.base import Sample

T = TypeVar("T")
_log = logging.getLogger("creel.loader")

#: Longest wait for a step. Only the source can take this long (a dead or stopped daemon is noticed
#: within 3 s), and a direct read costs no more than the daemon's own read.
_WAIT_S = 10.0


class DaemonLink:
    """One process's session for a dataset; several threads may have steps open at once."""

    def __init__(
        self, session: Session, binding: Binding, wait_s: float, *, direct: bool, counted: bool
    ) -> None:
        """Make one.

        Args:
            direct: whether a fast source may be read without asking the daemon.
            counted: whether a loader of creel's counts these batches, and the waits for them.
        """
        self.session = session
        self.binding = binding
        #: Time (`time.monotonic`) before which no new session is opened.
        self.not_before = 0.0
        self._wait_s = wait_s
        self._direct, self._counted = DirectReads(allowed=direct), counted
        self._object_nbytes = 0  # mean size of the objects last requested
        self._lock = threading.Lock()
        self._next = 0  # the next step
        self._open: set[int] = set()  # steps that are being read
        self._epoch = 0  # how often all samples were read
        self._read = np.zeros(max(numbers_of(binding.dataset), 1), np.bool_)  # in this epoch

    def read(self, indices: Sequence[int], fetch: Callable[[Dataset[Sample]], T]) -> T:
        """Call `fetch(dataset)`, which reads these samples, through the arena if that is faster."""
        step, ids, wait_s = self._request(indices)
        lease = Lease()
        try:
            stamp = self.session.hold(step) if step >= 0 else -1
            if stamp < 0 and step >= 0 and self.wait(step, wait_s):
                stamp = self.session.hold(step)
            if stamp >= 0:
                lease = self.binding.reading(self.session, step, ids, stamp)
            with lease:
                return fetch(self.binding.dataset)
        finally:
            self.counted(len(indices), ids, lease)
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
            self._begin_epoch_on_repeat(np.asarray(indices, np.int64) % len(self._read))
            self._object_nbytes = self.session.nbytes(ids) // max(len(ids), 1)
            step, ends = self._next, np.array([len(ids)])
            if not self.session.extend(self._epoch, step, ids, ends, unplanned=True):
                return none
            self._next += 1
            self._open.add(step)
        return step, ids, wait_s * max(len(ids), 1)

    def _begin_epoch_on_repeat(self, samples: NDArray[np.int64]) -> None:
        """Begin an epoch when a sample is read again: the loader's own epochs are unknown.

        An object says nothing, as many samples may read a block of a file.
        """
        if self._read[samples].any():
            self._epoch += 1
            self._read[:] = False
        self._read[samples] = True

    def wait(self, step: int, wait_s: float) -> bool:
        """Wait until the step's objects are pinned in the arena; False to read them directly."""
        start = time.monotonic_ns()
        ready = self.session.wait(step, min(wait_s, self._wait_s))
        # A wait in a worker of torch's counts as busy: the trainer may not wait for it.
        kind = "stall" if get_worker_info() is None else "busy"
        cause = "source" if ready or self.session.alive or kind == "busy" else "daemon"
        if not self._counted:
            self._count(**{f"{kind}_{cause}_ns": time.monotonic_ns() - start})
        if not ready and wait_s < self._wait_s:
            self._direct.waited_in_vain()
        elif not ready and self.session.ended:  # a new session might be waited for as long
            self.not_before = time.monotonic() + RETRY_S
        elif not ready and self.session.alive:
            _log.warning("a batch was not ready in %g s; it is read directly", self._wait_s)
        return ready

    def counted(self, samples: int, ids: NDArray[np.int32], lease: Lease) -> None:
        """Learn from a batch of these (k,) objects that was read; count it for `creel stats`."""
        if not lease.serves:
            self._direct.saw(lease.direct_reads, lease.direct_ns, lease.use)
        own = {} if self._counted else {"batches": 1, "samples": samples}
        self._count(
            **own,
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


def linked(
    binding: Binding, config: Config, origins: dict[str, str], *, counted: bool
) -> DaemonLink | None:
    """Open a session for a dataset, with these settings and their origins; None on failure.

    counted: see `DaemonLink`.
    """
    options = config.loader
    # An embedded daemon ends with its last client. torch's workers end with their epoch, so
    # they ask it to stay until the process ends that will make the next ones.
    trainer = multiprocessing.parent_process() if get_worker_info() is not None else None
    trainer_pid = trainer.pid if trainer is not None else None
    session = open_session(
        binding.manifest,
        config,
        origins,
        job_name(),
        *rank_and_world(),
        # Only a loader knows where an epoch begins.
        recheck="step" if options.recheck == "epoch" else options.recheck,
        trainer_pid=trainer_pid or 0,
    )
    if session is None:
        return None
    wait_s, direct = min(options.wait_s, _WAIT_S), options.direct == "auto"
    return DaemonLink(session, binding, wait_s, direct=direct, counted=counted)


def daemon_not_worth_it(binding: Binding, config: Config) -> bool:
    """Whether files lie in the page cache, and no other rank may depend on this one's reads."""
    auto = config.loader.direct == "auto"
    return auto and rank_and_world()[1] == 1 and binding.in_page_cache()


def starting(config: Config) -> bool:
    """Whether a daemon is starting, or must be started; direct reads do not wait for it."""
    worker, options = get_worker_info(), config.loader
    if options.direct != "auto":
        return False
    if worker is None or worker.id == 0:
        return daemon_starting(config)
    return options.embed and startable(config.daemon.name)  # the first worker starts it
