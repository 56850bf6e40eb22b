"""Datasets that keep what they decode: each file is decoded once, and anew once it has changed."""

from __future__ import annotations

import builtins
import copy
import io
import logging
import os
import pickle
import random
import resource
import tarfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset

import creel
from creel.errors import ConfigError
from creel.loader.data.binding.bind import bind
from creel.loader.data.binding.tree import keepings_in, kept_on_top
from creel.loader.data.datasets.base import CreelDataset, Transformed
from creel.loader.data.decoded import keeping, rng_use
from creel.loader.data.interception import intercept
from creel.loader.data.reading.lease import Lease
from kit import until

N = 6
#: Calls of a decoder, if each file is decoded once: the first sample is made twice, and compared.
ONCE = N + 1


class Decoder:
    """Counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, data: bytes) -> torch.Tensor:
        self.calls += 1
        return torch.tensor([len(data), *data[:3]])


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    for i in range(N):
        (tmp_path / f"{i}.bin").write_bytes(bytes([i] * (10 + i)))
    paths = [str(tmp_path / f"{i}.bin") for i in range(N)]
    settle(paths[-1])
    return paths


def settle(path: str) -> None:
    """Wait until the file's version would show another change."""
    from creel.cache.storage.stores.store import version_at

    until(lambda: version_at(path) > 0)


def fresh(data: bytes) -> list[int]:
    return [len(data), *data[:3]]


def check(dataset: Any, paths: list[str]) -> None:
    for i, path in enumerate(paths):
        assert dataset[i].tolist() == fresh(Path(path).read_bytes())


def test_a_file_is_decoded_once(paths: list[str]) -> None:
    decode = Decoder()
    dataset = creel.FileDataset(paths, decode=decode, keep_decoded="1MiB")
    for _ in range(3):
        check(dataset, paths)
    assert decode.calls == ONCE
    assert dataset[-1].tolist() == dataset[N - 1].tolist()
    assert decode.calls == ONCE


