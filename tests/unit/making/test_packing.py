"""A batch leaves the trainer's end exactly as it would leave torch's own queue."""

from __future__ import annotations

import collections
import copyreg
import dataclasses
import errno
import gc
import os
import pickle
import socket
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from packing_rig import Bag, Point, Road, Sub, same, theirs
from torch.utils.data import default_collate

from creel.cache.memory.slots.reader import SlotReader
from creel.cache.memory.slots.writer import SlotWriter
from creel.loader.making.transport.packing import pack, slot_collate
from creel.loader.making.transport.unpacking import discard, unpack

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def road() -> Iterator[Road]:
    road = Road()
    yield road
    road.reader.close()
    road.writer.close()


# --- equality, and torch's own way as the oracle ----------------------------------------------


@dataclasses.dataclass
class Record:
    name: str
    value: Any


DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
    torch.uint16, torch.float8_e4m3fn,
]  # fmt: skip


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    scale = draw(st.sampled_from([1, 1, 1, 40, 400]))
    shape = [shape[0] * scale, *shape[1:]] if shape else shape
    seed = draw(st.integers(0, 2**16))
    generator = torch.Generator().manual_seed(seed)
    n = int(np.prod([max(s, 1) for s in shape], dtype=np.int64)) * dtype.itemsize
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (n,), generator=generator)
    tensor = raw.to(torch.uint8).view(dtype)[: int(np.prod(shape, dtype=np.int64))].view(shape)
    twist = draw(st.sampled_from(["", "transposed", "sliced", "expanded", "last"]))
    if twist == "transposed" and tensor.dim() > 1:
        tensor = tensor.transpose(0, -1)
    elif twist == "sliced" and tensor.dim() and tensor.shape[0] > 2:
        tensor = tensor[1::2]
    elif twist == "expanded":
        tensor = tensor.unsqueeze(0).expand(3, *tensor.shape)
    elif twist == "last" and tensor.dim() and tensor.shape[0]:
        tensor = tensor[-1]
    return tensor


@st.composite
def arrays(draw: st.DrawFn) -> Any:
    dtype = np.dtype(draw(st.sampled_from(["f4", ">i8", "u1", "?", "M8[s]", "U3", "c16", "O"])))
    n, m = draw(st.integers(0, 300)), draw(st.integers(1, 9))
    array: Any = np.arange(n * m).astype(dtype if dtype.kind != "M" else "i8").astype(dtype)
    array = array.reshape(n, m)
    return draw(st.sampled_from([array, array.T, array[::2], np.asfortranarray(array)]))


leaves = st.one_of(
    tensors(), arrays(), st.none(), st.integers(), st.text(max_size=8), st.floats(),
    st.binary(max_size=20), st.integers(1, 10).map(lambda n: b"\7" * n * 9000),
)  # fmt: skip
batches = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
        st.dictionaries(st.text(max_size=3), inner, max_size=3).map(Bag),
        st.tuples(inner, inner).map(lambda xy: Point(*xy)),
        inner.map(lambda v: Record("r", v)),
        st.lists(inner, max_size=3).map(collections.deque),
    ),
    max_leaves=8,
)


@pytest.mark.slow
@settings(max_examples=30, phases=[Phase.generate])
@given(batch=batches)
def test_any_batch_arrives_as_torch_delivers_it(batch: Any) -> None:
    road = Road(max_slots=2)
    for _ in range(2):
        out = road.trip(batch)
        same(out, theirs(batch))
        del out
        gc.collect()
    assert road.reader.leased == 0
    road.writer.close()


# --- aliasing ---------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", range(3))
def test_without_a_slot_the_batch_goes_in_the_message(
    monkeypatch: pytest.MonkeyPatch, slots: int
) -> None:
    """There is no descriptor or no memory, from the start or in the middle of a batch."""
    positions = iter(range(slots))
    real = os.memfd_create

    def scarce(name: str, flags: int) -> int:
        if next(positions, None) is None:
            raise OSError(errno.EMFILE, "Too many open files")
        return real(name, flags)

    monkeypatch.setattr(os, "memfd_create", scarce)
    writer, reader = SlotWriter(max_slots=8), SlotReader(max_leased=4)
    base = torch.arange(400_000)
    samples = [{"a": base[i:][:300_000], "b": torch.full((50_000,), i)} for i in range(3)]
    for _ in range(3):
        collated = slot_collate(samples, writer)
        same(default_collate(samples), collated)
        batch = [collated, np.arange(9000), base[5:], base[:7], "text" * 9000]
        packed = pack(batch, writer)
        for slot in writer.unsent():
            reader.map_slot(*slot)
        same(theirs(batch), unpack(pickle.loads(pickle.dumps(packed)), reader))
        writer.give_back(reader.returned())
    reader.close()
    writer.close()


