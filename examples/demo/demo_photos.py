"""Thousands of JPEG files, one folder per class, cut from photographs that wheels bring along.

scikit-image and scikit-learn ship a dozen photographs. Each file is a random crop of one of them,
scaled to 256 x 256 pixels with changed brightness and contrast; its class is the photograph. So a
model can learn the labels, and no download is needed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import numpy as np
from PIL import Image, ImageEnhance

_SIDE = 256  # pixels: 20 to 60 KB per file
_PHOTOS = (
    "skimage/data/astronaut.png",
    "skimage/data/brick.png",
    "skimage/data/chelsea.png",
    "skimage/data/coffee.png",
    "skimage/data/grass.png",
    "skimage/data/gravel.png",
    "skimage/data/hubble_deep_field.jpg",
    "skimage/data/ihc.png",
    "skimage/data/motorcycle_left.png",
    "skimage/data/retina.jpg",
    "skimage/data/rocket.jpg",
    "sklearn/datasets/images/china.jpg",
    "sklearn/datasets/images/flower.jpg",
)


def photographs() -> list[Path]:
    """Return the photographs that are installed.

    Raises:
        SystemExit: fewer than four of them are.
    """
    import skimage
    import sklearn

    roots = {
        p.name: p.parent for p in (Path(skimage.__file__).parent, Path(sklearn.__file__).parent)
    }
    paths = [path for photo in _PHOTOS if (path := roots[photo.split("/")[0]] / photo).is_file()]
    if len(paths) < 4:
        raise SystemExit(
            "the photographs of scikit-image and scikit-learn are missing: reinstall them"
        )
    return paths


def build(folder: Path, files: int, progress: Callable[[float], None]) -> None:
    """Write about `files` images below `folder`, unless it exists; `progress` gets each count.

    The folder appears under its name only when it is complete.
    """
    if folder.is_dir():
        return
    photos = photographs()
    partial = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        with ProcessPoolExecutor() as pool:
            each = files // len(photos)
            jobs = [pool.submit(_cut, photo, partial, each, i) for i, photo in enumerate(photos)]
            for job in as_completed(jobs):
                progress(job.result())
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _cut(photo: Path, folder: Path, count: int, seed: int) -> int:
    """Write `count` crops of one photograph, the same ones every time."""
    rng = np.random.default_rng(seed)
    target = folder / photo.stem
    target.mkdir(parents=True)
    with Image.open(photo) as opened:
        image = opened.convert("RGB")
    for i in range(count):
        _crop(image, rng).save(target / f"{i:05d}.jpg", quality=int(rng.integers(88, 96)))
    return count


def _crop(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    side = int(rng.integers(160, min(image.size) + 1))
    left = int(rng.integers(0, image.width - side + 1))
    top = int(rng.integers(0, image.height - side + 1))
    piece = image.crop((left, top, left + side, top + side)).resize((_SIDE, _SIDE))
    piece = ImageEnhance.Brightness(piece).enhance(float(rng.uniform(0.7, 1.3)))
    return ImageEnhance.Contrast(piece).enhance(float(rng.uniform(0.7, 1.3)))
