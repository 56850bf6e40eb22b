"""Samples that cannot be read are left out or replaced on request, otherwise they raise."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

import creel
from creel.cli import main
from creel.errors import ConfigError, TooManyBadSamplesError
from creel.loader.data.reading.bad_samples import Tolerance, replacement

pytestmark = pytest.mark.system

N, BATCH = 60, 8
WORKERS_STAY = {"num_workers": 2, "persistent_workers": True}
BAD = frozenset({3, 17, 40})
SKIP: Any = {"on_error": "skip", "creel": False}


class Files(Dataset[torch.Tensor]):
    """Files of which some cannot be decoded; notes each call in a file."""

    def __init__(self, folder: Path, *, many: bool = False) -> None:
        self.folder = folder
        self.creel_uris = []
        for i in range(N):
            (folder / f"{i}").write_text("?" if i in BAD else f"{i}")
            self.creel_uris.append(f"{folder}/{i}")
        if many:
            self.__class__ = FilesAtOnce

    def __len__(self) -> int:
        return N

    def objects(self, index: int) -> int:
        return index

    def __getitem__(self, index: int) -> torch.Tensor:
        with (self.folder / "calls").open("a") as f:
            f.write(f"{index}\n")
        return torch.tensor(int(creel.read(self.creel_uris[index])))

    def calls(self) -> list[int]:
        numbers = [int(line) for line in (self.folder / "calls").read_text().split()]
        (self.folder / "calls").unlink()
        return numbers


class FilesAtOnce(Files):
    """The same files, a batch at a time."""

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [self[i] for i in indices]


def stand_in(bad: int) -> int:
    """Return the sample that replaces a bad one."""
    return next(i for a in range(100) if (i := replacement(bad, a, N)) not in BAD)


def wanted(indices: list[int], on_error: str) -> list[list[int]]:
    batches = [indices[at : at + BATCH] for at in range(0, N, BATCH)]
    if on_error == "skip":
        return [[i for i in batch if i not in BAD] for batch in batches]
    return [[stand_in(i) if i in BAD else i for i in batch] for batch in batches]


@pytest.mark.parametrize(
    "on_error, many, workers",
    [("skip", False, 0), ("skip", True, 2), ("substitute", True, 0), ("substitute", False, 2)],
)
def test_bad_samples_are_left_out_or_replaced_and_not_read_again(
    served: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    workers: int,
    many: bool,
    on_error: Any,
) -> None:
    data = Files(tmp_path, many=many)
    loader: Any = creel.DataLoader(
        data, BATCH, num_workers=workers, on_error=on_error, creel=served
    )
    for epoch in range(2):
        with caplog.at_level(logging.WARNING, "creel.loader"):
            assert [b.tolist() for b in loader] == wanted(list(range(N)), on_error)
        assert BAD.isdisjoint(data.calls()) is (epoch > 0)
    named = [r.getMessage() for r in caplog.records if r.name == "creel.loader"]
    assert len(named) == len(BAD)
    assert all(f"sample {i} ({tmp_path}/{i}) is " in " ".join(named) for i in BAD)
    assert main.main(["--name", served, "stats", "--bad", "--json"]) == 0
    bad = json.loads(capsys.readouterr().out)["bad"]
    assert {(row["index"], row["path"]) for row in bad} == {(i, f"{tmp_path}/{i}") for i in BAD}
    assert all(row["reason"].startswith("ValueError: invalid literal") for row in bad)
    assert main.main(["--name", served, "stats", "--bad"]) == 0
    assert f"{tmp_path}/17" in capsys.readouterr().out


class OwnFiles(Dataset[torch.Tensor]):
    """Files that the dataset opens by itself."""

    def __init__(self, folder: Path) -> None:
        Files(folder)  # writes them
        self.folder = folder

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(int((self.folder / f"{index}").read_text()))


@pytest.mark.parametrize("more", [{}, {"num_workers": 2}, WORKERS_STAY])
def test_those_that_are_found_while_reads_are_recorded_are_listed_later(
    served: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: dict[str, Any]
) -> None:
    """Below `creel.wrap` no daemon is asked before that, and no bad sample is read again."""
    given = {"daemon.name": served, "loader.direct": "never"}
    data = creel.wrap(OwnFiles(tmp_path))
    (tmp_path / "17").write_text("")  # which is never cached
    loader: Any = creel.DataLoader(data, BATCH, on_error="skip", creel=given, **more)
    for _ in range(3):
        assert sum(len(batch) for batch in loader) == N - len(BAD)
    assert main.main(["--name", served, "stats", "--bad", "--json"]) == 0
    bad = json.loads(capsys.readouterr().out)["bad"]
    assert {(row["index"], row["path"]) for row in bad} == {(i, f"{tmp_path}/{i}") for i in BAD}
    (rank,) = creel.stats(served)["ranks"]
    assert 0 < rank["batches"] <= 3 * len(loader), "also those that a worker asks for itself"


class GoneFiles(OwnFiles):
    """Files some of which are missing, of a dataset that is not wrapped."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(len((self.folder / f"{index}").read_text()))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_missing_file_is_named_without_creel_wrap(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, workers: int
) -> None:
    data = GoneFiles(tmp_path)
    (tmp_path / "5").unlink()
    loader: Any = creel.DataLoader(data, BATCH, on_error="skip", num_workers=workers)
    assert sum(len(batch) for batch in loader) == N - 1
    (said,) = [m for m in caplog.messages if "is left out" in m]
    assert said.startswith(f"sample 5 ({tmp_path}/5) is left out: FileNotFoundError")


