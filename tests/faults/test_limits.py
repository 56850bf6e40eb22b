"""Under limits with which torch finishes, creel finishes, too, with the same batches.

Each case runs in a process of its own, which sets the limit to its present use and some more.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from programs import Program

pytestmark = [pytest.mark.faults, pytest.mark.system, pytest.mark.timeout(300)]

_SCRIPT = """
import hashlib, os, resource, sys
import torch
import creel
from torch.utils.data import DataLoader, Dataset
from pathlib import Path

which, limit, more, kind, workers, root, name = sys.argv[1:]

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
    ("descriptors", 32, "wrapped", 2),
    ("none left", 0, "own", 2),  # once the workers run, as torch itself needs some
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


@pytest.mark.slow
@pytest.mark.parametrize("limit, more, kind, workers", CASES)
def test_where_torch_finishes_creel_does(
    root: Path, daemon_name: str, limit: str, more: int, kind: str, workers: int
) -> None:
    said = []
    for which in ("torch", "creel"):
        program = Program(
            _SCRIPT, which, limit, str(more), kind, str(workers), str(root), daemon_name
        )
        out, errors = program.communicate()
        assert program.returncode == 0, errors[-3000:]
        said.append(out)
    assert said[0].startswith("12 ")
    assert said[1] == said[0]


_NO_ROOM = """
import resource
from pathlib import Path
from creel.loader.data.buffers import keep_freed_memory

taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + (8 << 20), resource.RLIM_INFINITY))
keep_freed_memory()
"""


def test_a_process_reads_where_no_memory_can_be_kept() -> None:
    """A worker died of an optional allocation, while torch's had room for its batch."""
    assert Program(_NO_ROOM).communicate() == ("", "")


_LITTLE_ROOM = """
import resource
from pathlib import Path
from creel.system.limits import may_map

assert may_map(1 << 40)
taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + (256 << 20), resource.RLIM_INFINITY))
assert may_map(100 << 20) and not may_map(160 << 20)
"""


def test_the_cache_leaves_address_space_for_batches() -> None:
    """A mapping of it took the space of torch's own allocations, which then raised."""
    assert Program(_LITTLE_ROOM).communicate() == ("", "")


_RESERVED = """
import os, resource, sys
from pathlib import Path

resource.setrlimit(resource.RLIMIT_AS, (8 << 30, resource.RLIM_INFINITY))
import torch

def taken(): return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()

before = taken()
import creel

paths = sorted(Path(sys.argv[1]).iterdir())
loader = creel.DataLoader(creel.FileDataset(paths, nbytes=True), 8, creel=False)
for _ in range(2):
    list(loader)
assert taken() - before < 600 << 20, (taken() - before) >> 20
"""


@pytest.mark.slow
def test_libraries_reserve_no_address_space_that_batches_may_need(root: Path) -> None:
    """Arrow's allocator took 1 GiB, and 16 threads that ask for sizes 1 GiB more."""
    run = [sys.executable, "-c", _RESERVED, str(root)]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
