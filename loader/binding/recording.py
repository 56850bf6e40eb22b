"""Where a process records its dataset: a journal and copies of files, its own or shared by ranks.

If there is a disk tier, the journal is kept in its folder for the next job.
"""

from __future__ import annotations

import hashlib
import logging
import os
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from torch.utils.data import Dataset

from creel.cache.disk.traces import keep_trace, open_trace
from creel.cache.memory.memfd import Descriptor
from creel.cache.storage.copies import COPIES, new_copies
from creel.config import Config, memory_budget
from creel.loader.binding.access_recorder import AccessRecorder
from creel.loader.binding.joint_recording import JointMemory, joint_memory, likeness
from creel.loader.binding.journal import ALONE, JOURNAL, JournalFile, Shared, new_journal
from creel.loader.binding.wrapped import Wrapping
from creel.loader.cluster.ranks import on_one_node, rank_and_world
from creel.loader.reading.file_copies import FileCopies
from creel.system import limits
from creel.system.limits import few_descriptors

if TYPE_CHECKING:
    from creel.loader.binding.access_trace import AccessTrace

_log = logging.getLogger("creel.loader")

#: Most datasets of a process that are recorded jointly, or whose bytes are kept, at a time: each
#: takes descriptors. The others are recorded by this rank alone, and read once more by the daemon.
_MOST_JOINT, _MOST_COPIES = 8, 4
_joint: weakref.WeakSet[JointMemory] = weakref.WeakSet()
_kept: weakref.WeakSet[Descriptor] = weakref.WeakSet()  # as long as a manifest names copies
#: Format of kept journals; a different meaning of their records needs a new number.
_FORM = 4


class KeptTrace:
    """The trace of a dataset in the folder of the disk tier.

    With it a job knows from its first epoch on which files on disk its samples read. The trace
    comes from a dataset that looked alike (`likeness`). So this dataset's reads are recorded
    anyway, and the new trace replaces the old one if they differ. Until then a wrong trace costs
    speed only.
    """

    def __init__(self, dataset: Dataset[Any], config: Config, wrapping: Wrapping) -> None:
        """Look up the trace. `dataset`: before any sample was read."""
        self._dataset = dataset
        self._wrapping = wrapping
        self._disk = config.disk
        self._rank, self._world = rank_and_world()
        self._name = ""
        # Not if other nodes read it too: all nodes must switch to the trace in the same epoch.
        if self._disk.path and on_one_node(self._world, os.environ):
            with suppress(Exception):  # raised by a user's attributes
                about = f"{_FORM} {wrapping.whole} {likeness(dataset)}".encode(
                    errors="backslashreplace"
                )
                self._name = hashlib.blake2b(about, digest_size=16).hexdigest()

    def load(self) -> AccessTrace | None:
        """Return the trace, if there is one."""
        if not self._name:
            return None
        try:
            file = JournalFile(Descriptor(open_trace(self._disk.path, self._name)))
            return AccessRecorder(self._dataset, (file, ALONE), self._wrapping, joint=True).trace()
        except Exception:  # noqa: BLE001  missing, or malformed
            return None

    def keep(self, recorder: AccessRecorder, dataset: str) -> None:
        """Keep the journal of a recorder's complete trace; only on the first rank.

        `dataset`: the key of the dataset that the trace gives.
        """
        if not self._name or self._rank or recorder.joint != (self._world > 1):
            return  # a rank that recorded alone knows only its own samples
        try:
            keep_trace(self._disk.path, self._name, dataset, recorder.copy(), self._disk.keep_free)
        except OSError as e:
            _log.debug("the trace is not kept for later jobs: %s", e)


def memory_of_ranks(dataset: Dataset[Any], config: Config) -> JointMemory | None:
    """Return the memfds in which this node's ranks record the dataset; None if there are none."""
    world = rank_and_world()[1]
    if world == 1 or len(_joint) >= _MOST_JOINT:
        return None
    kinds = {JOURNAL: os.O_APPEND} | ({COPIES: 0} if _keeps_copies(config) else {})
    made = {JOURNAL: new_journal, COPIES: new_copies}
    memory = joint_memory(dataset, world, lambda suffix: [made[k](suffix) for k in kinds], kinds)
    if memory is not None:
        _joint.add(memory)
    return memory


def recorder_on(
    shared: Shared | None,
    dataset: Dataset[Any],
    config: Config,
    wrapping: Wrapping,
    *,
    joint: bool = False,
) -> AccessRecorder | None:
    """Make a recorder of a `recordable` dataset; None for lack of descriptors or memory.

    Args:
        shared: where other processes record the dataset; None: this one begins to.
        wrapping: what `creel.wrap` was asked for.
        joint: whether other ranks record there too.
    """
    if few_descriptors():
        return None
    place, copies = (None, None) if shared is None else shared
    wanted = copies is not None or (shared is None and _keeps_copies(config))
    kept = _copies(config, copies) if wanted else None
    try:
        return AccessRecorder(dataset, place, wrapping, copies=kept, joint=joint)
    except Exception:  # noqa: BLE001  its samples are then read as without creel
        _log.debug("the reads of the dataset are not recorded", exc_info=True)
        return None


def _keeps_copies(config: Config) -> bool:
    """Whether to keep the bytes read from slow files for the daemon.

    Not if other nodes read the same dataset, or a disk tier keeps the trace for later jobs: neither
    would find the copies.
    """
    return not config.disk.path and on_one_node(rank_and_world()[1], os.environ)


def _copies(config: Config, own: Descriptor | None) -> FileCopies | None:
    """Return copies for bytes read from slow files, in memory that the daemon does not use yet.

    Not if this process keeps copies for many datasets already: each takes memory and a descriptor.
    """
    if own is None and len(_kept) >= _MOST_COPIES:
        return None
    try:
        memory = limits.memory()
        counts = {"total": memory.total, "available": memory.available}
        budget = memory_budget(config.memory, **counts)
        # the reads of other processes fill the daemon's own memory meanwhile
        copies = FileCopies(min(budget, memory.available // 4), own)
    except Exception:  # noqa: BLE001  no memory, or another library has replaced Python's open
        _log.debug("no copies of files are kept for the daemon", exc_info=True)
        return None
    _kept.add(copies.own)
    return copies
