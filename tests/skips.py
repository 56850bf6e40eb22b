"""What a run of the tests skips, and why; in CI no more than `skips.txt` permits.

A test that is skipped everywhere says nothing, and nobody sees it: a run ends with the number of
tests skipped for each reason, and one that CI does not expect fails it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

LIST = Path(__file__).with_name("skips.txt")


def reasons(reports: Iterable[Any]) -> Counter[str]:
    """Return how many tests were skipped for each reason.

    reports: pytest's of skipped tests, whose text is (file, line, reason).
    """
    return Counter(str(report.longrepr[2]).removeprefix("Skipped: ") for report in reports)


def permitted(text: str) -> dict[str, int]:
    """Return the most tests that may be skipped, by patterns of their reasons.

    >>> permitted("# why not\\n 7  needs slurmctld*\\n")
    {'needs slurmctld*': 7}
    """
    lines = [line.split(maxsplit=1) for line in text.splitlines()]
    return {words[1]: int(words[0]) for words in lines if words and words[0] != "#"}


def excess(skipped: Counter[str], most: dict[str, int]) -> Counter[str]:
    """Return how many more tests were skipped than permitted, by pattern, or reason if none fits.

    >>> excess(Counter({"needs x (y)": 2, "no core": 1}), {"needs x*": 1, "needs*": 9})
    Counter({'needs x*': 1, 'no core': 1})
    """
    counted: Counter[str] = Counter()
    for reason, count in skipped.items():
        counted[next((pattern for pattern in most if fnmatchcase(reason, pattern)), reason)] += (
            count
        )
    return counted - Counter(most)


def lines(skipped: Counter[str], beyond: Counter[str]) -> list[str]:
    """Return what a run ends with: the count, and what is not in the list."""
    said = [f"skipped: {skipped.total()} tests for {len(skipped)} reasons"]
    if beyond:
        said += [f"more than {LIST.name} permits in CI, by {beyond.total()}:"]
        said += [f"  {count:4}  {reason}" for reason, count in sorted(beyond.items())]
    return said
