"""The part of creel in a training process: `creel.DataLoader`, datasets, the daemon's client.

`order` predicts an epoch's order (`epoch_order.predict`), `plan` sends it to the daemon, and
`iterators` make the batches, with `workers` or without. `binding` finds the objects that a
dataset's samples need. `reading` gets their bytes (`observer`), also for a plain `open` below
`creel.wrap` (`intercept`). `client` has the connection, `cluster` the job's other ranks and nodes.
"""

from contextlib import suppress
from importlib import import_module

from creel.cache.memory.address_space import leave_address_space
from creel.forks import at_fork

leave_address_space()  # before anything here allocates


def _finish_imports() -> None:
    """Import modules that are imported at their first use: numpy imports `numpy.ma` in `np.unique`.

    Another thread may be importing one when a process forks. In the child, the import lock would
    stay held, and a worker that needs the module would wait forever.
    """
    for name in ("numpy.ma", "zmq"):
        with suppress(Exception):  # the first user of the module reports that
            import_module(name)


at_fork(before=_finish_imports)
