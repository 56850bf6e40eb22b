"""`creel simulate`: what a job would read and transfer, and how long it would wait."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from creel.cli.watching import view
from creel.cli.watching.view import Values, format_count, format_seconds
from creel.errors import ConfigError
from creel.policies.cluster.simulate import Epoch, Scenario, replay
from creel.system.progress import progress_line
from creel.units import format_size

_MAX_NODES = 16_384


def simulate(scenario: Scenario) -> Values:
    """Replay the job.

    Returns:
        capacity (in datasets), depth, plan_nbytes, steps, samples (per epoch), and epochs: a list
            of
        `Epoch` fields.

    Raises:
        ConfigError: the job is impossible.
    """
    if scenario.nodes > _MAX_NODES:
        raise ConfigError(f"--nodes: at most {_MAX_NODES:,}")
    if scenario.samples >= 1 << 31:
        raise ConfigError("--samples: at most 2,147,483,647")
    if not 0 < scenario.nbytes <= scenario.memory:
        raise ConfigError("--sample-size must be at least one byte, and at most --memory")
    if not scenario.steps:
        least = scenario.world * scenario.batch
        raise ConfigError(f"--samples: fewer than one global batch has ({least:,})")
    epochs: list[Values] = []
    with progress_line("replaying epochs", lambda: len(epochs), scenario.epochs):
        epochs.extend(asdict(epoch) for epoch in replay(scenario))
    return {
        "capacity": scenario.capacity,
        "depth": scenario.lookahead,
        "plan_nbytes": scenario.plan_nbytes,
        "steps": scenario.steps,
        "samples": scenario.objects,
        "epochs": epochs,
    }


def show(result: Values) -> None:
    """Print a summary and a row for each epoch."""
    view.pairs(
        [
            ("memory", f"{result['capacity']:.3g} x the dataset"),
            ("epoch", f"{result['steps']:,} steps, {format_count(result['samples'])} samples"),
            ("plan", f"{format_size(result['plan_nbytes'])} per node, {result['depth']} ahead"),
        ]
    )
    header = ("epoch", "local", "remote", "source", "handed on", "slowest", "occupancy", "time")
    epochs: Sequence[Values] = result["epochs"]
    view.table(header, [(str(i), *_cells(Epoch(**e))) for i, e in enumerate(epochs, 1)])


def _cells(epoch: Epoch) -> tuple[str, ...]:
    shares = (epoch.local, epoch.remote, epoch.source, epoch.handed)
    timed = epoch.seconds > 0  # a link, the source or the step is limited
    return (
        *(f"{100 * share:.2f} %" for share in shares),
        f"{epoch.slowest:.2f} x",
        f"{100 * epoch.occupancy:.1f} %",
        format_seconds(epoch.seconds) if timed else "-",
    )
