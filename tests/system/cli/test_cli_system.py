"""The command line with real daemons, terminals, and scripts that train."""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch  # noqa: F401  for the forks

from creel.cli import run
from creel.cli.main import main
from creel.config import Config
from creel.loader.client.embed import connect_or_start
from kit import until
from programs import Program
from testbed.http_server import Server

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]

CREEL = [sys.executable, "-m", "creel"]


@pytest.fixture
def name() -> str:
    """A daemon name for this test alone."""
    return f"test-{os.getpid()}-{time.monotonic_ns()}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """60 files of 10 KB."""
    rng = np.random.default_rng(0)
    for i in range(60):
        path = tmp_path / f"data/c{i % 3}/{i:03d}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(rng.bytes(10_000))
    return tmp_path / "data"


def forked(*words: str, cwd: Path | None = None) -> tuple[int, str, str]:
    """Run the command in a fork of this process, which has imported its modules.

    Returns:
        Its exit code, output and errors.
    """

    def run() -> None:
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        sys.argv = ["creel", *words]
        os.chdir(cwd or ".")
        sys.exit(main())

    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = multiprocessing.get_context("fork").Process(target=run)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: threads and fork
            process.start()
        process.join(120)
        if process.exitcode is None:
            process.kill()
            pytest.fail(f"creel {words} did not end")
        out.seek(0)
        err.seek(0)
        return process.exitcode, out.read(), err.read()


def creel(*words: str, cwd: Path | None = None, code: int = 0) -> str:
    """Return the output of the command, whose exit code must be `code`."""
    status, out, err = forked(*words, cwd=cwd)
    assert status == code, f"{status}\n{out}\n{err}"
    return out


@pytest.fixture
def daemon(name: str) -> Iterator[subprocess.Popen[bytes]]:
    """A daemon in the foreground that serves; it must end cleanly by SIGTERM."""
    process = subprocess.Popen([*CREEL, "--name", name, "run", "--memory", "64MiB"])
    while forked("--name", name, "status")[0]:
        assert process.poll() is None
    yield process
    if process.poll() is None:
        process.terminate()
    assert process.wait(60) == 0


def reads(name: str) -> int:
    return sum(s["reads"] for s in json.loads(creel("--name", name, "stats", "--json"))["sources"])


def train(name: str, program: str, folder: Path) -> None:
    env = os.environ | {"CREEL_SOCKET": name, "CREEL_LOADER__DIRECT": "never"}
    begin = f"import os, sys; os.chdir({str(folder)!r}); sys.path.insert(0, '')"
    training = Program(f"{begin}\n{program}", env=env)
    _, err = training.communicate()
    assert training.wait() == 0, err


def test_a_daemon_is_seen_warmed_and_stopped(
    daemon: subprocess.Popen[bytes], name: str, folder: Path
) -> None:
    answer = json.loads(creel("--name", name, "status", "--json"))
    assert answer["schema"] == 1
    assert (answer["name"], answer["pid"], answer["state"]) == (name, daemon.pid, "serving")
    assert answer["memory"]["budget_nbytes"] == 64 << 20

    warm = json.loads(creel("--name", name, "warm", str(folder), "--json"))
    assert (warm["objects"], warm["resident"], warm["nbytes"]) == (60, 60, 600_000)
    assert "60 of 60 files (586 KiB) in memory" in creel("--name", name, "warm", str(folder))

    stats = json.loads(creel("--name", name, "stats", "--json"))
    (source,) = stats["sources"]
    assert (source["source"], source["reads"], source["nbytes"]) == (str(folder), 60, 600_000)
    assert "/data: 60 reads" in creel("--name", name, "stats")
    assert f"daemon         {name}" in creel("--name", name, "doctor")

    (row,) = json.loads(creel("--name", name, "ls", "--json"))["datasets"]
    assert (row["path"], row["resident_nbytes"], row["sessions"]) == (str(folder), 600_000, 0)
    listed = creel("--name", name, "ls").splitlines()[1]
    assert listed.startswith(str(folder))
    assert "586 KiB (100 %)" in listed
    assert creel("--name", name, "drop", f"{folder}/") == f"dropped {folder}\n"
    (row,) = json.loads(creel("--name", name, "ls", "--json"))["datasets"]
    assert row["resident_objects"] == 0
    creel("--name", name, "drop", row["dataset"][:8])
    (folder / "c0/later.bin").write_bytes(b"x")
    creel("--name", name, "warm", str(folder))
    assert creel("--name", name, "drop", str(folder)) == f"dropped {folder} (2 datasets)\n"
    rows = json.loads(creel("--name", name, "ls", "--json"))["datasets"]
    assert [row["resident_objects"] for row in rows] == [0, 0]
    creel("--name", name, "drop", "/nowhere", code=2)

    stopped = creel("--name", name, "stop", "--json")
    assert json.loads(stopped)["stopping"] == "once its clients have disconnected"
    assert daemon.wait(60) == 0
    creel("--name", name, "status", code=3)


_PROGRAM = """
import creel
from torch.utils.data import Dataset, Subset

