"""Which nodes of a cluster are silent: without clock and network."""

from __future__ import annotations

from creel.daemon.core.cluster.silence import Silence, SilenceLimits

LIMITS = SilenceLimits(0.5, 2.0)


def test_a_silent_node_is_not_asked_until_it_answers_again() -> None:
    silence = Silence(1, 4, 0.0, LIMITS)
    for node in 0, 2:
        silence.heard(node, 10.0)
    silence.heard(3, 10.0 - LIMITS.suspect_s)
    assert silence.reachable(10.0).tolist() == [True, True, True, False]
    silence.heard(3, 10.1)
    assert silence.reachable(10.2).all()


def test_a_node_that_asks_is_alive_and_may_answer_late() -> None:
    """But not for ever: it may be out of reach from here only."""
    silence = Silence(0, 3, 0.0, LIMITS)
    reachable = []
    for k in range(20):
        silence.was_asked(1, float(k))
        reachable.append(silence.reachable(k + 0.5).tolist())
    assert [x[1] for x in reachable] == [True] * 8 + [False] * 12
    assert [x[2] for x in reachable] == [True] * 2 + [False] * 18
    silence.heard(1, 20.0)
    silence.was_asked(1, 20.0)
    assert silence.reachable(20.5)[1]
    silence.refused(1, 20.6)
    assert not silence.reachable(20.6)[1], "no process listens there"


def test_where_nobody_listens_a_node_is_silent_at_once() -> None:
    silence = Silence(0, 4, 0.0, LIMITS)
    silence.refused(3, 0.1)
    assert silence.reachable(0.1).tolist() == [True, True, True, False]


def test_a_node_that_slept_itself_takes_no_other_for_silent() -> None:
    silence = Silence(0, 3, 0.0, LIMITS)
    silence.heard(1, 9.0)
    silence.heard(2, 10.0 - LIMITS.suspect_s)
    silence.slept(5.0)
    assert silence.reachable(15.0).tolist() == [True, True, False], "it was silent before"


def test_a_node_that_hears_nobody_reaches_itself() -> None:
    assert Silence(2, 4, 0.0, LIMITS).reachable(1e9).tolist() == [False, False, True, False]
