"""Pinner: the thread that receives batches and copies them to pinned memory."""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from creel.loader.torch_private import ExceptionWrapper
from creel.loader.workers.events import BatchResult, WorkerEvent
from creel.loader.workers.unpacking import discard, unpack

if TYPE_CHECKING:
    from creel.loader.pinning import Pinning
    from creel.loader.reading.bad_samples import BadSample


class BatchPool(ABC):
    """What an iterator takes batches from, with or without a `Pinner` in between."""

    def __init__(self) -> None:
        self.pinner: Pinner | None = None
        self._bad: deque[BadSample] = deque()

    @abstractmethod
    def receive(self, timeout_s: float) -> WorkerEvent | None:
        """`next_event` without the pinner; only one thread may call this."""

    def next_event(self, timeout_s: float) -> WorkerEvent | None:
        """The next event, or None on timeout. A worker's death comes after all its results."""
        return self.receive(timeout_s) if self.pinner is None else self.pinner.get(timeout_s)

    def open(self, event: BatchResult) -> object:
        """The batch itself, or an ExceptionWrapper if the worker failed."""
        return event.packed if self.pinner is not None else unpack(event.packed, event.inbox)

    def discard(self, event: BatchResult) -> None:
        """Give back the slots of a batch that is not wanted."""
        if self.pinner is None:
            discard(event.packed, event.inbox)

    def take_bad(self) -> list[BadSample]:
        """Samples that workers could not read, also for batches that nobody wanted any more."""
        return [self._bad.popleft() for _ in range(len(self._bad))]


class Pinner:
    """A thread that receives events from the workers and copies batches to pinned memory."""

    def __init__(self, pool: BatchPool, pinning: Pinning) -> None:
        """Start the thread."""
        self._pool = weakref.proxy(pool)
        self._pinning = pinning
        self._queue: queue.SimpleQueue[WorkerEvent] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="pt_data_pin")
        self._thread.start()

    def get(self, timeout_s: float) -> WorkerEvent | None:
        """The next event with its data pinned, None on timeout; RuntimeError if the thread died."""
        try:
            return self._queue.get(timeout=timeout_s)
        except queue.Empty:
            if not self._thread.is_alive():
                raise RuntimeError("Pin memory thread exited unexpectedly") from None
            return None

    def stop(self) -> None:
        """Stop the thread, which checks every 0.1 s."""
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join(1.0)

    def _run(self) -> None:
        torch.set_num_threads(1)
        self._pinning.use_device()
        with contextlib.suppress(ReferenceError):
            while not self._stop.is_set():
                event = self._pool.receive(0.1)
                if event is not None:
                    self._queue.put(self._pinned(event))
                del event

    def _pinned(self, event: WorkerEvent) -> WorkerEvent:
        if not isinstance(event, BatchResult):
            return event
        data: object = None
        try:
            data = unpack(event.packed, event.inbox)
            if not isinstance(data, ExceptionWrapper):
                data = self._pinning.pin(data)
        except Exception:  # noqa: BLE001  whatever a user's pin_memory() raises is the result
            where = f"in pin memory thread for device {self._pinning.index}"
            data = ExceptionWrapper(where=where)  # type: ignore[no-untyped-call]  # torch's
        return replace(event, packed=data)