def test_functions_that_open_files_are_replaced_once_for_a_batch(
    paths: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That takes 12 us, as long as to see whether a sample draws."""
    enters: list[bool] = []
    replacements = intercept._replacements
    replace = replacements._replace

    def counted(*, anew: bool) -> None:
        enters.append(anew)
        replace(anew=anew)

    monkeypatch.setattr(replacements, "_replace", counted)
    opens: list[Any] = []

    def decode(data: bytes) -> int:
        opens.append(builtins.open)
        return len(data)

    dataset = creel.FileDataset(paths, decode=decode, keep_decoded="1MiB")
    own = builtins.open
    with Lease():
        assert [dataset[i] for i in range(N)] == [10 + i for i in range(N)]
    assert builtins.open is own
    assert own not in opens
    assert enters == [True]


def test_a_transform_may_change_the_sample(paths: list[str]) -> None:
    dataset = creel.FileDataset(
        paths, decode=Decoder(), transform=lambda x: x.add_(1), keep_decoded=1 << 20
    )
    for _ in range(3):
        assert [int(dataset[i][0]) for i in range(N)] == [11 + i for i in range(N)]


@pytest.mark.parametrize("same_size", [True, False])
def test_a_file_that_was_rewritten_is_decoded_anew(paths: list[str], same_size: bool) -> None:
    decode = Decoder()
    dataset = creel.FileDataset(paths, decode=decode, keep_decoded="1MiB")
    check(dataset, paths)
    for round_ in range(3):
        Path(paths[2]).write_bytes(bytes([100 + round_] * (12 if same_size else 20 + round_)))
        check(dataset, paths)  # right away
        settle(paths[2])
        check(dataset, paths)
        calls = decode.calls
        check(dataset, paths)
        assert decode.calls == calls


def test_a_sample_decoded_while_its_file_changes_is_not_kept(paths: list[str]) -> None:
    def decode(data: bytes) -> torch.Tensor:
        if rewrites:
            Path(paths[0]).write_bytes(rewrites.pop())
            settle(paths[0])
        return torch.tensor(fresh(data))

    rewrites = [b"new bytes"]
    dataset = creel.FileDataset(paths, decode=decode, keep_decoded="1MiB")
    assert dataset[0].tolist() == [10, 0, 0, 0]
    check(dataset, paths)


@pytest.mark.parametrize("draw", [np.random.rand, random.random, lambda: torch.rand(1)])
def test_a_decoder_that_draws_is_said_once_and_nothing_is_kept(
    paths: list[str], draw: Callable[[], Any], caplog: pytest.LogCaptureFixture
) -> None:
    def decode(data: bytes) -> tuple[int, Any]:
        return len(data), draw()

    def both() -> list[Any]:
        torch.manual_seed(1)
        np.random.seed(1)  # noqa: NPY002  the generator that the decoder uses
        random.seed(1)
        return [dataset[i] for _ in range(3) for i in range(N)]

    dataset = creel.FileDataset(paths, decode=decode)
    expected = both()
    dataset = creel.FileDataset(paths, decode=decode, keep_decoded="1MiB")
    assert both() == expected
    (said,) = (r.getMessage() for r in caplog.records if r.levelno == logging.WARNING)
    assert "random numbers" in said


def test_samples_that_cannot_be_kept_are_named_once(
    paths: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    dataset = creel.FileDataset(paths, decode=lambda data: {data}, keep_decoded="1MiB")
    for _ in range(2):
        assert [dataset[i] for i in range(N)] == [{Path(path).read_bytes()} for path in paths]
    (said,) = (r.getMessage() for r in caplog.records if r.levelno == logging.WARNING)
    assert "builtins.set" in said


def test_another_decoder_gets_nothing_of_the_last_one(paths: list[str]) -> None:
    dataset = creel.FileDataset(paths, decode=Decoder(), keep_decoded="1MiB")
    check(dataset, paths)
    dataset.decode = lambda data: -len(data)
    assert dataset.keeping is not None
    for _ in range(2):
        assert [dataset[i] for i in range(N)] == [-10 - i for i in range(N)]
        dataset.keeping.open()  # as an iterator does
    assert dataset.keeping.complete
    assert [dataset[i] for i in range(N)] == [-10 - i for i in range(N)]


def test_assigned_samples_get_nothing_of_others(tmp_path: Path, paths: list[str]) -> None:
    for name in "ab":
        (tmp_path / "root" / name).mkdir(parents=True)
        (tmp_path / "root" / name / "x.png").write_bytes(name.encode())
    settle(str(tmp_path / "root/b/x.png"))
    folder = creel.ImageFolder(tmp_path / "root", decode=bytes, keep_decoded="1MiB")
    assert [folder[i] for i in range(2)] == [(b"a", 0), (b"b", 1)]
    folder.samples = [(paths[0], 3), *folder.samples]
    assert folder.keeping is not None
    for _ in range(2):
        assert [folder[i] for i in range(3)] == [(bytes(10), 3), (b"a", 0), (b"b", 1)]
        folder.keeping.open()


def test_a_copy_of_a_dataset_has_what_was_kept_and_an_equal_dataset_has_not(
    paths: list[str],
) -> None:
    """What `decode` does may depend on anything: only the same object is known to be the same."""
    dataset = creel.FileDataset(paths, decode=len, keep_decoded="1MiB")
    assert [dataset[i] for i in range(N)] == list(range(10, 10 + N))
    twins: list[Any] = [copy.deepcopy(dataset), copy.copy(dataset)]
    twins.append(pickle.loads(pickle.dumps(dataset)))
    assert dataset.keeping is not None
    for twin in twins:
        assert int(twin[0]) == 10
        twin.keeping.open()
        assert twin.keeping.store is dataset.keeping.store
    twins[1].decode = hash
    twins[1].keeping.open()
    equal: Any = creel.FileDataset(paths, decode=len, keep_decoded="1MiB")
    for other in (twins[1], copy.copy(twins[1]), equal):
        other.keeping.open()
        assert other.keeping.store is not dataset.keeping.store


class Sized(Dataset[Any]):
    """Its samples depend on its own attribute, on its transform's, and on one of the module."""

    def __init__(self) -> None:
        self.size, self.transform = 1, Scaled()

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        return index + self.size * 10 + self.transform.scale * 100 + SIZE * 1000


class Scaled:
    scale = 0

    def __call__(self, sample: Any) -> Any:
        return sample


SIZE = 1


def test_a_copy_of_a_changed_dataset_has_nothing_of_the_old_one() -> None:
    data = Sized()
    kept = creel.kept(data, "1MiB")
    assert kept[1] == 1011
    data.size = 2
    assert copy.deepcopy(kept)[1] == pickle.loads(pickle.dumps(kept))[1] == 1021


def test_equal_datasets_that_a_global_makes_differ_have_samples_of_their_own(
    paths: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def decode(data: bytes) -> int:
        return len(data) * SIZE

    held = []  # as long as one of them exists, its store does
    for size in (1, 2):
        monkeypatch.setitem(globals(), "SIZE", size)
        kept: Any = creel.kept(Sized(), "1MiB")
        files = creel.FileDataset(paths, decode=decode, keep_decoded="1MiB")
        held += [kept, files]
        assert [kept[1], files[1]] == [1000 * size + 11, 11 * size]


@pytest.mark.parametrize("name", ["size", "transform.scale"])
def test_attributes_that_change_between_epochs_are_named_and_samples_made_anew(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    data = Sized()
    loader = creel.DataLoader(creel.kept(data, "1MiB"), N)
    for value in (1, 2, 2, 3):
        setattr(data.transform if "." in name else data, name.rpartition(".")[2], value)
        assert next(iter(loader)).tolist() == [data[i] for i in range(N)]
    (said,) = (r.getMessage() for r in caplog.records if r.levelno == logging.WARNING)
    assert name in said


@pytest.mark.parametrize("late", [False, True], ids=["at once", "in the first sample"])
@pytest.mark.parametrize("holds", [np.random.default_rng, np.random.RandomState, random.Random])
def test_a_dataset_that_draws_from_a_generator_of_its_own_is_not_kept(
    holds: Any, late: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And it draws as often as without creel: the batches are torch's."""
    monkeypatch.setattr(keeping, "_others_run", lambda: False)  # pytest-xdist has threads

    class Own(Sized):
        def __init__(self) -> None:
            self.draws: Any = None if late else holds(3)

        def __getitem__(self, index: int) -> float:
            self.draws = self.draws or holds(3)
            return float((getattr(self.draws, "random", None) or self.draws.rand)())

    plain, kept = Own(), creel.kept(Own(), "1MiB")
    assert [kept[i % N] for i in range(2 * N)] == [plain[i % N] for i in range(2 * N)]
    assert caplog.text.count("random numbers") == 1
    assert "creel.datasets.Transformed" in caplog.text


@pytest.mark.parametrize("always", [False, True])
def test_a_thread_that_draws_beside_costs_the_samples_made_meanwhile(
    always: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """As training does in one thread, while another one makes samples."""

    class Beside(Sized):
        def __getitem__(self, index: int) -> int:
            if always or index == 3:
                trainer.submit(torch.rand, 1).result()
            return index

        def __len__(self) -> int:
            return 16

    with ThreadPoolExecutor(1) as trainer:
        kept: Any = creel.kept(Beside(), "1MiB")
        for _ in range(2):
            assert [kept[i] for i in range(16)] == list(range(16))
        store = kept.keeping.store
    assert [i for i in range(16) if not store.has(i)] == (list(range(16)) if always else [3])
    assert caplog.text.count("random numbers") == always


def test_a_sample_that_is_another_one_when_made_again_is_named_and_not_kept(
    paths: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    class Drawn(Sized):
        def __getitem__(self, index: int) -> Any:
            return {"x": [index, float(np.random.default_rng().random())]}

    kept: Any = creel.kept(Drawn(), "1MiB")
    files: Any = creel.FileDataset(paths, decode=lambda _: Drawn()[0], keep_decoded="1MiB")
    for dataset in (kept, files):
        assert len({dataset[0]["x"][1] for _ in range(3)}) == 3
    said = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(said) == 2
    assert all("sample 0, made twice, is not the same at ['x'][1]" in message for message in said)


def test_a_limit_of_nothing_and_creel_disabled_keep_nothing(
    paths: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = Decoder()
    dataset = creel.FileDataset(paths, decode=decode, keep_decoded=0)
    check(dataset, paths)
    check(dataset, paths)
    assert decode.calls == 2 * N
    files = Files(paths)
    kept = creel.kept(files, 0)
    for _ in range(2):
        check(kept, paths)
    assert files.reads == 2 * N
    monkeypatch.setenv("CREEL_DISABLE", "1")
    dataset = creel.FileDataset(paths, decode=decode, keep_decoded="auto")
    check(dataset, paths)
    check(dataset, paths)
    assert decode.calls == 4 * N


def descriptors() -> set[int]:
    return {int(entry.name) for entry in Path("/proc/self/fd").iterdir()}


@pytest.mark.parametrize("grouped", [False, True], ids=["alone", "ranks"])
def test_hundreds_of_datasets_are_kept_with_few_descriptors(
    paths: list[str], grouped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stores that ranks share take some each, and half of all is left to the person's own files."""
    if grouped:
        monkeypatch.setattr(keeping, "name_in_group", lambda _: f"group {uuid4()}")
    before, limit = descriptors(), resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 2 * max(before) + 100
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, limit[1]))
    try:
        datasets = [creel.kept(Files(paths), "1MiB") for _ in range(most)]
        for dataset in datasets:
            for _ in range(2):
                assert dataset[0].tolist() == fresh(Path(paths[0]).read_bytes())
        more = len(descriptors() - before)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    assert all(dataset.keeping.store and dataset.keeping.store.kept == 1 for dataset in datasets)
    assert more <= (most // 2 - len(before) + 4 if grouped else 2)


def test_the_memory_of_a_deleted_dataset_is_given_back() -> None:
    """Also while others of the process live: they share a memfd."""

    def used() -> int:
        store = first.keeping.store
        assert store is not None
        return os.fstat(store.own.fd).st_blocks * 512

    def filled() -> Any:
        data: Any = [torch.full((1 << 20,), i, dtype=torch.uint8) for i in range(4)]
        kept = creel.kept(data)
        for i in range(4):
            assert kept[i][0] == i
        return kept

    first = filled()
    before = used()
    others = [filled() for _ in range(3)]
    assert used() > before + (12 << 20)
    del others
    assert used() < before + (1 << 17)
    assert first[3][0] == 3


@pytest.mark.parametrize("limit", [-1, 1.5, "much", True, b"1"])
def test_a_limit_is_a_size(paths: list[str], limit: Any) -> None:
    with pytest.raises(ConfigError):
        creel.FileDataset(paths, decode=len, keep_decoded=limit)
    with pytest.raises(ConfigError):
        creel.kept(Files(paths), limit)


def test_without_a_decoder_there_is_nothing_to_keep(tmp_path: Path, paths: list[str]) -> None:
    with pytest.raises(ConfigError, match="give decode="):
        creel.FileDataset(paths, keep_decoded="1MiB")
    (tmp_path / "root/a").mkdir(parents=True)
    (tmp_path / "root/a/x.png").write_bytes(b"x")
    with pytest.raises(ConfigError, match="give decode="):
        creel.ImageFolder(tmp_path / "root", loader=len, keep_decoded="1MiB")


def test_members_of_a_tar_are_decoded_once_each_by_its_function(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        for i in range(N):
            for extension in ("a", "b", "c"):
                info = tarfile.TarInfo(f"{i}.{extension}")
                info.size = 5 + i
                tar.addfile(info, io.BytesIO(bytes([i]) * info.size))
    first, other = Decoder(), Decoder()
    decode = {"a": first, "b": other}
    dataset = creel.TarDataset(str(tmp_path / "x.tar"), decode=decode, keep_decoded="1MiB")
    for _ in range(3):
        for i in range(N):
            sample = dataset[i]
            assert sample["c"] == bytes([i]) * (5 + i)
            assert sample["a"].tolist() == sample["b"].tolist() == [5 + i, i, i, i]
    assert first.calls + other.calls == 2 * N + 1
    assert dataset.keeping is not None
    assert not dataset.keeping.complete  # "c" is read as it is
    dataset.decode = {"a": len, "b": hash}
    assert dataset[0]["a"] == 5


def test_an_epoch_of_samples_that_are_all_kept_reads_nothing(paths: list[str]) -> None:
    dataset = creel.FileDataset(paths, decode=len, keep_decoded="1MiB")
    some = Subset(dataset, [4, 1])
    for data, needed in ((some, [1, 4]), (dataset, range(N))):
        binding = bind(data)
        assert binding is not None
        assert not binding.kept()
        for i in needed:
            dataset[i]
        assert binding.kept()


# --- creel.kept -----------------------------------------------------------------------------------


class Files(Dataset[Any]):
    """Opens one file for each sample, and one for all of them."""

    def __init__(self, paths: list[str], shared: str = "") -> None:
        self.paths, self.shared, self.reads = paths, shared, 0

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> torch.Tensor:
        self.reads += 1
        data = Path(self.paths[index]).read_bytes()
        if self.shared:
            with open(self.shared, "rb") as file:  # noqa: PTH123  (as users do)
                data += file.read()
        return torch.tensor(fresh(data))


def test_any_dataset_is_read_once(paths: list[str]) -> None:
    dataset = Files(paths)
    kept = creel.kept(dataset, "1MiB")
    for _ in range(3):
        check(kept, paths)
    assert dataset.reads == ONCE
    assert len(kept) == N
    assert kept[-1].tolist() == kept[N - 1].tolist()
    assert dataset.reads == ONCE + 1  # what -1 means is for the dataset to say
    with pytest.raises(IndexError):
        kept[N]


def test_the_dataset_says_what_a_negative_number_means(paths: list[str]) -> None:
    class Odd(Files):
        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.tensor(index)

    kept = creel.kept(Odd(paths), "1MiB")
    assert [int(kept[i]) for i in (N - 1, -1, -1, N - 1)] == [N - 1, -1, -1, N - 1]


def test_decoders_of_other_fields_are_other_decoders(paths: list[str]) -> None:
    """Though they are the same functions."""
    a, b = Decoder(), Decoder()
    dataset = creel.FileDataset(paths, decode=a, keep_decoded="1MiB")
    keeping = dataset._keeping
    assert keeping is not None
    identities = []
    for decoders in ({"x": a, "y": b}, {"y": a, "x": b}):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(dataset), "decoders", decoders)
            identities.append(keeping.identity(dataset))
    assert identities[0] != identities[1]


def test_a_sample_is_read_anew_once_any_of_its_files_has_changed(paths: list[str]) -> None:
    dataset = Files(paths[:-1], paths[-1])
    kept = creel.kept(dataset, "1MiB")

    def expect() -> None:
        shared = Path(paths[-1]).read_bytes()
        for i, path in enumerate(paths[:-1]):
            assert kept[i].tolist() == fresh(Path(path).read_bytes() + shared)

    for changed in (paths[0], paths[-1], paths[2]):
        expect()
        Path(changed).write_bytes(b"other bytes")
        expect()
        settle(changed)
        expect()
        reads = dataset.reads
        expect()
        assert dataset.reads == reads


class Draws(Files):
    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) + torch.rand(1)


def test_a_dataset_that_draws_is_not_kept(
    paths: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    samples = []
    for dataset in (Draws(paths), creel.kept(Draws(paths), "1MiB")):
        torch.manual_seed(0)
        samples.append([dataset[i].tolist() for _ in range(3) for i in range(N)])
    assert samples[0] == samples[1]
    assert caplog.text.count("random numbers") == 1


def test_a_change_is_noticed_through_two_stores(paths: list[str]) -> None:
    """What the inner store serves, the outer one must still check."""
    inner = creel.FileDataset(paths, decode=Decoder(), keep_decoded="1MiB")
    check(inner, paths)
    outer = creel.kept(creel.kept(inner, "1MiB"), "1MiB")
    for changed in (paths[0], paths[3]):
        check(outer, paths)
        check(outer, paths)
        Path(changed).write_bytes(b"something else")
        settle(changed)
    check(outer, paths)


def test_errors_and_other_keys_are_the_datasets_own() -> None:
    mapping: Any = {"a": 1}  # torch allows any
    kept: Any = creel.kept(mapping, "1MiB")
    assert kept["a"] == 1
    with pytest.raises(KeyError):
        kept["b"]


def test_kept_refuses_streams_and_wrapped_datasets() -> None:
    stream: Any = torch.utils.data.ChainDataset([])
    with pytest.raises(ConfigError, match="map-style"):
        creel.kept(stream)
    with pytest.raises(ConfigError, match=r"give its result to creel\.wrap"):
        creel.kept(creel.wrap(Files([])))


def test_kept_below_and_above_other_datasets(paths: list[str]) -> None:
    inner = creel.FileDataset(paths, decode=Decoder())
    kept = creel.kept(inner, "1MiB")
    dataset = Transformed(kept, lambda x: x * 2)
    assert keepings_in(Subset(dataset, [1])) == [kept.keeping]
    binding = bind(dataset)
    assert binding is not None
    assert [len(leaf) for leaf in binding.leaves] == [N]
    for i in range(N):
        assert not binding.kept()
        dataset[i]
    assert kept_on_top(dataset)
    assert binding.kept()
    assert isinstance(inner, CreelDataset)


@pytest.mark.parametrize("outside", [True, False], ids=["kept", "keep_decoded"])
def test_each_new_loader_decodes_remote_files_anew(outside: bool) -> None:
    """Their versions are not asked for at each use."""
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")

    def decode(data: bytes) -> bytes:
        calls.append(data)
        return data

    calls: list[bytes] = []
    paths = [f"memory://creel-decoded-{uuid4().hex}/{i}" for i in range(2)]
    inner = creel.FileDataset(paths, decode=decode, keep_decoded=None if outside else "1MiB")
    data: Any = creel.kept(inner, "1MiB") if outside else inner
    for version in (b"1", b"2"):
        for path in paths:
            memory.pipe(path, version)
        loader = creel.DataLoader(data, 2, collate_fn=list, creel=False)
        before = len(calls)
        for _ in range(3):
            assert list(loader) == [[version] * 2]
        assert len(calls) - before <= 3  # the first sample is made twice


def test_samples_of_records_are_not_kept(
    paths: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    records = creel.RecordDataset(paths[0], dtype="uint8", shape=(5,))
    kept = creel.kept(records, "1MiB")
    for _ in range(2):
        assert torch.equal(kept[1], records[1])
    assert caplog.text.count("not checked here") == 1


OWN: tuple[Any, ...] = (random.Random(1), np.random.default_rng(1), torch.Generator())


@pytest.mark.parametrize(
    "draw",
    [
        *(random.random, lambda: random.seed(random.getrandbits(9)), lambda: random.gauss(0, 1)),
        *(lambda: np.random.rand(), lambda: torch.rand(1)),  # noqa: NPY002, PLW0108
        *(OWN[0].random, lambda: OWN[1].integers(9), lambda: torch.rand(1, generator=OWN[2])),
    ],
)
@pytest.mark.parametrize("readable", [True, False])
def test_a_draw_is_seen_and_nothing_else(
    draw: Callable[[], object], readable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the second of two numbers that `gauss` makes at once, and under another Python."""
    if not readable:
        monkeypatch.setattr(rng_use, "_readable", lambda: False)
    for _ in range(3):
        seen = rng_use.Draws(OWN)
        assert not seen.any()
        draw()
        assert seen.any()
