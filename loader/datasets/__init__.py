"""creel's datasets: torch Datasets whose objects the daemon can fetch ahead of use."""

from __future__ import annotations

from creel.loader.datasets.base import CreelDataset, Transformed
from creel.loader.datasets.files import FileDataset
from creel.loader.datasets.images import ImageFolder
from creel.loader.datasets.records import RecordDataset
from creel.loader.datasets.tars import TarDataset

__all__ = [
    "CreelDataset",
    "FileDataset",
    "ImageFolder",
    "RecordDataset",
    "TarDataset",
    "Transformed",
]
