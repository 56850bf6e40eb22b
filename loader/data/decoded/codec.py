"""Decoded samples as bytes: a header in MessagePack, and raw buffers. Nothing is ever pickled.

Kept are None, numbers, str, bytes, ndarray, Tensor (of the CPU) and PIL.Image, and list, tuple and
dict of these. What `decode` returns equals the sample in types and bits, and shares no memory with
anything else. Anything that would not, like an object of a subclass, raises `UnkeptError`.

`decode` trusts no bytes: types come from tables, and the bytes that an array takes are compared
with those that are there before there is an array.
"""

from __future__ import annotations

import functools
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from creel.errors import MalformedError

if TYPE_CHECKING:
    from PIL import Image

#: A sample without its large buffers: plain values as they are, and lists that begin with a tag.
Node: TypeAlias = Any
Buffer: TypeAlias = "bytes | NDArray[np.uint8]"

_PLAIN = frozenset({type(None), bool, float, str})
#: Kinds of numpy's dtypes that their `str` describes completely.
_KINDS = frozenset("biufcSUmM")
#: Why an array is not kept: a copy of it would be another kind of memory, with other roundings.
_PART = "floating-point numbers that are a part of a larger array"
#: bytes up to this length are part of the header.
_SHORT = 256
#: Bytes of a pixel in modes of images whose bytes are all there is to them.
_MODES = {"L": 1, "LA": 2, "La": 2, "RGB": 3, "RGBA": 4, "RGBa": 4, "RGBX": 4, "CMYK": 4}
_MODES |= {"YCbCr": 3, "I": 4, "F": 4}
#: The same for modes where that is checked; "1" has eight pixels in a byte.
_CHECKED_MODES = {"1": 0, "P": 1, "PA": 2, "HSV": 3, "LAB": 3}
_CHECKED_MODES |= dict.fromkeys(("I;16", "I;16B", "I;16L", "I;16N"), 2)
_PIXEL_NBYTES = _MODES | _CHECKED_MODES
#: Lists, tuples and dicts inside each other.
_LEVELS = 64
#: numpy's dtypes of numbers by their `str`, and texts that are ones of another size or unit.
_NUMBERS = {
    (dtype := np.dtype(code).newbyteorder(order)).str: dtype  # type: ignore[arg-type]
    for code in "?bhilqBHILQefdgFDG"
    for order in "<>"
}
_OTHER_DTYPE = re.compile(
    r"\|S[1-9]\d{0,9}|[<>]U[1-9]\d{0,9}"
    r"|[<>][mM]8(\[([1-9]\d{0,8})?(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?",
    re.ASCII,
)
#: torch's dtypes by their names; quantized ones are not kept.
_TENSORS = {
    name: dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
    and not (name := str(dtype).removeprefix("torch.")).startswith("q")
}


class UnkeptError(Exception):
    """A sample has a part that cannot be kept; the text says which."""


def encode(sample: object) -> tuple[Node, list[Buffer]]:
    """Return a sample's header and buffers, which may share the sample's memory.

    Raises:
        UnkeptError: it would not come back the same.
    """
    encoder = _Encoder()
    node = encoder.node(sample)
    encoder.check_apart()
    return node, encoder.buffers


def decode(node: Node, data: memoryview) -> Any:
    """Return a sample, a private copy.

    Args:
        node: its header.
        data: its buffers, in order, whatever follows.

    Raises:
        MalformedError: they are none of a sample's; other exceptions may say so as well.
    """
    return _Decoder(data).value(node, 0)


# --- to bytes -------------------------------------------------------------------------------------


