"""The part of creel in a training process: `creel.DataLoader`, datasets, the daemon's client.

`order` predicts an epoch's order (`epoch_order.predict`), `plan` sends it to the daemon, and
`iterators` make the batches, with `workers` or without. `binding` finds the objects that a
dataset's samples need. `reading` gets their bytes (`observer`), also for a plain `open` below
`creel.wrap` (`intercept`). `client` has the connection, `cluster` the job's other ranks and nodes.
"""

import os
import sys
from contextlib import suppress
from importlib import import_module

from creel.cache.memory.address_space import leave_address_space
from creel.loader.client.log_lines import install
from creel.system.forks import at_fork

#: A setting of pyarrow's jemalloc, one of its memory pools.
_JEMALLOC = "JE_ARROW_MALLOC_CONF"


def _prepare_arrow() -> None:
    """Import pyarrow without the thread of its jemalloc, unless the program has settings for that.

    Python 3.12 and later warn of each fork of a process with threads; torch's loader forks workers.
    The thread returns memory of arrays that are allocated in the jemalloc pool, which is not the
    default one. Without it, that is done when arrays are allocated and freed.
    """
    mine = "pyarrow" not in sys.modules and _JEMALLOC not in os.environ
    if mine:
        os.environ[_JEMALLOC] = "background_thread:false"
    try:
        leave_address_space()  # before anything here allocates
        import_module("pyarrow")
    finally:
        if mine:
            del os.environ[_JEMALLOC]


_prepare_arrow()
install()


def _finish_imports() -> None:
    """Import modules that are imported at their first use: numpy imports `numpy.ma` in `np.unique`.

    Another thread may be importing one when a process forks. In the child, the import lock would
    stay held, and a worker that needs the module would wait forever.
    """
    for name in ("numpy.ma", "zmq"):
        with suppress(Exception):  # the first user of the module reports that
            import_module(name)


at_fork(before=_finish_imports)
