"""Batches that a worker collates straight into slots, against default_collate."""

from __future__ import annotations

import collections
import gc
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import pytest
import torch
from packing_rig import Bag, Custom, Point, Road, Sub, outcome, same, theirs
from torch.utils.data import _utils, default_collate
from torch.utils.data._utils import collate as torch_collate
from torch.utils.data._utils.worker import WorkerInfo

from creel.loader.making.transport.packing import slot_collate
from creel.loader.making.transport.unpacking import discard

pytestmark = pytest.mark.timeout(180)


class Frozen(Mapping[str, Any]):
    """A mapping that cannot be copied and updated."""

    def __init__(self, inner: Any) -> None:
        self._inner = dict(inner)

    def __getitem__(self, key: str) -> Any:
        return self._inner[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._inner)

    def __len__(self) -> int:
        return len(self._inner)


COLLATABLE: dict[str, Any] = {
    "tensors": [torch.rand(30, 300) for _ in range(4)],
    "small": [torch.rand(3) for _ in range(4)],
    "scalars": [torch.tensor(i) for i in range(4)],
    "empty": [torch.empty(0, 3) for _ in range(4)],
    "pairs": [(torch.rand(3000), i) for i in range(4)],
    "lists": [[np.random.default_rng(i).random(3000), i / 2] for i in range(4)],
    "dicts": [{"a": torch.ones(5000) * i, "b": "s", "c": b"x"} for i in range(4)],
    "bags": [Bag(a=torch.ones(5000) * i, b=np.float32(i)) for i in range(4)],
    "ordered": [collections.OrderedDict(z=i, a=torch.ones(9000)) for i in range(4)],
    "frozen": [Frozen({"a": torch.ones(9000)}) for i in range(4)],
    "proxies": [types.MappingProxyType({"a": torch.ones(9000)}) for _ in range(4)],
    "namedtuples": [Point(torch.ones(9000) * i, [i, 1]) for i in range(4)],
    "strings": ["a", "b"],
    "ranges": [range(3), range(3)],
    "numpy scalars": [np.int16(i) for i in range(4)],
    "numpy bools": [np.bool_(i % 2) for i in range(4)],
    "0-dim arrays": [np.array(i) for i in range(4)],
    "int8": [torch.ones(90_000, dtype=torch.int8)] * 3,
    "bool": [torch.ones(90_000, dtype=torch.bool)] * 3,
    "bfloat16": [torch.ones(90_000, dtype=torch.bfloat16)] * 3,
    "complex, conjugate": [torch.rand(9000, dtype=torch.complex64).conj() for _ in range(2)],
    "second conjugate": [torch.rand(9000, dtype=torch.complex64)] * 2
    + [torch.rand(9000, dtype=torch.complex64).conj()],
    "transposed": [torch.rand(90, 100).T for _ in range(3)],
    "channels last": [
        torch.rand(1, 3, 40, 40).to(memory_format=torch.channels_last)[0] for _ in range(3)
    ],
    "mixed precision": [torch.rand(9000), torch.rand(9000, dtype=torch.float64)],
    "mixed precision 2": [torch.rand(9000, dtype=torch.float64), torch.rand(9000)],
    "int first": [torch.ones(9000, dtype=torch.int32), torch.rand(9000)],
    "subclass first": [torch.rand(9000).as_subclass(Sub), torch.rand(9000)],
    "subclass later": [torch.rand(9000), torch.rand(9000).as_subclass(Sub)],
    "parameters": [torch.nn.Parameter(torch.rand(9000)) for _ in range(2)],
    "gradients": [torch.rand(9000, requires_grad=True) for _ in range(2)],
    "sizes differ": [torch.rand(9000), torch.rand(9001)],
    "sizes differ down": [torch.rand(9000), torch.rand(8000)],
    "dimensions differ": [torch.rand(90, 100), torch.rand(9000)],
    "sparse": [torch.eye(300).to_sparse()] * 2,
    "none": [None, None],
    "objects": [np.array([None])] * 2,
    "lists differ": [[1, 2], [1]],
    "keys differ": [{"a": 1}, {"b": 1}],
    "kinds differ": [torch.rand(9000), "a"],
    "nothing": [],
}


