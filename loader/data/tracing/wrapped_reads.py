"""WrappedReads: how a wrapped dataset is read, and when its reads are recorded.

Inside creel's own loader, the loader's lease says what is read through the daemon. In another
loader, a `DaemonLink` does. While the dataset's objects are unknown, its reads are recorded; the
trace then binds it.
"""

from __future__ import annotations

import itertools
import logging
import multiprocessing.context
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, TypeVar, cast

import numpy as np
from torch.utils.data import get_worker_info

from creel.addresses import startable
from creel.config import Config, switched_off
from creel.errors import UnavailableError
from creel.loader.client.cluster.ranks import on_one_node, rank_and_world, speaks
from creel.loader.client.connections import RETRY_S, daemon_starting
from creel.loader.data.binding.bind import Binding, bind, bound
from creel.loader.data.binding.daemon_link import DaemonLink, daemon_not_worth_it, linked, starting
from creel.loader.data.binding.tree import bindable
from creel.loader.data.binding.wrapped import AS_IT_IS, Wrapping
from creel.loader.data.interception.intercept import Intercepted
from creel.loader.data.page_cache import remote
from creel.loader.data.reading.observer import passes_on
from creel.loader.data.reading.this_thread import this_thread, thread_use
from creel.loader.data.tracing.journal import (
    BETWEEN,
    EndOfTrace,
    JournalPlace,
    ListedFiles,
    TraceJournal,
)
from creel.loader.data.tracing.lists.file_lists import (
    LONGEST_LIST,
    FileList,
    Paths,
    listed,
    paths_in,
)
from creel.loader.data.tracing.lists.hypothesis import Hypothesis
from creel.loader.data.tracing.recorder import MAX_SAMPLES, AccessRecorder, recordable
from creel.loader.data.tracing.recording import RanksJournal, journal_of_ranks, recorder_on
from creel.loader.data.tracing.trace import AccessTrace
from creel.policies.direct import Bypass
from creel.system.forks import at_fork, reset_in_child

if TYPE_CHECKING:
    from torch.utils.data import Dataset

    from creel.loader.data.datasets.base import Sample

T = TypeVar("T")
_log = logging.getLogger("creel.loader")

#: Longest time that a rank waits, once, for what the others have recorded, and between two looks.
_MEET_S, _LOOK_S = 0.2, 0.005
#: Time between two questions whether a daemon answers: one takes as long as many short reads.
_ASK_S = 0.1


