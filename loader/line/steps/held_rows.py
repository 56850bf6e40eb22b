"""HeldRows: whether what training reads are rows of a mapped file that its dataset holds."""

from __future__ import annotations

from typing import Any

from creel.loader.data.maps.held import held_ranges, proved
from creel.loader.data.maps.page_files import PageFiles
from creel.loader.data.maps.ranges import RangesOf
from creel.loader.data.user_code.protected import length
from creel.loader.line.steps.batch_stream import samples_of

#: Batches of which it is looked at whether their samples are rows that the dataset holds.
_PULLED = 16
#: After so many batches nothing is found out any more: the dataset holds no such rows.
_LAST_ASK = 64


class HeldRows:
    """Finds out whether an epoch's samples are the rows of a mapped file that a dataset holds."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._pulled: list[tuple[int, list[int]]] = []  # the first batches, and their samples
        self._ask_at = 1  # when to find that out: at so many batches

    def claimed(self, batch: int, index: object) -> None:
        if len(self._pulled) < _PULLED:
            samples = samples_of(index)
            self._pulled.append((batch, [] if samples is None else samples.tolist()))

    def asks(self, done: int) -> bool:
        return done >= self._ask_at

    def ranges(self, done: int, files: PageFiles) -> tuple[RangesOf | None, bool]:
        """Return what each sample maps, if it is proved, and whether that is decided for good.

        done: batches that training has.
        """
        self._ask_at = 4 * done
        try:
            ranges, count = held_ranges(self._dataset), length(self._dataset)
            read = [i for batch, samples in self._pulled if batch < done for i in samples]
            proof = ranges and count and proved(ranges, read, count, files.resident)
        except Exception:  # noqa: BLE001  the person's object, or a library of another version
            return None, True
        return (ranges if proof else None), proof is not None or done >= _LAST_ASK
