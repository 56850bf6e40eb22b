"""torch's generators: real ones to draw from, copies to look ahead with, and lazy permutations.

A large permutation is not waited for. Its first entries come from `policies.plan` in about a
millisecond while a thread lets torch draw the whole (the GIL is free meanwhile); a generator that
others can see is put forward at once into the state that the draw leaves (2.6 ns an entry).
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

#: So many first entries are made without the whole (20 ms); who needs more waits for the thread.
_HEAD = 1 << 17


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

    def __init__(self, n: int, start: bytes) -> None:
        """`start` is the generator's state before the draw."""
        self._n = n
        self._start = start
        self._renew()
        self._whole: NDArray[np.int32] | None = None
        self._head: NDArray[np.int32] = np.empty(0, dtype=np.int32)
        self._after: bytes | None = None

    def _renew(self) -> None:
        """What belongs to one process: a fork leaves the thread behind, and the lock as it is."""
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

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
        after = self._after
        if after is None:
            rng = plan.TorchRandom.from_state(self._start)
            rng.skip(self._n - 1)
            after = rng.into_state(self._start)
        set_state(generator, after)

    def first(self, k: int) -> NDArray[np.int32]:
        """An array that holds at least the first k <= n entries."""
        if self._whole is not None:
            return self._whole
        if k > _HEAD:
            return self.whole()
        if len(self._head) < k:
            rng = plan.TorchRandom.from_state(self._start)
            self._head = plan.permutation_prefix(self._n, rng, min(_HEAD, max(4 * k, 4096)))
        self._begin()
        return self._head

    def whole(self) -> NDArray[np.int32]:
        """All n entries; waits while another thread draws them."""
        if self._pid != os.getpid():
            self._renew()
        with self._lock:
            if self._whole is None:
                generator = torch.Generator()
                set_state(generator, self._start)
                drawn = _randperm(self._n, generator)
                self._after = state_of(generator)
                self._whole = drawn
                self._head = drawn
        return self._whole

    def _begin(self) -> None:
        """Have the whole drawn behind the caller's back."""
        if self._thread is None:
            # No daemon thread: one that comes back from torch while Python ends aborts the process.
            thread = threading.Thread(target=self._try_whole, name="creel-randperm")
            with contextlib.suppress(RuntimeError):  # no more threads: drawn when it is needed
                thread.start()
                self._thread = thread

    def _try_whole(self) -> None:
        with contextlib.suppress(MemoryError, RuntimeError):  # then `whole` meets it again, in time
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

    def permutation(self, n: int, generator: torch.Generator) -> Permutation:
        """The permutation that `generator` would draw now; call its `leave` to move on."""
        if n < _TINY or n >= plan.SHUFFLE_LIMIT:
            return Permutation.drawn(n, generator)
        key = (n, state_of(generator))
        with self._lock:
            found = self._held.get(key)
            if found is None:
                found = self._held[key] = Permutation(*key)
        if n < _SMALL:  # drawn at once, but remembered
            found.whole()
        return found