class WrappedReads:
    """A dataset and this process's `DaemonLink`, made at the first read."""

    def __init__(
        self,
        dataset: Dataset[Sample],
        place: JournalPlace | None = None,
        wrapping: Wrapping = AS_IT_IS,
        *,
        config: tuple[Config, dict[str, str]] | None = None,
        counted: bool = False,
    ) -> None:
        """`place`: where the process that spawned this one records the dataset.

        `wrapping`: what `creel.wrap` was asked for. `config`: settings and their origins; None:
        those of the process, at the first read. `counted`: whether a loader of creel's reads it,
        and counts its batches, also those that it leaves to a `DaemonLink`.
        """
        self.dataset = dataset
        self.wrapping = wrapping
        self.config, self.counted = config, counted
        #: Whether a loader of creel's reads it, and opens the session for what it is to read.
        self.led = False
        self._place = place
        self._clear_binding()
        self.reset_for_process()
        reset_in_child(self)
        self.number = next(_numbers)  # unique in this process
        _alive.add(self)

    def _clear_binding(self) -> None:
        self._bound = False  # whether `_binding` was looked for
        self._binding: Binding | None = None
        self._recorder: AccessRecorder | None = None  # while the objects are unknown
        #: Whether this rank shall record together with others, once a daemon answers; when it asks
        #: for one again, and until when it then waits for other ranks (`time.monotonic`).
        self._to_meet, self._meet_at, self._meet_by = False, 0.0, 0.0
        self._ranks: RanksJournal | None = None  # while recording together with other ranks
        self._workers_journal: TraceJournal | None = None  # of workers that began before
        self._trace: AccessTrace | None = None
        self._supposed: Hypothesis | None = None  # what samples read, while it is not recorded
        self._listed: ListedFiles | None = None  # in the journal, of which that is made

    def reset_for_process(self) -> None:
        """Create the state that belongs to one process."""
        self._lock = threading.RLock()
        self._link: DaemonLink | None = None
        self._not_before = 0.0  # when to look for a daemon again (monotonic)
        self._bypass: Bypass | None = None  # made at the first recorded read
        self._to_meet, self._workers_journal = False, None  # a worker leaves that to its trainer

    def __reduce__(self) -> tuple[object, ...]:
        """Let a spawned worker record for its trainer; other copies begin a record of their own."""
        constructor = partial(WrappedReads, wrapping=self.wrapping)
        if multiprocessing.context.get_spawning_popen() is None:
            return constructor, (self.dataset,)
        self.prepare()
        recorder = self._recorder
        place = None if recorder is None else recorder.place
        constructor = partial(constructor, config=self.config, counted=self.counted)
        return constructor, (self.dataset, place), {"led": self.led}

    def __setstate__(self, state: dict[str, bool]) -> None:
        self.led = state["led"]

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
        if link is not None and not _is_current(link.binding, indices):
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
        if self._supposed is not None:  # to be proved, however quick the daemon makes its reads
            try:
                return fetch(cast("Dataset[Sample]", recorder))
            finally:
                recorder.write()
        if self._bypass is None:
            self._bypass = Bypass(allowed=self._settings().loader.direct == "auto")
        began = thread_use()
        try:
            return fetch(cast("Dataset[Sample]", recorder))
        finally:
            self._bypass.saw(len(indices), thread_use() - began)
            if self._bypass.active:
                recorder.drop()
            elif not self._bypass.undecided:
                recorder.write(waits=self._bypass.waits)

    def trace(self) -> AccessTrace | None:
        """Return the trace of the dataset once it is complete (see `recorder`), else None.

        The first call starts recording, unless `bind` finds the dataset's objects. While recording,
        the trace is that of a hypothesis, if there is one.
        """
        with self._lock:
            if self._bound or not bindable(self.dataset):
                self._meet_at = 0.0  # an epoch begins: the other ranks ask now, too
                self._bind()
            return self._trace

    def supposed(self) -> object | None:
        """Return the hypothesis about what samples read; None if there is none by now."""
        with self._lock:
            if self._recorder is not None:
                self._bind()
            return self._supposed

    def holds_paths(self) -> bool:
        """Whether the dataset holds a list of its files that counts before any sample is read."""
        if switched_off() or self._settings().loader.disable or not recordable(self.dataset):
            return False
        return self._paths() is not None

    def recorded(self) -> bool:
        """Whether reads are being recorded, and any process has recorded some."""
        recorder = self._recorder
        return recorder is not None and not recorder.place.empty

    def recording(self) -> bool:
        """Whether it is not known yet what samples read."""
        recorder = self._recorder
        return recorder is not None and not recorder.over

    def _bind(self) -> Binding | None:
        """Return the declared or recorded objects; starts recording if there are neither."""
        if not self._bound and not switched_off() and not self._settings().loader.disable:
            self._binding = bind(self.dataset)
            self._bound = True
            if self._binding is None:
                self._recorder = self._new_recorder()
                paths = None if self._recorder is None else self._paths()
                if paths is not None:
                    self._suppose(listed(paths, len(self.dataset)))  # type: ignore[arg-type]  # recordable
        if self._recorder is not None:
            if self._to_meet:
                self._record_on(self._meet_ranks(self._recorder))
            trace = self._complete_trace(self._recorder)
            if trace is not None:
                self._use(trace)
                if self._supposed is not None:
                    self._supposed.settled = True
                self._leave_recorder()  # frees the memory of its journal
            elif self._recorder.void:
                _log.info("the ranks' datasets differ: each rank records what its own samples read")
                self._leave_recorder()
                self._record_on(recorder_on(None, self.dataset, self.wrapping))
            else:
                self._follow(self._recorder)
        return self._binding

    def _paths(self) -> Paths | None:
        """Return the dataset's lists of whole paths, unless its files may be quick to read.

        What lies on this machine may be in the page cache: only reading shows whether it is slow.
        """
        paths = paths_in(self.dataset, len(self.dataset))  # type: ignore[arg-type]  # recordable
        if paths is None or self._settings().loader.direct != "auto":
            return paths
        return paths if remote(os.path.realpath(paths.first)) else None

    def _follow(self, recorder: AccessRecorder) -> None:
        """Replace or drop the hypothesis, by what was recorded of late."""
        file_list = recorder.listed_files()
        if file_list is not None and file_list is not self._listed:
            self._listed = file_list
            if on_one_node(
                rank_and_world()[1], os.environ
            ):  # else others would begin with it later
                self._suppose(FileList(file_list.addresses.split(BETWEEN), file_list.files))
        elif self._supposed is not None and self._supposed.refuted:
            _log.info("samples read other files than their dataset lists: creel records them")
            self._suppose(None)
        elif self._supposed is not None and recorder.over:  # there is no trace
            self._supposed.settled = True

    def _suppose(self, files: FileList | None) -> None:
        """Bind the dataset by a list of files that its samples may read; None: by none."""
        assert self._recorder is not None  # noqa: S101  recording proves it
        self._supposed = self._trace = self._binding = None
        with suppress(ValueError):  # of another length
            if files is not None:
                options = self.wrapping.storage_options
                self._supposed = Hypothesis(files, len(self.dataset), options)  # type: ignore[arg-type]  # recordable
        self._recorder.suppose(self._supposed)
        if self._supposed is not None and not self._supposed.refuted:
            self._use(self._supposed.trace)
        elif self._link is not None:
            self._link.session.close()
            self._link = None

    def _use(self, trace: AccessTrace) -> None:
        """Bind the dataset by a trace, unless it is bound by an equal one."""
        if self._settings().loader.recheck == "never":
            trace.unchecked()
        if self._trace is None or not trace.same(self._trace):
            self._trace, self._binding = trace, bound(self.dataset, trace)
            if self._link is not None:
                self._link.session.close()
                self._link = None

    def _meet_ranks(self, recorder: AccessRecorder) -> AccessRecorder:
        """Return a recorder on the journal of this node's ranks, once a daemon answers.

        No reader waits for a daemon that is starting: until then this rank records alone, and none
        is started before reads were recorded.
        """
        config, now = self._settings(), time.monotonic()
        if now < self._meet_at:
            return recorder
        if _none_answers(recorder, config):
            self._meet_at = now + _ASK_S
            return recorder
        self._to_meet = False
        self._ranks = journal_of_ranks(self.dataset, config, self.wrapping)
        place = None if self._ranks is None else self._ranks.place
        joint = recorder_on(place, self.dataset, self.wrapping)
        if joint is None:  # nobody else would end the recording
            TraceJournal(recorder.place).append(EndOfTrace())
            return recorder
        self._workers_journal = TraceJournal(recorder.place)
        self._meet_by = time.monotonic() + _MEET_S
        return joint

    def _complete_trace(self, recorder: AccessRecorder) -> AccessTrace | None:
        """Return the trace once it is complete; waits shortly for ranks that meet at this time."""
        news = self._workers_journal is not None and recorder.take_over(self._workers_journal)
        trace, joint = recorder.trace(), recorder.place.joint
        while news and joint and not recorder.over and time.monotonic() < self._meet_by:
            time.sleep(_LOOK_S)
            trace = recorder.trace()
        return trace

    def _record_on(self, recorder: AccessRecorder | None) -> None:
        """Record by another recorder, which goes on to prove the hypothesis; None: by none."""
        if recorder is not self._recorder and recorder is not None:
            recorder.suppose(self._supposed)
        self._recorder = recorder

    def _leave_recorder(self) -> None:
        if self._workers_journal is not None and self._recorder is not None:
            self._recorder.give(self._workers_journal)
        self._recorder = self._workers_journal = self._ranks = None

    def _new_recorder(self) -> AccessRecorder | None:
        """Make a recorder on the journal of the parent process, or its own.

        None if the reads of single samples cannot be told apart.
        """
        if get_worker_info() is None and speaks():
            _tell_of_size(self.dataset)
        if not recordable(self.dataset):
            return None
        place, self._place = self._place, None
        several = rank_and_world()[1] > 1
        self._to_meet = several and place is None and get_worker_info() is None
        # Else the trainer does, which meets the other ranks.
        seals = not several or (place is not None and place.joint)
        return recorder_on(place, self.dataset, self.wrapping, seals=seals)

    def prepare(self) -> None:
        """Bind before workers are made, so that they need not.

        Contacts the daemon only if ranks of a job record together, and it answers.
        """
        link = self._link
        if link is not None and not link.binding.is_current():
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
                self._clear_binding()

    def _may_link(self) -> bool:
        """Whether a link may request files: not all that are supposed to be read may be."""
        if self._supposed is not None:
            with self._lock:
                self._bind()
        return self._supposed is None or self._supposed.links(led=self.led)

    def _usable_link(self) -> DaemonLink | None:
        if not self._may_link():
            return None
        link = self._link
        if link is not None and link.session.alive and self._recorder is None:
            return link
        with self._lock:
            if link is not None:  # made by a hypothesis, which recording may replace
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
            config, origins = self._configured()
            if not daemon_not_worth_it(binding, config):
                if starting(config):
                    return None
                self._link = linked(binding, config, origins, counted=self.counted)
            if self._link is None:
                self._not_before = time.monotonic() + RETRY_S
            return self._link

    def _settings(self) -> Config:
        return self._configured()[0]

    def _configured(self) -> tuple[Config, dict[str, str]]:
        if self.config is None:
            self.config = Config.load()
        return self.config


