"""Streams of small records, and what is read of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from creel.loader.extras.streams.batches import StreamBatches
from creel.loader.extras.streams.stream import Stream
from creel.streams.log import Log
from creel.streams.producer import Producer

FIELDS: dict[str, Any] = {"x": ("float32", (3, 2)), "i": "int64"}
NBYTES = 32  # of a record of these fields


def record(i: int) -> dict[str, Any]:
    return {"x": np.full((3, 2), i / 2, np.float32), "i": i}


def filled(folder: str | Path, counts: list[int], chunk: int = 8, **limits: Any) -> Log:
    """Make a finished log whose chunks have these numbers of records."""
    with Producer(folder, FIELDS, chunk=chunk, linger_s=1e9, **limits) as producer:
        i = 0
        for count in counts:
            for _ in range(count):
                producer.put(**record(i))
                i += 1
            producer.flush()
    return Log.open(folder)


def taken(batches: StreamBatches) -> list[list[int]]:
    return list(batches)


def samples(folder: str | Path, numbers: list[list[int]]) -> list[list[int]]:
    """Return field i of the samples of each batch."""
    stream = Stream(folder, None)
    return [[int(stream[n]["i"]) for n in batch] for batch in numbers]
