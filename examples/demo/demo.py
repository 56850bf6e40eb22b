"""The same training twice, with torch's DataLoader and with creel's, from a slow HTTP server.

    make demo                        or    python examples/demo/demo.py --help

Both use the same dataset class, arguments and seeds. The server is a real process on loopback, with
limited bandwidth and some latency; it counts its requests. The demo ends with a table.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.utils.data
import xxhash
from demo_photos import build
from PIL import Image
from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from torch import nn

import creel
from creel.config import Config
from creel.errors import CreelError
from creel.units import format_size, parse_seconds, parse_size

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from testbed.http_server import Server  # noqa: E402  - is among the tests, which use it, too

CACHE = ROOT / ".demo"
PIXELS = 64
console = Console(width=None if sys.stdout.isatty() else 100)


@dataclass
class Result:
    """The result of one training; times in seconds, lists have one entry per epoch."""

    name: str
    epochs: list[float] = field(default_factory=list)
    stall: list[float] = field(default_factory=list)
    reads: list[int] = field(default_factory=list)
    nbytes: int = 0
    loss: float = 0.0
    right: float = 0.0
    digest: str = ""
    tiers: dict[str, Any] = field(default_factory=dict)


# --- the user's part: a dataset, a model, a loop ----------------------------------------------


def decode(data: bytes) -> torch.Tensor:
    """Return a small image as a tensor; Pillow decodes JPEG at a fraction of its size."""
    with Image.open(io.BytesIO(data)) as image:
        image.draft("RGB", (PIXELS, PIXELS))
        small = image.convert("RGB").resize((PIXELS, PIXELS))
    return torch.from_numpy(np.array(small)).permute(2, 0, 1).float().div_(255)


def network(classes: int) -> nn.Module:
    """Return four convolutions and a linear layer: 0.1 M weights."""
    layers: list[nn.Module] = []
    for before, after in ((3, 16), (16, 32), (32, 64), (64, 96)):
        layers += [nn.Conv2d(before, after, 3, 2, 1), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(96, classes))


def train(
    result: Result,
    loader: torch.utils.data.DataLoader[Any],
    classes: int,
    args: argparse.Namespace,
    server: Server,
) -> None:
    """Run a plain training loop with a stop-watch around `next`."""
    model = network(classes)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    digest = xxhash.xxh3_128()
    for epoch in range(args.epochs):
        server.stats(reset=True)
        start, waited, right, seen, loss_sum = time.perf_counter(), 0.0, 0, 0, 0.0
        with bar(f"{result.name:<5}  epoch {epoch + 1}", len(loader)) as advance:
            batches = iter(loader)
            while True:
                asked = time.perf_counter()
                batch = next(batches, None)
                waited += time.perf_counter() - asked
                if batch is None:
                    break
                images, labels = batch
                digest.update(images.numpy())
                digest.update(labels.numpy())
                output = model(images)
                loss = nn.functional.cross_entropy(output, labels)
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                loss_sum += loss.item() * len(labels)
                right += int((output.argmax(1) == labels).sum())
                seen += len(labels)
                advance(1)
        result.epochs.append(time.perf_counter() - start)
        result.stall.append(waited)
        counted = server.stats()
        result.reads.append(counted["gets"])
        result.nbytes += counted["bytes"]
        result.loss, result.right = loss_sum / seen, right / seen
        note(f"{result.name:<5}  epoch {epoch + 1}: {result.epochs[-1]:5.1f} s")
    result.digest = digest.hexdigest()


# --- around it --------------------------------------------------------------------------------


def run(name: str, kind: Any, server: Server, args: argparse.Namespace) -> Result:
    """Train once with one class of loader; all else is the same."""
    torch.manual_seed(args.seed)
    result = Result(name)
    dataset = creel.ImageFolder(server.url, decode=decode)
    loader = kind(
        dataset,
        batch_size=args.batch_size,
        shuffle=True,
        num_workers=args.workers,
        persistent_workers=args.workers > 0,  # faster with torch
    )
    train(result, loader, len(dataset.classes), args, server)
    if kind is creel.DataLoader:
        result.tiers = tiers()
    return result


def tiers() -> dict[str, Any]:
    """Return the hits by tier, from the daemon that the loader started; {} if it has ended."""
    from creel.loader.client.client import Client

    try:
        with Client.connect(os.environ["CREEL_SOCKET"], "cli") as client:
            return dict(client.ask("stats")["tiers"])
    except CreelError:
        return {}


def report(ours: Result, theirs: Result, args: argparse.Namespace) -> bool:
    """Print the final table; return whether both trainings were the same."""
    table = Table(box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for heading in ("", theirs.name, ours.name, ""):
        table.add_column(heading, justify="left" if not heading else "right")
    for i in range(args.epochs):
        a, b = theirs.epochs[i], ours.epochs[i]
        table.add_row(f"epoch {i + 1}", f"{a:.1f} s", f"{b:.1f} s", f"{a / b:.1f} x as fast")
    for i in range(args.epochs):
        table.add_row(
            f"  waited for data, epoch {i + 1}",
            f"{theirs.stall[i]:.1f} s",
            f"{ours.stall[i]:.1f} s",
        )
    for i in range(args.epochs):
        table.add_row(
            f"files opened at the source, epoch {i + 1}",
            f"{theirs.reads[i]:,}",
            f"{ours.reads[i]:,}",
        )
    table.add_row("bytes from the source", format_size(theirs.nbytes), format_size(ours.nbytes))
    for name, tier in ours.tiers.items():
        table.add_row(f"hits in {name}", "-", f"{tier['hits']:,}")
    table.add_row("loss, last epoch", f"{theirs.loss:.6f}", f"{ours.loss:.6f}")
    table.add_row("right, last epoch", f"{theirs.right:.1%}", f"{ours.right:.1%}")
    same = ours.digest == theirs.digest
    table.add_row("every batch the same, bit for bit", "", "yes" if same else "NO")
    console.print(table)
    return same


@contextmanager
def bar(title: str, total: int) -> Iterator[Callable[[float], None]]:
    """Show a progress bar; show nothing if the output is not a terminal."""
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    ) as progress:
        task = progress.add_task(title, total=total)
        yield partial(progress.advance, task)


def note(text: str) -> None:
    """Print a line for a log; a terminal has the bar."""
    if not console.is_terminal:
        print(text, flush=True)


def images(args: argparse.Namespace) -> Path:
    """Return the folder to train on: the user's, or the demo's own, built once."""
    if args.data:
        return checked(Path(args.data).expanduser())
    folder = CACHE / f"photos-{args.files}"
    if not folder.is_dir():
        CACHE.mkdir(exist_ok=True)
        note(f"cutting {args.files:,} images from the photographs of scikit-image and scikit-learn")
        with bar("cutting images (once)", args.files) as advance:
            build(folder, args.files, advance)
    return folder


def checked(folder: Path) -> Path:
    """Return the user's folder, or exit with one sentence on what is wrong with it."""
    if not folder.is_dir():
        raise SystemExit(f"demo: there is no folder {folder}")
    classes = [p for p in sorted(folder.iterdir()) if p.is_dir()]
    if not classes:
        raise SystemExit(f"demo: {folder} has no subfolders; put the images of each class into one")
    if not any(p.is_file() for folder in classes for p in folder.rglob("*")):
        raise SystemExit(f"demo: the subfolders of {folder} are empty; they hold a class each")
    return folder


