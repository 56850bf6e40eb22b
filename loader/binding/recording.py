"""What a process records its dataset with: a journal and copies of files, its own or all ranks'.

Where there is a disk tier, the journal is kept in its folder, for the next job.
"""

from __future__ import annotations

import hashlib
import logging
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from torch.utils.data import Dataset

from creel import limits
from creel.cache.disk.traces import keep_trace, open_trace
from creel.cache.storage.copies import COPIES, new_copies
from creel.config import Config, memory_budget
from creel.loader.binding.access_recorder import AccessRecorder
from creel.loader.binding.joint_recording import JointMemory, joint_memory, likeness
from creel.loader.binding.journal import JOURNAL, new_journal
from creel.loader.cluster.ranks import on_one_node, rank_and_world
from creel.loader.reading.file_copies import FileCopies

if TYPE_CHECKING:
    from creel.loader.binding.access_trace import AccessTrace

_log = logging.getLogger("creel.loader")

#: Of journals that are kept; another one where their records mean something else.
_FORM = 3


class KeptTrace:
    """The trace of a dataset in the folder of the disk tier.

    With it a job knows from its first epoch on which of the files on disk its samples read. It is
    that of a dataset which looked alike (`likeness`): what this one reads is recorded all the same,
    and takes its place where it differs. Until then a wrong trace costs speed only.
    """

    def __init__(self, dataset: Dataset[Any], config: Config, *, whole: bool) -> None:
        """`dataset`: as it is before a sample was read. `whole`: see `creel.wrap`."""
        self._dataset = dataset
        self._disk = config.disk
        self._rank, self._world = rank_and_world()
        self._name = ""
        # Where other nodes read it, too, all are to learn of it in the same epoch.
        if self._disk.path and on_one_node(self._world, os.environ):
            with suppress(Exception):  # of a person's own attributes
                about = f"{_FORM} {whole} {likeness(dataset)}".encode(errors="backslashreplace")
                self._name = hashlib.blake2b(about, digest_size=16).hexdigest()

    def load(self) -> AccessTrace | None:
        """The trace, if there is one."""
        if not self._name:
            return None
        try:
            fd = open_trace(self._disk.path, self._name)
            return AccessRecorder(self._dataset, fd, joint=True).trace()
        except Exception:  # noqa: BLE001  there is none, or it is no trace
            return None

    def keep(self, recorder: AccessRecorder, dataset: str) -> None:
        """Keep what a recorder's complete trace is made of, in the first rank.

        `dataset`: the key of the dataset to which it leads.
        """
        if not self._name or self._rank or recorder.joint != (self._world > 1):
            return  # a rank that has recorded for itself knows its own samples only
        try:
            keep_trace(self._disk.path, self._name, dataset, recorder.fd, self._disk.keep_free)
        except OSError as e:
            _log.debug("what samples read is not kept for later jobs: %s", e)


def memory_of_ranks(dataset: Dataset[Any], config: Config) -> JointMemory | None:
    """The memfds in which all ranks of this node record the dataset; None where there are none."""
    world = rank_and_world()[1]
    if world == 1:
        return None
    kinds = {JOURNAL: os.O_APPEND} | ({COPIES: 0} if _keeps_copies(config) else {})
    made = {JOURNAL: new_journal, COPIES: new_copies}
    return joint_memory(dataset, world, lambda suffix: [made[k](suffix) for k in kinds], kinds)


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


def _keeps_copies(config: Config) -> bool:
    """Whether to keep what is read of slow files for the daemon.

    Not where other nodes read the same dataset, or a disk remembers it: they would not find it.
    """
    return not config.disk.path and on_one_node(rank_and_world()[1], os.environ)


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
