"""FetchLimit: how many samples may be fetched ahead, while it is not known what they read."""

from __future__ import annotations


class FetchLimit:
    """A limit for the objects of a leaf, which grows while it is proved that samples read them."""

    def allowed(self) -> int | None:
        """Return how many samples may be fetched ahead in all; None: all.

        0: only those of batches that are requested. Below 0: not even these, until as many were
        read directly.
        """
        raise NotImplementedError
