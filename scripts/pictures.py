"""Take the pictures of `creel top` and `creel plot` on the site, of one real run.

    sudo .venv/bin/python scripts/pictures.py      # writes docs/pictures/{top,plot}.svg

Two ranks of torchrun train in lockstep for some epochs. Their files lie on storage with 100 MB/s
and 3 ms per open (a FUSE mount, tests/testbed/slowfs.py, which needs root), memory is enough for
half of them, and samples of rank 1 take four times as long to decode.
"""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console

from creel.cli.processes import Usage
from creel.cli.recorded.plot import plot
from creel.cli.watching import top
from creel.cli.watching.forecasts import Forecasts
from creel.cli.watching.trace import trace
from creel.errors import UnavailableError
from creel.loader.client.client import Client
from creel.system.limits import cores

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from kit import until
from testbed.slowfs import SlowFS

#: Where the training finds its files: `creel top` shows the path.
MOUNT = "/mnt/photos"
PICTURES = Path(__file__).parents[1] / "docs/pictures"
FILES, NBYTES = 2000, 150_000
#: Seconds of training before the picture: two epochs; and of the batches that are drawn.
AFTER_S, SHOWN_S = 40.0, 10.0
WIDTH = 116  # characters of the terminal
TRAINING = """
import sys, time, torch, creel
import torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()

def decode(data):
    until = time.thread_time() + 0.001 + 0.003 * rank
    while time.thread_time() < until:
        pass
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)

paths = [f"{sys.argv[1]}/{i:05}" for i in range(int(sys.argv[2]))]
data = creel.FileDataset(paths, decode=decode)
sampler = torch.utils.data.DistributedSampler(data)
loader = creel.DataLoader(data, 16, sampler=sampler, num_workers=2, persistent_workers=True)
while True:
    for batch in loader:
        time.sleep(0.03)
        dist.all_reduce(torch.zeros(1))
"""


def run(folder: Path, name: str) -> subprocess.Popen[bytes]:
    """Start the training, whose first loader starts the daemon."""
    program = folder / "train.py"
    program.write_text(TRAINING)
    env = os.environ | {
        "CREEL_SOCKET": name,
        "CREEL_MEMORY__BUDGET": str(FILES * NBYTES // 2),
        "OMP_NUM_THREADS": "1",
    }
    job = ("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--rdzv-id=photos")
    launch = (sys.executable, "-m", "torch.distributed.run", *job, "--nproc-per-node=2")
    given = (str(program), MOUNT, str(FILES))
    return subprocess.Popen(
        [*launch, *given], env=env, stderr=subprocess.DEVNULL, start_new_session=True
    )


def serves(name: str) -> bool:
    try:
        Client.connect(name, "cli").close()
    except UnavailableError:
        return False
    return True


def picture_of_top(client: Client) -> str:
    """Return what `creel top` shows after some seconds, as SVG that loads no font."""
    usage, forecasts, began = Usage(), Forecasts(cores()), time.monotonic()
    first = client.ask("stats")
    usage.rows(client.daemon_pid, {s["pid"] for s in first["sessions"]})
    time.sleep(SHOWN_S)
    daemon, answer, now = client.ask("status"), client.ask("stats"), time.monotonic()
    before = top.starts([(began, first)], now)
    taken = usage.rows(daemon["pid"], {s["pid"] for s in answer["sessions"]})
    also = [*taken, *forecasts.rows(answer, before, now)]
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    console.print(top.screen(daemon, answer, before, WIDTH, also, forecasts.waits_s))
    svg = console.export_svg(title="creel top", unique_id="top")
    return re.sub(r"\s*@font-face \{.*?\}", "", svg, flags=re.DOTALL)


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="photos-", dir="/var/tmp") as where:
        folder, name = Path(where), f"pictures-{os.getpid()}"
        (folder / "data").mkdir()
        for i in range(FILES):
            (folder / f"data/{i:05}").write_bytes(os.urandom(NBYTES))
        slow = {"bandwidth": "100M", "open_latency": 3.0}
        with SlowFS(str(folder / "data"), MOUNT, **slow):  # type: ignore[no-untyped-call]
            training = run(folder, name)
            try:
                until(lambda: serves(name), 120, event="the training has a daemon")
                with Client.connect(name, "cli") as client:
                    time.sleep(AFTER_S)
                    (PICTURES / "top.svg").write_text(picture_of_top(client))
                    trace(client, str(folder / "trace.json"), SHOWN_S)
            finally:
                os.killpg(training.pid, signal.SIGTERM)
                training.wait()
        plot(str(folder / "trace.json"), str(PICTURES / "plot.svg"))


if __name__ == "__main__":
    main()
