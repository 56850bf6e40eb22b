"""`creel verify`: run a loader or script with torch's DataLoader and with creel's, and compare.

Each side runs in a fork of this process, from equal seeds, and every loader there records its
batches. On creel's side, a `DataLoader` imported from torch is creel's. Each batch becomes a list
of leaves (path in the batch, type and shape, value or hash of the bytes); the lists are compared in
order.
"""

from __future__ import annotations

import importlib
import itertools
import multiprocessing
import os
import pickle
import random
import runpy
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeAlias

import numpy as np
import torch
import torch.utils.data
import xxhash

from creel.cli.scripts.in_place import replace_loader
from creel.errors import ConfigError, CreelError
from creel.loader.data.decoded.stores.store import DecodedStore
from creel.system.progress import progress_line

TorchLoader: TypeAlias = torch.utils.data.DataLoader[Any]
Report: TypeAlias = dict[str, Any]
#: One leaf of a batch: its path, its type and shape, and its value or the hash of its bytes.
Leaf: TypeAlias = tuple[str, str, str]

_TorchDataLoader = torch.utils.data.DataLoader
_SEED = 0
#: So many samples of a name (`creel.Decoded`) are made again, and compared.
_LOOKS = 64
_RAISES = "raises "  # the type of a leaf that stands for an error


class Record(NamedTuple):
    """One batch: the number of its loader, that loader's epoch, the step in the epoch, leaves."""

    loader: int
    epoch: int
    step: int
    leaves: list[Leaf]


