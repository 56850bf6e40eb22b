"""What `creel explain` foretells, from the recorded batches of a script."""

from __future__ import annotations

from typing import Any

import pytest
from test_what_if import BIG, FILES, answer, rows, session

from creel.cli import explain
from creel.cli.explain import Trial, foretold
from creel.cli.reads import OwnReads
from creel.cli.watching.what_if import Machine


def forecast_of(machine: Machine = BIG, **more: Any) -> dict[str, Any]:
    """Return what is foretold of a rank that trains 0.1 s; two workers need 0.4 s for a batch."""
    trainer = session(batches=100, samples=25_600, **({"world": 1} | more))
    return foretold(Trial(answer(trainer), [(trainer, rows(0.1, 0.1, 0.3))]), machine)


def test_an_epoch_is_its_steps() -> None:
    forecast = forecast_of()
    assert (forecast["samples"], forecast["steps"]) == (FILES, -(-FILES // 256))
    assert forecast["epoch_s"] == pytest.approx(forecast["steps"] * 0.2)
    assert forecast["train_s"] == pytest.approx(0.1)
    assert forecast["busy_s"] == pytest.approx({"source": 0.1, "decode": 0.3, "collate": 0.0})


def test_batches_of_a_second_epoch_are_left_out() -> None:
    trainer = session(batches=100, samples=100 * 1_000, world=1)
    held = answer(trainer)
    held["core"]["datasets"]["d"]["objects"] = 32_000  # 32 steps
    first, later = rows(0.1, 0.4, 0.1, count=32), rows(0.1, 0.0, 0.1, count=100)[32:]
    late = later[0][5] - first[-1][6]
    later = [[row[0], *(t - late for t in row[1:7]), row[7]] for row in later]
    forecast = foretold(Trial(held, [(trainer, first + later)]), BIG)
    assert forecast["steps"] == 32
    assert forecast["step_s"] == pytest.approx(0.25, rel=1e-3)
    assert forecast["busy_s"]["source"] == pytest.approx(0.4)


def test_of_several_ranks_a_step_is_that_of_the_late_one_and_they_share_an_epoch() -> None:
    ranks = [session(k + 1, k, batches=100, samples=25_600, world=2) for k in (0, 1)]
    work = (0.1, 0.0, 0.3), (0.1, 0.0, 0.8)  # of a batch: two workers each
    recorded: list[Any] = [(trainer, rows(*its)) for trainer, its in zip(ranks, work, strict=True)]
    forecast = foretold(Trial(answer(*ranks), recorded), BIG)
    assert forecast["ranks"] == 2
    assert forecast["steps"] == -(-FILES // 512)
    assert forecast["step_s"] == pytest.approx(0.4, rel=1e-3)
    assert forecast["wait_s"] == pytest.approx(0.3, rel=1e-3)
    assert forecast["busy_s"]["decode"] == pytest.approx(0.8)
    by_workers = {case["workers"]: case["step_s"] for case in forecast["by_workers"]}
    assert [by_workers[n] for n in (1, 4, 8)] == pytest.approx([0.8, 0.2, 0.1], rel=1e-3)
    explain.show(forecast)


def test_each_number_of_workers_up_to_the_cores_is_told() -> None:
    by_workers = {
        case["workers"]: case["step_s"]
        for case in forecast_of(Machine(8.0, *BIG[1:]))["by_workers"]
    }
    assert [*by_workers] == [*range(1, 9)]
    # Two workers wait for storage, which gives a batch in 0.2 s, however many ask.
    assert by_workers == pytest.approx({n: max(0.2, 0.3 / n) for n in by_workers}, rel=1e-3)


def test_with_memory_for_a_part_a_later_epoch_reads_the_rest() -> None:
    cases = forecast_of()["by_memory"]
    assert [case["reads"] for case in cases] == [FILES * k // 4 for k in (4, 3, 2, 1, 0)]
    assert [case["nbytes"] for case in cases] == [110_000 * FILES * k // 4 for k in range(5)]
    steps = [max(0.2 * (1 - case["share"]), 0.3 / 2) for case in cases]
    assert [case["step_s"] for case in cases] == pytest.approx(steps, rel=1e-3)
    assert forecast_of()["least_share"] is None, "decoding alone takes 0.15 s"


def test_requests_to_an_object_store_are_told_so_that_a_bill_can_be_computed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    trainer = session(world=1)
    source = {"dataset": trainer["dataset"], "reads": 1000, "requests": {"GET": 500, "LIST": 7}}
    held = answer(trainer) | {"sources": [source]}
    forecast = foretold(Trial(held, [(trainer, rows(0.1, 0.2, 0.1))]), BIG)
    assert [r["requests"] for r in forecast["by_memory"]] == [
        FILES * k // 8 for k in (4, 3, 2, 1, 0)
    ]
    explain.show(forecast)
    assert "requests" in capsys.readouterr().out
    assert {r["requests"] for r in forecast_of()["by_memory"]} == {None}, "of files"


def test_the_least_memory_without_a_wait_is_found() -> None:
    trainer = session(world=1)
    forecast = foretold(Trial(answer(trainer), [(trainer, rows(0.1, 0.2, 0.1))]), BIG)
    # 0.15 (1 - f) is a step of 0.1 s and 2 % of waiting.
    assert forecast["least_share"] == pytest.approx(1 - 0.1 / 0.98 / 0.15, abs=0.01)


def test_of_a_dataset_without_objects_only_steps_are_told() -> None:
    trainer = session(dataset="nothing", decoded_measured=0)
    forecast = foretold(Trial(answer(trainer), [(trainer, rows(0.1, 0.0, 0.4))]), BIG)
    assert (forecast["steps"], forecast["epoch_s"], forecast["by_memory"]) == (None, None, [])
    assert {case["epoch_s"] for case in forecast["by_workers"]} == {None}


def test_files_that_are_read_directly_have_the_size_that_was_read() -> None:
    forecast = forecast_of(direct_reads=25_600, direct_nbytes=25_600 * 5000)
    assert forecast["nbytes"] == FILES * 5000


@pytest.mark.parametrize("dataset", ["d", "nothing"])
def test_an_explanation_is_shown_as_tables(
    dataset: str, capsys: pytest.CaptureFixture[str]
) -> None:
    explain.show(forecast_of(dataset=dataset))
    out = capsys.readouterr().out
    assert "source 100 ms, decode 300 ms" in out
    assert ("in memory" in out) == (dataset == "d")


#: Of two workers that train 0.1 s and make a batch in 0.4 s each.
OPAQUE = session(dataset="nothing", batches=100, decoded_measured=0, pid=7, cpu_s=50.0)


def told_of(files: dict[tuple[str, bool], int], share: float, **note: Any) -> dict[str, Any]:
    notes = [{"pid": 7, "samples": 640, "batches": 10, "ahead": False, **note}]
    reads = [OwnReads(share, 0.0, files, 32_000, 4.0)]
    trial = Trial(answer(OPAQUE), [(OPAQUE, rows(0.1, 0.0, 0.4))], notes, reads)
    return foretold(trial, BIG)


def test_without_its_waits_for_storage_an_epoch_takes_what_is_left() -> None:
    forecast = told_of({(f"/data/{i}", False): 1 for i in range(20)}, 1.5)  # of 2 workers
    assert (forecast["samples"], forecast["steps"]) == (640, 10)
    assert forecast["epoch_s"] == pytest.approx(2.0)
    reads = forecast["reads"]
    assert reads["storage_s"] == pytest.approx(0.3)
    missed = told_of({("/data/0", False): 1}, 1.4)["reads"]  # by looks
    assert missed["storage_s"] == pytest.approx(0.3), "processors were in use for the rest"
    assert (reads["step_s"], reads["epoch_s"]) == pytest.approx((0.1, 1.0))  # 0.05 s of work
    assert reads["nbytes"] == 32_000 // 20
    explain.show(forecast)
    assert told_of({}, 0.0)["reads"] is None


@pytest.mark.parametrize(
    "path, mapped, ahead, line",
    [
        ("", False, False, "creel.wrap(dataset)"),
        ("/data/x.h5", False, False, "creel.wrap(dataset)"),
        ("/data/x.npy", False, False, "creel.RecordDataset(path, dtype, shape)"),
        ("/data/train.bin", True, False, "creel.RecordDataset(path, dtype, shape)"),
        ("/data/x.arrow", True, False, "a method ranges(index), or creel.kept(dataset, size)"),
        ("/data/x.arrow", True, True, "creel.kept(dataset, size)"),
        ("/data/x.sqlite", False, False, "creel.kept(dataset, size)"),
    ],
)
def test_the_line_that_serves_what_is_read_is_named(
    path: str, mapped: bool, ahead: bool, line: str
) -> None:
    files = {(f"/data/{i}", mapped): 1 for i in range(20)} | ({(path, mapped): 9} if path else {})
    forecast = told_of(files, 1.0, ahead=ahead)
    assert forecast["reads"]["line"] == line
    assert forecast["reads"]["file"] == (path or "/data/0")


def test_it_ends_with_the_change_that_helps_most_and_the_line_to_write_it_in(
    capsys: pytest.CaptureFixture[str],
) -> None:
    reads = told_of({(f"/data/{i}", False): 1 for i in range(20)}, 1.5, where="train.py:7")
    advice = reads["advice"]
    assert (advice["line"], advice["where"]) == ("creel.wrap(dataset)", "train.py:7")
    head = "Write creel.wrap(dataset) (the loader is made in train.py:7): an epoch takes "
    assert advice["sentence"].startswith(head)
    assert advice["sentence"].endswith(" instead of 2.0 s.")
    explain.show(reads)
    assert capsys.readouterr().out.endswith(f"\n\n{advice['sentence']}\n")
    trainer = session(dataset="nothing", decoded_measured=0)
    decoding = foretold(Trial(answer(trainer), [(trainer, rows(0.1, 0.0, 0.4))]), BIG)["advice"]
    assert decoding["sentence"] == ("Write num_workers=4: a step takes 100 ms instead of 200 ms.")
    few = foretold(Trial(answer(trainer), [(trainer, rows(0.1, 0.0, 0.4))]), Machine(2.0, *BIG[1:]))
    assert few["advice"]["sentence"].startswith("Make a sample cheaper, mostly to decode: ")
    fed = foretold(Trial(answer(trainer), [(trainer, rows(0.1, 0.0, 0.1))]), BIG)["advice"]
    assert fed["sentence"] == "Change nothing: training does not wait for data."
    assert fed["line"] is None
