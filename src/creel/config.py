"""Configuration: defaults, files, environment and flags, merged.

`Config.load` overlays, weakest first: the defaults (`creel.settings`), /etc/creel/config.toml, the
user's file ($XDG_CONFIG_HOME/creel/config.toml), the project's (creel.toml, found upward from the
working directory, or the file that CREEL_CONFIG names), the environment (CREEL_MEMORY__BUDGET=1GB)
and flags. Unknown keys raise an error with a suggestion, so that a typo does not waste a run.

Sizes are bytes and may be written "64GiB" or "100GB"; durations are seconds, or "250ms", "10m".
"""

from __future__ import annotations

import difflib
import errno
import logging
import math
import os
import stat
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import msgspec
from msgspec import Meta

from creel.errors import ConfigError
from creel.settings import (
    ClusterSettings,
    DaemonSettings,
    DiskSettings,
    FetchSettings,
    LoaderSettings,
    MemorySettings,
    WindowSettings,
)
from creel.system.python_open import text_of
from creel.units import format_size, parse_seconds, parse_size

log = logging.getLogger("creel.config")
_unreadable: set[Path] = set()  # files that were warned of


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings. `Config()` has the defaults, `Config.load()` the user's settings."""

    memory: MemorySettings = MemorySettings()
    disk: DiskSettings = DiskSettings()
    fetch: FetchSettings = FetchSettings()
    window: WindowSettings = WindowSettings()
    daemon: DaemonSettings = DaemonSettings()
    cluster: ClusterSettings = ClusterSettings()
    loader: LoaderSettings = LoaderSettings()

    @classmethod
    def load(
        cls,
        flags: Mapping[str, object] | None = None,
        *,
        origin: str | None = None,
    ) -> tuple[Config, dict[str, str]]:
        """Overlay files, environment and flags over the defaults.

        Args:
            flags: dotted key to value, e.g. {"memory.budget": "64GiB"}; None values are skipped.
            origin: how messages name the flags; None: by their names on the command line.

        Returns:
            The settings, and for each dotted key where its value came from.

        Raises:
            ConfigError: an unknown key, a value of the wrong type or range, a file that is not
                TOML, or an unreadable file that CREEL_CONFIG names.
        """
        values: dict[str, object] = {}
        origins = dict.fromkeys(fields(), "default")
        for given in _layers(flags or {}, origin):
            values[given.key] = _convert(given)
            origins[given.key] = given.origin
        return from_flat(values), origins

    def flat(self) -> dict[str, object]:
        """Return dotted key to value, in the order of the sections.

        >>> Config().flat()["window.min_steps"]
        4
        """
        return {
            f"{section}.{name}": value
            for section, part in msgspec.structs.asdict(self).items()
            for name, value in msgspec.structs.asdict(part).items()
        }


class Field(NamedTuple):
    """One setting: its type, unit ("bytes", "seconds" or ""), default, and one-line description."""

    type: Any
    unit: str
    default: object
    about: str


class _Given(NamedTuple):
    """A value that was set.

    Attributes:
        text: whether all values from this origin are strings.
        folder: what a relative path in the value is relative to.
    """

    key: str
    value: object
    origin: str
    text: bool
    folder: Path


_SHORT = {
    "CREEL_DISABLE": "loader.disable",
    "CREEL_SOCKET": "daemon.name",
    "CREEL_LOG_LEVEL": "daemon.log_level",
}
#: Flags of `creel` and `creeld`, for messages.
_FLAGS = {
    "daemon.name": "--name",
    "memory.budget": "--memory",
    "daemon.log_level": "--log-level",
    "daemon.metrics": "--metrics",
}
_FILE = "CREEL_CONFIG"
#: The key of listed nodes, in place of the file `cluster.key_file`. A secret.
KEY_VARIABLE = "CREEL_CLUSTER_KEY"
SYSTEM_FILE = Path("/etc/creel/config.toml")


def switched_off() -> bool:
    """Whether CREEL_DISABLE=1 is set, which works even if other settings are invalid."""
    return os.environ.get("CREEL_DISABLE") == "1"


@cache
def fields() -> dict[str, Field]:
    """Return every setting by dotted key.

    >>> fields()["memory.share"].default
    0.5
    """
    by_name = {}
    for section, kind in get_type_hints(Config).items():
        hints = get_type_hints(kind, include_extras=True)
        for field in msgspec.structs.fields(kind):
            meta = hints[field.name].__metadata__[0]
            unit = (meta.extra or {}).get("unit", "")
            about = str(meta.description)
            by_name[f"{section}.{field.name}"] = Field(
                hints[field.name], unit, field.default, about
            )
    return by_name


# --- values that depend on the machine ----------------------------------------------------


