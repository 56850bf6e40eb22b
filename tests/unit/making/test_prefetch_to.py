"""`creel.prefetch_to`: what moves to a device, what is ahead, and what it leaves to the loader."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import creel
from creel.loader.making.transport.prefetch_to import OneAhead, moved
from creel.loader.torch_private import pin_memory

META = torch.device("meta")  # has no data: what is there was moved

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
on_cuda = pytest.param("cuda", marks=[pytest.mark.gpu, needs_cuda])


class Pair(NamedTuple):
    x: Any
    to: Any  # a field, not a method


class Graph:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def to(self, device: torch.device) -> Graph:
        return Graph(self.x.to(device))


class Named(dict[str, Any]):
    name = ""


class Fixed(list[Any]):
    def __setitem__(self, *_: Any) -> None:
        raise TypeError


# --- what moves ---------------------------------------------------------------------------------


def test_every_tensor_moves_and_containers_keep_their_types() -> None:
    x = torch.arange(3)
    named = Named(x=x)
    named.name = "kept"
    batch = {
        "pair": Pair([x, "text"], (x, b"bytes", 7)),
        "ordered": OrderedDict(b=x, a=None),
        "fixed": MappingProxyType({"x": x}),
        "own": Graph(x),
        "packed": pack_sequence([x]),
        "named": named,
        "no copy": Fixed([x]),
        "range": range(3),
    }
    batch_moved = moved(batch, META)
    assert batch_moved["pair"].x[0].device == batch_moved["pair"].to[0].device == META
    assert batch_moved["pair"].x[1:] == ["text"]
    assert batch_moved["pair"].to[1:] == (b"bytes", 7)
    assert type(batch_moved["ordered"]) is OrderedDict
    assert list(batch_moved["ordered"]) == ["b", "a"]
    assert type(batch_moved["fixed"]) is MappingProxyType
    assert batch_moved["own"].x.device == batch_moved["packed"].data.device == META
    assert (type(batch_moved["named"]), batch_moved["named"].name) == (Named, "kept")
    assert batch_moved["named"]["x"].device == batch_moved["no copy"][0].device == META
    assert batch_moved["range"] == [0, 1, 2]
    assert batch["named"] is named  # what the loader made is as it was
    assert named["x"].device.type == "cpu"


def test_containers_are_those_of_torchs_pin_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """In its place here: `pin_memory()` of a tensor moves it."""
    x = torch.arange(3)
    batch = {
        "default": defaultdict(list, x=[x]),
        "deque": deque([x, "text"], maxlen=2),
        "nested": ((x,), [Pair(x, 1)], {"x": {"x": x}}),
        "fixed": MappingProxyType({"x": x}),
        "no copy": Fixed([x, 1]),
        "range": range(2),
        "set": {1},
        "array": np.arange(2),
    }
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor.to(META))
    expected: Any = pin_memory(batch)  # type: ignore[no-untyped-call]  # torch's
    assert str(moved(batch, META)) == str(expected)


# --- on the CPU ---------------------------------------------------------------------------------


def loader(**options: Any) -> Any:
    return creel.DataLoader(
        TensorDataset(torch.arange(20)), 4, shuffle=True, creel=False, **options
    )


def test_on_the_cpu_the_batches_are_the_loaders() -> None:
    source = loader()
    wrapped: Any = creel.prefetch_to("cpu", source)
    assert len(wrapped) == 5
    assert wrapped.dataset is source.dataset
    assert wrapped.loader is source
    for _ in range(2):  # epochs
        torch.manual_seed(3)
        expected = [batch[0].tolist() for batch in source]
        torch.manual_seed(3)
        read = []
        for (numbers,) in wrapped:
            read.append(numbers.tolist())
            assert wrapped.indices.tolist() == numbers.tolist()
            assert wrapped.state_dict()["batches"] == len(read)
        assert read == expected


def test_any_iterable_will_do_and_nothing_is_read_early() -> None:
    asked = []

    def batches() -> Iterator[torch.Tensor]:
        for i in range(3):
            asked.append(i)
            yield torch.tensor(i)

    batches_ahead = iter(creel.prefetch_to("cpu", batches()))
    assert asked == []
    assert [next(batches_ahead).item(), asked] == [0, [0]]
    assert [int(number) for number in batches_ahead] == [1, 2]
    with pytest.raises(TypeError):
        len(creel.prefetch_to("cpu", batches()))
    with pytest.raises(AttributeError, match="quux"):
        creel.prefetch_to("cpu", [1]).quux  # noqa: B018


# --- one batch ahead, as on CUDA, with a copy that ends when it is waited for -------------------


def ahead(wrapped: Any, log: list[str] | None = None) -> Iterator[Any]:
    """Begin an epoch of a `creel.prefetch_to` one batch ahead."""

    def copied(batch: Any) -> Callable[[], Any]:
        if log is not None:
            log.append(f"begin {batch}")
        return partial(finish, batch)

    def finish(batch: Any) -> Any:
        if log is not None:
            log.append(f"wait {batch}")
        return batch

    batches = iter(wrapped.loader)
    returned = getattr(wrapped.loader, "_creel_returned", SimpleNamespace(index=None))
    wrapped._batches = OneAhead(batches, copied, returned)
    return wrapped._batches  # type: ignore[no-any-return]


def test_the_next_copy_is_begun_before_a_batch_is_used_and_no_other() -> None:
    log: list[str] = []
    batches = ahead(creel.prefetch_to("cpu", ["a", "b", "c"]), log)
    log.extend(f"use {batch}" for batch in batches)
    assert log == [
        *("begin a", "begin b", "wait a", "use a"),
        *("begin c", "wait b", "use b"),
        *("wait c", "use c"),
    ]


def next_or_raised(batches: Iterator[torch.Tensor]) -> object:
    try:
        return next(batches).item()
    except ValueError:
        return "raised"


class Raising(Dataset[int]):
    def __len__(self) -> int:
        return 5

    def __getitem__(self, i: int) -> int:
        if i in {0, 2}:
            raise ValueError(i)
        return i


@pytest.mark.parametrize("device", ["cpu", on_cuda])
@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_a_batch_is_raised_in_its_turn_and_the_next_follow(
    workers: int, device: str
) -> None:
    source: Any = creel.DataLoader(Raising(), num_workers=workers, creel=False)
    wrapped = creel.prefetch_to(device, source)
    for batches in (iter(source), iter(wrapped), ahead(wrapped)):
        said = [next_or_raised(batches) for _ in range(5)]
        assert said == ["raised", 1, "raised", 3, 4]
        with pytest.raises(StopIteration):
            next(batches)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_state_counts_the_batches_that_were_used(workers: int) -> None:
    source = loader(num_workers=workers, generator=torch.Generator().manual_seed(5))
    wrapped: Any = creel.prefetch_to("cpu", source)
    used, states = [], [wrapped.state_dict()]
    for (numbers,) in ahead(wrapped):
        used.append(numbers.tolist())
        states.append(wrapped.state_dict())
        assert wrapped.indices.tolist() == source.indices.tolist() == used[-1]
    for at, state in enumerate(states):
        again: Any = creel.prefetch_to("cpu", loader(generator=torch.Generator().manual_seed(5)))
        again.load_state_dict(state)
        assert again.state_dict() == state
        assert [numbers.tolist() for (numbers,) in ahead(again)] == used[at:]
    assert wrapped.state_dict()["finished"]  # as the loader's at the end of an epoch


def test_an_epoch_that_was_left_early_is_no_part_of_the_next() -> None:
    wrapped: Any = creel.prefetch_to("cpu", loader())
    next(ahead(wrapped))
    assert wrapped.state_dict()["batches"] == 1
    numbers_read = [int(number) for (batch,) in ahead(wrapped) for number in batch]
    assert sorted(numbers_read) == list(range(20))


def test_an_interrupt_while_the_next_batch_comes_loses_none() -> None:
    class Interrupted:
        def __init__(self) -> None:
            self.at = -1

        def __iter__(self) -> Iterator[int]:
            return self

        def __next__(self) -> int:
            self.at += 1
            if self.at == 1:
                raise KeyboardInterrupt
            if self.at == 4:
                raise StopIteration
            return self.at

    batches = ahead(creel.prefetch_to("cpu", Interrupted()))
    with pytest.raises(KeyboardInterrupt):
        next(batches)
    assert list(batches) == [0, 2, 3]


# --- on CUDA ------------------------------------------------------------------------------------


class Large(Dataset[Any]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"x": torch.full((1 << 20,), float(i)), "pair": Pair(torch.tensor(i), "text")}


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("pin", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_on_cuda_batches_are_torchs_while_steps_are_late(workers: int, pin: bool) -> None:
    """The device is kept busy, and batches are dropped before the step that reads them began."""
    source: Any = creel.DataLoader(Large(), 4, num_workers=workers, pin_memory=pin, creel=False)
    sums = []
    for _ in range(3):
        for batch in creel.prefetch_to("cuda", source):
            torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]
            sums.append(torch.stack([batch["x"].double().sum(1), batch["pair"].x.double()]))
            assert batch["x"].device.type == "cuda"
            del batch
    torch.cuda.synchronize()
    numbers = torch.arange(40.0, dtype=torch.float64).view(10, 4)
    expected = [torch.stack([number * (1 << 20), number]) for _ in range(3) for number in numbers]
    assert all(torch.equal(a.cpu(), b) for a, b in zip(sums, expected, strict=True))


@pytest.mark.gpu
@needs_cuda
def test_on_cuda_a_copy_does_not_wait_for_the_step_it_is_ahead_of() -> None:
    batches = iter(creel.prefetch_to("cuda", [torch.ones(8).pin_memory() for _ in range(3)]))
    next(batches).sum().item()  # CUDA loads this kernel now: that waits for the device
    torch.cuda._sleep(2_000_000_000)  # type: ignore[no-untyped-call]
    step: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    step.record()
    held = batches.held  # type: ignore[attr-defined]
    other: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(other):
        assert held[0]().sum().item() == 8  # was copied before, on a stream of its own
    assert not step.query()


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(6))


def test_an_iterable_dataset_has_no_numbers_and_its_batches_come_all_the_same() -> None:
    wrapped: Any = creel.prefetch_to("cpu", creel.DataLoader(Endless(), 2))
    for begun in (iter, ahead):
        assert [batch.tolist() for batch in begun(wrapped)] == [[0, 1], [2, 3], [4, 5]]
