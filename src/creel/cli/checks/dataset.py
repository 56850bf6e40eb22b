"""Where a dataset lies: how quick its storage is, and whether it can be read from here."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from creel.cli.checks.finding import Finding, judged
from creel.config import Config
from creel.errors import CreelError
from creel.units import format_size

_FILES, _OF_A_FOLDER, _ENTRIES = 256, 32, 2_000  # most files that are looked at; per folder; listed
_LOOK_S = 3.0  # longest time for that
_READ_NBYTES = 64 << 20  # most bytes that are read, or written to the disk tier
_LISTED_S, _ANSWER_S = 20.0, 15.0  # longest times for a listing, and for each answer of it
#: Milliseconds for one `stat`: a local disk needs 0.01, a healthy file server 0.3.
_SLOW_MS = 2.0
#: Files of this mean size gain nothing from several stripes; larger ones gain from them.
_STRIPED_NBYTES, _SINGLE_NBYTES = 4 << 20, 256 << 20
#: Rates that differ by less were measured on the same disk.
_ALIKE = 0.8
#: Seconds that a file may be newer than this node's clock: times of files may be coarse.
_AHEAD_S = 2.0


class FileSample(NamedTuple):
    """Some files of a folder: paths, sizes in bytes, ms for each `stat`, newest time of change."""

    paths: list[str]
    nbytes: list[int]
    ms: list[float]
    newest: float


def findings(address: str, disk: str, now: float) -> Iterator[Finding]:
    """Yield what is wrong with the storage of a dataset.

    Args:
        address: a folder, a file, or the address of one.
        disk: `disk.path` of the configuration; "": there is no disk tier.
        now: this node's time, in seconds since 1970.
    """
    from creel.cache.storage.uris import absolute, is_local
    from creel.loader.data.page_cache import kind_of

    address = absolute(address)
    if not is_local(address):
        yield remote(*_listed(address))
        return
    seen = sample(address)
    if not seen.paths:
        yield Finding("dataset", "bad", f"no file can be read below {address}", "name another path")
        return
    mean = statistics.fmean(seen.nbytes)
    yield metadata(statistics.median(seen.ms), mean)
    yield clock(seen.newest - now)
    if kind_of(f"{os.path.realpath(address)}/") == "lustre":
        yield stripes(_stripe_count(seen.paths[0]), mean)
    if disk:
        yield tier(_rate(seen.paths), _disk_rate(disk))


def sample(root: str) -> FileSample:
    """Look at some files of a folder, or at one file; the first of each of its folders."""
    seen = FileSample([], [], [], 0.0)
    until = time.monotonic() + _LOOK_S
    for path in itertools.islice(_files(root, until), _FILES):
        before = time.perf_counter()
        try:
            status = Path(path).stat()
        except OSError:
            continue
        seen.ms.append(1e3 * (time.perf_counter() - before))
        seen.paths.append(path)
        seen.nbytes.append(status.st_size)
        seen = seen._replace(newest=max(seen.newest, status.st_mtime))
    return seen


def _files(root: str, until: float) -> Iterator[str]:
    """Yield the first files of each folder until then; no folder is listed to its end."""
    folders = [root]
    if Path(root).is_file():
        yield root
        return
    while folders:
        with contextlib.suppress(OSError), os.scandir(folders.pop()) as entries:
            left = _OF_A_FOLDER
            for entry in itertools.islice(entries, _ENTRIES):
                if time.monotonic() > until:
                    return
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                elif left:
                    left -= 1
                    yield entry.path


def metadata(ms: float, mean_nbytes: float) -> Finding:
    """Judge the time of one `stat`, the median of some."""
    state = f"{ms:.2g} ms to look at a file, {format_size(int(mean_nbytes))} each"
    remedy = ""
    if ms > _SLOW_MS:
        remedy = "the metadata server is slow: pack the files into shards (docs/datasets.md)"
    return judged("metadata", state, remedy)


def clock(ahead_s: float) -> Finding:
    """Judge how far the newest file's time of change is ahead of this node's clock."""
    if ahead_s <= _AHEAD_S:
        return Finding("clock", "ok", "no file is from the future")
    state = f"a file was changed {ahead_s:,.1f} s in the future"
    remedy = "changes may go unnoticed: let this node and the file server use one NTP server"
    return Finding("clock", "warn", state, remedy)


def stripes(count: int | None, mean_nbytes: float) -> Finding:
    """Judge the stripes of a file on Lustre; None: `lfs` cannot tell."""
    if count is None:
        return Finding("Lustre", "warn", "unknown stripes", "install lfs, and look at its output")
    state = f"{count} stripes for files of {format_size(int(mean_nbytes))}"
    remedy = ""
    if count != 1 and mean_nbytes < _STRIPED_NBYTES:
        remedy = "each open asks several servers: lfs setstripe -c 1 FOLDER, and copy the files"
    elif count == 1 and mean_nbytes > _SINGLE_NBYTES:
        remedy = "one server sends all of a file: lfs setstripe -c 8 FOLDER, and copy the files"
    return judged("Lustre", state, remedy)


def tier(source_Bps: float, disk_Bps: float) -> Finding:  # noqa: N803  bytes per second
    """Compare the disk tier with the storage; a rate of 0 could not be measured."""
    if not source_Bps or not disk_Bps:
        return Finding("disk tier", "warn", "its rate is unknown", "check disk.path and its room")
    state = (
        f"{format_size(int(disk_Bps))}/s, the dataset's storage {format_size(int(source_Bps))}/s"
    )
    remedy = "slower than what it stands for: leave disk.path empty, or name a faster disk"
    return judged("disk tier", state, remedy if disk_Bps < _ALIKE * source_Bps else "")


def remote(reason: str, files: int | None) -> Finding:
    """Judge the listing of an address: why it failed ("": it has not), and how many files it has.

    files: None if the listing was not over in time.
    """
    if not reason and files is None:
        state = f"not listed within {_LISTED_S:.0f} s"
        remedy = "does the server answer? check network, endpoint and proxies; or it has many files"
        return Finding("storage", "warn", state, remedy)
    if not reason:
        return Finding("storage", "ok", f"{files} files")
    remedies = (
        (
            ("resolve host", "connect", "timed out", "curlcode"),
            "check network, endpoint (AWS_ENDPOINT_URL) and proxies",
        ),
        (("skew", "too large between"), "the clocks differ: let this node use an NTP server"),
        (
            ("region", "redirect", "301"),
            "name the region: s3://bucket/path?region=... or AWS_REGION",
        ),
        (
            ("denied", "credential", "forbidden"),
            "check the keys: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
        ),
        (
            ("no such bucket", "there is no"),
            "check the address, and the endpoint: AWS_ENDPOINT_URL",
        ),
        (("install", "no module"), "install what it needs: pip install 'creel-data[all]'"),
    )
    low = re.sub(r"'[^']*'|\S*://\S*", "", reason).lower()  # without names, which may be such words
    found_remedies = (remedy for words, remedy in remedies if any(word in low for word in words))
    return Finding(
        "storage", "bad", reason, next(found_remedies, "check network, endpoint and proxies")
    )


def _listed(address: str) -> tuple[str, int | None]:
    """List what is below an address; return why that failed, and the number of files."""
    from creel.cache.storage import lookup

    answer: list[tuple[str, int | None]] = []

    def ask() -> None:
        try:
            from creel.loader.data.reading.listing import files_below

            answer.append(("", len(files_below(address))))
        except (CreelError, OSError, ImportError) as e:  # a daemon's node may lack torch
            answer.append((str(e), None))

    settings = lookup.stores().settings
    shorter = {"fetch.deadline_s": f"{min(_ANSWER_S, settings.deadline_s)}"}
    lookup.use(Config.load(shorter)[0].fetch)
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_LISTED_S)
    lookup.use(settings)
    return answer[0] if answer else ("", None)


def _stripe_count(path: str) -> int | None:
    command = ["lfs", "getstripe", "--stripe-count", path]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)  # noqa: S603
        return int(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def _rate(paths: list[str]) -> float:
    """Return the bytes per second at which some files are read, past the page cache if possible."""

    def read() -> int:
        done = 0
        for path in paths:
            if done >= _READ_NBYTES:
                break
            done += _read_cold(path, _READ_NBYTES - done)
        return done

    return _timed(read)


def _disk_rate(folder: str) -> float:
    """Return the bytes per second at which the disk tier reads back what it has written."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            piece = os.urandom(1 << 20)
            for _ in range(_READ_NBYTES >> 20):
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
            return _timed(lambda: _read_cold(file.name, _READ_NBYTES))
    except OSError:
        return 0.0


def _read_cold(path: str, nbytes: int) -> int:
    """Read a file after its pages were dropped from this node's cache; return the bytes read."""
    with Path(path).open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        done = 0
        while done < nbytes and (piece := file.read(min(1 << 20, nbytes - done))):
            done += len(piece)
    return done


def _timed(read: Callable[[], int]) -> float:
    before = time.perf_counter()
    try:
        return read() / max(time.perf_counter() - before, 1e-9)
    except OSError:
        return 0.0