def memory_budget(memory: MemorySettings, *, total: int, available: int) -> int:
    """Return the bytes of the arena, from the node's `total` and `available` (creel.system.limits).

    Raises:
        ConfigError: the budget is more than the node has, or too small to be of use.

    >>> memory_budget(MemorySettings(budget="50%"), total=8 << 30, available=2 << 30) >> 30
    4
    """
    wanted = _budget("memory", memory.budget, total, int(memory.share * available))
    if wanted > total:
        raise ConfigError(
            f"memory.budget = {memory.budget} is more than this node has"
            f' ({format_size(total)}): lower it, or write "auto"'
        )
    return wanted


def memory_reserve(memory: MemorySettings, *, total: int, auto: int) -> int:
    """Return the bytes of the node's `total` that stay free for other processes.

    >>> memory_reserve(MemorySettings(reserve="0"), total=8 << 30, auto=1 << 30)
    0
    """
    return _size(memory.reserve, total, auto)


def disk_budget(disk: DiskSettings) -> int:
    """Return the most bytes of the disk tier, however much is free now.

    Raises:
        ConfigError: they are too few to be of use.
        OSError: there is no such folder.
    """
    stats = os.statvfs(disk.path)
    total = stats.f_blocks * stats.f_frsize
    return _budget("disk", disk.budget, total, total)


def _budget(section: str, text: str, total: int, auto: int) -> int:
    """Return the bytes of a budget: a size, a share of `total`, or `auto`.

    Raises:
        ConfigError: they are too few to be of use.
    """
    wanted = _size(text, total, auto)
    if wanted < 1 << 20:
        raise ConfigError(
            f"{section}.budget = {text} comes to {format_size(wanted)}: creel needs 1 MiB"
        )
    return wanted


def _size(text: str, total: int, auto: int) -> int:
    """Return the bytes of a size, a share of `total`, or `auto`."""
    if text == "auto":
        return auto
    if text.rstrip().endswith("%"):
        return int(float(text.rstrip()[:-1]) / 100 * total)
    return parse_size(text)


# --- layers -----------------------------------------------------------------------------------


def _layers(flags: Mapping[str, object], origin: str | None) -> Iterator[_Given]:
    """Yield all given values, weakest first."""
    env = os.environ
    named = env.get(_FILE)
    asked_for = _expanded(named) if named else None
    if asked_for is not None and not _is_file(asked_for):
        raise ConfigError(f"{_FILE} names {named}, and there is no such file: correct or unset it")
    for path in config_files():
        yield from _from_file(path, asked_for=path == asked_for)
    folder = next(iter(_folders()), Path())
    for name in sorted(n for n in env if n.startswith("CREEL_") and n not in {_FILE, KEY_VARIABLE}):
        key = _SHORT.get(name) or _env_key(name)
        if key is not None and env[name] != "":
            yield _Given(key, env[name], name, text=True, folder=folder)
    for key, value in flags.items():
        if value is not None:
            named = origin or f"flag {_FLAGS.get(key, key)}"
            text = isinstance(value, str)
            yield _Given(_known(key, named), value, named, text=text, folder=folder)


def config_files() -> list[Path]:
    """Return the configuration files that apply and exist (or are named), weakest first."""
    env = os.environ
    home = Path(env.get("XDG_CONFIG_HOME") or _expanded(env.get("HOME") or "~") / ".config")
    files = [path for path in (SYSTEM_FILE, home / "creel/config.toml") if _is_file(path)]
    if named := env.get(_FILE):
        return [*files, _expanded(named)]
    project = (folder / "creel.toml" for folder in _folders())
    return files + [path for path in project if _is_file(path)][:1]


def _folders() -> list[Path]:
    """Return the working directory and its parents; [] if it is gone or unreachable."""
    try:
        start = Path.cwd()
    except OSError:
        return []
    return [start, *start.parents]


