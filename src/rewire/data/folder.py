"""Folders of images by class, ImageNet among them, decoded by many processes on the way."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rewire.data.augment import Pixels, normalise
from rewire.data.decode import CROP_DRAWS, Crop, check_crop, decode
from rewire.data.places import DataError
from rewire.data.splits import Dataset, Request, Split

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm", ".pgm", ".tif", ".tiff")
TESTS = ("val", "test", "valid", "validation")
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet
SIZE = 224


@dataclass(frozen=True)
class ImageFiles(Split):
    """Image files of any size, which become squares of one.

    Training images are cropped as ``crop`` says (see :data:`rewire.data.decode.Crop`) and half of them
    mirrored; test images are the centre, at a shorter side of ``size * 256 / 224``.

    Args:
        paths: the files
        labels: int64, one for each of them
        size: height and width of what they become
        crop: "area" or "plain"
        workers: processes that decode; 0 for this one
    """

    paths: tuple[str, ...] = field(repr=False)
    labels: Tensor = field(repr=False)
    size: int = SIZE
    crop: Crop = "area"
    workers: int = 0
    mean: tuple[float, ...] = MEAN
    std: tuple[float, ...] = STD

    def __post_init__(self) -> None:
        check_crop(self.crop)
        if self.size < 1:
            raise ValueError(f"size must be at least 1, got {self.size}")
        if self.workers < 0:
            raise ValueError(f"workers must be at least 0, got {self.workers}")
        if self.labels.dtype != torch.int64 or self.labels.shape != (len(self.paths),):
            raise ValueError(
                f"labels must be int64, one for each of the {len(self.paths)} files, got "
                f"{self.labels.dtype} of shape {tuple(self.labels.shape)}"
            )

    @property
    def shape(self) -> tuple[int, int, int]:
        return 3, self.size, self.size

    @property
    def draws(self) -> int:
        return CROP_DRAWS

    def pixels(self, request: Request) -> Pixels:
        indices, draws = request
        result = np.empty((len(indices), *self.shape), np.uint8)
        for i, index in enumerate(indices):
            row = None if draws is None else draws[i]
            result[i] = decode(self.paths[index], 3, self.size, row, self.crop)
        return result

    def read_all(self, requests: Sequence[Request]) -> Iterator[Tensor]:
        if self.workers == 0:
            yield from super().read_all(requests)
            return
        batches = torch.utils.data.DataLoader(
            _Decoded(self, requests),
            batch_size=None,
            num_workers=min(self.workers, max(1, len(requests))),
            generator=torch.Generator(),  # else it takes a number from torch's global one
        )
        for pixels in batches:
            if isinstance(pixels, DataError):
                raise pixels
            yield normalise(pixels.numpy(), self.mean, self.std)


class _Decoded(torch.utils.data.Dataset[Tensor | DataError]):
    """Batches as the processes hand them over; an error is handed over too, to be raised as it is."""

    def __init__(self, split: ImageFiles, requests: Sequence[Request]) -> None:
        self.split, self.requests = split, requests

    def __len__(self) -> int:
        return len(self.requests)

    def __getitem__(self, index: int) -> Tensor | DataError:
        try:
            return torch.from_numpy(self.split.pixels(self.requests[index]))
        except DataError as error:
            return error


def find_imagenet(place: Path) -> Path | None:
    """The folder ``imagenet`` in ``place``, or ``place`` itself, with train and val in it."""
    for folder in (place / "imagenet", place):
        if (folder / "train").is_dir() and _test_folder(folder) is not None:
            return folder
    return None


def read(
    folder: Path,
    name: str | None = None,
    size: int = SIZE,
    crop: Crop = "area",
    workers: int | None = None,
) -> Dataset:
    """Images in one folder per class, below ``train`` and ``val`` (or ``test``).

    Without these two, every fifth image of a class is for testing. Names of classes and files are
    sorted, so that labels and order are the same everywhere.
    """
    if workers is None:
        workers = _cpus()
    test_folder = _test_folder(folder)
    if (folder / "train").is_dir() and test_folder is not None:
        train, test = _files(folder / "train"), _files(test_folder)
        if train.keys() != test.keys():
            lone = sorted(train.keys() ^ test.keys())[0]
            raise DataError(
                f"{folder / 'train'} and {test_folder} must hold the same classes, but {lone} is "
                "only in one of them"
            )
    else:
        files = _files(folder)
        test = {label: paths[4::5] for label, paths in files.items()}
        train = {
            label: [path for i, path in enumerate(paths) if i % 5 != 4]
            for label, paths in files.items()
        }

    def part(by_class: dict[str, list[str]]) -> ImageFiles:
        paths = tuple(path for found in by_class.values() for path in found)
        counts = torch.tensor([len(found) for found in by_class.values()])
        labels = torch.arange(len(by_class)).repeat_interleave(counts)
        return ImageFiles(paths, labels, size, crop, workers)

    return Dataset(name or folder.name, part(train), part(test), tuple(train))


def _test_folder(folder: Path) -> Path | None:
    return next((folder / name for name in TESTS if (folder / name).is_dir()), None)


def _files(folder: Path) -> dict[str, list[str]]:
    """The image files of each class."""
    try:
        labels = sorted(
            entry.name
            for entry in os.scandir(folder)
            if entry.is_dir() and not entry.name.startswith(".")
        )
        found = {
            label: sorted(
                entry.path
                for entry in os.scandir(folder / label)
                if entry.name.lower().endswith(SUFFIXES) and not entry.name.startswith(".")
            )
            for label in labels
        }
    except OSError as error:
        raise DataError(f"{folder} cannot be read: {error}") from error
    if not found:
        raise DataError(f"{folder} must hold one folder of images for each class, but holds none")
    for label, paths in found.items():
        if not paths:
            raise DataError(
                f"there are no images in {folder / label}, which should hold those of a class; "
                f"they are files that end in {', '.join(SUFFIXES)}"
            )
    return found


def _cpus() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not every system has it
        return os.cpu_count() or 1
