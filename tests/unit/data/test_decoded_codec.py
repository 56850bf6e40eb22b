"""What is kept of a decoded sample comes back the same, in types and bits, and is a copy."""

from __future__ import annotations

import io
import math
from collections import OrderedDict
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from PIL import Image

from creel.errors import MalformedError
from creel.loader.data.decoded import codec
from creel.loader.data.decoded.codec import UnkeptError, decode, encode
from kit import seeds

MODES = {"1": 1, "L": 1, "LA": 2, "RGB": 3, "RGBA": 4, "RGBX": 4, "CMYK": 4, "YCbCr": 3, "I": 4}
MODES |= {"F": 4, "P": 1, "HSV": 3, "LAB": 3, "I;16": 2, "RGBa": 4, "La": 2, "PA": 2}
DTYPES = [torch.uint8, torch.int64, torch.float32, torch.bfloat16, torch.bool, torch.complex64]


def back(sample: object) -> Any:
    """Encode a sample, and decode it from the bytes."""
    header, data = written(sample)
    return decode(msgspec.msgpack.decode(header), memoryview(data))


def written(sample: object) -> tuple[bytes, bytes]:
    """Return the bytes of a sample's header, and its buffers."""
    node, buffers = encode(sample)
    return msgspec.msgpack.encode(node), b"".join(bytes(buffer) for buffer in buffers)


def bits(value: Any) -> Any:
    """Return plain values that are equal only for samples that are equal in types and bits."""
    if isinstance(value, np.ndarray):
        order = sorted(range(value.ndim), key=lambda axis: -abs(value.strides[axis]))
        kind = value.dtype.str, order if value.size else (), value.flags.writeable
        return "array", kind, value.shape, value.tobytes()
    if isinstance(value, torch.Tensor):
        flat = value.contiguous().reshape(-1).view(torch.uint8)
        return "tensor", value.dtype, tuple(value.shape), bytes(flat.numpy())
    if isinstance(value, np.generic):
        return type(value), value.dtype.str, value.tobytes()
    if isinstance(value, Image.Image):
        pixels = value.tobytes(), value.convert("RGBA").tobytes() if value.mode == "P" else b""
        return type(value), value.mode, value.size, pixels, bits(value.info), value.getpalette()
    if isinstance(value, (list, tuple)):
        return type(value), [bits(part) for part in value]
    if isinstance(value, dict):
        return "dict", [(bits(k), bits(v)) for k, v in value.items()]
    if isinstance(value, (float, complex)):
        return type(value), np.array(value).tobytes()
    return type(value), value


def image(mode: str, width: int, height: int, seed: int) -> Image.Image:
    row = (width + 7) // 8 if mode == "1" else width * MODES[mode]
    data = np.random.default_rng(seed).bytes(row * height)
    picture = Image.frombytes(mode, (width, height), data)
    if mode in {"P", "PA"}:
        picture.putpalette(np.random.default_rng(seed).bytes(768))
    picture.info = {"dpi": (72, 72.5), "icc_profile": data[:300], "comment": "é"}
    return picture


arrays = st.one_of(
    hnp.arrays(
        st.one_of(hnp.scalar_dtypes(), hnp.unicode_string_dtypes(), hnp.byte_string_dtypes()),
        hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
    ),
    st.builds(lambda n: np.asfortranarray(np.arange(6.0 * n).reshape(2, 3 * n)), st.integers(1, 3)),
    st.builds(lambda data: np.frombuffer(data, np.uint8), st.binary()),  # read-only, may be shared
    st.builds(lambda n: np.arange(4 * n)[::-2], st.integers(0, 3)),
    st.builds(lambda n: np.arange(12.0 * n).reshape(n, 3, 4).transpose(2, 0, 1), st.integers(0, 3)),
)
tensors = st.builds(
    lambda dtype, shape: torch.arange(int(np.prod(shape))).to(dtype).reshape(shape),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 3), max_size=3),
)
images = st.builds(
    image, st.sampled_from([*MODES]), st.integers(1, 9), st.integers(1, 9), st.integers(0, 99)
)
plain = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.text(),
    st.binary(),
    st.just(b"long" * 100),
    st.integers(-(1 << 70), 1 << 70),
    st.builds(np.float32, st.floats(width=32)),
    st.builds(np.int16, st.integers(0, 9)),
)
samples = st.recursive(
    st.one_of(plain, arrays, tensors, images),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.one_of(st.text(max_size=3), st.integers(0, 9)), inner, max_size=3),
    ),
    max_leaves=6,
)


