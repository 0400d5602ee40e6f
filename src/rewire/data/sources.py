"""The data sets there are, and how each is found, read and got."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rewire.data import digits, fashion, folder
from rewire.data.cifar import CIFAR10, CIFAR100
from rewire.data.decode import Crop
from rewire.data.places import DataError, Root, missing, places
from rewire.data.splits import Dataset


@dataclass(frozen=True)
class Source:
    """A data set that lies on disk.

    Attributes:
        about: its images, in a few words
        shape: of an image, as models take it
        classes: how many
        find: the data set in a place, or None
        read: the data set from where it was found; None if it is a folder of images
        download: get it into a place; None if only the user can
        advice: how to get it then
        system: places where a system's packages put it
    """

    about: str
    shape: tuple[int, int, int]
    classes: int
    find: Callable[[Path], Path | None]
    read: Callable[[Path], Dataset] | None
    download: Callable[[Path], Path] | None = None
    advice: str = ""
    system: Sequence[Path] = ()

    def looked(self, root: Root) -> list[Path]:
        """Where it is looked for."""
        return [*places(root), *(self.system if root is None else ())]


PACKAGED = "digits"
SOURCES = {
    CIFAR10.name: Source(
        "60,000 in 10 classes, 32x32",
        (3, 32, 32),
        10,
        CIFAR10.find,
        CIFAR10.read,
        CIFAR10.download,
    ),
    CIFAR100.name: Source(
        "60,000 in 100 classes, 32x32",
        (3, 32, 32),
        100,
        CIFAR100.find,
        CIFAR100.read,
        CIFAR100.download,
    ),
    fashion.NAME: Source(
        "70,000 in 10 classes, 28x28 grey",
        (1, 28, 28),
        10,
        fashion.find,
        fashion.read,
        fashion.download,
        system=fashion.SYSTEM,
    ),
    "imagenet": Source(
        "1.3 million in 1,000 classes",
        (3, 224, 224),
        1000,
        folder.find_imagenet,
        read=None,
        advice="ImageNet has to be asked for: register at image-net.org, download ILSVRC2012, and "
        "unpack it as imagenet/train/CLASS/*.JPEG and imagenet/val/CLASS/*.JPEG in one of these.",
    ),
}
NAMES = (PACKAGED, *SOURCES)


def sizes(name: str) -> tuple[tuple[int, int, int], int]:
    """The shape of an image as models take it, and the number of classes; nothing is read.

    Example:
        >>> sizes("cifar100")
        ((3, 32, 32), 100)
    """
    if name == PACKAGED:
        return (1, 8, 8), 10
    source = _source(name)
    return source.shape, source.classes


def load(
    name: str = PACKAGED,
    root: Root = None,
    *,
    download: bool = False,
    size: int | None = None,
    crop: Crop | None = None,
    workers: int | None = None,
) -> Dataset:
    """The data set called ``name``, or a folder of images by class.

    Args:
        name: digits, cifar10, cifar100, fashion-mnist, imagenet, or the path of a folder that holds
            one folder of images for each class, or ``train`` and ``val`` with such folders in them.
        root: the place to look in; without it, the folder that the environment variable REWIRE_DATA
            names, then the user's cache, then where a system's packages put it.
        download: get it if it is not there.
        size: height and width of what images become, 224 by default; for ImageNet and folders.
        crop: how training images are cut out of larger ones; for ImageNet and folders. "area" (the
            default) takes a random part of random size and shape, as the authors' code does; "plain"
            takes a random square of the resized image.
        workers: processes that decode images, one for each CPU by default, 0 for none but this one;
            for ImageNet and folders.

    Raises:
        DataError: if it is not there, not whole, or cannot be downloaded.
        ValueError: if there is no data set of that name.

    Example:
        >>> load("digits").shape
        (1, 8, 8)
    """
    options: dict[str, Any] = {"size": size, "crop": crop}
    options = {key: value for key, value in options.items() if value is not None}
    if name not in NAMES and _is_path(name):
        return folder.read(Path(name).expanduser(), workers=workers, **options)
    source = None if name == PACKAGED else _source(name)
    if options and (source is None or source.read is not None):
        raise ValueError(f"the images of {name} have one size; leave out {' and '.join(options)}")
    if source is None:
        return digits.read()
    path = find(name, root)
    if path is None and download:
        path = get(name, root)
    if path is None:
        advice = source.advice or f"Get it with `rewire data get {name}`."
        raise missing(name, source.looked(root), advice)
    if source.read is not None:
        return source.read(path)
    return folder.read(path, name, workers=workers, **options)


def find(name: str, root: Root = None) -> Path | None:
    """Where the data set called ``name`` lies, if it lies anywhere; :func:`load` says where it looks."""
    source = _source(name)
    return next((path for path in map(source.find, source.looked(root)) if path is not None), None)


def get(name: str, root: Root = None) -> Path:
    """Where the data set called ``name`` lies; it is downloaded unless it is there and whole."""
    source = _source(name)
    path = find(name, root)
    if path is not None and _is_whole(source, path):
        return path
    if source.download is None:
        raise missing(name, source.looked(root), source.advice)
    path = source.download(places(root)[0])
    if source.read is not None:
        source.read(path)
    return path


def _is_whole(source: Source, path: Path) -> bool:
    try:
        if source.read is not None:
            source.read(path)
    except DataError:
        return False
    return True


def _source(name: str) -> Source:
    if name not in SOURCES:
        raise ValueError(
            f"there is no data set {name!r}; choose one of {', '.join(NAMES)}, or give the path of "
            "a folder with one folder of images for each class"
        )
    return SOURCES[name]


def _is_path(name: str) -> bool:
    return os.sep in name or name in (".", "..") or Path(name).expanduser().is_dir()
