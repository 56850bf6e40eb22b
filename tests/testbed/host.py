"""Programs inside the namespaces of an emulated host: its init, and the relay of a delayed link.

`testbed.cluster` starts this file as a program of its own; it imports only the standard library.
"""
from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import select
import signal
import socket
import struct
import sys
import time
from collections import deque
from pathlib import Path

MS_BIND, MS_REC, MS_PRIVATE, MS_NOSUID, MS_NODEV = 4096, 16384, 1 << 18, 2, 4

libc = ctypes.CDLL(None, use_errno=True)


class TestbedError(RuntimeError):
    __test__ = False  # not a pytest class


def check(result: int, what: str) -> None:
    if result != 0:
        err = ctypes.get_errno()
        raise OSError(err, f"{what}: {os.strerror(err)}")


def _mount(source: str, target: str, fstype: str = "", flags: int = 0, data: str = "") -> None:
    check(libc.mount(source.encode(), target.encode(), fstype.encode() or None,
                       ctypes.c_ulong(flags), data.encode() or None), f"mount {target}")


def parse_size(text: "str | int") -> int:
    """'512m' -> bytes (k, m, g are powers of 1024)."""
    if isinstance(text, int):
        return text
    unit = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}.get(text[-1].lower())
    return int(float(text[:-1]) * unit) if unit else int(text)


def main_init(config: dict) -> None:
    """PID 1 of a host: private mounts, hostname, then reap until the lifeline closes."""
    lifeline, ready = config["lifeline"], config["ready"]
    # Hold open the paths that must stay visible under a private mount.
    binds = [(path, path) for path in config["keep"]] + config["binds"]
    held = [(os.open(source, os.O_PATH | os.O_CLOEXEC), os.path.isdir(source), target)
            for source, target in binds]
    _mount("none", "/", "", MS_REC | MS_PRIVATE)
    for path, size in config["private"].items():
        os.makedirs(path, exist_ok=True)
        mode = "0755" if path == "/run" else "1777"
        data = f"mode={mode}" + (f",size={parse_size(size)}" if size else "")
        _mount("testbed", path, "tmpfs", MS_NOSUID | MS_NODEV, data)
    for fd, is_dir, target in held:
        if is_dir:
            os.makedirs(target, exist_ok=True)
        elif not os.path.exists(target):
            Path(target).touch()
        _mount(f"/proc/self/fd/{fd}", target, "", MS_BIND | MS_REC)
        os.close(fd)
    socket.sethostname(config["hostname"])
    os.chdir("/")
    wake_r, wake_w = os.pipe()
    for fd in (wake_r, wake_w):
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(wake_w)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    os.write(ready, b"1")
    os.close(ready)
    watched = [wake_r] + ([lifeline] if lifeline is not None else [])
    while True:
        readable, _, _ = select.select(watched, [], [])
        if lifeline in readable:
            os._exit(0)
        with contextlib.suppress(BlockingIOError):
            os.read(wake_r, 512)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _open_tap(name: str) -> int:
    """Open a TAP device with checksum and TCP segmentation offload (64 KiB frames)."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    tap_no_pi_vnet = 0x0002 | 0x1000 | 0x4000
    fcntl.ioctl(fd, 0x400454CA, struct.pack("16sH22x", name.encode(), tap_no_pi_vnet))  # TUNSETIFF
    fcntl.ioctl(fd, 0x400454D0, 0x01 | 0x02 | 0x04)  # TUNSETOFFLOAD: csum, tso4, tso6
    os.set_blocking(fd, False)
    return fd


def main_relay(config: dict) -> None:
    """Carry frames between two TAPs; hold those from the host for `delay` seconds."""
    host, port = _open_tap(config["host_dev"]), _open_tap(config["port_dev"])
    lifeline, delay = config["lifeline"], config["delay"]
    os.write(config["ready"], b"1")
    os.close(config["ready"])
    held: "deque[tuple[float, bytes]]" = deque()
    watched = [host, port] + ([lifeline] if lifeline is not None else [])

    def send(fd: int, frame: bytes) -> None:
        with contextlib.suppress(BlockingIOError, OSError):  # a dropped frame; TCP resends
            os.write(fd, frame)

    while True:
        timeout = max(0.0, held[0][0] - time.monotonic()) if held else None
        readable, _, _ = select.select(watched, [], [], timeout)
        if lifeline in readable:
            return
        try:
            if host in readable:
                for _ in range(32):
                    held.append((time.monotonic() + delay, os.read(host, 70000)))
        except BlockingIOError:
            pass
        except OSError:
            return  # the host's end is gone
        try:
            if port in readable:
                for _ in range(32):
                    send(host, os.read(port, 70000))
        except BlockingIOError:
            pass
        now = time.monotonic()
        while held and held[0][0] <= now:
            send(port, held.popleft()[1])


if __name__ == "__main__":
    {"init": main_init, "relay": main_relay}[sys.argv[1]](json.loads(sys.argv[2]))
