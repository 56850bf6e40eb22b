"""Slots that several ranks map: none is written while a rank has a batch in it."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from creel.loader.client.claim import DIRECT
from creel.loader.making.places.follower import Follower, ReplicaPool
from creel.loader.making.places.leader import Leader, SentBatches
from creel.loader.making.places.made import Loss, Made
from creel.loader.making.task import Task
from creel.loader.making.transport.batch_message import Inbox, Outbox
from creel.loader.making.transport.channel import Channel, pair
from creel.loader.making.transport.unpacking import unpack
from kit import seeds

pytestmark = [pytest.mark.usefixtures("clean"), pytest.mark.timeout(120)]

FLOATS = 8192  # per slot
SLOTS = 3


class Rank:
    """The batches that a rank holds, each with its expected content."""

    def __init__(self) -> None:
        self.held: list[tuple[torch.Tensor, float]] = []

    def got(self, batch: Any, number: int) -> None:
        """Hold a batch; some batches are overwritten."""
        assert (batch == number).all()
        if number % 3 == 0:
            batch += 1000.0
            number += 1000
        self.held.append((batch, float(number)))

    def check(self, which: int) -> None:
        """Release a batch, which must not have been written to until now."""
        batch, number = self.held.pop(which)
        assert (batch == number).all()


class Group:
    """A leader that makes batches itself, and followers, in one process."""

    def __init__(self, followers: int) -> None:
        ends = [pair() for _ in range(followers)]
        self.leader = Leader([Channel(ours) for ours, _ in ends])
        self.batches: SentBatches = self.leader.followers(0)
        self.outbox, self.inbox = Outbox(SLOTS), Inbox(max_leased=64, private=True)
        self.others = [Follower(Channel(theirs), 0) for _, theirs in ends]
        self.pools = [ReplicaPool(other, 64) for other in self.others]
        self.ranks = [Rank() for _ in range(followers + 1)]
        self.number = 0
        self.taken = [0] * followers
        self.new_slots = 0

    def make(self) -> None:
        """Make a batch, as a worker and its trainer do."""
        self.batches.expect(0, self.number, [self.number])
        self.outbox.give_back(self.batches.returned(0, self.inbox.returned()))
        data = torch.full((FLOATS,), float(self.number))
        message, fds = self.outbox.pack(data)
        self.new_slots += len(fds)
        self.batches.send(0, self.number, 0, message, fds)
        packed = self.inbox.accept(message, [os.dup(fd) for fd in fds])
        self.ranks[0].got(unpack(packed, self.inbox), self.number)
        self.number += 1

    def take(self, k: int) -> None:
        """Let a follower take its next batch, if there is one."""
        pool = self.pools[k]
        pool.task(0, Task(0, self.taken[k], [self.taken[k]], DIRECT))
        if self.taken[k] == self.number:
            return
        event = pool.next_event(10.0)
        assert isinstance(event, Made)
        assert event.batch == self.taken[k]
        self.ranks[1 + k].got(pool.open(event), self.taken[k])
        self.taken[k] += 1

    def close(self) -> None:
        for pool in self.pools:
            pool.close()
        for other in self.others:
            other.close()
        self.batches.close()
        self.leader.close()
        self.outbox.close()
        self.inbox.close()


@pytest.fixture
def group() -> Any:
    groups: list[Group] = []

    def make(followers: int) -> Group:
        groups.append(Group(followers))
        return groups[0]

    yield make
    for member in groups:
        member.ranks.clear()
        member.close()


@pytest.mark.parametrize("seed", seeds(12))
def test_no_slot_is_written_while_a_rank_has_a_batch_in_it(
    seed: int, group: Callable[[int], Group]
) -> None:
    rng = random.Random(seed)
    here = group(rng.randint(1, 3))
    for _ in range(200):
        act = rng.random()
        rank = rng.choice(here.ranks)
        if act < 0.3:
            here.make()
        elif act < 0.7:
            here.take(rng.randrange(len(here.taken)))
        elif rank.held:
            rank.check(rng.randrange(len(rank.held)))
    for follower in here.ranks:
        while follower.held:
            follower.check(0)


def test_slots_are_used_again_once_all_have_returned_them(group: Callable[[int], Group]) -> None:
    here = group(2)
    for _ in range(50):
        here.make()
        here.take(0)
        here.take(1)
        for rank in here.ranks:
            rank.held.clear()
    assert here.new_slots <= SLOTS


def test_a_follower_that_takes_nothing_is_left_out(group: Callable[[int], Group]) -> None:
    here = group(2)
    for _ in range(400):
        here.make()
        here.take(0)
        here.ranks[0].held.clear()
        here.ranks[1].held.clear()
    here.take(0)
    while not isinstance(event := here.pools[1].next_event(10.0), Loss):
        here.pools[1].discard(event)  # type: ignore[arg-type]
    assert "rank 0" in event.reason


def test_a_batch_of_other_samples_is_refused(group: Callable[[int], Group]) -> None:
    here = group(1)
    here.make()
    pool = here.pools[0]
    pool.task(0, Task(0, 0, [7], DIRECT))
    event = pool.next_event(10.0)
    assert isinstance(event, Made)
    with pytest.raises(RuntimeError, match="other samples"):
        pool.open(event)
