"""The nodes that read objects first: whom a node asks, and what it answers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from creel.policies.cluster.boundary import SOURCE, ClusterView
from creel.policies.cluster.first_readers import FirstReaders
from creel.policies.cluster.homes import Homes
from creel.policies.cluster.job_order import JobOrder, JobReplays, SampleObjects
from creel.policies.rehearsal.replay_passes import Passes
from kit import cluster_view

N, WORLD = 60, 3
IDS = np.arange(N)
#: The first epoch: every third object of a permutation is each node's.
ORDER = JobOrder(N, WORLD, N // WORLD, 4, 7)


def view_of(me: int, *, again: bool = False) -> ClusterView:
    """Return a node's view of three, whose origins are 10, 11 and 12."""
    origin = 10 + np.arange(WORLD)
    origin[me] = SOURCE
    return replace(cluster_view(origin, 100, again=again), me=me)


def planned(me: int, order: JobOrder = ORDER, epoch: int = 0) -> FirstReaders:
    """Return what a node knows once it was told of an epoch."""
    readers = FirstReaders("d", N)
    tell(readers, view_of(me), order, epoch)
    return readers


def tell(readers: FirstReaders, view: ClusterView, order: JobOrder, epoch: int = 0) -> None:
    readers.dealt(epoch, order, view)
    while (task := readers.task()) is not None:
        readers.planned(task, task.plan())


def mine(rank: int, order: JobOrder = ORDER) -> np.ndarray:
    """Return (n,) whether a rank reads each object in an epoch."""
    return np.isin(IDS, order.by_rank(range(WORLD))[rank])


@pytest.mark.parametrize("me", range(WORLD))
def test_each_node_asks_who_read_an_object_first_and_that_one_brings_it(me: int) -> None:
    homes = Homes([view_of(me)], planned(me))
    for rank in range(WORLD):
        origin = SOURCE if rank == me else 10 + rank
        assert (homes.origins(IDS)[mine(rank)] == origin).all()
        assert (homes.asked(IDS)[mine(rank)] == (rank == me)).all()


def test_until_it_is_known_who_reads_what_first_only_the_next_epoch_waits() -> None:
    readers = FirstReaders("d", N)
    readers.dealt(0, ORDER, view_of(0))
    homes = Homes([view_of(0)], readers)
    assert (homes.origins(IDS) == SOURCE).all()
    assert readers.awaited(IDS, 0, 0) is None
    later = readers.awaited(IDS, 1, 0)
    assert later is not None
    assert later.all()


def test_an_object_is_asked_for_once_its_first_reader_has_read_it() -> None:
    readers = planned(0)
    steps = [readers.awaited(IDS, 1, left) for left in range(ORDER.steps, -1, -1)]
    assert steps[-1] is None
    waiting = [int(np.count_nonzero(step)) for step in steps[:-1] if step is not None]
    assert waiting == [N - ORDER.batch * WORLD * (k + 1) for k in range(ORDER.steps)]
    assert readers.awaited(IDS, 2, ORDER.steps) is None


def test_later_epochs_and_rows_of_a_memory_have_no_other_first_readers() -> None:
    new, rows = np.arange(30, 60, dtype=np.int32), np.arange(10, dtype=np.int32)
    object_of = SampleObjects(np.concatenate([new, rows]))
    replays = JobReplays(Passes(len(rows), 2, WORLD, 5), 0)
    first = JobOrder(len(new), WORLD, len(new) // WORLD, 5, 3, object_of=object_of, replays=replays)
    readers = planned(1, first)
    homes, by_hash = Homes([view_of(1)], readers), Homes([view_of(1)])
    before = homes.origins(IDS)
    assert (before[rows] == by_hash.origins(rows)).all()
    tell(readers, view_of(1), first._replace(seed=4), epoch=1)
    assert (homes.origins(IDS) == before).all()


def test_what_is_read_in_an_order_that_nobody_knows_has_its_home_by_hash() -> None:
    readers = FirstReaders("d", N)
    readers.followed()
    tell(readers, view_of(2), ORDER)
    for homes in (Homes([view_of(2)], readers), Homes([view_of(2)])):
        assert (homes.origins(IDS) == Homes([view_of(2)]).origins(IDS)).all()


def test_while_a_first_reader_is_out_of_reach_its_objects_have_their_homes_by_hash() -> None:
    readers, lost = planned(0), view_of(0)
    lost = replace(lost, origin=np.array([SOURCE, 11, SOURCE]))
    readers.seen(lost)
    homes, by_hash = Homes([lost], readers), Homes([lost])
    assert (homes.origins(IDS)[mine(2)] == by_hash.origins(IDS)[mine(2)]).all()
    assert (homes.asked(IDS)[mine(2)] == by_hash.asked(IDS)[mine(2)]).all()
    assert (homes.origins(IDS)[mine(1)] == 11).all()


def test_nodes_keep_what_they_have_read_in_a_job_with_other_nodes() -> None:
    """Node 1 is replaced by another one, and the rest are numbered anew."""
    readers, view = planned(0), replace(view_of(1), names=("2", "0", "new"))
    readers.seen(view)
    homes, by_hash = Homes([view], readers), Homes([view])
    assert (homes.origins(IDS)[mine(0)] == SOURCE).all()
    assert (homes.origins(IDS)[mine(2)] == 10).all()
    assert (homes.origins(IDS)[mine(1)] == by_hash.origins(IDS)[mine(1)]).all()


def test_a_daemon_in_the_place_of_another_one_takes_over_what_its_peers_know() -> None:
    readers, other = FirstReaders("d", N), planned(0)
    readers.dealt(0, ORDER._replace(seed=9), view_of(1, again=True))
    states = [(readers.waits, readers.task())]
    assert readers.lacks is not None
    plan = other.share(readers.lacks)
    assert plan is not None
    readers.take_plan(plan)
    states.append((readers.waits, readers.task()))
    assert states == [(True, None), (False, None)]
    assert readers.digest == other.digest
    assert (Homes([view_of(1)], readers).origins(IDS)[mine(1)] == SOURCE).all()


def test_nodes_that_were_told_of_other_epochs_first_find_out_and_agree() -> None:
    first, other = planned(0), planned(1, ORDER._replace(seed=8))
    mark = first.digest
    assert mark is not None
    assert other.digest is not None
    assert mark[:2] == other.digest[:2]
    assert mark != other.digest
    other.doubt(mark.seed)
    plan = first.share(mark.seed)
    assert plan is not None
    other.take_plan(plan)
    assert other.digest == mark


def test_a_dataset_that_begins_with_another_one_knows_its_first_readers() -> None:
    old = planned(0)
    grown = FirstReaders("e", 2 * N)
    grown.inherit(old)
    homes = Homes([view_of(0)], grown)
    assert (homes.origins(IDS) == Homes([view_of(0)], old).origins(IDS)).all()
    assert (homes.origins(N + IDS) == SOURCE).all()