@pytest.fixture
def road() -> Iterator[Road]:
    road = Road()
    yield road
    road.reader.close()
    road.writer.close()


@pytest.fixture
def as_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process look like a worker, where torch's collate functions behave differently."""
    info = WorkerInfo(id=0, num_workers=1, seed=0, dataset=cast(Any, None))
    monkeypatch.setattr(_utils.worker, "_worker_info", info)


@pytest.mark.usefixtures("as_worker")
@pytest.mark.parametrize("name", COLLATABLE)
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
def test_slot_collate_is_default_collate(road: Road, name: str) -> None:
    batch = COLLATABLE[name]
    expected, error = outcome(default_collate, batch)
    if error is not None:
        _, ours = outcome(slot_collate, batch, road.writer)
        assert (type(ours), str(ours)) == (type(error), str(error))
        return
    for _ in range(2):
        collated = slot_collate(batch, road.writer)
        same(collated, expected)
        if name != "proxies":  # neither creel nor torch can pickle one
            same(road.trip(collated), theirs(expected))
        del collated


def test_collated_tensors_are_not_copied_again(road: Road) -> None:
    for _ in range(2):
        collated = slot_collate([(torch.rand(50_000), i) for i in range(4)], road.writer)
        packed = road.send(collated)
        ((slot, _),) = packed.slots
        collated[0].fill_(7)  # type: ignore[index]
        there = np.frombuffer(road.reader.view(slot), np.float32)
        assert np.count_nonzero(there == 7) == 200_000
        discard(packed, road.reader)
        road.writer.give_back(road.reader.returned())


@pytest.fixture
def collate_fns() -> Iterator[dict[Any, Any]]:
    """torch's map, to be changed; restored in its order, by which workers see new entries."""
    table = torch_collate.default_collate_fn_map
    before = dict(table)
    yield table
    table.clear()
    table.update(before)


def test_functions_users_put_into_torchs_map_are_called(
    road: Road, collate_fns: dict[Any, Any]
) -> None:
    def of_custom(batch: Sequence[Custom], *, collate_fn_map: Any = None) -> Any:
        return Custom(
            torch_collate.collate([b.value for b in batch], collate_fn_map=collate_fn_map)
        )

    collate_fns[Custom] = of_custom
    out = road.trip(slot_collate([Custom(torch.ones(9000) * i) for i in range(3)], road.writer))
    assert type(out) is Custom
    assert out.value.shape == (3, 9000)
    collate_fns[torch.Tensor] = lambda batch, **_: len(batch)
    assert slot_collate([torch.ones(9000)] * 3, road.writer) == 3
    del collate_fns[torch.Tensor]
    with pytest.raises(TypeError, match="default_collate: batch must contain"):
        slot_collate([torch.tensor(1)] * 3, road.writer)


def test_a_collated_tensor_that_the_worker_keeps_stays_what_it_was(road: Road) -> None:
    kept = slot_collate([torch.full((9000,), 1.0)] * 3, road.writer)
    first = road.trip(kept)
    del first
    road.writer.give_back(road.reader.returned())
    for _ in range(5):
        road.trip(slot_collate([torch.full((9000,), 2.0)] * 3, road.writer))
        road.writer.give_back(road.reader.returned())
    assert (kept == 1).all()  # type: ignore[attr-defined]
    assert (road.trip([kept])[0] == 1).all()


def test_a_failed_collation_loses_no_slot(road: Road) -> None:
    batch = [(torch.rand(9000), torch.rand(9000 + i)) for i in range(2)]
    road.trip(slot_collate([torch.rand(9000)] * 2, road.writer))
    once = road.writer.nbytes
    for _ in range(20):
        with pytest.raises(RuntimeError):
            slot_collate(batch, road.writer)
    gc.collect()
    out = road.trip(slot_collate([torch.rand(9000)] * 2, road.writer))
    assert out.shape == (2, 9000)
    assert road.writer.nbytes <= 3 * once  # of two slots the later one is twice as large
