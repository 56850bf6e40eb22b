"""Datasets that know their objects; `creel.loader.data.datasets` defines them."""

from __future__ import annotations

from creel.loader.data.datasets import (
    CreelDataset,
    FileDataset,
    ImageFolder,
    RecordDataset,
    TarDataset,
    Transformed,
)

__all__ = [
    "CreelDataset",
    "FileDataset",
    "ImageFolder",
    "RecordDataset",
    "TarDataset",
    "Transformed",
]
