"""`creel verify`: run a loader or script with torch's DataLoader and with creel's, and compare.

Each side runs in a fork of this process, from equal seeds, with every `DataLoader` that is imported
there replaced by one that records. Each batch becomes a list of leaves (path in the batch, type,
shape, hash of the bytes); the lists are compared in order.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import random
import runpy
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeAlias, TypeVar

import numpy as np
import torch
import torch.utils.data

from creel.errors import ConfigError, CreelError
from creel.loader.dataloader import DataLoader as CreelLoader
from creel.loader.digest import Leaf, digest

TorchLoader: TypeAlias = torch.utils.data.DataLoader[Any]
Report: TypeAlias = dict[str, Any]

_TorchDataLoader = torch.utils.data.DataLoader
T = TypeVar("T")
if TYPE_CHECKING:
    _Base = TorchLoader
else:
    _Base = object
_SEED = 0
_RAISES = "raises "  # the type of a leaf that stands for an error
_MACHINERY = frozenset({"importlib", "runpy.py"})


def verify(target: str, arguments: Sequence[str] = (), steps: int | None = None) -> Report:
    """Compare both loaders on `target`, a script or MODULE:LOADER.

    Returns:
        equal, batches, loaders, torch_s, creel_s, difference, torch_repeats, raised: see
        docs/cli.md.

    Raises:
        ConfigError: no such script, module or loader, or it produced no batch.
        CreelError: a script, or the function that makes a loader, failed.
    """
    if target.endswith(".py") or Path(target).is_file():
        if not Path(target).is_file():
            raise ConfigError(f"there is no script {target}")
    elif not all(target.partition(":")):
        raise ConfigError(f"{target!r} is neither a script (x.py) nor a loader (module:loader)")
    elif arguments:
        raise ConfigError(
            f"unexpected arguments after the loader: {' '.join(arguments)!r}; options come before"
            f" {target}"
        )
    torchs, creels = (_run(kind, target, arguments, steps) for kind in ("torch", "creel"))
    report = compare(torchs.loaders, creels.loaders)
    report |= {"torch_s": torchs.seconds, "creel_s": creels.seconds}
    last = torchs.loaders[-1][-1].leaves[0] if torchs.loaders else ("", "", "")
    if report["equal"] and last[1].startswith(_RAISES):
        report["batches"] -= 1
        report["raised"] = f"{last[1].removeprefix(_RAISES)}: {last[2]}"
    if not report["equal"]:
        again = _run("torch", target, arguments, steps)
        report["torch_repeats"] = again.loaders == torchs.loaders
    elif not report["batches"] and not report["raised"]:
        raise ConfigError(f"{target} produced no batch: nothing was compared")
    return report


def sentence(report: Report) -> str:
    """Return the verdict as text of one or a few lines."""
    times = f"torch {report['torch_s']:.1f} s, creel {report['creel_s']:.1f} s"
    if report["equal"]:
        what = (
            f"{_count(report['batches'], 'batch', 'es')} of {_count(report['loaders'], 'loader')}"
        )
        then = f"; then both raise {report['raised']}" if report["raised"] else ""
        return f"equal: {what}, bit for bit{then} ({times})"
    d = report["difference"]
    where = f"loader {d['loader']}, epoch {d['epoch']}, batch {d['step']}"
    if d["where"]:
        where += f", at {d['where']}"
    head = f"different after {_count(report['batches'], 'equal batch', 'es')}: {where}"
    tail = "" if report["torch_repeats"] else f"\n{_UNSTEADY}"
    return f"{head}\n  torch  {d['torch']}\n  creel  {d['creel']}{tail}"


_UNSTEADY = (
    "A second run with torch's DataLoader differs from the first as well: this dataset gives other"
    " data on each call (the clock? a counter? an unseeded generator?), whoever loads it."
)


def _count(n: int, word: str, plural: str = "s") -> str:
    return f"{n} {word}{'' if n == 1 else plural}"


# --- records and their comparison -------------------------------------------------------------


class Record(NamedTuple):
    """One batch: the number of its loader, that loader's epoch, the step in the epoch, leaves."""

    loader: int
    epoch: int
    step: int
    leaves: list[Leaf]