def test_living_workers_learn_what_others_have_found(served: str, tmp_path: Path) -> None:
    data = Files(tmp_path)
    more: dict[str, Any] = {"num_workers": 2, "persistent_workers": True, "shuffle": True}
    loader: Any = creel.DataLoader(data, BATCH, on_error="skip", creel=served, **more)
    for epoch in range(3):
        assert sum(len(batch) for batch in loader) == N - len(BAD)
        assert BAD.isdisjoint(data.calls()) is (epoch > 0)


@pytest.mark.parametrize("workers", [0, 2])
def test_on_error_holds_without_a_daemon(tmp_path: Path, workers: int) -> None:
    more: dict[str, Any] = {"num_workers": workers, "on_error": "substitute", "creel": False}
    loader: Any = creel.DataLoader(Files(tmp_path), BATCH, **more)
    assert [b.tolist() for b in loader] == wanted(list(range(N)), "substitute")


@pytest.mark.parametrize("on_error", ["skip", "substitute"])
def test_where_there_are_no_batches_a_sample_is_replaced(tmp_path: Path, on_error: Any) -> None:
    loader: Any = creel.DataLoader(Files(tmp_path), None, on_error=on_error, creel=False)
    samples = [int(sample) for sample in loader]
    assert samples == [stand_in(i) if i in BAD else i for i in range(N)]


def test_no_batch_is_empty(tmp_path: Path) -> None:
    loader: Any = creel.DataLoader(Files(tmp_path), 1, on_error="skip", creel=False)
    assert [b.tolist() for b in loader] == [[stand_in(i) if i in BAD else i] for i in range(N)]


def test_a_resumed_run_chooses_alike(tmp_path: Path) -> None:
    def loader() -> Any:
        torch.manual_seed(5)
        return creel.DataLoader(data, BATCH, shuffle=True, on_error="substitute", creel=False)

    data = Files(tmp_path)
    whole = [batch.tolist() for batch in loader()]
    first = loader()
    it = iter(first)
    begun = [next(it).tolist() for _ in range(3)]
    resumed = loader()
    resumed.load_state_dict(first.state_dict())
    assert begun + [batch.tolist() for batch in resumed] == whole


@pytest.mark.parametrize("workers", [0, 2])
def test_more_bad_samples_than_are_put_up_with_raise(tmp_path: Path, workers: int) -> None:
    more: dict[str, Any] = {"num_workers": workers, "on_error": "skip", "creel": False}
    loader: Any = creel.DataLoader(Files(tmp_path), BATCH, max_bad_samples=2, **more)
    with pytest.raises(TooManyBadSamplesError, match="max_bad_samples is 2"):
        list(loader)


@pytest.mark.parametrize("workers", [0, 2])
def test_without_being_asked_a_bad_sample_raises_as_in_torch(tmp_path: Path, workers: int) -> None:
    loader: Any = creel.DataLoader(Files(tmp_path), BATCH, num_workers=workers, creel=False)
    with pytest.raises(ValueError, match="invalid literal"):
        list(loader)


