"""The key of samples that a person gave a name: of what they are made, and how, as far as one sees.

Covered are the files and which of them each sample is (of any other dataset, its pickle), the
source text, defaults, closures and plain attributes of functions and classes, and the versions of
libraries that make pixels. The name stands for the rest: globals, the environment, other modules.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import pickle
import platform
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib import metadata
from typing import Any

from creel.loader.data.user_code.attributes import is_code, plain_and_code

#: Changes with how a store lies in a file.
_FORMAT = 1
#: Distributions whose version may change a sample by a bit.
_LIBRARIES = (
    *("numpy", "torch", "torchvision", "torchaudio", "pillow", "pillow-simd", "simplejpeg"),
    *("opencv-python", "opencv-python-headless", "opencv-contrib-python", "PyTurboJPEG", "av"),
    *("imageio", "scikit-image", "tifffile", "scipy", "librosa", "soundfile", "tokenizers"),
    *("transformers", "albumentations", "kornia", "h5py", "zarr", "pydicom", "nibabel"),
)


def key_of(name: str, parts: Iterable[str], code: object) -> str:
    """Return the key: equal for the same name, parts, and code as `described`."""
    digest = hashlib.blake2b(digest_size=16)
    for text in (name, *parts, *described(code), *_libraries()):
        digest.update(text.encode(errors="backslashreplace") + b"\0")
    return digest.hexdigest()


def described(value: object) -> Iterator[str]:
    """Yield texts that differ if what a dataset or callable does is seen to differ.

    >>> list(described({"size": 256, "decode": len}))
    [' # dict 2', "['size'] = 256", "['decode'] builtins.len "]
    """
    for name, leaf in plain_and_code(value):
        yield f"{name} {_source(leaf) if is_code(leaf) else leaf}"


def pickled(value: object) -> str:
    """Return the digest of a dataset's pickle.

    Raises:
        Exception: it cannot be pickled.
    """
    digest = _Digest()
    pickle.Pickler(digest, protocol=4).dump(value)
    return digest.hash.hexdigest()


class _Digest:
    """A file that keeps nothing."""

    def __init__(self) -> None:
        self.hash = hashlib.blake2b(digest_size=16)

    def write(self, data: Any) -> int:
        self.hash.update(data)
        return memoryview(data).nbytes


def _source(code: Any) -> str:
    """Return the name and text of a function or class; only its name if it is not Python's."""
    text = ""
    with suppress(OSError, TypeError):
        text = inspect.getsource(code)
    return f"{code.__module__}.{getattr(code, '__qualname__', '')} {text}"


@functools.cache
def _libraries() -> tuple[str, ...]:
    versions = [f"format {_FORMAT}", f"Python {platform.python_version()}"]
    for library in _LIBRARIES:
        with suppress(metadata.PackageNotFoundError):
            versions.append(f"{library} {metadata.version(library)}")
    with suppress(ImportError):
        from PIL import features

        versions.append(f"libjpeg {features.version('jpg')} {features.version('libjpeg_turbo')}")
    return tuple(versions)