def compare(ours: Sequence[Sequence[Record]], theirs: Sequence[Sequence[Record]]) -> Report:
    """Compare the records of torch (`ours`) and creel (`theirs`), loader by loader."""
    equal = 0
    for a_side, b_side in zip_longest(ours, theirs, fillvalue=()):
        for a, b in zip_longest(a_side, b_side):
            if a != b:
                difference = _difference(a, b)
                return _verdict(equal, len(ours), difference)
            equal += 1
    return _verdict(equal, len(ours), None)


def _verdict(equal: int, loaders: int, difference: Report | None) -> Report:
    return {
        "equal": difference is None,
        "batches": equal,
        "loaders": loaders,
        "difference": difference,
        "torch_repeats": True,
        "raised": None,
    }


def _difference(a: Record | None, b: Record | None) -> Report:
    first = a or b
    report: Report = {"where": ""}
    if first is not None:
        report |= {"loader": first.loader, "epoch": first.epoch, "step": first.step}
    if a is None or b is None or a[:3] != b[:3]:
        return report | {"torch": _place(a), "creel": _place(b)}
    for left, right in zip_longest(a.leaves, b.leaves):
        if left != right:
            report["where"] = (left or right)[0] or "the batch itself"
            return report | {"torch": _leaf(left), "creel": _leaf(right)}
    return report


def _place(record: Record | None) -> str:
    return "no batch" if record is None else f"epoch {record.epoch}, batch {record.step}"


def _leaf(leaf: Leaf | None) -> str:
    return "nothing" if leaf is None else f"{leaf[1]}  {leaf[2]}"


# --- one side ---------------------------------------------------------------------------------


class Side(NamedTuple):
    """What one side did: the records of each loader in order, and the seconds it took."""

    loaders: list[list[Record]]
    seconds: float


def _run(kind: str, target: str, arguments: Sequence[str], steps: int | None) -> Side:
    """Run the target with recording loaders in a fork of this process."""
    with tempfile.TemporaryFile("w+") as out:
        args = (kind, target, arguments, steps, out)
        process = multiprocessing.get_context("fork").Process(target=_record, args=args)
        start = time.monotonic()
        process.start()
        process.join()
        seconds = time.monotonic() - start
        out.seek(0)
        by_loader: dict[int, list[Record]] = {}
        for line in out:
            record = json.loads(line)
            if isinstance(record, dict):
                raise (ConfigError if record["usage"] else CreelError)(record["error"])
            number, epoch, step, leaves = record
            one = Record(number, epoch, step, [(where, kind, what) for where, kind, what in leaves])
            by_loader.setdefault(number, []).append(one)
    if process.exitcode:
        raise CreelError(f"{target} failed with {kind}'s loader (exit code {process.exitcode})")
    return Side([by_loader[number] for number in sorted(by_loader)], seconds)


def _record(
    kind: str, target: str, arguments: Sequence[str], steps: int | None, out: IO[str]
) -> None:
    """Run the target, in a process of its own, and write records or an error to `out`."""
    global _tape  # noqa: PLW0603 - one tape per process, set once at its start
    # The target's own prints must not mix with ours: they go to standard error.
    sys.stdout.flush()
    sys.stdout = sys.stderr
    os.dup2(2, 1)
    os.environ["CREEL_DISABLE"] = "1" if kind == "torch" else "0"
    os.environ["PYTHONHASHSEED"] = "0"  # of workers that are spawned; forks have this process's
    _tape = _Tape(out, steps)
    _replace_loaders(RecordingTorch if kind == "torch" else RecordingCreel)
    seed_all(_SEED)
    if ":" in target and not Path(target).is_file():
        sys.path.insert(0, str(Path.cwd()))
        _iterate(_loader_of(target), _tape)
        return
    sys.argv = [target, *arguments]
    sys.path[0] = str(Path(target).resolve().parent)
    try:
        runpy.run_path(target, run_name="__main__")
    except Exception as e:  # noqa: BLE001  the user's code
        _show(e)
        raise SystemExit(1) from None


def _replace_loaders(loader: type[TorchLoader]) -> None:
    for name in ("torch.utils.data", "torch.utils.data.dataloader"):
        setattr(importlib.import_module(name), "DataLoader", loader)  # noqa: B010 - any module
    # A script that uses creel's class keeps it: on torch's side CREEL_DISABLE makes it torch's.
    for name in ("creel", "creel.loader", "creel.loader.dataloader"):
        setattr(importlib.import_module(name), "DataLoader", RecordingCreel)  # noqa: B010


