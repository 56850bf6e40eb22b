"""bind: objects, leases and gathers of any tree of datasets, against brute force."""

from __future__ import annotations

import os
import pickle
import shutil
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from binding_rig import Arena, bound, files, lent, records
from PIL import Image
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    StackDataset,
    Subset,
    TensorDataset,
)

import creel
from creel.cache.storage.source import Source
from creel.errors import ConfigError
from creel.loader.data.binding.bind import bind
from creel.loader.data.binding.tree import bindable
from creel.loader.data.datasets import (
    FileDataset,
    ImageFolder,
    RecordDataset,
    TarDataset,
    Transformed,
)
from creel.policies.cluster.job_order import JobOrder
from folders import folder
from testbed.same import same

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    root = tmp_path / "photos"
    for i in range(6):
        (root / f"c{i % 2}").mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(i).integers(0, 256, (5, 4, 3), np.uint8)
        Image.fromarray(pixels).save(root / f"c{i % 2}/{i}.png")
    return root


def _text(label: int) -> str:
    return str(label)


# --- objects ----------------------------------------------------------------------------------


class Recorder(FileDataset):
    """Records which objects were read, in order: the truth that `objects` must predict."""

    seen: list[tuple[int, int]]

    def read(self, object_id: int) -> bytes:
        self.seen.append((id(self), object_id))
        return super().read(object_id)


def random_tree(rng: np.random.Generator, leaves: list[Dataset[Any]], depth: int) -> Dataset[Any]:
    kind = rng.integers(0, 6) if depth else 0

    def below() -> Any:
        return random_tree(rng, leaves, depth - 1)

    if kind in {1, 2}:
        inner = below()
        n = len(inner)
        indices = rng.integers(-n, n, int(rng.integers(1, 2 * n)))
        return Subset(inner, [indices.tolist(), indices, torch.from_numpy(indices)][depth % 3])
    if kind == 3:
        return ConcatDataset([below() for _ in range(rng.integers(1, 4))])
    if kind == 4:
        inner = below()
        return Transformed(inner, lambda s: s) if rng.random() < 0.5 else creel.wrap(inner)
    if kind == 5:
        first = below()
        return (
            StackDataset(first, Transformed(first, len))
            if rng.random() < 0.5
            else StackDataset(
                a=first,
                b=TensorDataset(torch.arange(len(first))),
            )
        )
    return leaves[rng.integers(0, len(leaves))]