def _expanded(path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError:  # the home is unknown: a uid without an entry, in a container
        return Path(path)


def _is_file(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except OSError as e:  # inaccessible paths have no settings
        return e.errno == errno.ELOOP  # a loop of links exists, but cannot be read
    except ValueError:
        return False


def _from_file(path: Path, *, asked_for: bool) -> Iterator[_Given]:
    try:
        sections = _read_toml(path)
    except OSError as e:
        if asked_for:
            raise ConfigError(f"{path}: {e.strerror}") from e
        if path not in _unreadable:  # perhaps another user's: training continues without it
            log.warning("the settings in %s are ignored: %s", path, e.strerror)
        _unreadable.add(path)
        return
    for section, part in sections.items():
        if section not in Config.__struct_fields__:
            wanted = _suggest(section, Config.__struct_fields__)
            raise ConfigError(f"{path}: there is no section [{section}]{wanted}")
        if not isinstance(part, dict):
            raise ConfigError(
                f"{path}: {section} is a section: write [{section}] on a line of its own"
            )
        for name, value in part.items():
            key = _known(f"{section}.{name}", str(path))
            yield _Given(key, value, str(path), text=False, folder=path.absolute().parent)


def _read_toml(path: Path) -> dict[str, object]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        return tomllib.loads(text_of(path, encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise ConfigError(f"{path} is not TOML: {e}") from e


def _env_key(name: str) -> str | None:
    """Return the dotted key that a variable sets; None if it is not a variable of creel."""
    section, double, option = name.removeprefix("CREEL_").lower().partition("__")
    if double:
        return _known(f"{section}.{option}", name)
    known = {"CREEL_" + key.replace(".", "__").upper(): key for key in fields()} | _SHORT
    meant = {n.replace("__", "_"): n for n in known}.get(name)
    if meant or (close := difflib.get_close_matches(name, known, n=1, cutoff=0.85)):
        raise ConfigError(f"{name} is not a setting: did you mean {meant or close[0]}?")
    return None  # a variable of another program: CREEL_ is a common word


def _known(key: str, origin: str) -> str:
    if key in Config.__struct_fields__:
        first = next(name for name in fields() if name.startswith(f"{key}."))
        raise ConfigError(f"{origin}: {key} is a section: name its settings one by one, as {first}")
    if key not in fields():
        raise ConfigError(f"{origin}: there is no setting {key}{_suggest(str(key), fields())}")
    return key


def _suggest(word: str, known: Mapping[str, Any] | tuple[str, ...]) -> str:
    if named := [key for key in fields() if key.endswith(f".{word}")]:  # its section is missing
        return f": did you mean {' or '.join(named)}?"
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f": did you mean {close[0]}?" if close else " (`creel config show` lists all)"


# --- values -----------------------------------------------------------------------------------

_WORDS = {"yes": True, "on": True, "no": False, "off": False}
_EXPECTED = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a string",
}


def _convert(given: _Given) -> object:
    """Convert a value to its field's type, or raise a one-sentence ConfigError."""
    field = fields()[given.key]
    value = _with_unit(given, field)
    kind = field.type.__origin__
    if given.text and kind is bool and isinstance(value, str):
        value = _WORDS.get(value.lower(), value)
    if given.key in {"memory.budget", "disk.budget"} and type(value) is int:
        value = str(value)  # a plain number of bytes in a file
    if given.key == "daemon.log_level" and isinstance(value, str):
        value = value.lower()
    if given.key == "disk.path" and isinstance(value, str) and value:
        value = str(given.folder / _expanded(value))  # the daemon works in /
    try:
        _check_finite(value)
        converted = msgspec.convert(value, field.type, strict=not given.text)
    except msgspec.ValidationError as e:
        meta = field.type.__metadata__[0]
        wanted = _EXPECTED[kind] + _bounds(meta)
        if isinstance(value, str):  # a string, but not one of the permitted ones
            wanted = (meta.extra or {}).get("like", wanted)
        raise ConfigError(
            f"{given.origin}: {given.key} = {given.value!r} should be {wanted}: {field.about}"
        ) from e
    if isinstance(converted, str) and not _is_utf8(converted):
        raise ConfigError(f"{given.origin}: {given.key} = {given.value!r} should be UTF-8")
    if isinstance(converted, int) and converted >= 1 << 63:  # more than messages can carry
        raise ConfigError(f"{given.origin}: {given.key} = {given.value} should be less than 2**63")
    return converted


def _is_utf8(text: str) -> bool:
    return not any("\ud800" <= letter <= "\udfff" for letter in text)  # surrogates


def _check_finite(value: object) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise msgspec.ValidationError("not finite")


def _with_unit(given: _Given, field: Field) -> object:
    if not field.unit or not isinstance(given.value, str):
        return given.value
    try:
        return parse_size(given.value) if field.unit == "bytes" else parse_seconds(given.value)
    except ConfigError as e:
        raise ConfigError(f"{given.origin}: {given.key} = {e}") from e


def _bounds(meta: Meta) -> str:
    """Return the limits of a value, in words.

    >>> _bounds(Meta(gt=0, le=1))
    ' above 0 and at most 1'
    """
    limits = ((meta.gt, "above"), (meta.ge, "at least"), (meta.lt, "below"), (meta.le, "at most"))
    words = [f"{word} {limit:g}" for limit, word in limits if limit is not None]
    return " " + " and ".join(words) if words else ""


# The first use of a class makes its types known to msgspec: by two threads at once, that would end
# the process. So they are made known here, where only one thread is.
msgspec.convert({}, Config)


def from_flat(values: Mapping[str, object]) -> Config:
    """Return settings from dotted keys, as from `Config.flat`; missing ones have their defaults."""
    parts: dict[str, dict[str, object]] = {}
    for key, value in values.items():
        section, _, name = key.partition(".")
        parts.setdefault(section, {})[name] = value
    config = msgspec.convert(parts, Config)
    if config.window.min_steps > config.window.max_steps:
        raise ConfigError(
            f"window.min_steps = {config.window.min_steps} is more than"
            f" window.max_steps = {config.window.max_steps}"
        )
    return config
