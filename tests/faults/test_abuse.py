"""What users, networks and strangers do to a training: no wrong batch, no hang, no leftovers."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

import creel
from creel.addresses import first_address
from creel.cache.memory.shared_words import COUNTER, DONE, READY, TRUNCATED, WANTED
from creel.cache.storage.manifest import Manifest
from creel.errors import NoDaemonError, SourceError, UnavailableError
from creel.loader.client.client import Client
from creel.loader.client.session import Session
from creel.messages import PROTOCOL, Hello, Register, Truncate, encode
from daemons import opened
from kit import daemon_of, gone, knock, nothing_left, until
from programs import Program
from testbed.same import needs_fuse

pytestmark = [pytest.mark.faults, pytest.mark.timeout(180)]

N = 600


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give daemons room for a fifth of the files."""
    monkeypatch.setenv("CREEL_MEMORY__BUDGET", "1MiB")


def content(i: int) -> bytes:
    """Return the content of file i: its number, then noise of a length of its own."""
    rng = np.random.default_rng(i)
    return i.to_bytes(4, "little") + rng.bytes(int(rng.lognormal(8.5, 1)))


@pytest.fixture(scope="module")
def contents() -> list[bytes]:
    return [content(i) for i in range(N)]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory, contents: list[bytes]) -> list[str]:
    home = tmp_path_factory.mktemp("files")
    for i, data in enumerate(contents):
        (home / f"{i:04}.bin").write_bytes(data)
    return [f"{home}/{i:04}.bin" for i in range(N)]


def as_they_are(samples: list[torch.Tensor]) -> list[torch.Tensor]:
    return samples


def loader(paths: list[str], seed: int = 0, workers: int = 2, **kwargs: Any) -> Any:
    return creel.DataLoader(
        creel.FileDataset(paths),
        batch_size=12,
        shuffle=True,
        num_workers=workers,
        collate_fn=as_they_are,
        generator=torch.Generator().manual_seed(seed),
        **kwargs,
    )


def numbers(batch: list[torch.Tensor], contents: list[bytes]) -> list[int]:
    """Return the numbers of the files in a batch; each must be whole and right."""
    seen = []
    for sample in batch:
        data = sample.numpy().tobytes()
        seen.append(int.from_bytes(data[:4], "little"))
        assert data == contents[seen[-1]], f"file {seen[-1]}"
    return seen


def epoch(batches: Any, contents: list[bytes]) -> list[int]:
    return [i for batch in batches for i in numbers(batch, contents)]


# --- wrong bytes --------------------------------------------------------------------------------


