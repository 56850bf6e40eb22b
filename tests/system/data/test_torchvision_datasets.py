"""torchvision's other file datasets below `creel.wrap`: unchanged, and opened once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

import creel
from folders import folder  # torchvision.datasets of any build
from testbed.same import needs_fuse, opened_by_epoch
from testbed.slow_files import generator
from testbed.slowfs import SlowFS

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(120),
    needs_fuse,
]

N = 12
NAMES = [f"{kind}_{i}" for kind in ("cat", "dog") for i in range(N // 2)]


def picture(path: Path, seed: int) -> None:
    pixels = np.random.default_rng(seed).integers(0, 256, (30, 40, 3), np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels[..., 0] if path.suffix == ".png" else pixels).save(path)


def pictures(path: str | Path, suffix: str = ".jpg", prefix: str = "") -> None:
    for i, name in enumerate(NAMES):
        picture(Path(path, prefix + name + suffix), i)


def text(path: Path, lines: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


def tensors(image: Any, target: Any = None) -> Any:
    """Read what is opened so far, as transforms do."""
    read = [torch.from_numpy(np.array(x)) if hasattr(x, "convert") else x for x in (image, target)]
    return read[0] if target is None else tuple(read)


def dataset_of(name: str) -> Any:
    return getattr(__import__("torchvision.datasets", fromlist=[name]), name)


# --- the trees that each of them expects --------------------------------------------------------


def voc(root: Path, split: str) -> None:
    base = root / "VOCdevkit" / "VOC2012"
    text(base / "ImageSets" / split / "train.txt", NAMES)
    pictures(base / "JPEGImages")


def voc_detection(root: Path) -> Any:
    voc(root, "Main")
    for name in NAMES:
        xml = f"<annotation><object><name>{name}</name></object></annotation>"
        text(root / "VOCdevkit" / "VOC2012" / "Annotations" / f"{name}.xml", [xml])
    return lambda at: dataset_of("VOCDetection")(at, transform=tensors)


def voc_segmentation(root: Path) -> Any:
    voc(root, "Segmentation")
    pictures(root / "VOCdevkit" / "VOC2012" / "SegmentationClass", ".png")
    return lambda at: dataset_of("VOCSegmentation")(at, transforms=tensors)


def pets(root: Path) -> Any:
    base = root / "oxford-iiit-pet"
    lines = [f"{name} {1 + (i >= N // 2)} 1 1" for i, name in enumerate(NAMES)]
    text(base / "annotations" / "trainval.txt", lines)
    pictures(base / "images")
    pictures(base / "annotations" / "trimaps", ".png")
    kinds = "segmentation"
    return lambda at: dataset_of("OxfordIIITPet")(at, target_types=kinds, transforms=tensors)


def gtsrb(root: Path) -> Any:
    pictures(root / "gtsrb" / "GTSRB" / "Training" / "00000", ".ppm")
    return lambda at: dataset_of("GTSRB")(at, transform=tensors)


def food(root: Path) -> Any:
    pictures(root / "food-101" / "images" / "pie")
    split = {"pie": [f"pie/{name}" for name in NAMES]}
    text(root / "food-101" / "meta" / "train.json", [json.dumps(split)])
    return lambda at: dataset_of("Food101")(at, transform=tensors)


def dtd(root: Path) -> Any:
    pictures(root / "dtd" / "dtd" / "images" / "dotted")
    text(root / "dtd" / "dtd" / "labels" / "train1.txt", [f"dotted/{name}.jpg" for name in NAMES])
    return lambda at: dataset_of("DTD")(at, transform=tensors)


def aircraft(root: Path) -> Any:
    data = root / "fgvc-aircraft-2013b" / "data"
    pictures(data / "images")
    text(data / "variants.txt", ["707-320"])
    text(data / "images_variant_trainval.txt", [f"{name} 707-320" for name in NAMES])
    return lambda at: dataset_of("FGVCAircraft")(at, transform=tensors)


def cityscapes(root: Path) -> Any:
    for i, name in enumerate(NAMES):
        picture(root / "leftImg8bit" / "train" / "bonn" / f"{name}_leftImg8bit.png", i)
        picture(root / "gtFine" / "train" / "bonn" / f"{name}_gtFine_labelIds.png", i + N)
    kind = "semantic"
    return lambda at: dataset_of("Cityscapes")(at, target_type=kind, transforms=tensors)


def sun(root: Path) -> Any:
    pictures(root / "SUN397" / "a" / "abbey", prefix="sun_")
    text(root / "SUN397" / "ClassName.txt", ["/a/abbey"])
    return lambda at: dataset_of("SUN397")(at, transform=tensors)


def clevr(root: Path) -> Any:
    base = root / "clevr" / "CLEVR_v1.0"
    pictures(base / "images" / "train", ".png")
    scenes = [{"image_filename": f"{name}.png", "objects": [1]} for name in NAMES]
    text(base / "scenes" / "CLEVR_train_scenes.json", [json.dumps({"scenes": scenes})])
    return lambda at: dataset_of("CLEVRClassification")(at, transform=tensors)


def kitti(root: Path) -> Any:
    base = root / "Kitti" / "raw" / "training"
    pictures(base / "image_2", ".png")
    for name in NAMES:
        text(base / "label_2" / f"{name}.txt", ["Car 0.0 0 -1.5 1 2 3 4 1.5 1.6 3.7 1 2 3 -1.6"])
    return lambda at: dataset_of("Kitti")(at, transform=tensors)


def cars(root: Path) -> Any:
    matlab = pytest.importorskip("scipy.io")
    base = root / "stanford_cars"
    pictures(base / "cars_train")
    rows = np.array([(f"{n}.jpg", 1) for n in NAMES], [("fname", object), ("class", object)])
    (base / "devkit").mkdir()
    matlab.savemat(base / "devkit" / "cars_train_annos.mat", {"annotations": rows})
    names = {"class_names": np.array(["T", "S"], object)}
    matlab.savemat(base / "devkit" / "cars_meta.mat", names)
    return lambda at: dataset_of("StanfordCars")(at, transform=tensors)


def flowers(root: Path) -> Any:
    matlab = pytest.importorskip("scipy.io")
    base = root / "flowers-102"
    for i in range(1, N + 1):
        picture(base / "jpg" / f"image_{i:05d}.jpg", i)
    matlab.savemat(base / "setid.mat", {"trnid": np.arange(1, N + 1)})
    matlab.savemat(base / "imagelabels.mat", {"labels": np.ones(N)})
    kind = type("Flowers102", (dataset_of("Flowers102"),), {"_check_integrity": lambda _: True})
    return lambda at: kind(at, transform=tensors)


def coco(root: Path) -> Any:
    pytest.importorskip("pycocotools")
    pictures(root)
    images = [{"id": i, "file_name": f"{name}.jpg"} for i, name in enumerate(NAMES)]
    boxes = [{"id": i, "image_id": i, "category_id": 1, "bbox": [1, 2, 3, i]} for i in range(N)]
    content = {"images": images, "annotations": boxes, "categories": [{"id": 1, "name": "cat"}]}
    text(root / "all.json", [json.dumps(content)])
    return lambda at: dataset_of("CocoDetection")(at, f"{root}/all.json", transform=tensors)


#: The layout of each, and the number of files per sample.
TREES: dict[Callable[[Path], Any], int] = {
    voc_detection: 2, voc_segmentation: 2, pets: 2, gtsrb: 1, food: 1, dtd: 1, aircraft: 1,
    cityscapes: 2, sun: 1, clevr: 1, kitti: 2, cars: 1, flowers: 1, coco: 1,
}  # fmt: skip


# --- the law ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree.__name__)
def test_the_daemon_reads_what_it_opens_once_and_samples_are_torchs(
    tree: Any, tmp_path: Path
) -> None:
    source, mount = tmp_path / "data", tmp_path / "mount"
    source.mkdir()
    dataset = tree(source)
    with SlowFS(str(source), str(mount), open_latency=2.0) as fs:  # type: ignore[no-untyped-call]
        wrapped = creel.wrap(dataset(str(mount)))
        assert len(wrapped) == N
        kwargs: Any = {"shuffle": True, "num_workers": 2, "collate_fn": list}
        patient = {"loader.direct": "never"}  # reads are counted, however busy the machine is
        ours: Any = creel.DataLoader(wrapped, 3, generator=generator(), creel=patient, **kwargs)
        theirs = DataLoader(dataset(str(source)), 3, generator=generator(), **kwargs)
        opens = opened_by_epoch(lambda: fs.totals()["opens"], ours, theirs)
    # All of them list their files, so the first epoch is read ahead, too.
    assert opens == [TREES[tree] * N, 0, 0]


assert folder  # imported for its side effect
