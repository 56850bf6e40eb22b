"""All ranks of a node know the reads that one of them has recorded."""

from __future__ import annotations

import gc
import os
import resource
import signal
import time
from collections import Counter
from contextlib import ExitStack
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

import creel
from creel.addresses import first_address
from creel.cache.memory.memfd import Descriptor
from creel.config import Config
from creel.errors import UnavailableError
from creel.loader.client.client import Client
from creel.loader.data.binding.wrapped import AS_IT_IS
from creel.loader.data.tracing import recording, wrapped_reads
from creel.loader.data.tracing.journal import new_journal
from creel.loader.data.tracing.recorder import AccessRecorder
from creel.loader.data.tracing.recording import RanksJournal
from creel.messages import WithdrawJournal
from creel.system.unix_peers import listener_at
from daemons import Running
from kit import descriptors, until
from testbed.ranks import ranks
from testbed.same import needs_fuse, same
from testbed.slow_files import N, OpaqueFiles, SlowFiles

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(120),
    needs_fuse,
]

EPOCHS = 4


@pytest.fixture(autouse=True)
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("CREEL_LOADER__DIRECT", "never")  # reads are counted, however busy it is


class Hidden(OpaqueFiles):
    """A part of the files, dealt by the dataset itself in a way that cannot be observed."""

    def __init__(self, folder: str | Path, rank: int) -> None:
        super().__init__(folder, "npy")
        self.path_of: Any = partial(self.paths[rank::2].__getitem__)
        del self.paths

    def __len__(self) -> int:
        return N // 2

    def __getitem__(self, i: int) -> Any:
        return torch.from_numpy(np.load(self.path_of(i)))


def each_rank(slow: SlowFiles, tmp_path: Path, loaders: Any, epochs: int = EPOCHS) -> list[int]:
    """Return the files opened at the source in each epoch, by two ranks with torch's batches.

    `loaders`: returns creel's and torch's loader of a rank.
    """

    def read(rank: int) -> list[int]:
        torch.set_num_threads(1)  # a fork has no OpenMP threads
        ours, theirs = loaders(rank)
        opens = []
        for epoch in range(epochs):
            for loader in (ours, theirs):
                if isinstance(loader.sampler, DistributedSampler):
                    loader.sampler.set_epoch(epoch)
            dist.barrier()
            before = slow.opens()
            dist.barrier()
            batches = list(ours)
            dist.barrier()
            opens.append(slow.opens() - before)
            dist.barrier()
            assert same(batches, list(theirs))
        return opens

    # A daemon that prefetches may open a file between the two ranks' looks at the counter.
    return [max(counts) for counts in zip(*ranks(read, tmp_path), strict=True)]


class Whole(OpaqueFiles):
    """All files, by paths that no list of the dataset has."""

    def __init__(self, folder: str | Path) -> None:
        super().__init__(folder, "npy")
        self.path_of: Any = partial(self.paths.__getitem__)
        del self.paths

    def __getitem__(self, i: int) -> Any:
        return torch.from_numpy(np.load(self.path_of((i * 7 + 3) % N)))


def by_sampler(slow: SlowFiles, rank: int, **more: Any) -> tuple[Any, Any]:
    """Return loaders of the whole dataset on each rank, dealt again in each epoch."""
    ours, theirs = (
        creel.wrap(Whole(slow.fs.mountpoint)),
        Whole(slow.folder),
    )
    kinds: Any = (creel.DataLoader, ours), (DataLoader, theirs)
    loaders = (
        kind(dataset, 4, sampler=DistributedSampler(dataset, 2, rank, seed=3), **more)
        for kind, dataset in kinds
    )
    return next(loaders), next(loaders)


@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_the_daemon_reads_from_the_second_epoch_on_what_any_rank_has_read(
    slow: SlowFiles, tmp_path: Path, workers: int, *, persistent: bool
) -> None:
    more: dict[str, Any] = {"num_workers": workers, "persistent_workers": persistent}
    opens = each_rank(slow, tmp_path, lambda rank: by_sampler(slow, rank, **more))
    assert opens == [N, N, 0, 0]


class Later:
    """A loader in whose first epoch the daemon does not answer yet."""

    def __init__(self, loader: Any, patch: pytest.MonkeyPatch) -> None:
        self._loader, self.sampler = loader, loader.sampler
        self._patch = patch
        for name in ("startable", "daemon_starting"):
            patch.setattr(f"creel.loader.data.tracing.wrapped_reads.{name}", lambda _: True)

    def __iter__(self) -> Any:
        yield from self._loader
        self._patch.undo()


