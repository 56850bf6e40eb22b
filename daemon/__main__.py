"""`python -m creel.daemon`: the command that starts an embedded daemon."""

from __future__ import annotations

import os
import sys

if "--embedded" in sys.argv and os.fork():
    # The trainer waits for this process: no zombie, and no thread of its own to watch us.
    os._exit(0)

# Nothing here is linear algebra: numpy's OpenBLAS would start a thread for each processor, which
# spins before it sleeps (0.06 s of the 0.3 s of a processor that a start takes, with two of them).
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from creel.daemon.main import main

raise SystemExit(main())
