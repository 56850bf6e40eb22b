"""Proof: how far it is proved that samples read the objects of a leaf, where that is not known."""

from __future__ import annotations


class Proof:
    """How far a list of objects is proved."""

    def allowed(self) -> int | None:
        """Return how many samples may be fetched ahead in all; None: all.

        0: only those of batches that are requested. Below 0: not even these, until as many were
        read directly.
        """
        raise NotImplementedError
