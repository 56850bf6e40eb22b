"""Frameworks that take a DataLoader, run for real: with creel's they see torch's batches.

They have an environment of their own: `make frameworks` installs them all, and skips none. In other
environments missing ones are skipped. docs/frameworks.md says what was run by hand, and how to use
each framework.
"""

from __future__ import annotations

import copy
import importlib
import json
import logging
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, random_split

import creel

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(90),
    pytest.mark.filterwarnings("ignore"),  # the frameworks' own warnings, which are many
]

Batches = list[torch.Tensor]
CLASSES = [DataLoader, creel.DataLoader]


def framework(name: str) -> Any:
    """Import a module of a framework; a test without it is skipped, or fails where it should be."""
    if os.environ.get("FRAMEWORKS") == "required":
        return importlib.import_module(name)
    return pytest.importorskip(name, reason=f"{name} is not installed")


def noisy(x: torch.Tensor) -> torch.Tensor:
    """Augment randomly, so that the workers' seeds are compared, too."""
    return x.float() + torch.rand(1) + random.random()


def labelled(x: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"x": noisy(x), "labels": x[0].float()}


@pytest.fixture
def data(tmp_path: Path, daemon_name: str) -> Any:
    """50 records that a daemon of this test serves."""
    del daemon_name
    np.arange(50 * 8, dtype=np.int64).tofile(tmp_path / "records.bin")
    return creel.RecordDataset(tmp_path / "records.bin", torch.int64, 8, transform=noisy)


class Opaque(Dataset[Any]):
    """A dataset as users write it, which opens its files itself."""

    def __init__(self, folder: Path) -> None:
        self.paths = [folder / f"{i}.npy" for i in range(50)]
        self.transform: Callable[[torch.Tensor], Any] = noisy
        for i, path in enumerate(self.paths):
            np.save(path, np.arange(8 * i, 8 * i + 8))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, i: int) -> Any:
        return self.transform(torch.from_numpy(np.load(self.paths[i])))


@pytest.fixture
def opaque(tmp_path: Path, daemon_name: str) -> Any:
    """50 files that a daemon of this test serves from their second epoch on."""
    del daemon_name
    return Opaque(tmp_path)


@pytest.fixture(autouse=True)
def state() -> Iterator[None]:
    """Restore what frameworks change: seeds, variables and the number of threads."""
    before, threads = dict(os.environ), torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002  (used by the frameworks)


def assert_same(ours: Batches, theirs: Batches) -> None:
    assert len(ours) == len(theirs) > 1
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)


# --- accelerate -----------------------------------------------------------------------------------


def accelerated(
    cls: Any, data: Any, options: dict[str, Any], workers: int, *, by: Any = None
) -> tuple[Batches, Any]:
    """by: the module whose `prepare` and `skip_first_batches` are used; None: accelerate's own."""
    from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches

    seed(3)
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options))
    loader = cls(data, 4, True, num_workers=workers)
    loader = by.prepare(accelerator, loader) if by else accelerator.prepare(loader)
    skip = by.skip_first_batches if by else skip_first_batches
    seen: Batches = []
    for epoch in range(3):
        loader.set_epoch(epoch)
        given = skip(loader, 2) if epoch == 1 else loader
        seen.extend(batch.clone() for batch in given)
    return [*seen, torch.rand(1)], loader.base_dataloader


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dispatch_batches": True},
        {"split_batches": True},
        {"even_batches": False},
        {"use_seedable_sampler": True},
    ],
    ids=str,
)
def test_accelerate_has_torchs_batches_with_its_own_loader_and_with_ours(
    data: Any, options: dict[str, Any], workers: int
) -> None:
    framework("accelerate")
    from creel.integrations import accelerate as integration

    theirs, _ = accelerated(DataLoader, data, options, workers)

    dropped, base = accelerated(creel.DataLoader, data, options, workers)
    assert_same(dropped, theirs)
    assert type(base) is DataLoader  # accelerate builds its own: see docs/frameworks.md

    kept, base = accelerated(creel.DataLoader, data, options, workers, by=integration)
    assert_same(kept, theirs)
    assert type(base) is creel.DataLoader
    assert base.stats()["batches"] == 26  # `skip_first_batches` made a loader for the epoch between


def test_a_prepared_loader_keeps_the_arguments_of_creels(data: Any) -> None:
    """Those that skips the first batches, too; one of torch's class stays torch's."""
    framework("accelerate")
    from accelerate import Accelerator

    from creel.integrations.accelerate import prepare, skip_first_batches

    model = torch.nn.Linear(8, 1)
    ours = creel.DataLoader(data, 4, True, on_error="skip", seeding="sample", num_workers=1)
    prepared, theirs, module = prepare(
        Accelerator(cpu=True), ours, DataLoader(data, batch_size=4), model
    )
    assert module is model
    assert type(theirs.base_dataloader) is DataLoader
    for loader in (prepared, skip_first_batches(prepared, 3)):
        base = loader.base_dataloader
        assert (type(base), base.on_error, base.seeding) == (creel.DataLoader, "skip", "sample")
    assert len(list(skip_first_batches(prepared, 3))) == len(prepared) - 3


