"""Small trainings with libraries, as their users write them, under torch's class and creel's.

    python libraries.py NAME WAY FOLDER

WAY: "torch"; "swap": torch's class is replaced by creel's before the library is imported; "wrap":
also `creel.wrap(dataset)`. Prints a JSON object: digests of everything that the class of loader
must not change, and the loaders of creel that began an epoch. `test_libraries.py`
compares the ways.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import random
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.utils.data
import torch.utils.data.dataloader

import creel

COUNT, FEATURES, CLASSES, BATCH = 30, 8, 3, 4


def swap() -> None:
    """Make every library that is imported later build creel's loaders (docs/frameworks.md)."""
    torch.utils.data.DataLoader = creel.DataLoader  # type: ignore[misc]
    torch.utils.data.dataloader.DataLoader = creel.DataLoader  # type: ignore[misc]


class Run:
    """One training: its data, and what was seen of it."""

    def __init__(self, way: str, folder: Path) -> None:
        self.way = way
        self.folder = folder
        self.seen: list[str] = []

    def data(self, form: Callable[[torch.Tensor, int], Any] = lambda x, y: (x, y)) -> Any:
        """Return a dataset of COUNT files; `form` makes a sample of a record and its class."""
        dataset = Files(self.folder, form)
        return creel.wrap(dataset) if self.way == "wrap" else dataset

    def note(self, *values: Any) -> None:
        """Record what must be the same under each class."""
        self.seen += map(digest, values)


class Files(torch.utils.data.Dataset[Any]):
    """A dataset that opens its files itself, with random augmentation."""

    def __init__(self, folder: Path, form: Callable[[torch.Tensor, int], Any]) -> None:
        self.paths = sorted(folder.glob("*.npy"))
        self.form = form

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, i: int) -> Any:
        x = torch.from_numpy(np.load(self.paths[i])).float() + torch.rand(1) / 100
        return self.form(x + random.random() / 100, i % CLASSES)


def write(folder: Path) -> None:
    """Write the files of `Run.data`."""
    for i in range(COUNT):
        np.save(folder / f"{i:02}.npy", np.random.default_rng(i).standard_normal(FEATURES))


class Net(torch.nn.Module):
    """A model that notes each batch it is given."""

    def __init__(self, run: Run | None = None, out: int = CLASSES) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(FEATURES, out)
        self.run = run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.run is not None:
            self.run.note(x)
        y: torch.Tensor = self.linear(x)
        return y


def digest(value: Any) -> str:
    """Return a digest of types, shapes and bits of tensors in nested containers."""
    if isinstance(value, torch.Tensor):
        content: object = (str(value.dtype), tuple(value.shape), value.detach().numpy().tobytes())
    elif isinstance(value, Mapping):
        content = [(k, digest(v)) for k, v in value.items()]
    elif isinstance(value, (list, tuple)):
        content = [digest(v) for v in value]
    else:
        content = value
    return hashlib.sha256(repr(content).encode()).hexdigest()[:12]


def seed() -> None:
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)  # noqa: NPY002  libraries draw from it


# --- a training per library -----------------------------------------------------------------------


def skorch(run: Run) -> None:
    skorch = importlib.import_module("skorch")
    net = skorch.NeuralNetClassifier(
        Net,
        module__run=run,
        criterion=torch.nn.CrossEntropyLoss,
        classes=list(range(CLASSES)),
        max_epochs=2,
        batch_size=BATCH,
        train_split=skorch.dataset.ValidSplit(3, stratified=False),
        iterator_train__shuffle=True,
        iterator_train__num_workers=2,
        verbose=0,
    )
    net.fit(run.data(), y=None)
    run.note(net.history[:, "train_loss"], net.history[:, "valid_loss"])


def ignite(run: Run) -> None:
    engine = importlib.import_module("ignite.engine")
    distributed = importlib.import_module("ignite.distributed")
    model = Net(run)
    trainer = engine.create_supervised_trainer(
        model, torch.optim.SGD(model.parameters(), 0.1), torch.nn.CrossEntropyLoss()
    )
    losses: list[float] = []
    trainer.add_event_handler(
        engine.Events.ITERATION_COMPLETED, lambda e: losses.append(e.state.output)
    )
    loader = distributed.auto_dataloader(
        run.data(), batch_size=BATCH, shuffle=True, num_workers=2, pin_memory=False
    )
    trainer.run(loader, max_epochs=2)
    run.note(losses)


