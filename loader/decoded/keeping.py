"""Keeping: where a dataset keeps its decoded samples, and what it says of those it cannot keep.

The store is opened in the training process, before workers are made: when a loader's iterator
begins, before a fork, or at the first sample. Workers inherit it, or get it by their pickle. A copy
of a dataset finds the same store, if it decodes the same bytes alike.
"""

from __future__ import annotations

import logging
import multiprocessing.context
import time
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from torch.utils.data import get_worker_info

from creel.config import switched_off
from creel.errors import ConfigError
from creel.loader.decoded.codec import UnkeptError
from creel.loader.decoded.shared_store import open_store
from creel.loader.decoded.store import DecodedStore, Stamp, Taken
from creel.loader.reading.this_thread import this_thread
from creel.system.forks import at_fork
from creel.units import parse_size

K = TypeVar("K", bound="Keeping")
_log = logging.getLogger("creel.loader")

#: Why nothing is kept, for the log.
DRAWS = "it draws random numbers, so each epoch needs new ones"


class Keeping:
    """The store of one dataset, once it is open; the base of those for single kinds of datasets."""

    def __init__(self, limit: str | int) -> None:
        """`limit`: most bytes, as text or number; "auto": what others do not need.

        Raises:
            ConfigError: it is neither.
        """
        self.limit = limit
        self._limit = _nbytes(limit)
        #: When this was made (`time.time_ns`): before any epoch of a loader that reads by it.
        self.made_ns = time.time_ns()
        #: When files are checked for changes: a value of `loader.recheck`.
        self.recheck = "epoch"
        #: Number of loaders that have begun to read the dataset in this process.
        self.loaders = 0
        self.store: DecodedStore | None = None
        self._of: object = None  # what the store was opened for, see `identity`
        self._owner: weakref.ref[Any] | None = None
        self._readers: weakref.WeakSet[Any] = weakref.WeakSet()  # loaders that have begun
        _alive.add(self)

    def __reduce__(self) -> tuple[object, ...]:
        """Give a process that is being spawned the same store; a copy opens it again."""
        spawns = multiprocessing.context.get_spawning_popen() is not None
        if spawns:
            self.open()
        state = {k: v for k, v in vars(self).items() if k not in {"_owner", "_readers"}}
        return _restored, (type(self), self.limit, state if spawns else {})

    # --- what a kind of dataset defines -----------------------------------------------------------

    def identity(self, owner: Any) -> tuple[object, ...]:
        """Return objects that are replaced whenever the dataset's samples become others."""
        raise NotImplementedError

    def samples(self, owner: Any) -> int:
        """Return how many samples there are to keep."""
        raise NotImplementedError

    def what(self, owner: Any) -> str | None:
        """Describe exactly what is decoded, and how; None if no other process can be alike."""
        raise NotImplementedError

    # --- opening ----------------------------------------------------------------------------------

    def of(self: K, owner: Any) -> K:
        """Return this, or another one for a copy of the dataset that this belongs to."""
        other = None if self._owner is None else self._owner()
        mine = self if other is None or other is owner else type(self)(self.limit)
        mine._owner = weakref.ref(owner)  # noqa: SLF001  another object of this class
        return mine

    def begin(self, reader: object, recheck: str) -> None:
        """Open the store for an epoch of a loader, `reader`, with its `loader.recheck`."""
        self.recheck = recheck
        if reader not in self._readers:
            self._readers.add(reader)
            self.loaders += 1
        self.open()

    @property
    def complete(self) -> bool:
        """Whether all samples are kept."""
        return self.store is not None and self.store.complete

    def open(self) -> None:
        """Open the store if there is none, or the dataset has changed; not in a worker."""
        owner = None if self._owner is None else self._owner()
        if owner is None or self._limit == 0 or switched_off() or get_worker_info() is not None:
            return
        try:
            now = self.identity(owner)
            if self._fits(now):
                return
            self._of, self.store = now, None
            self.store = open_store(self.what(owner), self.samples(owner), self._limit)
        except Exception:  # noqa: BLE001  user code may run here; samples are then decoded as ever
            _log.debug("no decoded samples are kept", exc_info=True)

    def _fits(self, now: tuple[object, ...]) -> bool:
        """Whether the store was opened for the dataset as it is now."""
        was = self._of
        return (
            isinstance(was, tuple)
            and len(was) == len(now)
            and all(a is b for a, b in zip(was, now, strict=True))
        )

    def usable(self, owner: Any) -> DecodedStore | None:
        """Return the store for a sample of the dataset as it is now; None if there is none."""
        if self._of is None:
            self._owner = self._owner or weakref.ref(owner)
            self.open()
        store = self.store
        if store is None or not self._fits(self.identity(owner)):
            return None
        return store

    # --- samples ----------------------------------------------------------------------------------

    def take(
        self, store: DecodedStore, number: int, current: Callable[[Stamp], bool]
    ) -> Taken | None:
        """`DecodedStore.take`, counted."""
        given, lease = store.take(number, current), this_thread.lease
        if lease is not None and given is not None:
            lease.decoded_hits += 1
        elif lease is not None:
            lease.decoded_misses += 1
        return given

    def keep(
        self,
        store: DecodedStore,
        number: int,
        stamp: Stamp,
        sample: object,
        encoded_nbytes: int = 0,
    ) -> None:
        """`DecodedStore.put`; say it once if samples cannot be kept. Never raises."""
        try:
            store.put(number, stamp, sample, encoded_nbytes)
        except UnkeptError as e:
            self._say(store, str(e))
        except Exception as e:  # noqa: BLE001  the sample is fine, even if it cannot be written down
            self._say(store, repr(e))

    def refuse(self, store: DecodedStore) -> None:
        """Keep no sample of this dataset, because the decoder draws random numbers."""
        if store.refuse():
            _log.warning("%s keeps no decoded samples: %s", self._name(), DRAWS)

    def _say(self, store: DecodedStore, why: str) -> None:
        if store.first_failure():
            _log.warning("%s: a decoded sample cannot be kept: %s", self._name(), why)

    def _name(self) -> str:
        owner = None if self._owner is None else self._owner()
        return "a dataset" if owner is None else type(owner).__name__


def _nbytes(limit: str | int) -> int | None:
    if limit == "auto":
        return None
    if isinstance(limit, str):
        return parse_size(limit)
    if type(limit) is int and limit >= 0:
        return limit
    raise ConfigError(f'{limit!r} is not a size: write "64GiB", a number of bytes, or "auto"')


def _restored(kind: type[Keeping], limit: str | int, state: dict[str, Any]) -> Keeping:
    made = kind(limit)
    vars(made).update(state)
    return made


_alive: weakref.WeakSet[Keeping] = weakref.WeakSet()


def _open_all() -> None:
    """Open all stores before a fork: torch's loader forks workers without notifying datasets."""
    for one in list(_alive):
        one.open()


at_fork(before=_open_all)
