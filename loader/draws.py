"""torch's generators: real ones to draw from, copies to look ahead with, and lazy permutations.

A large permutation is not waited for. Its first entries come from `policies.plan`, piece by piece
as they are needed, while a thread lets torch draw the whole (the GIL is free meanwhile); a
generator that others can see is put forward at once into the state that the draw leaves (2.6 ns an
entry).
"""

from __future__ import annotations

import base64
import contextlib
import os
import threading
import zlib
from weakref import WeakValueDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from creel.policies import plan

#: Below this torch draws the whole in under a millisecond, and nothing is gained by waiting.
_SMALL = 1 << 17
#: Below this a draw takes some tens of microseconds: not worth remembering.
_TINY = 1 << 13

#: So many entries are made at first without the whole (1 ms), then at once so many more, and more.
_FIRST = 1 << 13
_STAGES = 1 << 18
#: After these, so many at a time (1 ms) where the whole takes longer than the stages give time for.
_PIECE = 1 << 13
_LONG = 1 << 22
#: Who needs an entry this far beyond what is there (a resumed epoch) waits for the whole.
_LEAP = 1 << 18
#: States after a draw that are remembered, 5 KB each: who foresees an epoch makes them, who begins
#: it uses them.
_STATES = 8


class Dice:
    """Where an order's random numbers come from. This one: the real generators."""

    def seed(self, generator: torch.Generator | None) -> int:
        """Draw as torch draws base seeds and sampler seeds; None is the global generator."""
        return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())

    def of(self, generator: torch.Generator | None) -> torch.Generator:
        """The generator that draws for `generator`."""
        return torch.default_generator if generator is None else generator


class Shadow(Dice):
    """Copies of generators in their present state: draws from them are seen by nobody."""

    def __init__(self, *generators: torch.Generator | None) -> None:
        """Copy the global generator and all of `generators`, each once."""
        real = [torch.default_generator, *(g for g in generators if g is not None)]
        self._kept = real  # so that no id below is used again
        self._copies = {id(g): clone(g) for g in real}

    def seed(self, generator: torch.Generator | None) -> int:
        """As `Dice.seed`, from the copy."""
        drawn = torch.empty((), dtype=torch.int64, device="cpu").random_(
            generator=self.of(generator)
        )
        return int(drawn.item())

    def of(self, generator: torch.Generator | None) -> torch.Generator:
        """The copy of `generator`, which must have been named at construction."""
        return self._copies[id(torch.default_generator if generator is None else generator)]


def seeded(seed: int) -> torch.Generator:
    """A fresh generator, as the samplers make them."""
    return torch.Generator().manual_seed(seed)


def clone(generator: torch.Generator) -> torch.Generator:
    """An independent generator in the same state."""
    made = torch.Generator(device=generator.device)
    made.set_state(generator.get_state())
    return made


def state_of(generator: torch.Generator) -> bytes:
    """The generator's state as bytes."""
    return bytes(generator.get_state().numpy().tobytes())


def set_state(generator: torch.Generator, state: bytes) -> None:
    """Put `generator` into a state that `state_of` gave."""
    generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def pack(state: bytes) -> str:
    """A state as text fit for JSON (about 4 KB for the 5 KB of a CPU generator)."""
    return base64.b64encode(zlib.compress(state, 1)).decode("ascii")


def unpack(text: str) -> bytes:
    """Undo `pack`.

    Raises:
        ValueError: `text` was not made by `pack`.
    """
    try:
        return zlib.decompress(base64.b64decode(text, validate=True))
    except zlib.error as e:
        raise ValueError(f"not a packed generator state: {e}") from e