def pytorch_metric_learning(run: Run) -> None:
    library = importlib.import_module("pytorch_metric_learning")
    for part in ("losses", "samplers", "trainers"):
        importlib.import_module(f"pytorch_metric_learning.{part}")
    model = Net(run)
    trainer = library.trainers.MetricLossOnly(
        models={"trunk": model},
        optimizers={"trunk_optimizer": torch.optim.SGD(model.parameters(), 0.1)},
        batch_size=6,
        loss_funcs={"metric_loss": library.losses.TripletMarginLoss()},
        dataset=run.data(),
        sampler=library.samplers.MPerClassSampler([i % CLASSES for i in range(COUNT)], 2, 6, 24),
        dataloader_num_workers=2,
        iterations_per_epoch=4,
        set_min_label_to_zero=False,
    )
    trainer.train(num_epochs=2)
    run.note(list(model.parameters()))


def monai(run: Run) -> None:
    data = importlib.import_module("monai.data")
    transforms = importlib.import_module("monai.transforms")
    paths = sorted(map(str, run.folder.glob("*.npy")))
    rows = [{"x": path, "y": i % CLASSES} for i, path in enumerate(paths)]
    steps = transforms.Compose(
        [
            transforms.LoadImaged("x", reader="NumpyReader", image_only=True),
            transforms.RandGaussianNoised("x", prob=0.5),
            transforms.ToTensord("x"),
        ]
    )
    dataset = data.Dataset(rows, steps)
    given = creel.wrap(dataset) if run.way == "wrap" else dataset
    loader = data.DataLoader(given, batch_size=BATCH, shuffle=True, num_workers=2)
    model = Net(run)
    for _ in range(2):
        for batch in loader:
            run.note(model(torch.as_tensor(batch["x"]).float()), batch["y"])


def torch_geometric(run: Run) -> None:
    data = importlib.import_module("torch_geometric.data")
    loader = importlib.import_module("torch_geometric.loader")
    edges = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])

    def graph(x: torch.Tensor, y: int) -> Any:
        return data.Data(x=x[:6].view(3, 2), edge_index=edges, y=torch.tensor([y]))

    conv = importlib.import_module("torch_geometric.nn").GCNConv(2, CLASSES)
    for _ in range(2):
        for batch in loader.DataLoader(run.data(graph), BATCH, shuffle=True, num_workers=2):
            run.note(batch.x, batch.y, batch.batch, conv(batch.x, batch.edge_index))


def mmengine(run: Run) -> None:
    model = importlib.import_module("mmengine.model")
    runner = importlib.import_module("mmengine.runner")

    class Model(model.BaseModel):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = Net(run)

        def forward(self, x: torch.Tensor, y: torch.Tensor, mode: str = "loss") -> Any:
            assert mode == "loss"
            return {"loss": torch.nn.functional.cross_entropy(self.net(x), y)}

    training = runner.Runner(
        model=Model(),
        work_dir=str(run.folder / run.way),
        train_dataloader={
            "dataset": run.data(),
            "batch_size": BATCH,
            "num_workers": 2,
            "sampler": {"type": "DefaultSampler", "shuffle": True},
            "collate_fn": {"type": "default_collate"},
        },
        train_cfg={"by_epoch": True, "max_epochs": 2},
        optim_wrapper={"optimizer": {"type": "SGD", "lr": 0.1}},
        default_hooks={"checkpoint": None, "logger": None},
        log_level="ERROR",
        randomness={"seed": 5},
    )
    training.train()
    run.note(list(training.model.parameters()))


def torchdata(run: Run) -> None:
    stateful = importlib.import_module("torchdata.stateful_dataloader")
    loader = stateful.StatefulDataLoader(run.data(), BATCH, shuffle=True, num_workers=2)
    model = Net(run)
    for _ in range(2):
        for x, y in loader:
            run.note(model(x), y)


def lightning_fabric(run: Run) -> None:
    fabric = importlib.import_module("lightning.fabric").Fabric(accelerator="cpu", devices=1)
    net = Net(run)
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), 0.1))
    loader = fabric.setup_dataloaders(
        torch.utils.data.DataLoader(run.data(), batch_size=BATCH, shuffle=True, num_workers=2)
    )
    for _ in range(2):
        for x, y in loader:
            loss = torch.nn.functional.cross_entropy(model(x), y)
            fabric.backward(loss)
            optimizer.step()
            run.note(loss)


def transformers(run: Run) -> None:
    library = importlib.import_module("transformers")

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net(run)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            y = self.net(x)
            return {"loss": torch.nn.functional.cross_entropy(y, labels), "logits": y}

    arguments = library.TrainingArguments(
        str(run.folder / run.way),
        per_device_train_batch_size=BATCH,
        num_train_epochs=2,
        dataloader_num_workers=2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        logging_strategy="no",
    )
    data = run.data(lambda x, y: {"x": x, "labels": torch.tensor(y)})
    trainer = library.Trainer(model=Model(), args=arguments, train_dataset=data)
    run.note(trainer.train().training_loss)


