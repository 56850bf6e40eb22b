"""A simulation streams to two models that train while it runs, without a file that outlives it.

    python examples/gray_scott.py [--steps 2000] [--check]

Gray-Scott: two chemicals diffuse and react into moving spots. One process simulates, in numpy; two
others learn what one chemical says of the other, one linear, one with a hidden layer. Both read
every record; it is in memory once. Watch it from another terminal by `creel stream PATH`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

import creel

SIZE, BATCH = 64, 16
MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Conv2d(1, 1, 5, padding=2, padding_mode="circular"),
    "hidden": lambda: nn.Sequential(
        nn.Conv2d(1, 16, 5, padding=2, padding_mode="circular"), nn.ReLU(), nn.Conv2d(16, 1, 1)
    ),
}
BARS = "▁▂▃▄▅▆▇█"


def laplacian(u: NDArray[np.float32]) -> NDArray[np.float32]:
    """Of (2, n, n), on a torus."""
    around = [np.roll(u, shift, axis) for axis in (1, 2) for shift in (1, -1)]
    total: NDArray[np.float32] = np.sum(around, axis=0) - 4 * u
    return total


def advance(u: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return (2, n, n) one time step later; feed .037 and kill .06 give spots that divide."""
    reaction = u[0] * u[1] ** 2
    change = np.stack([0.037 * (1 - u[0]) - reaction, reaction - (0.037 + 0.06) * u[1]])
    diffusion = np.array([0.2, 0.1], np.float32)[:, None, None] * laplacian(u)
    later: NDArray[np.float32] = (u + diffusion + change).astype(np.float32)
    return later


def simulate(path: str, steps: int) -> None:
    """Put the field of every tenth step."""
    random = np.random.default_rng(0)
    u = np.stack([np.ones((SIZE, SIZE)), np.zeros((SIZE, SIZE))]).astype(np.float32)
    for row, column in random.integers(0, SIZE - 12, (12, 2)).tolist():
        u[:, row : row + 12, column : column + 12] = [[[0.5]], [[0.25]]]
    fields: dict[str, Any] = {"field": ("float32", u.shape), "step": "int32"}
    limits: dict[str, Any] = {"ahead": "32MiB", "keep": "16MiB", "readers": list(MODELS)}
    with creel.Producer(path, fields, **limits) as producer:
        for step in range(steps):
            for _ in range(10):
                u = advance(u)
            producer.put(field=u, step=step)


def train(path: str, name: str, writer: Connection) -> None:
    """Train one model until the stream ends; send (time, loss, variance) of all batches."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = MODELS[name]()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    said = []
    # Neighbours in time are alike: batches are drawn from each 64 arrivals.
    stream = creel.Stream(path, name, shuffle=64)
    for batch in creel.DataLoader(stream, BATCH, num_workers=1):
        given, wanted = batch["field"].split(1, 1)
        loss = nn.functional.mse_loss(model(given), wanted)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        said.append((time.monotonic(), loss.item(), wanted.var().item()))
    writer.send(said)


def sparkline(values: list[float], width: int = 50) -> str:
    """Draw means of equal parts of a curve, from 0 to the largest."""
    means = [float(np.mean(part)) for part in np.array_split(values, min(width, len(values)))]
    most = max(means) or 1.0
    return "".join(BARS[min(int(m / most * len(BARS)), len(BARS) - 1)] for m in means)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000, help="records, of 10 time steps each")
    parser.add_argument("--check", action="store_true", help="fail unless both models learn")
    options = parser.parse_args()
    os.environ.setdefault("CREEL_SOCKET", f"gray-scott-{os.getpid()}")
    context = multiprocessing.get_context("spawn")  # as programs of their own
    ok = True
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None  # noqa: S108  in a folder of its own
    with tempfile.TemporaryDirectory(dir=memory) as path:
        print(f"creel stream {path}/stream")
        processes: list[Any] = [
            context.Process(target=simulate, args=(f"{path}/stream", options.steps))
        ]
        pipes = {}
        for name in MODELS:
            pipes[name], writer = context.Pipe(duplex=False)
            args = f"{path}/stream", name, writer
            processes.append(context.Process(target=train, args=args))
        for process in processes:
            process.start()
        for name, pipe in pipes.items():
            times, losses, variances = map(list, zip(*pipe.recv(), strict=True))
            rate = (len(times) - 1) * BATCH / (times[-1] - times[0])
            part = max(len(losses) // 5, 1)
            error = np.mean(losses[-part:]) / np.mean(variances[-part:])
            ok &= bool(error < 0.5)
            pace = [BATCH / max(s, 1e-6) for s in np.diff(times)]
            print(f"{name:7} {len(losses)} batches, {rate:.0f} records/s")
            print(f"        loss      {sparkline(losses)} {error:.3f} of the variance is left")
            print(f"        records/s {sparkline(pace)}")
        for process in processes:
            process.join()
    if options.check and not ok:
        sys.exit("a model has not learnt")


if __name__ == "__main__":
    main()
