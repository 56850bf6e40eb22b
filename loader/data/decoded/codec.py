"""Decoded samples as bytes: a header in MessagePack, and raw buffers. Nothing is ever pickled.

Kept are None, numbers, str, bytes, ndarray, Tensor (of the CPU) and PIL.Image, and list, tuple and
dict of these. What `decode` returns equals the sample in types and bits, and shares no memory with
anything else. Anything that would not, like an object of a subclass, raises `UnkeptError`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

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
#: Modes of images whose bytes are all there is to them, and ones where that is checked.
_MODES = frozenset({"L", "LA", "La", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "I", "F"})
_CHECKED_MODES = frozenset({"1", "P", "PA", "HSV", "LAB", "I;16", "I;16B", "I;16L", "I;16N"})


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


def decode(node: Node, read: Callable[[Sequence[NDArray[np.uint8]]], object]) -> Any:
    """Return a sample, a private copy.

    Args:
        node: its header.
        read: fills these (k,) uint8 arrays with the sample's buffers, in order; called once.
    """
    into: list[NDArray[np.uint8]] = []
    finish = _made(node, into)
    read(into)
    return finish()


# --- to bytes -------------------------------------------------------------------------------------


class _Encoder:
    def __init__(self) -> None:
        self.buffers: list[Buffer] = []
        self._spans: list[tuple[int, int, bool]] = []  # addresses of arrays; can they be written?
        self._inside: set[int] = set()  # ids of the lists, dicts and images

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
        if kind is dict:
            return ["d", *(self.node(one) for pair in value.items() for one in pair)]
        return ["l" if kind is list else "t", *map(self.node, value)]

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
        data = image.tobytes()
        node = ["p", image.mode, list(image.size), _palette(image), self.node(image.info)]
        self.buffers.append(data)  # after those of `info`, in the order of `_made`
        return [*node, len(data)]

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
    return (
        image.mode in _MODES | _CHECKED_MODES and vars(image).keys() <= of_all.keys() and not exif
    )


def _palette(image: Image.Image) -> list[int] | None:
    return image.getpalette() if image.mode in {"P", "PA"} else None


def _comes_back(image: Image.Image) -> bool:
    """Whether an image made of what is kept has the same pixels, also as other modes show them."""
    made = _new_image(image.mode, image.size, _palette(image), dict(image.info), image.tobytes())
    if made != image or made.im.mode != image.im.mode:
        return False
    if image.mode not in {"1", "P", "PA"}:
        return True
    if image.mode == "1":  # its bytes may be others than 0 and 255
        return made.tobytes("raw", "L") == image.tobytes("raw", "L")
    same: bool = made.im.getpalettemode() == image.im.getpalettemode()
    # A copy: `convert` may change the palette of the image that it converts.
    return same and made.copy().convert("RGBA") == image.copy().convert("RGBA")


# --- and back -------------------------------------------------------------------------------------


def _made(node: Node, into: list[NDArray[np.uint8]]) -> Callable[[], Any]:
    """Return a function that makes a value, once what is added to `into` is filled."""
    if type(node) is not list:
        return lambda: node
    tag, *rest = node
    if tag in {"l", "t", "d"}:
        parts = [_made(one, into) for one in rest]
        return lambda: _container(tag, [part() for part in parts])
    if tag == "a":
        dtype, shape, order, writeable = rest
        array: NDArray[Any] = np.empty(shape, dtype)
        if array.nbytes:
            into.append(array.reshape(-1).view(np.uint8))
        return lambda: _with_flag(array, _inverse(order), writeable=writeable)
    if tag == "T":
        dtype, shape, strides = rest
        tensor = torch.empty_strided(shape, strides, dtype=getattr(torch, dtype), device="cpu")
        if tensor.numel():
            into.append(_flat(tensor))
        return lambda: tensor
    if tag == "p":
        mode, size, palette, info, nbytes = rest
        about = _made(info, into)
        pixels = np.empty(nbytes, np.uint8)
        into.append(pixels)
        return lambda: _new_image(mode, tuple(size), palette, about(), pixels)
    if tag == "b":
        data = np.empty(rest[0], np.uint8)
        into.append(data)
        return data.tobytes
    return lambda: _number(tag, rest)


def _container(tag: str, parts: list[Any]) -> Any:
    if tag == "d":
        each: Iterator[Any] = iter(parts)
        return dict(zip(each, each, strict=True))
    return parts if tag == "l" else tuple(parts)


def _number(tag: str, rest: list[Any]) -> Any:
    if tag == "i":
        return int(rest[0])
    return complex(*rest) if tag == "c" else np.frombuffer(rest[1], rest[0])[0]


def _with_flag(array: NDArray[Any], axes: list[int], *, writeable: bool) -> NDArray[Any]:
    if axes != sorted(axes):
        array = array.transpose(axes)
    array.flags.writeable = writeable
    return array


def _new_image(
    mode: str, size: tuple[int, ...], palette: list[int] | None, info: dict[Any, Any], data: Any
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
            return next((found for found in places if found is not None), None)
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