@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_recordings_from_before_a_daemon_answers_are_not_lost(
    slow: SlowFiles, tmp_path: Path, workers: int, *, persistent: bool
) -> None:
    """No reader waits for a daemon that is starting."""
    more: dict[str, Any] = {"num_workers": workers, "persistent_workers": persistent}

    def loaders(rank: int) -> tuple[Any, Any]:
        ours, theirs = by_sampler(slow, rank, **more)
        return Later(ours, pytest.MonkeyPatch()), theirs

    opens = each_rank(slow, tmp_path, loaders, 6)
    assert opens[0] == N
    # On a busy machine a rank comes late to the meeting, and reads by itself in an epoch more.
    assert opens[-1] == 0


def test_without_a_daemon_each_rank_reads_as_with_torch(
    slow: SlowFiles, tmp_path: Path, daemon_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert daemon_name
    monkeypatch.setenv("CREEL_LOADER__EMBED", "false")
    assert each_rank(slow, tmp_path, lambda rank: by_sampler(slow, rank)) == [N, N, N, N]


def test_a_journal_outlives_the_daemon_by_which_the_ranks_share_it(
    slow: SlowFiles, tmp_path: Path, daemon: Running
) -> None:
    """It is killed in the first epoch, and another begins."""

    def read(rank: int) -> list[int]:
        torch.set_num_threads(1)
        ours, theirs = by_sampler(slow, rank)
        batches = iter(ours)
        got, opens = [next(batches)], []
        dist.barrier()
        with ExitStack() as stack:
            if not rank:
                daemon.signal(signal.SIGKILL)
                until(lambda: listener_at(first_address(daemon.name)) is None)
                stack.enter_context(Running(daemon.name, fresh=True))
            dist.barrier()
            assert same([*got, *batches], list(theirs))
            dist.barrier()
            for _ in range(3):
                before = slow.opens()
                dist.barrier()
                got = list(ours)
                dist.barrier()
                opens.append(slow.opens() - before)
                assert same(got, list(theirs))
                dist.barrier()
        return opens

    first, other = ranks(read, tmp_path)
    assert first == other == [N, 0, 0]


def test_a_journal_is_given_on_as_long_as_the_client_that_offered_it(daemon: Running) -> None:
    own = [new_journal() for _ in range(3)]

    def joint(client: Client, i: int) -> int:
        """Return the inode of the journal that a client gets."""
        given = Descriptor(client.join_journal("name", own[i].fd))
        return os.fstat(given.fd).st_ino

    inodes = [os.fstat(journal.fd).st_ino for journal in own]
    with daemon.client() as other:
        with daemon.client() as first:
            assert [joint(first, 0), joint(other, 1)] == [inodes[0]] * 2
            other.notify(WithdrawJournal("name"))  # not its own
            assert joint(other, 1) == inodes[0]
            # what a client offers is closed after the answer to it
            until(lambda: daemon.journals() == 1)
        until(lambda: daemon.journals() == 0)
        assert joint(other, 2) == inodes[2]
        other.notify(WithdrawJournal("name"))
        assert joint(other, 1) == inodes[1]


def test_a_journal_goes_with_the_dataset_that_is_recorded_there(
    slow: SlowFiles, daemon: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a daemon would keep its memory as long as the process trains, and refuse the ninth."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    for _ in range(9):
        dataset: Any = creel.wrap(OpaqueFiles(slow.folder, "npy"))
        _ = dataset[0]
        assert daemon.journals() == 1
        del dataset
        gc.collect()
        until(lambda: not daemon.journals())


@pytest.mark.usefixtures("daemon")
def test_ranks_count_their_datasets_alike_also_while_no_daemon_answers(
    slow: SlowFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the first dataset of one rank would be the second of another."""
    dataset, config = OpaqueFiles(slow.folder, "npy"), Config.load()[0]

    def journals(*answers: bool) -> list[RanksJournal | None]:
        """Return those of a rank's datasets; `answers`: whether a daemon answers then."""
        monkeypatch.setattr(recording, "_begun", Counter())
        journals_of_rank = []
        for running in answers:
            with monkeypatch.context() as patch:
                if not running:
                    patch.setattr(recording, "client_of", lambda _: None)
                journals_of_rank.append(recording.journal_of_ranks(dataset, config, AS_IT_IS))
        return journals_of_rank

    first, other = journals(False, True), journals(True, True)
    inodes = [
        journal and os.fstat(journal.place.file.descriptor.fd).st_ino for journal in first + other
    ]
    assert inodes[0] is None
    assert inodes[1] == inodes[3] != inodes[2]


def test_a_rank_asks_seldom_whether_a_daemon_answers(
    slow: SlowFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A question takes as long as many short reads."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    asked = mock.Mock(return_value=True)
    monkeypatch.setattr(wrapped_reads, "startable", asked)
    monkeypatch.setattr(wrapped_reads, "daemon_starting", lambda _: True)
    dataset: Any = creel.wrap(OpaqueFiles(slow.folder, "npy"))
    began = time.monotonic()
    for _ in range(100):
        _ = dataset[0]
    assert 1 <= asked.call_count <= 1 + (time.monotonic() - began) / 0.1


@pytest.mark.usefixtures("daemon")
def test_a_rank_that_cannot_meet_the_others_records_no_longer(
    slow: SlowFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its journal would grow as long as it trains."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    files = OpaqueFiles(slow.folder, "npy")
    recorder = AccessRecorder(files, seals=False)
    monkeypatch.setattr(wrapped_reads, "recorder_on", mock.Mock(side_effect=[recorder, None]))
    dataset: Any = creel.wrap(files)
    with mock.patch.object(wrapped_reads, "_none_answers", return_value=True):
        _ = dataset[0]
    assert not recorder.place.empty
    until(lambda: dataset[1] is not None and recorder.over)


@pytest.mark.usefixtures("daemon")
def test_a_rank_waits_for_the_others_once(slow: SlowFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here no other one ever comes."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    sleep = time.sleep
    waits: list[int] = []  # in each epoch

    def counted(seconds: float) -> None:
        if seconds == wrapped_reads._LOOK_S:
            waits[-1] += 1
        sleep(seconds)

    monkeypatch.setattr(time, "sleep", counted)
    loader: Any = creel.DataLoader(
        creel.wrap(OpaqueFiles(slow.folder, "npy")),
        4,
        sampler=DistributedSampler(range(N), 4, 0),  # type: ignore[arg-type]  # it has a length
        num_workers=1,
        persistent_workers=True,
    )
    later = Later(loader, pytest.MonkeyPatch())
    for epoch in (later, loader, loader, loader, loader):
        waits.append(0)
        for _ in epoch:
            pass
    assert sum(map(bool, waits)) <= 1  # in the second epoch; not if the machine is too busy


def test_a_client_that_offers_something_else_loses_its_connection(
    daemon: Running, tmp_path: Path
) -> None:
    own, file = new_journal(), (tmp_path / "file").open("w+b")
    for name, fd in (("file", file.fileno()), ("n" * 65, own.fd)):
        with daemon.client() as client, pytest.raises(UnavailableError):
            client.join_journal(name, fd)
    until(lambda: daemon.journals() == 0)
    file.close()


def test_a_daemon_that_can_open_little_more_keeps_its_clients(daemon: Running) -> None:
    own = new_journal()
    with daemon.client() as client:
        taken = {int(number) for number, _ in descriptors(daemon.pid, eventfds=True)}
        free = (number for number in count() if number not in taken)
        limit = [next(free), next(free)][1]  # below it is one number
        _, hard = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (limit, hard))

        def joined(name: str) -> bool:
            try:
                Descriptor(client.join_journal(name, own.fd))
            except UnavailableError:
                assert client.alive
                return False
            return True

        until(lambda: joined("first"))  # a daemon opens files for a moment
        assert [joined(name) for name in ("second", "third", "fourth")][-1] is False


@pytest.mark.usefixtures("daemon")
def test_ranks_whose_datasets_differ_learn_for_themselves(slow: SlowFiles, tmp_path: Path) -> None:
    def loaders(rank: int) -> tuple[Any, Any]:
        ours, theirs = Hidden(slow.fs.mountpoint, rank), Hidden(slow.folder, rank)
        return creel.DataLoader(creel.wrap(ours), 4), DataLoader(theirs, 4)

    opens = each_rank(slow, tmp_path, loaders)
    assert opens[0] == N
    assert opens[-1] == 0
