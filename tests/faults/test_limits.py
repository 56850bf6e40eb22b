"""Limits under which torch finishes: so does creel, with the same batches.

Each case runs in a process of its own, which sets the limit to what it has by then and some more.
It is forked from one that has imported torch and creel, which takes longer than a case.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytestmark = [pytest.mark.faults, pytest.mark.system, pytest.mark.timeout(300)]

_SCRIPT = """
import gc, hashlib, json, os, resource, sys
import torch
import creel
from torch.utils.data import DataLoader, Dataset
from pathlib import Path

for line in sys.stdin:  # a case each; only its child goes on
    which, limit, more, kind, workers, root, name, out = json.loads(line)
    if not (pid := os.fork()):
        break
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
else:
    sys.exit()
os.dup2(os.open(out, os.O_WRONLY | os.O_CREAT, 0o600), 1)
os.dup2(1, 2)

class Own(Dataset):
    def __init__(self, n): self.n = n
    def __len__(self): return 48
    def __getitem__(self, i): return torch.full((self.n,), i, dtype=torch.float32), i

class Read(Dataset):
    def __init__(self): self.paths = sorted(Path(root).iterdir())
    def __len__(self): return len(self.paths)
    def __getitem__(self, i): return torch.frombuffer(bytearray(creel.read(self.paths[i])),
                                                      dtype=torch.uint8)

made = {
    "own": lambda: Own(50_000),
    "large": lambda: Own(1_000_000),
    "files": lambda: creel.FileDataset(root, nbytes=True),
    "wrapped": lambda: creel.wrap(Read()) if which == "creel" else Read(),
}
dataset = made[kind]()
if limit == "none left":
    pass
elif limit == "descriptors":
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(more),) * 2)
else:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + int(more),) * 2)
options = dict(batch_size=8, shuffle=True, num_workers=int(workers))
options["generator"] = torch.Generator().manual_seed(1)
if which == "creel":
    loader = creel.DataLoader(dataset, creel={"daemon.name": name}, **options)
else:
    loader = DataLoader(dataset, **options)

told = hashlib.sha256()
def tell(x):
    if isinstance(x, (list, tuple)):
        for one in x: tell(one)
    else:
        told.update(x.numpy().tobytes())

batches = 0
for _ in range(2):
    iterator, taken = iter(loader), []
    try:
        while limit == "none left" and which == "creel":
            taken.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        pass
    for batch in iterator:
        tell(batch)
        batches += 1
    for fd in taken:
        os.close(fd)
    del iterator
print(batches, told.hexdigest())
sys.stdout.flush()
"""

CASES = [
    ("descriptors", 24, "own", 0),
    ("descriptors", 32, "own", 2),
    ("descriptors", 24, "files", 2),
    ("descriptors", 32, "wrapped", 2),
    ("none left", 0, "own", 2),  # once the workers run; torch itself needs some
    ("none left", 0, "wrapped", 2),
    ("memory", 900 << 20, "large", 2),
    ("memory", 600 << 20, "files", 0),
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    rng = np.random.default_rng(0)
    for i in range(48):
        (folder / f"{i:02}").write_bytes(rng.bytes(60_000))
    return folder


@pytest.fixture(scope="module")
def imported() -> Iterator[subprocess.Popen[str]]:
    """A process that runs `_SCRIPT` in a fork for each line it gets, and says how that ended."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", _SCRIPT], text=True, **pipes) as process:  # type: ignore[call-overload]
        yield process
        process.stdin.close()


@pytest.mark.slow
@pytest.mark.parametrize("limit, more, kind, workers", CASES)
def test_where_torch_finishes_creel_does(
    root: Path,
    tmp_path: Path,
    daemon_name: str,
    imported: subprocess.Popen[str],
    limit: str,
    more: int,
    kind: str,
    workers: int,
) -> None:
    said = []
    for which in ("torch", "creel"):
        case = [which, limit, more, kind, workers, str(root), daemon_name, str(tmp_path / which)]
        assert imported.stdin is not None
        assert imported.stdout is not None
        imported.stdin.write(json.dumps(case) + "\n")
        imported.stdin.flush()
        returned = imported.stdout.readline()
        said.append((tmp_path / which).read_text())
        assert returned == "0\n", said[-1][-3000:]
    lines = [one.splitlines()[-1] for one in said]
    assert lines[0].startswith("12 ")
    assert lines[1] == lines[0]


_NO_ROOM = """
import resource
from pathlib import Path
from creel.loader.workers.worker import _keep_freed_memory

taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + (8 << 20), resource.RLIM_INFINITY))
_keep_freed_memory()
"""


def test_a_worker_starts_where_no_memory_can_be_kept() -> None:
    """It died of what it only wants for speed, where torch's worker has room for its batch."""
    subprocess.run([sys.executable, "-c", _NO_ROOM], check=True)


_LITTLE_ROOM = """
import resource
from pathlib import Path
from creel.limits import may_map

assert may_map(1 << 40)
taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + (256 << 20), resource.RLIM_INFINITY))
assert may_map(100 << 20) and not may_map(160 << 20)
"""


def test_the_cache_leaves_address_space_for_batches() -> None:
    """Mapped, it took what torch's own allocations needed then: they raised, creel's or not."""
    subprocess.run([sys.executable, "-c", _LITTLE_ROOM], check=True)
