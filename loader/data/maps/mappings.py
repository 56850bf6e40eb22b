"""Which bytes of which files a part of this process's memory is mapped from."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch

from creel.system.python_open import bytes_of


class MappedRange(NamedTuple):
    """Bytes [offset, offset + nbytes) of a file."""

    path: str
    offset: int
    nbytes: int


class Span(NamedTuple):
    """Bytes [address, address + nbytes) of this process's memory."""

    address: int
    nbytes: int


class _MappedFile(NamedTuple):
    """Addresses [start, end) are bytes of a file from `offset` on."""

    start: int
    end: int
    offset: int
    path: str


class Mappings:
    """The files that this process has mapped at the time of construction."""

    def __init__(self) -> None:
        try:
            lines = bytes_of("/proc/self/maps").splitlines()
        except OSError:  # this system does not say
            lines = []
        self._mappings = list(map(_parsed, filter(_of_file, lines)))  # ascending
        self._starts = [mapping.start for mapping in self._mappings]

    def ranges(self, spans: Iterable[Span]) -> list[MappedRange]:
        """Return the parts of files that lie there; nothing for memory without a file."""
        return [part for span in spans for part in self._of(span)]

    def _of(self, span: Span) -> Iterator[MappedRange]:
        address, end = span.address, span.address + span.nbytes
        at = bisect_right(self._starts, address) - 1
        # One file may lie in several mappings, one after the other.
        while 0 <= at < len(self._mappings) and address < end:
            mapping = self._mappings[at]
            if not mapping.start <= address < mapping.end:
                return
            stop = min(end, mapping.end)
            yield MappedRange(
                mapping.path, mapping.offset + address - mapping.start, stop - address
            )
            address, at = stop, at + 1


class _Seen:
    """The mappings as `mapped_ranges` last saw them; None: not yet."""

    mappings: Mappings | None = None
    missed = 0  # calls since `refresh_mappings` for memory that none of them covers


_seen = _Seen()


def mapped_ranges(data: object) -> list[MappedRange]:
    """Return the parts of files that an array or tensor is mapped from, without reading them.

    A dataset's method `ranges` may return this for what `dataset[index]` reads, for example
    `creel.mapped_ranges(self.tokens[1024 * index : 1024 * (index + 1)])`.

    Args:
        data: a view of a `np.memmap`, or a tensor of a mapped file (`torch.load(mmap=True)`,
            `torch.from_file`, safetensors). Nothing is returned for memory without a file.

    Raises:
        TypeError: it is neither an array nor a tensor.
    """
    spans = list(layout_of(data).spans())
    if _seen.mappings is None:
        _seen.mappings = Mappings()
    ranges = _seen.mappings.ranges(spans)
    if sum(part.nbytes for part in ranges) < sum(span.nbytes for span in spans):
        # Mapped since, or no file's. Looking takes a millisecond: at the 1st, 2nd, 4th, 8th, ...
        _seen.missed += 1
        if _seen.missed & (_seen.missed - 1) == 0:
            _seen.mappings = Mappings()
            return _seen.mappings.ranges(spans)
    return ranges


def refresh_mappings() -> None:
    """Have `mapped_ranges` look at the process's mappings anew."""
    _seen.mappings, _seen.missed = None, 0


class Layout(NamedTuple):
    """Where the elements of an array lie. `strides` are in bytes."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int

    def row(self, index: int) -> Layout:
        """Return the layout of array[index]; IndexError outside it."""
        at = range(self.shape[0])[index]
        address = self.address + at * self.strides[0]
        return Layout(address, self.shape[1:], self.strides[1:], self.itemsize)

    def spans(self) -> Iterator[Span]:
        """Yield the memory of all elements, together with gaps that are no larger than they."""
        if 0 in self.shape:
            return
        steps = [(n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True)]
        first = self.address + sum(step for step in steps if step < 0)
        span = Span(first, sum(map(abs, steps)) + self.itemsize)
        if not self.shape or span.nbytes <= 2 * self.itemsize * int(np.prod(self.shape)):
            yield span
            return
        for i in range(self.shape[0]):
            yield from self.row(i).spans()


def layout_of(data: object) -> Layout:
    """Return where an array or a tensor lies; TypeError for anything else."""
    if isinstance(data, torch.Tensor):
        if data.layout is not torch.strided or data.device.type != "cpu":
            return Layout(0, (0,), (0,), 1)
        size = data.element_size()
        strides = tuple(size * stride for stride in data.stride())
        return Layout(data.data_ptr(), tuple(data.shape), strides, size)
    if isinstance(data, np.ndarray):
        return Layout(data.ctypes.data, data.shape, data.strides, data.itemsize)
    raise TypeError(f"{type(data).__name__} is neither an array nor a tensor")


def _of_file(line: bytes) -> bool:
    return b"/" in line


def _parsed(line: bytes) -> _MappedFile:
    """Parse a line of /proc/self/maps (`man 5 proc_pid_maps`).

    >>> _parsed(b"7f10-7f30 r--p 00002000 08:01 131      /data/a b.arrow")
    _MappedFile(start=32528, end=32560, offset=8192, path='/data/a b.arrow')
    """
    addresses, _, offset, _, _, path = line.split(None, 5)
    start, end = (int(text, 16) for text in addresses.split(b"-"))
    return _MappedFile(start, end, int(offset, 16), os.fsdecode(path))
