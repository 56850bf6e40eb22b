"""Random events for a core in a rig, and readers that must reach their end."""

from __future__ import annotations

import numpy as np
from core_rig import Rig

from core_shell import Bytes
from creel.cache.memory.pools.allocator import SYSTEM_PAGE
from creel.daemon.core.events import Dropped, MemoryFree, MemoryShort, Tick, Unregistered, Warm
from kit import default_window


class Chaos:
    """Random events for a rig."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = np.random.default_rng(seed)
        self.sizes: dict[str, int] = {}
        capacity = int(rng.integers(300, 20_000))
        tight = rng.random() < 0.3
        window = default_window(
            inflight_objects=int(rng.integers(2, 200)),
            inflight_nbytes=int(rng.integers(200, 20_000)),
            fetch_objects=int(rng.integers(1, 20)),
            min_steps=int(rng.integers(1, 8)),
        )
        self.rig = Rig(capacity // (10 if tight else 1), window)
        self.unplanned = float(rng.choice([0.0, 0.2, 1.0], p=[0.6, 0.2, 0.2]))
        self.epoch: dict[int, int] = {}
        self.next = 1
        for name in "abc"[: rng.integers(1, 4)]:
            n = int(rng.integers(1, 120))
            kind = rng.integers(0, 4)
            lengths = np.full(n, 100) if kind == 0 else rng.integers(0, 400, n)
            self.sizes[name] = n
            self.rig.register(name, lengths.tolist(), known=bool(kind < 2))
            self.rig.bad[name] = set(rng.integers(0, n, n // 20).tolist())
        if seed % 3 == 0:
            self.rig.memory = self.some
        if seed % 2:
            self.rig.late = lambda: bool(rng.random() < 0.9)
        if seed % 4 == 1:
            self.rig.postpones = lambda: bool(rng.random() < 0.7)

    def some(self, k: int) -> int:
        """Return how many of k objects the machine has memory for."""
        return int(self.rng.integers(0, k + 1)) if self.rng.random() < 0.3 else k

    def turn(self) -> None:
        rng, rig = self.rng, self.rig
        open_ = list(rig.readers)
        chance = rng.random()
        if chance < 0.45 and rig.fetches:
            rig.land(int(rng.choice(list(rig.fetches))))
        elif chance < 0.5 and len(open_) < 5:
            self.open()
        elif chance < 0.6 and open_:
            self.extend(int(rng.choice(open_)))
        elif chance < 0.9 and open_:
            self.progress(int(rng.choice(open_)))
        elif chance < 0.92 and open_:
            s = int(rng.choice(open_))
            rig.truncate(s, int(rng.integers(0, len(rig.readers[s].objects) + 2)))
        elif chance < 0.93 and open_:
            rig.close(int(rng.choice(open_)))
        elif chance < 0.95:
            rig.feed(Warm(str(rng.choice(list(self.sizes)))))
        elif chance < 0.96:
            rig.feed(Dropped(str(rng.choice(list(self.sizes)))))
        elif chance < 0.97:
            self.renew(str(rng.choice(list(self.sizes))))
        else:
            change = int(rng.integers(1, 3 * SYSTEM_PAGE))
            rig.feed([Tick(), Tick(), MemoryShort(change), MemoryFree(change)][rng.integers(4)])

    def renew(self, name: str) -> None:
        """Remove a dataset without readers, and register it again."""
        rig = self.rig
        if not rig.core.busy(name):
            size, bad = rig.size[name], rig.bad[name]
            rig.feed(Unregistered(name))
            rig.register(name, size.tolist(), known=bool(self.rng.random() < 0.5))
            rig.bad[name] = bad

    def open(self) -> None:
        rng = self.rng
        name = str(rng.choice(list(self.sizes)))
        job = str(rng.choice(["j", "k"]))
        self.rig.open(self.next, name, job, int(rng.integers(0, 3)), 3)
        self.epoch[self.next] = 0
        self.next += 1

    def extend(self, session: int) -> None:
        rng, reader = self.rng, self.rig.readers[session]
        n = self.sizes[reader.dataset]
        ids = rng.permutation(n) if rng.random() < 0.7 else rng.integers(0, n, n)
        batch = int(rng.integers(1, 20))
        cuts = [ids[i : i + batch].tolist() for i in range(0, len(ids), batch)]
        if rng.random() < 0.1:
            cuts.insert(0, [])
        if rng.random() < self.unplanned:
            self.rig.extend(session, self.epoch[session], cuts[:1], unplanned=True)
            return
        self.rig.extend(session, self.epoch[session], cuts)
        self.epoch[session] += rng.random() < 0.8

    def progress(self, session: int) -> None:
        rng, reader = self.rng, self.rig.readers[session]
        done = reader.done
        if rng.random() < 0.7:
            done = int(rng.integers(reader.done, max(reader.ready, reader.done) + 1))
        elif rng.random() < 0.1:
            done = int(rng.integers(-5, len(reader.objects) + 5))  # hostile, or read directly
        wanted = 0
        if rng.random() < 0.3:
            wanted = reader.ready + int(rng.integers(1, 4))
        elif rng.random() < 0.05:
            wanted = 1 << 60
        self.rig.progress(session, done, wanted)
        if rng.random() < 0.5:
            self.rig.end_turn()

    def finish(self) -> None:
        """Let all sessions read to the end, at most 10 steps more: none may hang."""
        rig = self.rig
        for n, reader in rig.readers.items():
            if len(reader.objects) > reader.done + 10:
                rig.truncate(n, reader.done + 10)
        for _ in range(20_000):
            left = [n for n, r in rig.readers.items() if r.done < len(r.objects)]
            if not left:
                return
            for n in left:
                reader = rig.readers[n]
                rig.progress(n, reader.ready, reader.ready + 1)
            if rig.fetches:
                rig.land(next(iter(rig.fetches)))
            rig.write_disk()
        raise AssertionError(f"stuck: {rig.readers}")


class Images(Chaos):
    """Random events with sizes that vary like those of images, and with little memory."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = np.random.default_rng(seed)
        sizes = {
            name: np.maximum(rng.lognormal(6.5, 0.9, int(rng.integers(40, 120))), 1).astype(int)
            for name in "ab"[: rng.integers(1, 3)]
        }
        total = int(sum(s.sum() for s in sizes.values()))
        capacity = int(total * rng.uniform(0.25, 0.8))
        self.arena, window = Bytes(capacity), default_window(fetch_objects=8, min_steps=3)
        self.rig = Rig(capacity, window, self.arena)
        self.sizes = {name: len(s) for name, s in sizes.items()}
        self.epoch, self.next, self.unplanned = {}, 1, 0.2 * (seed % 2)
        for name, s in sizes.items():
            self.rig.register(name, s.tolist(), known=bool(rng.random() < 0.6))
            self.rig.bad[name] = set(rng.integers(0, len(s), 2).tolist())
            if rng.random() < 0.5 and self.rig.length[name][0] >= 0:
                self.rig.size[name][::17] += 5  # changed since they were listed
        if seed % 3 == 0:
            self.rig.memory = self.some
