"""What a rank's training waited for, and which change would help, in a sentence. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from creel.cli.watching.view import Values, format_count, format_seconds, overdue, worst_cause
from creel.cli.watching.what_if import Outlook
from creel.units import format_size

_WHOSE = ("job", "rank", "pid")
#: Waits below this share of the time that batches lay ready do not count.
_HARDLY = 0.02
#: Memory counts as full from this share of the budget on: the rest is room for the next fetches.
_FULL = 0.85
#: Share of misses above which a full memory is too small.
_MISSED = 0.02
#: Share of requests answered by "slow down" above which a store sets the pace. Its client halves
#: its requests in flight at each, and then adds one after the other: at 32, one for some 400.
_THROTTLED = 0.002

_BY_CAUSE = {
    "decode": (
        "your dataset[i] itself (decoding, transforms): more workers or processors, samples that"
        " stay decoded (keep_decoded=, creel.kept), or less work for a sample would help; a cache"
        " of files has nothing to add"
    ),
    "collate": "collation, making batches of samples: less of it, or more workers would help",
    "sampler": "your sampler, drawing the order: a quicker one would help",
    "daemon": (
        "the start of workers and their answers: persistent_workers=True keeps them from epoch to"
        " epoch"
    ),
}


def reason(rank: Values, node: Values) -> str:
    """Return what a rank, or one stream of its batches, waited for.

    Args:
        rank: a row of `ranks` or `sessions` of `creel stats --json`.
        node: the whole answer of `creel stats --json`.
    """
    if wait := overdue(rank):
        return wait + (f"; {rank['own_remedy']}" if rank["own_file"] else "")
    if not rank["batches"]:
        return "no batch was taken yet"
    waited = sum(rank["stall_s"].values())
    lay_ready = rank["lead_s"]
    took = f"{format_seconds(waited)} for {format_count(rank['batches'])} batches"
    if waited <= _HARDLY * (waited + lay_ready):
        return f"hardly waited ({took}): faster data would gain nothing"
    cause = worst_cause(rank["stall_s"])
    if rank.get("own_file") and cause in {"source", "decode"}:
        return (
            f"waited {took}, for files that the dataset reads itself ({rank['own_file']}):"
            f" {rank['own_remedy']}"
        )
    share = 100 * rank["stall_s"].get(cause, 0) / waited
    subject = _of_source(rank, node) if cause == "source" else _BY_CAUSE[cause]
    if cause == "decode" and not _known(rank):
        subject += ", unless it reads files that creel does not know of (creel.wrap, creel.kept)"
    return f"waited {took}, {share:.0f} % of it for {subject}"


def _known(rank: Values) -> bool:
    """Whether creel serves what a rank reads: its files, or its samples."""
    return bool(rank["nbytes"] or rank.get("decoded_hits", 0) + rank.get("decoded_misses", 0))


def _of_source(rank: Values, node: Values) -> str:
    memory, tier = node["memory"], node["tiers"].get("memory", {})
    hits, misses = tier.get("hits", 0), tier.get("misses", 0)
    direct = rank["direct_reads"]
    if 2 * direct > rank["samples"]:
        return (
            f"files that it read directly ({format_count(direct)} reads): that is right where"
            " storage is fast; otherwise check that the daemon runs (`creel status`)"
        )
    if not _known(rank):
        return (
            "storage, for files that creel does not serve so far: from the second epoch on"
            " creel.wrap(dataset) or creel.kept(dataset, size) would"
        )
    if throttled := _throttled(rank, node):
        return throttled
    usable = memory["budget_nbytes"] - memory.get("withheld_nbytes", 0)
    full = memory["used_nbytes"] >= _FULL * usable
    if full and misses > _MISSED * (hits + misses):
        return (
            f"storage: memory ({format_size(usable)}) cannot hold all objects:"
            f" {format_count(misses)} of {format_count(hits + misses)} had to be read; a"
            " larger memory.budget or a disk tier (disk.path) would help"
        )
    return (
        "storage, whose objects were read for the first time: later epochs find them in memory;"
        " `creel warm` before the training, or faster storage, would help the first epoch"
    )


def _throttled(rank: Values, node: Values) -> str:
    """Return how often the store of a rank's dataset asked for fewer requests, "" if hardly."""
    sources, dataset = node.get("sources", ()), rank.get("dataset")
    mine = [source for source in sources if dataset in (None, source.get("dataset"))]
    asked = sum(sum(source.get("requests", {}).values()) for source in mine)
    throttles = sum(source.get("throttles", 0) for source in mine)
    if throttles <= _THROTTLED * asked:
        return ""
    return (
        f"storage, throttled by the store: {format_count(throttles)} of {format_count(asked)}"
        ' requests were answered by "slow down"; fewer and larger objects (creel.TarDataset), a'
        " larger memory.budget, or a higher limit of the store would help"
    )


def rows(stats: Values, outlooks: Mapping[int, Outlook]) -> list[dict[str, Any]]:
    """Return a row for each open stream of batches; without any, for each rank so far.

    outlooks: of the streams of which enough is known, by session.
    """
    lines = []
    for session in stats["sessions"] or stats["ranks"]:
        row = {key: session[key] for key in _WHOSE if key in session}
        outlook, why = outlooks.get(session.get("session", -1)), reason(session, stats)
        if outlook is None or session.get("overdue_s"):
            lines.append(row | {"why": why})
        else:
            lines.append(row | {"why": f"{why}; {outlook}"} | outlook.values())
    return lines
