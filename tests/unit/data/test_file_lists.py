"""Which files samples will open, by what their dataset holds (`file_lists`); no code of it runs."""

from __future__ import annotations

import os
import random
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from torch.utils.data import Dataset, Subset, random_split

from creel.loader.data.tracing import wrapped_reads
from creel.loader.data.tracing.lists import file_lists
from creel.loader.data.tracing.lists.file_lists import FileList, listed, paths_in, solved
from creel.loader.data.tracing.lists.hypothesis import Hypothesis
from creel.loader.data.tracing.wrapped_reads import WrappedReads

N = 24


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("files")
    paths = [folder / "ab"[i % 2] / f"im{i:03d}.png" for i in range(N)]
    for path in paths:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x")
    return list(map(str, paths))


class Held(Dataset[Any]):
    """A dataset with these attributes, whose samples open what `opens` says."""

    def __init__(self, opens: Callable[[Any, int], list[str]], /, **held: object) -> None:
        self.__dict__.update(held)
        self._opens = opens

    def __len__(self) -> int:
        return N

    def opened(self, i: int) -> list[str]:
        return self._opens(self, i)


class Inside:
    """A reader, or a table of annotations, that a dataset holds."""

    def __init__(self, **held: object) -> None:
        self.__dict__.update(held)


def before(dataset: Any) -> FileList | None:
    paths = paths_in(dataset, len(dataset))
    return None if paths is None else listed(paths, len(dataset))