def test_accelerate_has_torchs_batches_with_a_wrapped_dataset(data: Any) -> None:
    framework("accelerate")
    theirs, _ = accelerated(DataLoader, data, {}, 2)
    ours, _ = accelerated(DataLoader, creel.wrap(data), {}, 2)
    assert_same(ours, theirs)


@pytest.mark.parametrize("workers", [0, 2])
def test_accelerate_has_torchs_batches_of_a_dataset_that_opens_files(
    opaque: Any, workers: int
) -> None:
    framework("accelerate")
    from creel.integrations import accelerate as integration

    theirs, _ = accelerated(DataLoader, opaque, {}, workers)
    ours, base = accelerated(creel.DataLoader, creel.wrap(opaque), {}, workers, by=integration)
    assert_same(ours, theirs)
    assert type(base) is creel.DataLoader


def test_a_state_that_accelerate_took_at_the_last_batch_begins_the_next_epoch(
    data: Any,
) -> None:
    framework("accelerate")
    from accelerate import Accelerator

    from creel.integrations.accelerate import prepare

    prepared = prepare(Accelerator(cpu=True), creel.DataLoader(data, 4, True))
    states = [copy.deepcopy(prepared.state_dict()) for _ in prepared]
    assert [s["batches"] for s in states] == list(range(1, 14))
    for state, left in ((states[4], 8), (states[-1], 13)):
        later = creel.DataLoader(data, 4, True)
        later.load_state_dict(state)
        assert len(list(later)) == left


# --- several processes ----------------------------------------------------------------------------

RANK = """
import itertools, json, os, random, sys
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler
import creel

def noisy(x):
    return x.float() + torch.rand(1) + random.random()

def run(cls, data, workers, drop, cut, persistent):
    torch.manual_seed(5)
    random.seed(5)
    sampler = DistributedSampler(data, seed=3, drop_last=drop)
    loader = cls(data, 4, sampler=sampler, num_workers=workers, drop_last=cut,
                 persistent_workers=persistent)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
    seen = []
    for epoch in range(3):
        loader.batch_sampler.sampler.set_epoch(epoch)
        for batch in loader:
            seen.append(batch.tolist())
            model(batch).mean().backward()
    return seen

def accelerated(cls, data, workers, options, prepare=None):
    from accelerate import Accelerator, DataLoaderConfiguration
    torch.manual_seed(5)
    random.seed(5)
    configuration = DataLoaderConfiguration(**options)
    accelerator = Accelerator(cpu=True, dataloader_config=configuration)
    loader = cls(data, 4, True, num_workers=workers)
    loader = prepare(accelerator, loader) if prepare else accelerator.prepare(loader)
    return [accelerator.gather_for_metrics(b).tolist() for _ in range(2) for b in loader]

def trained(loader, model, optimizer):
    seen = []
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for batch in loader:
            loss = model(batch).square().mean()
            if optimizer:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            else:  # DeepSpeed's engine
                model.backward(loss)
                model.step()
            seen.append([batch.tolist(), loss.item()])
    return seen

def given(cls, data, workers):
    torch.manual_seed(5)
    random.seed(5)
    return cls(data, 4, sampler=DistributedSampler(data, seed=3), num_workers=workers)

def sharded(cls, data, workers):
    from torch.distributed.fsdp import fully_shard
    loader = given(cls, data, workers)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
    fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (2,)))
    seen = trained(loader, model, torch.optim.SGD(model.parameters(), 1e-9))
    return seen, [p.full_tensor().tolist() for p in model.parameters()]

def deepspeeded(cls, data, workers):
    import deepspeed
    # Else its kernels for messages between processes are compiled, which takes minutes.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    loader = given(cls, data, workers)
    configuration = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 1},
                     "zero_allow_untested_optimizer": True,
                     "optimizer": {"type": "SGD", "params": {"lr": 1e-9}}}
    engine, *_ = deepspeed.initialize(model=torch.nn.Linear(8, 1), config=configuration)
    return trained(loader, engine, None), [p.tolist() for p in engine.parameters()]

torch.set_num_threads(1)
dist.init_process_group("gloo")
data = creel.RecordDataset(sys.argv[1], torch.int64, 8, transform=noisy)
cases = ([0, False, False, False], [2, True, False, False], [2, False, True, True])
way = {"fsdp": sharded, "deepspeed": deepspeeded}.get(sys.argv[3])
if way:
    same = [way(DataLoader, data, n) == way(creel.DataLoader, data, n) for n in (0, 2)]
else:
    same = [run(DataLoader, data, *c) == run(creel.DataLoader, data, *c) for c in cases]
if sys.argv[3] == "accelerate":
    from creel.integrations.accelerate import prepare
    for options in ({}, {"dispatch_batches": True}, {"split_batches": True}):
        for workers in (0, 2):
            expected = accelerated(DataLoader, data, workers, options)
            for how in (None, prepare):
                same.append(accelerated(creel.DataLoader, data, workers, options, how) == expected)
with open(f"{sys.argv[2]}/{dist.get_rank()}.json", "w") as f:
    json.dump(same, f)
dist.destroy_process_group()
"""
#: How many cases the program compares, by framework.
TRIED = {"torch": 3, "accelerate": 15, "fsdp": 2, "deepspeed": 2}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", TRIED)
def test_two_ranks_of_torchrun_have_torchs_batches(
    tmp_path: Path, daemon_name: str, name: str
) -> None:
    framework("torch" if name == "fsdp" else name)
    np.arange(53 * 8, dtype=np.int64).tofile(tmp_path / "records.bin")  # 53: uneven
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    given = [str(script), str(tmp_path / "records.bin"), str(tmp_path), name]
    environment = os.environ | {"CREEL_SOCKET": daemon_name, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *launch, *given],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,  # three imports of torch, of some seconds each, on a machine that is busy
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    results = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert results == [[True] * TRIED[name]] * 2


