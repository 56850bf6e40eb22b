"""Fixtures for all tests."""

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
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import psutil
import pytest

import skips
from creel.errors import CreelError
from forks import make_forks_cheap
from kit import daemon_of, descriptors, nothing_left, unique_name, until

if TYPE_CHECKING:
    from daemons import Running
    from testbed.redis_server import Address
    from testbed.slow_files import SlowFiles

#: No deadline, as a slow machine is no failure; a repeated test sees the same examples.
hypothesis.settings.register_profile("creel", deadline=None, derandomize=True)
hypothesis.settings.load_profile("creel")


def pytest_configure(config: pytest.Config) -> None:
    """Make the tests behave the same wherever they run.

    A shell's background jobs and their children ignore Ctrl-C: the tests' processes must not. torch
    warns of more workers than the machine has cores, which is no concern of a test. From Python
    3.14 on a fork server starts workers, which import torch again, seconds each: only tests about a
    start method name it.
    """
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_forkserver_preload(["torch"])  # once, not in each worker that it starts
    config.addinivalue_line("filterwarnings", "ignore:This DataLoader will create:UserWarning")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


#: What begins first: the longest files, whose emulated hosts mostly wait. Their counts depend on
#: their speed, so nothing that only computes may run beside them.
FIRST = (
    "faults/test_lost_nodes.py",
    "faults/test_lost_daemons.py",
    "system/cluster/test_several_hosts.py",
)
#: What comes last, as it only computes; short files in the end, so that all processes end together.
LAST = ("sim/", "unit/", "test_layout.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the files by when they may run; within one folder their order stays."""

    def place(item: pytest.Item) -> int:
        name = item.nodeid.split("::")[0].removeprefix("tests/")
        for number, start in enumerate((*FIRST, "", *LAST)):
            if start and name.startswith(start):
                return number
        return len(FIRST)

    items.sort(key=place)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Make forks cheap, and collections in tests, which take 1 ms without objects of imports."""
    forked = {"served", "daemon"}
    if any(forked & set(getattr(item, "fixturenames", ())) for item in session.items):
        import daemons  # noqa: F401  starts a process that stays: before any test counts processes
    make_forks_cheap()


def beyond_the_list(reporter: pytest.TerminalReporter) -> tuple[Counter[str], Counter[str]]:
    """Return the reasons of skipped tests, and those of tests that CI does not expect to be."""
    skipped = skips.reasons(reporter.stats.get("skipped", []))
    return skipped, skips.excess(skipped, skips.permitted(skips.LIST.read_text()))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Iterator[None]:
    """After all else that pytest says: how many tests were skipped."""
    yield
    for line in skips.lines(*beyond_the_list(terminalreporter)):
        terminalreporter.write_line(line)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run of CI that skips what it should not; a process of pytest-xdist says nothing."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("CI") and reporter is not None and beyond_the_list(reporter)[1]:
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED


#: Files of tests are in the page cache, so loaders would not ask a daemon for them. By default the
#: daemon reads all files in tests; those of what a person does take both ways (`either_way`).
os.environ["CREEL_LOADER__DIRECT"] = "never"
os.environ.setdefault(
    "CREEL_MEMORY__RESERVE", "0"
)  # a machine that is short of memory fails no test
#: Threads of torch that wait for work turn in a loop on the cores that all tests share; pytest's
#: workers, which import torch later, take this from here.
os.environ.setdefault("OMP_NUM_THREADS", "1")
#: What names no daemon shall not meet one that another process's test, or a person, has started.
os.environ["CREEL_SOCKET"] = f"tests-{os.getpid()}"


@pytest.fixture(scope="module", autouse=True)
def collections_are_cheap() -> None:
    """Leave what earlier files of tests have imported out of collections, which took 0.3 s then."""
    gc.collect()
    gc.freeze()


@pytest.fixture(params=["never", "auto"])
def either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The daemon reads all files; as people have it, ones in the page cache go past it."""
    monkeypatch.setenv("CREEL_LOADER__DIRECT", request.param)
    return str(request.param)


@pytest.fixture
def daemon_name(monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of a daemon that only loaders and clients of this test use."""
    name = unique_name()
    monkeypatch.setenv("CREEL_SOCKET", name)
    return name


@pytest.fixture
def embedded(daemon_name: str) -> Iterator[str]:
    """Name of a daemon that the first loader of the test starts; it is ended afterwards."""
    yield daemon_name
    with contextlib.suppress(CreelError, psutil.Error):
        daemon = daemon_of(daemon_name)
        daemon.send_signal(signal.SIGCONT)
        daemon.terminate()
    if connections := sys.modules.get("creel.loader.client.connections"):
        connections.disconnect(daemon_name)  # a client of each would stay open


@pytest.fixture
def served(embedded: str) -> Iterator[str]:
    """Name of a daemon for this test alone, which already serves and stays to the end.

    It is forked; `embedded` takes half a second of a core longer.
    """
    from daemons import Running

    with Running(embedded, memory=os.environ.get("CREEL_MEMORY__BUDGET", "64MiB")):
        yield embedded


@pytest.fixture
def daemon(daemon_name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    """A daemon for this test alone, as in `served`, with its clients; loaders start none."""
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

    files = SlowFiles(tmp_path, getattr(request, "param", "npy"))
    yield files
    files.fs.close()  # type: ignore[no-untyped-call]


@pytest.fixture(scope="session")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Address]:
    """An address in a Redis server of this process; without one, the test is skipped."""
    from testbed.redis_server import LACKING, redis_server

    if LACKING:
        pytest.skip(f"no Redis server: {LACKING}")
    with redis_server(tmp_path_factory.mktemp("redis")) as address:
        yield address


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """Where a stream is in memory."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder, "stream")


@pytest.fixture(params=["folder", "memory", "redis"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path | Address:
    """Where a stream may be: in a folder, which may be in memory, or in Redis."""
    if request.param == "folder":
        return tmp_path / "stream"
    if request.param == "memory":
        folder: Path = request.getfixturevalue("in_memory")
        return folder
    redis: Address = request.getfixturevalue("redis")
    return redis / unique_name() / "stream"


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """A stack for what the test opens, closed in reverse order at its end."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def clean() -> Iterator[None]:
    """Check that no descriptor, thread or process is left over."""
    with nothing_left():
        yield


@pytest.fixture
def nothing_stays_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Check that no child process and no descriptor outlives a loader."""
    if "slow" in request.keywords:  # python's own two helpers stay
        multiprocessing.resource_tracker.ensure_running()
        multiprocessing.forkserver.ensure_running()
    before = len(descriptors())
    yield
    gc.collect()
    # A thread that collects a loader may still be running.
    until(lambda: not multiprocessing.active_children(), event="no child process")
    until(lambda: len(descriptors()) <= before, event=f"{before} descriptors again")


@pytest.fixture
def web(tmp_path: Path) -> Iterator[str]:
    """URL of a web server for tmp_path that lists folders."""

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