def records():
    return creel.RecordDataset("records.bin", "uint8", 100)

halves = [Subset(records(), range(i, i + 300)) for i in (0, 300)]

class Half:
    first = creel.DataLoader(halves[0], 10, creel=False)

class Own(Dataset):
    def __getitem__(self, index):
        return index

own = Own()

class Files(Dataset):
    def __len__(self):
        return 5
    def __getitem__(self, index):
        with open(f"file{index}", "rb") as f:
            return f.read()

files = Files()

class Broken(Files):
    def __getitem__(self, index):
        raise ValueError("cannot")

broken = Broken()

def failing():
    raise ValueError("no, thanks")
"""


@pytest.mark.usefixtures("daemon")
def test_data_of_a_program_is_found_in_memory_by_its_training(name: str, tmp_path: Path) -> None:
    (tmp_path / "records.bin").write_bytes(bytes(60_000))
    (tmp_path / "mydata.py").write_text(_PROGRAM)

    def warm(target: str, code: int = 0) -> str:
        return creel("--name", name, "warm", target, "--json", cwd=tmp_path, code=code)

    def reads_and_paths() -> tuple[int, list[str]]:
        answer = json.loads(creel("--name", name, "stats", "--json"))
        return sum(s["reads"] for s in answer["sources"]), [s["path"] for s in answer["sources"]]

    assert json.loads(warm("mydata:records"))["resident"] == 600
    reads, paths = reads_and_paths()
    assert paths == [str(tmp_path / "records.bin")]
    for other in ("mydata:Half.first", "mydata:halves"):
        warm(other, code=0 if other == "mydata:Half.first" else 2)
    assert reads_and_paths() == (reads, paths), "the subset's file is the same dataset"
    loop = "list(creel.DataLoader(mydata.records(), 10, shuffle=True))"
    train(name, f"import creel, mydata; {loop}", tmp_path)
    assert reads_and_paths() == (reads, paths)
    assert "cannot be read by number" in warm("mydata:own", code=2)
    assert "ValueError: cannot" in warm("mydata:broken", code=1)
    assert "raised ValueError: no, thanks" in warm("mydata:failing", code=1)
    assert "no module" in warm("nomodule:x", code=2).lower()


@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize("direct", ["auto", "never"])
def test_files_that_a_dataset_opens_itself_are_read_and_warmed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: str
) -> None:
    """Its training records them in the first epoch and finds them in memory from the second on.

    They have just been written and lie in the page cache, where training itself needs no daemon.
    """
    monkeypatch.setenv("CREEL_LOADER__DIRECT", direct)
    (tmp_path / "mydata.py").write_text(_PROGRAM)
    (tmp_path / "records.bin").write_bytes(bytes(60_000))
    for i in range(5):
        (tmp_path / f"file{i}").write_bytes(bytes(1000))
    answer = json.loads(creel("--name", name, "warm", "mydata:files", "--json", cwd=tmp_path))
    assert (answer["objects"], answer["resident"], answer["ended"]) == (5, 5, "complete")
    before = reads(name)
    loop = "loader = creel.DataLoader(creel.wrap(mydata.files), collate_fn=len, shuffle=True)"
    train(name, f"import creel, mydata; {loop}; [list(loader) for _ in range(3)]", tmp_path)
    assert reads(name) == before


@pytest.mark.usefixtures("daemon")
def test_one_run_is_told_of_alone(name: str, folder: Path) -> None:
    loop = f"list(creel.DataLoader(creel.FileDataset({str(folder)!r}), 6, collate_fn=len))"
    for _ in range(2):
        train(name, f"import creel; {loop}; {loop}", folder)
    whole, run = (
        json.loads(creel("--name", name, "stats", *more, "--json")) for more in ((), ("--run",))
    )
    assert (whole["ranks"][0]["batches"], run["ranks"][0]["batches"]) == (40, 20)
    assert (whole["sources"][0]["reads"], run["sources"]) == (60, [])
    first, second = whole["tiers"]["memory"], run["tiers"]["memory"]
    assert (first["misses"], second["misses"]) == (60, 0)
    assert 0 < second["hits"] < first["hits"]
    assert creel("--name", name, "stats", "--run").startswith("run ")


@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize("target", ["s{0..1}.tar", "."])
def test_shards_are_warmed_as_training_reads_them(name: str, tmp_path: Path, target: str) -> None:
    for shard in range(2):
        with tarfile.open(tmp_path / f"s{shard}.tar", "w") as tar:
            for i in range(10):
                member = tarfile.TarInfo(f"{shard}{i}.bin")
                member.size = 1000
                tar.addfile(member, io.BytesIO(bytes(1000)))
    answer = json.loads(creel("--name", name, "warm", target, "--json", cwd=tmp_path))
    assert (answer["objects"], answer["resident"], answer["nbytes"]) == (20, 20, 20_000)
    before = reads(name)
    loop = "creel.DataLoader(creel.TarDataset('s{0..1}.tar'), 5, collate_fn=len, shuffle=True)"
    train(name, f"import creel; list({loop})", tmp_path)
    assert reads(name) == before


@pytest.mark.parametrize("running", [False, True])
def test_a_daemon_is_started_to_be_warmed_and_loads_in_the_background(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, running: bool
) -> None:
    """It stays without a client until training begins, also one that a loader has started."""
    monkeypatch.setenv("CREEL_MEMORY__BUDGET", "64MiB")
    monkeypatch.setenv("CREEL_DAEMON__LINGER_S", "0.2")
    trainer = connect_or_start(Config.load({"daemon.name": name})[0]) if running else None
    assert (trainer is not None) == running
    answer = json.loads(creel("--name", name, "warm", str(folder), "--background", "--json"))
    if trainer is not None:
        trainer.close()
    assert (answer["objects"], answer["ended"], answer["path"]) == (60, "background", str(folder))
    try:
        status = json.loads(creel("--name", name, "status", "--json"))
        assert status["embedded"]

        def loaded() -> bool:
            (row,) = json.loads(creel("--name", name, "ls", "--json"))["datasets"]
            return bool(row["resident_objects"] == 60)

        until(loaded, event="all is in memory, though nobody waits for it")
        alone = time.monotonic() + 1.0  # five times `daemon.linger_s`
        until(lambda: loaded() and time.monotonic() > alone, event="it has stayed")
    finally:
        creel("--name", name, "stop", "--now")
    until(lambda: forked("--name", name, "status")[0] == 3, event="the daemon has ended")
    for nothing in ("/nope", "mydata:absent"):
        assert "started" not in forked("--name", name, "warm", nothing)[2]
        creel("--name", name, "status", code=3)
    monkeypatch.setenv("CREEL_LOADER__EMBED", "false")
    creel("--name", name, "warm", str(folder), code=3)
    creel("--name", name, "warm", "/nope", code=3)
    creel("--name", name, "warm", str(folder), "--time", "soon", code=2)
    creel("--name", name, "warm", str(folder), "--time", "1s", "--background", code=2)


@pytest.mark.usefixtures("daemon")
def test_tars_that_hold_no_samples_are_warmed_as_files(name: str, tmp_path: Path) -> None:
    for shard in range(2):
        (tmp_path / f"s{shard}.tar").write_bytes(bytes([shard]) * 10_000)
    answer = json.loads(creel("--name", name, "warm", "s{0..1}.tar", "--json", cwd=tmp_path))
    assert (answer["objects"], answer["resident"], answer["nbytes"]) == (2, 2, 20_000)
    assert "s2.tar" in forked("--name", name, "warm", "s{1..2}.tar", cwd=tmp_path)[2]


@pytest.mark.usefixtures("daemon")
def test_one_file_is_warmed(name: str, tmp_path: Path) -> None:
    (tmp_path / "one.bin").write_bytes(bytes(1000))
    answer = json.loads(creel("--name", name, "warm", "one.bin", "--json", cwd=tmp_path))
    assert (answer["objects"], answer["resident"], answer["nbytes"]) == (1, 1, 1000)


@pytest.mark.usefixtures("daemon")
def test_objects_that_find_no_room_have_not_failed(name: str, folder: Path) -> None:
    """Lengths of local files are known only once they are read."""
    for i in range(3):
        (folder / f"large{i}.bin").write_bytes(bytes(30 << 20))
    answer = json.loads(creel("--name", name, "warm", str(folder), "--json"))
    assert (answer["objects"], answer["resident"], answer["failed"]) == (63, 62, 0)
    (folder / "c0/gone.bin").symlink_to("nowhere")
    assert "1 failed" in creel("--name", name, "warm", str(folder))


@pytest.mark.usefixtures("daemon")
def test_no_key_in_an_address_is_shown(name: str, folder: Path) -> None:
    with Server(folder) as server:
        address = server.url.replace("://", "://me:hush@")
        assert "hush" not in creel("--name", name, "warm", f"{address}/c1", "--json")
        for words in (["stats"], ["stats", "--json"], ["status", "--json"]):
            output = creel("--name", name, *words)
            assert "hush" not in output
            assert words != ["stats"] or f"{server.url}/c1: 20 reads" in output


def test_watching_prints_one_object_per_line(daemon: subprocess.Popen[bytes], name: str) -> None:
    assert daemon.poll() is None
    words = [*CREEL, "--name", name, "stats", "--watch", "--json", "--interval", "0.1"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        lines = [json.loads(watching.stdout.readline()) for _ in range(3)]
        watching.send_signal(signal.SIGINT)
        assert watching.wait(60) == 130
    assert all(line["schema"] == 1 for line in lines)


def test_run_gives_the_command_a_daemon_and_takes_its_exit_code() -> None:
    code = (
        "import os, sys; from creel.loader.client.client import Client;"
        "c = Client.connect(os.environ['CREEL_SOCKET'], 'cli'); told = c.ask('status'); c.close();"
        "print(told['name'], os.environ['CREEL_SOCKET'], told['memory']['budget_nbytes']);"
        "sys.exit(7)"
    )
    out = creel("run", "--memory", "32MiB", "--", sys.executable, "-c", code, code=7)
    theirs, ours, budget = out.split()
    assert theirs == ours
    assert theirs.startswith("run-")
    assert budget == str(32 << 20)
    creel("--name", theirs, "status", code=3)


def test_run_takes_no_options_of_the_command() -> None:
    out = creel("run", "--memory", "8MiB", sys.executable, "-c", "print(0)", "--memory", "--help")
    assert out == "0\n"


@pytest.mark.parametrize("gib", [1, 8])
def test_run_runs_the_command_whatever_address_space_its_queue_allows(gib: int) -> None:
    """SGE's h_vmem and PBS's pvmem set `ulimit -v`, often to 4 GB, which a daemon may not fit."""
    limited = 'ulimit -v "$0"; exec "$@"'
    words = [*CREEL, "run", "--memory", "50%", "--", "sh", "-c", "echo ran; exit 7"]
    done = subprocess.run(
        ["sh", "-c", limited, str(gib << 20), *words],
        env=os.environ | {"CREEL_DAEMON__LINGER_S": "0"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (7, "ran\n"), done.stderr


def test_run_runs_the_command_where_the_daemon_cannot_start(name: str, served: str) -> None:
    """A budget beyond the machine's, a name that is taken: the job has waited in a queue."""
    for words in (["--name", name, "run", "--memory", "900TiB"], ["--name", served, "run"]):
        code, _, err = forked(*words, "--", "sh", "-c", "echo ran; exit 7")
        assert (code, err.count("sh runs without a daemon of its own")) == (7, 1), err


