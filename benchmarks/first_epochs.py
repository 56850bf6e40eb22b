"""The README's picture: a training's first epochs, with torch's loader and with creel's.

    sudo python benchmarks/first_epochs.py              # run it, keep the figures, draw
    python benchmarks/first_epochs.py --draw            # draw the figures that were kept

The same program trains a small network twice from the same seed: with torch's DataLoader over a
dataset that opens its .npy files itself, and with creel's over `creel.wrap` of it. Files lie on
storage with 200 MB/s and 3 ms per open (a FUSE mount, tests/testbed/slowfs.py, which needs root)
and without a page cache; memory is enough for all. When each batch was trained is kept in
docs/pictures/first-epochs.json, with the losses, which have to be equal, and drawn beside it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from measure import machine, skip_without_fuse
from opaque import Arrays, fill
from source_reads import daemon_with
from torch import nn
from torch.utils.data import DataLoader

import creel

sys.path.append(str(Path(__file__).parent.parent / "tests"))
from testbed.slowfs import SlowFS

ROOT = Path(__file__).parent.parent
FIGURES = ROOT / "docs/pictures/first-epochs.json"
PICTURE = FIGURES.with_suffix(".svg")
WAYS: dict[str, Any] = {
    "torch": DataLoader,
    "creel": lambda dataset, **k: creel.DataLoader(creel.wrap(dataset), **k),
}


def train(loader: Any, epochs: int) -> tuple[list[float], list[float]]:
    """Return when each step was done, in seconds since the first epoch began, and its loss."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 7, 4), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128, 1)
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    done, losses = [], []
    began = time.perf_counter()
    for _ in range(epochs):
        for images in loader:
            x = images[:, ::2, ::2].permute(0, 3, 1, 2).float().div_(255)
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            done.append(time.perf_counter() - began)
    return done, losses


def run(o: argparse.Namespace) -> dict[str, Any]:
    """Train in both ways; return the figures."""
    result: dict[str, Any] = {"files": o.files, "batch": o.batch, "epochs": o.epochs, **machine()}
    losses = []
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        data, mount = Path(name, "data"), str(Path(name, "mount"))
        data.mkdir()
        dataset = Arrays(mount, o.files)
        total = fill(data, dataset)
        slow = {"bandwidth": "200M", "open_latency": 3.0}
        for way, make in WAYS.items():
            with SlowFS(str(data), mount, **slow) as fs, daemon_with(2 * total):  # type: ignore[no-untyped-call]
                torch.manual_seed(0)
                loader = make(dataset, batch_size=o.batch, shuffle=True, num_workers=2)
                done, lost = train(loader, o.epochs)
                result[way] = {"s": [round(t, 3) for t in done], "opens": fs.totals()["opens"]}
                losses.append(lost)
                del loader
    assert losses[0] == losses[1], "the batches differ"
    return result


def draw(figures: dict[str, Any]) -> None:
    """Draw epochs over time, a line for each loader."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams |= {"svg.hashsalt": "creel", "svg.fonttype": "none", "font.family": "sans-serif"}
    from matplotlib import pyplot as plt

    steps = -(-figures["files"] // figures["batch"])
    chart, axes = plt.subplots(figsize=(7, 3))
    for way, color in (("torch", "#888888"), ("creel", "#d9480f")):
        seconds, label = figures[way]["s"], f"{way}: {figures[way]['opens']:,} files opened"
        axes.plot([0, *seconds], [i / steps for i in range(len(seconds) + 1)], color, label=label)
    axes.set_xlabel("seconds")
    axes.set_ylabel("epochs trained")
    axes.set_yticks(range(figures["epochs"] + 1))
    axes.grid(axis="y", color="#dddddd")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    chart.savefig(PICTURE, bbox_inches="tight", metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draw", action="store_true")
    parser.add_argument("--files", type=int, default=1200)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=6)
    o = parser.parse_args()
    if not o.draw:
        skip_without_fuse()
        FIGURES.parent.mkdir(exist_ok=True)
        FIGURES.write_text(json.dumps(run(o)) + "\n")
    figures = json.loads(FIGURES.read_text())
    draw(figures)
    for way in WAYS:
        print(f"{way}: {figures[way]['s'][-1]:.1f} s, {figures[way]['opens']:,} files opened")


if __name__ == "__main__":
    main()