@pytest.mark.parametrize("seed", range(60))
def test_objects_are_what_samples_read(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    (tmp_path / "f").write_bytes(b"1")
    seen: list[tuple[int, int]] = []
    leaves: list[Dataset[Any]] = [
        Recorder([tmp_path / "f"] * int(n), decode=bytes) for n in rng.integers(1, 9, 3)
    ]
    for leaf in leaves:
        leaf.seen = seen  # type: ignore[attr-defined]
    leaves.append(TensorDataset(torch.arange(5)))
    tree: Any = random_tree(rng, leaves, 4)
    binding = bind(tree)
    n = len(tree)
    indices = rng.integers(-n, n, 30)
    counts_seen = []
    for i in indices:
        before = len(seen)
        tree[int(i)]
        counts_seen.append(len(seen) - before)
    if binding is None:
        assert not seen
        return
    firsts: dict[int, int] = {}
    keys: dict[str, int] = {}  # leaves of the same objects share them
    total = 0
    for part in binding.leaves:
        firsts[id(part)] = keys.setdefault(part.manifest.key, total)
        total += len(part.manifest) * (firsts[id(part)] == total)
    assert len(binding.manifest) == total
    ids, counts = binding.objects(indices)
    assert ids.dtype == np.int32
    assert counts.tolist() == counts_seen
    assert ids.tolist() == [firsts[leaf] + i for leaf, i in seen]
    for bad in (n, -n - 1):
        with pytest.raises(IndexError):
            binding.objects(np.array([bad]))
    assert binding.objects(np.zeros(0, np.int64))[0].size == 0


def test_a_leaf_met_twice_is_cached_once(tmp_path: Path) -> None:
    leaf = files(tmp_path, "f", 4)
    tree: Any = ConcatDataset([leaf, Subset(leaf, [3, 1])])
    binding = bound(tree)
    assert len(binding.manifest) == 4
    assert binding.objects(np.arange(6))[0].tolist() == [0, 1, 2, 3, 3, 1]


def test_the_manifest_is_all_leaves_in_order(tmp_path: Path) -> None:
    a, b = files(tmp_path, "a", 2), records(tmp_path, "b", 3)
    binding = bound(ConcatDataset([a, b]))
    source = Source(binding.manifest)
    ids, _ = binding.objects(np.arange(5))
    expected = [a.read(0), a.read(1), *(b.read(i) for i in range(3))]
    assert [source.read(int(i)) for i in ids] == expected


class Opaque(Dataset[int]):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, i: int) -> int:
        return i


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class Listed(Sequence[int]):
    """0, 1, ... and a count of look-ups."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.looks = 0

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: Any) -> Any:
        self.looks += 1
        return range(self.n)[i]


def test_the_indices_of_a_subset_are_read_only_to_find_objects(tmp_path: Path) -> None:
    indices = Listed(3)
    assert bind(Subset(Subset(Opaque(), indices), indices)) is None
    leaf = files(tmp_path, "a", 3, decode=len)
    assert bindable(Subset(leaf, indices))
    assert indices.looks == 0, "millions of them would take seconds"
    assert bound(Subset(leaf, indices)).is_current()
    assert indices.looks > 0, "or this test sees nothing"


def test_a_range_is_not_spread_out_to_be_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = Subset(files(tmp_path, "a", 5, decode=len), range(1, 4))
    binding = bound(tree)
    with monkeypatch.context() as patch:
        patch.setattr("creel.loader.data.binding.tree.np.asarray", None)
        assert binding.is_current()
    for other in (range(4), [1, 2, 4], range(1, 3)):
        tree.indices = other
        assert not binding.is_current()
    tree.indices = [1, 2, 3]
    assert binding.is_current()


class Shuffled(Subset[Any]):
    def __getitem__(self, i: int) -> Any:
        return self.dataset[0]

    def __getitems__(self, indices: list[int]) -> Any:
        return [self[i] for i in indices]


def test_datasets_that_cannot_be_cached_are_not_bound(tmp_path: Path, photos: Path) -> None:
    leaf = files(tmp_path, "f", 3)
    loader = ImageFolder(photos, loader=len)
    everything: tuple[Any, ...] = (
        Opaque(), Stream(), [1, 2], TensorDataset(torch.arange(3)), Shuffled(leaf, [1]), loader,
        ConcatDataset([Opaque(), Opaque()]), Subset({"a": 1}, ["a"]),  # type: ignore[arg-type, list-item]
        folder.ImageFolder(photos, loader=len), 7, None,
    )  # fmt: skip
    for dataset in everything:
        assert bind(dataset) is None
    opaque: Any = Opaque()
    mixed = bound(ConcatDataset([opaque, leaf]))
    assert mixed.objects(np.array([0, 3, 1]))[1].tolist() == [0, 1, 0]


# --- reading ----------------------------------------------------------------------------------


def test_every_kind_of_leaf_reads_the_same_from_an_arena(tmp_path: Path, photos: Path) -> None:
    import tarfile

    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for path in sorted(photos.rglob("*.png")):
            tar.add(path, path.name)
    trees: list[Dataset[Any]] = [
        files(tmp_path, "f", 3, decode=len),
        records(tmp_path, "r", 5),
        ImageFolder(photos),
        folder.ImageFolder(str(photos)),
        TarDataset(tmp_path / "a.tar"),
    ]
    for tree in trees:
        binding = bound(tree)
        arena = Arena(binding.manifest)
        plain = [tree[i] for i in range(len(tree))]  # type: ignore[arg-type]
        with lent(binding, arena) as lease:
            for i, sample in enumerate(plain):
                assert same(binding.dataset[i], sample)
        assert lease.direct_reads == 0
        assert len(set(arena.taken)) == len(binding.manifest)


@pytest.mark.parametrize("protocol", [2, 5])
def test_a_binding_pickles_with_its_dataset(tmp_path: Path, photos: Path, protocol: int) -> None:
    tree: Any = ConcatDataset(
        [files(tmp_path, "a", 3, decode=len), Subset(folder.ImageFolder(photos), [1, 4])]
    )
    binding = bound(tree)
    arena = Arena(binding.manifest)
    plain = [tree[i] for i in range(5)]
    again = pickle.loads(pickle.dumps(binding, protocol))
    with lent(again, arena) as lease:
        for i in range(5):
            assert same(again.dataset[i], plain[i])
    assert lease.direct_reads == 0
    assert len(arena.taken) == 5


# --- torchvision ------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [folder.ImageFolder, folder.DatasetFolder])
def test_a_torchvision_folder_is_served_and_left_alone(photos: Path, make: Any) -> None:
    args = () if make is folder.ImageFolder else (folder.pil_loader, (".png",))
    dataset: Any = make(photos, *args, target_transform=_text)
    before = dict(dataset.__dict__)
    binding = bound(dataset)
    arena = Arena(binding.manifest)
    assert id(binding.dataset) == id(dataset)  # mypy narrows by `is`
    plain = [dataset[i] for i in range(-6, 6)]
    with lent(binding, arena) as lease:
        assert all(same(dataset[i], plain[i]) for i in range(-6, 6))
        assert len(arena.taken) == 12
        assert lease.direct_reads == 0
        path = Path(dataset.samples[0][0])
        assert folder.pil_loader(path).size == (4, 5)  # also if others call it
        with pytest.raises(FileNotFoundError, match="gone"):
            folder.pil_loader("gone")
    assert len(arena.taken) == 13
    assert dataset.__dict__ == before
    dataset.transform = lambda picture: picture.size  # later changes are seen
    assert dataset[0] == ((4, 5), "0")


def test_a_torchvision_folder_with_a_name_that_is_not_utf8_is_read_as_by_torch(
    photos: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    odd, good = tmp_path / "odd", folder.ImageFolder(photos)
    picture = next(photos.rglob("*.png"))
    (odd / "class").mkdir(parents=True)
    shutil.copy(picture, odd / "class" / os.fsdecode(b"caf\xe9.png"))
    dataset = folder.ImageFolder(odd)
    assert bind(dataset) is None
    assert bind(dataset) is None
    assert caplog.text.count("not UTF-8") == 1, "told once"
    both: Any = ConcatDataset([dataset, good])
    binding = bound(both)
    assert binding.manifest == bound(good).manifest, "the other one is cached"
    arena, plain = Arena(binding.manifest), [dataset[0], good[0]]
    with lent(binding, arena):
        assert same([both[0], both[1]], plain)
    assert len(arena.taken) == 1


def test_changed_samples_of_torchvision_never_give_another_files_bytes(photos: Path) -> None:
    dataset = folder.ImageFolder(photos)
    binding = bound(dataset)
    dataset.samples.reverse()
    assert binding.is_current()  # so many are not compared, as that would take time
    plain = [dataset[i] for i in range(6)]
    with lent(binding, Arena(binding.manifest)):
        assert all(same(dataset[i], plain[i]) for i in range(6))
    arena = Arena(binding.manifest)
    dataset.loader = lambda path: path
    with lent(binding, arena):
        assert dataset[0] == dataset.samples[0]
    assert not arena.taken
    dataset.samples = dataset.samples[:3]
    assert not binding.is_current()


def test_a_file_that_is_no_image_fails_with_its_path_as_in_torchvision(photos: Path) -> None:
    dataset = folder.ImageFolder(photos)
    path = Path(dataset.samples[2][0])
    path.write_bytes(b"no image")
    binding = bound(dataset)
    with pytest.raises(OSError, match="cannot identify") as theirs:
        dataset[2]
    with (
        lent(binding, Arena(binding.manifest)),
        pytest.raises(OSError, match="cannot identify") as ours,
    ):
        dataset[2]
    assert str(ours.value) == str(theirs.value)


def test_folders_are_served_below_the_wrappers(photos: Path) -> None:
    base = folder.ImageFolder(photos)
    tree: Any = creel.wrap(ConcatDataset([Subset(Transformed(base, list), [3, 1]), Opaque()]))
    stack = StackDataset(a=Subset(base, [2, 0]), b=Subset(base, [1, 1]))
    for whole in (tree, stack):
        binding = bound(whole)
        arena = Arena(binding.manifest)
        plain = whole[1]
        with lent(binding, arena):
            assert same(whole[1], plain)
        assert arena.taken


# --- declared reads ---------------------------------------------------------------------------


class Pairs(Dataset[bytes]):
    """A user's own dataset: sample i is files i and i + 1, by number or by address."""

    def __init__(self, paths: list[Path], kind: str) -> None:
        self.creel_uris = [str(p) for p in paths]
        self.kind = kind
        self.same: list[int] = []

    def __len__(self) -> int:
        return len(self.creel_uris) - 1

    def objects(self, i: int) -> Any:
        if self.kind == "one":
            return i
        if self.kind == "address":
            return self.creel_uris[i : i + 2]
        if self.kind == "numbers":
            return np.array([i, i + 1])
        self.same[:] = [i, i + 1]
        return self.same

    def __getitem__(self, i: int) -> bytes:
        if self.kind == "one":
            return creel.read(self.creel_uris[i])
        with creel.open(self.creel_uris[i]) as f:
            return f.read() + creel.read(self.creel_uris[i + 1])


