"""Keeps libraries from reserving address space where it is limited (`ulimit -v`)."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress

_M_ARENA_MAX = -8  # malloc.h of glibc


def leave_address_space() -> None:
    """Keep Arrow and glibc from reserving address space in this process, if it is limited.

    Arrow's own allocator reserves 1 GiB at its first use, glibc 64 MiB for each thread that
    allocates (mallopt(3)). Both take whatever is left if there is less. Batches could then not be
    allocated, although they fit when torch is used alone.
    """
    try:
        import resource
    except ImportError:  # on Windows, where this module is imported as well
        return
    if resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY:
        return
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")  # read when Arrow is imported
    import pyarrow as pa

    pa.set_memory_pool(pa.system_memory_pool())  # for an Arrow that was imported before
