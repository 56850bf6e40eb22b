"""Sessions of a client: plans in messages, waits with deadlines, lost sessions."""

from __future__ import annotations

import errno
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import zmq

from creel.cache.memory.shared_words import DONE, WANTED
from creel.cache.storage.manifest import Manifest
from creel.errors import DaemonLostError
from creel.loader.client import client as client_module
from creel.loader.client.session import MessageSizes
from daemons import Running, folder, opened, plan
from kit import until

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]


def test_waiting_has_a_deadline(daemon: Running, tmp_path: Path) -> None:
    with daemon.client() as client:
        session = opened(client, folder(tmp_path, [10]))
        start = time.monotonic()
        assert not session.wait(0, 0.3)
        assert time.monotonic() - start > 0.25
        assert session.words[WANTED] == 1


def test_a_plan_that_never_reaches_the_daemon_is_not_waited_for(
    daemon: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if there were no descriptor for libzmq's connection, which is made in the background."""
    monkeypatch.setattr("creel.loader.client.session.ARRIVAL_S", 0.2)
    with daemon.client() as client:
        dataset = client.register(folder(tmp_path, [10] * 4))
        session, other = opened(client, dataset), opened(client, dataset)
        with monkeypatch.context() as patch:
            patch.setattr(client, "send", lambda *_: None)
            plan(session, np.arange(4), 2)
            start = time.monotonic()
            assert not session.wait(0, 60)
            assert time.monotonic() - start < 30
            assert not session.alive
        plan(other, np.arange(4), 2)
        assert other.wait(1, 60)
        assert other.alive


@pytest.mark.parametrize("inside", ["recv_multipart", "send_multipart", "exchange"])
def test_a_finaliser_may_end_a_session_wherever_its_client_is(
    daemon: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: str
) -> None:
    """An iterator in a reference cycle is collected at any time, in any call of the client."""
    ids = np.arange(10, dtype=np.int32)
    with daemon.client() as client:
        dataset = client.register(folder(tmp_path, [10] * 10))
        left, other = opened(client, dataset), opened(client, dataset)
        plan(left, ids, 5)
        owner: Any = client_module if inside == "exchange" else zmq.Socket
        call = getattr(owner, inside)
        truncated = []

        def collecting(*args: Any, **kwargs: Any) -> Any:
            monkeypatch.undo()
            truncated.append(left.truncate(0))
            left.close()
            return call(*args, **kwargs)

        monkeypatch.setattr(owner, inside, collecting)
        if inside == "exchange":
            other = opened(client, dataset)
        elif inside == "recv_multipart":
            assert not other.wait(0, 0.1)
        plan(other, ids, 5)
        assert other.wait(1, 20)
        # Its message cannot be sent between the frames of another one: the session is lost.
        assert truncated == [inside != "send_multipart"]
        assert not left.ready(0)


def test_a_plan_that_cannot_be_taken_back_is_not_believed_any_more(
    daemon: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with daemon.client() as client:
        session = opened(client, folder(tmp_path, [10] * 10))
        plan(session, np.arange(10, dtype=np.int32), 5)
        assert session.wait(1, 20)
        with monkeypatch.context() as patch:
            patch.setattr(client, "send", mock.Mock(side_effect=DaemonLostError("full")))
            assert not session.truncate(0)
        assert not session.ready(0)


def test_a_session_that_cannot_be_mapped_is_not_left_open(daemon: Running) -> None:
    with daemon.client() as client:
        key = client.register(Manifest.of_files(["/a"]))
        none = OSError(errno.ENOMEM, "Cannot allocate memory")
        unmapped = mock.patch.object(client_module, "LocationTable", side_effect=none)
        with unmapped, pytest.raises(OSError):  # noqa: PT011
            opened(client, key)
        opened(client, key)  # after all messages sent before
        assert client.ask("status")["sessions"] == 1


def test_done_never_goes_back(daemon: Running, tmp_path: Path) -> None:
    with daemon.client() as client:
        session = opened(client, folder(tmp_path, [10]))
        session.done(5)
        session.done(3)
        assert session.words[DONE] == 5


def test_a_long_plan_travels_in_pieces(daemon: Running, tmp_path: Path) -> None:
    (tmp_path / "rows").write_bytes(bytes(3_000_000))
    ones = np.ones(1, np.int64)
    manifest = Manifest.of_runs([str(tmp_path / "rows")], ones * 0, ones, ones * 3_000_000)
    with daemon.client() as client:
        session = opened(client, manifest)
        ids = np.random.default_rng(0).permutation(3_000_000).astype(np.int32)
        assert plan(session, ids, 1000) == 3000
        assert session.wait(0, 20)
        assert session.alive
        until(lambda: client.ask("stats")["sessions"][0]["known"] == 3000, event="all of it")


def test_each_epoch_is_told_in_small_messages_at_first(
    daemon: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon touches new memory for large ones, and libzmq's queue is bounded."""
    sizes = MessageSizes(limit=20, fresh=4, fresh_part=4, messages=50)
    monkeypatch.setattr("creel.loader.client.session.SIZES", sizes)
    with daemon.client() as client:
        session = opened(client, folder(tmp_path, [10] * 64))
        sent, send = [], client.send

        def spied(message: Any, *arrays: Any) -> None:
            sent.append(len(arrays[0]))
            send(message, *arrays)

        monkeypatch.setattr(client, "send", spied)
        ids, at = np.arange(64, dtype=np.int32), 0
        for epoch in range(2):
            at = plan(session, ids, 2, epoch=epoch, at=at)
        assert sent == 2 * [2, 4, 4, 4, 4, 20, 20, 6]
        sent.clear()
        plan(session, np.tile(ids, 10), 2, epoch=2, at=at)
        assert sent[:3] == [2, 12, 12]  # 640 in no more than 50 messages or so
        assert sum(sent) == 640


def test_a_session_is_lost_with_a_plan_that_was_told_in_part(
    daemon: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("creel.loader.client.session.SIZES", MessageSizes(limit=4, fresh=4))
    with daemon.client() as client:
        session = opened(client, folder(tmp_path, [10] * 12))
        says = iter([client.send])

        def send(*args: Any) -> None:
            next(says, nobody)(*args)

        def nobody(*_: object) -> None:
            raise DaemonLostError("the line is full")

        monkeypatch.setattr(client, "send", send)
        assert not session.extend(0, 0, np.arange(12), np.arange(2, 13, 2))
        assert not session.alive
