"""Keeping: where a dataset keeps its decoded samples, and what it says of those it cannot keep.

The store is opened in the training process, before workers are made: when a loader's iterator
begins, before a fork, or at the first sample. Workers inherit it, or get it by their pickle. A copy
of a dataset has the same store, as long as neither is changed. What code means is not guessed:
other datasets of this process, however equal, have other stores.
"""

from __future__ import annotations

import logging
import multiprocessing.context
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import uuid4

from torch.utils.data import get_worker_info

from creel.config import Config, switched_off
from creel.errors import ConfigError
from creel.loader.data.decoded.codec import UnkeptError, difference
from creel.loader.data.decoded.held_files import HeldFiles
from creel.loader.data.decoded.identity import key_of
from creel.loader.data.decoded.limit import Decoded
from creel.loader.data.decoded.rng_use import Draws
from creel.loader.data.decoded.stores.named_store import NamedFile, open_named
from creel.loader.data.decoded.stores.shared_store import name_in_group, open_store
from creel.loader.data.decoded.stores.store import DecodedStore, Stamp, Taken
from creel.loader.data.reading.inputs import Inputs, SampleInputs
from creel.loader.data.reading.this_thread import this_thread
from creel.loader.data.user_code.attributes import changed, generators, snapshot
from creel.system.forks import at_fork

if TYPE_CHECKING:
    from creel.settings import DiskSettings

K = TypeVar("K", bound="Keeping")
_log = logging.getLogger("creel.loader")

#: What to do about samples that differ from epoch to epoch.
_REMEDY = (
    "keep what is below the random part: give that as transform=, or put"
    " creel.datasets.Transformed(creel.kept(...), transform) around it"
)
#: Why nothing is kept, for the log.
DRAWS = f"it draws random numbers, so each epoch needs new ones; {_REMEDY}"
#: After so many samples in a row that drew, it was not another thread.
_DRAWS = 8
#: At most so many changed attributes are named.
_NAMES = 5
_OTHERS = (
    "another process that shares them makes other samples of the same files: give each its own"
    " name, shared_as="
)
_STALE = (
    "{!r} is dropped: sample {} is not what the dataset makes of it now. What it is made by has"
    " changed where creel does not look; another name keeps both"
)
#: Loaders of a process, in the version of remote files.
_LOADERS_BITS = 24


