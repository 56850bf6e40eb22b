"""What keeping a dataset's samples decoded would bring, measured now and then.

`creel stats --why` says from it how much memory `keep_decoded=` would take, and how much faster
training would be.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from creel.loader.data.decoded.codec import UnkeptError, encode
from creel.loader.data.decoded.rng_use import Draws

if TYPE_CHECKING:
    from creel.loader.data.reading.lease import Lease

#: One sample is measured in each of the first batches of a process, and later in one of so many:
#: that takes 0.16 ms for an image of 562 KB, and so 2.5 us a batch (by hand).
_FIRST, _BATCHES = 4, 64
_batch = itertools.count()


def measuring(lease: Lease, decode: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Return `decode` for the first sample of a batch: now and then one that is measured."""
    batch = next(_batch)
    if batch >= _FIRST and batch % _BATCHES:
        return decode

    def measured(data: bytes) -> Any:
        draws, began = Draws(), time.monotonic_ns()
        sample = decode(data)
        ns = time.monotonic_ns() - began
        if not draws.any():
            lease.measured = ns, _nbytes(sample)
        return sample

    return measured


def counts(lease: Lease) -> dict[str, int]:
    """Return what was counted under a lease, by the names of `creel.counters`.

    What cannot be kept is not measured: samples of a decoder that draws random numbers, and objects
    of unknown classes.
    """
    counters = {"decoded_calls": lease.decodes} if lease.decodes else {}
    ns, nbytes = lease.measured
    if nbytes:
        counters |= {"decoded_measured": 1, "decoded_call_ns": ns, "decoded_call_nbytes": nbytes}
    return counters


def _nbytes(sample: object) -> int:
    """Return the bytes of a sample as it would be kept; 0 if it cannot be."""
    try:
        node, buffers = encode(sample)
        return len(msgspec.msgpack.encode(node)) + sum(len(buffer) for buffer in buffers)
    except (UnkeptError, UnicodeEncodeError):
        return 0
