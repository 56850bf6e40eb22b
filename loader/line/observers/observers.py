"""Observers: those of one loader, over all its iterators; `EpochRun` has those of one iterator."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from creel.loader.line.observers.advice import Advice
from creel.loader.line.observers.bad_sample_report import BadSampleReport
from creel.loader.line.observers.meter import Meter
from creel.loader.line.observers.unwrapped_files import OwnFiles

if TYPE_CHECKING:
    from creel.loader.data.reading.bad_samples import Tolerance


class Observers:
    """What one loader counts, remembers and says.

    Attributes:
        uncounted: batches, and their samples, that the daemon does not know of.
        uncounted_s: seconds of epochs that had no session, not even for statistics.
    """

    def __init__(self, tolerance: Tolerance) -> None:
        self.meter = Meter()
        self.advice = Advice()
        self.own_files = OwnFiles()
        self.bad_samples = BadSampleReport(tolerance)
        self.uncounted: NDArray[np.int64] = np.zeros(2, np.int64)
        self.uncounted_s = 0.0
