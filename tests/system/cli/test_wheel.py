"""The wheel: what is in it, and what a person sees who has installed nothing else of creel."""

from __future__ import annotations

import configparser
import importlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import psutil
import pytest

from creel.cli.shipped import EXAMPLES
from creel.loader.client.client import Client
from kit import until

ROOT = Path(__file__).parents[3]
SOURCES = ("src", "cache", "daemon", "loader", "policies", "deploy", "examples")
REPOSITORY = "https://forge.example/us/creel"
FILES = ("pyproject.toml", "README.md", "LICENSE")

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree, built from a copy of it as a release is."""
    tree, built = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        left_out = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=left_out)
    for name in FILES:
        shutil.copy(ROOT / name, tree / name)
    script = (sys.executable, ROOT / "scripts/release.py", "build", "--repository", REPOSITORY)
    subprocess.run((*script, "--tree", tree, "--out", built), check=True, timeout=120)
    (path,) = built.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of programs of a new environment with the wheel in it; its path has a space.

    What the wheel needs is seen in this interpreter's packages; creel is not, as it is there by an
    import hook or on a path that no other interpreter looks at.
    """
    folder = tmp_path_factory.mktemp("an environment")
    venv.create(folder, with_pip=False, symlinks=True)
    _pip("--python", str(folder / "bin/python"), "install", "--no-deps", "--no-index", str(wheel))
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "needs.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin"


def _pip(*words: str) -> None:
    command = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def _output(*words: str | Path, cwd: Path) -> str:
    done = subprocess.run(words, capture_output=True, text=True, cwd=cwd, timeout=110, check=True)
    return done.stdout


