"""What a person finds in `creel`, and files that come with it."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import creel
from creel.cli import main, shipped
from creel.errors import ConfigError

ROOT = Path(__file__).parents[3]


def test_dir_shows_the_public_names_only() -> None:
    assert sorted(dir(creel)) == sorted([*creel.__all__, "__version__"])
    assert all(hasattr(creel, name) for name in dir(creel))


@pytest.mark.parametrize(
    "wrong, right",
    [("Dataloader", "DataLoader"), ("imagefolder", "ImageFolder"), ("wrapp", "wrap")],
)
def test_a_misspelt_name_gets_a_suggestion(wrong: str, right: str) -> None:
    with pytest.raises(AttributeError, match=rf"'{wrong}'; did you mean creel\.{right}\?$"):
        getattr(creel, wrong)


@pytest.mark.parametrize(
    "program",
    [
        "import creel; print(creel.errors.ConfigError.__name__, creel.datasets.__name__)",
        (
            "from creel.errors import ConfigError as error; from creel.datasets import Transformed;"
            "import creel.datasets; print(error.__name__, creel.datasets.__name__)"
        ),
    ],
)
def test_the_stable_modules_are_there_however_they_are_imported(program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "ConfigError creel.datasets\n"


def test_a_name_like_no_other_gets_none() -> None:
    with pytest.raises(AttributeError, match=r"no attribute .quux.$"):
        getattr(creel, "quux")  # noqa: B009  its type is unknown otherwise


def test_the_page_on_stable_names_lists_all_of_them() -> None:
    page = (ROOT / "docs/stability.md").read_text()
    assert set(re.findall(r"`creel\.(\w+)`", page)) >= {*creel.__all__, "__version__"}


def test_a_service_is_written_and_one_of_the_persons_own_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    path = tmp_path / "systemd/user/creeld.service"
    assert main.main(["service", "install"]) == 0
    output = capsys.readouterr().out
    assert f"wrote {path}\n" in output
    assert "loginctl enable-linger" in output
    written = path.read_text()
    assert re.search(r'^ExecStart="?/.*/creeld"?$', written, re.MULTILINE)
    assert main.main(["service", "install"]) == 0
    path.write_text("mine")
    assert main.main(["service", "install"]) == 2
    assert "--force" in capsys.readouterr().err
    assert path.read_text() == "mine"
    assert main.main(["service", "install", "--force"]) == 0
    assert path.read_text() == written


def test_an_environment_that_users_cannot_reach_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else systemd says 203/EXEC of each user's daemon."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/creeld").touch()
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "bin/creel")])
    monkeypatch.setattr(shipped, "_SYSTEM", tmp_path)
    (tmp_path / "bin").chmod(0o700)
    assert main.main(["service", "install", "--system"]) == 0
    assert f"other users may not enter {tmp_path}/bin" in capsys.readouterr().err
    assert (tmp_path / "creeld@.service").exists()


def test_the_programs_are_those_beside_the_one_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`pip install --user` puts them elsewhere than the interpreter."""
    (tmp_path / "creeld").touch()
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "creel")])
    assert f"\nExecStart={tmp_path}/creeld\n" in shipped.unit()
    assert f"\nbin={tmp_path}\n" in shipped.slurm("prolog")


def test_the_folder_that_the_terminal_is_in_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program may start another by its name alone: `argv[0]` is "creel" then."""
    (tmp_path / "creeld").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["creel"])
    assert str(tmp_path) not in shipped.unit()
    monkeypatch.setattr(sys, "argv", ["./creel"])
    assert f"\nExecStart={tmp_path}/creeld\n" in shipped.unit()


def test_a_checkout_without_programs_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda *_: str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["-m"])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="no creeld: pip install creel-data"):
        shipped.unit()


def test_a_folder_that_cannot_be_made_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "systemd").touch()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert main.main(["service", "install"]) == 2
    assert "cannot be written: Not a directory" in capsys.readouterr().err


def test_all_that_can_be_shown_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    for name in shipped.SLURM:
        assert main.main(["slurm", "show", name]) == 0
        assert "\nbin=/usr/bin\n" not in capsys.readouterr().out
    for name in shipped.EXAMPLES:
        assert main.main(["example", name]) == 0
        assert "from creel import" in (text := capsys.readouterr().out) or "import creel" in text


def test_the_end_of_a_slurm_job_leaves_the_folder_to_others_that_begin(tmp_path: Path) -> None:
    """Their prolog makes it, and then writes a key there, while this epilog runs."""
    script = (ROOT / "deploy/slurm/epilog.sh").read_text()
    script = script.replace("/run/creel-slurm", str(tmp_path)).replace("/usr/bin\n", "/none\n", 1)
    (tmp_path / "7.key").touch()
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_UID": "4294967294", "SLURM_JOB_GID": "4294967294"}
    subprocess.run(["sh", "-c", script], env=job, timeout=60, check=True)
    assert list(tmp_path.iterdir()) == []


def test_a_release_leaves_no_page_that_says_there_is_none() -> None:
    """And CHANGELOG has its date, which `check` asks for."""
    release = runpy.run_path(str(ROOT / "scripts/release.py"))
    pages = {name: (ROOT / name).read_text() for name in release["PAGES"]}
    dated = {name: release["released"](text, "2026-12-01") for name, text in pages.items()}
    assert [name for name, text in dated.items() if "been released yet" in text] == []
    assert f"\n## {release['VERSION']} - " in dated["CHANGELOG.md"]
    assert {name: release["released"](text, "2027-01-01") for name, text in dated.items()} == dated


def test_a_release_is_not_built_in_a_clone_nor_unchecked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It writes links into README, so only a copy may be given; the last commit is checked."""
    release = runpy.run_path(str(ROOT / "scripts/release.py"))["main"]
    build = ["release.py", "build", "--repository", "https://forge.example/us/creel"]
    (tmp_path / ".git").mkdir()
    monkeypatch.setattr(sys, "argv", [*build, "--tree", str(tmp_path)])
    with pytest.raises(SystemExit, match="is a clone: give a copy"):
        release()
    monkeypatch.setattr(sys, "argv", build)
    monkeypatch.setitem(release.__globals__, "check", lambda: ["README.md says: not yet"])
    with pytest.raises(SystemExit, match="not yet"):
        release()
