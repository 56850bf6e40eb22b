"""The smallest DistributedDataParallel loop with creel: the nodes share their memories.

    torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \\
        examples/train_ddp.py /shared/images

No setting names the nodes: the loaders find each other through the store of the process group,
which exists anyway. `--loader torch` trains with torch's DataLoader.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.utils.data
import xxhash
from PIL import Image
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

import creel

LOADERS = {"creel": creel.DataLoader, "torch": torch.utils.data.DataLoader}


def to_tensor(image: Image.Image) -> torch.Tensor:
    """Return (3, 64, 64) float32 in [0, 1]."""
    small = np.array(image.resize((64, 64)))
    return torch.from_numpy(small).permute(2, 0, 1).float().div_(255)


def main() -> None:
    """Train for a few epochs; the first rank prints the results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("images", help="a folder that all nodes see, one subfolder per class")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--loader", choices=LOADERS, default="creel")
    args = parser.parse_args()

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    torch.manual_seed(0)
    data = creel.ImageFolder(args.images, transform=to_tensor)
    sampler: DistributedSampler[object] = DistributedSampler(data, seed=0)
    loader = LOADERS[args.loader](
        data,
        batch_size=args.batch_size,
        sampler=sampler,
        num_workers=args.workers,
        persistent_workers=args.workers > 0,
    )
    model = DistributedDataParallel(
        nn.Sequential(
            nn.Conv2d(3, 16, 3, 2, 1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, 2, 1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
            nn.Linear(512, len(data.classes)),
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    read = xxhash.xxh3_128()
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        began, loss = time.perf_counter(), torch.zeros(())
        for images, labels in loader:
            read.update(images.numpy())
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        dist.barrier()
        if dist.get_rank() == 0:
            seconds = time.perf_counter() - began
            print(f"epoch {epoch + 1}: {seconds:.2f} s, loss {loss.item():.4f}", flush=True)
    print(f"rank {dist.get_rank()} read {read.hexdigest()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
