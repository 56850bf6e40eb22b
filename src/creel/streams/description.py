"""Description: what `stream.json` says of a log. Column: which values fit a field of a record."""

from __future__ import annotations

import numbers
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from creel.errors import ConfigError

Bools = NDArray[np.bool_]
#: Kinds of numpy's types that torch has: bool, int, uint, float, complex.
_KINDS = "biufc"


class Description(msgspec.Struct, frozen=True):
    """What `stream.json` says.

    Attributes:
        id: of this log; another one in the same folder has another.
        fields: of a record, in order: name, numpy's type ("<f4"), shape.
        records: of a full chunk.
        ahead: bytes that producers may be ahead of the slowest reader.
        keep: bytes that stay behind it.
        producers: as many must end before the log has ended.
        readers: names of readers that count before they have begun.
    """

    id: str
    fields: tuple[tuple[str, str, tuple[int, ...]], ...]
    records: int
    ahead: int
    keep: int
    producers: int = 1
    readers: tuple[str, ...] = ()

    def layout(self) -> np.dtype[Any]:
        """Return the structured type of a record, laid out as a C struct.

        Raises:
            ConfigError: there are no fields, or one has no numbers.
        """
        try:
            spec = [(name, np.dtype(kind), shape) for name, kind, shape in self.fields]
            dtype = np.dtype(spec, align=True)
        except (TypeError, ValueError) as e:
            raise ConfigError(f"the fields {self.fields} are not those of a record: {e}") from e
        kinds = [np.dtype(kind) for _, kind, _ in self.fields]
        wrong = [kind for kind in kinds if kind.kind not in _KINDS or kind.char in "gG"]
        if wrong or not dtype.itemsize or any(not kind.isnative for kind in kinds):
            raise ConfigError(f"fields are of numbers that torch has, not {wrong or self.fields}")
        return dtype


class Column:
    """One field of the collected records, and which values fit into it.

    Attributes:
        rows: (n, ...) values, a view of the records.
    """

    def __init__(self, name: str, rows: NDArray[Any]) -> None:
        self.rows = rows
        self._name, self._dtype, self._shape = name, rows.dtype, rows.shape[1:]
        #: Bounds of Python's own numbers that fit for certain, which then need no array.
        self._least, self._most, self._largest = 1, 0, -1.0
        if self._shape or self._dtype.kind == "b":
            return
        if self._dtype.kind in "iu":
            self._least, self._most = np.iinfo(self._dtype).min, np.iinfo(self._dtype).max
        else:
            precision = np.finfo(self._dtype)
            self._most = 2 ** (precision.nmant + 1)
            self._least, self._largest = -self._most, float(precision.max)

    def fitting(self, value: object) -> ArrayLike:
        """Return a value that can be assigned to a row.

        Fractions are rounded to the field's precision; no other number may change.

        Raises:
            ConfigError: it has another shape, is none of numbers, or does not fit.
        """
        if type(value) is int and self._least <= value <= self._most:
            return value
        if isinstance(value, float) and -self._largest <= value <= self._largest:
            return value
        try:
            array = np.asarray(value)
        except (TypeError, ValueError, RuntimeError) as e:  # ragged lists, a GPU's tensors
            raise ConfigError(f"{self._name} is no array of numbers: {e}") from e
        if array.shape != self._shape:
            raise ConfigError(f"{self._name} has shape {array.shape}, the stream has {self._shape}")
        if array.dtype == self._dtype:
            return array
        if array.dtype.kind == "f" and self._dtype.kind in "iu" and not hasattr(value, "dtype"):
            array = np.array(value, object)  # a list's large ints, which numpy rounds beside floats
        if not _numeric(array):
            raise ConfigError(f"{self._name} is {value!r}: give numbers, for {self._dtype}")
        convert = _of_objects if array.dtype.kind == "O" else _cast
        cast, fits = convert(array, self._dtype)
        if not fits.all():
            misfit = array[~fits].flat[0]
            raise ConfigError(f"{self._name} is {misfit}, which does not fit {self._dtype}")
        return cast


def _numeric(array: NDArray[Any]) -> bool:
    if array.dtype.kind != "O":
        return array.dtype.kind in "biufc"
    return all(isinstance(value, (numbers.Number, np.bool_)) for value in array.flat)


def _cast(array: NDArray[Any], dtype: np.dtype[Any]) -> tuple[NDArray[Any], Bools]:
    """Return numbers as another type, and which of them fit."""
    fits = np.ones(array.shape, np.bool_)
    if array.dtype.kind == "c" and dtype.kind != "c":
        fits, array = array.imag == 0, array.real
    with np.errstate(all="ignore"):
        cast = array.astype(dtype)
        if array.dtype.kind in "fc" and dtype.kind in "fc":
            return cast, fits & (np.isinf(cast) == np.isinf(array))
        if array.dtype.kind == "f" and dtype.kind in "iu":
            return cast, fits & _whole(array, dtype)
        if array.dtype.kind in "iu" and dtype.kind in "fc":
            return cast, _whole(cast.real, array.dtype) & (cast.real.astype(array.dtype) == array)
        return cast, fits & (cast == array)


def _whole(floats: NDArray[Any], dtype: np.dtype[Any]) -> Bools:
    """Return which floats are whole numbers of a type of ints."""
    bounds, wide = np.iinfo(dtype), floats.astype(np.float64)
    inside = (wide >= bounds.min) & (wide < float(bounds.max) + 1)
    whole: Bools = inside & (floats == np.trunc(floats))
    return whole


def _of_objects(array: NDArray[Any], dtype: np.dtype[Any]) -> tuple[NDArray[Any], Bools]:
    """As `_cast`, of Python's own numbers."""
    cast, fits = np.zeros(array.shape, dtype), np.zeros(array.shape, np.bool_)
    bounds = (0, 1) if dtype.kind == "b" else None
    if dtype.kind in "iu":
        bounds = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
    for at, value in np.ndenumerate(array):
        with suppress(TypeError, ValueError, OverflowError), np.errstate(all="ignore"):
            if bounds is not None and not bounds[0] <= value <= bounds[1]:
                continue
            cast[at] = value
            held = cast[at].item()
            rounded = bounds is None and not isinstance(value, numbers.Integral)
            fits[at] = held == value or value != value or (rounded and np.isfinite(held))
    return cast, fits
