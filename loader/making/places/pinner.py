"""Pinner: the thread that receives batches, and copies them to pinned memory or locks theirs."""

from __future__ import annotations

import logging
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec
import torch

from creel.loader.making.places.made import Event, Made
from creel.loader.making.transport.pinning import empty_pinned, is_plain
from creel.loader.torch_private import ExceptionWrapper

if TYPE_CHECKING:
    from creel.loader.making.transport.pinning import Pinning

_log = logging.getLogger("creel.loader")


class Pinner:
    """A thread that receives events from the workers and pins their batches.

    Batches that are lent (`Lender`) stay in their slots, whose pages are locked instead. They are
    plain: what else refers to their memory is not known.
    """

    def __init__(self, receive: Callable[[float], Event | None], pinning: Pinning) -> None:
        """Start the thread; `receive`: of a `BatchPlace`, which this does not keep alive."""
        self._receive = weakref.WeakMethod(receive)
        self._pinning = pinning
        self._lends = False
        self._queue: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="pt_data_pin")
        self._thread.start()

    def get(self, timeout_s: float) -> Event | None:
        """Return the next event, data pinned; None on timeout; RuntimeError if the thread died."""
        try:
            return self._queue.get(timeout=timeout_s)
        except queue.Empty:
            if not self._thread.is_alive():
                raise RuntimeError("Pin memory thread exited unexpectedly") from None
            return None

    def lend(self, lends: bool) -> None:
        """Set whether batches are lent from now on, as far as their memory can be locked."""
        self._lends = lends and self._pinning.for_cuda()

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: str) -> torch.Tensor:
        """Return what `torch.empty` does, in pinned memory if there is any."""
        with suppress(RuntimeError):  # else to pin the batch tells of it
            if self._pinning.for_cuda():
                return empty_pinned(shape, dtype=dtype, device=device)
        return torch.empty(shape, dtype=dtype, device=device)

    def stop(self) -> None:
        """Stop the thread, which checks every 0.1 s."""
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join(1.0)

    def _run(self) -> None:
        torch.set_num_threads(1)
        self._pinning.use_device()
        while not self._stop.is_set() and (receive := self._receive()) is not None:
            event = receive(0.1)
            if event is not None:
                self._queue.put(self._pinned(event))
            del event, receive

    def _pinned(self, event: Event) -> Event:
        if not isinstance(event, Made):
            return event
        data: object = None
        lent: Sequence[object] = ()
        try:
            lends = self._lends and self._locked(event)
            if not lends:
                event.unlock_pages()  # else the batch would not be copied
            data = event.unpacked()
            if not isinstance(data, ExceptionWrapper):
                lent = self._lent(event, data) if lends else ()
                data = self._pinning.pin(data)
        except Exception:  # noqa: BLE001  what a user's pin_memory() raises is the result
            where = f"in pin memory thread for device {self._pinning.index}"
            data = ExceptionWrapper(where=where)  # type: ignore[no-untyped-call]  # torch's
        return msgspec.structs.replace(event, data=data, inbox=None, lent=lent)

    def _locked(self, event: Made) -> bool:
        """Lock the pages of a batch's slots; False, for good, if CUDA cannot."""
        try:
            event.lock_pages(self._pinning.lock)
        except RuntimeError as e:
            _log.info("batches are copied to pinned memory: %s", e)
            self._lends = False
        return self._lends

    def _lent(self, event: Made, data: object) -> Sequence[object]:
        """Return the leases of a batch; unlock its pages if it is not plain."""
        if is_plain(data):
            return event.leases()
        self._lends = False
        event.unlock_pages()
        return ()
