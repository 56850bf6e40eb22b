"""creel's datasets: torch Datasets whose objects the daemon can fetch ahead of use."""

from __future__ import annotations

from creel.loader.data.datasets.base import CreelDataset, Transformed
from creel.loader.data.datasets.files import FileDataset
from creel.loader.data.datasets.images import ImageFolder
from creel.loader.data.datasets.records import RecordDataset
from creel.loader.data.datasets.tars import TarDataset
from creel.loader.data.datasets.tokens import TokenDataset

__all__ = [
    "CreelDataset",
    "FileDataset",
    "ImageFolder",
    "RecordDataset",
    "TarDataset",
    "TokenDataset",
    "Transformed",
]
