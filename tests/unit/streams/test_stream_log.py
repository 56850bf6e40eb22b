"""The log of a stream, in a folder or in Redis: what is written, and what is refused."""

from __future__ import annotations

import copy
import errno
import json
import os
import pickle
import shutil
import subprocess
import sys
import threading
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stream_rig import FIELDS, NBYTES, filled, record, samples, taken
from torch.utils.data import DataLoader

from creel.errors import ConfigError, NotFoundError, SourceError
from creel.loader.extras.streams.stream import Stream
from creel.streams import chunks, cursors, files
from creel.streams.cursors import Cursor
from creel.streams.log import Log, medium_of
from creel.streams.producer import Producer
from kit import unique_name
from testbed.redis_server import Address

Place = Path | Address


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "stream"


def test_a_producer_needs_neither_torch_nor_arrow(folder: Path) -> None:
    code = (
        "import creel, sys\n"
        f"with creel.Producer({str(folder)!r}, {{'x': 'float32'}}) as p: p.put(x=1)\n"
        "assert not {'torch', 'pyarrow', 'zmq'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=110)
    assert float(Stream(folder, None)[0]["x"]) == 1


def test_chunks_are_records_one_after_the_other_as_c_structs(folder: Path) -> None:
    log = filled(folder, [3, 8, 1])
    assert log.numbers() == [0, 1, 2]
    assert [log.size(n) for n in range(4)] == [96, 256, 32, -1]
    rows = np.fromfile(log.chunk(1), np.dtype([("x", "f4", (3, 2)), ("i", "i8")], align=True))
    assert rows["i"].tolist() == list(range(3, 11))
    assert rows["x"][:, 2, 1].tolist() == [i / 2 for i in range(3, 11)]
    assert log.ended()


def test_a_record_that_is_a_chunk_is_written_as_in_a_larger_one(tmp_path: Path) -> None:
    """Though its fields are not copied: with gaps between them, cast, and not contiguous."""
    fields: dict[str, Any] = {"a": "int8", "x": ("float32", (2, 3)), "b": "bool", "c": "complex64"}
    chunks = []
    for records in (1, 2):
        folder = tmp_path / str(records)
        with Producer(folder, fields, chunk=records, linger_s=1e9) as producer:
            for i in range(2):
                x = np.arange(i, i + 6.0).reshape(3, 2).T
                producer.put(b=i == 0, x=x, c=i + 2j, a=i)
            with pytest.raises(ConfigError, match="shape"):
                producer.put(b=True, x=np.zeros((3, 2)), c=0, a=0)
        log = Log.open(folder)
        chunks.append([Path(log.chunk(n)).read_bytes() for n in log.numbers()])
    assert b"".join(chunks[0]) == chunks[1][0]
    assert len(chunks[0]) == 2


def test_ten_lines_without_creel_write_a_stream(folder: Path) -> None:
    folder.mkdir()
    about = {"id": "c", "fields": [["x", "<f8", []]], "records": 4, "ahead": 0, "keep": 0}
    (folder / "stream.json").write_text(json.dumps(about))
    for n in range(3):
        (folder / ".mine").write_bytes(np.arange(4 * n, 4 * n + 4, dtype="<f8").tobytes())
        os.link(folder / ".mine", folder / f"{n:09}")
        (folder / ".mine").unlink()
    (folder / "end.0").touch()
    stream = Stream(folder, None)
    got = list(DataLoader(stream, batch_sampler=stream.batches(5)))
    assert [b["x"].tolist() for b in got] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11]]


@pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")
def test_the_manuals_lines_of_c_write_a_stream(folder: Path, tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs/stream-format.md").read_text()
    lines = page.partition("```c\n")[2].partition("```")[0]
    main = """
    int main(int n, char **words) {
        struct { float x[3][2]; long i; } rows[2] = {{{{0}}, 0}};
        for (int k = 0; k < 6; k += 2) {
            rows[0].i = k; rows[1].i = k + 1; rows[1].x[2][1] = k + 1;
            append(words[1], rows, sizeof rows);
        }
        return 0;
    }"""
    (tmp_path / "write.c").write_text(lines + main)
    program = str(tmp_path / "write")
    subprocess.run(["cc", "-Wall", "-o", program, f"{program}.c"], check=True, timeout=110)
    Producer(folder, FIELDS, chunk=2).put(**record(7))  # its description; the record is not written
    subprocess.run([program, str(folder)], check=True, timeout=110)
    Log.open(folder).end()
    stream = Stream(folder, None)
    (batch,) = DataLoader(stream, batch_sampler=stream.batches(6))
    assert batch["i"].tolist() == list(range(6))
    assert batch["x"][:, 2, 1].tolist() == [0, 1, 0, 3, 0, 5]


def test_producers_at_once_append_whole_chunks_with_dense_numbers(place: Place) -> None:
    producers, each = 5, 200

    def produce(k: int) -> None:
        with Producer(place, FIELDS, chunk=3, producers=producers) as producer:
            for i in range(each):
                producer.put(**record(k * each + i))

    threads = [threading.Thread(target=produce, args=(k,)) for k in range(producers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    log = Log.open(place)
    assert log.ended()
    assert log.numbers() == list(range(len(log.numbers())))
    assert not isinstance(place, Path) or not list(place.glob(".*"))
    numbers = taken(Stream(place, None).batches(10))
    numbers_read = [i for batch in samples(place, numbers) for i in batch]
    assert sorted(numbers_read) == list(range(producers * each))
    of_each = [[i for i in numbers_read if i // each == k] for k in range(producers)]
    assert of_each == [sorted(own) for own in of_each]


def test_a_stalled_producer_does_not_write_into_what_is_read_and_deleted(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "_SPARE_NBYTES", 0)
    limits: dict[str, Any] = {"chunk": 1, "keep": 0, "producers": 2}
    stalled, other = (Producer(place, FIELDS, **limits) for _ in range(2))
    for i in range(20):
        other.put(**record(i))
    cursors.write(medium_of(place), "a", 0, Cursor(15, 0, NBYTES))
    other.put(**record(20))
    log = Log.open(place)
    assert log.numbers() == list(range(15, 21))
    stalled.put(**record(100))  # thinks that chunk 0 is the first free one
    assert log.numbers() == list(range(15, 22))
    assert int(Stream(place, None)[21]["i"]) == 100
    stalled.put(**record(101))
    assert log.numbers()[-1] == 22


@pytest.mark.parametrize("records", [1, 400])
def test_numbers_are_not_used_again_behind_a_record_that_a_memory_holds(
    place: Place, records: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where no block of its chunk can be given back: a small one, or an old file system."""
    monkeypatch.setattr(files, "_PUNCH", 0xFF)  # is refused
    limits: dict[str, Any] = {"chunk": records, "producers": 3}
    stalled = Producer(place, FIELDS, **limits)
    filled(place, [records] * 2, **limits)
    stalled.put(**record(0))
    stalled.flush()
    log = filled(place, [records] * 5, **limits)
    for number in range(7):
        log.delete(number, np.array([0] if number == 2 else [], np.int64))
    assert [number for number in log.numbers() if log.size(number) > 0] == [7]
    for producer in (Producer(place, FIELDS, **limits), stalled):
        producer.put(**record(100))
        producer.flush()
    assert log.numbers() == [2, 7, 8, 9]
    assert int(Stream(place, None)[2 * records]["i"]) == 0
    log.delete(2)
    assert log.numbers() == [7, 8, 9]


def test_a_producer_goes_on_behind_what_was_deleted_and_where_a_number_is_missing(
    folder: Path,
) -> None:
    """Numbers of chunks are neither used twice nor jumped over."""
    late = filled(folder, [1, 1, 1], chunk=1, producers=2)
    for number in (0, 1):
        late.delete(number)
    assert late.medium.append([memoryview(bytes(NBYTES))], 0) == 3
    os.link(late.chunk(3), late.chunk(7))  # by a program that counts wrongly
    assert [late.medium.append([memoryview(bytes(NBYTES))], 4) for _ in range(3)] == [4, 5, 6]
    assert late.deleted(2) is None
    late.delete(5)
    assert late.deleted(5) == 6
    assert late.deleted(8) is None
    with pytest.raises(SourceError, match="chunk 5 has been deleted, the next one is 6"):
        taken(Stream(folder, None, begin=2).batches(1))


def test_nothing_is_deleted_between_the_look_for_a_number_and_its_use(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a producer that was behind would use the number of a chunk that was read meanwhile."""
    late = filled(folder, [1] * 4, chunk=1, producers=2)
    link, deleting = os.link, list[threading.Thread]()

    def delete() -> None:
        for number in range(3):
            late.delete(number)

    def linked(*args: Any) -> None:
        if not deleting:
            deleting.append(threading.Thread(target=delete))
            deleting[0].start()
            deleting[0].join(0.2)  # it must wait for us
        link(*args)

    monkeypatch.setattr(os, "link", linked)
    assert late.medium.append([memoryview(bytes(NBYTES))], 2) == 4
    deleting[0].join(30)
    assert late.numbers() == [3, 4]


def test_a_chunk_that_was_appended_is_not_written_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though its temporary file could not be deleted."""
    unlink, failed = os.unlink, list[str]()

    def broken(path: Any, *args: Any, **kw: Any) -> None:
        if Path(path).name.startswith(".") and not failed:
            failed.append(path)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        unlink(path, *args, **kw)

    with Producer(folder, FIELDS, chunk=1) as producer:
        with monkeypatch.context() as patch:
            patch.setattr(os, "unlink", broken)
            producer.put(**record(0))
        producer.put(**record(1))
    assert failed
    assert samples(folder, taken(Stream(folder, None).batches(1))) == [[0], [1]]


def test_an_answer_of_redis_that_is_lost_does_not_append_twice(redis: Address) -> None:
    place = redis / unique_name()
    Producer(place, FIELDS)
    medium: Any = medium_of(place)
    data = [memoryview(bytes(NBYTES))]
    assert [medium.append(data, 0), medium.append(data, 0)] == [0, 1]
    medium._appended -= 1  # the client sends the same command again
    assert medium.append(data, 0) == 1
    assert [medium_of(place).append(data, 0), medium.append(data, 0)] == [2, 3]
    assert medium.numbers() == [0, 1, 2, 3]


def test_a_password_is_not_shown(tmp_path: Path) -> None:
    address = "redis://me:secret@host:6379/sim"
    log = Log(medium_of(address), filled(tmp_path / "s", [1]).about)
    assert log.chunk(3) == "redis://host:6379/sim/000000003"
    assert log.path == "redis://host:6379/sim"
    for wrong in (f"{address}/more", "s3://key:secret@bucket/sim"):
        with pytest.raises(ConfigError) as raised:
            medium_of(wrong)
        assert "secret" not in str(raised.value)


def test_two_streams_in_one_folder_are_refused(folder: Path) -> None:
    Producer(folder, FIELDS)
    with pytest.raises(ConfigError, match="another stream, with fields"):
        Producer(folder, {"y": "int8"})
    with pytest.raises(ConfigError, match="with keep"):
        Producer(folder, FIELDS, keep="3MB")
    (folder / "000000000").write_bytes(b"")
    (folder / "stream.json").unlink()
    with pytest.raises(ConfigError, match="parts of another"):
        Producer(folder, FIELDS)


def test_a_stream_that_has_ended_takes_no_records(place: Place) -> None:
    filled(place, [2])
    with pytest.raises(ConfigError, match="has ended"):
        Producer(place, FIELDS, chunk=8)


@pytest.mark.parametrize(
    "fields",
    [{}, {"x": "U4"}, {"x": "object"}, {"x": ("f4", (0,))}, {"x": ">f4"}, {"x": "g"}, {"x": "no"}],
)
def test_fields_without_numbers_are_refused(folder: Path, fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Producer(folder, fields)
    assert not folder.exists()


@pytest.mark.parametrize(
    "wrong",
    [{"i": 1}, {**record(1), "z": 1}, {**record(1), "i": 0.5}, {**record(1), "x": np.zeros(6)}],
)
def test_a_wrong_record_is_refused_and_not_appended(place: Place, wrong: dict[str, Any]) -> None:
    with Producer(place, FIELDS, chunk=2) as producer:
        with pytest.raises(ConfigError):
            producer.put(**wrong)
        producer.put(**record(7))
    assert samples(place, [[0]]) == [[7]]
    assert Log.open(place).size(0) == NBYTES


#: Of a field's type: values that fit, whatever their own type, and ones that do not.
VALUES: dict[str, tuple[list[Any], list[Any]]] = {
    "uint8": (
        [3, np.int64(255), 7.0, True, 2 + 0j, torch.tensor(9), Fraction(4, 2)],
        [300, -1, np.int64(256), 0.5, -1.0, float("nan"), 1 + 1j, None, "3", b"3"],
    ),
    "int32": ([-(2**31), np.uint64(5), -3.0], [2**31, np.int64(-(2**31) - 1), 1e300, 10**400]),
    "int64": ([2**63 - 1, np.float32(2**62)], [2**63, 2.0**63, np.uint64(2**63), Decimal("0.5")]),
    "uint64": ([2**64 - 1, np.float64(2**63)], [2**64, 2.0**64, -1, np.int8(-1)]),
    "bool": ([True, 0, 1.0], [2, 0.5, float("nan")]),
    "float16": ([0.1, 2048, np.float64(65504)], [70000, 2049, 1e5, np.float32(1e5)]),
    "float32": (
        [0.1, 2**24, 2**70, float("inf"), np.float64(1e-60), Decimal("0.1"), False],
        [2**24 + 1, np.int64(2**24 + 1), 1e39, np.float64(-1e39), 1j, Decimal("1e400"), None],
    ),
    "float64": ([2**53, np.uint64(2**63)], [2**53 + 1, np.int64(2**53 + 1), np.int64(2**63 - 1)]),
    "complex64": ([3, 0.1, 1j], [2**24 + 1, 1e39, 1 + 1e39j]),
}


@pytest.mark.parametrize("kind", VALUES)
def test_a_value_that_fits_is_taken_whatever_its_type_and_no_other_is(
    tmp_path: Path, kind: str
) -> None:
    """As a scalar and within an array; what was taken is the number that was given."""
    fitting, others = VALUES[kind]
    for shape in ((), (2, 1)):
        place = tmp_path / f"{len(shape)}"
        with Producer(place, {"n": (kind, shape)}, chunk=100, linger_s=1e9) as producer:
            for value in fitting:
                producer.put(n=[[value], [0]] if shape else value)
            for value in others:
                with pytest.raises(ConfigError, match=r"^n is .*") as raised:
                    producer.put(n=[[0], [value]] if shape else value)
                assert kind in str(raised.value)
        values = np.fromfile(Log.open(place).chunk(0), kind).reshape(len(fitting), -1)[:, 0]
        given = [value if kind == "complex64" else value.real for value in fitting]
        assert values.tolist() == [np.dtype(kind).type(value) for value in given]


def test_large_ints_beside_floats_are_not_rounded(tmp_path: Path) -> None:
    with Producer(tmp_path / "s", {"n": ("int64", 2)}) as producer:
        producer.put(n=[2**53 + 1, 1.0])
        with pytest.raises(ConfigError, match=r"n is 0.5, which does not fit int64"):
            producer.put(n=[2**53 + 1, 0.5])
        with pytest.raises(ConfigError, match="n is no array of numbers: "):
            producer.put(n=[[1], [2, 3]])
    assert Stream(tmp_path / "s", None)[0]["n"].tolist() == [2**53 + 1, 1]


# --- threads and copies of a producer -------------------------------------------------------------


def put_records(producer: Producer, first: int, n: int) -> list[int]:
    for i in range(first, first + n):
        producer.put(**record(i))
    producer.flush()
    return list(range(first, first + n))


def records_of(place: Place) -> list[int]:
    """Return the numbers of all records of a finished stream, whose other field must be theirs."""
    stream = Stream(place, None)
    records = [stream[n] for batch in taken(stream.batches(1)) for n in batch]
    assert all(
        torch.equal(record["x"], torch.full((3, 2), int(record["i"]) / 2)) for record in records
    )
    return [int(record["i"]) for record in records]


@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_threads_of_one_producer_lose_and_mix_nothing(tmp_path: Path, chunk: int) -> None:
    each, switched = 400, sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with Producer(tmp_path / "s", FIELDS, chunk=chunk) as producer:
            threads = [
                threading.Thread(target=put_records, args=(producer, k * each, each))
                for k in range(4)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
    finally:
        sys.setswitchinterval(switched)
    numbers = records_of(tmp_path / "s")
    assert sorted(numbers) == list(range(4 * each))
    of_each = [[i for i in numbers if i // each == k] for k in range(4)]
    assert of_each == [sorted(own) for own in of_each]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_copies_of_a_producer_do_not_write_what_it_had_not_written(place: Place) -> None:
    """In forked children, also of a child and while a thread is at work, and pickled ones."""
    producer = Producer(place, FIELDS, chunk=8, linger_s=1e9)
    expected = [0, 1, 2]
    for i in expected:
        producer.put(**record(i))

    def child(*firsts: int) -> None:
        pid = os.fork()
        if not pid:
            try:
                producer.put(**record(firsts[0]))
                child(*firsts[1:]) if firsts[1:] else None
                put_records(producer, firsts[0] + 1, 10)
                producer.put(**record(-1))  # never written: the child ends without `flush`
                child(*(first + 50 for first in firsts[1:])) if firsts[1:] else None
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0

    child(100, 200)
    with producer._lock:  # as if by another thread, which no child has
        threading.Thread(target=child, args=(300,)).start()
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join(60)
    for first, twin in ((400, pickle.loads(pickle.dumps(producer))), (500, copy.copy(producer))):
        put_records(twin, first, 11)
    producer.close()
    expected += [first + i for first in (100, 200, 250, 300, 400, 500) for i in range(11)]
    assert sorted(records_of(place)) == expected


@pytest.mark.parametrize("chunk", [1, 2])
def test_a_record_behind_the_end_is_refused(place: Place, chunk: int) -> None:
    """A copy counts as a producer where it is closed, and nobody would read what comes then."""
    producer = Producer(place, FIELDS, chunk=chunk)
    copy.copy(producer).close()
    for i in range(chunk - 1):
        producer.put(**record(i))
    with pytest.raises(ConfigError, match="has ended, nobody would read this: producers=1 have"):
        producer.put(**record(chunk))
    assert not Log.open(place).numbers()


def test_a_signal_handler_during_a_put_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would wait for itself, or write records twice."""
    link, refused = os.link, list[str]()

    def interrupted(*args: Any) -> None:
        with pytest.raises(ConfigError, match="this producer is at work") as raised:
            producer.close()
        refused.append(str(raised.value))
        link(*args)

    with Producer(folder, FIELDS, chunk=1) as producer:
        with monkeypatch.context() as patch:
            patch.setattr(os, "link", interrupted)
            producer.put(**record(0))
        producer.put(**record(1))
    assert len(refused) == 1
    assert records_of(folder) == [0, 1]


def test_on_a_full_disk_nothing_half_written_is_seen(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = Producer(folder, FIELDS, chunk=2, linger_s=1e9)
    producer.put(**record(0))
    producer.put(**record(1))
    producer.put(**record(2))
    write, budget = os.write, [40]

    def full(fd: int, data: Any) -> int:
        some = min(len(data), budget[0])
        budget[0] -= some
        if not some:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, data[:some])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(SourceError, match="No space left"):
            producer.put(**record(3))
        assert sorted(p.name for p in folder.iterdir()) == ["000000000", "stream.json"]
    producer.put(**record(4))  # record 3 was not appended, record 2 still is
    producer.close()
    log = Log.open(folder)
    assert [log.size(n) // NBYTES for n in log.numbers()] == [2, 2]
    numbers = taken(Stream(folder, None).batches(1))
    assert samples(folder, numbers) == [[0], [1], [2], [4]]


@pytest.mark.parametrize("kind", ["folder", "in_memory"])
def test_a_producer_that_is_killed_at_any_byte_leaves_whole_chunks(
    kind: str, request: pytest.FixtureRequest
) -> None:
    """Also one that writes over a chunk that was read."""
    place: Path = request.getfixturevalue(kind)
    limits: dict[str, Any] = {"chunk": 4, "keep": 0, "producers": 2, "readers": ("a",)}
    filled(place, [4] * 4, **limits)
    log, total = Log.open(place), 16
    for nbytes in (*range(0, 4 * NBYTES, 9), 4 * NBYTES):  # the last one is killed after its write
        last = log.numbers()[-1]
        cursors.write(log.medium, "a", 0, Cursor(last, 0, 0))
        if not (child := os.fork()):
            _put_some_bytes(place, total, nbytes, limits)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
        assert log.numbers()[-1] == last
        with Producer(place, FIELDS, linger_s=1e9, **limits) as producer:
            assert not list(place.glob(".*")), "what was half-written takes no memory"
            for i in range(total, total + 4):
                producer.put(**record(i))
            producer.flush()
            assert log.numbers()[-1] == last + 1
            records = Stream(place, None).__getitems__([4 * last + i for i in range(8)])
            assert [int(record["i"]) for record in records] == list(range(total - 4, total + 4))
            producer._closed = True  # it goes on
        total += 4


def _put_some_bytes(place: Path, first: int, nbytes: int, limits: dict[str, Any]) -> None:
    """Put a chunk, and end in the middle of its write as if killed."""
    try:
        write = os.write
        producer = Producer(place, FIELDS, linger_s=1e9, **limits)

        def killed(fd: int, data: Any) -> int:
            write(fd, data[:nbytes])
            os._exit(9)

        os.write = killed
        for i in range(first, first + 4):
            producer.put(**record(i))
    finally:
        os._exit(1)


def test_a_producer_that_begins_leaves_what_others_are_writing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = Producer(folder, FIELDS, chunk=1, producers=2)
    (folder / ".1234").touch()  # of a program in C
    write, begun = os.write, False

    def beginning(fd: int, data: Any) -> int:
        nonlocal begun
        if not begun:
            begun = True
            with Producer(folder, FIELDS, chunk=1, producers=2):
                pass
        return write(fd, data)

    monkeypatch.setattr(os, "write", beginning)
    ours.put(**record(0))
    ours.close()
    log = Log.open(folder)
    assert begun and log.ended() and log.numbers() == [0]  # noqa: PT018  three parts of one end
    assert (folder / ".1234").exists()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_that_is_forked_during_a_put_stops_nobody(
    in_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the producer's files open, and so their locks, as long as it lives."""
    limits: dict[str, Any] = {"chunk": 1, "keep": 0, "readers": ("a",)}
    producer = Producer(in_memory, FIELDS, **limits)
    link = os.link
    children: list[int] = []
    alive, stop = os.pipe()

    def forking(source: str, target: str) -> None:
        if len(children) < 3:
            children.append(os.fork())
            if not children[-1]:
                os.close(stop)
                os.read(alive, 1)
                os._exit(0)
        link(source, target)

    monkeypatch.setattr(os, "link", forking)
    for i in range(6):  # the last ones over chunks that were read
        producer.put(**record(i))
        cursors.write(producer._stream.medium, "a", 0, Cursor(i + 1, 0, 0))
    producer.close()
    os.close(stop)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
    os.close(alive)


def test_a_chunk_of_the_wrong_size_is_named(folder: Path) -> None:
    filled(folder, [8, 8])
    (folder / "000000001").write_bytes(bytes(33))
    with pytest.raises(ConfigError, match="000000001 has 33 bytes"):
        taken(Stream(folder, None).batches(4))


def test_a_description_that_is_none_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="a folder of a file system"):
        Stream("s3://bucket/sim", "a")
    with pytest.raises(NotFoundError, match="no producer has begun"):
        Stream(folder, "a", timeout_s=0)
    folder.mkdir()
    for text in ("{}", "no", '{"id": "a", "fields": [], "records": 1, "ahead": 1, "keep": 1}'):
        (folder / "stream.json").write_text(text)
        with pytest.raises(ConfigError):
            Stream(folder, "a", timeout_s=0)
