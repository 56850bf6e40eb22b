"""What signals mean to a daemon.

Slurm, submitit and Lightning have signals sent to every process of a job, also to those that did
not ask for them: SIGUSR1 before a requeue, for example. The daemon would then lose its memory just
before it is needed, so no signal ends it but SIGTERM, SIGINT and SIGQUIT (and those of faults).
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

#: A thread waits for these, which tells who sent them. All others block them, and so do programs
#: that a library starts to get credentials; these end by themselves or by SIGKILL.
WAITED = frozenset(
    {
        signal.SIGTERM,
        signal.SIGINT,
        signal.SIGQUIT,
        signal.SIGHUP,
        signal.SIGUSR1,
        signal.SIGUSR2,
        signal.SIGXCPU,
        signal.SIGPWR,
    }
)
#: These do not end a process by default, or Python ignores them (SIGPIPE, SIGXFSZ).
_HARMLESS = {
    *(signal.SIGCHLD, signal.SIGCONT, signal.SIGURG, signal.SIGWINCH),
    *(signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU),
    *(signal.SIGPIPE, signal.SIGXFSZ),
}
#: These end the daemon: they report a fault, or cannot be caught.
_FATAL = {
    *(signal.SIGKILL, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE),
    *(signal.SIGILL, signal.SIGSEGV, signal.SIGSYS, signal.SIGTRAP),
}


def hold_signals() -> None:
    """From now on no signal ends this process by default; to be called before any thread begins."""
    # A program that a library starts inherits SIG_IGN, but no handler: some end by an alarm.
    signal.signal(signal.SIGALRM, lambda number, frame: None)  # noqa: ARG005
    handled = {*WAITED, *_HARMLESS, *_FATAL, signal.SIGALRM}
    for number in signal.valid_signals() - handled:
        signal.signal(number, signal.SIG_IGN)
    # The process that started this one has blocked all signals until now (`loader/client/embed`).
    signal.pthread_sigmask(signal.SIG_SETMASK, WAITED)


def watch_signals(take: Callable[[signal.Signals, str], None]) -> None:
    """Call `take(signal, "SIGTERM from ...")` for each of WAITED, in a thread.

    Threads that began before `hold_signals` (numpy's, in `creeld`) do not block them: what one of
    these gets is handled by the main thread, without its sender.
    """

    def handle(number: int, frame: object) -> None:
        del frame
        take(signal.Signals(number), signal.Signals(number).name)

    def run() -> None:
        while True:
            info = signal.sigwaitinfo(WAITED)
            number = signal.Signals(info.si_signo)
            take(number, f"{number.name} from {_sender(info.si_pid, info.si_code)}")

    for number in WAITED:
        signal.signal(number, handle)
    threading.Thread(target=run, name="creel-signals", daemon=True).start()


def _sender(pid: int, code: int) -> str:
    if code > 0:
        return "the kernel"
    name = ""
    with suppress(OSError):
        name = f" ({Path(f'/proc/{pid}/comm').read_text().strip()})"
    return f"process {pid}{name}" if pid else "a process outside this container"
