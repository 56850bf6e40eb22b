"""Batches that stay in their workers' slots until a device has copied them.

The device here copies as late as a busy one may, and out of memory that nobody else holds.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

import creel
from creel.cache.memory.buffers import address_of
from creel.loader.making.transport import prefetch_to
from creel.loader.making.transport.pinning import Lender, PageLock, Pinning, is_plain
from creel.loader.making.transport.prefetch_to import Copies, OnDevice

pytestmark = pytest.mark.timeout(120)

SAMPLES, BATCH, WIDTH = 240, 4, 40_000  # 160 KB a sample: each batch has slots of its own


class LateDevice:
    """Copies batches that were begun when somebody waits, or `behind` further ones were begun.

    Attributes:
        locked: (address, bytes) of memory that is locked for it.
        copied: bytes that it copied out of such memory, and out of other memory.
    """

    def __init__(self, behind: int) -> None:
        self._behind = behind
        self._queue: deque[LateCopy] = deque()
        self._begun: LateCopy | None = None
        self.locked: set[tuple[int, int]] = set()
        self.copied = {"locked": 0, "other": 0}

    # --- as torch.cuda.Stream -------------------------------------------------------------------

    device = torch.device("cpu")

    def wait_stream(self, _: object) -> None:
        self._begun = LateCopy(self)

    def wait_event(self, event: LateCopy) -> None:
        """Let the current stream wait, but not the caller."""

    def record_event(self) -> LateCopy:
        begun, self._begun = self._begun, None
        assert begun is not None
        self._queue.append(begun)
        while len(self._queue) > self._behind:
            self._queue.popleft().end()
        return begun

    def forget(self) -> None:
        """Forget all copies, before the next test forks."""
        self._queue.clear()

    # --- in place of `moved`, and of what locks memory ------------------------------------------

    def moved(self, data: Any, device: torch.device) -> Any:
        if isinstance(data, dict):
            return {key: self.moved(part, device) for key, part in data.items()}
        if not isinstance(data, torch.Tensor):
            return data
        assert self._begun is not None
        out = torch.full_like(data, -1)
        first, nbytes = data.data_ptr(), data.nbytes
        if any(at <= first and first + nbytes <= at + most for at, most in self.locked):
            self.copied["locked"] += nbytes
            self._begun.parts.append((out, first))
        else:
            self.copied["other"] += nbytes
            out.copy_(data)
        return out

    def lock(self, mapping: mmap.mmap) -> object:
        return LateLock(self, (address_of(mapping), len(mapping)))


class LateCopy:
    """One batch, as torch.cuda.Event: that one's end in a forked child ends the child."""

    def __init__(self, device: LateDevice) -> None:
        self.device, self._pid = device, os.getpid()
        self.parts: list[tuple[torch.Tensor, int]] = []
        self.ended = False

    def end(self) -> None:
        for out, address in self.parts:
            ctypes.memmove(out.data_ptr(), address, out.nbytes)
        self.ended = True

    def __del__(self) -> None:
        if os.getpid() != self._pid:
            os.abort()

    def query(self) -> bool:
        return self.ended

    def synchronize(self) -> None:
        while not self.ended:
            self.device._queue.popleft().end()


class LateLock:
    def __init__(self, device: LateDevice, memory: tuple[int, int]) -> None:
        self.device, self.memory = device, memory
        device.locked.add(memory)

    def __del__(self) -> None:
        self.device.locked.remove(self.memory)


@pytest.fixture(params=[1, 3])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[LateDevice]:
    """A device that copies a batch when so many others were begun, and torch's functions of it."""
    gpu = LateDevice(request.param)

    class ForDevice(Pinning):
        def use_device(self) -> None:
            pass

        def pin(self, data: Any) -> Any:
            return data

        def lock(self, mapping: mmap.mmap) -> object:
            return gpu.lock(mapping)

        def for_cuda(self) -> bool:
            return True

    monkeypatch.setattr(Pinning, "of", lambda _: ForDevice(None, 0))
    monkeypatch.setattr("creel.loader.making.places.pinner.empty_pinned", torch.empty)
    monkeypatch.setattr(prefetch_to, "moved", gpu.moved)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: gpu)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    yield gpu
    gpu.forget()