def test_run_hands_signals_on_and_tells_by_which_one_it_ended(name: str) -> None:
    words = ["--name", name, "run", "--memory", "32MiB", "--", "sleep", "150"]
    with subprocess.Popen([*CREEL, *words]) as running:
        until(lambda: bool(_children_named(running.pid, "sleep")), event="the command runs")
        running.send_signal(signal.SIGTERM)
        assert running.wait(60) == 128 + signal.SIGTERM
    creel("--name", name, "status", code=3)


@pytest.mark.parametrize("starting", [True, False])
def test_no_daemon_outlives_a_run_that_is_killed(
    name: str, monkeypatch: pytest.MonkeyPatch, *, starting: bool
) -> None:
    monkeypatch.setenv("CREEL_DAEMON__LINGER_S", "0")
    monkeypatch.setenv("CREEL_SOCKET", name)
    words = ["--name", name, "run", "--memory", "32MiB", "--", "sleep", "50"]
    with subprocess.Popen([*CREEL, *words]) as running:
        if starting:
            until(lambda: bool(_daemons()), event="its daemon is being started")
            running.terminate()
        else:
            until(lambda: bool(_children_named(running.pid, "sleep")), event="the command runs")
            (sleeping,) = _children_named(running.pid, "sleep")
            running.kill()
            os.kill(sleeping, signal.SIGKILL)
        assert running.wait(60) != 0
    until(lambda: not _daemons(), event="its daemon ends")


