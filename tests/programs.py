"""Training programs of tests, each in a process of its own that has imported torch and creel.

Most programs would spend most of their time on a second of imports (see forks.py).
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from forks import Forked, prepare


class Program(Forked):
    """`python -c CODE ARGUMENTS...`, with a pipe for each of its standard files."""

    def __init__(
        self,
        code: str,
        *arguments: str,
        env: Mapping[str, str] | None = None,
        inside: int = 0,
        new_session: bool = False,
    ) -> None:
        """`env`: all its variables, by default those of this process; `inside`: see `Forked`."""
        (in_, stdin), (stdout, out), (stderr, err) = (os.pipe() for _ in range(3))
        self.stdin = os.fdopen(stdin, "w")
        self.stdout = os.fdopen(stdout)
        self.stderr = os.fdopen(stderr)
        words = [textwrap.dedent(code), *arguments]
        try:
            super().__init__(
                _LINE,
                words,
                (in_, out, err),
                os.environ if env is None else env,
                inside=inside,
                new_session=new_session,
            )
        finally:
            for fd in (in_, out, err):
                os.close(fd)

    def communicate(self, said: str = "") -> tuple[str, str]:
        """As Popen.communicate."""
        with self.stdin, self.stdout, self.stderr, ThreadPoolExecutor(1) as beside:
            errors = beside.submit(self.stderr.read)
            self.stdin.write(said)
            self.stdin.close()
            answer = self.stdout.read(), errors.result()
        self.wait()
        return answer


_LINE = prepare("program")
