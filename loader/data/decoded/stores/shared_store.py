"""One store for processes of this node that are known to make the same samples.

They are ranks of one process group, or were given one name (`shared_as=`). The first process makes
a memfd, and binds an abstract unix address that is derived from the name of the store. The others
ask the kernel which process listens there, and open its memfd through /proc. Nobody waits for
another, and nothing is left behind. On any failure a process has a store of its own.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import time
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

from creel.cache.memory.memfd import Descriptor
from creel.loader.client.cluster.ranks import job_here
from creel.loader.data.decoded.stores.memory import Extent, index_nbytes, new_memory
from creel.loader.data.decoded.stores.store import DecodedStore
from creel.system.forks import reset_in_child
from creel.system.limits import descriptors_run_out
from creel.system.unix_peers import known_apart, listener_at, view_of

_log = logging.getLogger("creel.loader")

#: Ranks that ask connect, but are never accepted: they stay in the listen queue.
_BACKLOG = 1024
#: Looks for another rank's memfd, and the pause between them: that rank may be starting or ending.
_LOOKS, _PAUSE_S = 3, 0.001

#: How often each description has been asked for.
_asked: Counter[str] = Counter()


def open_store(name: str | None, samples: int, limit: int | None) -> DecodedStore | None:
    """Return a new store for `samples` samples, or that of other processes; None for lack of means.

    Args:
        name: what other processes call it; None: it is for this process and its workers alone, as
            it is where few descriptors are left.
        limit: most bytes; see `DecodedStore`.
    """
    if limit is not None and limit <= index_nbytes(samples):
        _log.warning("no decoded samples are kept: %d bytes are too few for an index", limit)
        return None
    try:
        if name is None or descriptors_run_out():
            return DecodedStore.of_process(samples, limit)
        return _of_node(f"{name} {samples} {limit}", samples, limit)
    except (OSError, ValueError) as e:
        _log.warning("no decoded samples are kept: %s", e)
        return None


def name_in_group(describe: Callable[[], str]) -> str | None:
    """Return the name of a dataset's store among the ranks of a process group; None without one.

    A launcher's variables do not make one: the tasks of a step may be experiments of their own. The
    k-th dataset of a description is that of the other ranks, which `DecodedStore` checks.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    about = describe()
    _asked[about] += 1
    job = job_here(dist.get_world_size(), os.environ, os.getppid())
    return f"group {job} {_asked[about]} {about}"


def _of_node(name: str, samples: int, limit: int | None) -> DecodedStore:
    digest = _digest(name)
    address = f"\0creel/{os.getuid()}/decoded/{digest}"
    memory = f"creel-decoded-{digest}"
    for _ in range(_LOOKS):
        own = _memfd_of(_holder(address), memory)
        if own is not None:
            joined = DecodedStore(own, samples, limit, joint=True)
            joined.mine = False
            return joined
        store = DecodedStore(new_memory(samples, memory), samples, limit, joint=True)
        if _listen(address, store):
            return store
        time.sleep(_PAUSE_S)
    return store


def _digest(name: str) -> str:
    """Digest a name, with this process's view of the file system."""
    text = f"{view_of()} {name}".encode(errors="backslashreplace")
    return hashlib.blake2b(text, digest_size=12).hexdigest()


class _RankListener:
    """A socket that listens as long as its store lives, in the process that made it."""

    def __init__(self, listening: socket.socket) -> None:
        self._socket = listening
        reset_in_child(self)

    def reset_for_process(self) -> None:
        """Close the copy in a forked child."""
        self._socket.close()


def _listen(address: str, store: DecodedStore) -> bool:
    """Let other ranks find a store of this process; False if another one is found there."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        listening.bind(address)
        listening.listen(_BACKLOG)
    except OSError:
        listening.close()
        return False
    listener = _RankListener(listening)
    weakref.finalize(store, listener.reset_for_process).atexit = False
    return True


def _holder(address: str) -> int:
    """Return the pid of the listener at the address, if of our user and files; else 0."""
    peer = listener_at(address)
    if peer is None or peer.uid != os.getuid() or known_apart(peer.pid):
        return 0
    return peer.pid


def _memfd_of(pid: int, name: str) -> Extent | None:
    """Open a process's memfd of that name; None if it has none."""
    link = f"/memfd:{name} (deleted)"
    with suppress(OSError):  # the process has just ended, or is none of ours
        for entry in Path(f"/proc/{pid}/fd").iterdir() if pid else ():
            with suppress(OSError):  # just closed
                if str(entry.readlink()) == link:
                    return Extent(Descriptor(os.open(entry, os.O_RDWR | os.O_CLOEXEC)))
    return None
