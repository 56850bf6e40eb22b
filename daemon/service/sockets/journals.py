"""Joint journals: the ranks of a job on this node record what they read in the same memory.

The first rank that offers a memfd under a name gives it to all that offer one of this name later.
The daemon only passes the descriptors on: it neither reads nor writes the files.
"""

from __future__ import annotations

import fcntl
import os
from collections import Counter

from creel.cache.memory.memfd import F_GET_SEALS, Descriptor
from creel.errors import MalformedError, UnavailableError

#: Most journals of a client, and of all. Each takes one descriptor.
_MOST_EACH, _MOST = 8, 256
_MAX_NAME = 64  # a digest


class JointJournals:
    """One descriptor for each joint journal, held as long as the client that offered it first."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[str, Descriptor]] = {}  # name -> (token, the memfd)

    def offer(self, token: str, name: str, own: Descriptor) -> Descriptor:
        """Return the journal of this name: `own` for the first client.

        Raises:
            MalformedError: `own` is no memfd, or the name is longer than any that a loader makes.
            UnavailableError: there are too many journals; this rank then records alone.
        """
        if len(name) > _MAX_NAME or not _is_memfd(own.fd):
            raise MalformedError("a journal is a memfd with a short name")
        if name not in self._held:
            owned = Counter(owner for owner, _ in self._held.values())[token]
            if owned >= _MOST_EACH or len(self._held) >= _MOST:
                raise UnavailableError("too many joint journals: record alone")
            self._held[name] = token, own
        return self._held[name][1]

    def withdraw(self, token: str, name: str) -> None:
        """Close the journal of this name, if this client offered it first."""
        if self._held.get(name, ("",))[0] == token:
            del self._held[name]

    def client_left(self, token: str) -> None:
        """Close the journals of a client that has disconnected; other ranks keep theirs open."""
        for name in [name for name, (owner, _) in self._held.items() if owner == token]:
            del self._held[name]


def _is_memfd(fd: int) -> bool:
    try:
        return fcntl.fcntl(fd, F_GET_SEALS) >= 0 and os.fstat(fd).st_nlink == 0
    except OSError:
        return False
