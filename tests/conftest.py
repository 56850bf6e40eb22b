"""Fixtures every test may use."""

from __future__ import annotations

import contextlib
import functools
import gc
import http.server
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import psutil
import pytest

from creel.errors import CreelError
from kit import daemon_of, descriptors, nothing_left, unique_name, until

if TYPE_CHECKING:
    from daemons import Running
    from testbed.slow_files import SlowFiles

#: A busy machine is slow, which is no failure; and who runs a test again sees the same examples.
hypothesis.settings.register_profile("creel", deadline=None, derandomize=True)
hypothesis.settings.load_profile("creel")


def pytest_configure(config: pytest.Config) -> None:
    """Make the tests the same wherever they run.

    A shell's background jobs ignore Ctrl-C, and so do their children: ours must not. torch warns of
    more workers than cores, and which are too many is this machine's affair. From Python 3.14 on
    workers are born of a fork server and import torch anew, seconds each: tests that are about a
    start method name it.
    """
    multiprocessing.set_start_method("fork", force=True)
    config.addinivalue_line("filterwarnings", "ignore:This DataLoader will create:UserWarning")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


#: Files that begin first, as they take longest. Emulated hosts mostly wait: beside the second file,
#: which only computes, a process that runs the first and the third leaves no core idle.
LONGEST = (
    "faults/test_lost_nodes.py",
    "sim/test_laws_of_clusters.py",
    "system/test_several_hosts.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files come first, so that no process ends a minute after the others."""

    def place(item: pytest.Item) -> int:
        name = item.nodeid.split("::")[0]
        return next((i for i, one in enumerate(LONGEST) if name.endswith(one)), len(LONGEST))

    items.sort(key=place)


def pytest_collection_finish(session: pytest.Session) -> None:
    """What imports made stays for good: a collection in a test takes 1 ms instead of 300."""
    forked = {"served", "daemon"}
    if any(forked & set(getattr(item, "fixturenames", ())) for item in session.items):
        import daemons  # noqa: F401  starts a process that stays: no test shall miss or count it
    gc.collect()
    gc.freeze()


#: Files of tests lie in the page cache, where no daemon would be asked for them. Here it reads all,
#: but in tests that say otherwise.
os.environ["CREEL_LOADER__DIRECT"] = "never"


@pytest.fixture
def daemon_name(monkeypatch: pytest.MonkeyPatch) -> str:
    """Loaders and clients of this test meet at a daemon of their own."""
    name = unique_name()
    monkeypatch.setenv("CREEL_SOCKET", name)
    return name


@pytest.fixture
def embedded(daemon_name: str) -> Iterator[str]:
    """The name of a daemon that the first loader of the test starts; ended afterwards."""
    yield daemon_name
    with contextlib.suppress(CreelError, psutil.Error):
        daemon = daemon_of(daemon_name)
        daemon.send_signal(signal.SIGCONT)
        daemon.terminate()
    if connections := sys.modules.get("creel.loader.client.connections"):
        connections.disconnect(daemon_name)  # a client of each would stay open


@pytest.fixture
def served(embedded: str) -> Iterator[str]:
    """The name of a daemon of this test alone, which serves already and stays to the end.

    It is forked; `embedded` takes half a second of a core longer.
    """
    from daemons import Running

    with Running(embedded, memory=os.environ.get("CREEL_MEMORY__BUDGET", "64MiB")):
        yield embedded


@pytest.fixture
def daemon(daemon_name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    """A daemon of this test alone, as `served`, with its clients; loaders start none."""
    from creel.loader.client import connections
    from daemons import Running

    monkeypatch.setenv("CREEL_LOADER__EMBED", "false")
    with Running(daemon_name) as running:
        yield running
        connections.disconnect(daemon_name)


@pytest.fixture
def slow(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[SlowFiles]:
    """Files on slow storage, of the kind that the test's parameter names."""
    from testbed.slow_files import SlowFiles

    made = SlowFiles(tmp_path, getattr(request, "param", "npy"))
    yield made
    made.fs.close()  # type: ignore[no-untyped-call]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """What the test opens, closed in reverse order at its end."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def clean() -> Iterator[None]:
    """Nothing may be left behind: descriptors, threads, processes."""
    with nothing_left():
        yield


@pytest.fixture
def nothing_stays_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """No child process, and no descriptor, outlives a loader."""
    if "slow" in request.keywords:  # python's own two helpers stay
        multiprocessing.resource_tracker.ensure_running()
        multiprocessing.forkserver.ensure_running()
    before = len(descriptors())
    yield
    gc.collect()
    # A thread that was collecting a loader itself may still be at it.
    until(lambda: not multiprocessing.active_children(), what="no child process")
    until(lambda: len(descriptors()) <= before, what=f"{before} descriptors again")


@pytest.fixture
def web(tmp_path: Path) -> Iterator[str]:
    """A web server of tmp_path that lists folders."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    handler = functools.partial(Quiet, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()
