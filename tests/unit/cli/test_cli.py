"""The command line without a daemon: exit codes, JSON, the manual."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import click
import pytest
from cli_rig import STATS, STATUS, FakeClient, answering

from creel.cache.storage.manifest import Manifest
from creel.cli import main, run, targets, warm
from creel.cli.commands import daemon as daemon_commands
from creel.cli.watching import stats
from creel.config import Config
from creel.errors import ConfigError, CreelError, NoDaemonError, UnavailableError
from creel.loader.client import embed
from creel.loader.client.client import Client
from creel.loader.data.datasets.files import FileDataset


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeClient]:
    yield from answering(monkeypatch)


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(*_args: object, **_more: object) -> None:
        raise NoDaemonError("nobody listens")

    monkeypatch.setattr(Client, "connect", connect)
    monkeypatch.delenv("CREEL_SOCKET", raising=False)


def test_a_terminal_without_utf8_shows_what_it_can() -> None:
    ours, terminal = pty.openpty()
    env = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    scenario = "--nodes 1 --samples 9 --sample-size 1kB --memory 1MB --batch 3 --epochs 1"
    command = [sys.executable, "-m", "creel", "simulate", *scenario.split()]
    with os.fdopen(ours, "rb", 0) as shown, os.fdopen(terminal, "wb") as out:
        run = subprocess.run(
            command, stdout=out, stderr=subprocess.PIPE, env=env, timeout=110, check=False
        )
        assert (run.returncode, run.stderr) == (0, b"")
        assert b"epoch" in shown.read(1000)


def test_top_says_where_a_terminal_cannot_show_it() -> None:
    """It showed nothing at all in Emacs' shell."""
    ours, terminal = pty.openpty()
    command = [sys.executable, "-m", "creel", "top"]
    with os.fdopen(ours), os.fdopen(terminal, "r+b", 0) as both:
        run = subprocess.run(
            command,
            stdin=both,
            stdout=both,
            stderr=subprocess.PIPE,
            env={**os.environ, "TERM": "dumb"},
            timeout=110,
            check=False,
        )
    assert run.returncode == 2
    assert b"use `creel stats --watch`" in run.stderr


