"""A mount whose server answers no more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from testbed.slowfs import SlowFS

#: Longer than any test takes.
_STALL_S = 600


@contextmanager
def dead_file(folder: Path) -> Iterator[Path]:
    """Yield a file that open(2) never returns from (`needs_fuse`)."""
    source, mount = folder / "dead_source", folder / "dead_mount"
    source.mkdir()
    (source / "file").write_bytes(bytes(1000))
    with SlowFS(str(source), str(mount)) as fs:  # type: ignore[no-untyped-call]
        fs.set(stall=_STALL_S)
        yield mount / "file"