@pytest.mark.parametrize("kind", ["one", "numbers", "address", "one list"])
def test_a_dataset_that_declares_its_reads_is_served(tmp_path: Path, kind: str) -> None:
    leaf = files(tmp_path, "a", 6)
    dataset = Pairs([Path(p) for p in leaf.paths], kind)
    binding = bound(Subset(dataset, [4, 0, 3]))
    expected = [[4], [0], [3]] if kind == "one" else [[4, 5], [0, 1], [3, 4]]
    ids, counts = binding.objects(np.arange(3))
    assert ids.tolist() == [i for ids in expected for i in ids]
    assert counts.tolist() == [len(e) for e in expected]
    arena = Arena(binding.manifest, flip=255)
    plain = [binding.dataset[i] for i in range(3)]
    other = leaf.read(2)
    with lent(binding, arena, ids) as lease:
        leased = [binding.dataset[i] for i in range(3)]
        assert creel.read(leaf.paths[2]) == other  # not one of these objects
    assert [bytes(b ^ 255 for b in sample) for sample in leased] == plain
    assert arena.taken == ids.tolist()
    assert lease.direct_reads == 1


def test_a_wrong_declaration_is_one_sentence(tmp_path: Path) -> None:
    dataset = Pairs([tmp_path / "a", tmp_path / "b"], "numbers")
    dataset.objects = lambda i: [0, 5 + i]  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="objects\\(\\) gave 0 to 5, creel_uris has 2"):
        bound(dataset).objects(np.array([0]))
    dataset.objects = lambda i: [f"/elsewhere{i}"]  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="not in creel_uris"):
        bound(dataset).objects(np.array([0]))
    dataset.creel_uris = [3]  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="sequence of strings"):
        bind(dataset)


