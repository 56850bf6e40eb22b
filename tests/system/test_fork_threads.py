"""While a loader forks its workers, the process has no thread that torch's loader lacks.

A child may find locks held by threads that it does not have. Python 3.12 and later warn of that,
and many test-suites make warnings errors.
"""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = r"""
import os, sys, threading
import torch, creel

folder, kind, which = sys.argv[1:]
paths = [f"{folder}/{i}" for i in range(40)]

class Own(torch.utils.data.Dataset):
    def __len__(self):
        return len(paths)
    def __getitem__(self, i):
        with open(paths[i], "rb") as f:
            return torch.frombuffer(bytearray(f.read()), dtype=torch.uint8)

threads = []
def count():
    names = {t.native_id: t.name for t in threading.enumerate()}
    threads.append([names.get(int(t), t) for t in os.listdir("/proc/self/task")][1:])
os.register_at_fork(after_in_parent=count)

direct = {} if which == "torch" else {"creel": {"loader.direct": "never"}}
Loader = torch.utils.data.DataLoader if which == "torch" else creel.DataLoader
data = {
    "own": Own,
    "wrap": lambda: creel.wrap(Own()),
    "files": lambda: creel.FileDataset(paths),
    "records": lambda: creel.RecordDataset(paths, "uint8", 6000, transform=lambda x: x),
    "rows": lambda: creel.RecordDataset(paths, "uint8", 6000),
}
if kind == "mixed":  # without workers, by reader threads, and with workers, in turn
    from creel.loader.iterators import gather_iter
    gather_iter.INLINE_NBYTES = 0
    rows = Loader(data["rows"](), 4, num_workers=2, **direct)
    others = [Loader(data["files"](), 4, **direct), rows]
    kind = "files"
else:
    others = []
made = data[kind]()
loaders = [Loader(made, 4, num_workers=2, shuffle=True, **direct), *others,
           Loader(made, 4, num_workers=2, **direct)]
for epoch in range(3):
    for loader in loaders:
        assert sum(len(b) for b in loader) == 40
if which == "creel" and kind != "own":
    assert any(loader._creel_state._stream is not None for loader in loaders), "no session"
workers = 12 + 6 * (which == "torch" and bool(others))
assert len(threads) >= workers, len(threads)
print(max(map(len, threads)), threads)
"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", ["own", "wrap", "files", "records", "mixed"])
def test_no_thread_is_there_when_workers_are_forked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    for i in range(40):
        (tmp_path / str(i)).write_bytes(bytes([i]) * 6000)
    monkeypatch.setenv("CREEL_DAEMON__NAME", f"forks-{tmp_path.name}")
    found = {}
    for which in ("torch", "creel"):
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", PROGRAM, tmp_path, kind, which],
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, ""), which
        found[which] = int(done.stdout.split()[0])
    assert found["creel"] == 0, f"threads that torch's queues have not ended yet: {found['torch']}"
