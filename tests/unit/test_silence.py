"""Which nodes of a cluster are silent: without clock and network."""

from __future__ import annotations

from creel.daemon.core.cluster.silence import Silence, SilenceLimits

LIMITS = SilenceLimits(0.5, 2.0)


def test_a_silent_node_is_not_asked_until_it_answers_again() -> None:
    one = Silence(1, 4, 0.0, LIMITS)
    for node in 0, 2:
        one.heard(node, 10.0)
    one.heard(3, 10.0 - LIMITS.suspect_s)
    assert one.reachable(10.0).tolist() == [True, True, True, False]
    one.heard(3, 10.1)
    assert one.reachable(10.2).all()


def test_a_node_that_asks_is_alive_and_may_answer_late() -> None:
    """But not for ever: it may be out of reach from here only."""
    one = Silence(0, 3, 0.0, LIMITS)
    reachable = []
    for k in range(20):
        one.was_asked(1, float(k))
        reachable.append(one.reachable(k + 0.5).tolist())
    assert [x[1] for x in reachable] == [True] * 8 + [False] * 12
    assert [x[2] for x in reachable] == [True] * 2 + [False] * 18
    one.heard(1, 20.0)
    one.was_asked(1, 20.0)
    assert one.reachable(20.5)[1]
    one.refused(1, 20.6)
    assert not one.reachable(20.6)[1], "no process listens there"


def test_where_nobody_listens_a_node_is_silent_at_once() -> None:
    one = Silence(0, 4, 0.0, LIMITS)
    one.refused(3, 0.1)
    assert one.reachable(0.1).tolist() == [True, True, True, False]


def test_a_node_that_slept_itself_takes_no_other_for_silent() -> None:
    one = Silence(0, 3, 0.0, LIMITS)
    one.heard(1, 9.0)
    one.heard(2, 10.0 - LIMITS.suspect_s)
    one.slept(5.0)
    assert one.reachable(15.0).tolist() == [True, True, False], "it was silent before"


def test_a_node_that_hears_nobody_reaches_itself() -> None:
    assert Silence(2, 4, 0.0, LIMITS).reachable(1e9).tolist() == [False, False, True, False]