class Answers(Opaque):
    """Answers to any attribute, like classes that delegate to a table or another object."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def __getattr__(self, name: str) -> Any:
        return self.answer[name]


@pytest.mark.parametrize("answer", [defaultdict(lambda: len), {}], ids=["something", "fails"])
def test_only_attributes_of_its_own_are_a_declaration(answer: Any) -> None:
    assert bind(Answers(answer)) is None


# --- gather -----------------------------------------------------------------------------------


def test_subsets_may_hold_what_only_their_dataset_understands() -> None:
    class Slices(Dataset[Any]):
        def __getitem__(self, many: Any) -> Any:
            return sum(many)

    assert bind(Subset(Slices(), [[1, 2], [3]])) is None  # type: ignore[list-item]  # deliberately no numbers


def test_trees_read_by_themselves_in_torchs_loader(tmp_path: Path, photos: Path) -> None:
    tree: Any = ConcatDataset(
        [records(tmp_path, "a", 5), Subset(records(tmp_path, "b", 4), [3, 0])]
    )
    expected = list(DataLoader(tree, 3))
    assert same(list(DataLoader(tree, 3, num_workers=2)), expected)
    subset = bound(Subset(folder.ImageFolder(photos), [4, 1])).dataset
    loader = DataLoader(subset, None, num_workers=2, collate_fn=_as_bytes)
    assert list(loader) == [_as_bytes(subset[i]) for i in range(2)]


def _as_bytes(sample: Any) -> tuple[bytes, int]:
    return sample[0].tobytes(), sample[1]


class Doubled(RecordDataset):
    def __getitem__(self, i: int) -> Any:
        return super().__getitem__(i) * 2


def test_no_gather_where_code_comes_before_the_bytes(tmp_path: Path, photos: Path) -> None:
    a, b = records(tmp_path, "a", 5), records(tmp_path, "b", 5, labels=list("vwxyz"))
    path = tmp_path / "a.npy"
    mixed: Any = ConcatDataset([a, RecordDataset(path, labels=[1] * 5)])
    trees: list[Any] = [
        b, mixed, ImageFolder(photos), Transformed(a, len), Doubled(path),
        RecordDataset(path, transform=len), RecordDataset(path, shape=(2, 6)),
        files(tmp_path, "f", 2),
        FileDataset([path], decode=len, nbytes=True), StackDataset(a, a),
        ConcatDataset([a, RecordDataset(path, shape=(2, 6))]), ConcatDataset([a, Opaque()]),
    ]  # fmt: skip
    expected = [False] * len(trees)
    expected[5] = expected[6] = True
    gathers = [bound(tree).gather() for tree in trees]
    assert [gather is not None for gather in gathers] == expected
    # A function of a record is called on rows, whose number is that of the samples.
    assert [gather.per_sample for gather in gathers if gather is not None] == [True, False]


def test_an_order_of_samples_is_one_of_objects(tmp_path: Path) -> None:
    """As the nodes of a cluster plan it: of all, of a part, or not at all."""
    whole = files(tmp_path, "a", 20)
    order = JobOrder(20, 2, 10, 1, seed=3)
    assert bound(whole).in_objects(order) is order
    numbers = [19, 3, 7, 5]
    part = bound(Subset(whole, numbers))
    part_order = part.in_objects(JobOrder(4, 2, 2, 1, seed=3))
    assert part_order is not None
    assert part_order.object_of is not None
    assert part_order.object_of.objects.tolist() == numbers
    again = part.in_objects(JobOrder(4, 2, 2, 1, seed=4))
    assert again is not None
    assert again.object_of is part_order.object_of  # so that a session says it once


def test_an_order_whose_samples_are_not_objects_is_not_planned(tmp_path: Path) -> None:
    """Nor does the person's own `objects` run for each sample to learn that they are."""

    class Declared(Dataset[bytes]):
        def __init__(self, each: int) -> None:
            self.creel_uris = files(tmp_path, f"{each}", 999).paths
            self.each, self.calls = each, 0

        def __len__(self) -> int:
            return len(self.creel_uris) // self.each

        def objects(self, index: int) -> list[int]:
            self.calls += 1
            return [len(self) - 1 - index, *range(self.each - 1)]

        def __getitem__(self, index: int) -> bytes:
            return creel.read(self.creel_uris[index])

    for each in (1, 3):
        dataset = Declared(each)
        order = JobOrder(len(dataset), 1, len(dataset), 1, seed=3)
        assert bound(dataset).in_objects(order) is None
        assert 0 < dataset.calls < len(dataset) // 3
