"""What a training process says: mistakes with samplers, the rank of a line, where lines go."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, Sampler

import creel
from creel.errors import ConfigError, CreelError, SourceError
from creel.loader.line.observers import advice
from creel.settings import FetchSettings
from kit import forget_stores


@pytest.fixture(autouse=True)
def _nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advice, "_said", set())


def dealt(*, shuffle: bool = True) -> DistributedSampler[int]:
    return DistributedSampler(range(12), 3, 0, shuffle=shuffle)  # type: ignore[arg-type]


def loader_of(sampler: Sampler[int]) -> creel.DataLoader[torch.Tensor]:
    numbers = list(range(12))
    return creel.DataLoader(numbers, 2, sampler=sampler, creel=False)  # type: ignore[arg-type]


def test_a_forgotten_set_epoch_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    loader = loader_of(dealt())
    for _ in range(4):
        list(loader)
    (said,) = caplog.messages
    assert "same order" in said
    assert "loader.set_epoch(epoch)" in said


def test_loaders_whose_epoch_is_set_or_that_need_no_order_are_told_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loader = loader_of(dealt())
    for epoch in range(3):
        loader.set_epoch(epoch)
        list(loader)
    for sampler in (dealt(shuffle=False), RandomSampler(range(12))):
        loader = loader_of(sampler)
        for _ in range(3):
            list(loader)
    assert caplog.messages == []


def test_a_look_at_a_batch_first_is_told_nothing(caplog: pytest.LogCaptureFixture) -> None:
    loader = loader_of(dealt())
    next(iter(loader))
    list(loader)
    assert caplog.messages == []


def test_a_resumed_epoch_is_no_repetition(caplog: pytest.LogCaptureFixture) -> None:
    loader = loader_of(dealt())
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    list(batches)
    loader.load_state_dict(state)
    list(loader)
    assert caplog.messages == []


class Shard(BatchSampler):
    """Deals batches to processes, as accelerate's BatchSamplerShard."""

    def __init__(self, batch_sampler: BatchSampler, num_processes: int) -> None:
        self.batch_sampler, self.num_processes = batch_sampler, num_processes

    def __iter__(self) -> Iterator[list[int]]:
        return (batch for i, batch in enumerate(self.batch_sampler) if i % self.num_processes == 0)

    def __len__(self) -> int:
        return (len(self.batch_sampler) + self.num_processes - 1) // self.num_processes


def test_two_samplers_that_deal_are_said(caplog: pytest.LogCaptureFixture) -> None:
    for ranks, said in ((1, 0), (3, 1)):
        sharded = Shard(BatchSampler(dealt(), 2, drop_last=False), ranks)
        list(creel.DataLoader(range(12), batch_sampler=sharded, creel=False))  # type: ignore[arg-type]
        assert len(caplog.messages) == said
    assert caplog.messages[0].startswith("Shard and DistributedSampler both deal")


def test_a_sampler_over_a_sampler_that_deals_is_said(caplog: pytest.LogCaptureFixture) -> None:
    inner: DistributedSampler[int] = DistributedSampler(range(12), 2, 0)  # type: ignore[arg-type]
    outer: DistributedSampler[int] = DistributedSampler(inner, 2, 0)  # type: ignore[arg-type]
    loader = creel.DataLoader(range(12), 2, sampler=outer, creel=False)  # type: ignore[arg-type,var-annotated]
    iter(loader)
    assert caplog.messages[0].startswith("DistributedSampler and DistributedSampler both deal")


def _said(code: str, **env: str) -> list[str]:
    """Return the lines on standard error of a program that logs by creel's logger."""
    begin = "import logging, creel.loader; log = logging.getLogger('creel.loader'); "
    done = subprocess.run(
        [sys.executable, "-c", begin + code],
        env={"PATH": "/usr/bin:/bin", **env},
        check=True,
        capture_output=True,
        text=True,
        timeout=110,
    )
    return done.stderr.splitlines()