@pytest.mark.parametrize("given", [{"on_error": "ignore"}, {"max_bad_samples": -1}])
def test_values_that_mean_nothing_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        creel.DataLoader([1, 2], **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("workers", [0, 2])
def test_records_in_memory_are_replaced_as_those_that_are_read(
    served: str, tmp_path: Path, workers: int
) -> None:
    def checked(rows: torch.Tensor) -> torch.Tensor:
        if (rows[:, 0] == 5).any():
            raise ValueError("record 5")
        return rows

    torch.arange(N, dtype=torch.int64).numpy().tofile(tmp_path / "records")
    data = creel.RecordDataset(tmp_path / "records", "int64", 1, batch_transform=checked)
    more: dict[str, Any] = {"num_workers": workers, "on_error": "skip", "creel": served}
    loader: Any = creel.DataLoader(data, BATCH, **more)
    for _ in range(3):
        assert [int(row) for batch in loader for row in batch] == [i for i in range(N) if i != 5]


def test_too_many_are_too_many_each_time(tmp_path: Path) -> None:
    loader: Any = creel.DataLoader(
        Files(tmp_path), BATCH, on_error="skip", max_bad_samples=0, creel=False
    )
    for _ in range(2):
        with pytest.raises(TooManyBadSamplesError):
            list(loader)


def test_bad_samples_of_a_batch_that_was_not_taken_are_named_later(
    served: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    more: dict[str, Any] = {"num_workers": 2, "persistent_workers": True, "creel": served}
    loader: Any = creel.DataLoader(Files(tmp_path), BATCH, on_error="skip", **more)
    next(iter(loader))  # the workers continue to sample 17
    with caplog.at_level(logging.WARNING, "creel.loader"):
        list(loader)
    named = " ".join(r.getMessage() for r in caplog.records)
    assert all(f"sample {i} " in named for i in BAD - {3})


class Unprintable(Files):
    """Raises an error whose text is not UTF-8."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if index in BAD:
            raise ValueError("bad \udcff")
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_may_be_of_any_text(served: str, tmp_path: Path, workers: int) -> None:
    more: dict[str, Any] = {"num_workers": workers, "on_error": "skip", "creel": served}
    loader: Any = creel.DataLoader(Unprintable(tmp_path), BATCH, **more)
    assert sum(len(batch) for batch in loader) == N - len(BAD)


class Keyed(Dataset[torch.Tensor]):
    """Samples by any key of the letters' numbers; without a length, as a database has none."""

    def __init__(self, key: Callable[[int], Any], bad: frozenset[int]) -> None:
        self.numbers = {key(i): i for i in range(16)}
        self.bad = bad

    def __getitem__(self, key: Any) -> torch.Tensor:
        number = self.numbers[key if isinstance(key, (str, tuple)) else int(key)]
        if number in self.bad:
            raise ValueError("damaged")
        return torch.tensor(number)


KEYS: dict[str, Callable[[int], Any]] = {
    "texts": lambda i: f"key {i}",
    "tuples": lambda i: (i, "a"),
    "numbers": lambda i: i,
}
GROUPS: dict[str, Callable[[list[Any]], Any]] = {
    "lists": list,
    "tuples": tuple,
    "arrays": np.array,
    "tensors": torch.tensor,
}


@pytest.mark.parametrize("on_error, workers", [("skip", 0), ("substitute", 2)])
@pytest.mark.parametrize(
    "keys, group",
    [("texts", "lists"), ("tuples", "tuples"), *(("numbers", group) for group in GROUPS)],
)
def test_samples_are_left_out_or_replaced_whatever_names_them(
    keys: str, group: str, on_error: Any, workers: int
) -> None:
    """Another sample of the batch replaces one, where no number says what else there is."""
    key = KEYS[keys]
    given = [GROUPS[group]([key(i) for i in range(at, at + 4)]) for at in range(0, 16, 4)]
    data = Keyed(key, frozenset({5, 12, 13, 14, 15}))
    loader: Any = creel.DataLoader(
        data, batch_sampler=given, on_error=on_error, num_workers=workers
    )
    for _ in range(2):
        batches = []
        for batch in loader:
            batches.append(batch.tolist())
            if keys == "numbers":
                assert loader.indices.tolist() == batches[-1]
        before = 11 if keys == "numbers" or not workers else 7  # what that worker has read
        last = [before] if on_error == "skip" else [before] * 4
        assert batches[:3] == [
            [0, 1, 2, 3],
            [4, 6, 7] if on_error == "skip" else [4, 6, 6, 7],
            [8, 9, 10, 11],
        ]
        assert batches[3] == last


def test_a_single_sample_without_a_number_is_replaced_by_one_before() -> None:
    given: Any = [f"key {i}" for i in range(8)]
    data = Keyed(KEYS["texts"], frozenset({3, 4}))
    loader: Any = creel.DataLoader(data, None, sampler=given, on_error="skip", creel=False)
    assert [int(sample) for sample in loader] == [0, 1, 2, 2, 2, 5, 6, 7]
    no_other = r"no sample is known to be good in the place of sample 'key 0': .*damaged"
    with pytest.raises(TooManyBadSamplesError, match=no_other):
        list(creel.DataLoader(Keyed(KEYS["texts"], frozenset({0})), None, sampler=given, **SKIP))


def test_an_index_may_be_a_tensor(tmp_path: Path) -> None:
    more: dict[str, Any] = {"on_error": "skip", "creel": False}
    loader: Any = creel.DataLoader(Files(tmp_path), BATCH, sampler=torch.arange(N), **more)
    assert sum(len(batch) for batch in loader) == N - len(BAD)


@pytest.mark.parametrize("on_error", ["skip", "substitute"])
def test_an_epoch_goes_on_when_samples_of_its_batches_have_turned_bad(on_error: Any) -> None:
    """No sample is known to be good that this batch could have."""
    tolerance = Tolerance(on_error, 9, known=dict.fromkeys(range(3), "it raised elsewhere"))
    assert tolerance.delivered([1], range(3)) == [1]
