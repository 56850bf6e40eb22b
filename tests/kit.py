"""Helpers of the tests: temporary daemons' names, processes, leak checks."""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil


def unique_name() -> str:
    """A daemon name no other test (and no person on this machine) uses."""
    return f"test-{os.getpid()}-{uuid.uuid4().hex[:12]}"


def until(condition: Callable[[], bool], timeout_s: float = 10.0, what: str = "") -> None:
    """Wait for a condition that another process will make true; fail by name when it never does."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s:g} s: {what or condition}")
        time.sleep(0.005)


@dataclass(frozen=True)
class Holdings:
    """What a process holds that outlives a careless test."""

    fds: int
    threads: int
    children: frozenset[int]

    @classmethod
    def now(cls) -> Holdings:
        me = psutil.Process()
        children = frozenset(
            c.pid for c in me.children(recursive=True) if c.status() != psutil.STATUS_ZOMBIE
        )
        return cls(me.num_fds(), threading.active_count(), children)


@contextmanager
def nothing_left(timeout_s: float = 10.0) -> Iterator[None]:
    """Fail unless descriptors, threads and children are back to what they were at the start."""
    before = Holdings.now()
    yield

    def back() -> bool:
        now = Holdings.now()
        return (
            now.fds <= before.fds
            and now.threads <= before.threads
            and now.children <= before.children
        )

    import gc

    gc.collect()
    until(back, timeout_s, f"everything given back: {before} before, {Holdings.now()} after")
