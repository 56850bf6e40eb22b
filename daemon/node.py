"""The node: books, core, arena and fetch threads put together. What desk and line call.

Runs on the loop thread alone; what comes from elsewhere (fetch threads, the registrar) is handed in
through `call_soon`. Every event goes through `feed`, which carries out what the core answers.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from numpy.typing import NDArray

from creel import limits
from creel.cache.arena import Arena
from creel.cache.board import KNOWN, Table
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
from creel.daemon.quota import Quota
from creel.daemon.registrar import Registrar
from creel.daemon.registry import Dataset, Registry, Session, tables_nbytes
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
        self.quota = Quota(self.arena.nbytes, self.registry, self.core, self._forget)
        self._beaten = self.started
        self._send = send
        self._call_soon = call_soon
        self._stop_prefault = threading.Event()
        self._prefault: threading.Thread | None = None
        self._registrar = Registrar()

    # --- events and actions -------------------------------------------------------------------

    def feed(self, event: mind.Event) -> bool:
        """Tell the core and do what it says; False when it failed, and the event's session is over.

        Nothing while draining: READY does not go back for those who hang up now, so all must lie
        where it lies. The core would go on with a table and a memory that are not as it thinks.

        Beats first: of plans for millions of objects, each event may take a second, and a turn of
        the loop has many.
        """
        if self.state == "draining":
            return True
        now = time.monotonic()
        self.beat(now)
        try:
            actions = self.core.handle(event, now)
        except Exception:
            log.exception("the core failed at %s", type(event).__name__)
            self._mend(getattr(event, "session", 0))
            return False
        lost: list[mind.Lost] = []
        try:
            for action in actions:
                self._do(action, lost)
        except Exception:
            log.exception("what the core wants done after %s failed", type(event).__name__)
            self._give_up()
            return False
        for loss in lost:
            self.feed(loss)
        return True

    def _mend(self, number: int) -> None:
        """After a failure of the core: the session that it was about ends, the others go on.

        A failure is a bug of ours, or memory that was not to be had. Where the core does not become
        right again by this, the daemon ends: its readers go to the source, the next one begins.
        """
        self.bugs += 1
        session = self.registry.sessions.get(number)
        if session is not None:
            self.ranks.closes(session)
            session.unready(0)
            self.registry.remove(session)
        try:
            self.core.mend(number)
            self.core.check()
        except Exception:
            log.exception("the core cannot be mended")
            self._give_up()

    def _give_up(self) -> None:
        log.error("this daemon ends: its books may be wrong")
        self.stop(True)

    def _do(self, action: mind.Action, lost: list[mind.Lost]) -> None:
        if isinstance(action, mind.SetReady):
            self._set_ready(action)
        elif isinstance(action, mind.Discard):
            self.fetcher.discard(action)
        elif isinstance(action, mind.Fetch):
            self.fetcher.submit(action)
        elif isinstance(action, mind.Check):
            self.fetcher.check(action)
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
        if action.ready < session.ready:
            session.unready(action.ready)
        for who, call, step in session.set_ready(action.ready, action.failed):
            self._send(who, Ready(call, session.id, step))

    def _fetched(self, event: mind.Fetched | mind.Checked) -> None:
        self.fetcher.finished(event)
        self.feed(event)
        if isinstance(event, mind.Checked):
            return
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
            self.quota.coming.pop(token, None)
            reply(self._enter(token, dataset))

        def look(manifest: Manifest) -> None:
            known = self.registry.datasets.get(manifest.key)
            if known is not None:
                enter(known)
                return
            nbytes = tables_nbytes(manifest)
            try:
                self.quota.check(nbytes, f"{len(manifest)} objects")
            except UnavailableError as e:
                refuse(Answer(Refused(str(e))))
                return
            self.quota.coming[token] = nbytes
            self._elsewhere(lambda: self._prepare(manifest), enter, refuse)

        def refuse(answer: Answer) -> None:
            self.quota.coming.pop(token, None)
            reply(answer)

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
            table, lengths = dataset.table, dataset.lengths
            columns = table.offset, table.length, lengths, dataset.versions
            if not self.feed(mind.Registered(dataset.key, *columns)):
                dataset.close()
                return Answer(Refused("this daemon has no room for another dataset"))
            self.registry.add(dataset)
            self.fetcher.add(dataset.key, dataset.source)
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
        """Begin a session.

        Raises:
            UnavailableError: when draining, when memory is short, or as `Registry.open`.
            MalformedError: as `Registry.open`.
        """
        self._check_serving()
        dataset = self.registry.datasets.get(request.dataset)
        if dataset is not None:
            self.quota.check(4 * len(dataset.manifest), f"a job on {len(dataset.manifest)} objects")
        session = self.registry.open(token, request)
        told = (session.id, request.dataset, request.job, request.rank, request.world)
        if not self.feed(mind.Opened(*told, request.recheck)):
            raise UnavailableError("this daemon cannot serve one more session")
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
            time.monotonic(),
            limits_.idle_s,
            limits_.max_idle_datasets,
            limit=self.quota.limit,
            room=room,
        )
        for dataset in spare:
            self._forget(dataset)

    def _forget(self, dataset: Dataset) -> None:
        """Give back what an idle dataset holds, unless something is being read for it."""
        if not self.core.busy(dataset.key):
            self.feed(mind.Unregistered(dataset.key))
            self.fetcher.remove(dataset.key)
            self.registry.forget(dataset)

    def afford(self, nbytes: int, what: str) -> None:
        """As `Quota.check`."""
        self.quota.check(nbytes, what)

    def extended(self, session: Session, message: Extend, arrays: list[NDArray[Any]]) -> None:
        """A session's plan goes on.

        Where memory is short for what is learnt of another epoch, the plan is followed without;
        where it is short for the plan itself the session ends, and its reader goes to the source.
        """
        objects, ends = arrays
        nbytes = objects.nbytes + ends.nbytes
        blind = message.blind
        try:
            if message.epoch != session.epoch and not blind:
                blind = not self.quota.fits(nbytes + 5 * len(session.dataset.manifest))
            self.quota.check(nbytes, f"{len(objects)} reads to come")
        except UnavailableError as e:
            log.warning("session %d of process %d ends: %s", session.id, self._pid(session), e)
            self.close_session(session)
            return
        if not blind:
            session.epoch = message.epoch
        session.steps += len(ends)
        told = (session.id, message.epoch, message.step, objects, ends, blind)
        if self.feed(mind.Extended(*told)):
            session.board[KNOWN] = session.steps
            self.waiting(session)

    def _pid(self, session: Session) -> int:
        return self.pids().get(session.token, 0)

    def begun(self, session: Session, epoch: int) -> None:
        """An epoch of a session begins."""
        self.feed(mind.Begun(session.id, epoch))

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
        total = sum(d.lengths.nbytes for d in self.registry.datasets.values())
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
