"""Check what libzmq needs of the system: without it, libzmq ends the whole process."""

from __future__ import annotations

import os
import threading

from creel.errors import DaemonLostError
from creel.system.fd_packets import close_all

#: A context and a DEALER take 8 (libzmq 4.3); other threads may take some meanwhile.
_MIN_FREE_FDS = 16
#: A context starts 2 (libzmq 4.3); other code may start some meanwhile.
_MIN_FREE_THREADS = 4


def check_descriptors() -> None:
    """Raise DaemonLostError if too few descriptors are free: libzmq would abort (epoll.cpp)."""
    free: list[int] = []
    try:
        while len(free) < _MIN_FREE_FDS:
            free.append(os.eventfd(0, os.EFD_CLOEXEC))
    except OSError as e:
        raise DaemonLostError(f"no descriptors for a connection to the daemon: {e}") from e
    finally:
        close_all(free)


def check_threads() -> None:
    """Raise DaemonLostError if no threads can be started: libzmq would abort (thread.cpp).

    A limit on processes (`ulimit -u`, a container's pids) counts threads, including the daemon's.
    """
    gate = threading.Event()
    begun: list[threading.Thread] = []
    try:
        while len(begun) < _MIN_FREE_THREADS:
            thread = threading.Thread(target=gate.wait, name="creel-room", daemon=True)
            thread.start()
            begun.append(thread)
    except RuntimeError as e:
        raise DaemonLostError(f"no threads for a connection to the daemon: {e}") from e
    finally:
        gate.set()
        for thread in begun:
            thread.join()
