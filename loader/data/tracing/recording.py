"""Where a process records its dataset: in a journal of its own, or in one that ranks share.

Each rank reads other samples, and all ranks of a node need the reads of all samples when the first
epoch is over. So each rank offers a journal to the node's daemon, which gives all of them the one
that came first. The journal is memory of the ranks: it does not depend on the daemon any more.
Until a daemon answers, each rank records alone; the joint journal then takes that over.
"""

from __future__ import annotations

import hashlib
import logging
import os
import weakref
from collections import Counter
from typing import TYPE_CHECKING, Any

from torch.utils.data import Dataset

from creel.cache.memory.memfd import Descriptor
from creel.config import Config
from creel.loader.client.cluster.ranks import job_here, rank_and_world
from creel.loader.client.connections import client_of
from creel.loader.data.binding.wrapped import Wrapping
from creel.loader.data.tracing.journal import JournalFile, JournalPlace, new_journal
from creel.loader.data.tracing.recorder import AccessRecorder
from creel.loader.data.user_code.dataset_fingerprint import likeness
from creel.messages import WithdrawJournal
from creel.system.limits import few_descriptors

if TYPE_CHECKING:
    from creel.loader.client.client import Client

_log = logging.getLogger("creel.loader")

#: Format of journals; a different meaning of their records needs a new number.
_FORM = 6
#: Number of joint journals that this process has asked for, by description.
_begun: Counter[str] = Counter()


def _digest(*parts: object) -> str:
    """Return a name for a journal, with which no journal of another format is mixed up."""
    text = " ".join(map(str, (_FORM, *parts)))
    return hashlib.blake2b(text.encode(errors="backslashreplace"), digest_size=16).hexdigest()


class RanksJournal:
    """A journal that this node's ranks share; further ranks may join while the first has this."""

    def __init__(self, client: Client, name: str) -> None:
        """Get the journal of this name.

        Raises:
            UnavailableError: refused, or the daemon is lost.
            OSError: no descriptor or memory.
        """
        descriptor = new_journal()
        joint = JournalFile(Descriptor(client.join_journal(name, descriptor.fd)))
        self.place = JournalPlace(joint, joint=True)
        # Else the daemon would keep its memory as long as this process trains.
        weakref.finalize(self, client.notify, WithdrawJournal(name)).atexit = False


def journal_of_ranks(
    dataset: Dataset[Any], config: Config, wrapping: Wrapping
) -> RanksJournal | None:
    """Return the journal in which this node's ranks record the dataset; None if there is none.

    Each rank must call this for the same datasets in the same order: the k-th of several datasets
    that look alike matches the k-th of the other ranks.
    """
    try:
        world = rank_and_world()[1]
        job = job_here(world, os.environ, os.getppid())
        about = f"{job} {wrapping.whole} {likeness(dataset)}"
        _begun[about] += 1  # also if no daemon answers: other ranks may reach one
        client = client_of(config)
        return None if client is None else RanksJournal(client, _digest(_begun[about], about))
    except Exception:  # noqa: BLE001  this rank then records for itself
        _log.debug("this rank records for itself", exc_info=True)
        return None


def recorder_on(
    place: JournalPlace | None,
    dataset: Dataset[Any],
    wrapping: Wrapping,
    *,
    seals: bool = True,
) -> AccessRecorder | None:
    """Make a recorder of a `recordable` dataset; None for lack of descriptors or memory.

    Args:
        place: where other processes record the dataset; None: this one begins to.
        wrapping: what `creel.wrap` was asked for.
        seals: as for `AccessRecorder`.
    """
    if few_descriptors():
        return None
    try:
        return AccessRecorder(dataset, place, wrapping, seals=seals)
    except Exception:  # noqa: BLE001  its samples are then read as without creel
        _log.debug("the reads of the dataset are not recorded", exc_info=True)
        return None
