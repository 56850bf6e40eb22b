"""Settings: which source of settings wins, what is refused, and that each refusal helps."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias
from unittest import mock

import pytest

from creel import config as config_module
from creel.config import Config, config_files, fields, memory_budget
from creel.errors import ConfigError
from creel.settings import MemorySettings
from creel.streams.producer import Producer
from creel.system import limits
from creel.system.python_open import text_of
from creel.units import format_size, parse_seconds, parse_size

ROOT = Path(__file__).parents[3]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without system file and user file; the folder of a project without settings."""
    monkeypatch.setattr(config_module, "SYSTEM_FILE", tmp_path / "etc/config.toml")
    (tmp_path / "etc").mkdir()
    (tmp_path / "home/creel").mkdir(parents=True)
    (tmp_path / "project/deep").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "project/deep")
    return tmp_path


def load(
    home: Path, flags: dict[str, object] | None = None, /, **env: str
) -> tuple[Config, dict[str, str]]:
    env = {"XDG_CONFIG_HOME": str(home / "home"), **env}
    with mock.patch.dict(os.environ, env, clear=True):
        return Config.load(flags)


def test_the_stronger_layer_wins_and_the_origin_says_which(home: Path) -> None:
    layers = [
        (home / "etc/config.toml", "10%"),
        (home / "home/creel/config.toml", "20%"),
        (home / "project/creel.toml", "30%"),
    ]
    config, origins = load(home)
    assert (config.memory.budget, origins["memory.budget"]) == ("auto", "default")
    for path, budget in layers:
        path.write_text(f'[memory]\nbudget = "{budget}"\n')
        config, origins = load(home)
        assert (config.memory.budget, origins["memory.budget"]) == (budget, str(path))
    config, origins = load(home, CREEL_MEMORY__BUDGET="40%")
    assert (config.memory.budget, origins["memory.budget"]) == ("40%", "CREEL_MEMORY__BUDGET")
    config, origins = load(home, {"memory.budget": "50%"}, CREEL_MEMORY__BUDGET="40%")
    assert (config.memory.budget, origins["memory.budget"]) == ("50%", "flag --memory")


def test_layers_are_merged_key_by_key(home: Path) -> None:
    (home / "etc/config.toml").write_text("[fetch]\nthreads = 7\n[window]\nmax_steps = 9\n")
    config, _ = load(home, CREEL_FETCH__THREADS="8")
    assert (config.fetch.threads, config.window.max_steps) == (8, 9)


def test_the_nearest_project_file_counts_and_a_named_file_replaces_it(home: Path) -> None:
    (home / "project/creel.toml").write_text("[fetch]\nthreads = 1\n")
    (home / "project/deep/creel.toml").write_text("[fetch]\nthreads = 2\n")
    (home / "other.toml").write_text("[fetch]\nthreads = 3\n")
    assert load(home)[0].fetch.threads == 2
    assert load(home, CREEL_CONFIG=str(home / "other.toml"))[0].fetch.threads == 3
    with pytest.raises(ConfigError, match=r"CREEL_CONFIG names .*gone\.toml, and there is no"):
        load(home, CREEL_CONFIG=str(home / "gone.toml"))
    with pytest.raises(ConfigError, match="~nobody-of-this-name/x"):
        load(home, CREEL_CONFIG="~nobody-of-this-name/x.toml")
    with mock.patch.dict(os.environ, {"HOME": str(home)}, clear=True):
        assert config_files() == [home / "project/deep/creel.toml"]


def test_the_clusters_key_in_the_environment_is_no_setting(home: Path) -> None:
    assert load(home, CREEL_CLUSTER_KEY="0123456789abcdef")[0] == load(home)[0]