def _daemons() -> list[psutil.Process]:
    """Return the daemons of this test's name."""
    processes = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            named = process.environ().get("CREEL_SOCKET") == os.environ["CREEL_SOCKET"]
            if named and "creel.daemon" in process.cmdline():
                processes.append(process)
    return processes


def test_ctrl_c_is_the_commands_to_decide(name: str) -> None:
    code = (
        "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT]);"
        "print('begun', flush=True);"
        "signal.sigwait([signal.SIGINT]); print('goes on', flush=True); input()"
    )
    words = ["--name", name, "run", "--memory", "32MiB", "--", sys.executable, "-c", code]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([*CREEL, *words], start_new_session=True, **pipes) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == b"begun\n"
        os.killpg(running.pid, signal.SIGINT)
        assert running.stdout.readline() == b"goes on\n"
        assert json.loads(creel("--name", name, "status", "--json"))["state"] == "serving"
        running.communicate(b"\n", 60)
    assert running.returncode == 0


def test_ctrl_c_while_the_command_is_started_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **given: Any) -> None:
            super().__init__(*args, **given)
            signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    assert run._run(["sh", "-c", "exit 3"], dict(os.environ)) == 3
    assert signal.getsignal(signal.SIGINT) is before


def _children_named(pid: int, word: str) -> list[int]:
    pids = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            _, comm, fields = status.read_text().replace("(", ")").split(")")
        except (OSError, ValueError):
            continue
        if comm == word and int(fields.split()[1]) == pid:
            pids.append(int(status.parent.name))
    return pids


@pytest.mark.parametrize("closed", ["2>&-", "<&- >&- 2>&-"])
def test_commands_need_no_standard_files(name: str, tmp_path: Path, closed: str) -> None:
    """`creel run` ran nothing, and `creeld` ended at once; neither could say why."""
    settings = os.environ | {"CREEL_SOCKET": name, "CREEL_MEMORY__BUDGET": "8MiB"}
    for words in ([], ["--", "touch", str(tmp_path / "ran")]):
        command = ["sh", "-c", f'exec "$@" {closed}', "sh", *CREEL, "run", *words]
        with subprocess.Popen(command, env=settings) as running:
            if not words:
                until(lambda: forked("--name", name, "status")[0] == 0, event="it serves")
                running.terminate()
        assert running.returncode == 0
    assert (tmp_path / "ran").exists()
