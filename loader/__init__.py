"""What lives in a training process: `creel.DataLoader`, datasets and the client of the daemon.

An epoch's order is predicted in `order` (`orders.predict`); `plan` tells the daemon; `iterators`
make the batches, with `workers` or without. `binding` says which objects a dataset's samples need;
`reading` is where their bytes come from (`observer`), also those of a plain `open` below
`creel.wrap` (`intercept`). `client` has the connection, `cluster` who else runs this job.
"""

from creel.cache.memory.address_space import leave_address_space

leave_address_space()  # before anything here allocates
