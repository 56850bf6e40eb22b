"""Shared recording: how the ranks of a job on one node record one dataset in the same memory.

Each rank reads other samples, and all ranks need the reads of all samples when the first epoch is
over. So the first rank makes the memfds, and binds an abstract unix address that is derived from
the job and the dataset. The others ask the kernel which process listens there, and open its memfds
through /proc. No rank waits for another, no thread or daemon is needed, and nothing is left behind.
On any failure the rank records for itself.

It is not certain that the ranks' datasets are the same. Datasets with different `likeness`, or with
different reads of the same sample (`access_recorder`), are never mixed. A mix-up that is not
detected would cost speed only, since reads are looked up by address in any case.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path, PurePath
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from creel.cache.memory.memfd import Descriptor
from creel.loader.binding.journal import ALONE, JournalFile, Shared
from creel.loader.cluster.ranks import job_name
from creel.system.forks import forget_in_child
from creel.system.unix_peers import known_apart, listener_at, view_of

_log = logging.getLogger("creel.loader")

#: Ranks that ask connect, but are never accepted: they stay in the listen queue.
_BACKLOG = 1024
#: Looks for another rank's memfds, and the pause between them: that rank may be starting or ending.
_TRIES, _PAUSE_S = 3, 0.001
#: Depth of datasets inside datasets that is examined, and attributes of each.
_DEPTH, _ATTRIBUTES = 4, 100
#: torchrun's names of a job that the user gave no name.
_NO_NAMES = ("", "none")

_ENDS = [0, -1]
_PLAIN = frozenset({type(None), bool, int, float, str})
_LISTS = frozenset({list, tuple, range})

#: Number of recordings that this process has begun, by description.
_begun: Counter[str] = Counter()


class JointMemory:
    """Memfds that this node's ranks share, and the listening socket if this rank made them."""

    def __init__(self, memfds: list[Descriptor], listener: socket.socket | None) -> None:
        self.memfds = memfds
        self._listener = listener
        if listener is not None:
            weakref.finalize(self, listener.close).atexit = False
        forget_in_child(self)

    @property
    def shared(self) -> Shared:
        """Where to record."""
        journal, *copies = self.memfds
        return (JournalFile(journal), ALONE), (copies[0] if copies else None)

    def forget(self) -> None:
        """Close the copy of the socket in a forked child."""
        self.close()

    def close(self) -> None:
        """Stop other ranks from joining."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None


def joint_memory(
    dataset: Dataset[Any],
    world: int,
    make: Callable[[str], list[Descriptor]],
    kinds: Mapping[str, int],
) -> JointMemory | None:
    """Return the memfds in which this node's ranks record this dataset; None on failure.

    Each process must call this for the same datasets in the same order: the k-th of several
    datasets that look alike matches the k-th of the other ranks.

    Args:
        world: number of ranks of the job.
        make: makes memfds, one per kind, with the given suffix of names.
        kinds: flags of os.open by kind.
    """
    try:
        name = _name(dataset, world, kinds)
        address = f"\0creel/{os.getuid()}/recording/{name}"
        links = {f"/memfd:{kind}-{name} (deleted)": flags for kind, flags in kinds.items()}
        for _ in range(_TRIES):
            found = _memfds_of(_holder(address), links)
            if found:
                return JointMemory(found, None)
            made = make(f"-{name}")
            listener = _listening(address)
            if listener is not None:
                return JointMemory(made, listener)
            time.sleep(_PAUSE_S)
    except Exception:  # noqa: BLE001  this rank then records for itself
        _log.debug("this rank records for itself", exc_info=True)
    return None


def _name(dataset: Dataset[Any], world: int, kinds: Mapping[str, int]) -> str:
    about = f"{list(kinds)} {job_here(world, os.environ, os.getppid())} {likeness(dataset)}"
    _begun[about] += 1
    seen = f"{view_of()} {_begun[about]} {about}".encode(errors="backslashreplace")
    return hashlib.blake2b(seen, digest_size=12).hexdigest()


def job_here(world: int, env: Mapping[str, str], parent: int) -> str:
    """Return what distinguishes this node's jobs: a unique job name, else the parent process.

    A launcher is the parent of all its ranks on a node.

    >>> job_here(2, {"SLURM_JOB_ID": "7"}, 100), job_here(2, {"MASTER_PORT": "29500"}, 100)
    ('2 7   0', '2   29500 100')
    """
    name = job_name(env)
    parent = parent if name in _NO_NAMES else 0
    return f"{world} {name} {env.get('MASTER_ADDR', '')} {env.get('MASTER_PORT', '')} {parent}"


def likeness(dataset: object, depth: int = _DEPTH) -> str:
    """Describe what equal datasets share: classes, plain attributes, lengths and ends of lists.

    No user code runs. Lists of files that differ by rank have different first entries, and datasets
    that hold their rank differ too.

    >>> likeness([3, "a", b"b", 2.5]), likeness({"root": "/data"})
    ('list 4 (3, bytes, 2.5)', "dict 1 ('root': '/data')")
    """
    kind: Any = type(dataset)
    if kind in _PLAIN or isinstance(dataset, np.number):
        return repr(dataset)
    if isinstance(dataset, PurePath):
        return f"{kind.__qualname__} {dataset}"
    if not depth:
        return str(kind.__qualname__)
    if kind is np.ndarray:
        array = cast("NDArray[Any]", dataset)
        return f"ndarray {array.shape} {array.flat[_ENDS] if array.size else ''}"
    if kind in _LISTS:
        listed = cast("list[object]", dataset)
        middle = len(listed) // 2
        some = [*listed[:1], *listed[middle : middle + 1], *listed[-1:]]
        return f"{kind.__qualname__} {len(listed)} ({_each(some, depth)})"
    held: Any = dataset if kind is dict else _attributes(dataset, depth)
    entries = islice(held.items(), _ATTRIBUTES)
    inside = ", ".join(f"{likeness(k, 0)}: {likeness(v, depth - 1)}" for k, v in entries)
    return f"{kind.__qualname__} {len(held)} ({inside})" if held else str(kind.__qualname__)


def _attributes(value: object, depth: int) -> dict[str, object]:
    """Return the attributes of a dataset; {} for any other value."""
    whole = depth == _DEPTH or isinstance(value, Dataset)
    return dict(vars(value)) if whole and hasattr(value, "__dict__") else {}


def _each(values: Sequence[object], depth: int) -> str:
    return ", ".join(likeness(one, depth - 1) for one in values)


def _listening(address: str) -> socket.socket | None:
    """Return a socket that listens at the address; None if another process has bound it."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        return None
    return listener


def _holder(address: str) -> int:
    """Return the pid of the listener at the address, if of our user and files; else 0."""
    peer = listener_at(address)
    if peer is None or peer.uid != os.getuid() or known_apart(peer.pid):
        return 0
    return peer.pid


def _memfds_of(pid: int, links: Mapping[str, int]) -> list[Descriptor]:
    """Open a process's memfds, found by their /proc link, with flags; [] if one is missing."""
    there: dict[str, Path] = {}
    if pid:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):  # just closed
                there[str(entry.readlink())] = entry
    try:
        return [
            Descriptor(os.open(there[link], flags | os.O_RDWR | os.O_CLOEXEC))
            for link, flags in links.items()
        ]
    except (KeyError, OSError):
        return []
