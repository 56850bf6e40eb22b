"""`creel explain` against what came: epochs by workers, and by memory, reads of the source.

    sudo python benchmarks/explain.py [--files 640] [--bandwidth 20M] [--only layouts] [--json]

Set-ups of a script that trains 5 ms a step: files in the page cache, whose decoding (a sleep)
is the bottleneck, with 1 worker and then with 2; files on a slow file system
(tests/testbed/slowfs.py, which counts reads) with memory for half of them; and the same with memory
for all. Then two ranks in lockstep, of which one decodes twice as long; and two with
memory for half. Last, six layouts that a dataset of one's own reads from slow storage, below
torch's loader: what an epoch would take with the line that serves them, and takes with it from the
third epoch on (`--only layouts`). `creel explain` runs the script for 64 steps; then the script
runs in full. *Came* is a later epoch. Needs root (a FUSE mount).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from measure import report, skip_without_fuse
from source_reads import daemon_with

sys.path.append(str(Path(__file__).parent.parent / "tests"))
from testbed.slowfs import SlowFS

#: A file takes 32 pages in memory: an arena for half of the files is a whole number of MiB.
BATCH, NBYTES, EPOCHS = 8, 130_000, 4
SCRIPT = f"""
import json, sys, time
from pathlib import Path

import os

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

import creel

folder, workers, decode_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
rank, uneven = int(os.environ.get("RANK", 0)), float(sys.argv[4])
decode_s *= uneven if rank else 1
if "RANK" in os.environ:
    dist.init_process_group("gloo")


def decode(data):
    time.sleep(decode_s)
    return torch.frombuffer(bytearray(data[:64]), dtype=torch.uint8)


files = sorted(map(str, Path(folder).iterdir()))
data = creel.FileDataset(files, decode=decode)
sampler = DistributedSampler(data) if dist.is_initialized() else None
how = dict(sampler=sampler, shuffle=sampler is None, drop_last=True)
loader = DataLoader(data, {BATCH}, num_workers=workers, persistent_workers=True, **how)
for epoch in range({EPOCHS}):
    if sampler is not None:
        sampler.set_epoch(epoch)
    began = time.monotonic()
    for batch in loader:
        time.sleep(0.005)
        if dist.is_initialized():
            dist.all_reduce(torch.zeros(1))
    if rank == 0:
        print(json.dumps([epoch, time.monotonic() - began]), flush=True)
"""


#: A dataset that creel does not know, in one of six layouts; `line` is what serves it.
LAYOUTS = f"""
import io, json, sys, time, zipfile

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

