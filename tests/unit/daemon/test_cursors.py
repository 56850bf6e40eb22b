"""The cursors of a session keep their order, whatever the readers do."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from creel.daemon.core.readers.cursors import Cursors
from creel.errors import IllegalEventError
from creel.policies.prefetch import SessionPlan

pytestmark = pytest.mark.timeout(120)


def plan_of(steps: int, each: int) -> SessionPlan:
    plan = SessionPlan()
    ends = np.arange(1, steps + 1) * each
    plan.extend(0, np.arange(steps * each, dtype=np.int32), ends)
    return plan


@pytest.mark.parametrize("seed", range(20))
def test_no_order_of_moves_breaks_that_of_the_cursors(seed: int) -> None:
    plan, cursors, rng = plan_of(30, 3), Cursors(), random.Random(seed)
    while cursors.done < plan.end:
        done, ready = cursors.done, cursors.ready
        move = rng.choice(("pin", "settle", "ask", "wait", "early", "consume", "rewind"))
        if move == "pin":
            cursors.pinned(rng.randint(cursors.front, plan.stop), lacks=rng.random() < 0.5)
        elif move == "settle":
            checked = rng.randint(cursors.checked, cursors.front)
            blocked = checked if checked < cursors.front else None
            cursors.settled(checked, plan.step_at(checked), rng.randint(0, 2), blocked)
        elif move == "ask":
            cursors.versions_asked(rng.randint(cursors.verified, cursors.front))
            cursors.ask_again()
        elif move == "wait":
            cursors.asked(rng.randint(cursors.wanted, plan.end))
        elif move == "early":
            last = plan.step_at(cursors.front)
            cursors.found_early(tuple(range(cursors.ready + 1, last)))
        elif move == "consume":
            to = rng.randint(cursors.done, min(cursors.done + 2, plan.end))
            cursors.consumed(to, plan.start(to))
        else:
            step = rng.randint(cursors.done, plan.end)
            cursors.rewound(step, plan.start(step))
            ready = min(ready, step)
        cursors.check(plan, 1)
        assert cursors.done >= done
        assert cursors.ready >= ready, "only `rewound` lowers READY"


@pytest.mark.parametrize(
    "wrong",
    [
        {"done": 5},
        {"at": 4},
        {"ready": 1},
        {"ready": 11},
        {"wanted": 11},
        {"checked": 5},
        {"checked": 19},
        {"verified": 5},
        {"verified": 19},
        {"front": 31},
        {"early": (6,)},
    ],
    ids=repr,
)
def test_the_check_notices_each_wrong_order(wrong: dict[str, Any]) -> None:
    plan = plan_of(10, 3)
    right: dict[str, Any] = {"done": 2, "at": 6, "ready": 4, "wanted": 5, "early": (5,)}
    right |= {"checked": 12, "verified": 15, "front": 18}
    Cursors(**right).check(plan, 1)
    with pytest.raises(IllegalEventError):
        Cursors(**(right | wrong)).check(plan, 1)


def test_clients_hear_of_ready_and_early_steps_once() -> None:
    cursors = Cursors()
    assert not cursors.announce()
    cursors.pinned(9)
    cursors.settled(3, 1, 0, blocked=7)
    assert cursors.announce()
    assert not cursors.announce()
    cursors.found_early((2,))
    assert cursors.announce()
