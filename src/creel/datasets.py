"""Datasets that know their objects; `creel.loader.datasets` defines them."""

from __future__ import annotations

from creel.loader.datasets import (
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
