"""How the ranks of a job on one node come to record one dataset in the same memory.

Each rank reads other samples. What one has learnt, all are to know when the first epoch is over. So
the first rank makes the memfds, and binds an abstract unix address that follows from the job and
the dataset; the others ask the kernel who holds it, and open that process's memfds by /proc. Nobody
waits for anybody, no thread and no daemon is needed, and nothing is left behind. Whatever fails
here, the rank records for itself.

Whether the ranks' datasets are the same is not known for certain. Datasets that are told apart by
`likeness`, or by what ranks read as the same sample (`access_recorder`), are never mixed. What was
mixed nevertheless would cost speed only: where samples read is looked up by address, in any case.
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

from creel.forks import forget_in_child
from creel.loader.cluster.ranks import job_name
from creel.unix_peers import known_apart, listener_at, view_of

_log = logging.getLogger("creel.loader")

#: Who asks is not answered, and stays in the queue.
_BACKLOG = 1024
#: Looks for another rank's memfds, and pauses in between: it may just bind its address, or end.
_TRIES, _PAUSE_S = 3, 0.001
#: Datasets inside datasets that are looked at, and attributes of each.
_DEPTH, _ATTRIBUTES = 4, 100
#: torchrun's name of a job to which nobody gave one.
_NO_NAMES = ("", "none")

_ENDS = [0, -1]
_PLAIN = frozenset({type(None), bool, int, float, str})
_LISTS = frozenset({list, tuple, range})

#: Recordings that this process has begun, by what they are of.
_begun: Counter[str] = Counter()


class JointMemory:
    """Memfds that the ranks of this node share; the address of this rank, if it has made them."""

    def __init__(self, fds: list[int], listener: socket.socket | None) -> None:
        self.fds = fds
        self._listener = listener
        if listener is not None:
            weakref.finalize(self, listener.close)
        forget_in_child(self)

    def forget(self) -> None:
        """In a forked child: the address is its parent's."""
        self.close()

    def close(self) -> None:
        """Have no other rank join any more. The memfds are the caller's."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None


def joint_memory(
    dataset: Dataset[Any], world: int, make: Callable[[str], list[int]], kinds: Mapping[str, int]
) -> JointMemory | None:
    """The memfds in which this node's ranks record this dataset; None to record for oneself.

    Each process is to call this for the same datasets in the same order: the k-th of several that
    look alike is the k-th of the other ranks.

    Args:
        world: number of ranks of the job.
        make: makes the memfds, whose names are a kind and what it is told; returns descriptors.
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
            for fd in made:
                os.close(fd)
            time.sleep(_PAUSE_S)
    except Exception:  # noqa: BLE001  whatever it is, this rank can do without
        _log.debug("this rank records for itself", exc_info=True)
    return None


def _name(dataset: Dataset[Any], world: int, kinds: Mapping[str, int]) -> str:
    about = f"{list(kinds)} {job_here(world, os.environ, os.getppid())} {likeness(dataset)}"
    _begun[about] += 1
    seen = f"{view_of()} {_begun[about]} {about}".encode(errors="backslashreplace")
    return hashlib.blake2b(seen, digest_size=12).hexdigest()


def job_here(world: int, env: Mapping[str, str], parent: int) -> str:
    """What tells this node's jobs apart: a name that is nobody else's, else the parent process.

    Launchers are the parents of all ranks of a node.

    >>> job_here(2, {"SLURM_JOB_ID": "7"}, 100), job_here(2, {"MASTER_PORT": "29500"}, 100)
    ('2 7   0', '2   29500 100')
    """
    name = job_name(env)
    parent = parent if name in _NO_NAMES else 0
    return f"{world} {name} {env.get('MASTER_ADDR', '')} {env.get('MASTER_PORT', '')} {parent}"


def likeness(dataset: object, depth: int = _DEPTH) -> str:
    """What is alike in equal datasets: classes, plain attributes, lengths and ends of lists.

    No code of a person's is run. A list of files that was dealt to the ranks differs in its first
    entries; a dataset that knows its rank differs, too.

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
    """Those of datasets alone."""
    whole = depth == _DEPTH or isinstance(value, Dataset)
    return dict(vars(value)) if whole and hasattr(value, "__dict__") else {}


def _each(values: Sequence[object], depth: int) -> str:
    return ", ".join(likeness(one, depth - 1) for one in values)


def _listening(address: str) -> socket.socket | None:
    """A socket that listens at the address; None if another one has bound it."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        return None
    return listener


def _holder(address: str) -> int:
    """The process that listens at the address, if it is one of ours and sees our files; else 0."""
    peer = listener_at(address)
    if peer is None or peer.uid != os.getuid() or known_apart(peer.pid):
        return 0
    return peer.pid


def _memfds_of(pid: int, links: Mapping[str, int]) -> list[int]:
    """A process's memfds, opened with flags by what /proc says of them; [] if one is missing."""
    there: dict[str, Path] = {}
    if pid:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):  # it was just closed
                there[str(entry.readlink())] = entry
    fds: list[int] = []
    try:
        for link, flags in links.items():
            fds.append(os.open(there[link], flags | os.O_RDWR | os.O_CLOEXEC))
    except (KeyError, OSError):
        while fds:
            os.close(fds.pop())
    return fds