@pytest.mark.parametrize("command", ["config show", "config show --json", "--help"])
def test_a_closed_pipe_ends_a_command_well(command: str) -> None:
    """`creel stats | head`, in a script with `set -o pipefail`."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as closed:
        run = subprocess.run(
            [sys.executable, "-m", "creel", *command.split()],
            stdout=closed,
            stderr=subprocess.PIPE,
            timeout=110,
            check=False,
        )
    assert (run.returncode, run.stderr) == (0, b"")


@pytest.mark.parametrize("command", ["status", "stats", "stop", "warm ."])
@pytest.mark.usefixtures("nobody")
def test_without_a_daemon_the_exit_code_is_3_and_the_sentence_helps(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CREEL_LOADER__EMBED", "false")  # `warm` starts one, if it may
    assert main.main(command.split()) == 3
    said = capsys.readouterr()
    assert "no daemon named 'default' runs for you: a DataLoader starts one" in said.err
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
def test_failures_are_json_too_with_json(
    words: list[str], code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(words) == code
    said = capsys.readouterr()
    answer = json.loads(said.out)
    assert answer["schema"] == 1
    assert answer["error"].startswith(says)
    assert says in said.err


def test_a_script_that_is_not_there_is_found_out_without_torch() -> None:
    code = (
        "import sys; from creel.cli import main;"
        "assert main.main(['verify', '/nonexistent.py']) == 2;"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=110)


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
    for command, answer in (("status", STATUS), ("stats", STATS)):
        assert main.main([command, "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == {"schema": 1, **answer}
    assert [command for command, _ in daemon.asked] == ["status", "stats"]


def test_a_dataset_that_is_dropped_while_it_is_loaded_ends_the_loading(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(targets, "folder_manifest", lambda _: Manifest.of_files(["/a"]))
    client: Any = mock.Mock(ask=mock.Mock(return_value={"datasets": [{"dataset": "another"}]}))
    monkeypatch.setattr(warm, "_daemon", lambda _: nullcontext(client))
    with pytest.raises(CreelError, match="dropped"):
        warm.warm(Config(), "/", quiet=True)


def test_a_file_is_what_training_makes_of_it(tmp_path: Path) -> None:
    """So that both share one copy; no torch is needed for it."""
    (tmp_path / "a b").write_bytes(b"1")
    path = str(tmp_path / "a b")
    manifest = targets.manifest_of_target(path, "any")
    assert manifest.key == FileDataset([path]).manifest.key


def test_loading_ends_when_its_time_is_over_and_the_daemon_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(targets, "folder_manifest", lambda _: Manifest.of_files(["/a", "/b"]))
    row = {"dataset": "d", "path": "/", "resident_objects": 1, "resident_nbytes": 5}
    asked: list[dict[str, Any]] = []

    def ask(command: str, **args: Any) -> dict[str, Any]:
        if command == "warm":
            asked.append(args)
        return {"datasets": [row]} if command == "datasets" else row

    client: Any = mock.Mock(ask=ask, register=lambda _: "d")
    monkeypatch.setattr(warm, "_daemon", lambda _: nullcontext(client))
    answer = warm.warm(Config(), "/", quiet=True, time_s=0.0)
    assert (answer["ended"], answer["resident"], answer["objects"]) == ("time", 1, 2)
    assert asked == [{"dataset": "d", "linger_s": warm.LINGER_S}, {"dataset": "d", "stop": True}]
    assert "1 of 2 files (5 B) in memory" in warm.sentence(answer)
    assert "the time is over" in warm.sentence(answer)
    answer = warm.warm(Config(), "/", quiet=True, background=True)
    assert answer["ended"] == "background"
    assert warm.sentence(answer) == "loading 2 files: `creel ls` shows how far it is"


def test_stop_says_when(daemon: FakeClient, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["stop"]) == 0
    assert main.main(["stop", "--now"]) == 0
    assert daemon.asked == [("stop", {"now": False}), ("stop", {"now": True})]
    assert "once its clients have disconnected" in capsys.readouterr().err


def test_settings_are_printed_as_toml_that_loads_again(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CREEL_FETCH__THREADS", "7")
    monkeypatch.delenv("CREEL_SOCKET", raising=False)
    monkeypatch.delenv("CREEL_LOADER__DIRECT")
    monkeypatch.delenv("CREEL_MEMORY__RESERVE")
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


@pytest.mark.parametrize("words, code", [(["status"], 3), (["run"], 2), (["run", "true"], 2)])
def test_elsewhere_than_on_linux_there_is_no_daemon(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], code: int
) -> None:
    for module in (daemon_commands, stats):
        monkeypatch.setattr(module, "sys", mock.Mock(wraps=sys, platform="darwin"))
    assert main.main(words) == code
    assert "the daemon needs Linux" in capsys.readouterr().err


def test_run_refuses_a_missing_program_before_it_starts_anything() -> None:
    with pytest.raises(ConfigError, match="program not found"):
        run.check_command("/nowhere/python")


@pytest.mark.parametrize(
    "failure",
    ["", "0no memory", UnavailableError("no process can be started"), MemoryError(), ImportError()],
)
def test_a_command_runs_also_where_no_daemon_starts(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], failure: str | Exception
) -> None:
    """It ended, was late, or could not be started; the training reads directly then."""

    class Never:
        def __init__(self, *_: object, **__: object) -> None:
            if isinstance(failure, Exception):
                raise failure

        def report(self, _: float) -> str:
            return str(failure)

        def close(self) -> None:
            pass

    monkeypatch.setattr(embed, "DaemonStart", Never)
    assert main.main(["run", "--", "sh", "-c", "echo trained; exit 7"]) == 7
    output = capfd.readouterr()
    assert output.out == "trained\n"
    assert "sh runs without a daemon of its own" in output.err


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from creel.cli import main;"
        "code = main.main(['--help']);"
        "heavy = {'torch', 'numpy', 'pyarrow', 'zmq', 'rich', 'msgspec'} & set(sys.modules);"
        "assert code == 0 and not heavy, heavy"
    )
    env = {k: v for k, v in os.environ.items() if not k.startswith("COV")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    assert b"verify" in done.stdout


def _commands() -> dict[str, click.Command]:
    """Return all commands by their words."""
    commands: dict[str, click.Command] = {}
    for name, command in main.creel.commands.items():
        if isinstance(command, click.Group):
            commands |= {
                f"{name} {inner}": inner_command
                for inner, inner_command in command.commands.items()
            }
        else:
            commands[name] = command
    return commands


@pytest.mark.parametrize("command", sorted(_commands()))
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main([*command.split(), "--help"]) == 0
    assert len(capsys.readouterr().out.splitlines()) > 3


def test_every_command_that_reads_offers_json() -> None:
    acts = {"run", "top", "service install", "service show", "slurm show", "pbs show", "example"}
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


def test_the_list_of_commands_fits_into_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for group in ([], ["service"], ["slurm"], ["pbs"], ["config"]):
        assert main.main([*group, "--help"]) == 0
        _, _, listed = capsys.readouterr().out.partition("\nCommands:\n")
        assert listed
        assert "..." not in listed
