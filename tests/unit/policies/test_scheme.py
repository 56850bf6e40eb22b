"""Which scheme serves a dataset: one row for each case of `creel.policies.cluster`."""

from __future__ import annotations

import pytest

from creel.policies.cluster.scheme import Scheme, scheme_of

#: Facts that hold, besides `peers`.
CASES = [
    (1, {"dealt", "once"}, Scheme.PLAN),
    (1, {"dealt"}, Scheme.ALONE),
    (1, {"dealt", "once", "unplanned"}, Scheme.ALONE),
    (1, {"once"}, Scheme.HOMES),
    (1, {"dealt", "once", "by_hash"}, Scheme.HOMES),
    (1, {"unplanned"}, Scheme.HOMES),
    (1, set(), Scheme.ASK),
    (1, {"dealt", "once", "rehearses"}, Scheme.SOONEST),
    (1, {"dealt", "rehearses"}, Scheme.SOONEST),
    (1, {"dealt", "rehearses", "together"}, Scheme.HOMES),
    (1, {"once", "rehearses"}, Scheme.HOMES),
    (1, {"rehearses"}, Scheme.ASK),
    (2, {"dealt"}, Scheme.SOONEST),
    (2, {"dealt", "by_hash"}, Scheme.SOONEST),
    (2, {"dealt", "together"}, Scheme.HOMES),
    (2, {"by_hash"}, Scheme.HOMES),
    (2, set(), Scheme.ASK),
]
FACTS = "dealt", "by_hash", "once", "unplanned", "together", "rehearses"


@pytest.mark.parametrize("jobs, facts, scheme", CASES)
def test_each_case_has_its_scheme(jobs: int, facts: set[str], scheme: Scheme) -> None:
    known = {fact: fact in facts for fact in FACTS}
    assert scheme_of(jobs, peers=True, **known) is scheme
    assert scheme_of(jobs, peers=False, **known) is Scheme.ALONE
