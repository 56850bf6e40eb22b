"""Overdue: a wait for a batch that has not ended, told to the daemon from its first second on.

A wait is counted when it is over. While storage hangs, none is: `creel top`, `creel stats` and
Prometheus would say that all is well. So a thread (`watch`) looks twice a second at each iterator.
It counts what the iterator has waited so far, and says for what.
"""

from __future__ import annotations

import threading
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

from creel.cache.memory.shared_words import HEARTBEAT
from creel.counters import CAUSES
from creel.loader.client.log_lines import with_rank
from creel.loader.data.reading.bad_samples import printable
from creel.loader.line.steps.batch_stream import BatchStream
from creel.loader.making.batch_times import CAUSE_OF, IDLE, READING, StallWarning
from creel.loader.making.workers.kernel_waits import Reader

#: From so many ns on a batch is overdue; seconds between two looks.
_OVERDUE_NS, _LOOK_S = 1_000_000_000, 0.5
#: A daemon that has not beaten for so long does not answer; it beats every 0.1 s.
_SILENT_NS = 500_000_000


class Awaited(NamedTuple):
    """What an iterator waits with, at the moment.

    Attributes:
        stream: its session; None: it has none.
        batch: the number of the batch that is awaited; None: the sampler has not drawn it.
        absent: the address of one of its objects that the daemon does not have yet; "" if it has
            all.
        readers: who makes batches.
    """

    stream: BatchStream | None
    batch: int | None
    absent: str
    readers: Sequence[Reader]

    def cause(self) -> tuple[str, str]:
        """Return the cause of the wait, as the meter has it, and the file that is waited for."""
        if self.batch is None:
            return "sampler", ""
        if self.absent:
            return "source", self.absent
        stages = [(reader, *reader.stage()) for reader in self.readers]
        makers = [stage for stage in stages if stage[2] == self.batch and stage[1] != IDLE]
        makers = makers or [stage for stage in stages if stage[1] == READING]  # it is in the queue
        for reader, stage, _ in makers:
            wait = reader.waits()
            if stage == READING and wait.storage:
                return "source", printable(wait.path)
        return CAUSE_OF.get(makers[0][1], "daemon") if makers else "daemon", ""


class Overdue:
    """The present wait of one iterator, which calls all but `poll`.

    Attributes:
        since: when it began, monotonic ns; 0: the iterator does not wait.
        reported_to: which session knows of it; None: none. If one does, the wait ends with `ends`.
        warns_after_s: the training script is warned of a wait of so many seconds.
    """

    def __init__(self, awaited: Callable[[], Awaited], warns_after_s: float) -> None:
        """`awaited`: a method of the iterator's run, which this does not keep alive."""
        self.warns_after_s = warns_after_s
        self._warned: object = None  # the batch of which `warn` has told
        self._awaited = weakref.WeakMethod(awaited)
        self.since, self.over = 0, False  # `over`, `next_at`: for `Watch`
        self.next_at = time.monotonic() + _LOOK_S
        self.reported_to: BatchStream | None = None
        self._counted = 0  # until when it was counted, ns
        #: ns by cause that were counted before the wait was over.
        self._ahead = dict.fromkeys(CAUSES, 0)
        self._lock = threading.Lock()

    def ends(self) -> None:
        """End the wait: the batch is there, or will not come."""
        self.since = 0
        if self.reported_to is not None:
            with self._lock:
                self.reported_to.session.words.set_overdue(0)
                self.reported_to = None

    def warn(self, batch: tuple[int, int], maker: str, waited_s: float) -> None:
        """Warn once of a batch, the second of (epoch's tag, number), that is awaited for long.

        maker: who has it, and what that one is doing; "": others warn.
        """
        if batch == self._warned or waited_s < self.warns_after_s or not maker:
            return
        self._warned = batch
        text = (
            f"no batch for {waited_s:.0f} s: batch {batch[1]} is with {maker}; still waiting"
            " (DataLoader(timeout=...) sets a limit)"
        )
        warnings.warn(with_rank(text), StallWarning, stacklevel=4)

    def poll(self) -> None:
        """Count a wait that is too long, and tell the daemon of it; called by the thread."""
        self.next_at = time.monotonic() + _LOOK_S
        since, now = self.since, time.monotonic_ns()
        if not since or now - since < _OVERDUE_NS:
            return
        ask = self._awaited()
        awaited = None if ask is None else ask()
        stream = None if awaited is None else awaited.stream
        if awaited is None or stream is None or not stream.alive:
            return
        if now - stream.session.words[HEARTBEAT] > _SILENT_NS:
            return  # the wait may be for the daemon itself, which tells nobody of it now
        cause, path = awaited.cause()
        with self._lock:
            self.reported_to = stream
            if self.since != since:  # it has just ended
                self.reported_to = None
                return
            words = stream.session.words
            words.set_overdue(since, cause, path)
            counted, self._counted = max(self._counted, since), now
            self._ahead[cause] += now - counted
            words.add(f"stall_{cause}_ns", now - counted)

    def settle(self, counts: dict[str, int]) -> dict[str, int]:
        """Return what is to be counted of a wait that is over, less what was counted before.

        What was counted for another cause is not counted twice: the sum of all causes holds.
        """
        with self._lock:
            ahead = sum(self._ahead.values())
            if not ahead:
                return counts
            counts = dict(counts)
            words = [f"stall_{cause}_ns" for cause in CAUSES]
            for cause, word in zip(CAUSES, words, strict=True):
                paid = min(self._ahead[cause], counts.get(word, 0))
                self._ahead[cause] -= paid
                counts[word] = counts.get(word, 0) - paid
            for cause in CAUSES:
                for word in words:
                    paid = min(self._ahead[cause], counts[word])
                    self._ahead[cause] -= paid
                    counts[word] -= paid
        return {name: n for name, n in counts.items() if n}
