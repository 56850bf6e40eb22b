"""Bad samples (`on_error`) as the log and the daemon (`creel stats`) are told of them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from creel.cache.storage.stores.retry import public
from creel.loader.data.reading.bad_samples import BadSample, Key, Tolerance, printable

if TYPE_CHECKING:
    from creel.loader.data.binding.bind import Binding
    from creel.loader.line.steps.batch_stream import BatchStream

_log = logging.getLogger("creel.loader")


class BadSampleReport:
    """The bad samples of one loader that the daemon is yet to be told of."""

    def __init__(self, tolerance: Tolerance) -> None:
        self._tolerance = tolerance
        self._rows: list[tuple[int, str, str]] = []  # (number, address, reason)

    def add(
        self, samples: Sequence[BadSample], binding: Binding | None, stream: BatchStream | None
    ) -> None:
        """Log samples that were found bad, and report them to the daemon."""
        for sample in samples:
            index, reason = sample.index, sample.reason
            address = _address(index, binding) or printable(public(sample.path))
            at = address and f"({address}) "
            _log.warning("sample %s %sis %s: %s", index, at, self._tolerance.remedy, reason)
            # The daemon lists samples by number.
            number, text = (index, "") if isinstance(index, int) else (-1, f"{index}: ")
            self._rows.append((number, address, text + reason))
        self.report(stream)

    def report(self, stream: BatchStream | None) -> None:
        """Tell the daemon: those below `creel.wrap` are found before there is a session."""
        if self._rows and stream is not None and stream.alive:
            rows, self._rows = self._rows, []
            stream.report_bad(rows)


def _address(index: Key, binding: Binding | None) -> str:
    """Return the address of a sample's first object; "" if unknown."""
    if binding is None:
        return ""
    try:
        objects = binding.objects(np.array([index]))[0]
        address, _, _ = binding.manifest.location(int(objects[0]))
    except Exception:  # noqa: BLE001  user code may run here
        return ""
    return printable(public(address))