layout, folder, line = sys.argv[1:4]
N, LENGTH = {{files}}, {NBYTES // 4}


class Rows(Dataset):
    file = None

    def __len__(self):
        return N

    def kept(self, opening):
        if self.file is None:
            self.file = opening(folder + "/all")
        return self.file

    def __getitem__(self, i):
        i = int(i)
        if layout == "npy":
            data = np.load(f"{{folder}}/{{i}}.npy")
        elif layout == "hdf5":
            import h5py

            data = self.kept(h5py.File)["x"][i]
        elif layout == "parquet":
            import pyarrow.parquet as parquet

            data = self.kept(parquet.ParquetFile).read_row_group(i)["x"].to_numpy()
        elif layout == "zip":
            data = np.frombuffer(self.kept(zipfile.ZipFile).read(str(i)), np.int32)
        elif layout == "raw":
            file = self.kept(lambda path: open(path, "rb"))
            file.seek(4 * LENGTH * i)
            data = np.frombuffer(file.read(4 * LENGTH), np.int32)
        else:
            data = self.kept(lambda path: np.memmap(path, np.int32, "r", shape=(N, LENGTH)))[i]
        return torch.from_numpy(np.array(data))


data = Rows()
if line:
    import creel

    DataLoader = creel.DataLoader
    data = creel.wrap(data)
loader = DataLoader(data, {BATCH}, shuffle=True, num_workers=2, persistent_workers=True)
for epoch in range(5):
    began = time.monotonic()
    for batch in loader:
        time.sleep(0.005)
    print(json.dumps([epoch, time.monotonic() - began]), flush=True)
"""


def fill(layout: str, folder: Path, files: int) -> None:
    """Write the samples in a layout; those of `raw` and `memmap` as they are."""
    rows = np.random.default_rng(0).integers(0, 1 << 30, (files, NBYTES // 4)).astype(np.int32)
    if layout == "npy":
        for i in range(files):
            np.save(folder / f"{i}.npy", rows[i])
    elif layout == "hdf5":
        import h5py

        with h5py.File(folder / "all", "w") as f:
            f["x"] = rows
    elif layout == "parquet":
        import pyarrow as pa
        import pyarrow.parquet as parquet

        table = pa.table({"x": rows.ravel()})
        parquet.write_table(table, folder / "all", row_group_size=rows.shape[1])
    elif layout == "zip":
        with zipfile.ZipFile(folder / "all", "w") as z:
            for i in range(files):
                z.writestr(str(i), rows[i].tobytes())
    else:
        rows.tofile(folder / "all")


def of_layouts(o: argparse.Namespace) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for layout in ("npy", "hdf5", "parquet", "zip", "raw", "memmap"):
        with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
            script, data, mount = (Path(name, part) for part in ("train.py", "data", "mount"))
            script.write_text(LAYOUTS.replace("{files}", str(o.files)))
            data.mkdir()
            fill(layout, data, o.files)
            with SlowFS(str(data), str(mount), bandwidth=o.bandwidth, open_latency=3.0):  # type: ignore[no-untyped-call]
                answer = explained(str(script), layout, str(mount), "")["reads"]
                command = [sys.executable, str(script), layout, str(mount), "served"]
                seconds = [json.loads(line)[1] for line in _output(command).splitlines()]
            if answer is None or answer["epoch_s"] is None:
                rows.append({"set-up": layout, "epoch foretold, s": "nothing"})
            else:
                rows.append(row(layout, answer["epoch_s"], float(np.median(seconds[2:]))))
    return rows


def explained(script: str, *arguments: str, ranks: int = 1) -> dict[str, Any]:
    flags = ["--json", "--ranks", str(ranks)]
    command = [sys.executable, "-m", "creel", "explain", *flags, script, *arguments]
    answer: dict[str, Any] = json.loads(_output(command))
    return answer


def epochs(script: str, *arguments: str, ranks: int = 1) -> list[float]:
    """Return the seconds of each epoch of the whole script, with creel's loader."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [sys.executable, *(torchrun if ranks > 1 else [])]
    command += ["-m", "creel.cli.scripts.in_place", script, *arguments]
    return [json.loads(line)[1] for line in _output(command).splitlines()]


def _output(command: list[str]) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def row(name: str, foretold_s: float, came_s: float, reads: str = "") -> dict[str, object]:
    off = abs(foretold_s - came_s) / came_s
    return {
        "set-up": name,
        "epoch foretold, s": round(foretold_s, 2),
        "came, s": round(came_s, 2),
        "off": f"{100 * off:.0f} %",
        "reads foretold, came": reads,
    }


def of_decoding(script: str, data: str) -> list[dict[str, object]]:
    """Decoding takes 16 ms a batch."""
    answer = explained(script, data, "1", "0.002", "1")
    by_workers = {case["workers"]: case["epoch_s"] for case in answer["by_workers"]}
    rows = []
    for workers in (1, 2):
        came_s = float(np.median(epochs(script, data, str(workers), "0.002", "1")[1:]))
        rows.append(row(f"decode-bound, {workers} workers", by_workers[workers], came_s))
    answer = explained(script, data, "1", "0.002", "2", ranks=2)
    by_workers = {case["workers"]: case["epoch_s"] for case in answer["by_workers"]}
    for workers in (1, 2):
        its = epochs(script, data, str(workers), "0.002", "2", ranks=2)[1:]
        name = f"2 ranks, decoding 1 : 2, {workers} workers each"
        rows.append(row(name, by_workers[workers], float(np.median(its))))
    return rows


def of_storage(
    script: str, data: str, mount: str, ranks: int, o: argparse.Namespace
) -> list[dict[str, object]]:
    rows = []
    with SlowFS(data, mount, bandwidth=o.bandwidth):  # type: ignore[no-untyped-call]
        answer = explained(script, mount, "2", "0.001", "1", ranks=ranks)
    by_memory = {case["share"]: case for case in answer["by_memory"]}
    for share in (0.5, 1.0)[: 3 - ranks]:
        held = int(share * o.files * (NBYTES + 4096 - NBYTES % 4096)) + (4 << 20) * (share == 1.0)
        with (
            SlowFS(data, mount, bandwidth=o.bandwidth) as fs,  # type: ignore[no-untyped-call]
            daemon_with(held),
        ):
            os.environ["CREEL_DAEMON__LINGER_S"] = "0"
            seconds = epochs(script, mount, "2", "0.001", "1", ranks=ranks)
            opens = fs.totals()["opens"]
        later = (opens - o.files) / (EPOCHS - 1)
        case = by_memory[share]
        came_s = float(np.median(seconds[1:]))
        reads = f"{case['reads']}, {later:.0f}"
        name = "2 ranks, " * (ranks == 2) + f"slow storage, {share:.0%} in memory"
        rows.append(row(name, case["epoch_s"], came_s, reads))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--files", type=int, default=640)
    parser.add_argument("--bandwidth", default="20M", help="of the slow storage, bytes a second")
    parser.add_argument("--only", choices=["layouts"], help="of these set-ups")
    parser.add_argument("--json", action="store_true")
    o = parser.parse_args()
    skip_without_fuse()
    if o.only:
        report(of_layouts(o))
        return
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        script, data, mount = (Path(name, part) for part in ("train.py", "data", "mount"))
        script.write_text(SCRIPT)
        data.mkdir()
        for i in range(o.files):
            (data / f"{i:05}").write_bytes(np.random.default_rng(i).bytes(NBYTES))
        report([
            *of_decoding(str(script), str(data)),
            *of_storage(str(script), str(data), str(mount), 1, o),
            *of_storage(str(script), str(data), str(mount), 2, o),
            *of_layouts(o),
        ])  # fmt: skip


if __name__ == "__main__":
    main()