def _intercepted(fetch: Callable[[Dataset[Sample]], T], dataset: Dataset[Sample]) -> T:
    with Intercepted():
        return fetch(dataset)


def _tell_of_size(dataset: Dataset[Sample]) -> None:
    """Say in one line what is not done for datasets of very many samples."""
    size = 0
    with suppress(Exception):  # a user's __len__ may raise anything
        size = len(dataset)  # type: ignore[arg-type]  # as above
    if size > MAX_SAMPLES:
        _log.warning("%d samples are too many for creel.wrap: nothing is cached", size)
    elif size > LONGEST_LIST:
        _log.info("%d samples are too many to read ahead in the first epoch", size)


def _none_answers(recorder: AccessRecorder, config: Config) -> bool:
    """Whether to record on without a daemon, which starts meanwhile if there is any use of it."""
    with suppress(UnavailableError):  # then there will be none
        return startable(config.daemon.name) and (recorder.place.empty or daemon_starting(config))
    return False


def _is_current(binding: Binding, indices: Sequence[int]) -> bool:
    try:
        return binding.is_current(np.asarray(indices, np.int64))
    except Exception:  # noqa: BLE001  the read itself then raises the error
        return True


_numbers = itertools.count()
_alive: weakref.WeakSet[WrappedReads] = weakref.WeakSet()


def _before_fork() -> None:
    """Prepare all datasets: torch's loader forks workers without notifying them."""
    try:
        for reads in sorted(
            _alive, key=lambda wrapped: wrapped.number
        ):  # the same order in all ranks
            reads.prepare()
    except Exception:  # noqa: BLE001  the fork must go on; the first read raises the error
        _log.debug("cannot prepare for workers", exc_info=True)


at_fork(before=_before_fork)
