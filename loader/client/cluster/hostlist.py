"""The nodes of a job, as told by its scheduler: Slurm's list, PBS's file, or a list by hand.

No command of the scheduler is run: it may be missing, or not allowed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from itertools import product

from creel.errors import ConfigError
from creel.system.python_open import text_of

#: Most nodes in an expanded list.
_MAX_HOSTS = 1 << 16
#: An entry of a list: commas separate entries, except within brackets.
_ENTRIES = re.compile(r"(?:[^,\[]|\[[^\]]*\]?)+")
#: A name, with ranges in brackets.
_ENTRY = re.compile(r"(?:[^,\[\]\s]|\[[0-9,-]+\])+")
_RANGES = re.compile(r"\[([0-9,-]+)\]")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def hosts_of(setting: str, env: Mapping[str, str]) -> list[str]:
    """Return the nodes that the setting `cluster.hosts` names, each once, in order.

    Args:
        setting: "slurm", "pbs", "auto" (whichever of them has started this process), the path of a
            file, or a list as Slurm writes it.

    Returns:
        An empty list if "auto" finds no scheduler.

    Raises:
        ConfigError: a list or file that cannot be read.

    >>> hosts_of("auto", {"SLURM_JOB_NODELIST": "n[0-1],gpu3"})
    ['n0', 'n1', 'gpu3']
    """
    listed = env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST", "")
    file = env.get("PBS_NODEFILE", "")
    if setting == "auto":
        if not listed and not file:
            return []
        setting = "slurm" if listed else "pbs"
    if setting == "slurm":
        where, hosts = "SLURM_JOB_NODELIST", expanded(listed)
    elif setting == "pbs":
        where, hosts = "PBS_NODEFILE", _in_file(file) if file else []
    elif "/" in setting:
        where, hosts = setting, _in_file(setting)
    else:
        where, hosts = "cluster.hosts", expanded(setting)
    if not hosts:
        raise ConfigError(f"{where} names no nodes")
    return list(dict.fromkeys(hosts))


def expanded(text: str) -> list[str]:
    """Return the names in a list in Slurm's notation.

    Raises:
        ConfigError: brackets that do not match, ranges that end before they begin, or too many.

    >>> expanded("rack[1-2]n[08-10]")
    ['rack1n08', 'rack1n09', 'rack1n10', 'rack2n08', 'rack2n09', 'rack2n10']
    """
    out: list[str] = []
    for entry in filter(None, map(str.strip, _ENTRIES.findall(text))):
        if not _ENTRY.fullmatch(entry):
            raise ConfigError(f"{entry!r} is not a list of nodes: write it like n[0-3],m1")
        parts = _RANGES.split(entry)
        choices = [_numbers(part) if i % 2 else [part] for i, part in enumerate(parts)]
        if len(out) + math.prod(map(len, choices)) > _MAX_HOSTS:
            raise ConfigError(f"{text[:40]!r} stands for more than {_MAX_HOSTS} nodes")
        out += ["".join(names) for names in product(*choices)]
    return out


def _numbers(ranges: str) -> list[str]:
    """Return the numbers in the text between brackets, with their leading zeros."""
    out: list[str] = []
    for span in ranges.split(","):
        match = _RANGE.fullmatch(span)
        if match is None:
            raise ConfigError(f"{span!r} is not a range of numbers")
        first, last = match[1], match[2] or match[1]
        if not 0 <= int(last) - int(first) < _MAX_HOSTS:
            raise ConfigError(f"{span!r} is not a range of numbers")
        out += [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    return out


def _in_file(path: str) -> list[str]:
    """Return the first word of each line, without comments; PBS has a line for each core."""
    try:
        lines = text_of(path, encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"the list of nodes {path} cannot be read: {e}") from e
    words = (line.split("#", 1)[0].split() for line in lines)
    return [match[0] for match in words if match]
