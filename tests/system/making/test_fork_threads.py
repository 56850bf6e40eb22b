"""While a loader forks its workers, the process has no other thread.

A child may find locks held by threads that it does not have. Python 3.12 and later warn of that,
and many test-suites make warnings errors.
"""

from pathlib import Path

import pytest

from programs import Program

PROGRAM = r"""
import os, sys, threading, warnings
import torch, creel
warnings.simplefilter("error")

folder, kind = sys.argv[1:]
paths = [f"{folder}/{i}" for i in range(40)]

class Own(torch.utils.data.Dataset):
    def __len__(self):
        return len(paths)
    def __getitem__(self, i):
        with open(paths[i], "rb") as f:
            return torch.frombuffer(bytearray(f.read()), dtype=torch.uint8)

class Mapped(Own):
    def ranges(self, i):
        return [(paths[i], 0, 6000)]

threads = []
def count():
    names = {t.native_id: t.name for t in threading.enumerate()}
    threads.append([names.get(int(t), t) for t in os.listdir("/proc/self/task")][1:])
os.register_at_fork(after_in_parent=count)

direct = {"creel": {"loader.direct": "never"}}
data = {
    "own": Own,
    "mapped": Mapped,
    "wrap": lambda: creel.wrap(Own()),
    "files": lambda: creel.FileDataset(paths),
    "records": lambda: creel.RecordDataset(paths, "uint8", 6000, transform=lambda x: x),
    "rows": lambda: creel.RecordDataset(paths, "uint8", 6000),
}
if kind == "mixed":  # without workers, by reader threads, and with workers, in turn
    from creel.loader.line.batches import places
    places.INLINE_NBYTES = 0
    rows = creel.DataLoader(data["rows"](), 4, num_workers=2, **direct)
    others = [creel.DataLoader(data["files"](), 4, **direct), rows]
    kind = "files"
else:
    others = []
made = data[kind]()
loaders = [creel.DataLoader(made, 4, num_workers=2, shuffle=True, **direct), *others,
           creel.DataLoader(made, 4, num_workers=2, **direct)]
for epoch in range(3):
    for loader in loaders:
        assert sum(len(b) for b in loader) == 40
if kind not in ("own", "mapped"):
    assert any(loader._creel_state._stream is not None for loader in loaders), "no session"
assert len(threads) >= 12, len(threads)
assert not any(threads), threads
"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", ["mapped", "wrap", "records", "mixed"])
def test_no_thread_is_there_when_workers_are_forked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    for i in range(40):
        (tmp_path / str(i)).write_bytes(bytes([i]) * 6000)
    monkeypatch.setenv("CREEL_DAEMON__NAME", f"forks-{tmp_path.name}")
    program = Program(PROGRAM, str(tmp_path), kind)
    assert program.communicate() == ("", "")
    assert program.returncode == 0
