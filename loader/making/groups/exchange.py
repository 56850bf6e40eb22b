"""How the ranks of a job agree to exchange samples (`remap`): all of them, once, or all fail.

If some ranks exchanged samples and others did not, some samples would be read twice and others
never. So no rank falls back to torch's assignment by itself: all take one decision (`negotiation`).
Afterwards they need not communicate, since the exchange follows from the order and the decision.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable

from torch.utils.data import BatchSampler, DistributedSampler

from creel.errors import ConfigError
from creel.loader.client.cluster.ranks import of_process_group
from creel.loader.data.user_code.protected import attribute
from creel.loader.making.groups.negotiation import Terms, Topic, negotiated, node_name
from creel.loader.torch_private import default_store
from creel.policies.order.remap import Exchange

REMAP = Topic(
    "remap",
    "batch_size, dataset length, or seed, shuffle or drop_last of the sampler",
)


def distributed_sampler(index_sampler: Iterable[object]) -> tuple[DistributedSampler[object], int]:
    """Return the sampler that assigns a loader's samples to ranks, and the batch size.

    Raises:
        ConfigError: it is not torch's own DistributedSampler.
    """
    inner = attribute(index_sampler, "sampler")
    if type(index_sampler) is not BatchSampler or type(inner) is not DistributedSampler:
        raise ConfigError("remap needs sampler=DistributedSampler(...) and a batch_size")
    return inner, index_sampler.batch_size


def agreed(index_sampler: Iterable[object]) -> Exchange:
    """Agree how the loader's ranks exchange samples; waits until all begin its first epoch.

    Raises:
        ConfigError: a job that cannot exchange, ranks that differ, or one that does not come.
    """
    sampler, batch = distributed_sampler(index_sampler)
    group = of_process_group()
    rank, world = group or (0, 1)
    if group is None and sampler.num_replicas > 1:
        raise ConfigError("remap needs torch.distributed.init_process_group, in all ranks")
    if sampler.num_replicas != world:
        raise ConfigError(
            f"remap: num_replicas of the sampler is {sampler.num_replicas}, the job has {world}"
            " ranks: they must be equal"
        )
    if world == 1:
        return Exchange((0,), batch)
    flags = int(sampler.shuffle), int(sampler.drop_last)
    alike = world, batch, sampler.seed, len(sampler.dataset), *flags  # type: ignore[arg-type]  # it has a length
    terms = Terms(secrets.token_hex(8), sampler.rank, node_name(), alike)
    return Exchange(negotiated(REMAP, rank, world, terms, default_store()).node_of, batch)


def check_unchanged(exchange: Exchange, index_sampler: Iterable[object]) -> None:
    """Check that a loader's ranks still match their agreement.

    Raises:
        ConfigError: batch size or number of ranks have changed since.
    """
    sampler, batch = distributed_sampler(index_sampler)
    if (sampler.num_replicas, batch) != (len(exchange.node_of), exchange.batch):
        raise ConfigError(
            "remap: batch_size and number of ranks cannot change after the first epoch: make a new"
            " loader, in all ranks"
        )