@given(samples)
def test_a_sample_comes_back_the_same(sample: Any) -> None:
    assert bits(back(sample)) == bits(sample)


@pytest.mark.parametrize("mode", MODES)
def test_an_image_of_each_mode_comes_back_the_same(mode: str) -> None:
    picture = image(mode, 7, 5, 1)
    again = back(picture)
    assert type(again) is Image.Image
    assert bits(again) == bits(picture)
    again.paste(again.crop((1, 1, 2, 2)))  # it may be changed


def test_the_pixels_of_an_image_are_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    image = Image.effect_noise((300, 200), 9).convert("RGB")
    pixels = image.tobytes()
    monkeypatch.delattr(Image.Image, "tobytes")  # which copies them twice
    assert encode(image)[1] == [pixels]


def test_an_image_is_kept_by_a_pillow_without_these_names(monkeypatch: pytest.MonkeyPatch) -> None:
    image = Image.effect_noise((300, 200), 9).convert("RGB")
    monkeypatch.delattr(Image, "_getencoder")
    monkeypatch.setattr(Image.Image, "tobytes", lambda _: b"all")
    assert encode(image)[1] == [b"all"]


@pytest.mark.parametrize("transparency", [3, bytes(range(256))])
def test_a_palette_with_transparency_comes_back_the_same(transparency: Any) -> None:
    picture = image("P", 16, 16, 1)
    file = io.BytesIO()
    picture.save(file, "png", transparency=transparency)
    opened = Image.open(file).copy()
    picture = back(opened)
    assert picture == opened
    assert picture.im.getpalettemode() == opened.im.getpalettemode() == "RGB"
    assert picture.convert("RGBA") == opened.convert("RGBA")


def test_a_tensor_may_have_any_strides() -> None:
    tensor = torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1)
    assert torch.equal(back(tensor), tensor)
    assert back(tensor).stride() == tensor.stride()
    grey = torch.rand(5, 4, 1).permute(2, 0, 1)
    assert back(grey).stride() == grey.stride()
    last = torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert back(last).is_contiguous(memory_format=torch.channels_last)
    part = tensor.to(torch.int64)[:, :1, ::2]
    assert torch.equal(back(part), part)
    assert torch.equal(back(part.expand(5, 4, 1, 2)), part.expand(5, 4, 1, 2))


class Pair(NamedTuple):
    first: int


class Own(np.ndarray[Any, Any]):
    """An array of a user's class."""


def unkept() -> dict[str, Any]:
    array: NDArray[Any] = np.zeros(4)
    marked, lazy = torch.zeros(2), io.BytesIO()
    marked.mark = 1  # type: ignore[attr-defined]
    image("RGB", 3, 3, 1).save(lazy, "png")
    with_state = image("RGB", 3, 3, 1)
    with_state.path = "x"  # type: ignore[attr-defined]
    cyclic: list[Any] = []
    cyclic.append(cyclic)
    return {
        "set": {1},
        "namedtuple": Pair(1),
        "ordered": OrderedDict(a=1),
        "subclass of ndarray": array.view(Own),
        "objects": np.array([None]),
        "records": np.zeros(2, [("a", "i4")]),
        "parameter": torch.nn.Parameter(torch.zeros(2)),
        "gradient": torch.zeros(2, requires_grad=True),
        "attribute of a tensor": marked,
        "sparse": torch.zeros(2, 2).to_sparse(),
        "conjugate": torch.zeros(2, dtype=torch.complex64).conj(),
        "lazy image": Image.open(lazy),
        "attribute of an image": with_state,
        "part of numbers": np.zeros((4, 4))[:, :2],
        "part of a tensor": torch.zeros(4, 4)[:, :2],
        "array of nothing": np.zeros(3, [("text", "U0")])["text"],
        "array twice": [array, array],
        "view of an array": {"whole": array, "part": array[1:]},
        "tensor over an array": (torch.from_numpy(array), array),
        "list twice": [[], cyclic][:1] * 2,
        "cycle": cyclic,
        "deep": [bytearray(b"x")],
    }


@pytest.mark.parametrize("kind", unkept())
def test_samples_that_would_not_come_back_the_same_are_refused(kind: str) -> None:
    with pytest.raises(UnkeptError):
        encode(unkept()[kind])


def test_arrays_that_nobody_can_write_may_share_memory() -> None:
    data = np.frombuffer(b"abc", np.uint8)
    assert bits(back([data, data[1:]])) == bits([data, data[1:]])


