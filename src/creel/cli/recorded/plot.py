"""`creel plot`: four pictures of a recorded run in one file, by matplotlib (extra `plot`)."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from creel.cli.recorded.pictures import (
    STAGES,
    Pictures,
    RankSteps,
    Reuse,
    Slowdown,
    Throughput,
    pictures,
)
from creel.cli.recorded.recording import read
from creel.cli.watching.view import Values
from creel.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

_ENDINGS = (".png", ".svg")
#: Okabe and Ito's colours, which most people can tell apart: stages, training, what was measured.
_COLOURS = {"read": "#0072B2", "decode": "#E69F00", "collate": "#009E73"}
_STEP, _TRAIN, _LINE, _GREY = "#000000", "#CC79A7", "#0072B2", "#666666"
_COLUMNS = 4  # ranks beside each other
_SHOWN = 0.97  # share of the steps of each rank that lies within its panel
_HARDLY = 1.02  # of a slowdown that is none


def plot(recorded: str, out: str, job: str | None = None) -> dict[str, Any]:
    """Draw what a file of `creel trace` has; return the keys in docs/json.md.

    Raises:
        ConfigError: there is no such recording or job, matplotlib is not installed, `out` ends in
            neither .png nor .svg, or it cannot be written.
    """
    if Path(out).suffix.lower() not in _ENDINGS:
        raise ConfigError(f"{out}: the name of a picture ends in {' or '.join(_ENDINGS)}")
    charts = pictures(read(recorded), job)
    figure = _drawn(charts)
    try:
        figure.savefig(out, dpi=150)
    except OSError as e:
        raise ConfigError(f"{out} cannot be written: {e.strerror}") from e
    others = {name: getattr(charts, name) for name in ("slowdown", "throughput", "reuse")}
    return {
        "path": out,
        "job": charts.job,
        "ranks": len(charts.steps),
        "drawn": ["steps", *(name for name, chart in others.items() if not isinstance(chart, str))],
        "left_out": {name: chart for name, chart in others.items() if isinstance(chart, str)},
    }


def sentence(values: Values) -> str:
    """Say what was drawn, and why the rest was not."""
    lines = [f"{values['path']}: {', '.join(values['drawn'])} of job {values['job']}"]
    lines += [f"not drawn: {name}: {why}" for name, why in values["left_out"].items()]
    return "\n".join(lines)


def _drawn(charts: Pictures) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("creel plot needs matplotlib: pip install 'creel-data[plot]'") from None
    rows = -(-len(charts.steps) // _COLUMNS)
    figure = Figure(figsize=(15, 2.6 * rows + 5.0), layout="constrained")
    figure.suptitle(f"job {charts.job}")
    halves = figure.subfigures(2, 1, squeeze=False, height_ratios=[2.6 * rows + 0.9, 4.1])
    above, below = halves[:, 0]
    _steps(above, charts, rows)
    panels = below.subplots(1, 3)
    _slowdown(panels[0], charts.slowdown)
    _throughput(panels[1], charts.throughput)
    _reuse(panels[2], charts.reuse)
    return figure


def _steps(figure: SubFigure, charts: Pictures, rows: int) -> None:
    """Draw a panel for each rank, in one scale."""
    also = f"; {charts.left_out} ranks that waited less are left out" if charts.left_out else ""
    figure.suptitle(
        "Steps of each rank, and the stages of their batches (time / workers): where the bars are"
        f" higher than the time of training, data is what a step waits for{also}",
        fontsize=10,
    )
    columns = min(len(charts.steps), _COLUMNS)
    grid = figure.subplots(rows, columns, sharey=True, squeeze=False)
    panels = grid.ravel().tolist()
    for panel, rank in zip(panels, charts.steps, strict=False):
        _rank(panel, rank)
    for panel in panels[len(charts.steps) :]:
        panel.set_axis_off()
    for row in grid:
        row[0].set_ylabel("ms")
    panels[0].set_ylim(0, _height_ms(charts.steps))
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=9)


def _height_ms(ranks: list[RankSteps]) -> float:
    """Return the height of the panels: a step that is an exception may leave them."""
    heights = [np.maximum(sum(rank.stages.values()), rank.step_s) for rank in ranks]
    return 1.15e3 * max(float(np.quantile(height, _SHOWN)) for height in heights if len(height))


def _rank(panel: Axes, rank: RankSteps) -> None:
    below = 0.0 * rank.step_s
    for stage in STAGES:
        height = 1e3 * rank.stages[stage]
        label = f"{stage} / workers"
        panel.bar(rank.steps, height, 1.0, below, color=_COLOURS[stage], label=label)
        below = below + height
    train_s = (rank.step_s - rank.wait_s).clip(0)
    panel.step(rank.steps, 1e3 * train_s, color=_TRAIN, where="mid", label="training")
    panel.plot(rank.steps, 1e3 * rank.step_s, ".", color=_STEP, markersize=4, label="whole step")
    share = rank.wait_s.sum() / max(rank.step_s.sum(), 1e-9)
    panel.set_title(f"rank {rank.rank}: waits {100 * min(share, 1):.0f} % of its time", fontsize=10)
    panel.set_xlabel("step")
    panel.locator_params("x", integer=True)


def _slowdown(panel: Axes, slowdown: Slowdown | str) -> None:
    panel.set_title("Slowdown against all in memory", fontsize=10)
    if isinstance(slowdown, str):
        _say(panel, slowdown)
        return
    panel.plot(100 * slowdown.shares, slowdown.times, color=_LINE, label="by the model")
    panel.plot([0], slowdown.times[:1], "o", color=_STEP, label="as it was recorded")
    panel.axhline(1.0, color=_GREY, linestyle=":", linewidth=1)
    top = max(1.1 * float(slowdown.times.max()), 1.5)
    panel.set_ylim(0, top)
    panel.set_xlabel("of the objects that steps wait for now, in memory (%)")
    panel.set_ylabel("time of a step / the same with all in memory")
    panel.legend(loc="lower left", fontsize=9)
    if slowdown.times[0] < _HARDLY:
        note = "storage (or the page cache) keeps up:\nmore in memory makes no difference"
        panel.text(50, 1.0 + 0.05 * top, note, ha="center", va="bottom", fontsize=9, color=_GREY)


def _throughput(panel: Axes, throughput: Throughput | str) -> None:
    panel.set_title("Throughput over workers", fontsize=10)
    if isinstance(throughput, str):
        _say(panel, throughput)
        return
    panel.plot(
        throughput.workers, throughput.samples_s, "-", marker=".", color=_LINE, label="by the model"
    )
    panel.plot(
        [throughput.present], [throughput.measured], "o", color=_STEP, label="as it was recorded"
    )
    panel.axhline(throughput.fed, color=_TRAIN, linestyle="--", label="training without waits")
    panel.set_xlabel("workers of each rank")
    panel.set_ylabel("samples per second, all ranks")
    panel.set_ylim(0, 1.15 * max(throughput.fed, throughput.measured))
    panel.locator_params("x", integer=True)
    panel.legend(loc="lower right", fontsize=9)


def _reuse(panel: Axes, reuse: Reuse | str) -> None:
    panel.set_title("Reuse distances of the plan", fontsize=10)
    if isinstance(reuse, str):
        _say(panel, reuse)
        return
    share = 100 * reuse.counts / reuse.counts.sum()
    panel.stairs(share, reuse.edges, fill=True, color=_LINE)
    if reuse.epoch == reuse.epoch:  # nan is unknown
        panel.axvline(reuse.epoch, color=_GREY, linestyle="--", label=f"epoch: {reuse.epoch:.0f}")
        panel.legend(loc="upper right", fontsize=9)
    panel.set_xlabel("steps until an object is read again")
    panel.set_ylabel("reads (%)")


def _say(panel: Axes, why: str) -> None:
    """Say in the place of a picture why it cannot be drawn."""
    panel.set_axis_off()
    text = textwrap.fill(f"not drawn: {why}", 44)
    style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 9, "color": _GREY}
    panel.text(0.5, 0.5, text, transform=panel.transAxes, **style)
