"""`python -m creel.daemon`: the command that starts an embedded daemon."""

from __future__ import annotations

import os
import sys

if "--embedded" in sys.argv and os.fork():
    # The trainer waits for this process at once: no zombie, and no thread that watches the daemon.
    os._exit(0)

# The daemon does no linear algebra. OpenBLAS of numpy would start a thread per processor that spins
# before it sleeps: 0.06 s of the 0.3 s of CPU time of a start, with two processors.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from creel.daemon.main import main

raise SystemExit(main())