def test_parts_of_one_array_that_do_not_overlap_are_kept() -> None:
    array = np.arange(10)
    assert bits(back([array[:5], array[5:]])) == bits([array[:5], array[5:]])


def deep(levels: int) -> Any:
    sample: Any = 1
    for _ in range(levels):
        sample = [sample]
    return sample


def test_lists_inside_each_other_are_kept_up_to_a_depth() -> None:
    assert back(deep(64)) == deep(64)
    with pytest.raises(UnkeptError):
        encode(deep(65))
    with pytest.raises(MalformedError):
        decode(deep_node(66), memoryview(b""))


def deep_node(levels: int) -> Any:
    node: Any = 1
    for _ in range(levels):
        node = ["l", node]
    return node


#: What a header may have in the place of anything else.
STRANGE: list[Any] = [
    0,
    -1,
    7,
    1 << 40,
    (1 << 63) - 1,
    None,
    True,
    2.5,
    "",
    "l",
    "d",
    "a",
    "T",
    "p",
    "b",
    "i",
]
STRANGE += ["<f8", "<U999999999", "|O", "<M8[25s]", "float64", "load", "RGB", "1", b"", b"12345678"]
STRANGE += [[], [0], [1 << 31, 1 << 31], ["l"], ["b", 1 << 40], ["a", "<f8", [9], [0], True], {}]


def seeds_of_headers() -> list[tuple[bytes, bytes]]:
    """Return samples of each kind, as bytes."""
    rng = np.random.default_rng(0)
    plain = {"x": 1, "y": [2.5, None, "é", b"z"], "z": (True, 1 << 70, 1j, np.float32(2))}
    numbers = [rng.random((3, 4), np.float32), np.array(["ab", "c"]), np.zeros((2, 0))]
    moments = np.array(["2026-11-28"], "<M8[D]"), np.asfortranarray(np.arange(6).reshape(2, 3))
    last = torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)
    given = [plain, numbers, moments, [last, torch.zeros(3, dtype=torch.bfloat16)], b"long" * 99]
    return [written(sample) for sample in [*given, *(image(mode, 9, 5, 1) for mode in MODES)]]


def mutated(header: bytes, rng: np.random.Generator) -> bytes:
    """Change some bytes, or put something strange in the place of a part."""
    if rng.random() < 0.5:
        data = bytearray(header)
        for _ in range(int(rng.integers(1, 4))):
            data[int(rng.integers(len(data)))] = int(rng.integers(256))
        return bytes(data[: int(rng.integers(len(data)))] if rng.random() < 0.1 else data)
    whole = [msgspec.msgpack.decode(header)]
    part, at = whole, 0
    while type(part[at]) is list and part[at] and rng.random() < 0.8:
        part, at = part[at], int(rng.integers(len(part[at])))
    part[at] = STRANGE[int(rng.integers(len(STRANGE)))]
    return msgspec.msgpack.encode(whole[0])


class Spy:
    """Fails if memory is asked for before its size was compared with the bytes that are there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.most = 0
        empty, strided, new_image = np.empty, torch.empty_strided, codec._new_image

        def array(shape: Any, dtype: Any) -> Any:
            self.check(np.dtype(dtype).itemsize * math.prod(shape))
            return empty(shape, dtype)

        def tensor(shape: Any, strides: Any, dtype: Any, **more: Any) -> Any:
            self.check(math.prod(shape))
            return strided(shape, strides, dtype=dtype, **more)

        def new(mode: str, size: Any, *of: Any) -> Any:
            self.check(math.prod(size) // 8)
            return new_image(mode, size, *of)

        monkeypatch.setattr(np, "empty", array)
        monkeypatch.setattr(torch, "empty_strided", tensor)
        monkeypatch.setattr(codec, "_new_image", new)

    def check(self, nbytes: int) -> None:
        if nbytes > self.most:
            pytest.fail(f"{nbytes} bytes for a sample of {self.most}")


@pytest.mark.parametrize("seed", seeds(4))
def test_a_header_that_anybody_wrote_is_a_sample_or_an_error(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never a crash, and no memory beyond the bytes that are there."""
    rng, given = np.random.default_rng(seed), seeds_of_headers()
    spy, refused = Spy(monkeypatch), 0
    for _ in range(2000):
        header, data = given[int(rng.integers(len(given)))]
        spy.most = len(data)
        try:
            decode(msgspec.msgpack.decode(mutated(header, rng)), memoryview(data))
        except MemoryError:
            raise
        except Exception:  # noqa: BLE001  the law: any of them is a miss
            refused += 1
    assert 0 < refused < 2000
