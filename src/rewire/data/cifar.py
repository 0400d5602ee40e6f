"""CIFAR-10 and CIFAR-100: 60,000 colour images of 32x32 pixels.

A. Krizhevsky. Learning Multiple Layers of Features from Tiny Images. 2009.
"""

from __future__ import annotations

import gzip
import os
import pickle
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rewire.data import unpickle
from rewire.data.augment import Pixels
from rewire.data.download import fetch
from rewire.data.places import DataError, damaged
from rewire.data.splits import Dataset, Images

HOME = "https://www.cs.toronto.edu/~kriz"
MAX_BYTES = 1 << 29  # of one file; the largest has 215 million


@dataclass(frozen=True)
class Cifar:
    """One of the two, as its official archive lays it out."""

    name: str
    folder: str
    archive: str
    md5: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    meta: str
    labels: bytes
    label_names: bytes
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    def find(self, place: Path) -> Path | None:
        """Its folder or archive in ``place``, or ``place`` itself if it is one of them."""
        if place.is_file():
            return place
        for folder in (place / self.folder, place):
            if (folder / self.train[0]).is_file():
                return folder
        archive = place / self.archive
        return archive if archive.is_file() else None

    def read(self, path: Path) -> Dataset:
        """The data set from its folder or archive."""
        wanted = {*self.train, *self.test, self.meta}
        found: dict[str, dict[bytes, Any]] = {}
        try:
            for name, content in _contents(path, self.folder, wanted):
                found[name] = unpickle.loads(content)
        except pickle.UnpicklingError as error:
            raise damaged(self.name, path, f"{name}: {error}") from error
        except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
            raise damaged(self.name, path, str(error) or type(error).__name__) from error
        if lacking := sorted(wanted - found.keys()):
            raise damaged(self.name, path, f"there is no {', no '.join(lacking)}")
        try:
            classes = tuple(label.decode() for label in found[self.meta][self.label_names])
            train = self._images([found[name] for name in self.train], len(classes))
            test = self._images([found[name] for name in self.test], len(classes))
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise damaged(self.name, path, f"it does not hold what it should ({error})") from error
        return Dataset(
            self.name,
            Images(*train, self.mean, self.std, pad=4, flip=True),
            Images(*test, self.mean, self.std),
            classes,
        )

    def _images(self, parts: list[dict[bytes, Any]], classes: int) -> tuple[Pixels, torch.Tensor]:
        images = np.concatenate([part[b"data"].reshape(-1, 3, 32, 32) for part in parts])
        labels = torch.tensor([int(label) for part in parts for label in part[self.labels]])
        if len(images) == 0 or len(images) != len(labels):
            raise ValueError(f"{len(images)} images and {len(labels)} labels")
        if not 0 <= int(labels.min()) <= int(labels.max()) < classes:
            raise ValueError(f"labels outside the {classes} classes")
        return images, labels

    def download(self, place: Path) -> Path:
        """Fetch the official archive, and keep what is in it as a folder in ``place``."""
        archive = fetch(f"{HOME}/{self.archive}", self.md5, place)
        self.read(archive)
        wanted = {*self.train, *self.test, self.meta}
        temporary = Path(tempfile.mkdtemp(prefix=f".{self.folder}.", dir=place))
        try:
            for name, content in _contents(archive, self.folder, wanted):
                (temporary / name).write_bytes(content)
            temporary.chmod(0o755)
            if (place / self.folder).exists():
                shutil.rmtree(place / self.folder)
            temporary.replace(place / self.folder)
        except OSError as error:
            raise DataError(f"{place / self.folder} could not be written: {error}") from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        archive.unlink()
        return place / self.folder


def _contents(path: Path, folder: str, wanted: set[str]) -> Iterator[tuple[str, bytes]]:
    """The wanted files of a folder, or of that folder in an archive."""
    if path.is_dir():
        for name in sorted(wanted):
            if (path / name).is_file():
                _check_size(name, (path / name).stat().st_size)
                yield name, (path / name).read_bytes()
        return
    with gzip.open(path) as stream:
        with tarfile.open(fileobj=stream) as archive:
            for member in archive:
                parent, name = os.path.split(os.path.normpath(member.name))
                if parent == folder and name in wanted and member.isfile():
                    _check_size(name, member.size)
                    file = archive.extractfile(member)
                    assert file is not None
                    yield name, file.read()
        while stream.read(1 << 20):  # an archive ends before its checksum, which is looked at last
            pass


def _check_size(name: str, size: int) -> None:
    if size > MAX_BYTES:
        raise OSError(f"{name} has {size} bytes, far more than it should")


CIFAR10 = Cifar(
    name="cifar10",
    folder="cifar-10-batches-py",
    archive="cifar-10-python.tar.gz",
    md5="c58f30108f718f92721af3b95e74349a",
    train=tuple(f"data_batch_{i}" for i in range(1, 6)),
    test=("test_batch",),
    meta="batches.meta",
    labels=b"labels",
    label_names=b"label_names",
    mean=(0.491, 0.482, 0.447),
    std=(0.247, 0.243, 0.262),
)
CIFAR100 = Cifar(
    name="cifar100",
    folder="cifar-100-python",
    archive="cifar-100-python.tar.gz",
    md5="eb9058c3a382ffc7106e4002c42a8d85",
    train=("train",),
    test=("test",),
    meta="meta",
    labels=b"fine_labels",
    label_names=b"fine_label_names",
    mean=(0.507, 0.487, 0.441),
    std=(0.267, 0.256, 0.276),
)