@pytest.mark.parametrize(
    "env, key, value",
    [
        ({"CREEL_DISABLE": "1"}, "loader.disable", True),
        ({"CREEL_DISABLE": "0"}, "loader.disable", False),
        ({"CREEL_LOADER__FORESEE": "on"}, "loader.foresee", True),
        ({"CREEL_SOCKET": "mine"}, "daemon.name", "mine"),
        ({"CREEL_LOG_LEVEL": "DEBUG"}, "daemon.log_level", "debug"),
        ({"CREEL_WINDOW__BYTES": "2GiB"}, "window.bytes", 2 << 30),
        ({"CREEL_FETCH__DEADLINE_S": "2m"}, "fetch.deadline_s", 120.0),
        ({"CREEL_FETCH__DEADLINE_S": "1.5"}, "fetch.deadline_s", 1.5),
        ({"CREEL_MEMORY__BUDGET": "1000000"}, "memory.budget", "1000000"),
        ({"CREEL_DISABLE": ""}, "loader.disable", False),
    ],
)
def test_the_environment_is_understood(
    home: Path, env: dict[str, str], key: str, value: object
) -> None:
    assert load(home, **env)[0].flat()[key] == value


@pytest.mark.parametrize(
    "env, says",
    [
        ({"CREEL_MEMRY__BUDGET": "1GB"}, "no setting memry.budget: did you mean memory.budget?"),
        ({"CREEL_MEMORY_BUDGET": "1GB"}, "is not a setting: did you mean CREEL_MEMORY__BUDGET?"),
        ({"CREEL_DISABEL": "1"}, "CREEL_DISABEL is not a setting: did you mean CREEL_DISABLE?"),
        ({"CREEL_MEMORY__SHARE": "lots"}, "memory.share = 'lots' should be a number above 0"),
        ({"CREEL_MEMORY__SHARE": "2"}, "should be a number above 0 and at most 0.95"),
        ({"CREEL_FETCH__THREADS": "-1"}, "'-1' should be a whole number at least 1"),
        ({"CREEL_DISABLE": "maybe"}, "loader.disable = 'maybe' should be true or false"),
        ({"CREEL_MEMORY__BUDGET": "much"}, 'should be a budget: "auto", a size'),
        ({"CREEL_WINDOW__BYTES": "3 lots"}, "window.bytes = '3 lots' is not a size: write it like"),
        ({"CREEL_FETCH__BACKOFF_S": "3 weeks"}, "'3 weeks' is not a duration: write it like 250ms"),
        ({"CREEL_SOCKET": "a/b"}, "daemon.name = 'a/b' should be 1 to 64 letters, digits"),
        ({"CREEL_LOG_LEVEL": "loud"}, "'loud' should be a level: debug, info"),
        ({"CREEL_DAEMON__METRICS": "9464"}, "'9464' should be host:port: address"),
        ({"CREEL_WINDOW__MIN_STEPS": "999"}, "min_steps = 999 is more than window.max_steps"),
    ],
)  # fmt: skip
def test_a_bad_variable_gets_one_sentence_that_says_what_to_do(
    home: Path, env: dict[str, str], says: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(home, **env)
    assert says in str(caught.value)
    assert next(iter(env)) in str(caught.value) or "window" in says
    assert "\n" not in str(caught.value)


def test_a_relative_folder_of_the_disk_is_seen_from_whoever_names_it(home: Path) -> None:
    """The daemon itself works in /."""
    (home / "project/creel.toml").write_text('[disk]\npath = "nvme"\n')
    assert load(home)[0].disk.path == str(home / "project/nvme")
    assert load(home, CREEL_DISK__PATH="nvme")[0].disk.path == str(home / "project/deep/nvme")
    assert load(home, {"disk.path": "nvme"})[0].disk.path == str(home / "project/deep/nvme")
    assert load(home, HOME="/h", CREEL_DISK__PATH="~/nvme")[0].disk.path == "/h/nvme"
    assert load(home, CREEL_DISK__PATH="/nvme")[0].disk.path == "/nvme"


@pytest.mark.parametrize(
    "text, says",
    [
        ("[memroy]\nbudget = 1", "there is no section [memroy]: did you mean memory?"),
        ("[memory]\nbugdet = 1", "there is no setting memory.bugdet: did you mean memory.budget?"),
        ("memory = 3", "memory is a section: write [memory] on a line of its own"),
        ("[memory", "is not TOML"),
        ('[fetch]\nthreads = "8"', "fetch.threads = '8' should be a whole number"),
        ("[fetch]\nthreads = 2.5", "fetch.threads = 2.5 should be a whole number"),
        ("[loader]\ndisable = 1", "loader.disable = 1 should be true or false"),
    ],
)
def test_a_bad_file_is_named_with_the_reason(home: Path, text: str, says: str) -> None:
    path = home / "project/creel.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(home)
    assert str(path) in str(caught.value)
    assert says in str(caught.value)


def test_a_file_that_is_no_text_or_may_not_be_read_is_an_error(home: Path) -> None:
    path = home / "project/creel.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not TOML"):
        load(home)


