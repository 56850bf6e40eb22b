"""Which nodes are reachable, lost, and members: without clock and network."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from creel.daemon.core.cluster.members import Members, SilenceLimits
from creel.policies.cluster.members import BEGINNING, Change, after, latest, merged, packed

NODES = 4
LIMITS = SilenceLimits(0.5, 2.0, 3.5)
LOST, SUSPECTED = LIMITS.lost_s, LIMITS.suspect_s


def cluster() -> list[Members]:
    return [Members(node, NODES, 0.0, LIMITS) for node in range(NODES)]


def beat(members: list[Members], now: float, alive: set[int]) -> None:
    """Let all nodes that are alive hear of each other, and learn each other's logs."""
    for one, other in itertools.permutations(alive, 2):
        members[one].heard(other, now)
        members[one].learn(members[other].log)


def propose(members: list[Members], now: float, alive: set[int]) -> list[int]:
    """Let every node whose turn it is write a change; return these nodes."""
    out = []
    for node in sorted(alive):
        due = members[node].due(now)
        if due is not None:
            members[node].change(due, ())
            out.append(node)
    return out


def agreed(members: list[Members], alive: set[int]) -> list[bool]:
    beat(members, 1e9, alive)
    (one,) = {tuple(members[node].members().tolist()) for node in alive}
    assert len({latest(members[node].log) for node in alive}) == 1
    return list(one)


def test_silence_is_suspected_then_lost_and_a_word_mends_it() -> None:
    one = Members(1, NODES, 0.0, LIMITS)
    for node in 0, 2:
        one.heard(node, 10.0)
    one.heard(3, 10.0 - SUSPECTED)
    assert one.reachable(10.0).tolist() == [True, True, True, False]
    assert one.due(10.0) is None, "suspected is not lost"
    one.heard(3, 10.1)
    assert one.reachable(10.2).all()


def test_where_nobody_listens_a_node_is_suspected_at_once() -> None:
    one = Members(0, NODES, 0.0, LIMITS)
    one.refused(3, 0.1)
    assert one.reachable(0.1).tolist() == [True, True, True, False]


@pytest.mark.parametrize("lost", range(NODES))
def test_the_lowest_that_is_left_writes_one_change_and_all_follow(lost: int) -> None:
    members, alive = cluster(), set(range(NODES)) - {lost}
    beat(members, 10.0, set(range(NODES)))
    now = 10.0 + LOST
    beat(members, now, alive)
    assert propose(members, now, alive) == [min(alive)]
    assert agreed(members, alive) == [node != lost for node in range(NODES)]
    assert propose(members, now, alive) == []


def test_who_was_cut_off_takes_over_the_log_of_the_others_and_is_a_member_again() -> None:
    """Whichever part of the cluster wrote more changes meanwhile."""
    for alone in range(NODES):
        members, everyone = cluster(), set(range(NODES))
        rest = everyone - {alone}
        beat(members, 10.0, everyone)
        now = 10.0
        for _ in range(3):
            now += LOST
            beat(members, now, rest)
            propose(members, now, rest)
            propose(members, now, {alone})
        assert members[alone].members().tolist() == [node == alone for node in range(NODES)]
        beat(members, now, everyone)
        beat(members, now, everyone)
        assert len(propose(members, now, everyone)) == 1
        assert agreed(members, everyone) == [True] * NODES
        assert after(members[alone].log, BEGINNING) is not None


def test_a_restarted_daemon_is_left_out_before_plans_count_on_it() -> None:
    members, everyone = cluster(), set(range(NODES))
    beat(members, 10.0, everyone)
    for node in 0, 1, 2:
        members[node].restarted(3, 10.0)
    members[3] = Members(3, NODES, 10.0, LIMITS)
    assert propose(members, 10.0, everyone) == [0]
    beat(members, 10.0, everyone)
    assert members[2].members().tolist() == [True, True, True, False]
    assert propose(members, 10.0, everyone) == [0]
    assert agreed(members, everyone) == [True] * NODES


def test_a_daemon_that_was_just_started_writes_nothing() -> None:
    """It does not know the others' log yet, and would take lost nodes for members."""
    one = Members(0, NODES, 10.0, LIMITS)
    one.refused(2, 10.1)
    one.restarted(1, 10.1)
    assert one.due(10.1 + SUSPECTED / 2) is None


def change(number: int, proposer: int, *members: bool) -> Change:
    return Change(number, proposer, packed(np.array(members)), ())


@pytest.mark.parametrize("seed", range(50))
def test_two_nodes_that_merge_their_logs_have_the_same_one(seed: int) -> None:
    rng = np.random.default_rng(seed)

    def grown(log: tuple[Change, ...]) -> tuple[Change, ...]:
        for _ in range(int(rng.integers(0, 4))):
            who = rng.random(NODES) < 0.5
            log = (*log, change(latest(log).number + 1, int(rng.integers(NODES)), *who))
        return log

    common = grown(())
    one, two = grown(common), grown(common)
    if latest(one) != latest(two):
        assert merged(one, two) == merged(two, one)
    for log in one, two:
        assert merged(log, common) == log
        assert merged(common, log) == log


def test_the_changes_after_a_known_one_are_found_or_known_to_be_missing() -> None:
    log = tuple(change(n, 0, True) for n in (3, 4, 5))
    assert after(log, log[0].id) == log[1:]
    assert after(log, log[2].id) == ()
    assert after(log, BEGINNING) is None, "the first ones are no longer kept"
    assert after((), BEGINNING) == ()
