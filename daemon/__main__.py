"""`python -m creel.daemon`: the command that starts an embedded daemon."""

from __future__ import annotations

import os
import sys

if "--embedded" in sys.argv and os.fork():
    # The trainer waits for this process: no zombie, and no thread of its own to watch us.
    os._exit(0)

from creel.daemon.main import main

raise SystemExit(main())