class Rows(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> Any:
        return {"x": torch.full((WIDTH,), float(i)), "number": i}


def with_array(samples: list[Any]) -> dict[str, Any]:
    """Return a batch that is not plain: an array in it may be kept."""
    x = torch.stack([sample["x"] for sample in samples])
    return {
        "x": x,
        "number": torch.tensor([sample["number"] for sample in samples]),
        "array": np.ones(9),
    }


def on_late(loader: Any, device: LateDevice) -> Iterator[Any]:
    """Begin an epoch of `prefetch_to` on the device."""
    wrapped: OnDevice[Any] = creel.prefetch_to("cpu", loader)
    wrapped.device, wrapped._copies = SimpleNamespace(type="cuda"), Copies(device)  # type: ignore[assignment, arg-type]
    return iter(wrapped)


def loader_of(collate: Callable[[list[Any]], Any] | None = None, **options: Any) -> Any:
    slots = {"loader.slots": 2}
    order = torch.Generator().manual_seed(7)
    options = {"num_workers": 2, "creel": slots, **options}
    return creel.DataLoader(
        Rows(), BATCH, shuffle=True, collate_fn=collate, generator=order, **options
    )


def check(batches: list[Any]) -> None:
    numbers = torch.cat([batch["number"] for batch in batches])
    assert sorted(numbers.tolist()) == list(range(SAMPLES))
    for batch in batches:
        assert torch.equal(batch["x"], batch["number"].float()[:, None].expand(-1, WIDTH))


@pytest.mark.usefixtures("embedded")
@pytest.mark.parametrize("workers, persistent", [("own", True), ("shared", False)])
def test_a_slot_is_not_written_before_its_batch_is_copied(
    device: LateDevice, workers: str, persistent: bool
) -> None:
    loader = loader_of(workers=workers, persistent_workers=persistent)
    for _ in range(2):
        epoch = on_late(loader, device)
        batches = list(epoch)
        del epoch  # waits for the last copies
        check(batches)
    if workers == "own":  # others may cut every batch: their joined parts are not lent
        assert device.copied["locked"] > 0
    del loader, batches
    assert not device.locked


@pytest.mark.usefixtures("embedded")
def test_an_epoch_that_is_left_early_waits_for_its_copies(device: LateDevice) -> None:
    loader = loader_of(persistent_workers=True)
    epoch = on_late(loader, device)
    batches = [next(epoch) for _ in range(3)]
    del epoch
    list(loader)  # writes all slots
    for batch in batches:
        assert torch.equal(batch["x"][:, 0], batch["number"].float())


@pytest.mark.usefixtures("embedded")
def test_batches_of_a_plain_loop_are_in_no_locked_memory(device: LateDevice) -> None:
    """`pin` would not copy them, and nobody knows when they are copied."""
    loader = loader_of(persistent_workers=True)
    list(on_late(loader, device))
    for batch in loader:
        first = batch["x"].data_ptr()
        assert not any(at <= first < at + nbytes for at, nbytes in device.locked)


@pytest.mark.usefixtures("embedded")
def test_batches_that_are_not_plain_are_not_lent(device: LateDevice) -> None:
    check(list(on_late(loader_of(with_array), device)))
    assert device.copied["locked"] == 0
    assert not device.locked


@pytest.mark.usefixtures("embedded")
def test_memory_that_cannot_be_locked_is_not_lent(
    device: LateDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(_: mmap.mmap) -> object:
        raise RuntimeError("none is left")

    monkeypatch.setattr(device, "lock", none)
    check(list(on_late(loader_of(), device)))
    assert device.copied["locked"] == 0


class OfParent:
    """As torch.cuda.Event, of whose end in a forked child the child dies."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    def synchronize(self) -> None:
        if os.getpid() != self._pid:
            os._exit(3)

    def __del__(self) -> None:
        if os.getpid() != self._pid:
            os._exit(4)


@pytest.mark.usefixtures("device")
def test_a_forked_child_neither_awaits_nor_ends_its_parents_copies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefetch_to, "moved", lambda data, _: data)
    stream: Any = SimpleNamespace(device=0, wait_stream=lambda _: None, record_event=OfParent)
    lender = Lender()
    lender._lent = ["memory"]
    copies = Copies(stream)
    finish = copies.begin("batch", lender)
    pid = os.fork()
    if pid == 0:
        del copies, finish
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


# --- on CUDA ------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.usefixtures("embedded")
@pytest.mark.parametrize("workers", ["own", "shared"])
@pytest.mark.parametrize("persistent", [False, True])
def test_on_cuda_a_slot_is_not_written_before_its_batch_is_copied(
    workers: str, persistent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device is kept so busy that the copies are many batches late."""
    lock, sizes = PageLock.__init__, []

    def counted(self: PageLock, address: int, nbytes: int, device: int) -> None:
        lock(self, address, nbytes, device)
        sizes.append(nbytes)

    monkeypatch.setattr(PageLock, "__init__", counted)
    loader = loader_of(workers=workers, persistent_workers=persistent, pin_memory=True)
    late = 0
    for _ in range(4):
        wrapped: Any = creel.prefetch_to("cuda", loader)
        batches = []
        for batch in wrapped:
            torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]
            batches.append(batch)
            late = max(late, len(wrapped._copies._pending))
        torch.cuda.synchronize()
        check([{name: part.cpu() for name, part in batch.items()} for batch in batches])
    if workers == "own":
        assert late > 1
        assert sizes
    for batch in loader:  # a plain loop again
        assert batch["x"].is_pinned()
    check([{k: v.to("cuda", non_blocking=True).cpu() for k, v in b.items()} for b in loader])


@pytest.mark.usefixtures("embedded")
def test_batches_are_joined_where_no_pinned_memory_is_left(
    device: LateDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    none = mock.Mock(side_effect=RuntimeError("none is left"))
    monkeypatch.setattr("creel.loader.making.places.pinner.empty_pinned", none)
    check(list(on_late(loader_of(workers="shared"), device)))
    assert none.called


def test_plain_batches_are_tensors_and_simple_values_in_simple_containers() -> None:
    class Table(dict[str, Any]):
        pass

    class Pair(NamedTuple):
        x: torch.Tensor
        y: float

    x = torch.zeros(2)
    assert is_plain({"a": [x, (1, "b", None)], "pair": Pair(x, 0.5)})
    for other in (np.zeros(2), torch.nn.Parameter(x), Table(x=x), x.untyped_storage(), {1, 2}):
        assert not is_plain([x, other])


def test_cuda_locks_and_unlocks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []

    class Runtime:
        def cudaHostRegister(self, *given: int) -> int:  # noqa: N802  CUDA's
            calls.append(given)
            return 0 if given[0] != 13 else 2

        def cudaHostUnregister(self, *given: int) -> int:  # noqa: N802  CUDA's
            calls.append(given)
            return 0

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    lock = PageLock(4096, 10, device=1)
    del lock
    assert calls == [(4096, 10, 1), (4096,)]
    call = mock.Mock(side_effect=RuntimeError("the last error"))
    monkeypatch.setattr(torch, "zeros", call)
    with pytest.raises(RuntimeError, match="lock 10 bytes: error 2"):
        PageLock(13, 10, device=1)
    assert calls[2:] == [(13, 10, 1)]
    call.assert_called_once()  # CUDA tells it once, and nobody else
