"""StreamBatches: a batch sampler that deals the records of a log in the order of their arrival.

The order is a function of the log alone, whatever the pace of producers and readers. Records are
taken in *windows* of `shuffle` arrivals, each permuted (without shuffling, a window is one global
batch). Step t of rank w has the global positions from `(t * world + w) * batch_size` on. So ranks
need no messages, and all get equally many batches: an incomplete global batch at the end is one of
a single rank, unless `drop_last`; of several, it is left out.

A place in this order is a window's first record and how many positions of the window are dealt. It
needs nothing that was deleted, so a job resumes at it in the same time wherever it is.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

from torch.utils.data import Sampler

from creel.errors import ConfigError
from creel.loader.extras.streams.arrival_iter import ArrivalIter, Place, SavedPlace
from creel.loader.extras.streams.replays import SavedMemory, growth_of
from creel.loader.extras.streams.share import Share
from creel.loader.line.order.rehearsing import Content
from creel.streams.log import Log


class StreamBatches(Sampler[list[int]]):
    """Batches of one rank. Made by `Stream.batches`.

    Iterating it begins at the beginning of the stream, or once at the place of `load_state_dict`.
    """

    foreseeable = False  # a copy that is run ahead would wait for the future

    def __init__(
        self,
        log: Log,
        name: str | None,
        batch_size: int,
        *,
        drop_last: bool,
        shuffle: int,
        seed: int,
        begin: int,
        share: Share,
        timeout_s: float | None,
    ) -> None:
        super().__init__()
        self.log, self.name, self.batch_size = log, name, batch_size
        self.drop_last = drop_last
        self.said = False  # that records are left out
        self.shuffle, self.seed, self.begin = shuffle, seed, begin
        self.share, self.timeout_s = share, timeout_s
        self._start: Place | None = None
        self._memory: SavedMemory | None = None  # at the start
        self.content: Content | None = None

    def __iter__(self) -> Iterator[list[int]]:
        return ArrivalIter(self)

    def rehearsing(self, content: Content) -> StreamBatches:
        """Return the same batches, each with rows of a memory that takes in the stream itself.

        Raises:
            ConfigError: the memory does not grow (`every=`), or has samples already.
        """
        growth_of(content)  # raises
        rehearsed = copy.copy(self)
        rehearsed.content = content
        return rehearsed

    def start(self) -> tuple[Place, SavedMemory | None]:
        """Return where an epoch that begins now begins; the next one begins at the beginning."""
        start, memory = self._start, self._memory
        self._start = self._memory = None
        return start or Place(self.begin, 0, 0, 0), memory

    def state(self, place: Place | None, memory: SavedMemory | None) -> SavedPlace:
        listed = None if place is None else list(place)
        state = SavedPlace(
            stream=self.log.about.id, shuffle=self.shuffle, seed=self.seed, place=listed
        )
        if memory is not None:
            state["rehearsal"] = memory
        return state

    def state_dict(self) -> SavedPlace:
        """Return where the next epoch begins; `creel.DataLoader.state_dict` has the position."""
        return self.state(self._start, self._memory)

    def load_state_dict(self, state: SavedPlace) -> None:
        """Begin the next epoch at a saved place, also with another batch size or number of ranks.

        Raises:
            ConfigError: the state is of another stream, of one that is shuffled otherwise, or with
                another memory.
        """
        mine = self.state(None, None)
        for key in ("stream", "shuffle", "seed"):
            if state[key] != mine[key]:
                raise ConfigError(
                    f"the saved state has {key}={state[key]!r}, this stream {mine[key]!r}"
                )
        memory = state.get("rehearsal")
        theirs = None if memory is None else memory["memory"]
        digest = None if self.content is None else self.content.digest
        if state["place"] is not None and theirs != digest:
            raise ConfigError(f"the saved state is with the memory {theirs}, this one is {digest}")
        self._start = None if state["place"] is None else Place(*state["place"])
        self._memory = memory


def rehearsed_stream(batches: object, content: Content) -> StreamBatches:
    """Return a loader's batch sampler with a memory.

    Raises:
        ConfigError: it is not that of a stream, or as `StreamBatches.rehearsing`.
    """
    if not isinstance(batches, StreamBatches):
        raise ConfigError("a stream is rehearsed with its own batches: stream.batches(n)")
    return batches.rehearsing(content)