def verify(target: str, arguments: Sequence[str], steps: int | None) -> Report:
    """Compare both loaders on `target`, a script or MODULE:LOADER.

    Args:
        arguments: the script's.
        steps: how many batches to compare; None: all.

    Returns:
        equal, batches, loaders, torch_s, creel_s, difference, torch_repeats, raised: see
        docs/json.md.

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
    torchs, torch_s = _run("torch", target, arguments, steps)
    creels, creel_s = _run("creel", target, arguments, steps)
    report = _compare(torchs, creels) | {"torch_s": torch_s, "creel_s": creel_s}
    last = torchs[-1][-1].leaves[0] if torchs else ("", "", "")
    if report["equal"] and last[1].startswith(_RAISES):
        report["batches"] -= 1
        report["raised"] = f"{last[1].removeprefix(_RAISES)}: {last[2]}"
    if not report["equal"]:
        report["torch_repeats"] = _run("torch", target, arguments, steps)[0] == torchs
    elif not report["batches"] and not report["raised"]:
        raise ConfigError(f"{target} produced no batch: nothing was compared")
    return report


def sentence(report: Report) -> str:
    """Return the verdict as text of one or a few lines."""
    times = f"torch {report['torch_s']:.1f} s, creel {report['creel_s']:.1f} s"
    if report["equal"]:
        subject = (
            f"{_count(report['batches'], 'batch', 'es')} of {_count(report['loaders'], 'loader')}"
        )
        then = f"; then both raise {report['raised']}" if report["raised"] else ""
        return f"equal: {subject}, bit for bit{then} ({times})"
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


def _compare(torchs: Sequence[Sequence[Record]], creels: Sequence[Sequence[Record]]) -> Report:
    """Compare the records of both sides, loader by loader."""
    report: Report = {
        "equal": True,
        "batches": 0,
        "loaders": len(torchs),
        "difference": None,
        "torch_repeats": True,
        "raised": None,
    }
    for a_side, b_side in zip_longest(torchs, creels, fillvalue=()):
        for a, b in zip_longest(a_side, b_side):
            if a != b:
                return report | {"equal": False, "difference": _difference(a, b)}
            report["batches"] += 1
    return report


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


def _leaves_of(value: Any, where: str) -> Iterator[Leaf]:
    if isinstance(value, Mapping):
        yield where, type(value).__name__, str(len(value))
        for key, item in value.items():
            yield from _leaves_of(item, f"{where}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        yield where, type(value).__name__, str(len(value))
        for i, item in enumerate(value):
            yield from _leaves_of(item, f"{where}[{i}]")
    elif hasattr(value, "__dict__") and not isinstance(value, torch.Tensor):
        yield where, type(value).__name__, str(len(vars(value)))
        for name, item in vars(value).items():
            yield from _leaves_of(item, f"{where}.{name}")
    else:
        yield where, *_value(value)


def _value(value: Any) -> tuple[str, str]:
    """Return (type and shape, hash or the value itself) of a value without parts."""
    if isinstance(value, torch.Tensor):
        kind = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
        return kind, _hash(_tensor_bytes(value))
    if isinstance(value, np.ndarray) and value.dtype != object:
        return f"{value.dtype} {list(value.shape)}", _hash(np.ascontiguousarray(value).tobytes())
    if isinstance(value, (bytes, bytearray, memoryview)):
        return f"bytes [{len(value)}]", _hash(bytes(value))
    if isinstance(value, (str, int, float, complex, bool, type(None))):
        return type(value).__name__, repr(value)
    return type(value).__name__, _hash(pickle.dumps(value))


def _tensor_bytes(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach()
    if plain.layout != torch.strided:
        plain = plain.to_dense()
    flat = plain.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def _hash(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)


# --- one side ---------------------------------------------------------------------------------


def _run(
    kind: str, target: str, arguments: Sequence[str], steps: int | None
) -> tuple[list[list[Record]], float]:
    """Run the target with recording loaders in a fork of this process.

    Returns:
        The records of each loader in order, and the seconds that the run took.
    """
    with tempfile.TemporaryFile() as out:
        written = multiprocessing.RawValue("q")  # records so far
        args = (kind, target, arguments, _Tape(out, steps, written))
        process = multiprocessing.get_context("fork").Process(target=_record, args=args)
        start = time.monotonic()
        process.start()
        with progress_line(f"{kind}'s batches", lambda: int(written.value), steps or 0):
            process.join()
        seconds = time.monotonic() - start
        out.seek(0)
        by_loader: dict[int, list[Record]] = {}
        while out.peek(1):
            record = pickle.load(out)  # noqa: S301  from our own child
            if isinstance(record, CreelError):
                raise record
            by_loader.setdefault(record.loader, []).append(record)
    if process.exitcode:
        raise CreelError(f"{target} failed with {kind}'s loader (exit code {process.exitcode})")
    return [by_loader[number] for number in sorted(by_loader)], seconds


def _record(kind: str, target: str, arguments: Sequence[str], tape: _Tape) -> None:
    """Run the target, in a process of its own, and write records or an error to the tape."""
    tape.pid = os.getpid()
    # The target's own prints must not mix with ours: they go to standard error.
    sys.stdout.flush()
    sys.stdout = sys.stderr
    os.dup2(2, 1)
    os.environ["CREEL_DISABLE"] = "1" if kind == "torch" else "0"
    os.environ["PYTHONHASHSEED"] = "0"  # for spawned workers; forks have this process's
    _record_batches(tape)
    # A script that uses creel's class keeps it; on torch's side CREEL_DISABLE makes it torch's.
    if kind == "creel":
        DecodedStore.most_looks = _LOOKS
        replace_loader()
    seed_all(_SEED)
    if ":" in target and not Path(target).is_file():
        sys.path.insert(0, str(Path.cwd()))
        try:
            loader = _loader_of(target)
        except CreelError as e:
            tape.write(e)
            raise SystemExit(1) from None
        _iterate(loader, tape)
        return
    sys.argv = [target, *arguments]
    sys.path[0] = str(Path(target).resolve().parent)
    try:
        runpy.run_path(target, run_name="__main__")
    except Exception as e:  # noqa: BLE001  the user's code
        _show(e)
        raise SystemExit(1) from None


def seed_all(seed: int) -> None:
    """Seed every generator a dataset may draw from: random, NumPy, torch."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002  datasets use the global one
    torch.manual_seed(seed)