@pytest.mark.usefixtures("embedded")
def test_an_iterator_that_was_never_used_costs_no_session(
    paths: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Room for all files: a busy daemon that lacks room leaves parts of a step to its reader.
    monkeypatch.setenv("CREEL_MEMORY__BUDGET", "16MiB")
    batches = loader(paths, persistent_workers=True)
    iter(batches)
    for _ in iter(batches):
        pass
    # Workers may still have read for the first iterator, whose steps were not pinned any more.
    assert batches.stats()["direct_reads"] <= 2 * 2 * 12


@pytest.mark.parametrize("seed", [1])
def test_no_byte_is_wrong_while_processes_are_stopped(
    paths: list[str], contents: list[bytes], served: str, seed: int
) -> None:
    rng = random.Random(seed)
    train, val = loader(paths, seed), loader(paths[::3], seed + 100, persistent_workers=True)
    next(iter(val))
    stop = threading.Event()
    chaos = threading.Thread(target=_stop_and_go, args=(served, rng.random(), stop))
    chaos.start()
    try:
        for most in (10**6, rng.randrange(3, 30), 10**6):
            seen = []
            for step, batch in enumerate(train):
                seen += numbers(batch, contents)
                if step == 9:
                    assert len(epoch(val, contents)) == len(paths[::3])
                if step == most:
                    break
            assert len(set(seen)) == (N if most == 10**6 else 12 * (most + 1))
    finally:
        stop.set()
        chaos.join()


def _stop_and_go(name: str, seed: float, stop: threading.Event) -> None:
    rng = random.Random(seed)
    daemon = daemon_of(name)
    while not stop.wait(rng.uniform(0, 0.2)):
        victim = rng.choice([daemon, *psutil.Process().children()])
        with contextlib.suppress(psutil.Error):
            victim.suspend()
            stop.wait(rng.choice([0.005, 0.05, 0.2]))
            victim.resume()


@pytest.mark.usefixtures("served")
def test_a_file_changed_under_us_is_old_or_new_and_never_both(tmp_path: Path) -> None:
    nbytes, n = 40_000, 60
    for i in range(n):
        (tmp_path / f"{i:02}").write_bytes(bytes([i]) * nbytes)
    data = creel.FileDataset(sorted(map(str, tmp_path.iterdir())), nbytes=[nbytes] * n)
    batches = creel.DataLoader(data, batch_size=4, shuffle=True, num_workers=2)
    for turn in range(3):
        for batch in batches:
            first = batch[:, :1]
            assert (batch == first).all()
            assert (first % 100 < n).all()
            assert (first // 100 <= turn).all()
        for i in range(n):
            new = tmp_path / ".new"
            new.write_bytes(bytes([i + 100 * min(turn + 1, 1)]) * nbytes)
            new.rename(tmp_path / f"{i:02}")


@pytest.mark.usefixtures("served")
def test_a_file_that_grew_is_refused_as_torch_would(tmp_path: Path) -> None:
    for i in range(40):
        (tmp_path / f"{i:02}").write_bytes(bytes([i]) * 1000)
    files = sorted(map(str, tmp_path.iterdir()))
    known = creel.FileDataset(files, nbytes=[1000] * 40)
    (tmp_path / "07").write_bytes(b"x" * 1001)
    theirs = torch.utils.data.DataLoader(known, batch_size=1)
    ours = creel.DataLoader(known, batch_size=1, num_workers=1)
    assert _story(ours) == _story(theirs)


def _story(batches: Any) -> object:
    try:
        return [bytes(b[0].numpy()) for b in batches]
    except SourceError as e:
        return type(e)


# --- storage ------------------------------------------------------------------------------------


@pytest.fixture
def slow(paths: list[str], tmp_path: Path) -> Iterator[Any]:
    from testbed.slowfs import SlowFS

    with SlowFS(str(Path(paths[0]).parent), str(tmp_path / "mount"), seed=1) as mount:  # type: ignore[no-untyped-call]
        yield mount


def below(mount: Any, count: int) -> list[str]:
    return [f"{mount.mountpoint}/{i:04}.bin" for i in range(count)]


@needs_fuse
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.usefixtures("served")
def test_errors_that_pass_are_never_seen(slow: Any, contents: list[bytes], workers: int) -> None:
    slow.set(fail_rate=0.05)
    assert sorted(epoch(loader(below(slow, 120), 0, workers), contents)) == list(range(120))


@needs_fuse
@pytest.mark.usefixtures("embedded")
def test_an_error_that_stays_names_its_file(slow: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CREEL_FETCH__ATTEMPTS", "2")
    slow.set(fail_rate=1.0, fail_match="0050.bin")
    with pytest.raises(SourceError, match=r"0050\.bin"):
        list(loader(below(slow, 120)))


@needs_fuse
def test_a_read_that_never_ends_runs_into_the_timeout_and_holds_up_no_end(
    slow: Any, served: str
) -> None:
    slow.set(stall=30, stall_match="0050.bin")
    before = set(psutil.Process().children())
    batches = loader(below(slow, 120), timeout=1)
    with pytest.raises(RuntimeError, match="timed out after 1 seconds"):
        list(batches)
    daemon = daemon_of(served)
    daemon.terminate()
    until(lambda: gone(daemon.pid), event="the daemon ends")
    slow.set(stall=0)
    del batches
    until(lambda: set(psutil.Process().children()) <= before, event="the workers end")


# --- strangers ----------------------------------------------------------------------------------


@pytest.fixture
def session(paths: list[str], served: str) -> Iterator[Session]:
    """A hostile client of the daemon that other clients use."""
    batches = loader(paths, workers=0)
    next(iter(batches))
    with Client.connect(served) as client:
        key = client.register(Manifest.of_files(paths))
        session = opened(client, key)
        session.extend(0, 0, np.arange(8), np.arange(1, 9))
        assert session.wait(7, 10)
        yield session


def test_no_shared_word_ends_the_daemon(session: Session, served: str) -> None:
    daemon = daemon_of(served)
    for value in (2**63 - 1, -(2**63)):
        for word in (DONE, WANTED, READY, TRUNCATED, *COUNTER.values()):
            session.words[word] = value
        with Client.connect(served, "cli") as client:
            client.ask("stats")
    session.client.send(Truncate(session.token, session.id, 8))
    time.sleep(0.1)
    with Client.connect(served, "cli") as client:
        assert client.ask("status")["pid"] == daemon.pid


def test_a_manifest_of_more_objects_than_memory_is_refused(session: Session) -> None:
    huge = Manifest.of_runs(["/x"], np.array([0]), np.array([0]), np.array([2**31 - 1]))
    with pytest.raises(UnavailableError, match="split the dataset"):
        session.client.register(huge)


def test_a_full_backlog_is_no_missing_daemon(served: str, paths: list[str]) -> None:
    next(iter(loader(paths, workers=0)))
    daemon = daemon_of(served)
    daemon.suspend()
    held = []
    try:
        while True:
            caller = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
            held.append(caller)
            if caller.connect_ex(first_address(served)):
                break
        threading.Timer(0.3, daemon.resume).start()
        with Client.connect(served, "cli") as client:
            assert client.ask("status")["pid"] == daemon.pid
    finally:
        daemon.resume()
        for caller in held:
            caller.close()


def test_a_training_goes_on_amid_noise(
    paths: list[str], contents: list[bytes], served: str
) -> None:
    train = loader(paths)
    next(iter(train))
    daemon = daemon_of(served)
    stop = threading.Event()
    noise = threading.Thread(target=_noise, args=(served, stop))
    noise.start()
    try:
        for _ in range(2):
            assert sorted(epoch(train, contents)) == list(range(N))
    finally:
        stop.set()
        noise.join()
    assert daemon_of(served).pid == daemon.pid


def _noise(name: str, stop: threading.Event) -> None:
    import zmq

    rng = random.Random(3)
    where = first_address(name)
    context = zmq.Context()
    with Client.connect(name, "trainer") as client, context.socket(zmq.DEALER) as line:
        line.linger = 0
        line.connect(client.request_address)
        while not stop.is_set():
            with contextlib.suppress(OSError):
                _talk_nonsense(where, rng)
            body = encode(Truncate(client.token, rng.randrange(-9, 99), rng.randrange(99)))
            frames = [
                rng.choice([body, rng.randbytes(50), b""]) for _ in range(rng.randrange(1, 4))
            ]
            with contextlib.suppress(zmq.Again):
                line.send_multipart(frames, zmq.DONTWAIT)
            time.sleep(0.001)
    context.term()


def _talk_nonsense(where: str, rng: random.Random) -> None:
    with knock(where) as control_socket:
        if rng.random() < 0.5:
            control_socket.send(encode(Hello(PROTOCOL, "trainer")))
            control_socket.recv(4096)
            _shrinking_manifest(control_socket, rng)
        else:
            control_socket.send(rng.randbytes(rng.randrange(1, 3000)))


def _shrinking_manifest(control_socket: socket.socket, rng: random.Random) -> None:
    """Send a manifest that is not sealed and shrinks after its length was sent."""
    data = Manifest.of_files(["/etc/passwd"] * 50).to_arrow()
    fd = os.memfd_create("shrinks")
    try:
        os.write(fd, data)
        socket.send_fds(control_socket, [encode(Register(len(data)))], [fd])
        os.ftruncate(fd, rng.randrange(len(data)))
    finally:
        os.close(fd)


# --- the trainer's own ways ---------------------------------------------------------------------


@pytest.mark.usefixtures("served")
def test_after_a_fork_both_go_on(paths: list[str], contents: list[bytes]) -> None:
    batches = iter(loader(paths, workers=0))
    begun = numbers(next(batches), contents)
    pid = os.fork()
    if not pid:  # the child, where no code of pytest may run
        with contextlib.suppress(BaseException):
            remaining = epoch(batches, contents)
            os._exit(int(sorted(begun + remaining) != list(range(N))))
        os._exit(2)
    remaining = epoch(batches, contents)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert sorted(begun + remaining) == list(range(N))


@pytest.mark.usefixtures("served")
def test_threads_train_side_by_side(paths: list[str], contents: list[bytes]) -> None:
    seen: list[list[int]] = []
    work = [
        threading.Thread(target=lambda s=s: seen.append(epoch(loader(paths, s, 1), contents)))
        for s in range(3)
    ]
    for thread in work:
        thread.start()
    for thread in work:
        thread.join()
    assert [sorted(order) for order in seen] == [list(range(N))] * 3


def test_a_drained_daemon_is_replaced(paths: list[str], contents: list[bytes], served: str) -> None:
    train = loader(paths)
    seen = []
    for step, batch in enumerate(train):
        seen += numbers(batch, contents)
        if step == 5:
            daemon = daemon_of(served)
            daemon.terminate()
    assert sorted(seen) == list(range(N))
    until(lambda: gone(daemon.pid), event="it drains")
    assert sorted(epoch(train, contents)) == list(range(N))


# Its workers are persistent, as Python loses a Ctrl-C that comes while it forks.
TRAINER = """
    import sys, creel
    data = creel.FileDataset(sys.argv[1:])
    more = {"num_workers": 2, "collate_fn": len, "persistent_workers": True}
    loader = creel.DataLoader(data, batch_size=8, shuffle=True, **more)
    while True:
        for batch in loader:
            print(batch, flush=True)
"""


def test_ctrl_c_is_one_short_story_and_leaves_nothing(
    paths: list[str], embedded: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CREEL_DAEMON__LINGER_S", "0.2")
    numbers = signal.SIGINT, signal.SIGTERM
    both = {number: Program(TRAINER, *paths, new_session=True) for number in numbers}
    for process in both.values():
        for _ in range(30):
            process.stdout.readline()
    family = [daemon_of(embedded)]
    for number, process in both.items():
        family += psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, number)
    for number, process in both.items():
        _, said = process.communicate()
        assert said.count("Traceback") == (number == signal.SIGINT), said
        assert "Exception ignored" not in said
    until(lambda: all(gone(p.pid) for p in family), event=f"all end: {family}")


@pytest.mark.usefixtures("embedded")
def test_an_iterator_alive_at_the_end_says_nothing(paths: list[str]) -> None:
    text = """
        import sys, creel
        data = creel.FileDataset(sys.argv[1:])
        its = [iter(creel.DataLoader(data, num_workers=w, batch_size=None)) for w in (0, 1)]
        print(len([next(it) for it in its]))
    """
    assert Program(text, *paths).communicate() == ("2\n", "")


MANY = """
    import sys, creel, os
    data = creel.FileDataset(sys.argv[1:31])
    loaders = [creel.DataLoader(data, batch_size=10, collate_fn=len) for _ in range(64)]
    its = [iter(loader) for loader in loaders]
    assert [next(it) for it in its] == [10] * 64
    del its, loaders
    print("same")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="name spaces need root")
@pytest.mark.usefixtures("embedded")
def test_64_sessions_with_256_descriptors_no_home_and_a_read_only_folder(paths: list[str]) -> None:
    setup = 'mount -t tmpfs -o ro tmpfs /mnt && cd /mnt && unset HOME && ulimit -n 256 && exec "$@"'
    words = ["unshare", "-m", "-p", "-f", "--mount-proc", "sh", "-c", setup, "sh"]
    said = subprocess.run(
        [*words, sys.executable, "-c", textwrap.dedent(MANY), *paths],
        capture_output=True,
        text=True,
        check=False,
    )
    assert said.stdout == "same\n", said.stderr


def test_nothing_is_left_after_the_daemon_was_killed(
    paths: list[str], contents: list[bytes], served: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(epoch(loader(paths), contents)) == N
    monkeypatch.setenv("CREEL_LOADER__EMBED", "false")  # no new daemon for the rest
    with nothing_left():
        train = loader(paths)
        it = iter(train)
        next(it)
        daemon_of(served).kill()
        assert len(epoch(it, contents)) == N - 12
        del it, train
    with pytest.raises(NoDaemonError):
        daemon_of(served)
