"""What lives in a training process: `creel.DataLoader`, datasets and the client of the daemon.

An epoch's order is predicted in `order` (`orders.predict`); `plan` tells the daemon; `iterators`
make the batches, with `workers` or without. `binding` says which objects a dataset's samples need;
`reading` is where their bytes come from (`observer`), also those of a plain `open` below
`creel.wrap` (`intercept`). `client` has the connection, `cluster` who else runs this job.
"""

from contextlib import suppress
from importlib import import_module

from creel.cache.memory.address_space import leave_address_space
from creel.forks import at_fork

leave_address_space()  # before anything here allocates


def _finish_imports() -> None:
    """Import what is imported at its first use, `numpy.ma` by numpy itself (`np.unique`).

    Another thread may be about to. In a child that is forked meanwhile it would remain about to,
    and a worker that needs the module would wait for it without end.
    """
    for name in ("numpy.ma", "zmq"):
        with suppress(Exception):  # whoever needs it reports that
            import_module(name)


at_fork(before=_finish_imports)