def test_tensors_that_shared_memory_still_do(road: Road) -> None:
    base = torch.zeros(100, 100)
    flat = base.view(-1)
    out = road.trip({"a": base, "b": base[3:7], "c": flat[5::2], "bits": base.view(torch.int32)})
    out["a"][4, 4] = 1
    assert out["b"][1, 4] == 1
    out["c"].fill_(1)
    assert out["a"][0, 5] == 1
    assert out["bits"][0, 5] == 0x3F800000
    assert base.sum() == 0
    assert out["b"].storage_offset() == 300


def test_tensors_sent_from_the_cpu_arrive_there_whatever_the_default_device(road: Road) -> None:
    sent = [torch.arange(size) for size in (0, 3, 9000)]
    with torch.device("meta"):
        out = road.trip(sent)
        stacked = slot_collate([torch.tensor(1, device="cpu")] * 2, road.writer)
    same(out, sent)
    assert isinstance(stacked, torch.Tensor)
    assert stacked.tolist() == [1, 1]


def test_the_same_object_twice_is_the_same_object(road: Road) -> None:
    tensor, array = torch.zeros(9000), np.zeros(9000)
    out = road.trip([tensor, array, tensor, array])
    assert out[0] is out[2]
    assert out[1] is out[3]


def test_tensors_of_all_kinds_share_memory_with_each_other(road: Road) -> None:
    base = torch.zeros(9000)
    parameter = torch.nn.Parameter(base[10:], requires_grad=False)
    out = road.trip([base, parameter, base.untyped_storage(), base[5:6]])
    out[0].fill_(2)
    assert (out[1] == 2).all()
    assert out[2].nbytes() == 36_000
    assert out[2].data_ptr() == out[0].data_ptr()
    assert out[3] == 2


def test_a_small_part_of_a_large_storage_travels_alone(road: Road) -> None:
    dataset = torch.arange(4_000_000, dtype=torch.int32)
    views = [dataset[5000:6000], dataset[5500:9000].view(-1, 5)[:, ::2], dataset[7003:7003]]
    out = road.trip(views)
    same(out, theirs(views))
    assert out[0].untyped_storage().nbytes() < 20_000
    out[0][600] = -1
    assert out[1][20, 0] == -1


# --- tensors of other kinds -------------------------------------------------------------------


@pytest.mark.parametrize(
    "tensor",
    [
        torch.eye(300).to_sparse(),
        torch.rand(5000, requires_grad=True),
        torch.nn.Parameter(torch.rand(5000)),
        torch.nn.Parameter(torch.arange(5000), requires_grad=False),
        torch.rand(5000, dtype=torch.complex64).conj(),
        torch.rand(5000, dtype=torch.complex64).conj().imag,
        torch.rand(5000).as_subclass(Sub),
        torch.rand(50, 100).T.as_subclass(Sub),
        torch.rand(())[None].expand(5),
        torch.rand(2, 3, 64, 64).contiguous(memory_format=torch.channels_last),
    ],
    ids=lambda t: f"{type(t).__name__}-{t.layout}-{t.dtype}-{t.requires_grad}",
)
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_other_kinds_of_tensor_arrive_as_torch_delivers_them(road: Road, tensor: Any) -> None:
    same(road.trip([tensor])[0], theirs([tensor])[0])


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:Sparse invariant checks")
def test_compressed_sparse_tensors_arrive(road: Road) -> None:
    out = road.trip(torch.eye(300).to_sparse_csr())
    assert out.layout is torch.sparse_csr
    assert torch.equal(out.to_dense(), torch.eye(300))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
@pytest.mark.skipif(torch.__version__ < "2.6", reason="torch itself refuses meta tensors")
def test_meta_and_nested_tensors_arrive(road: Road) -> None:
    meta, nested = road.trip(
        [
            torch.empty(3, 4, device="meta"),
            torch.nested.nested_tensor([torch.ones(300), torch.zeros(200)], layout=torch.strided),
        ]
    )
    assert (meta.device.type, meta.shape) == ("meta", (3, 4))
    assert nested.is_nested
    assert nested.unbind()[0].sum() == 300