def accelerate(run: Run) -> None:
    accelerator = importlib.import_module("accelerate").Accelerator(cpu=True)
    net = Net(run)
    model, optimizer, loader = accelerator.prepare(
        net,
        torch.optim.SGD(net.parameters(), 0.1),
        torch.utils.data.DataLoader(run.data(), batch_size=BATCH, shuffle=True, num_workers=2),
    )
    for _ in range(2):
        for x, y in loader:
            loss = torch.nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            run.note(loss)


def timm(run: Run) -> None:
    create = importlib.import_module("timm.data").create_loader
    loader = create(
        run.data(), (3, 8, 8), BATCH, is_training=True, use_prefetcher=False, num_workers=2
    )
    model = Net(run)
    for _ in range(2):
        for x, y in loader:
            run.note(model(x), y)


def lerobot(run: Run) -> None:
    module = importlib.import_module("lerobot.datasets.lerobot_dataset")
    samplers = importlib.import_module("lerobot.datasets.sampler")
    transforms = importlib.import_module("torchvision.transforms.v2")
    root = run.folder / f"robot of {run.way}"
    _record_robot(module.LeRobotDataset, root)
    dataset = module.LeRobotDataset(
        "creel/robot",
        root,
        image_transforms=transforms.RandomHorizontalFlip(),
        delta_timestamps={"action": [0.0, 0.1]},
    )
    episodes = dataset.meta.episodes
    sampler = samplers.EpisodeAwareSampler(
        episodes["dataset_from_index"], episodes["dataset_to_index"], shuffle=True
    )
    given = creel.wrap(dataset) if run.way == "wrap" else dataset
    model = Net(run)
    for options in ({"shuffle": True}, {"sampler": sampler}):  # as its lerobot_train does
        loader = torch.utils.data.DataLoader(given, BATCH, num_workers=2, **options)
        for _ in range(2):
            for batch in loader:
                run.note(batch, model(batch["observation.state"]))


def _record_robot(kind: Any, root: Path) -> None:
    """Record two episodes of states, actions and images with its own recorder."""
    vector = {"dtype": "float32", "shape": (FEATURES,), "names": None}
    names = ["height", "width", "channels"]
    image = {"dtype": "image", "shape": (16, 16, 3), "names": names}
    features = {"observation.state": vector, "action": vector, "observation.images.top": image}
    recorded = kind.create("creel/robot", 10, features, root, use_videos=False)
    rng = np.random.default_rng(3)
    for _ in range(2):
        for _ in range(COUNT // 2):
            frame: dict[str, Any] = {
                "observation.state": rng.standard_normal(FEATURES, np.float32),
                "action": rng.standard_normal(FEATURES, np.float32),
                "observation.images.top": rng.integers(0, 255, (16, 16, 3), np.uint8),
            }
            recorded.add_frame(frame | {"task": "reach"})
        recorded.save_episode()
    recorded.finalize()


LIBRARIES: dict[str, Callable[[Run], None]] = {
    "accelerate": accelerate,
    "ignite": ignite,
    "lerobot": lerobot,
    "lightning.fabric": lightning_fabric,
    "mmengine": mmengine,
    "monai": monai,
    "pytorch_metric_learning": pytorch_metric_learning,
    "skorch": skorch,
    "timm": timm,
    "torch_geometric": torch_geometric,
    "torchdata": torchdata,
    "transformers": transformers,
}
#: Libraries that `make frameworks` does not install: they need 200 MB of opencv, scikit-learn or
#: torchvision; lerobot also older releases than the others here.
BY_HAND = {"lerobot", "mmengine", "pytorch_metric_learning", "skorch", "timm"}
#: Its class has iterators of its own, whatever class it is derived from.
OWN_ITERATORS = {"torchdata"}


def main(name: str, way: str, folder: str) -> None:
    torch.set_num_threads(1)
    if way != "torch":
        swap()
    run = Run(way, Path(folder))
    epochs = _epochs_of_creel()
    seed()
    LIBRARIES[name](run)
    run.note(torch.rand(1), random.random())
    sys.stdout.write(json.dumps({"seen": run.seen, "creels": epochs}) + "\n")


def _epochs_of_creel() -> list[str]:
    """Return the classes of the loaders of creel that begin an epoch from now on."""
    begun: list[str] = []
    begin = creel.DataLoader.__iter__

    def noted(self: Any) -> Any:
        begun.append(type(self).__name__)
        return begin(self)

    creel.DataLoader.__iter__ = noted  # type: ignore[method-assign]
    return begun


if __name__ == "__main__":
    main(*sys.argv[1:])