# --- Hugging Face's Trainer -----------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_the_trainer_of_transformers_has_torchs_batches(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, data: Any, opaque: Any, workers: int
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers = framework("transformers")
    from creel.integrations.transformers import Trainer

    data.transform = opaque.transform = labelled

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(8, 1)
            self.seen: Batches = []

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            self.seen.append(x.clone())
            out = self.linear(x).squeeze(-1)
            return {"loss": ((out - labels) ** 2).mean() * 1e-9, "logits": out}

    class Overridden(transformers.Trainer):  # type: ignore[name-defined, misc]
        cls: Any = DataLoader

        def get_train_dataloader(self) -> Any:
            loader = self.cls(
                self.train_dataset, 4, True, num_workers=workers, collate_fn=self.data_collator
            )
            return self.accelerator.prepare(loader)

    def train(cls: Any, given: Any = data) -> tuple[Batches, Any]:
        seed(1)
        arguments = transformers.TrainingArguments(
            str(tmp_path / "out"),
            per_device_train_batch_size=4,
            num_train_epochs=2,
            dataloader_num_workers=workers,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
            logging_strategy="no",
        )
        net = Net()
        trainer = cls(model=net, args=arguments, train_dataset=given, eval_dataset=given)
        trainer.train()
        trainer.evaluate()
        return net.seen, trainer.callback_handler.train_dataloader

    theirs, _ = train(transformers.Trainer)
    assert_same(train(transformers.Trainer, creel.wrap(data))[0], theirs)
    assert_same(train(transformers.Trainer, creel.wrap(opaque))[0], theirs)
    overridden, _ = train(Overridden)
    Overridden.cls = creel.DataLoader
    assert_same(train(Overridden)[0], overridden)
    kept, loader = train(Trainer)
    assert_same(kept, theirs)
    assert type(loader.base_dataloader) is creel.DataLoader
    assert loader.base_dataloader.stats()["batches"] == 26


# --- Lightning ------------------------------------------------------------------------------------