@pytest.mark.parametrize("number", [errno.EACCES, errno.ESTALE, errno.ELOOP, errno.EIO])
def test_a_file_that_was_found_and_cannot_be_read_is_left_out_and_told_once(
    home: Path, number: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It may be another user's, in a folder above. A file named by the user must be readable."""
    path = home / "project/creel.toml"
    path.write_text("[fetch]\nthreads = 3\n")

    def fails(file: Path, *, encoding: str) -> str:
        if file == path:
            raise OSError(number, os.strerror(number), str(file))
        return text_of(file, encoding=encoding)

    monkeypatch.setattr("creel.config.text_of", fails)
    for _ in range(2):
        assert load(home)[0] == Config()
    (said,) = caplog.messages
    assert said == f"the settings in {path} are ignored: {os.strerror(number)}"
    with pytest.raises(ConfigError, match=os.strerror(number)):
        load(home, CREEL_CONFIG=str(path))


def test_a_loop_of_links_is_left_out_and_told(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = home / "project/creel.toml"
    path.symlink_to("other.toml")
    (home / "project/other.toml").symlink_to("creel.toml")
    assert load(home)[0] == Config()
    (said,) = caplog.messages
    assert said == f"the settings in {path} are ignored: {os.strerror(errno.ELOOP)}"
    with pytest.raises(ConfigError, match=os.strerror(errno.ELOOP)):
        load(home, CREEL_CONFIG=str(path))


def test_a_working_directory_that_is_gone_has_no_project_file(
    home: Path,
) -> None:
    (home / "home/creel/config.toml").write_text("[fetch]\nthreads = 3\n")
    (home / "project/deep").rmdir()
    assert load(home)[0].fetch.threads == 3


def test_no_home_and_no_whole_path_are_needed(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless(path: Path) -> Path:
        raise RuntimeError(f"Could not determine home directory: {path}")

    monkeypatch.setattr(Path, "expanduser", homeless)
    monkeypatch.setattr(os, "environ", {})
    assert Config.load()[0] == Config()
    (home / "project/deep/creel.toml").symlink_to("creel.toml")
    assert Config.load()[0] == Config()


@pytest.mark.parametrize(
    "text", ["4gb", "4 GB", " 4GB ", "4gib", "4G", ".5kb", "4096", "4iB", "4 XB"]
)
def test_a_budget_is_written_like_any_other_size(home: Path, text: str) -> None:
    try:
        nbytes = parse_size(text)
    except ConfigError:
        with pytest.raises(ConfigError):
            load(home, CREEL_MEMORY__BUDGET=text)
    else:
        budget = load(home, CREEL_MEMORY__BUDGET=text)[0].memory
        if nbytes >= 1 << 20:
            assert memory_budget(budget, total=1 << 60, available=0) == nbytes


def test_a_number_without_end_is_no_setting(home: Path) -> None:
    for value in (float("inf"), float("nan")):
        with pytest.raises(ConfigError, match="should be a number above 0"):
            load(home, {"loader.wait_s": value})


@pytest.mark.parametrize("value", [1 << 63, 10**30, "10000PB", "9" * 400, "9" * 400 + "GB"])
def test_a_number_that_no_message_can_carry_is_no_setting(home: Path, value: object) -> None:
    """A daemon could not report its settings, and each client lost its connection."""
    for key in ("window.bytes", "window.max_steps"):
        with pytest.raises(ConfigError):
            load(home, {key: value})
    assert load(home, {"window.bytes": (1 << 63) - 1})[0].window.bytes == (1 << 63) - 1


@pytest.mark.parametrize("key", ["CREEL_DISK__PATH", "CREEL_CLUSTER__HOSTS"])
def test_a_text_that_no_message_can_carry_is_no_setting(home: Path, key: str) -> None:
    """It could not be passed to the daemon."""
    with pytest.raises(ConfigError, match=f"{key}: .* should be UTF-8"):
        load(home, **{key: os.fsdecode(b"/caf\xe9")})


def test_unknown_flags_are_errors_and_none_means_not_given(home: Path) -> None:
    assert load(home, {"memory.budget": None})[1]["memory.budget"] == "default"
    with pytest.raises(ConfigError, match=r"flag memory\.bugdet: there is no setting"):
        load(home, {"memory.bugdet": 1})


def test_a_bad_flag_is_called_by_its_own_name(home: Path) -> None:
    with pytest.raises(ConfigError, match=r"^flag --name: daemon\.name = 'a b' should be"):
        load(home, {"daemon.name": "a b"})
    with pytest.raises(ConfigError, match=r"memory is a section: .* as memory\.budget"):
        load(home, {"memory": {"budget": "1GB"}})
    with pytest.raises(ConfigError, match="there is no setting 5"):
        load(home, {5: 5})  # type: ignore[dict-item]  # DataLoader(creel={5: 5})


def test_variables_of_other_programs_are_left_alone(home: Path) -> None:
    assert load(home, CREEL="1", CREELHOUSE="2", CREEL_FISHING_LICENCE="3")[0] == Config()


def test_every_setting_has_one_line_about_it_and_a_default_that_it_accepts(home: Path) -> None:
    toml = ""
    for key, field in fields().items():
        assert field.about
        assert field.about[0] != field.about[0].upper() or field.about[0] == '"'
        toml += f"{key} = {_toml(field.default)}\n"
    (home / "project/creel.toml").write_text(toml)
    assert load(home)[0] == Config()


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


@pytest.mark.parametrize("text", ["", "-1", "1.2.3", "GiB", "1 XB", "1iB", "nan", "1e9"])
def test_texts_that_are_no_size_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_size(text)
    with pytest.raises(ConfigError):
        parse_seconds(text or "x")


@pytest.mark.parametrize("seed", range(20))
def test_a_formatted_size_is_within_one_percent_when_read_again(seed: int) -> None:
    nbytes = 3**seed + seed
    assert abs(parse_size(format_size(nbytes)) - nbytes) <= 0.01 * nbytes


def test_a_budget_is_a_share_of_what_is_free_or_of_all_or_a_size() -> None:
    here = {"total": 8 << 30, "available": 4 << 30}
    assert memory_budget(MemorySettings(), **here) == 2 << 30
    assert memory_budget(MemorySettings(share=0.25), **here) == 1 << 30
    assert memory_budget(MemorySettings(budget="25%"), **here) == 2 << 30
    assert memory_budget(MemorySettings(budget="3GiB"), **here) == 3 << 30
    with pytest.raises(ConfigError, match=r"more than this node has \(8\.00 GiB\)"):
        memory_budget(MemorySettings(budget="9GiB"), **here)
    with pytest.raises(ConfigError, match="creel needs 1 MiB"):
        memory_budget(MemorySettings(budget="10kB"), **here)


# --- limits of the machine --------------------------------------------------------------------


MemoryOf: TypeAlias = Callable[[str, dict[str, str]], limits.MemoryLimits]


@pytest.fixture
def memory_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MemoryOf:
    """`memory` of a machine with 8 GiB, half of them free, for a process in this cgroup."""
    monkeypatch.setattr(limits, "_ROOT", tmp_path)

    def memory(cgroup: str, files: dict[str, str]) -> limits.MemoryLimits:
        files = {
            "proc/meminfo": "MemTotal:  8388608 kB\nMemFree: 1 kB\nMemAvailable:    4194304 kB\n",
            "proc/self/cgroup": cgroup,
            **files,
        }
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return limits.memory()

    return memory


def test_without_cgroups_the_machine_is_the_limit(memory_of: MemoryOf) -> None:
    assert memory_of("", {}) == (8 << 30, 4 << 30)


def test_where_memory_is_promised_strictly_only_what_is_left_to_promise_is_free(
    memory_of: MemoryOf,
) -> None:
    info = "MemTotal: 8388608 kB\nMemAvailable: 4194304 kB\n"
    info += "CommitLimit: 6291456 kB\nCommitted_AS: 5242880 kB\n"
    files = {"proc/meminfo": info, "proc/sys/vm/overcommit_memory": "2\n"}
    assert memory_of("", files) == (8 << 30, 1 << 30)
    files["proc/sys/vm/overcommit_memory"] = "0\n"
    assert memory_of("", files) == (8 << 30, 4 << 30)


def test_a_parent_cgroup_of_version_2_limits_us(memory_of: MemoryOf) -> None:
    folder = "sys/fs/cgroup/slurm/job_7"
    files = {
        "sys/fs/cgroup/slurm/memory.max": str(2 << 30),
        "sys/fs/cgroup/slurm/memory.current": str(1 << 30),
        "sys/fs/cgroup/slurm/memory.stat": f"anon 1\ninactive_file {512 << 20}\n",
        f"{folder}/memory.max": "max",
        f"{folder}/memory.current": "0",
    }
    have = memory_of("0::/slurm/job_7\n", files)
    assert have == (2 << 30, (2 << 30) - (512 << 20))


def test_a_limit_above_which_a_cgroup_is_throttled_is_one(memory_of: MemoryOf) -> None:
    """systemd's MemoryHigh=: the arena cannot be reclaimed, so the whole job crawled."""
    group = {"max": str(4 << 30), "high": str(2 << 30), "current": str(1 << 30)}
    files = {f"sys/fs/cgroup/memory.{name}": value for name, value in group.items()}
    assert memory_of("0::/\n", files) == (2 << 30, 1 << 30)


def test_a_cgroup_of_version_1_limits_us_and_no_limit_is_none(memory_of: MemoryOf) -> None:
    files = {
        "sys/fs/cgroup/memory/memory.limit_in_bytes": str(2**63 - 4096),
        "sys/fs/cgroup/memory/docker/x/memory.limit_in_bytes": str(3 << 30),
        "sys/fs/cgroup/memory/docker/x/memory.usage_in_bytes": str(1 << 30),
    }
    have = memory_of("4:memory:/docker/x\n3:cpu:/y\n", files)
    assert have == (3 << 30, 2 << 30)


def test_in_a_container_the_mount_itself_is_our_group(memory_of: MemoryOf) -> None:
    files = {
        "sys/fs/cgroup/memory.max": str(1 << 30),
        "sys/fs/cgroup/memory.current": "0",
    }
    assert memory_of("0::/../outside\n", files) == (1 << 30, 1 << 30)


@pytest.mark.parametrize(
    "word, meant",
    [("budget", "memory.budget or disk.budget"), ("log_level", "daemon.log_level")],
)
def test_a_setting_without_its_section_is_told_the_section(word: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"did you mean {meant}\\?"):
        Config.load({word: "1GiB"})


THREADS = """
import sys, threading
from creel.config import from_flat
from creel.streams.log import Log
sys.setswitchinterval(1e-9)
starts = threading.Barrier(8)
def first(path):
    starts.wait()
    from_flat({"daemon.name": "x", "fetch.threads": 4, "window.min_steps": 1})
    Log.open(path)
threads = [threading.Thread(target=first, args=sys.argv[1:]) for _ in range(8)]
for one in threads: one.start()
for one in threads: one.join()
"""


def test_threads_that_are_the_first_to_read_settings_do_not_end_the_process(tmp_path: Path) -> None:
    Producer(tmp_path / "stream", {"x": "int64"}).close()
    for _ in range(6):
        command = [sys.executable, "-c", THREADS, str(tmp_path / "stream")]
        subprocess.run(command, check=True, timeout=120)
