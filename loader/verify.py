"""`creel verify`: run a loader or script with torch's DataLoader and with creel's, and compare.

Both sides start from equal seeds. Each batch becomes a list of leaves (path in the batch, type,
shape, hash of the bytes); the lists are compared in order. A script runs twice, each time in its
own process, with the `DataLoader` it imports replaced by one that records.
"""

from __future__ import annotations

import copy
import importlib
import json
import os
import random
import runpy
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count, islice, zip_longest
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

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
_MACHINERY = frozenset({"importlib", "runpy.py", "contextlib.py"})
_ARGUMENTS = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
    "in_order",
)


def verify(target: str, arguments: Sequence[str] = (), steps: int | None = None) -> Report:
    """Compare both loaders on `target`, a script or MODULE:LOADER.

    Returns:
        equal, batches, loaders, torch_s, creel_s, difference, torch_repeats, raised: see
        docs/cli.md.

    Raises:
        ConfigError: no such script, module or loader, or it produced no batch.
    """
    if target.endswith(".py") or Path(target).is_file():
        report = _verify_script(target, arguments, steps)
    elif not all(target.partition(":")):
        raise ConfigError(f"{target!r} is neither a script (x.py) nor a loader (module:loader)")
    elif arguments:
        raise ConfigError(
            f"unexpected arguments after the loader: {' '.join(arguments)!r}; options come before"
            f" {target}"
        )
    else:
        report = _verify_loader(target, steps)
    if report["equal"] and not report["batches"] and not report["raised"]:
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


# --- one loader -------------------------------------------------------------------------------


def _verify_loader(target: str, steps: int | None) -> Report:
    given = _find(target)
    start = time.monotonic()
    with_torch = list(_batches(given, _TorchDataLoader, steps))
    middle = time.monotonic()
    with_creel = list(_batches(given, CreelLoader, steps))
    times = {"torch_s": middle - start, "creel_s": time.monotonic() - middle}
    report = compare([with_torch], [with_creel]) | times
    last = with_torch[-1].leaves[0] if with_torch else ("", "", "")
    if report["equal"] and last[1].startswith(_RAISES):
        report |= {
            "batches": report["batches"] - 1,
            "raised": f"{last[1][len(_RAISES) :]}: {last[2]}",
        }
    if not report["equal"]:
        again = list(_batches(given, _TorchDataLoader, steps))
        report["torch_repeats"] = again == with_torch
    return report


def _find(target: str) -> Any:
    """Return the loader, or the function that makes one, named by MODULE:LOADER."""
    module, _, name = target.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        with _their_code(target):
            found = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as e:
        raise ConfigError(f"{target}: {e}") from e
    if not isinstance(found, _TorchDataLoader) and not callable(found):
        kind = type(found).__name__
        raise ConfigError(f"{target} is of type {kind}: neither a DataLoader nor a function")
    return found


@contextmanager
def _their_code(name: str) -> Iterator[None]:
    """Report an error of the user's code: print their part of the traceback, raise one sentence.

    Raises:
        CreelError: the code raised anything but an import or attribute error or one of ours.
    """
    try:
        yield
    except (CreelError, ImportError, AttributeError):
        raise
    except Exception as e:
        _show(e)
        raise CreelError(f"{name} raised {type(e).__name__}: {e}") from e


