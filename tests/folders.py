"""torchvision's own image folders, the oracle for creel's.

They are imported without the models and operators of torchvision, which import torch's compiler:
this takes a second of CPU and 85 MB, so that a fork takes 8 ms instead of 5.7. Also, the operators
of a torchvision that was built for another torch cannot be registered.
"""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

pytest.importorskip("PIL")
_LEFT_OUT = ("torchvision.models", "torchvision.ops", "torchvision._meta_registrations")
_empty = {name: ModuleType(name) for name in _LEFT_OUT if "torchvision" not in sys.modules}
sys.modules.update(_empty)
try:
    from torchvision.datasets import folder
except ImportError:
    pytest.skip("torchvision is not installed", allow_module_level=True)
finally:
    for _name in _empty:
        del sys.modules[_name]  # a later import gets the real module

__all__ = ["folder"]
