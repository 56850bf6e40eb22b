"""The node: books, core, arena and fetch threads put together. What desk and line call.

Runs on the loop thread alone; what comes from elsewhere (fetch threads, the registrar) is handed in
through `call_soon`. Every event goes through `feed`, which carries out what the core answers.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from numpy.typing import NDArray

from creel import limits
from creel.cache.arena import Arena
from creel.cache.board import Table
from creel.cache.manifest import Manifest
from creel.cache.patience import Patience
from creel.cache.source import Source
from creel.cache.space import Space
from creel.config import Config, memory_budget
from creel.daemon import commands, metrics
from creel.daemon import events as mind
from creel.daemon.core import Core
from creel.daemon.fetch import Fetcher
from creel.daemon.host import Answer
from creel.daemon.registry import Dataset, Registry, Session
from creel.errors import CreelError, UnavailableError
from creel.messages import (
    PROTOCOL,
    Ask,
    Extend,
    Open,
    Ready,
    Refused,
    Registered,
    Welcome,
)
from creel.policies.prefetch import Window
from creel.version import VERSION

T = TypeVar("T")

log = logging.getLogger("creel.node")

BEAT_S = 0.08  # clients give up on a heartbeat older than 2 s
#: Descriptors kept on files that hold many objects, per dataset (the default soft limit is 1024).
_KEPT_FILES = 128


class Node:
    """Implements `host.Host`.

    Args:
        config: all settings.
        call_soon: runs a function on the loop thread, soon; callable from any thread.
        send: (who, message) over the line.
        embedded: whether this daemon goes with its last client.
    """

    def __init__(
        self,
        config: Config,
        *,
        call_soon: Callable[[Callable[[], None]], None],
        send: Callable[[bytes, Any], None],
        embedded: bool,
    ) -> None:
        memory = limits.memory()
        self.config = config
        self.effective = config  # what of it counts: read again, most counts from the next start on
        self.embedded = embedded
        self.version = VERSION
        self.state = "serving"
        self.started = time.monotonic()
        self.bugs = 0
        self.stop: Callable[[bool], None] = lambda now: None  # noqa: ARG005  the loop puts its own
        self.clients: Callable[[], int] = lambda: 0
        self.pids: Callable[[], dict[str, int]] = dict
        self.line_address = ""
        self.arena = Arena.create(
            memory_budget(config.memory, total=memory.total, available=memory.available)
        )
        self.registry = Registry(
            max_datasets=config.daemon.max_datasets, max_sessions=config.daemon.max_sessions
        )
        self.ranks = metrics.Ranks()
        self.core = Core(Space(self.arena.nbytes), config=_window(config))
        self.fetcher = Fetcher(
            self.arena,
            lambda event: call_soon(lambda: self._fetched(event)),
            threads=config.fetch.threads,
            per_source=config.fetch.per_source,
        )
        self._beaten = self.started
        self._send = send
        self._call_soon = call_soon
        self._stop_prefault = threading.Event()
        self._prefault: threading.Thread | None = None
        self._registrar = _Registrar()

    # --- events and actions -------------------------------------------------------------------

    def feed(self, event: mind.Event) -> None:
        """Tell the core and do what it says.

        Nothing while draining: READY does not go back for those who hang up now, so all must lie
        where it lies. The core would go on with a table and a memory that are not as it thinks.

        Beats first: of plans for millions of objects, each event may take a second, and a turn of
        the loop has many.
        """
        if self.state == "draining":
            return
        now = time.monotonic()
        self.beat(now)
        try:
            actions = self.core.handle(event, now)
        except CreelError:  # IllegalEventError: our bug; readers go to the source meanwhile
            self.bugs += 1
            log.exception("the core refused %s", type(event).__name__)
            return
        lost: list[mind.Lost] = []
        for action in actions:
            self._do(action, lost)
        for loss in lost:
            self.feed(loss)

    def _do(self, action: mind.Action, lost: list[mind.Lost]) -> None:
        if isinstance(action, mind.SetReady):
            self._set_ready(action)
        elif isinstance(action, mind.Discard):
            self.fetcher.discard(action)
        elif isinstance(action, mind.Fetch):
            self.fetcher.submit(action)
        elif isinstance(action, mind.Move):
            self.fetcher.move(action, self._offset(action))
        else:
            k = self.fetcher.store(action, self._offset(action))
            if k < len(action.ids):
                lost.append(mind.Lost(action.dataset, action.ids[k:], action.offset[k:]))

    def _offset(self, action: mind.Move | mind.Store) -> NDArray[Any]:
        return self.registry.datasets[action.dataset].table.offset

    def _set_ready(self, action: mind.SetReady) -> None:
        session = self.registry.sessions.get(action.session)
        if session is None:
            return
        for who, call, step in session.set_ready(action.ready, action.failed):
            self._send(who, Ready(call, session.id, step))

    def _fetched(self, event: mind.Fetched) -> None:
        self.fetcher.finished(event)
        self.feed(event)
        # What the core did not have stored by now it never will: the fetch was no longer current.
        self.fetcher.discard(mind.Discard(event.fetch))

    def beat(self, now: float) -> None:
        """Write the heartbeat on all boards, where it is time to."""
        if now - self._beaten >= BEAT_S / 2:
            self._beaten = now
            self.registry.beat()

    def poll_boards(self) -> bool:
        """Tell the core how far the trainers are; whether anything moved."""
        moved = False
        for session, done, wanted in self.registry.progress():
            moved = True
            self.feed(mind.Progressed(session.id, done, wanted))
        return moved

    def tick(self) -> None:
        """Time passed."""
        self.fetcher.tick()
        self.feed(mind.Tick())

    # --- Host ---------------------------------------------------------------------------------

    def welcome(self, token: str) -> tuple[Welcome, int]:
        """The greeting and the arena's descriptor."""
        welcome = Welcome(PROTOCOL, token, self.line_address, self.arena.nbytes, os.getpid())
        return welcome, self.arena.fd

    def register(
        self, token: str, read: Callable[[], Manifest], reply: Callable[[Answer], None]
    ) -> None:
        """Read and check a manifest in the registrar's thread, enter it here."""

        def keyed() -> Manifest:
            manifest = read()
            _ = manifest.key  # kept from now on: a pass over all addresses, not for the loop
            return manifest

        def enter(dataset: Dataset) -> None:
            reply(self._enter(token, dataset))

        def look(manifest: Manifest) -> None:
            known = self.registry.datasets.get(manifest.key)
            if known is not None:
                enter(known)
            else:
                self._elsewhere(lambda: self._prepare(manifest), enter, reply)

        self._elsewhere(keyed, look, reply)

    def _elsewhere(
        self, work: Callable[[], T], then: Callable[[T], None], reply: Callable[[Answer], None]
    ) -> None:
        """`work` in the registrar's thread, `then` with its result here; or a refusal."""

        def attempt() -> None:
            try:
                done = work()
            except CreelError as e:
                self._call_soon(partial(reply, Answer(Refused(str(e)))))
            except Exception:
                log.exception("a manifest could not be read")
                self._call_soon(partial(reply, Answer(Refused("the manifest cannot be read"))))
            else:
                self._call_soon(partial(then, done))

        self._registrar.put(attempt)

    def _prepare(self, manifest: Manifest) -> Dataset:
        """All that costs time in proportion to the number of objects; in the registrar's thread."""
        fetch = self.config.fetch
        patience = Patience(fetch.attempts, fetch.deadline_s, fetch.backoff_s, fetch.backoff_max_s)
        source = Source(manifest, patience, files=_KEPT_FILES, relative=False)
        return Dataset.create(manifest, source)

    def _enter(self, token: str, dataset: Dataset) -> Answer:
        known = self.registry.datasets.get(dataset.key)
        if known is None:
            try:
                self._check_serving()
                self.forget_idle(room=1)
                self.registry.check_room()
            except UnavailableError as e:
                dataset.close()
                return Answer(Refused(str(e)))
            self.registry.add(dataset)
            self.fetcher.add(dataset.key, dataset.source)
            self.feed(mind.Registered(dataset.key, dataset.table.offset, dataset.table.length))
            self._prefault_when_it_will_be_full()
        elif known is not dataset:  # two clients registered the same thing at once
            dataset.close()
            dataset = known
        dataset.claim(token)
        if token not in self.pids():  # it left meanwhile
            dataset.unclaim(token)
        objects = len(dataset.manifest)
        message = Registered(dataset.key, objects, Table.nbytes(objects))
        return Answer(message, (dataset.table_fd,))

    def open(self, token: str, request: Open) -> Session:
        """Begin a session; UnavailableError when draining, or as `Registry.open`."""
        self._check_serving()
        session = self.registry.open(token, request)
        self.feed(
            mind.Opened(session.id, request.dataset, request.job, request.rank, request.world)
        )
        return session

    def _check_serving(self) -> None:
        if self.state == "draining":
            raise UnavailableError("this daemon is about to end: the next one will serve you")

    def session(self, token: str, session_id: int) -> Session:
        """A session that this token owns, or UnavailableError."""
        return self.registry.owned(token, session_id)

    def close_session(self, session: Session) -> None:
        """End a session; the core takes back all it had pinned."""
        self.ranks.closes(session)
        if self.state != "draining":  # then nobody fetches: what lies there stays to the end
            session.unready(0)
        self.registry.remove(session)
        self.feed(mind.Closed(session.id))

    def left(self, token: str) -> None:
        """A client is gone: end its sessions."""
        for session in self.registry.of(token):
            self.close_session(session)
        self.registry.left(token)

    def forget_idle(self, *, room: int = 0) -> None:
        """Give back what datasets hold that nobody uses, beyond time and number of the settings.

        Args:
            room: so many more must find a place within `daemon.max_datasets`.
        """
        limits_ = self.config.daemon
        spare = self.registry.spare(
            time.monotonic(), limits_.idle_s, limits_.max_idle_datasets, room=room
        )
        for dataset in spare:
            if not self.core.busy(dataset.key):
                self.feed(mind.Unregistered(dataset.key))
                self.fetcher.remove(dataset.key)
                self.registry.forget(dataset)

    def extended(self, session: Session, message: Extend, arrays: list[NDArray[Any]]) -> None:
        """A session's plan goes on."""
        objects, ends = arrays
        session.steps += len(ends)
        told = (session.id, message.epoch, message.step, objects, ends, message.blind)
        self.feed(mind.Extended(*told))
        self.waiting(session)

    def truncated(self, session: Session, step: int) -> None:
        """A session's plan ends earlier."""
        session.truncate(step)
        self.feed(mind.Truncated(session.id, step))
        session.acknowledge()

    def waiting(self, session: Session) -> None:
        """Answer waits that are over already, and let the core know how urgent the rest is."""
        for who, call, step in session.over():
            self._send(who, Ready(call, session.id, step))
        moved = session.progress()
        if moved is not None:
            self.feed(mind.Progressed(session.id, *moved))

    def answer(self, ask: Ask) -> dict[str, Any]:
        """The answer to a command of the CLI (docs/cli.md has the schema)."""
        return commands.answer(self, ask)

    def told(self) -> dict[str, Any]:
        """Status and stats together."""
        return commands.told(self)

    # --- memory -------------------------------------------------------------------------------

    def _prefault_when_it_will_be_full(self) -> None:
        """Touch the arena's pages ahead of use, once it is sure that all of them will be used."""
        total = sum(
            int(d.table.length[d.table.length > 0].sum()) for d in self.registry.datasets.values()
        )
        if self._prefault is None and self.config.memory.prefault and total >= self.arena.nbytes:
            thread = threading.Thread(
                target=self.arena.prefault,
                args=(self._stop_prefault,),
                name="creel-prefault",
                daemon=True,
            )
            with contextlib.suppress(RuntimeError):  # no more threads: pages come as they are used
                thread.start()
                self._prefault = thread

    def close(self) -> None:
        """Give everything back."""
        self._stop_prefault.set()
        self.fetcher.close()
        if self._prefault is not None:
            self._prefault.join(1.0)
        self._registrar.close()
        self.fetcher.join(0.5)
        self.registry.close()
        self.arena.close()


def _window(config: Config) -> Window:
    return Window(
        min_steps=config.window.min_steps,
        max_steps=config.window.max_steps,
        nbytes=config.window.bytes,
        inflight_nbytes=config.fetch.inflight_bytes,
    )


class _Registrar:
    """One thread for work that takes long: a manifest of 10 million files is seconds."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, work: Callable[[], None]) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="creel-register", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the system gives no more: late for everybody, but done
                work()
                return
            self._thread = thread
        self._queue.put(work)

    def close(self) -> None:
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(1.0)

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            work()
