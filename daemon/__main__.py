"""`python -m creel.daemon`: what an embedded daemon is started by."""

from __future__ import annotations

import os
import sys

if "--embedded" in sys.argv and os.fork():
    # The trainer that starts us waits for this process: no zombie, no thread of its to watch us.
    os._exit(0)

from creel.daemon.main import main

raise SystemExit(main())
