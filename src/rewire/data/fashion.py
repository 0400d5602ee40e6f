"""Fashion-MNIST: 70,000 grey images of clothes, 28x28 pixels.

H. Xiao, K. Rasul, R. Vollgraf. Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine Learning
Algorithms. 2017.
"""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import numpy as np
import torch

from rewire.data.augment import Pixels
from rewire.data.download import fetch
from rewire.data.places import damaged
from rewire.data.splits import Dataset, Images

NAME = "fashion-mnist"
URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
FILES = {  # with the checksums of their official .gz
    "train-images-idx3-ubyte": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte": "25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte": "bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte": "bb300cfdad3c16e7a12a480ee83cd310",
}
FOLDERS = (NAME, "FashionMNIST/raw", "")  # ours and Debian's, torchvision's, the place itself
SYSTEM = (Path("/usr/share/datasets"),)  # where Debian's package dataset-fashion-mnist puts it
CLASSES = (
    "t-shirt/top",
    "trouser",
    "pullover",
    "dress",
    "coat",
    "sandal",
    "shirt",
    "sneaker",
    "bag",
    "ankle boot",
)
MEAN, STD = (0.286,), (0.353,)
MAX_BYTES = 1 << 27  # of one file, unpacked; the largest has 47 million


def find(place: Path) -> Path | None:
    """The folder with the four files in ``place``, packed or not."""
    first = next(iter(FILES))
    for folder in (place / name for name in FOLDERS):
        if _file(folder, first) is not None:
            return folder
    return None


def read(folder: Path) -> Dataset:
    """The data set from the folder with its four files."""

    def part(prefix: str) -> Images:
        images = _idx(folder, f"{prefix}-images-idx3-ubyte", 3)
        labels = _idx(folder, f"{prefix}-labels-idx1-ubyte", 1)
        if len(images) == 0 or len(images) != len(labels):
            why = f"{prefix} has {len(images)} images and {len(labels)} labels"
            raise damaged(NAME, folder, why)
        if labels.max() >= len(CLASSES):
            raise damaged(NAME, folder, f"{prefix} has labels above {len(CLASSES) - 1}")
        return Images(images[:, None], torch.from_numpy(labels.astype(np.int64)), MEAN, STD)

    return Dataset(NAME, part("train"), part("t10k"), CLASSES)


def download(place: Path) -> Path:
    """Fetch the four official files into a folder in ``place``."""
    folder = place / NAME
    for name, md5 in FILES.items():
        fetch(f"{URL}/{name}.gz", md5, folder)
    return folder


def _file(folder: Path, name: str) -> Path | None:
    return next((p for p in (folder / name, folder / f"{name}.gz") if p.is_file()), None)


def _idx(folder: Path, name: str, dimensions: int) -> Pixels:
    """The array of bytes in a file of the IDX format."""
    path = _file(folder, name)
    if path is None:
        raise damaged(NAME, folder, f"there is no {name} or {name}.gz")
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise damaged(NAME, folder, f"{path.name}: {error}") from error
    header = 4 + 4 * dimensions
    magic = bytes((0, 0, 8, dimensions))  # 8: unsigned bytes
    shape = [int.from_bytes(content[i : i + 4], "big") for i in range(4, header, 4)]
    if content[:4] != magic or header + math.prod(shape) != len(content):
        raise damaged(NAME, folder, f"{path.name} is not what its first bytes say")
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)
