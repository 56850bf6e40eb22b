"""Where address space is limited (`ulimit -v`), libraries reserve none that batches may need."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress

_M_ARENA_MAX = -8  # malloc.h of glibc


def leave_address_space() -> None:
    """Keep Arrow and glibc from reserving address space in this process, where it is limited.

    Arrow's own allocator reserves 1 GiB at its first use, glibc 64 MiB for each thread that
    allocates (mallopt(3)). Both take less where there is less, and leave none for others: batches
    could not be allocated that torch has room for.
    """
    try:
        import resource
    except ImportError:  # on Windows, where this module is imported, too
        return
    if resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY:
        return
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")  # read when Arrow is imported
    import pyarrow as pa

    pa.set_memory_pool(pa.system_memory_pool())  # where it was imported before
