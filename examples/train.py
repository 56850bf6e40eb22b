"""The smallest training loop with creel: the two imports are the whole change.

    python examples/train.py /path/to/images        one subfolder per class; also s3://, http://

Watch it from another terminal with `creel top`, and prove that it changes nothing with
`creel verify examples/train.py /path/to/images`.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from PIL import Image
from torch import nn

from creel import DataLoader, ImageFolder  # was: torch.utils.data, torchvision.datasets


def to_tensor(image: Image.Image) -> torch.Tensor:
    """Return (3, 64, 64) float32 in [0, 1]."""
    small = np.array(image.resize((64, 64)))
    return torch.from_numpy(small).permute(2, 0, 1).float().div_(255)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("images")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()

    torch.manual_seed(0)
    data = ImageFolder(args.images, transform=to_tensor)
    loader = DataLoader(data, batch_size=64, shuffle=True, num_workers=args.workers)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, 2, 1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(512, len(data.classes)),
    )
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for epoch in range(args.epochs):
        total = 0.0
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            total += loss.item() * len(labels)
        print(f"epoch {epoch + 1}: loss {total / len(data):.4f}")


if __name__ == "__main__":
    main()