def test_the_wheel_has_the_files_that_people_look_for_and_none_of_ours(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as opened:
        texts = {name: opened.read(name).decode() for name in opened.namelist()}
    assert set(texts) >= {
        "creel/py.typed",
        "creel/deploy/creeld.service",
        "creel/deploy/creeld@.service",
        *(f"creel/deploy/{n}.yaml" for n in ("kubernetes", "trainjob", "prometheus")),
        "creel/deploy/grafana.json",
        "creel/examples/SKILL.md",
        *(f"creel/deploy/slurm/{n}.sh" for n in ("prolog", "task-prolog", "epilog", "job")),
        "creel/deploy/pbs/hook.py",
        *(f"creel/examples/{n}.py" for n in EXAMPLES),
    }
    folders = {"/".join(name.split("/")[:2]) for name in texts if name.count("/") > 1}
    rooms = {
        f"creel/{n}"
        for n in (
            "cache",
            "cli",
            "daemon",
            "integrations",
            "loader",
            "policies",
            "streams",
            "system",
        )
    }
    information = {f for f in folders if ".dist-info/" in f}
    assert folders - information == rooms | {"creel/deploy", "creel/examples"}
    of_this_machine = {str(ROOT), f"{Path.home()}/", sys.prefix} - {"//"}  # a home of "/"
    for name, text in texts.items():
        assert not [path for path in of_this_machine if path in text], name


def test_its_name_is_free_and_the_extras_are_those_that_messages_name(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as opened:
        (metadata,) = (n for n in opened.namelist() if n.endswith("/METADATA"))
        metadata_of_wheel = HeaderParser().parsestr(opened.read(metadata).decode())
    assert metadata_of_wheel["Name"] == "creel-data"
    extras = metadata_of_wheel.get_all("Provides-Extra", [])
    assert f"Homepage, {REPOSITORY}" in metadata_of_wheel.get_all("Project-URL", [])
    described = str(metadata_of_wheel.get_payload())
    assert "](docs/" not in described
    assert f"]({REPOSITORY}/blob/v{metadata_of_wheel['Version']}/docs/cli.md)" in described
    assert set(extras) == {
        "all",
        "azure",
        "encryption",
        "gcs",
        "http",
        "images",
        "plot",
        "prometheus",
        "redis",
        "s3",
        "torch",
    }


def test_fsspec_finds_the_file_system_that_is_named_creel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as opened:
        (name,) = (n for n in opened.namelist() if n.endswith("/entry_points.txt"))
        points = configparser.ConfigParser()
        points.read_string(opened.read(name).decode())
    module, _, kind = points["fsspec.specs"]["creel"].partition(":")
    assert hasattr(importlib.import_module(module), kind)


def test_shipped_files_are_written_out(installed: Path, tmp_path: Path) -> None:
    creel = installed / "creel"
    assert _output(creel, "--version", cwd=tmp_path) == _output(
        installed / "python", "-c", "import creel; print('creel', creel.__version__)", cwd=tmp_path
    )
    unit = _output(creel, "service", "show", cwd=tmp_path)
    assert f'\nExecStart="{installed / "creeld"}"\n' in unit
    template = _output(creel, "service", "show", "--system", cwd=tmp_path)
    assert f'\nExecStart="{installed / "creeld"}"\n' in template
    own = {line for line in unit.splitlines() if "=" in line and line[0] != "#"}
    more = {line for line in template.splitlines() if "=" in line and line[0] != "#"} - own
    whose = {"User", "Description", "After", "Wants", "WantedBy"}  # else both are the same,
    rights = {"CapabilityBoundingSet", "ProtectClock", "DevicePolicy", "SystemCallFilter"}  # but
    assert {line.partition("=")[0] for line in more} == whose | rights
    for name in ("prolog", "task-prolog", "epilog", "job"):
        script = _output(creel, "slurm", "show", name, cwd=tmp_path)
        assert f"\nbin='{installed}'\n" in script
        subprocess.run(["sh", "-n"], input=script, text=True, check=True, timeout=110)
    for name in EXAMPLES:
        compile(_output(creel, "example", name, cwd=tmp_path), name, "exec")


@pytest.mark.skipif(os.geteuid() != 0, reason="Slurm runs a prolog as root")
def test_slurms_scripts_give_a_job_a_daemon_and_end_it(installed: Path, tmp_path: Path) -> None:
    """A prolog whose output stays open keeps slurmd waiting, and the job with it."""
    job = f"test-{os.getpid()}"
    slurmd_says = {"SLURM_JOB_ID": job, "SLURM_JOB_UID": "0", "SLURM_JOB_GID": "0"}

    def output_of(name: str, programs: Path = installed) -> str:
        script = tmp_path / name
        script.write_text(_output(installed / "creel", "slurm", "show", name, cwd=tmp_path))
        script.write_text(script.read_text().replace(str(installed), str(programs)))
        done = subprocess.run(
            ["sh", script],
            env=slurmd_says,
            capture_output=True,
            text=True,
            cwd=tmp_path,
            timeout=110,
            check=True,
        )
        return done.stdout + done.stderr

    try:
        assert output_of("prolog") == ""
        assert output_of("task-prolog") == f"export CREEL_SOCKET=slurm-{job}\n"
        with Client.connect(f"slurm-{job}", "cli") as client:
            pid = client.daemon_pid
    finally:
        assert output_of("epilog") == ""
    until(lambda: not psutil.pid_exists(pid), event="the daemon has ended")
    assert output_of("task-prolog") == "", "a job without a daemon starts its own"
    for name in ("prolog", "task-prolog", "epilog"):
        assert output_of(name, Path("/nowhere")) == "", "a node without creel drains no job"


#: What PBS's own Python gives a hook, as its manual pages say.
_PBS = """
import json, os, sys, types
EXECJOB_BEGIN, EXECJOB_LAUNCH, EXECJOB_END, LOG_WARNING = 1, 2, 3, "warning"
def logmsg(level, text):
    print(level, text)
def event():
    job = types.SimpleNamespace(id=os.environ["JOB"], euser="root", Variable_List={})
    return types.SimpleNamespace(type=int(os.environ["EVENT"]), job=job, env=environment)
environment = {}
import atexit
atexit.register(lambda: print(json.dumps(environment)))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="PBS runs a hook as root")
def test_pbss_hook_gives_a_job_a_daemon_and_a_key_and_ends_it(
    installed: Path, tmp_path: Path
) -> None:
    """Not under PBS, which is nowhere to be had: with a stand-in for its module."""
    job = f"{os.getpid()}[7].server"
    name = f"pbs-{os.getpid()}-7-.server"
    (tmp_path / "pbs.py").write_text(_PBS)
    (tmp_path / "secret").write_text("not to be told")
    hook = _output(installed / "creel", "pbs", "show", cwd=tmp_path)
    assert f'\nBIN = "{installed}"\n' in hook
    hook = hook.replace("/etc/pbs-creel.key", str(tmp_path / "secret"))
    hook = hook.replace("/run/creel-pbs", str(tmp_path / "keys"))

    def output_of(event: int, text: str = hook) -> str:
        (tmp_path / "hook.py").write_text(text)
        env = os.environ | {"JOB": job, "EVENT": str(event)}
        command = [sys.executable, str(tmp_path / "hook.py")]
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=110, check=True
        )
        return done.stdout + done.stderr

    key = tmp_path / "keys" / name
    try:
        assert output_of(1) == "{}\n"
        handed = {"CREEL_SOCKET": name, "CREEL_CLUSTER__KEY_FILE": str(key)}
        assert json.loads(output_of(2)) == handed
        assert (key.stat().st_mode & 0o777, len(key.read_text())) == (0o600, 65)
        with Client.connect(name, "cli") as client:
            pid = client.daemon_pid
    finally:
        assert output_of(3) == "{}\n"
    until(lambda: not psutil.pid_exists(pid), event="the daemon has ended")
    assert not key.exists()
    for event in (1, 2, 3):
        assert output_of(event, hook.replace(str(installed), "/nowhere")).endswith("}\n"), (
            "no failure"
        )


_PROGRAM = """
import creel

data = creel.ImageFolder("photos")
loader: creel.DataLoader[object] = creel.DataLoader(data, batch_size=2, shuffle=True)
size: int = creel.read("photos/1.jpg")
loader.set_epoch("one")
"""
#: torch is left out: checking its source takes 15 s of a processor, and says nothing of creel.
_SETTINGS = """
[mypy]
strict = True
[mypy-torch.*,numpy.*,pyarrow.*]
follow_imports = skip
"""


def test_mypy_sees_the_types_of_what_is_installed(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(_PROGRAM)
    (tmp_path / "mypy.ini").write_text(_SETTINGS)
    command = [sys.executable, "-m", "mypy", "--python-executable", str(installed / "python")]
    done = subprocess.run(
        [*command, "program.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    said = [line.partition(" error: ")[::2] for line in done.stdout.splitlines()[:-1]]
    assert [where for where, _ in said] == ["program.py:6:", "program.py:7:"], done.stdout
    assert '"bytes"' in said[0][1]
    assert '"set_epoch" of "DataLoader"' in said[1][1]