def test_a_list_that_is_longer_than_a_first_batch_may_wait_is_left_to_recording(
    files: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = Held(lambda held, i: [held.paths[i]], paths=files)
    assert before(dataset) is not None
    monkeypatch.setattr(file_lists, "LONGEST_LIST", N - 1)
    assert before(dataset) is None
    assert after(dataset, dataset.opened) is None


@pytest.mark.parametrize(("limit", "line"), [("LONGEST_LIST", "ahead"), ("MAX_SAMPLES", "cached")])
def test_a_dataset_of_very_many_samples_says_so_in_one_line(
    files: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    limit: str,
    line: str,
) -> None:
    monkeypatch.setattr(wrapped_reads, limit, N - 1)
    caplog.set_level("INFO", "creel.loader")
    reads = WrappedReads(Held(lambda d, i: [d.paths[i]], paths=files))
    reads.trace()
    reads.trace()
    (record,) = caplog.records
    assert line in record.message


def test_a_file_of_a_list_costs_few_calls() -> None:
    """What is done for each of a million files delays the first batch."""
    n, calls = 2000, Counter[str]()
    files = FileList([f"/data/{i}" for i in range(n)], 1)
    Hypothesis(files, n, None)  # which imports what it needs
    sys.setprofile(lambda _, event, __: calls.update([event]))
    try:
        hypothesis = Hypothesis(files, n, None)
    finally:
        sys.setprofile(None)
    assert len(hypothesis.trace.counts) == n
    assert calls["call"] + calls["c_call"] < 6 * n


def after(dataset: Any, opened: Callable[[int], list[str]]) -> FileList | None:
    some = random.Random(1).sample(range(len(dataset)), 16)
    return solved(dataset, len(dataset), some, [opened(i) for i in some])


def frame(**columns: object) -> Any:
    return pytest.importorskip("pandas").DataFrame(columns)


def table(column: Any) -> Any:
    return pytest.importorskip("pyarrow").table({"label": list(range(N)), "image": column})


def names(files: list[str]) -> list[str]:
    return [os.path.relpath(path, root(files)) for path in files]


def root(files: list[str]) -> str:
    return os.path.dirname(os.path.dirname(files[0]))  # noqa: PTH120


ORDER = np.random.default_rng(0).permutation(N)
#: What datasets hold, and what sample i opens: forms that are known before any sample was read.
PLAIN: dict[str, Callable[[list[str]], Held]] = {
    "a list of paths": lambda f: Held(lambda d, i: [d.paths[i]], paths=f),
    "a tuple of Paths": lambda f: Held(
        lambda d, i: [str(d.paths[i])], paths=tuple(map(Path, f)), root=root(f)
    ),
    "an array": lambda f: Held(lambda d, i: [d.paths[i]], paths=np.array(f)),
    "samples of torchvision": lambda f: Held(
        lambda d, i: [d.samples[i][0]],
        samples=[(x, i % 2) for i, x in enumerate(f)],
        targets=[0] * N,
    ),
    "two lists": lambda f: Held(
        lambda d, i: [d.images[i], d.masks[i]], images=f, masks=[f[j] for j in ORDER]
    ),
    "a list of dicts": lambda f: Held(
        lambda d, i: [d.data[i]["image"], d.data[i]["label"]],
        data=[{"image": x, "label": f[j], "id": i} for i, (x, j) in enumerate(zip(f, ORDER))],  # noqa: B905
    ),
    "inside a reader": lambda f: Held(
        lambda d, i: [d.reader.args.index[i][0]],
        reader=Inside(args=Inside(index={i: (x, 0) for i, x in enumerate(f)})),
    ),
    "a frame": lambda f: Held(
        lambda d, i: [d.df["path"].iloc[i]], df=frame(path=f, label=[1] * N), n=3
    ),
    "an Arrow column": lambda f: Held(
        lambda d, i: [d.hf.data.column("image")[i].as_py()], hf=Inside(data=table(f))
    ),
    "an Arrow column of pictures": lambda f: Held(
        lambda d, i: [d.hf.data.column("image")[i].as_py()["path"]],
        hf=Inside(data=table([{"bytes": None, "path": x} for x in f])),
    ),
}
#: Forms that are known once some samples were read.
SOLVED: dict[str, Callable[[list[str]], Held]] = {
    "names below a root": lambda f: Held(
        lambda d, i: [os.path.join(d.root, d.names[i])],  # noqa: PTH118
        root=root(f),
        names=names(f),
    ),
    "columns of a frame": lambda f: Held(
        lambda d, i: [f"{d.root}/{d.df.fold.iloc[i]}/{d.df.id.iloc[i]}.png"],
        root=root(f),
        df=frame(fold=[x.split("/")[-2] for x in f], id=[Path(x).stem for x in f]),
    ),
    "numbers": lambda f: Held(
        lambda d, i: [f"{d.root}/{'ab'[i % 2]}/im{d.ids[i]:03d}.png"],
        root=root(f),
        ids=list(range(N)),
        folds=["ab"[i % 2] for i in range(N)],
    ),
    "ids of COCO": lambda f: Held(
        lambda d, i: [f"{d.root}/{d.coco.imgs[d.ids[i]]['file_name']}"],
        root=root(f),
        ids=[int(100 + i) for i in ORDER],
        coco=Inside(
            imgs={100 + i: {"file_name": x, "id": 100 + i} for i, x in enumerate(names(f))}
        ),
    ),
    "entries of a longer list": lambda f: Held(
        lambda d, i: [d.every[d.indices[i]][0]],
        every=[(x, 0) for x in [*f, *f]],
        indices=N + ORDER,
    ),
}


@pytest.mark.parametrize("form", PLAIN)
def test_lists_of_whole_paths_are_known_before_any_sample_was_read(
    form: str, files: list[str]
) -> None:
    dataset = PLAIN[form](files)
    expected = [path for i in range(N) for path in dataset.opened(i)]
    for file_list in (before(dataset), after(dataset, dataset.opened)):
        assert file_list is not None
        assert file_list.addresses == expected


@pytest.mark.parametrize("form", SOLVED)
def test_names_made_of_columns_are_known_once_some_samples_were_read(
    form: str, files: list[str]
) -> None:
    dataset = SOLVED[form](files)
    file_list = after(dataset, dataset.opened)
    assert file_list is not None
    assert file_list.addresses == [path for i in range(N) for path in dataset.opened(i)]


def test_relative_paths_are_those_of_the_working_directory(
    files: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root(files))
    file_list = before(Held(lambda d, i: [d.names[i]], names=names(files)))
    assert file_list is not None
    assert file_list.addresses == files


def test_a_subset_has_the_files_of_its_indices(files: list[str]) -> None:
    whole = Held(lambda d, i: [d.paths[i]], paths=files)
    for inner in (Subset(whole, range(0, N, 2)), random_split(whole, [8, 16])[1]):
        some = Subset(inner, list(range(len(inner)))[::-1])
        file_list = before(some)
        assert file_list is not None
        assert file_list.addresses == [
            files[inner.indices[len(inner) - 1 - i]] for i in range(len(inner))
        ]


@pytest.mark.parametrize(
    "held",
    [
        lambda f: {"paths": [*f[:-1], "/none/such"]},
        lambda f: {"paths": [root(f)] * N},
        lambda f: {"paths": [f[0]] * N},
        lambda f: {"paths": f[:-1]},
        lambda f: {"paths": [*f[:5], 7, *f[6:]]},
        lambda f: {"paths": [*f[:5], f[4], *f[6:]]},
        lambda f: {"paths": [*f[:5], "/\udcff", *f[6:]]},
        lambda _: {"texts": ["a caption"] * N, "numbers": list(range(N))},
        lambda f: {f"paths{k}": list(f) for k in range(9)},
    ],
    ids=[
        *("missing", "folders", "one file", "shorter", "mixed"),
        *("repeated", "not UTF-8", "texts", "many"),
    ],
)
def test_what_is_no_list_of_files_is_none(
    held: Callable[[list[str]], dict[str, object]], files: list[str]
) -> None:
    assert before(Held(lambda _, i: [files[i]], **held(files))) is None


def test_samples_that_a_list_does_not_tell_of_solve_nothing(files: list[str]) -> None:
    dataset = Held(lambda _, i: [files[(i * 7 + 3) % N]], paths=files, ids=list(range(N)))
    assert after(dataset, dataset.opened) is None
    assert after(dataset, lambda _: []) is None
    assert after(dataset, lambda _: [files[0]]) is None


def test_a_file_that_all_samples_open_is_one_of_each(files: list[str]) -> None:
    dataset = Held(lambda d, i: [files[0], d.paths[i]], paths=files)
    file_list = after(dataset, dataset.opened)
    assert file_list is not None
    assert file_list.addresses == [path for i in range(N) for path in (files[0], files[i])]


class Hostile:
    """Whatever is asked of it is an error, and is noted."""

    asked: ClassVar[list[str]] = []

    def __getattribute__(self, name: str) -> Any:
        Hostile.asked.append(name)
        raise RuntimeError(name)

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: Any) -> Any:
        Hostile.asked.append("[]")
        raise RuntimeError(i)

    __iter__ = __fspath__ = __hash__ = __eq__ = __index__ = __array__ = __getitem__  # type: ignore[assignment]