def lightning_fit(  # noqa: C901  (the calls of one framework)
    make: Callable[[], Any],
    *,
    checkpoint: Any = None,
    save: tuple[int, Any] | None = None,
    validation: list[Any] | None = None,
    hook: bool = False,
    loaders: list[Any] | None = None,
    results: Path | None = None,
    **options: Any,
) -> Batches:
    import lightning

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(8, 1)
            self.seen: Batches = []

        def training_step(self, batch: Any, i: int) -> torch.Tensor:
            del i
            parts = [batch] if torch.is_tensor(batch) else list(batch.values())
            x = torch.cat([p for p in parts if p is not None])
            self.seen.append(x.clone())
            loss: torch.Tensor = self.linear(x).mean()
            return loss

        def validation_step(self, batch: Any, i: int, dataloader_idx: int = 0) -> None:
            del i, dataloader_idx
            self.seen.append(batch.clone())

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 1e-9)

        def on_train_batch_end(self, *_: Any) -> None:
            if save is not None and self.global_step == save[0]:
                self.trainer.save_checkpoint(save[1])

        def on_train_end(self) -> None:
            loader = self.trainer.train_dataloader
            if loaders is not None:
                loaders.append(loader)
            if results is not None:
                classes = (
                    type(loader).__name__,
                    type(loader.sampler).__name__,
                    getattr(loader, "creel", 0),
                )
                torch.save((self.seen, classes), results / f"{self.global_rank}.pt")

    class Hooked(Module):
        def train_dataloader(self) -> Any:
            return make()

    seed(5)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=options.pop("max_epochs", 2),
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        logger=False,
        **options,
    )
    module = Hooked() if hook else Module()
    given = None if hook else make()
    trainer.fit(module, given, validation, ckpt_path=checkpoint, weights_only=False)
    return [*module.seen, torch.rand(1)]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"hook": True},
        {"limit_train_batches": 3},
        {"overfit_batches": 2},
        {"hook": True, "reload_dataloaders_every_n_epochs": 1},
    ],
    ids=str,
)
def test_lightning_has_torchs_batches(data: Any, workers: int, options: dict[str, Any]) -> None:
    framework("lightning")
    theirs, ours = (
        lightning_fit(
            lambda cls=cls: cls(data, batch_size=4, shuffle=True, num_workers=workers),  # type: ignore[misc]
            validation=[cls(data, batch_size=8, num_workers=workers) for _ in range(2)],
            **options,
        )
        for cls in CLASSES
    )
    assert_same(ours, theirs)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("options", [{}, {"strategy": "ddp_fork", "devices": 2}], ids=str)
def test_lightning_has_torchs_batches_of_a_dataset_that_opens_files(
    opaque: Any, workers: int, options: dict[str, Any], tmp_path: Path
) -> None:
    framework("lightning")
    opaque.transform = torch.Tensor.float  # the launcher draws from `random`
    seen = []
    for name, make in (
        ("torch", lambda: DataLoader(opaque, 4, True, num_workers=workers)),
        ("creel", lambda: creel.DataLoader(creel.wrap(opaque), 4, True, num_workers=workers)),
    ):
        (tmp_path / name).mkdir()
        lightning_fit(make, max_epochs=3, results=tmp_path / name, **options)
        ranks = sorted((tmp_path / name).iterdir())
        seen.append([torch.load(rank, weights_only=False)[0] for rank in ranks])
    assert len(seen[0]) == options.get("devices", 1)
    for theirs, ours in zip(*seen, strict=True):
        assert_same(ours, theirs)


def test_lightning_combines_loaders_as_it_does_torchs(data: Any) -> None:
    framework("lightning")
    theirs, ours = (
        lightning_fit(lambda cls=cls: {"a": cls(data, 4, True, num_workers=2), "b": cls(data, 8)})  # type: ignore[misc]
        for cls in CLASSES
    )
    assert_same(ours, theirs)


@pytest.mark.parametrize("workers", [0, 2])
def test_lightning_resumes_the_epoch_where_it_was(data: Any, tmp_path: Path, workers: int) -> None:
    framework("lightning")
    data.transform = torch.Tensor.float  # a worker's random numbers are not resumed
    saved = tmp_path / "saved.ckpt"

    def make() -> Any:
        return creel.DataLoader(data, batch_size=4, shuffle=True, num_workers=workers)

    whole = lightning_fit(make, save=(17, saved))
    seed(99)
    resumed = lightning_fit(make, checkpoint=saved)
    assert_same(resumed[:-1], whole[17:-1])


def test_lightning_gives_each_rank_its_share_and_keeps_the_options(
    data: Any, tmp_path: Path, daemon_name: str
) -> None:
    framework("lightning")
    data.transform = torch.Tensor.float  # the launcher draws from `random`
    seen = []
    for cls, more in ((DataLoader, {}), (creel.DataLoader, {"creel": daemon_name})):
        results = tmp_path / cls.__module__
        results.mkdir()

        def make(cls: Any = cls, more: Any = more) -> Any:
            return cls(data, batch_size=4, shuffle=True, num_workers=2, **more)

        lightning_fit(make, strategy="ddp_fork", devices=2, results=results)
        seen.append([torch.load(results / f"{r}.pt", weights_only=False) for r in range(2)])
    for (theirs, _), (ours, classes) in zip(*seen, strict=True):
        assert_same(ours, theirs)
        assert classes == ("DataLoader", "DistributedSampler", daemon_name)


# --- Hugging Face's datasets ---------------------------------------------------------------------


def test_a_dataset_of_hugging_face_has_torchs_batches() -> None:
    datasets = framework("datasets")
    table = {"x": [[float(i)] * 4 for i in range(30)], "y": list(range(30))}
    both = []
    for cls in CLASSES:
        seed(2)
        data = random_split(datasets.Dataset.from_dict(table).with_format("torch"), [20, 10])[0]
        both.append([repr(b) for _ in range(2) for b in cls(data, 4, True, num_workers=2)])
    assert both[0] == both[1]