class _Encoder:
    def __init__(self) -> None:
        self.buffers: list[Buffer] = []
        self._spans: list[tuple[int, int, bool]] = []  # addresses of arrays; can they be written?
        self._inside: set[int] = set()  # ids of the lists, dicts and images
        self._level = 0

    def node(self, value: Any) -> Node:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind is int:
            return value if -(1 << 63) <= value < 1 << 63 else ["i", str(value)]
        if kind is np.ndarray:
            return self._array(value)
        if kind is torch.Tensor:
            return self._tensor(value)
        if kind is bytes:
            if len(value) <= _SHORT:
                return value
            self.buffers.append(value)
            return ["b", len(value)]
        if kind in {list, tuple, dict}:
            return self._container(value, kind)
        return self._image(value) if _is_image(kind) else _rare_number(value)

    def _container(self, value: Any, kind: type) -> Node:
        if kind is not tuple:
            self._once(value)
        self._level += 1
        if self._level > _LEVELS:
            raise UnkeptError(f"more than {_LEVELS} lists inside each other")
        values = (part for pair in value.items() for part in pair) if kind is dict else value
        node = [kind.__name__[0], *map(self.node, values)]
        self._level -= 1
        return node

    def _array(self, value: NDArray[Any]) -> Node:
        if value.dtype.kind not in _KINDS or value.dtype.metadata is not None or not value.itemsize:
            raise UnkeptError(f"an array of {value.dtype}")
        own = value.flags.writeable
        self._add_span(value.ctypes.data, value.itemsize, value.shape, value.strides, own)
        order = _order(value.strides)
        ordered = value.transpose(order)
        if value.dtype.kind in "fc" and not ordered.flags.c_contiguous:
            raise UnkeptError(_PART)
        if value.nbytes:
            self.buffers.append(np.ascontiguousarray(ordered).reshape(-1).view(np.uint8))
        return ["a", value.dtype.str, list(ordered.shape), order, value.flags.writeable]

    def _tensor(self, value: torch.Tensor) -> Node:
        plain = value.layout is torch.strided and value.device.type == "cpu"
        if not plain or value.requires_grad or value.is_conj() or value.is_neg() or vars(value):
            raise UnkeptError("a tensor that is more than numbers in the CPU's memory")
        if value.is_quantized or value.is_inference():
            raise UnkeptError("a tensor that is more than numbers in the CPU's memory")
        size = value.element_size()
        self._add_span(
            value.data_ptr(), size, value.shape, [size * s for s in value.stride()], True
        )
        order = _order(value.stride())
        ordered = value.permute(order)
        if not ordered.is_contiguous():
            if value.is_floating_point() or value.is_complex():
                raise UnkeptError(_PART)
            value = ordered.contiguous().permute(_inverse(order))
        if value.numel():
            self.buffers.append(_flat(value))
        dtype = str(value.dtype).removeprefix("torch.")
        return ["T", dtype, list(value.shape), list(value.stride())]

    def _add_span(
        self, first: int, size: int, shape: Sequence[int], strides: Sequence[int], written: bool
    ) -> None:
        """Note the addresses of an array; `strides`: in bytes."""
        if 0 not in shape:
            reach = [(n - 1) * stride for n, stride in zip(shape, strides, strict=True)]
            low, high = (sum(clip(0, r) for r in reach) for clip in (min, max))
            self._spans.append((first + low, first + high + size, written))

    def _once(self, value: object) -> None:
        if id(value) in self._inside:
            raise UnkeptError("the same object twice in a sample")
        self._inside.add(id(value))

    def _image(self, image: Image.Image) -> Node:
        self._once(image)
        if not _is_kept_whole(image):
            raise UnkeptError(f"an image of mode {image.mode}, or with state of its own")
        if image.mode in _CHECKED_MODES and not _comes_back(image):
            raise UnkeptError(f"this image of mode {image.mode}")
        data = _pixels(image)
        node = ["p", image.mode, list(image.size), _palette(image), self.node(image.info)]
        self.buffers.append(data)  # after those of `info`, as they are read
        return node

    def check_apart(self) -> None:
        """Raise UnkeptError if a write to one array would change another one."""
        ends = {False: 0, True: 0}  # of those so far that can only be read, or written
        for first, end, written in sorted(self._spans):
            if first < ends[True] or (written and first < ends[False]):
                raise UnkeptError("arrays that share memory")
            ends[written] = max(ends[written], end)


def _order(strides: Sequence[int]) -> list[int]:
    """Return the axes of an array in the order in which they lie in memory.

    Calculations with floating-point numbers depend on that order: it is kept.
    """
    return sorted(range(len(strides)), key=lambda axis: -abs(strides[axis]))


