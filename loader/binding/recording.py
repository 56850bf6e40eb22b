"""What a process records its dataset with: a journal and copies of files, its own or all ranks'."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from functools import partial
from typing import Any

from torch.utils.data import Dataset

from creel import limits
from creel.cache.storage.copies import COPIES, new_copies
from creel.config import Config, memory_budget
from creel.loader.binding.access_recorder import JOURNAL, AccessRecorder, new_journal
from creel.loader.binding.joint_recording import JointMemory, joint_memory
from creel.loader.cluster.ranks import all_here, rank_and_world
from creel.loader.reading.file_copies import FileCopies

_log = logging.getLogger("creel.loader")


def memory_of_ranks(dataset: Dataset[Any], config: Config) -> JointMemory | None:
    """The memfds in which all ranks of this node record the dataset; None where there are none."""
    world = rank_and_world()[1]
    if world == 1:
        return None
    kinds = {JOURNAL: os.O_APPEND} | ({COPIES: 0} if _keeps_copies(config) else {})
    return joint_memory(dataset, world, partial(_new_memory, kinds), kinds)


def recorder_on(
    fds: list[int], dataset: Dataset[Any], config: Config, whole: bool, *, joint: bool = False
) -> AccessRecorder | None:
    """A recorder of a `recordable` dataset; None where there is no descriptor or memory for it.

    Args:
        fds: of a journal, and of copies, taken over; none for new ones.
        whole: see `creel.wrap`.
        joint: whether other ranks use them, too.
    """
    journal, copies, *_ = [*fds, None, None]
    wanted = fds[1:] or (not fds and _keeps_copies(config))
    kept = _copies(config, copies) if wanted else None
    try:
        return AccessRecorder(dataset, journal, whole=whole, copies=kept, joint=joint)
    except Exception:  # noqa: BLE001  its samples are read as without creel
        _log.debug("what samples read is not recorded", exc_info=True)
        return None


def _new_memory(kinds: Iterable[str], suffix: str) -> list[int]:
    """Descriptors of new memfds, whose names end with `suffix`."""
    return [{JOURNAL: new_journal, COPIES: new_copies}[kind](suffix) for kind in kinds]


def _keeps_copies(config: Config) -> bool:
    """Whether to keep what is read of slow files for the daemon.

    Not where other nodes read the same dataset, or a disk remembers it: they would not find it.
    """
    return not config.disk.path and all_here(rank_and_world()[1], os.environ)


def _copies(config: Config, fd: int | None) -> FileCopies | None:
    """Where to keep what is read of slow files, in memory that the daemon does not use yet."""
    try:
        memory = limits.memory()
        counts = {"total": memory.total, "available": memory.available}
        budget = memory_budget(config.memory, **counts)
        # what others read fills the daemon's own memory meanwhile
        return FileCopies(min(budget, memory.available // 4), fd)
    except Exception:  # noqa: BLE001  no room; or somebody's own `open` stands for Python's
        _log.debug("no copies are kept of what is read", exc_info=True)
        return None
