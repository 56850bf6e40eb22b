"""Ranks of a job on this machine: processes of one process group."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

Act = Callable[[int], Any]


def ranks(act: Act, folder: Path, world: int = 2) -> list[Any]:
    """Return the result of `act(rank)` in each of `world` processes; None if one ends early."""
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(world)]
    processes = [
        context.Process(target=_run, args=(act, rank, world, folder, pipes[rank][1]))
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    said = []
    for reader, writer in pipes:
        writer.close()
        try:
            said.append(reader.recv())
        except EOFError:
            said.append(None)
        reader.close()
    for process in processes:
        process.join()
        process.close()
    return said


def _run(act: Act, rank: int, world: int, folder: Path, writer: Any) -> None:
    where = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=world)
    dist.barrier()  # a rank that had ended by then would cut off one that still connects
    writer.send(act(rank))
    dist.destroy_process_group()