class Permutation:
    """`torch.randperm(n)` from a given state, drawn as far as it is needed. Thread-safe."""

    def __init__(self, n: int, start: bytes, after: dict[bytes, bytes] | None = None) -> None:
        """`start` is the generator's state before the draw; `after` has some after such draws."""
        self._n = n
        self._start = start
        self._after = {} if after is None else after
        self._renew()
        self._whole: NDArray[np.int32] | None = None

    def _renew(self) -> None:
        """What belongs to one process: a fork leaves threads behind, and locks as they are."""
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._head_lock = threading.Lock()
        self._shuffle: plan.Shuffle | None = None
        self._head: NDArray[np.int32] = np.empty(0, dtype=np.int32)
        self._have = 0  # entries of the head that are there

    @classmethod
    def drawn(cls, n: int, generator: torch.Generator) -> Permutation:
        """Draw the whole from `generator` now."""
        made = cls(n, b"")
        made._whole = _randperm(n, generator)
        return made

    def leave(self, generator: torch.Generator) -> None:
        """Put `generator`, which is in the state before the draw, into the one after it."""
        if not self._start:
            return  # `drawn`: the generator has moved already
        after = self._after.get(self._start)
        if after is None:
            rng = plan.TorchRandom.from_state(self._start)
            rng.skip(self._n - 1)
            after = self._remember(rng.into_state(self._start))
        set_state(generator, after)

    def _remember(self, after: bytes) -> bytes:
        for old in list(self._after)[: 1 - _STATES]:
            self._after.pop(old, None)
        self._after[self._start] = after
        return after

    @property
    def ready(self) -> int:
        """Entries [0, ready) cost nothing any more."""
        return self._have if self._whole is None else self._n

    def first(self, k: int) -> NDArray[np.int32]:
        """An array that holds at least the first k <= n entries."""
        if self._whole is None and self._pid != os.getpid():
            self._renew()
        while self._whole is None and k <= self._have + _LEAP:
            if k <= self._have:
                return self._head  # made before `_have` said so
            with self._head_lock:
                if k > self._have and self._whole is None:
                    self._go_on()
        return self.whole()

    def _go_on(self) -> None:
        """Make one more piece of the head."""
        if self._shuffle is None:
            self._begin_anew(_FIRST)
            self._begin()
            return
        if self._have < self._stages:
            self._begin_anew(2 * self._have)
            return
        piece = self._shuffle.more(_PIECE)
        have = self._have + len(piece)
        if have > len(self._head):
            head = np.empty(min(2 * have, self._n), np.int32)
            head[: self._have] = self._head[: self._have]
            self._head = head
        self._head[self._have : have] = piece
        self._have = have

    @property
    def _stages(self) -> int:
        """Up to here all is made anew for twice as much."""
        return min(_STAGES, self._n // 16)

    def _begin_anew(self, k: int) -> None:
        """Make the first k entries at once, which costs no memory of the size of all."""
        shuffle = plan.Shuffle(self._n, plan.TorchRandom.from_state(self._start))
        self._head = shuffle.more(k)
        self._shuffle = shuffle
        self._have = len(self._head)

    def whole(self) -> NDArray[np.int32]:
        """All n entries; waits while another thread draws them."""
        if self._whole is not None:
            return self._whole
        if self._pid != os.getpid():
            self._renew()
        with self._lock:
            if self._whole is None:
                generator = torch.Generator()
                set_state(generator, self._start)
                drawn = _randperm(self._n, generator)
                self._remember(state_of(generator))
                self._whole = drawn
                with self._head_lock:
                    self._shuffle, self._head = None, drawn  # and their memory
        return self._whole

    def _begin(self) -> None:
        """Have the whole drawn behind the caller's back."""
        # No daemon thread: one that comes back from torch while Python ends aborts the process.
        thread = threading.Thread(target=self._try_whole, name="creel-randperm")
        with contextlib.suppress(RuntimeError):  # no more threads: piece by piece, then
            thread.start()

    def _hurry(self) -> None:
        """Keep ahead of who pulls batches as fast as it can, until the whole can be there."""
        while self._have < self._stages and self._whole is None:
            with self._head_lock:
                self._begin_anew(2 * self._have)
        if self._n >= _LONG:
            with self._head_lock:
                if self._shuffle is not None:
                    self._shuffle.prepare()

    def _try_whole(self) -> None:
        with contextlib.suppress(MemoryError, RuntimeError):  # then `whole` meets it again, in time
            self._hurry()
            self.whole()


def _randperm(n: int, generator: torch.Generator) -> NDArray[np.int32]:
    """int32 takes the same draws as torch's int64, and half the memory."""
    kind = torch.int32 if n <= np.iinfo(np.int32).max else torch.int64
    drawn: NDArray[np.int32] = torch.randperm(
        n, generator=generator, dtype=kind, device="cpu"
    ).numpy()
    return drawn


class Memo:
    """The permutations that orders and plans still hold: none but tiny ones is drawn twice."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: WeakValueDictionary[tuple[int, bytes], Permutation] = WeakValueDictionary()
        self._after: dict[int, dict[bytes, bytes]] = {}

    def permutation(self, n: int, generator: torch.Generator) -> Permutation:
        """The permutation that `generator` would draw now; call its `leave` to move on."""
        if n < _TINY or n >= plan.SHUFFLE_LIMIT:
            return Permutation.drawn(n, generator)
        key = (n, state_of(generator))
        with self._lock:
            found = self._held.get(key)
            if found is None:
                after = self._after.setdefault(n, {})
                found = self._held[key] = Permutation(*key, after)
        if n < _SMALL:  # drawn at once, but remembered
            found.whole()
        return found
