"""The command line without a daemon: exit codes, JSON, what a person sees."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any
from unittest import mock

import click
import pytest

from creel.cache.storage.manifest import Manifest
from creel.cli import doctor, main, run, view, warm
from creel.config import Config
from creel.errors import ConfigError, CreelError, NoDaemonError, UnavailableError
from creel.loader.client.client import Client
from creel.version import VERSION

STATUS: dict[str, Any] = {
    "name": "default",
    "pid": 7,
    "version": "0.1.0",
    "embedded": False,
    "state": "serving",
    "uptime_s": 75.0,
    "memory": {"budget_nbytes": 64 << 30, "used_nbytes": 16 << 30, "held_nbytes": 0},
    "clients": 2,
    "sessions": 1,
    "datasets": 1,
}
SESSION: dict[str, Any] = {
    "session": 1,
    "job": "resnet",
    "rank": 3,
    "world": 8,
    "pid": 70,
    "dataset": "d",
    "done": 100,
    "ready": 164,
    "ahead": 64,
    "known": 5000,
    "batches": 100,
    "samples": 25600,
    "nbytes": 3_840_000_000,
    "direct_reads": 2,
    "direct_nbytes": 300_000,
    "stall_s": {"source": 0.5, "decode": 12.0, "collate": 0.0, "daemon": 0.0, "sampler": 0.0},
    "busy_s": {"source": 1.0, "decode": 30.0, "collate": 2.0, "handover": 0.5},
    "failed": 1,
    "lead_s": 300.0,
    "lead_now_s": 4.0,
}
STATS: dict[str, Any] = {
    "memory": STATUS["memory"],
    "tiers": {"memory": {"hits": 900, "misses": 100, "evictions": {"room": 5}}},
    "sources": [{"source": "/data", "opens": 100, "reads": 100, "nbytes": 10 << 20, "retries": 3}],
    "sessions": [SESSION],
    "ranks": [SESSION],
}


class FakeClient:
    """Answers as a daemon would."""

    daemon_pid = 7

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, object]]] = []
        self.closed = False

    def ask(self, what: str, **args: object) -> dict[str, Any]:
        self.asked.append((what, args))
        return {"status": STATUS, "stats": STATS, "stop": {}}[what]

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeClient]:
    fake = FakeClient()
    monkeypatch.setattr(Client, "connect", lambda *_args, **_more: fake)
    yield fake
    assert fake.closed or not fake.asked


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(*_args: object, **_more: object) -> None:
        raise NoDaemonError("nobody listens")

    monkeypatch.setattr(Client, "connect", connect)
    monkeypatch.delenv("CREEL_SOCKET", raising=False)


@pytest.mark.parametrize("command", ["status", "stats", "stop", "warm ."])
@pytest.mark.usefixtures("nobody")
def test_without_a_daemon_the_exit_code_is_3_and_the_sentence_helps(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(command.split()) == 3
    said = capsys.readouterr()
    assert "no daemon named 'default' runs for you: start one with `creel run`" in said.err
    assert said.out == ""


@pytest.mark.usefixtures("nobody")
@pytest.mark.parametrize(
    "words, code, says",
    [
        (["status", "--json"], 3, "no daemon named 'default' runs for you"),
        (["stats", "--watch", "--json"], 3, "no daemon named 'default' runs for you"),
        (["--name", "a b", "doctor", "--json"], 2, "flag --name: daemon.name = 'a b' should be"),
        (["verify", "--json", "/nonexistent.py"], 2, "there is no script /nonexistent.py"),
        (["warm", "--json"], 2, "Missing argument"),
    ],
)
def test_who_asks_for_json_is_told_of_a_failure_in_json(
    words: list[str], code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(words) == code
    said = capsys.readouterr()
    told = json.loads(said.out)
    assert told["schema"] == 1
    assert told["error"].startswith(says)
    assert says in said.err


def test_a_script_that_is_not_there_is_found_out_without_torch() -> None:
    code = (
        "import sys; from creel.cli import main;"
        "assert main.main(['verify', '/nonexistent.py']) == 2;"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def checked(name: str, ask: Callable[[str], dict[str, object]] = lambda _: STATUS) -> Any:
    """What the doctor finds of one thing."""
    (found,) = (one for one in doctor.checks(Config(), ask) if one.name == name)
    return found


def test_a_checkout_without_an_installation_knows_its_version(
    daemon: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(STATUS, "version", "0.0.1")
    monkeypatch.setattr(doctor, "version", mock.Mock(side_effect=PackageNotFoundError))
    check = checked("daemon", daemon.ask)
    assert f"this is creel {VERSION}:" in check.remedy
    daemon.close()


@pytest.mark.parametrize(
    "words",
    [
        *("bogus", "status --bogus", "stats --interval 0", "warm", "verify", "config", "top"),
        *("stats --interval nan", "stats --interval inf", "top --interval nan"),
    ],
)
def test_wrong_usage_is_2(words: str) -> None:
    assert main.main(words.split()) == 2


@pytest.mark.parametrize(
    "words, says",
    [
        (["--name", "a b", "status"], "daemon.name = 'a b' should be"),
        (["run", "--memory", "lots"], "memory.budget = 'lots' should be"),
        (["run", "--", "no-such-program"], "program not found: 'no-such-program'"),
    ],
)
def test_an_impossible_value_is_2_and_names_itself(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(words) == 2
    assert says in capsys.readouterr().err


def test_json_is_what_the_daemon_said_with_a_schema_number(
    daemon: FakeClient, capsys: pytest.CaptureFixture[str]
) -> None:
    for command, told in (("status", STATUS), ("stats", STATS)):
        assert main.main([command, "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == {"schema": 1, **told}
    assert [what for what, _ in daemon.asked] == ["status", "stats"]


def test_a_pipe_gets_plain_columns(daemon: FakeClient, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["status"]) == 0
    assert main.main(["stats"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "16.0 GiB of 64.0 GiB used (25 %)" in out
    assert "hits in memory       900 of 1,000 (90.0 %)" in out
    assert "read from            /data: 100 reads, 100 opens, 10.0 MiB\n" in out
    assert "  trouble there      3 retries\n" in out
    row, *by_stage, title, header, stalls = (line.split() for line in out.splitlines()[-7:])
    said = "resnet 3 100 64 4.0 s 100 25,600 3.58 GiB 2 293 KiB 1 3.0 s 33.5 s 12.5 s"
    assert " ".join(row) == said
    assert by_stage[0] == ["busy", "by", "stage"]
    assert by_stage[1] == ["job", "rank", *SESSION["busy_s"]]
    assert by_stage[2] == ["resnet", "3", "1.0", "s", "30.0", "s", "2.0", "s", "0.5", "s"]
    assert title == ["stall", "by", "cause"]
    assert header == ["job", "rank", *SESSION["stall_s"]]
    assert stalls == ["resnet", "3", "0.5", "s", "12.0", "s", "0.0", "s", "0.0", "s", "0.0", "s"]
    assert daemon.closed


def test_what_was_counted_is_shown_when_training_is_over(
    daemon: FakeClient, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = ("batches", "samples", "nbytes", "direct_reads", "stall_s")
    over = {"job": "", "rank": 3} | {k: SESSION[k] for k in counted}
    monkeypatch.setitem(STATS, "sessions", [])
    monkeypatch.setitem(STATS, "ranks", [over])
    assert main.main(["stats"]) == 0
    lines = capsys.readouterr().out.splitlines()[-8:]
    row = " ".join(lines[1].split())
    assert row == "- 3 100 25,600 3.58 GiB 2 0 B 0 0.0 s 0.0 s 12.5 s"
    assert lines[7].split()[:4] == ["-", "3", "0.5", "s"]
    assert daemon.closed


CAUSES: dict[str, float] = dict.fromkeys(SESSION["stall_s"], 0.0)
FULL = {"memory": {"budget_nbytes": 100 << 20, "used_nbytes": 95 << 20}}


@pytest.mark.parametrize(
    ("changes", "node", "says"),
    [
        ({"batches": 0}, {}, "no batch was taken yet"),
        ({"stall_s": CAUSES | {"decode": 0.1}}, {}, "faster data would gain nothing"),
        ({"stall_s": CAUSES | {"decode": 90.0}}, {}, "waited 1 min 30 s for 100 batches, 100 % of"),
        ({"stall_s": CAUSES | {"decode": 90.0}}, {}, "creel.wrap"),
        ({"stall_s": CAUSES | {"collate": 90.0}}, {}, "collation"),
        ({"stall_s": CAUSES | {"sampler": 90.0}}, {}, "your sampler"),
        ({"stall_s": CAUSES | {"daemon": 90.0}}, {}, "persistent_workers=True"),
        ({"stall_s": CAUSES | {"source": 90.0}}, {}, "for the first time"),
        (
            {"stall_s": CAUSES | {"source": 90.0}},
            FULL,
            "memory (100 MiB) cannot hold all objects: 100 of",
        ),
        ({"stall_s": CAUSES | {"source": 90.0}, "direct_reads": 20_000}, FULL, "read directly"),
    ],
)
@pytest.mark.usefixtures("daemon")
def test_why_is_one_sentence_with_what_would_help(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    node: dict[str, Any],
    says: str,
) -> None:
    for key, value in node.items():
        monkeypatch.setitem(STATS, key, value)
    monkeypatch.setitem(STATS, "sessions", [SESSION | changes])
    assert main.main(["stats", "--why"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("resnet rank 3: ")
    assert says in out
    assert out.count("\n") == 1
    assert main.main(["stats", "--why", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["why"]
    assert says in row["why"]
    assert row["pid"] == 70


@pytest.mark.parametrize(("word", "coloured"), [("", True), ("1", False)])
def test_no_color_is_heeded_on_a_terminal(
    word: str, *, coloured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pty

    monkeypatch.setenv("NO_COLOR", word)
    ours, theirs = pty.openpty()
    code = "from creel.cli.main import main; main(['--name', 'nobody-at-all', 'status'])"
    try:
        subprocess.run([sys.executable, "-c", code], stdout=theirs, stderr=theirs, check=True)
        said = os.read(ours, 4096)
    finally:
        os.close(ours)
        os.close(theirs)
    assert b"no daemon named 'nobody-at-all'" in said
    assert (b"\x1b[" in said) == coloured


def test_a_dataset_that_is_dropped_while_it_is_loaded_ends_the_loading(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(warm, "folder_manifest", lambda _: Manifest.of_files(["/a"]))
    client: Any = mock.Mock(ask=mock.Mock(return_value={"datasets": [{"dataset": "another"}]}))
    with pytest.raises(CreelError, match="dropped"):
        warm.warm(client, "/", quiet=True)


def test_stop_says_when(daemon: FakeClient, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["stop"]) == 0
    assert main.main(["stop", "--now"]) == 0
    assert daemon.asked == [("stop", {"now": False}), ("stop", {"now": True})]
    assert "once its clients have disconnected" in capsys.readouterr().err


def test_rates_are_differences_over_time() -> None:
    later = SESSION | {
        "samples": SESSION["samples"] + 5000,
        "nbytes": SESSION["nbytes"] + (50 << 20),
        "batches": SESSION["batches"] + 50,
        "lead_s": SESSION["lead_s"] + 100,
        "stall_s": SESSION["stall_s"] | {"source": 1.0},
        "busy_s": SESSION["busy_s"] | {"decode": 33.0},
    }
    row = view.top_row(later, SESSION, 2.0)
    rates = ("25", "2,500", "25.0 MiB", "2", "293 KiB", "1", "2.0 s", "150 %", "25 %")
    assert row[5:] == (*rates, "source", "25 %", *["0 %"] * 4)


def test_top_misses_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    import pty

    from creel.cli import top

    ours, theirs = pty.openpty()
    with open(theirs) as terminal:  # noqa: PTH123  a descriptor
        monkeypatch.setattr("sys.stdin", terminal)
        with top.keys() as pressed:
            os.write(ours, b"xq")
            assert pressed(10) == "xq"
            assert pressed(0) == ""
    os.close(ours)


def test_rates_begin_where_a_stream_was_first_told_of() -> None:
    from creel.cli import top

    first, later = SESSION, SESSION | {"samples": 9}
    other = SESSION | {"session": 2}
    past = [(1.0, STATS | {"sessions": [first]}), (3.0, STATS | {"sessions": [later, other]})]
    assert top.starts(past, 4.0) == {1: (first, 3.0), 2: (other, 1.0)}


@pytest.mark.parametrize(
    ("width", "last"), [(60, "mostly"), (80, "mostly"), (110, "mostly"), (190, "sampler")]
)
def test_the_live_picture_fits_and_cuts_no_number(width: int, last: str) -> None:
    from io import StringIO

    from rich.console import Console

    from creel.cli import top

    wide = SESSION | {"job": "a-rather-long-job-name", "done": 4_200_000, "ready": 4_200_256}
    told = STATS | {"sessions": [wide, SESSION]}
    out = StringIO()
    console = Console(file=out, width=width, force_terminal=True, color_system=None)
    console.print(top.screen(STATUS, told, {1: (SESSION, 1.0)}, width))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert "…" not in out.getvalue()
    header, row = (next(i for i in lines if w in i) for w in ("samples/s", "a-rather-lon"))
    assert header.split()[-1] == last
    assert {"job", "rank", "stall"} <= set(header.split())
    assert ("4.20 M" in row) == ("step" in header)


def test_status_does_not_count_the_one_who_asks() -> None:
    assert ("in use", "1 client, 1 session, 1 dataset") in view.status_pairs(STATUS)
    assert ("in use", "0 clients, 1 session, 1 dataset") in view.status_pairs(
        STATUS | {"clients": 1}
    )


def test_settings_are_printed_as_toml_that_loads_again(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CREEL_FETCH__THREADS", "7")
    monkeypatch.delenv("CREEL_SOCKET", raising=False)
    monkeypatch.delenv("CREEL_LOADER__DIRECT")
    assert main.main(["config", "show"]) == 0
    shown = capsys.readouterr().out
    monkeypatch.delenv("CREEL_FETCH__THREADS")
    (tmp_path / "creel.toml").write_text(shown)
    monkeypatch.chdir(tmp_path)
    assert main.main(["config", "show", "--origin", "--json"]) == 0
    settings = json.loads(capsys.readouterr().out)["settings"]
    assert settings["fetch.threads"] == {"value": 7, "origin": str(tmp_path / "creel.toml")}
    assert main.main(["config", "show", "--origin"]) == 0
    assert "CREEL" not in capsys.readouterr().out


def test_doctor_gives_every_trouble_a_remedy(
    daemon: FakeClient, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(STATUS, "version", "0.0.1")
    assert main.main(["doctor", "--json"]) == 0
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert {c["name"] for c in checks} >= {"memfd", "descriptors", "locked memory", "/dev/shm"}
    assert all(c["remedy"] for c in checks if c["level"] != "ok")
    (skew,) = [c for c in checks if c["name"] == "daemon"]
    assert skew["level"] == "warn"
    assert "creel stop" in skew["remedy"]
    assert daemon.closed


@pytest.mark.parametrize("words, code", [(["status"], 3), (["run"], 2), (["run", "true"], 2)])
def test_elsewhere_than_on_linux_there_is_no_daemon(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], code: int
) -> None:
    monkeypatch.setattr(main, "sys", mock.Mock(wraps=sys, platform="darwin"))
    assert main.main(words) == code
    assert "the daemon needs Linux" in capsys.readouterr().err


def test_elsewhere_than_on_linux_doctor_and_env_say_what_they_can(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    monkeypatch.delattr("os.sched_getaffinity")
    monkeypatch.delattr("os.memfd_create")
    assert main.main(["doctor"]) == 1
    assert "the daemon needs Linux" in capsys.readouterr().out
    assert main.main(["env"]) == 0


def test_doctor_ends_with_1_when_something_cannot_work(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect(*_args: object, **_more: object) -> None:
        raise UnavailableError("it does not answer")

    monkeypatch.setattr(Client, "connect", connect)
    monkeypatch.setenv("CREEL_MEMORY__BUDGET", "900TB")
    assert main.main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "bad   daemon" in out
    assert "more than this node has" in out


def test_two_daemons_of_one_user_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "daemon_pids", lambda: iter([3, 4]))
    check = checked("daemons")
    assert check.level == "warn"
    assert "pids 3, 4" in check.found


def test_env_names_versions_and_our_variables(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CREEL_LOG_LEVEL", "debug")
    monkeypatch.setenv("CREEL_CLUSTER_KEY", "0123456789abcdef")
    assert main.main(["env", "--json"]) == 0
    out = capsys.readouterr().out
    told = json.loads(out)
    assert told["CREEL_LOG_LEVEL"] == "debug"
    assert "CREEL_CLUSTER_KEY" in told
    assert "0123456789abcdef" not in out
    assert told["python"] == sys.version.split()[0]


def test_run_refuses_a_missing_program_before_it_starts_anything() -> None:
    with pytest.raises(ConfigError, match="program not found"):
        run.check_command("/nowhere/python")


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from creel.cli import main;"
        "code = main.main(['--help']);"
        "heavy = {'torch', 'numpy', 'pyarrow', 'zmq', 'rich', 'msgspec'} & set(sys.modules);"
        "assert code == 0 and not heavy, heavy"
    )
    env = {k: v for k, v in os.environ.items() if not k.startswith("COV")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    assert b"verify" in done.stdout


def _commands() -> dict[str, click.Command]:
    """All commands by the words that call them."""
    found: dict[str, click.Command] = {}
    for name, command in main.creel.commands.items():
        if isinstance(command, click.Group):
            found |= {f"{name} {inner}": one for inner, one in command.commands.items()}
        else:
            found[name] = command
    return found


def _manual(command: str) -> str:
    """The manual's synopsis and text of one command."""
    manual = Path(__file__).parent.parent.parent / "docs/cli.md"
    _, start, rest = manual.read_text().partition(f"**creel {command}**")
    assert start, f"the manual has no {command}"
    return rest.partition("\n**creel ")[0].partition("\n## ")[0]