def _loader_of(target: str) -> TorchLoader:
    """Return the loader MODULE:LOADER, or the one that the function of that name returns.

    Raises:
        CreelError: the function failed; ConfigError: there is no such loader.
    """
    module, _, name = target.partition(":")
    called = target
    try:
        loader: Any = importlib.import_module(module)
        for part in name.split("."):
            loader = getattr(loader, part)
        if not isinstance(loader, _TorchDataLoader) and callable(loader):
            called = getattr(loader, "__name__", "the function")
            seed_all(_SEED)
            loader = loader()
    except (ImportError, AttributeError) as e:
        raise ConfigError(f"{target}: {e}") from e
    except CreelError:
        raise
    except Exception as e:
        _show(e)
        raise CreelError(f"{called} raised {type(e).__name__}: {e}") from e
    if not isinstance(loader, _TorchDataLoader):
        kind = type(loader).__name__
        raise ConfigError(
            f"{target} is of type {kind}: neither a DataLoader nor a function that returns one"
        )
    return loader


def _iterate(loader: TorchLoader, tape: _Tape) -> None:
    """Run one epoch. An error ends it and is recorded like a batch: both sides must raise it."""
    seed_all(_SEED)
    try:
        for _ in loader:
            pass
    except Exception as e:  # noqa: BLE001  the user's code
        message = str(e).strip().rpartition("\n")[2]  # without the worker's traceback
        reason = message.removeprefix(f"{type(e).__name__}: ")
        leaf = ("", _RAISES + type(e).__name__, reason)
        tape.write(Record(0, 0, tape.written, [leaf]))


def _show(error: Exception) -> None:
    """Print the traceback without the frames that lead to the user's code."""
    leading = (__file__, runpy.__file__, importlib.__file__, "<frozen ")
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(leading):
        frames = frames.tb_next
    traceback.print_exception(type(error), error, frames)


class _Tape:
    """The file that recording loaders write to; ignores writes from forked children."""

    def __init__(self, file: IO[bytes], steps: int | None, written: Any) -> None:
        """`written`: a shared number of the records so far."""
        self._file = file
        self._steps = steps
        self._written = written
        self.pid = os.getpid()

    @property
    def written(self) -> int:
        return int(self._written.value)

    def write(self, record: Record | CreelError) -> None:
        """Write a record, or an error; after `steps` records, end the process."""
        if os.getpid() != self.pid:
            return
        pickle.dump(record, self._file)
        self._file.flush()
        self._written.value += 1
        if self.written == self._steps:
            raise SystemExit(0)


def _record_batches(tape: _Tape) -> None:
    """Let every loader of this process, torch's or derived from it, record its batches."""
    begin, numbers = _TorchDataLoader.__iter__, itertools.count()

    def begin_recorded(loader: TorchLoader) -> Any:
        inner = begin(loader)
        number, epoch = vars(loader).get("_creel_recorded") or (next(numbers), 0)
        vars(loader)["_creel_recorded"] = number, epoch + 1
        return _Recorded(inner, tape, number, epoch)

    _TorchDataLoader.__iter__ = begin_recorded  # type: ignore[method-assign]  # of this process


class _Recorded:
    """Wraps an iterator and records its items; passes on all other attributes."""

    def __init__(self, inner: Any, tape: _Tape, loader: int, epoch: int) -> None:
        self._inner = inner
        self._tape = tape
        self._where = loader, epoch
        self._step = 0

    def __iter__(self) -> _Recorded:
        return self

    def __next__(self) -> object:
        batch = next(self._inner)
        self._tape.write(Record(*self._where, self._step, list(_leaves_of(batch, ""))))
        self._step += 1
        return batch

    def __len__(self) -> int:
        return len(self._inner)

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)