def _show(error: Exception) -> None:
    """Print the traceback without the frames that lead to the user's code."""
    frames = error.__traceback__
    while frames is not None and _leads(frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next
    traceback.print_exception(type(error), error, frames)


def _leads(file: str) -> bool:
    parts = Path(file).parts[-2:]
    return file == __file__ or file.startswith("<frozen ") or bool(_MACHINERY.intersection(parts))


def _batches(given: Any, kind: type[TorchLoader], steps: int | None) -> Iterator[Record]:
    """Yield one epoch of the loader, rebuilt as `kind`, always from the same seeds."""
    seed_all(_SEED)
    loader = given
    if not isinstance(given, _TorchDataLoader):
        with _their_code(getattr(given, "__name__", "the function")):
            loader = given()
    if not isinstance(loader, _TorchDataLoader):
        kind_of = type(loader).__name__
        raise ConfigError(f"the function's result is of type {kind_of}, not a DataLoader")
    batches = islice(rebuilt(loader, kind), steps)
    for step in count():
        try:
            batch = next(batches)
        except StopIteration:
            return
        except Exception as e:  # noqa: BLE001  the user's code; both sides must raise the same
            yield Record(0, 0, step, [("", _RAISES + type(e).__name__, _last_line(e))])
            return
        yield Record(0, 0, step, digest(batch))


def _last_line(error: Exception) -> str:
    """Return an error's message without the worker's traceback it may contain."""
    return str(error).strip().rpartition("\n")[2].removeprefix(f"{type(error).__name__}: ")


def rebuilt(loader: TorchLoader, kind: type[TorchLoader]) -> TorchLoader:
    """Rebuild a loader as class `kind`; samplers and generators are copied, the dataset is not."""
    arguments = {name: getattr(loader, name) for name in _ARGUMENTS if hasattr(loader, name)}
    shared: dict[int, object] = {id(loader.dataset): loader.dataset}
    if loader.generator is not None:
        arguments["generator"] = shared[id(loader.generator)] = _copied(loader.generator)
    if not isinstance(loader.dataset, torch.utils.data.IterableDataset):
        batched = loader.batch_sampler is not None
        name = "batch_sampler" if batched else "sampler"
        arguments[name] = copy.deepcopy(getattr(loader, name), shared)
        if not batched:
            arguments["batch_size"] = None
    else:
        arguments |= {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    return kind(loader.dataset, **arguments)


def _copied(generator: torch.Generator) -> torch.Generator:
    copied = torch.Generator(generator.device)
    copied.set_state(generator.get_state())
    return copied


def seed_all(seed: int) -> None:
    """Seed every generator a dataset may draw from: random, NumPy, torch."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - the global one is what datasets use
    torch.manual_seed(seed)


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


# --- a script ---------------------------------------------------------------------------------


def _verify_script(script: str, arguments: Sequence[str], steps: int | None) -> Report:
    if not Path(script).is_file():
        raise ConfigError(f"there is no script {script}")
    sides, times = {}, {}
    for kind in ("torch", "creel"):
        start = time.monotonic()
        sides[kind] = _run_script(kind, script, arguments, steps)
        times[f"{kind}_s"] = time.monotonic() - start
    report = compare(sides["torch"], sides["creel"]) | times
    if not report["equal"]:
        report["torch_repeats"] = _run_script("torch", script, arguments, steps) == sides["torch"]
    return report


def _run_script(
    kind: str, script: str, arguments: Sequence[str], steps: int | None
) -> list[list[Record]]:
    """Run the script with recording loaders in its own process and return its records."""
    code = "from creel.loader.verify import record_script; record_script()"
    env = dict(os.environ) | {
        "PYTHONHASHSEED": "0",
        "CREEL_DISABLE": "1" if kind == "torch" else "0",
    }
    with tempfile.TemporaryFile() as out:
        settings = json.dumps({"kind": kind, "out": out.fileno(), "steps": steps or 0})
        command = [sys.executable, "-c", code, settings, script, *arguments]
        # The script's own prints must not mix with ours: they go to standard error.
        done = subprocess.run(  # noqa: S603 - the user's own script, which they asked us to run
            command, env=env, pass_fds=[out.fileno()], stdout=sys.stderr.fileno(), check=False
        )
        if done.returncode:
            raise CreelError(f"{script} failed with {kind}'s loader (exit code {done.returncode})")
        out.seek(0)
        return _read(out)


def _read(out: IO[bytes]) -> list[list[Record]]:
    by_loader: dict[int, list[Record]] = {}
    for line in out:
        loader, epoch, step, leaves = json.loads(line)
        record = Record(loader, epoch, step, [(where, kind, what) for where, kind, what in leaves])
        by_loader.setdefault(loader, []).append(record)
    return [by_loader[number] for number in sorted(by_loader)]


class _Tape:
    """The file that recording loaders write to; ignores writes from forked children."""

    def __init__(self, fd: int, steps: int) -> None:
        self._file = os.fdopen(fd, "w", closefd=False)
        self._left = steps or -1
        self._pid = os.getpid()
        self._loaders = 0

    def number(self) -> int:
        self._loaders += 1
        return self._loaders - 1

    def write(self, loader: int, epoch: int, step: int, batch: object) -> None:
        if os.getpid() != self._pid:
            return
        self._file.write(json.dumps([loader, epoch, step, digest(batch)]) + "\n")
        self._file.flush()
        self._left -= 1
        if self._left == 0:
            raise SystemExit(0)


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
        self._tape.write(*self._where, self._step, batch)
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


def record_script() -> None:
    """Entry point of the recording process; `sys.argv` holds settings, script and arguments."""
    global _tape  # noqa: PLW0603 - one tape per process, set once at its start
    settings = json.loads(sys.argv[1])
    sys.argv = sys.argv[2:]
    _tape = _Tape(settings["out"], settings["steps"])
    loader = RecordingTorch if settings["kind"] == "torch" else RecordingCreel
    for name in ("torch.utils.data", "torch.utils.data.dataloader"):
        setattr(importlib.import_module(name), "DataLoader", loader)  # noqa: B010 - any module
    # A script that uses creel's class keeps it: on torch's side CREEL_DISABLE makes it torch's.
    for name in ("creel", "creel.loader", "creel.loader.dataloader"):
        setattr(importlib.import_module(name), "DataLoader", RecordingCreel)  # noqa: B010
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    seed_all(_SEED)
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except Exception as e:  # noqa: BLE001  the user's code
        _show(e)
        raise SystemExit(1) from None
