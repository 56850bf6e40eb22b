"""Changed labels reach batches whenever torch's loader over the same dataset shows them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Subset

import creel
from creel.errors import ConfigError

pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("served")]

N, BATCH = 40, 4


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Any]:
    (tmp_path / "rows").write_bytes(bytes(range(N)) * 8)
    for i in range(N):
        (tmp_path / f"{i:02}").write_bytes(bytes([i]) * 8)

    def dataset(kind: str, labels: object) -> Any:
        if kind == "rows":
            return creel.RecordDataset(tmp_path / "rows", torch.uint8, 8, labels=labels)
        paths = [tmp_path / f"{i:02}" for i in range(N)]
        return creel.FileDataset(paths, labels=labels, nbytes=kind == "files")

    return dataset


def plain(batch: Any) -> Any:
    return [part.tolist() for part in batch] if isinstance(batch, (list, tuple)) else batch.tolist()


GIVEN: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "tensor": (lambda: torch.arange(N), lambda given: given.zero_()),
    "array": (lambda: np.arange(N), lambda given: given.fill(0)),
    "list": (lambda: list(range(N)), lambda given: given.__setitem__(slice(None), [0] * N)),
}


@pytest.mark.parametrize(
    "change_of, kind, workers",
    [
        *((change_of, kind, 0) for change_of in GIVEN for kind in ("rows", "files")),
        ("tensor", "rows", 2),
        ("list", "files", 2),
    ],
)
def test_labels_are_copied_when_they_are_given(
    make: Callable[..., Any], kind: str, change_of: str, workers: int
) -> None:
    start, change = GIVEN[change_of]
    given = start()
    data = make(kind, given)
    seen: list[int] = []
    for _ in range(2):
        for i, (_, labels) in enumerate(creel.DataLoader(data, BATCH, num_workers=workers)):
            if i == 2:
                change(given)
            seen += labels.tolist()
    assert seen == [*range(N)] * 2
    assert given[3] == 0


@pytest.mark.parametrize(
    "kind, workers, persistent, when",
    [
        ("rows", 0, False, "amid"),
        ("rows", 2, True, "amid"),
        ("files", 0, False, "amid"),
        ("files", 2, False, "between"),
        ("files of unknown size", 2, False, "between"),
        ("files of unknown size", 2, True, "amid"),
    ],
)
def test_labels_that_are_assigned_are_seen_as_under_torch(
    make: Callable[..., Any], kind: str, workers: int, persistent: bool, when: str
) -> None:
    """Labels change to others, to another type, to None, and back; also during an epoch."""

    def seen(cls: Any) -> list[Any]:
        data = make(kind, range(N))
        tree: Any = ConcatDataset([Subset(data, range(0, N, 2)), data])
        loader = cls(tree, BATCH, num_workers=workers, persistent_workers=persistent)
        out: list[Any] = []
        for labels in (torch.arange(N) + 100, None, np.arange(N) / 2, [*range(7, 7 + N)]):
            for i, batch in enumerate(loader):
                out.append(plain(batch))
                if i == 3 and when == "amid":
                    data.labels = labels
            data.labels = labels
        return out + [plain(batch) for batch in loader]

    assert seen(creel.DataLoader) == seen(torch.utils.data.DataLoader)


def test_as_many_labels_as_samples_must_be_assigned(make: Callable[..., Any]) -> None:
    data = make("rows", None)
    with pytest.raises(ConfigError, match="39 labels for 40 samples"):
        data.labels = range(N - 1)
    assert data.labels is None
