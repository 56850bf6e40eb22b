"""torch's generators: real ones to draw from, copies to look ahead with, and lazy permutations.

No step waits for a large permutation. `policies.order.torch_random` computes its first entries,
piece by piece as they are needed, while torch draws the whole in a thread (without the GIL). A
generator that other code can see is advanced at once to the state after the draw
(benchmarks/planning.py).
"""

from __future__ import annotations

import base64
import contextlib
import threading
import zlib
from weakref import WeakValueDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from creel.policies.order import torch_random
from creel.system.forks import join_before_fork, reset_in_child

#: Smaller permutations are drawn at once: torch takes less than a millisecond.
_SMALL_DRAW = 1 << 17
#: Entries computed at a time before the whole is drawn: 1 ms, and 8 ms more for the second piece at
#: 14 M.
_SHUFFLE_PIECE = 1 << 13
#: Bytes drawn and discarded at a time: they stay in the processor's cache.
_DISCARDED_AT_ONCE = 1 << 20
#: A request this far beyond the computed entries (a resumed epoch) waits for the whole.
_MAX_GAP = 1 << 18


class RandomSource:
    """Source of an order's random numbers. This one draws from the real generators."""

    #: Whether only the order sees the generators' states, which may then lag behind its draws.
    unseen = False

    def seed(self, generator: torch.Generator | None) -> int:
        """Draw a base seed or sampler seed as torch does; None is the global generator."""
        return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())

    def of(self, generator: torch.Generator | None) -> torch.Generator:
        """Return the generator to draw from in place of `generator`."""
        return torch.default_generator if generator is None else generator


class GeneratorCopies(RandomSource):
    """Copies of generators in their present state: draws from them have no visible effect."""

    unseen = True

    def __init__(self, *generators: torch.Generator | None) -> None:
        """Copy the global generator and all of `generators`, each once."""
        real = [torch.default_generator, *(g for g in generators if g is not None)]
        self._kept = real  # keeps the ids below from being reused
        self._copies = {id(g): clone(g) for g in real}

    def seed(self, generator: torch.Generator | None) -> int:
        drawn = torch.empty((), dtype=torch.int64, device="cpu").random_(
            generator=self.of(generator)
        )
        return int(drawn.item())

    def of(self, generator: torch.Generator | None) -> torch.Generator:
        """Return the copy of `generator`, which must have been passed at construction."""
        return self._copies[id(torch.default_generator if generator is None else generator)]


def seeded(seed: int) -> torch.Generator:
    """Return a fresh generator with this seed, as torch's samplers make them."""
    return torch.Generator().manual_seed(seed)


def clone(generator: torch.Generator) -> torch.Generator:
    """Return an independent generator in the same state."""
    duplicate = torch.Generator(device=generator.device)
    duplicate.set_state(generator.get_state())
    return duplicate


def state_of(generator: torch.Generator) -> bytes:
    return bytes(generator.get_state().numpy().tobytes())


def set_state(generator: torch.Generator, state: bytes) -> None:
    generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def encode_state(state: bytes) -> str:
    """Encode a state as text for JSON (about 4 KB for the 5 KB of a CPU generator)."""
    return base64.b64encode(zlib.compress(state, 1)).decode("ascii")


def decode_state(text: str) -> bytes:
    return zlib.decompress(base64.b64decode(text, validate=True))


class Permutation:
    """`torch.randperm(n)` from a given state, drawn only as far as needed. Thread-safe."""

    def __init__(self, n: int, start: bytes) -> None:
        """Draw nothing yet; `start` is the generator's state before the draw."""
        self._n = n
        self._start = start
        self._after: bytes | None = None  # the generator's state after the draw
        self._whole: NDArray[np.int32] | None = None
        self.reset_for_process()
        reset_in_child(self)

    def reset_for_process(self) -> None:
        """Create the state of one process: after a fork, threads are gone and locks may be held."""
        self._whole_lock = threading.Lock()
        self._head_lock = threading.Lock()
        self._shuffle: torch_random.Shuffle | None = None
        self._head: NDArray[np.int32] = np.empty(0, np.int32)
        self._head_length = 0  # computed entries of the head

    def leave(self, generator: torch.Generator) -> None:
        """Put `generator` into the state after the draw."""
        if self._after is None:
            set_state(generator, self._start)
            discard(self._n - 1, generator)
            self._after = state_of(generator)
        else:
            set_state(generator, self._after)

    @property
    def ready(self) -> int:
        """Entries [0, ready) are computed."""
        return self._head_length if self._whole is None else self._n

    def first(self, k: int) -> NDArray[np.int32]:
        """Return an array that holds at least the first k <= n entries."""
        while self._whole is None and k <= self._head_length + _MAX_GAP:
            if k <= self._head_length:
                return self._head  # at least as long; perhaps the whole by now
            with self._head_lock:
                if k > self._head_length and self._whole is None:
                    self._extend_head()
        return self.whole()

    def _extend_head(self) -> None:
        if self._shuffle is None:
            self._shuffle = torch_random.Shuffle(self._n, torch_random.TorchRandom(self._start))
            self._head = np.empty(self._n, np.int32)  # only written pages take memory
            self._begin()
        piece = self._shuffle.more(_SHUFFLE_PIECE)
        self._head[self._head_length : self._head_length + len(piece)] = piece
        self._head_length += len(piece)

    def whole(self) -> NDArray[np.int32]:
        """Return all n entries; waits while another thread draws them."""
        with self._whole_lock:
            if self._whole is None:
                generator = torch.Generator()
                set_state(generator, self._start)
                drawn = randperm(self._n, generator)
                self._after = state_of(generator)
                with self._head_lock:
                    self._shuffle, self._head, self._whole = None, drawn, drawn
            return self._whole

    def _begin(self) -> None:
        # Not a daemon thread: one that returns from torch during Python's exit aborts the process.
        thread = threading.Thread(target=self._try_whole, name="creel-randperm")
        with contextlib.suppress(RuntimeError):  # no more threads: drawn piece by piece instead
            thread.start()
            join_before_fork(thread)

    def _try_whole(self) -> None:
        with contextlib.suppress(MemoryError, RuntimeError):  # a later `whole` raises it again
            self.first(2 * _SHUFFLE_PIECE)  # the second piece takes longest
            self.whole()


def discard(draws: int, generator: torch.Generator) -> None:
    """Advance `generator` by 32-bit draws, as bytes: one draw each, and torch's fastest."""
    unused = torch.empty(min(draws, _DISCARDED_AT_ONCE), dtype=torch.uint8, device="cpu")
    for start in range(0, draws, _DISCARDED_AT_ONCE):
        unused[: draws - start].random_(generator=generator)


def randperm(n: int, generator: torch.Generator) -> NDArray[np.int32]:
    """Draw in int32 if n fits: the same draws as torch's int64, and half the memory."""
    kind = torch.int32 if n <= np.iinfo(np.int32).max else torch.int64
    drawn: NDArray[np.int32] = torch.randperm(
        n, generator=generator, dtype=kind, device="cpu"
    ).numpy()
    return drawn


#: The permutations that orders and plans still hold, so that none is drawn twice.
_held: WeakValueDictionary[tuple[int, bytes], Permutation] = WeakValueDictionary()


def permutation(n: int, generator: torch.Generator) -> Permutation:
    """Return the permutation `generator` would draw now; its `leave` advances the generator."""
    key = (n, state_of(generator))
    order = _held.get(key)
    if order is None:
        order = _held.setdefault(key, Permutation(*key))
    if n < _SMALL_DRAW or n >= torch_random.SHUFFLE_LIMIT:
        order.whole()
    return order