def _inverse(order: Sequence[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def _flat(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """Return the bytes of a tensor without gaps, as they lie in memory; it shares them."""
    flat: NDArray[np.uint8] = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy()
    return flat


def _rare_number(value: Any) -> Node:
    kind = type(value)
    if kind is complex:
        return ["c", value.real, value.imag]
    if isinstance(value, np.generic) and value.dtype.kind in _KINDS and value.nbytes:
        return ["n", value.dtype.str, value.tobytes()]
    raise UnkeptError(f"an object of {kind.__module__}.{kind.__qualname__}")


def _is_image(kind: type) -> bool:
    module = sys.modules.get("PIL.Image")
    return module is not None and kind is module.Image


def _is_kept_whole(image: Image.Image) -> bool:
    """Whether an image has no state but what is kept."""
    of_all = vars(type(image)())
    exif = vars(image).get("_exif")
    known = image.mode in _PIXEL_NBYTES and all(image.size)
    return known and vars(image).keys() <= of_all.keys() and not exif


def _pixels(image: Image.Image) -> bytes:
    """Return `image.tobytes()`, which copies all twice, in half of its time."""
    if image.mode not in _MODES:
        return image.tobytes()
    from PIL import Image

    image.load()
    width, height = image.size
    nbytes, data = _MODES[image.mode] * width * height, b""
    with suppress(Exception):  # the names are not public
        encoder = Image._getencoder(image.mode, "raw", (image.mode,))  # noqa: SLF001
        encoder.setimage(image.im, (0, 0, width, height))
        data = encoder.encode(nbytes)[2]
        encoder.cleanup()
    return data if len(data) == nbytes else image.tobytes()


def _palette(image: Image.Image) -> list[int] | None:
    return image.getpalette() if image.mode in {"P", "PA"} else None


def _comes_back(image: Image.Image) -> bool:
    """Whether an image made of what is kept has the same pixels, also as other modes show them."""
    rebuilt = _new_image(image.mode, image.size, _palette(image), dict(image.info), image.tobytes())
    if rebuilt != image or rebuilt.im.mode != image.im.mode:
        return False
    if image.mode not in {"1", "P", "PA"}:
        return True
    if image.mode == "1":  # its bytes may be others than 0 and 255
        return rebuilt.tobytes("raw", "L") == image.tobytes("raw", "L")
    same: bool = rebuilt.im.getpalettemode() == image.im.getpalettemode()
    # A copy: `convert` may change the palette of the image that it converts.
    return same and rebuilt.copy().convert("RGBA") == image.copy().convert("RGBA")


# --- and back -------------------------------------------------------------------------------------


class _Decoder:
    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._at = 0

    def value(self, node: Node, level: int) -> Any:
        if type(node) is not list:
            if type(node) in _PLAIN or type(node) in {int, bytes}:
                return node
            raise MalformedError(f"a {type(node).__name__} in a header")
        if level > _LEVELS or not node:
            raise MalformedError("no list of a header")
        tag, *parts = node
        if tag in _CONTAINERS:
            return _CONTAINERS[tag]([self.value(part, level + 1) for part in parts])
        if tag == "p":
            return self._image(*parts, level=level)
        if tag == "a":
            return self._array(*parts)
        if tag == "T":
            return self._tensor(*parts)
        return bytes(self._next(_counts(parts)[0])) if tag == "b" else _number(tag, *parts)

    def _next(self, nbytes: int) -> memoryview:
        """Return the bytes that follow."""
        first, self._at = self._at, self._at + nbytes
        if self._at > len(self._data):
            raise MalformedError("fewer bytes than the header says")
        return self._data[first : self._at]

    def _array(self, dtype: str, shape: Any, order: Any, writeable: Any) -> NDArray[Any]:
        kind, sizes = _dtype(dtype), _counts(shape)
        if sorted(_counts(order)) != list(range(len(sizes))) or type(writeable) is not bool:
            raise MalformedError("no axes of an array")
        data = self._next(kind.itemsize * math.prod(sizes))
        array: NDArray[Any] = np.empty(sizes, kind)
        if data:
            array.reshape(-1).view(np.uint8)[:] = data
        if order != sorted(order):
            array = array.transpose(_inverse(order))
        array.flags.writeable = writeable
        return array

    def _tensor(self, dtype: str, shape: Any, strides: Any) -> torch.Tensor:
        kind, sizes = _TENSORS[dtype], _counts(shape)
        count, dense = math.prod(sizes), 1
        for stride, size in sorted(zip(_counts(strides), sizes, strict=True)):
            if count and size > 1 and stride != dense:
                raise MalformedError("a tensor with gaps")
            dense *= size
        size = torch.empty(0, dtype=kind, device="cpu").element_size()
        data = self._next(size * count)
        tensor = torch.empty_strided(sizes, strides, dtype=kind, device="cpu")
        if data:
            _flat(tensor)[:] = data
        return tensor

    def _image(self, mode: str, size: Any, palette: Any, info: Node, *, level: int) -> Image.Image:
        about = self.value(info, level + 1)
        width, height = _counts(size)
        if type(about) is not dict or not width * height:
            raise MalformedError("no image")
        colours = _counts(palette) if mode in {"P", "PA"} else []
        row = _PIXEL_NBYTES[mode] * width or -(-width // 8)
        return _new_image(mode, (width, height), colours, about, self._next(row * height))


def _counts(numbers: Any) -> list[int]:
    """Return a list if it consists of numbers from 0 on."""
    if type(numbers) is list and all(type(n) is int and n >= 0 for n in numbers):
        return numbers
    raise MalformedError("no numbers")


@functools.lru_cache(256)
def _dtype(text: str) -> np.dtype[Any]:
    dtype = _NUMBERS.get(text)
    if dtype is None and not _OTHER_DTYPE.fullmatch(text):
        raise MalformedError(f"no dtype: {text!r}")
    return np.dtype(text) if dtype is None else dtype


def _dict(parts: list[Any]) -> dict[Any, Any]:
    each: Iterator[Any] = iter(parts)
    return dict(zip(each, each, strict=True))


#: Lists, tuples and dicts by their tags.
_CONTAINERS: dict[str, Callable[[list[Any]], Any]] = {"l": list, "t": tuple, "d": _dict}


def _number(tag: str, first: Any, second: Any = None) -> Any:
    if tag == "i" and type(first) is str:
        return int(first)
    if tag == "c" and type(first) is type(second) is float:
        return complex(first, second)
    if tag == "n" and type(second) is bytes and len(second) == _dtype(first).itemsize:
        return np.frombuffer(second, _dtype(first))[0]
    raise MalformedError(f"no value: {tag!r}")


def _new_image(
    mode: str, size: tuple[int, ...], palette: Any, info: dict[Any, Any], data: Any
) -> Image.Image:
    from PIL import Image

    image = Image.Image()
    image.__setstate__([info, mode, size, palette, data])  # as Pillow unpickles an image
    return image


# --- two samples that should be the same ----------------------------------------------------------


def difference(a: Any, b: Any, place: str = "") -> str | None:
    """Return the place of the first difference, "" for the whole; None if they are the same.

    >>> difference([1, {"x": 2.0}], [1, {"x": 3.0}])
    "[1]['x']"
    """
    if type(a) is type(b) and type(a) in {dict, list, tuple} and len(a) == len(b):
        keys = list(a) if type(a) is dict else range(len(a))
        if type(a) is not dict or keys == list(b):
            places = (difference(a[key], b[key], f"{place}[{key!r}]") for key in keys)
            return next((place for place in places if place is not None), None)
    return None if _same(a, b) else place


def _same(a: Any, b: Any) -> bool:
    try:
        (node, buffers), (other_node, others) = encode(a), encode(b)
        return (
            msgspec.msgpack.encode(node) == msgspec.msgpack.encode(other_node)
            and len(buffers) == len(others)
            and all(
                np.array_equal(np.frombuffer(x, np.uint8), np.frombuffer(y, np.uint8))
                for x, y in zip(buffers, others, strict=True)
            )
        )
    except (UnkeptError, UnicodeEncodeError):  # it is not kept in any case
        return True
