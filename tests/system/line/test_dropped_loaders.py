"""Nothing that a loader holds waits for Python's cyclic collector once it is dropped."""

import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

import creel
from creel.loader.line.batches import epoch_run
from creel.loader.line.batches.state import LoaderState
from kit import descriptors, until

pytestmark = [pytest.mark.timeout(100), pytest.mark.usefixtures("served")]
N, NBYTES = 32, 80_000


class Files(Dataset[torch.Tensor]):
    def __init__(self, paths: list[Path], bad: int = -1) -> None:
        self.paths = paths
        self.bad = bad

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> torch.Tensor:
        if i == self.bad:
            raise ValueError("a bad sample")
        return torch.frombuffer(bytearray(self.paths[i].read_bytes()), dtype=torch.uint8)


def dataset(kind: str, paths: list[Path]) -> Any:
    if kind in {"own", "bad"}:
        return Files(paths, bad=13 if kind == "bad" else -1)
    if kind == "wrap":
        return creel.wrap(Files(paths))
    if kind == "files":
        return creel.FileDataset(paths)
    return creel.RecordDataset(paths, torch.uint8, NBYTES)


def mapped() -> int:
    """Return the number of mappings that carry batches."""
    return Path("/proc/self/maps").read_text().count("creel-slot")


def memfds(descriptors: frozenset[tuple[str, str]]) -> list[str]:
    """Return the memfds among descriptors, without the arena: the process stays connected."""
    return [name for _, name in descriptors if "memfd:" in name and "creel-arena" not in name]


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def gone(seen: list[weakref.ref[Any]]) -> bool:
    return all(ref() is None for ref in seen)


def use(loader: Any, way: str, seen: list[weakref.ref[Any]]) -> None:
    """Iterate, leave in this way, and note what must be gone afterwards."""

    def begin() -> Any:
        it = iter(loader)
        parts = (getattr(it, name, None) for name in ("_place", "_run"))
        seen.extend(weakref.ref(x) for x in (it, loader, loader._creel_state, *parts) if x)
        return it

    if way == "whole":
        for _ in range(2):
            list(begin())
    elif way == "break":
        for _, _ in zip(begin(), range(2), strict=False):
            pass
    elif way == "two":
        first, second = begin(), begin()
        assert len(next(first)) == len(next(second))
    elif way == "raise":
        it = begin()
        next(it)
        raise ValueError("in the training step")
    else:
        next(begin())
        loader.load_state_dict(loader.state_dict())
        list(begin())
        loader.state_dict()


@pytest.mark.parametrize(
    "kind, options",
    [
        *((kind, {}) for kind in ("own", "bad", "wrap", "files", "records")),
        *((kind, {"num_workers": 1}) for kind in ("bad", "files")),
        *((kind, {"num_workers": 1, "persistent": 1}) for kind in ("wrap", "records")),
    ],
)
def test_all_is_freed_with_the_loader(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    paths = [tmp_path / str(i) for i in range(N)]
    for i, path in enumerate(paths):
        path.write_bytes(bytes([i]) * NBYTES)
    given = {"num_workers": options.get("num_workers", 0)}
    given["persistent_workers"] = bool(options.get("persistent"))
    list(creel.DataLoader(dataset(kind.replace("bad", "own"), paths), 4, **given))  # connects
    before, maps = descriptors(), mapped()
    for way in ("whole", "break", "two", "raise", "state"):
        seen: list[weakref.ref[Any]] = []
        loader = creel.DataLoader(dataset(kind, paths), 4, shuffle=True, **given)
        with suppress(ValueError):
            use(loader, way, seen)
        del loader
        until(partial(gone, seen))  # a search may be under way
        assert mapped() == maps, way
    until(lambda: not memfds(descriptors() - before))


def open_later(gate: threading.Event) -> None:
    """Find no daemon, but only once the gate is open."""
    gate.wait(60)


def test_many_loaders_look_for_the_daemon_in_one_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their files are in the page cache, so that they need it for their statistics alone."""
    gate = threading.Event()
    monkeypatch.setattr(epoch_run, "COUNT_S", 0)
    monkeypatch.setattr("creel.loader.data.binding.bind.in_page_cache", lambda _: True)
    monkeypatch.setattr(LoaderState, "open", lambda *_: open_later(gate))
    paths = [tmp_path / str(i) for i in range(8)]
    for path in paths:
        path.write_bytes(b"a" * 100)
    auto: Any = {"loader.direct": "auto"}
    data = creel.FileDataset(paths, decode=len)
    loaders = [creel.DataLoader(data, 4, creel=auto) for _ in range(40)]
    most = 0
    for loader in loaders * 2:
        assert len(list(loader)) == 2
        most = max(most, [t.name for t in threading.enumerate()].count("creel-reattach"))
    assert most == 1
    gate.set()
    until(lambda: "creel-reattach" not in {t.name for t in threading.enumerate()})