class HostileList(list):  # type: ignore[type-arg]
    def __getitem__(self, i: Any) -> Any:
        Hostile.asked.append("[]")
        return super().__getitem__(i)

    def __iter__(self) -> Any:
        Hostile.asked.append("iter")
        return super().__iter__()


class HostileText(str):
    __slots__ = ()

    def __str__(self) -> str:
        Hostile.asked.append("str")
        return super().__str__()

    def __eq__(self, other: object) -> bool:
        Hostile.asked.append("==")
        return super().__eq__(other)

    __hash__ = str.__hash__


class Asked(Held):
    """A dataset with a property."""

    @property
    def paths(self) -> Any:
        Hostile.asked.append("property")
        return []

    def __getattr__(self, name: str) -> Any:
        Hostile.asked.append(name)
        raise AttributeError(name)


def test_no_code_of_the_dataset_runs(files: list[str]) -> None:
    Hostile.asked.clear()
    odd = {"one": Hostile(), "row": [Hostile() for _ in range(N)], "rows": [(Hostile(), 1)] * N}
    odd |= {"listed": HostileList(files), "texts": [HostileText(f) for f in files]}
    odd |= {"inside": [HostileList([f]) for f in files], "kind": Hostile, "few": {"x": Hostile()}}
    dataset = Asked(lambda _, i: [files[i]], **odd)
    assert before(dataset) is None
    assert after(dataset, lambda i: [files[i]]) is None
    vars(dataset)["real"] = files
    file_list = before(dataset)
    assert file_list is not None
    assert file_list.addresses == files
    assert Hostile.asked == []


def test_a_search_is_bounded(files: list[str]) -> None:
    """However much a dataset holds, and if it holds itself."""
    deep: Any = Inside(paths=files)
    for _ in range(9):
        deep = Inside(deep=deep)
    dataset = Held(lambda _, i: [files[i]], deep=deep, many=[[0] * 9 for _ in range(90)])
    held = vars(dataset)
    held["own"] = dataset
    held["wide"] = {str(i): [[] for _ in range(99)] for i in range(99)}
    held["wider"] = [{str(i): [[] for _ in range(99)] for i in range(99)} for _ in range(99)]
    assert before(dataset) is None
