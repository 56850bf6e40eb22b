"""Run random training programs with torch's DataLoader and with creel's; compare all they show.

    python -m stress.random_programs --first 0 --count 1000 --jobs 2
    python -m stress.random_programs --show 17
    python -m stress.random_programs --wrapped   # copies, changes and classes of datasets
    CREEL_LOADER__RECHECK=never python -m stress.random_programs  # shows differences

Prints a line for each program that differs, with its first difference; exit status 1 if there is
one. Each run is a process, forked from one that has imported all modules. One daemon serves all
runs, and each program's files have the paths of earlier programs' files: every second one's are in
memory (/dev/shm), where they are always as quick as the page cache.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import sys
import tempfile
import warnings
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import psutil

import creel
from creel.errors import CreelError
from kit import daemon_of, unique_name
from stress import userland
from stress.programs import Program
from stress.wrapped_programs import WrappedProgram

#: For one run; most take half a second, but spawned workers that import torch take a minute each on
#: a machine with a load of 15 per core.
DEADLINE_S = 600

Shown = list[tuple[str, Any]]


def run(text: str, home: Path, *, with_creel: bool) -> Shown:
    """Return what a program shows, run in a process and a folder of its own."""
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir()
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=_play, args=(text, home, with_creel, writer))
    process.start()
    writer.close()
    try:
        shown: Shown = reader.recv() if reader.poll(DEADLINE_S) else [("hung", _log(home))]
    except EOFError:
        shown = [("died", _log(home))]
    finally:
        if shown[-1][0] != "hung":
            process.join(DEADLINE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()
        reader.close()
    return shown


def text_of(seed: int, *, wrapped: bool) -> str:
    """Return a training program, or one with wrapped datasets."""
    return WrappedProgram(seed).text if wrapped else Program(seed).text


def _log(home: Path) -> str:
    return (home / "log").read_text()[-4000:]


def _play(
    text: str, home: Path, with_creel: bool, writer: multiprocessing.connection.Connection
) -> None:
    os.setsid()  # so that workers can be ended with it
    os.chdir(home)
    with Path("log").open("wb") as log:
        os.dup2(log.fileno(), 2)
    faulthandler.dump_traceback_later(DEADLINE_S - 10)
    os.environ[userland.WITH_CREEL] = str(int(with_creel))
    warnings.simplefilter("ignore")
    names: dict[str, Any] = {}
    try:
        exec(compile(text, "program", "exec"), names)
    except Exception as e:  # noqa: BLE001  a program may fail; then both must
        sys.excepthook(type(e), e, e.__traceback__)
        userland.shown.append(("the program raises", userland.error(e)))
    names.clear()
    gc.collect()
    userland.shown.append(("children left", len(multiprocessing.active_children())))
    writer.send([(words, _short(value)) for words, value in userland.shown])


def _short(value: Any) -> str:
    """Return the value as text; if it is long, its beginning and a digest."""
    text = repr(value)
    return text if len(text) < 300 else f"{text[:200]}... {hash(text)}"


def compare(seed: int, folders: Sequence[Path], *, wrapped: bool = False) -> str:
    """Return the first difference between both runs of a program, as text; "" if there is none."""
    text = text_of(seed, wrapped=wrapped)
    home = folders[seed % len(folders)] / f"{os.getpid()}"
    theirs, ours = (run(text, home, with_creel=with_creel) for with_creel in (False, True))
    if ours == theirs:
        return ""
    if theirs[-1][0] == "hung":
        return f"{seed}: torch has not ended after {DEADLINE_S} s"
    if run(text, home, with_creel=False) != theirs:
        return f"{seed}: torch differs from itself"
    same = sum(a == b for a, b in zip(ours, theirs, strict=False))
    first = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), same)
    show = [(*shown, ("nothing", ""))[first] for shown in (theirs, ours)]
    return f"{seed}: {first} of {len(theirs)}: torch {show[0]}, creel {show[1]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--show", type=int, metavar="SEED", help="print that program only")
    parser.add_argument("--wrapped", action="store_true", help="programs with wrapped datasets")
    options = parser.parse_args()
    if options.show is not None:
        print(text_of(options.show, wrapped=options.wrapped))
        return 0
    multiprocessing.set_start_method("fork", force=True)
    os.environ.update(CREEL_SOCKET=unique_name(), CREEL_DAEMON__LINGER_S="60")
    _ = creel.DataLoader, creel.FileDataset, creel.ImageFolder, creel.RecordDataset, creel.wrap
    gc.freeze()
    differences = 0
    seeds = range(options.first, options.first + options.count)
    with tempfile.TemporaryDirectory() as disk, tempfile.TemporaryDirectory(dir="/dev/shm") as shm:
        try:
            play = partial(compare, folders=(Path(disk), Path(shm)), wrapped=options.wrapped)
            with ProcessPoolExecutor(options.jobs) as pool:
                results = pool.map(play, seeds)
                for done, difference in enumerate(results, 1):
                    if difference:
                        print(difference, flush=True)
                        differences += 1
                    if done % 100 == 0:
                        print(f"{done} of {options.count}", file=sys.stderr)
        finally:
            for kind in userland.DAEMONS:
                with contextlib.suppress(CreelError, psutil.Error):
                    daemon_of(f"{os.environ['CREEL_SOCKET']}-{kind}").terminate()
    print(f"{options.count} programs, {differences} differences")
    return int(differences > 0)


if __name__ == "__main__":
    sys.exit(main())
