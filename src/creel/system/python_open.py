"""Files of creel itself and of /proc, opened by Python's own `open`, whatever has replaced it.

In a training process `open` may be another library's, which takes fewer arguments, or reads
elsewhere. It is called for the files of the person's code only. `Path.open`, too, looks `io.open`
up at each call.
"""

from __future__ import annotations

import os
from _io import open as python_open  # which nobody replaces there

__all__ = ["bytes_of", "python_open", "text_of"]


def bytes_of(path: str | os.PathLike[str]) -> bytes:
    """Return all bytes of a file; raises as `open`."""
    with python_open(path, "rb") as file:
        return file.read()


def text_of(
    path: str | os.PathLike[str], *, encoding: str | None = None, errors: str | None = None
) -> str:
    """Return all text of a file; raises as `open`."""
    with python_open(path, encoding=encoding, errors=errors) as file:
        return file.read()