def test_batches_that_torch_refuses_are_refused_in_its_words(road: Road) -> None:
    with pytest.raises(RuntimeError, match="Cowardly refusing to serialize non-leaf tensor"):
        road.trip([torch.rand(5, requires_grad=True) * 2])


def test_a_tensor_without_memory_is_refused(road: Road) -> None:
    with pytest.raises(RuntimeError, match="data pointer"):  # torch's own gets SIGSEGV
        road.trip(torch._efficientzerotensor((5000,)))


def test_reductions_of_the_user_are_kept(road: Road, monkeypatch: pytest.MonkeyPatch) -> None:
    def reduce_array(array: Any) -> Any:
        return sum, ([len(array)],)

    monkeypatch.setitem(copyreg.dispatch_table, np.ndarray, reduce_array)
    assert road.trip([np.zeros(5000)]) == [5000]
    monkeypatch.setitem(ForkingPickler._extra_reducers, torch.Tensor, reduce_array)  # type: ignore[attr-defined]
    assert road.trip([torch.zeros(7)]) == [7]


# --- uses of received batches -----------------------------------------------------------------


def test_tensors_that_arrive_are_writable_and_private(road: Road) -> None:
    sent: list[Any] = [
        torch.zeros(9000),
        torch.zeros(3),
        np.zeros(9000),
        np.zeros(3),
        bytearray(9000),
    ]
    out = road.trip(sent)
    for tensor in out:
        tensor[0] = 5
        assert tensor[0] == 5
    assert [tensor[0] for tensor in sent] == [0] * 5


@pytest.mark.parametrize("size", [3, 9000])
def test_a_view_of_a_tensor_that_was_shared_keeps_the_memory(road: Road, size: int) -> None:
    out = road.trip(torch.full((size,), 5))
    seen = out.numpy()
    out.share_memory_()
    assert out.is_shared()
    held = [road.trip(torch.full((size,), 6)) for _ in range(20)]
    road.reader.close()
    assert (seen == 5).all()
    assert held[-1][0] == 6


@pytest.mark.parametrize("size", [3, 9000])
def test_an_array_nobody_may_write_to_arrives_as_by_pickle(road: Road, size: int) -> None:
    """Writable before Python 3.14, whose protocol preserves read-only arrays."""
    array = np.zeros(size)
    array.flags.writeable = False
    assert road.trip(array).flags.writeable == theirs(array).flags.writeable


def test_a_tensor_over_a_slot_is_shared_pickled_cloned_and_resized_like_any(road: Road) -> None:
    out = road.trip(torch.arange(9000.0))
    expected = torch.arange(9000.0)
    assert torch.equal(pickle.loads(pickle.dumps(out)), expected)
    assert torch.equal(theirs(out), expected)
    assert torch.equal(out.clone().share_memory_(), expected)
    assert torch.equal(out.share_memory_(), expected)
    out.requires_grad_().sum().backward()
    assert out.grad is not None
    fresh = road.trip(torch.arange(9000.0))
    fresh.resize_(3, 3000)
    assert not fresh._is_view()
    assert fresh.is_leaf


def test_a_small_tensor_that_is_kept_holds_no_slot(road: Road) -> None:
    kept = []
    sizes = []
    for _ in range(20):
        images, labels = road.trip([torch.zeros(64, 3000), torch.zeros(64)])
        kept.append(labels)
        sizes.append(road.writer.nbytes)
    del images
    road.writer.give_back(road.reader.returned())
    assert road.reader.leased == 0
    assert max(sizes) <= 3 * sizes[0]


def test_a_trainer_that_keeps_every_batch_gets_copies(road: Road) -> None:
    kept = [road.trip(torch.full((50_000,), i)) for i in range(30)]
    assert road.reader.leased == road.reader.max_leased
    assert [int(tensor[0]) for tensor in kept] == list(range(30))
    assert [int(tensor[-1]) for tensor in kept] == list(range(30))


