"""torchvision's real image folders, the oracle of creel's.

A torchvision that was built for another build of torch fails at import, because its C++ operators
cannot be registered. Its folders are plain Python and need none: then the import is done again
with the registration of operators left out.
"""

from __future__ import annotations

from unittest import mock

import pytest

pytest.importorskip("PIL")
try:
    from torchvision.datasets import folder
except ImportError:
    pytest.skip("torchvision is not installed", allow_module_level=True)
except RuntimeError:
    with mock.patch("torch.library.register_fake", return_value=lambda function: function):
        from torchvision.datasets import folder

__all__ = ["folder"]