class Keeping:
    """The store of one dataset, once it is open; the base of those for single kinds of datasets."""

    def __init__(self, limit: str | int | Decoded, shared_as: str | None = None) -> None:
        """Make one that is not open.

        Args:
            limit: most bytes, as text or number; "auto": what others do not need. With a name:
                see `Decoded`.
            shared_as: under which name all processes of this user on this node share samples.

        Raises:
            ConfigError: one is neither, or there are two names.
        """
        if shared_as is not None and (type(shared_as) is not str or not shared_as):
            raise ConfigError(f"shared_as={shared_as!r}: give the samples a name, a text")
        self.limit = limit if isinstance(limit, Decoded) else Decoded(limit)
        if shared_as is not None and self.limit.name is not None:
            raise ConfigError("shared_as: samples with a name are shared under that one")
        self.shared_as = shared_as
        #: The disk tier of the loader that reads, for samples with a name.
        self.disk: DiskSettings | None = None
        #: When this was made (`time.time_ns`): before any epoch of a loader that reads by it.
        self.made_ns = time.time_ns()
        #: When files are checked for changes: a value of `loader.recheck`.
        self.recheck = "epoch"
        #: Number of loaders that have begun to read the dataset in this process.
        self.loaders = 0
        self.store: DecodedStore | None = None
        self._of: object = None  # what the store was opened for, see `identity`
        self._attributes: dict[str, str] = {}  # plain ones then
        self._said = False  # that they have changed
        self._copied: tuple[str, dict[str, str]] | None = None  # token of a store, attributes
        self._token = ""  # of the store, in `_stores`
        self._generators: list[Any] = []  # that the dataset holds, in the process
        self._sought_by = 0  # which has sought them
        self._held = HeldFiles()
        self._drew = 0  # samples in a row during which something drew
        self._owner: weakref.ref[Any] | None = None  # the dataset whose samples these are
        self._readers: weakref.WeakSet[Any] = weakref.WeakSet()  # loaders that have begun
        _alive.add(self)

    def __reduce__(self) -> tuple[object, ...]:
        """Give a process that is being spawned the same store; a copy of this process finds it."""
        if multiprocessing.context.get_spawning_popen() is not None:
            self.open()
            left_out = {"_owner", "_readers", "_generators", "_sought_by"}
            state = {k: v for k, v in vars(self).items() if k not in left_out}
        else:
            state = {"_copied": self._to_copy()}
        return _restored, (type(self), self.limit, self.shared_as, state)

    def _to_copy(self) -> tuple[str, dict[str, str]] | None:
        """Return how a copy finds the store, if the dataset is as it was when that was opened."""
        owner = None if self._owner is None else self._owner()
        try:
            if owner is not None and self.store is not None and self._fits(self.identity(owner)):
                now = snapshot(self.settings(owner))
                return (self._token, now) if not changed(self._attributes, now) else None
        except Exception:  # noqa: BLE001  user code may run here
            _log.debug("a copy keeps samples of its own", exc_info=True)
        return None

    # --- what a kind of dataset defines -----------------------------------------------------------

    def identity(self, owner: Any) -> tuple[object, ...]:
        """Return objects that are replaced whenever the dataset's samples become others."""
        raise NotImplementedError

    def samples(self, owner: Any) -> int:
        """Return how many samples there are to keep."""
        raise NotImplementedError

    def settings(self, owner: Any) -> object:
        """Return what makes the samples, whose plain attributes must not change."""
        raise NotImplementedError

    def about(self, owner: Any) -> str:
        """Describe the samples, to find those of the same dataset in other processes."""
        raise NotImplementedError

    def contents(self, owner: Any) -> str:
        """Return a text that is equal only for datasets with the same files, or entries.

        Raises:
            Exception: there is none.
        """
        raise NotImplementedError

    # --- opening ----------------------------------------------------------------------------------

    def of(self: K, owner: Any) -> K:
        """Return this, or another one for a copy of the dataset that this belongs to."""
        other = None if self._owner is None else self._owner()
        # A wrapped dataset and the one inside it have one state.
        if other is not None and other is not owner and vars(other) is not vars(owner):
            mine = type(self)(self.limit, self.shared_as)
            mine._copied = self._to_copy()  # noqa: SLF001  another object of this class
        else:
            mine = self
        if other is None or mine is not self:
            mine._belong_to(owner)
        return mine

    def _belong_to(self, owner: Any) -> None:
        """Belong to a dataset; take the store of the one that it is a copy of."""
        self._owner = weakref.ref(owner)
        copied, self._copied = self._copied, None
        store = None if copied is None else _stores.get(copied[0])
        if copied is None or store is None:
            return
        try:
            if snapshot(self.settings(owner)) == copied[1]:
                self._of, self._attributes = self.identity(owner), copied[1]
                self.store, self._token = store, copied[0]
        except Exception:  # noqa: BLE001  as above
            _log.debug("a copy keeps samples of its own", exc_info=True)

    def begin(self, reader: object, recheck: str, disk: DiskSettings) -> None:
        """Open the store for an epoch of a loader, `reader`, with its settings."""
        self.recheck, self.disk = recheck, disk
        if reader not in self._readers:
            self._readers.add(reader)
            self.loaders += 1
        elif self.store is not None:
            self.store.slowest.again()
        self.open()

    @property
    def complete(self) -> bool:
        """Whether all samples are kept."""
        return self.store is not None and self.store.complete

    def open(self) -> None:
        """Open the store if there is none, or the dataset has changed; not in a worker."""
        owner = None if self._owner is None else self._owner()
        if (
            owner is None
            or self.limit.nbytes == 0
            or switched_off()
            or get_worker_info() is not None
        ):
            return
        try:
            now, attributes = self.identity(owner), snapshot(self.settings(owner))
            self._held.begin(self.settings(owner))
            if self._fits(now):
                names = changed(self._attributes, attributes)
                if not names:
                    return
                self._say_changed(names)
            self._of, self._attributes, self.store = now, attributes, None
            self._sought_by = 0
            self.store = self._open_store(owner)
            self._token = uuid4().hex
            if self.store is not None:
                _stores[self._token] = self.store
        except Exception:  # noqa: BLE001  user code may run here; samples are then decoded as ever
            _log.debug("no decoded samples are kept", exc_info=True)

    def _open_store(self, owner: Any) -> DecodedStore | None:
        name, samples, limit = self.limit.name, self.samples(owner), self.limit.nbytes
        if name is not None:
            limit = None  # of memory, if there is no file
            disk = Config.load()[0].disk if self.disk is None else self.disk
            try:
                if not disk.path:
                    raise ConfigError("without disk.path there is no disk to keep them on")  # noqa: TRY301
                key = key_of(name, [str(samples), self.contents(owner)], self.settings(owner))
                about = {"name": name, "dataset": self._name(), "samples": samples}
                file = NamedFile(disk.path, key, disk.keep_free)
                named = open_named(file, about, samples, self.limit.nbytes)
                self.loaders += named.opener << _LOADERS_BITS  # remote files are those of this job
            except Exception as e:  # noqa: BLE001  user code may run here
                _log.warning("%r is kept in memory, for this job alone: %s", name, e)
            else:
                return named
        return open_store(self._name_of_store(owner), samples, limit)

    def _name_of_store(self, owner: Any) -> str | None:
        """Return the name under which other processes share the store; None: none does."""
        if self.shared_as is not None:
            return f"as {self.shared_as} {self.about(owner)}"
        return name_in_group(lambda: self.about(owner))

    def _say_changed(self, names: Sequence[str]) -> None:
        if not self._said:
            self._said = True
            _log.warning(
                "%s: what was kept is not used any more, and is not kept again in epochs before"
                " which this changes: %s",
                self._name(),
                ", ".join(names[:_NAMES]),
            )

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

    def draws(self, owner: Any) -> Draws:
        """Begin to see whether a sample draws, from shared generators or those of the dataset.

        Many make theirs when a worker reads its first sample: after that they are sought again.
        """
        if self._sought_by == os.getpid():
            return Draws(self._generators)
        self._sought_by = os.getpid()
        self._generators = generators(self.settings(owner))
        return Draws(self._generators, later=lambda: generators(self.settings(owner)))

    def drew(self, store: DecodedStore, draws: Draws) -> bool:
        """Whether something has drawn while a sample was made, which then must not be kept.

        Nothing of the dataset is kept any more, unless it may have been another thread: then only
        after some samples in a row.
        """
        if not draws.any():
            self._drew = 0
            return False
        self._drew += 1
        if self._drew >= _DRAWS or not _others_run():
            self.refuse(store)
        return True

    def inputs(self, store: DecodedStore, opened: SampleInputs) -> Inputs | None:
        """Return what a sample depends on; None if it must not be kept, which is said once."""
        if self.recheck == "never":
            return []
        if opened.doubt:
            self._say(store, f"{opened.doubt} (unless loader.recheck is 'never')")
            return None
        held = self._held.of(opened)
        if held is None:
            self._say(store, "it was read before, with an earlier sample")
            return None
        return opened.known(self.loaders, self.made_ns, held)

    def same_again(
        self,
        store: DecodedStore,
        number: int,
        sample: Any,
        opened: SampleInputs,
        again: Callable[[], Any],
    ) -> bool:
        """Whether a sample is the same when it is made again; a few are; says it if not.

        opened: the record of what making it has opened, which is still open itself.
        """
        try:
            doubtful = self.recheck != "never" and self._held.is_doubtful(opened)
            if not (store.to_make_twice() or doubtful):
                return True
            before = opened.versions
            with SampleInputs() as second:
                place = difference(sample, again())
            opened.doubt = opened.doubt or second.doubt
            self._held.compare(before, second)
        except OSError:  # the lock is taken
            return True
        except Exception as e:  # noqa: BLE001  of the person's code
            place = f": {e!r}"
        if place is not None:
            reason = f"sample {number}, made twice, is not the same{' at ' if place else ''}{place}"
            self.refuse(store, f"{reason}; {_REMEDY}")
        return place is None

    def checked(self, store: DecodedStore, given: Taken, sample: Callable[[], Any]) -> Any:
        """Return what was taken; of other processes' samples, some are made here and compared."""
        try:
            if not store.to_compare(given.by):
                return given.sample
        except OSError:  # the lock is taken
            return given.sample
        mine = sample()
        if difference(given.sample, mine) is not None:
            name = self.limit.name
            self.refuse(store, _OTHERS if name is None else _STALE.format(name, given.number))
        return mine

    def keep(
        self,
        store: DecodedStore,
        number: int,
        stamp: Stamp,
        sample: object,
        encoded_nbytes: int = 0,
        ns: int = 0,
    ) -> None:
        """`DecodedStore.put`; say it once if samples cannot be kept. Never raises."""
        try:
            store.put(number, stamp, sample, encoded_nbytes, ns)
        except UnkeptError as e:
            self._say(store, str(e))
        except Exception as e:  # noqa: BLE001  the sample is fine, even if it cannot be written down
            self._say(store, repr(e))

    def refuse(self, store: DecodedStore, why: str = DRAWS) -> None:
        """Keep no sample of this dataset."""
        if store.refuse():
            _log.warning("%s keeps no decoded samples: %s", self._name(), why)

    def _say(self, store: DecodedStore, why: str) -> None:
        if store.first_failure():
            _log.warning("%s: a decoded sample cannot be kept: %s", self._name(), why)

    def _name(self) -> str:
        owner = None if self._owner is None else self._owner()
        return "a dataset" if owner is None else type(owner).__name__


def _others_run() -> bool:
    """Whether threads of the person's run beside this one, which draw from the same generators."""
    mine = threading.current_thread()
    return any(
        thread is not mine and not thread.name.startswith("creel-")
        for thread in threading.enumerate()
    )


def _restored(
    kind: type[Keeping], limit: Decoded, shared_as: str | None, state: dict[str, Any]
) -> Keeping:
    keeping = kind(limit, shared_as)
    vars(keeping).update(state)
    return keeping


#: The stores of this process, by a token that copies of a dataset carry.
_stores: weakref.WeakValueDictionary[str, DecodedStore] = weakref.WeakValueDictionary()
_alive: weakref.WeakSet[Keeping] = weakref.WeakSet()


def _open_all() -> None:
    """Open all stores before a fork: torch's loader forks workers without notifying datasets."""
    for keeping in list(_alive):
        keeping.open()


at_fork(before=_open_all)
