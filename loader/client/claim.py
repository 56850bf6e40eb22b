"""How one batch is to be read: which step of the session has its objects."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Claim(NamedTuple):
    """How one batch is to be read.

    Attributes:
        step: the session's, in which the batch's objects are ready; -1: read it directly.
        ids: (k,) its objects, sample by sample; empty without a step.
    """

    step: int
    ids: NDArray[np.int32]


#: The claim of a batch without a step.
DIRECT = Claim(-1, np.empty(0, np.int32))