def in_short(error: Exception) -> str:
    """Return the error's message without the traceback that a worker adds."""
    _, separator, traceback = str(error).partition("Original Traceback")
    said = [line for line in traceback.splitlines()[1:] if line and not line.startswith(" ")]
    return " ".join(said) if separator else " ".join([str(error), *getattr(error, "__notes__", [])])


def arguments() -> argparse.Namespace:
    """Return the flags, with the numbers of the short run if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--data", help="your own folder, one subfolder per class")
    parser.add_argument("--files", type=int, help="images to make (4000)")
    parser.add_argument("--epochs", type=int, help="(3)")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bandwidth", default="30MB", help="of the server, per second (30MB)")
    parser.add_argument("--latency", default="10ms", help="of the server, per request (10ms)")
    parser.add_argument("--memory", default="auto", help='creel\'s memory: "auto", "100MB", "10%%"')
    parser.add_argument("--short", action="store_true", help="a minute at most, for CI")
    args = parser.parse_args()
    if args.files is None:
        args.files = 650 if args.short else 4000
    if args.epochs is None:
        args.epochs = 2 if args.short else 3
    for name in ("files", "epochs", "batch_size"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is at least 1")
    return args


def main() -> int:
    """Build, serve, train twice, compare."""
    args = arguments()
    os.environ["CREEL_SOCKET"] = f"demo-{os.getpid()}"  # a daemon that ends with us
    os.environ["CREEL_MEMORY__BUDGET"] = args.memory
    try:
        Config.load()
        bandwidth, latency = parse_size(args.bandwidth), parse_seconds(args.latency)
        with Server(images(args), bandwidth_Bps=bandwidth, latency_s=latency) as server:
            console.print(
                f"an HTTP server with {format_size(bandwidth)}/s and {latency * 1000:.0f} ms"
                f" per request; {args.epochs} epochs, {args.workers} workers",
                highlight=False,
            )
            theirs = run("torch", torch.utils.data.DataLoader, server, args)
            ours = run("creel", creel.DataLoader, server, args)
    except (CreelError, OSError) as e:
        raise SystemExit(f"demo: {in_short(e)}") from e
    return 0 if report(ours, theirs, args) else 1


if __name__ == "__main__":
    raise SystemExit(main())