@pytest.mark.parametrize("command", sorted(_commands()))
def test_every_command_explains_itself_and_is_in_the_manual(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main([*command.split(), "--help"]) == 0
    helped = capsys.readouterr().out
    assert len(helped.splitlines()) > 3
    offered = set(re.findall(r"(?<!\S)--[a-z][a-z-]*", helped)) - {"--help"}
    synopsis = _manual(command).partition("\n:")[0]
    assert set(re.findall(r"--[a-z][a-z-]*", synopsis)) == offered


@pytest.mark.parametrize("option", ["--name", "--version", "--help"])
def test_the_options_of_all_commands_are_in_the_manual(option: str) -> None:
    assert option in {o for p in main.creel.params for o in p.opts} | {"--help"}
    manual = Path(__file__).parent.parent.parent / "docs/cli.md"
    assert option in manual.read_text().partition("## DESCRIPTION")[0]


def test_every_command_that_reads_offers_json() -> None:
    acts = {"run", "top"}
    for name, command in _commands().items():
        has = any("--json" in p.opts for p in command.params)
        assert has == (name not in acts), name


SIMULATE = "simulate --nodes 4 --samples 4k --sample-size 1kB --memory 512kB --batch 25 --epochs 3"


def test_a_simulated_job_is_a_table_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(SIMULATE.split()) == 0
    assert "handed on" in capsys.readouterr().out
    assert main.main([*SIMULATE.split(), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["steps"] == 40
    assert [round(epoch["source"], 2) for epoch in answer["epochs"]] == [1.0, 0.49, 0.49]


@pytest.mark.parametrize(
    "wrong", ["--samples 99", "--samples many", "--samples 3G", "--memory 5", "--sample-size 0"]
)
def test_a_job_that_cannot_be_simulated_is_wrong_usage(wrong: str) -> None:
    assert main.main([*SIMULATE.split(), *wrong.split()]) == 2
