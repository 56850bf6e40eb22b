"""creel's datasets: torch Datasets whose bytes the daemon can have ready before they are read."""

from __future__ import annotations

from creel.loader.base import CreelDataset, Transformed
from creel.loader.files import FileDataset
from creel.loader.images import ImageFolder
from creel.loader.records import RecordDataset
from creel.loader.tars import TarDataset

__all__ = [
    "CreelDataset",
    "FileDataset",
    "ImageFolder",
    "RecordDataset",
    "TarDataset",
    "Transformed",
]