def test_warnings_are_seen_without_set_up_once_and_by_a_programs_logging_once() -> None:
    logs = "log.info('b'); log.warning('a %d', 7)"
    assert _said(logs) == ["a 7"]
    assert _said(f"logging.basicConfig(format='<%(message)s>'); {logs}") == ["<a 7>"]
    assert _said(f"logging.getLogger('creel').setLevel('ERROR'); {logs}") == []
    assert _said(f"logging.lastResort = None; {logs}") == [], "no line of logging about itself"


def test_each_line_of_a_rank_names_it() -> None:
    logs = "log.warning('a %d', 7)"
    assert _said(logs, RANK="3", WORLD_SIZE="8") == ["[rank 3] a 7"]
    own = f"logging.basicConfig(format='<%(message)s>'); {logs}"
    assert _said(own, PMI_RANK="1", PMI_SIZE="2") == ["<[rank 1] a 7>"]
    assert _said(logs, RANK="0", WORLD_SIZE="1") == ["a 7"]


def test_creel_has_a_handler_as_a_library_should() -> None:
    creel.DataLoader  # noqa: B018  imports creel.loader
    assert any(isinstance(h, logging.NullHandler) for h in logging.getLogger("creel").handlers)


def test_a_class_in_place_of_a_dataset_and_a_list_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"not its class: creel\.wrap\(Shard\(\.\.\.\)\)"):
        creel.wrap(Shard)
    with pytest.raises(ConfigError, match="cannot stand in for a list"):
        creel.wrap([1, 2])


def test_an_error_without_a_number_shows_none() -> None:
    assert str(SourceError(0, "needs aiohttp", "http://h/x")) == "needs aiohttp: 'http://h/x'"
    assert str(SourceError(5, "io", "x")) == "[Errno 5] io: 'x'"
    assert str(SourceError("told")) == "told"


@pytest.mark.parametrize("absent", ["aiohttp", "fsspec"])
def test_http_without_its_packages_names_them_and_the_extra(
    absent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, absent, None)
    with pytest.raises(SourceError) as raised:
        creel.read(f"http://127.0.0.1:9/without-{absent}")
    assert f"http:// needs {absent}: pip install 'creel-data[http]'" in str(raised.value)
    assert str(raised.value).count("without-") == 1
    assert "Errno" not in str(raised.value)
    with pytest.raises(ConfigError, match=f"http:// needs {absent}: pip install"):
        creel.FileDataset(["http://127.0.0.1:9/never-read"])


_KEYS = {"endpoint_url": "http://127.0.0.1:1", "key": "k", "secret": "s"}


@pytest.mark.parametrize(
    "reading",
    [
        lambda: creel.read("http://127.0.0.1:1/a"),
        lambda: creel.FileDataset("http://127.0.0.1:1/a"),
        lambda: creel.FileDataset(["http://127.0.0.1:1/a"])[0],
        lambda: creel.read("s3://bucket/a", storage_options=_KEYS),
        lambda: creel.ImageFolder("s3://bucket/a", storage_options=_KEYS),
        lambda: creel.FileDataset(["/nowhere/a"])[0],
        lambda: creel.read("nothing-has-this://a/b"),
    ],
)
def test_an_error_of_storage_stands_alone(
    reading: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not below a hundred lines of the client's own frames."""
    forget_stores(monkeypatch, FetchSettings(attempts=1))
    with pytest.raises(CreelError) as raised:
        reading()
    shown = "".join(traceback.format_exception(raised.value))
    assert shown.count("Traceback (most recent call last)") == 1


def test_an_option_by_another_name_is_told_the_documented_one() -> None:
    with pytest.raises(SourceError, match="did you mean 'endpoint_url'") as raised:
        creel.read("s3://bucket/a", storage_options={"endpoint": "http://127.0.0.1:1"})
    page = (Path(__file__).parents[3] / "docs/s3.md").read_text()
    names = re.search(r"names are fsspec's \((.*), \.\.\.\)", page)
    assert names is not None
    assert all(name in str(raised.value) for name in re.findall(r"`(\w+)`", names[1]))


def test_settings_are_not_taken_for_a_daemons_name() -> None:
    with pytest.raises(ConfigError, match=r"creel=\{'memory.budget': '1GiB'\}"):
        creel.DataLoader([1], creel="memory.budget=1GiB")  # type: ignore[arg-type]