def seed_all(seed: int) -> None:
    """Seed every generator a dataset may draw from: random, NumPy, torch."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - the global one is what datasets use
    torch.manual_seed(seed)


def _loader_of(target: str) -> TorchLoader:
    """The loader, or what the function returns, that MODULE:LOADER names."""
    module, _, name = target.partition(":")
    called = target
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
        if not isinstance(found, _TorchDataLoader) and callable(found):
            called = getattr(found, "__name__", "the function")
            seed_all(_SEED)
            found = found()
    except (ImportError, AttributeError) as e:
        _end(f"{target}: {e}", usage=True)
    except CreelError as e:
        _end(str(e), usage=isinstance(e, ConfigError))
    except Exception as e:  # noqa: BLE001  the user's code
        _show(e)
        _end(f"{called} raised {type(e).__name__}: {e}")
    if not isinstance(found, _TorchDataLoader):
        kind = type(found).__name__
        _end(f"{target} is of type {kind}: neither a DataLoader nor a function of one", usage=True)
    return found


def _iterate(loader: TorchLoader, tape: _Tape) -> None:
    """Run one epoch; an error ends it, and is recorded like a batch: both sides must raise it."""
    seed_all(_SEED)
    try:
        for _ in loader:
            pass
    except Exception as e:  # noqa: BLE001  the user's code
        message = str(e).strip().rpartition("\n")[2]  # without the worker's traceback
        what = message.removeprefix(f"{type(e).__name__}: ")
        tape.write(0, 0, tape.written, [("", _RAISES + type(e).__name__, what)])


def _end(error: str, *, usage: bool = False) -> NoReturn:
    """End this process with an error for the one that forked it."""
    assert _tape is not None  # noqa: S101  set before the user's code runs
    _tape.fail(error, usage=usage)
    raise SystemExit(1)


def _show(error: Exception) -> None:
    """Print the traceback without the frames that lead to the user's code."""
    frames = error.__traceback__
    while frames is not None and _leads(frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next
    traceback.print_exception(type(error), error, frames)


def _leads(file: str) -> bool:
    parts = Path(file).parts[-2:]
    return file == __file__ or file.startswith("<frozen ") or bool(_MACHINERY.intersection(parts))


class _Tape:
    """The file that recording loaders write to; ignores writes from forked children."""

    def __init__(self, file: IO[str], steps: int | None) -> None:
        self._file = file
        self._steps = steps
        self._pid = os.getpid()
        self._loaders = 0
        self.written = 0

    def number(self) -> int:
        self._loaders += 1
        return self._loaders - 1

    def write(self, loader: int, epoch: int, step: int, leaves: list[Leaf]) -> None:
        if os.getpid() != self._pid:
            return
        self._put([loader, epoch, step, leaves])
        self.written += 1
        if self.written == self._steps:
            raise SystemExit(0)

    def fail(self, error: str, *, usage: bool) -> None:
        self._put({"error": error, "usage": usage})

    def _put(self, line: object) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


_tape: _Tape | None = None


class _Recording(_Base):
    """Mixin for a loader class that records every batch."""

    _creel_number = -1
    _creel_epochs = 0

    def __iter__(self) -> Any:
        inner = super().__iter__()
        if _tape is None:
            return inner
        if self._creel_number < 0:
            self._creel_number = _tape.number()
        epoch, self._creel_epochs = self._creel_epochs, self._creel_epochs + 1
        return _Recorded(inner, _tape, self._creel_number, epoch)


class _Recorded:
    """Wrap an iterator and record what it yields; all else passes through."""

    def __init__(self, inner: Any, tape: _Tape, loader: int, epoch: int) -> None:
        self._inner = inner
        self._tape = tape
        self._where = loader, epoch
        self._step = 0

    def __iter__(self) -> _Recorded:
        return self

    def __next__(self) -> object:
        batch = next(self._inner)
        self._tape.write(*self._where, self._step, digest(batch))
        self._step += 1
        return batch

    def __len__(self) -> int:
        return len(self._inner)

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)


class RecordingTorch(_Recording, _TorchDataLoader[T]):
    """torch's loader with recording."""


class RecordingCreel(_Recording, CreelLoader[T]):
    """creel's loader with recording."""
