"""Memory for batches that this process assembles itself."""

from __future__ import annotations

import os

import pytest

from creel.loader.gather import Ring


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_what_a_forked_child_has_of_a_batch_stays_as_it_was() -> None:
    """As with torch's, though the parent's next batch goes where this one was."""
    ring = Ring()
    batch = ring.lease(4096)
    batch[:3] = b"old"
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        os.read(read, 1)
        os._exit(0 if batch[:3] == b"old" else 1)
    del batch
    ring.lease(4096)[:3] = b"new"
    os.write(write, b"x")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    os.close(read)
    os.close(write)
