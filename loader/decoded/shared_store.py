"""One store for the processes of a job on this node that decode the same files alike.

The first process makes a memfd, and binds an abstract unix address that is derived from what is
decoded, and how. The others ask the kernel which process listens there, and open its memfd through
/proc. Nobody waits for another, and nothing is left behind. On any failure a process has a store of
its own.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import time
import weakref
from contextlib import suppress
from pathlib import Path

from creel.cache.memory.memfd import Descriptor
from creel.loader.cluster.ranks import job_name, rank_and_world
from creel.loader.decoded.memory import index_nbytes, new_memory
from creel.loader.decoded.store import DecodedStore
from creel.system.forks import forget_in_child
from creel.system.unix_peers import known_apart, listener_at, view_of

_log = logging.getLogger("creel.loader")

#: Ranks that ask connect, but are never accepted: they stay in the listen queue.
_BACKLOG = 1024
#: Looks for another rank's memfd, and the pause between them: that rank may be starting or ending.
_LOOKS, _PAUSE_S = 3, 0.001

#: The stores of this process, by what they hold.
_open: weakref.WeakValueDictionary[str, DecodedStore] = weakref.WeakValueDictionary()


def open_store(what: str | None, samples: int, limit: int | None) -> DecodedStore | None:
    """Return the store of this job and node for `samples` samples; None if there is no memory.

    Args:
        what: describes exactly which bytes are decoded, and how; None: nobody else shares it.
        limit: most bytes; see `DecodedStore`.
    """
    if limit is not None and limit <= index_nbytes(samples):
        _log.warning("no decoded samples are kept: %d bytes are too few for an index", limit)
        return None
    try:
        if what is None:
            return DecodedStore(new_memory(samples), samples, limit)
        about = f"{what} {samples} {limit}"
        found = _open.get(about)
        if found is None:
            found = _open[about] = _of_node(about, samples, limit)
    except (OSError, ValueError) as e:
        _log.warning("no decoded samples are kept: %s", e)
        return None
    return found


def _of_node(about: str, samples: int, limit: int | None) -> DecodedStore:
    if rank_and_world()[1] == 1:
        return DecodedStore(new_memory(samples), samples, limit)
    name = _name(about)
    address = f"\0creel/{os.getuid()}/decoded/{name}"
    memory = f"creel-decoded-{name}"
    for _ in range(_LOOKS):
        own = _memfd_of(_holder(address), memory)
        if own is not None:
            found = DecodedStore(own, samples, limit)
            found.mine = False
            return found
        made = DecodedStore(new_memory(samples, memory), samples, limit)
        if _listen(address, made):
            return made
        time.sleep(_PAUSE_S)
    return made


def _name(about: str) -> str:
    """Digest what is decoded, in which job, with which view of the file system."""
    world, name = rank_and_world()[1], job_name()
    env = os.environ.get
    # A launcher is the parent of all its ranks on a node. torchrun's name of no name is "none".
    parent = os.getppid() if name in {"", "none"} else 0
    job = f"{world} {name} {env('MASTER_ADDR', '')} {env('MASTER_PORT', '')} {parent}"
    text = f"{view_of()} {job} {about}".encode(errors="backslashreplace")
    return hashlib.blake2b(text, digest_size=12).hexdigest()


class _RankListener:
    """A socket that listens as long as its store lives, in the process that made it."""

    def __init__(self, listening: socket.socket) -> None:
        self._socket = listening
        forget_in_child(self)

    def forget(self) -> None:
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
    weakref.finalize(store, listener.forget).atexit = False
    return True


def _holder(address: str) -> int:
    """Return the pid of the listener at the address, if of our user and files; else 0."""
    peer = listener_at(address)
    if peer is None or peer.uid != os.getuid() or known_apart(peer.pid):
        return 0
    return peer.pid


def _memfd_of(pid: int, name: str) -> Descriptor | None:
    """Open a process's memfd of that name; None if it has none."""
    link = f"/memfd:{name} (deleted)"
    with suppress(OSError):  # the process has just ended, or is none of ours
        for entry in Path(f"/proc/{pid}/fd").iterdir() if pid else ():
            with suppress(OSError):  # just closed
                if str(entry.readlink()) == link:
                    return Descriptor(os.open(entry, os.O_RDWR | os.O_CLOEXEC))
    return None
