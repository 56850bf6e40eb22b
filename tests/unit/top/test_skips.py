"""What CI may skip."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import skips

MOST = skips.permitted(skips.LIST.read_text())


def test_a_reason_that_is_not_in_the_list_and_one_test_too_many_are_named() -> None:
    report = SimpleNamespace(
        longrepr=("tests/x.py", 3, "Skipped: needs slurmctld (slurm-wlm, munge)")
    )
    skipped = skips.reasons([report] * 8) + Counter({"it is late": 2})
    beyond = skips.excess(skipped, MOST)
    assert beyond == {"needs slurm*": 1, "it is late": 2}
    assert skips.lines(skipped, beyond)[0] == "skipped: 10 tests for 2 reasons"
    assert "     2  it is late" in skips.lines(skipped, beyond)


def test_what_the_list_permits_is_no_more() -> None:
    skipped = Counter({"needs slurmctld (slurm-wlm, munge)": 7, "needs a CUDA device": 2})
    assert not skips.excess(skipped, MOST)
    assert len(skips.lines(skipped, Counter())) == 1