def test_a_slot_written_again_spoils_no_tensor_alive(road: Road) -> None:
    rng = np.random.default_rng(0)
    alive: dict[int, tuple[Any, Any]] = {}
    for i in range(200):
        alive[i] = road.trip([torch.full((int(rng.integers(1, 30_000)),), i), np.full(900, i)])
        if rng.random() < 0.8:
            del alive[list(alive)[int(rng.integers(len(alive)))]]
        for value, (tensor, array) in alive.items():
            assert (tensor == value).all()
            assert (array == value).all()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_batches_cross_processes() -> None:
    ours, theirs_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if not pid:
        ours.close()
        try:
            serve(theirs_end)
            os._exit(0)
        finally:
            os._exit(1)
    theirs_end.close()
    ours.settimeout(20)
    reader = SlotReader(max_leased=4)
    used: set[int] = set()
    for i in range(20):
        ours.send(pickle.dumps(reader.returned()))
        message, fds, _, _ = socket.recv_fds(ours, 1 << 16, 8)
        packed, new = pickle.loads(message)
        for (slot_id, nbytes), fd in zip(new, fds, strict=True):
            reader.map_slot(slot_id, fd, nbytes)
            os.close(fd)
        used.update(slot_id for slot_id, _ in packed.slots)
        same(unpack(packed, reader), [torch.full((4, 50_000), i), "x" * i, np.arange(1 + i * 1000)])
    assert len(used) <= 8  # two in each batch, one of which grows
    ours.close()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def serve(sock: socket.socket) -> None:
    """Do what a worker does; a fork has no OpenMP threads."""
    torch.set_num_threads(1)
    sock.settimeout(20)
    writer = SlotWriter(max_slots=8)
    for i in range(20):
        writer.give_back(pickle.loads(sock.recv(1 << 16)))
        stack = slot_collate([torch.full((50_000,), i)] * 4, writer)
        packed = pack([stack, "x" * i, np.arange(1 + i * 1000)], writer)
        del stack
        new = writer.unsent()
        message = pickle.dumps((packed, [(slot_id, nbytes) for slot_id, _, nbytes in new]))
        socket.send_fds(sock, [message], [fd for _, fd, _ in new])


# --- messages ---------------------------------------------------------------------------------


def test_a_batch_without_anything_large_needs_no_slot(road: Road) -> None:
    for batch in ([1, "a", None], torch.arange(8), [torch.rand(3), np.zeros(5)], []):
        packed = road.send(batch)
        assert packed.slots == ()
        same(unpack(packed, road.reader), batch)


@pytest.mark.parametrize(
    "batch",
    [
        list(range(100_000)),
        [torch.rand(3) for _ in range(500)],
        "x" * 100_000,
        [b"ab" * 50_000] * 3,
    ],
    ids=["ints", "tensors", "str", "bytes"],
)
def test_a_long_pickle_goes_through_the_slot(road: Road, batch: Any) -> None:
    for _ in range(3):
        same(road.trip(batch), batch)
    assert road.reader.leased == 0


def test_a_batch_nobody_wants_gives_its_slots_back(road: Road) -> None:
    packed = road.send(torch.zeros(9000))
    discard(packed, road.reader)
    assert road.reader.returned() == [slot_id for slot_id, _ in packed.slots]


def test_a_one_off_comes_and_goes(road: Road) -> None:
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("creel-slot")

    before = mapped()  # torch 2.4 never frees what a test above sends by torch's own queue
    road.writer = SlotWriter(max_slots=0)
    for _ in range(2):
        out = road.trip([torch.ones(90_000), [b"x" * 50_000]])
        assert out[0].sum() == 90_000
        assert mapped() > before
        del out
        assert mapped() == before


class Unwilling:
    def __reduce__(self) -> Any:
        raise LookupError("no")


def explode() -> None:
    raise LookupError("late")


class Bomb:
    def __reduce__(self) -> Any:
        return explode, ()


def test_failures_reach_the_caller_and_lose_no_slot(road: Road) -> None:
    sizes = set()
    for _ in range(20):
        with pytest.raises(LookupError, match="no"):
            pack([torch.zeros(9000), Unwilling()], road.writer)
        with pytest.raises(LookupError, match="late"):
            road.trip([torch.zeros(9000), Bomb()])
        road.writer.give_back(road.reader.returned())
        sizes.add(road.writer.nbytes)
    gc.collect()
    assert road.reader.leased == 0
    assert len(sizes) == 1
    with pytest.raises((AttributeError, pickle.PicklingError)):
        pack([lambda: 0], road.writer)
