"""Data sets, and batches of them in a reproducible order."""

from rewire.data.decode import open_images
from rewire.data.folder import ImageFiles
from rewire.data.loader import Loader
from rewire.data.places import DataError
from rewire.data.sources import NAMES, find, get, load, sizes
from rewire.data.splits import Dataset, Images, Split

__all__ = [
    "NAMES",
    "DataError",
    "Dataset",
    "ImageFiles",
    "Images",
    "Loader",
    "Split",
    "find",
    "get",
    "load",
    "open_images",
    "sizes",
]
