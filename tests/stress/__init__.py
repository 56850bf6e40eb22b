"""Tools that search for differences and leftovers; `make stress` runs random programs and chaos.

Started as `python -m tests.stress.NAME`, they find the tests' own modules as pytest does.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
