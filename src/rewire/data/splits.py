"""A data set and its two halves, the training and the test images."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rewire.data.augment import CROP_AND_FLIP_DRAWS, Draws, Pixels, crop_and_flip, normalise

if TYPE_CHECKING:
    from rewire.data.loader import Loader

Request = tuple[NDArray[np.intp], Draws | None]
"""The images of a batch, and the random numbers to augment them with (None: do not)."""


class Split(ABC):
    """Labelled images.

    Attributes:
        labels: class of every image, int64
        mean, std: of every channel, for pixels between 0 and 1
    """

    labels: Tensor
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image."""

    @property
    @abstractmethod
    def draws(self) -> int:
        """How many random numbers the augmentation of one image takes; 0 if there is none."""

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def pixels(self, request: Request) -> Pixels:
        """The images of one request, augmented, not normalised."""

    def read(self, request: Request) -> Tensor:
        """The images of one request, augmented and normalised, float32 (batch, *shape)."""
        return normalise(self.pixels(request), self.mean, self.std)

    def read_all(self, requests: Sequence[Request]) -> Iterator[Tensor]:
        """The images of many requests, one after the other."""
        for i in range(len(requests)):
            yield self.read(requests[i])


@dataclass(frozen=True)
class Images(Split):
    """Images of one size, in memory.

    Args:
        images: uint8 (images, channels, height, width)
        labels: int64 (images,)
        mean, std: of every channel, for pixels between 0 and 1
        pad: augment with random crops, out of images with so many black pixels on all sides
        flip: augment by mirroring half of the images
    """

    images: Pixels
    labels: Tensor
    mean: tuple[float, ...]
    std: tuple[float, ...]
    pad: int = 0
    flip: bool = False

    def __post_init__(self) -> None:
        if self.images.ndim != 4 or self.images.dtype != np.uint8:
            raise ValueError(
                "images must be uint8 of shape (images, channels, height, width), got "
                f"{self.images.dtype} of shape {self.images.shape}"
            )
        if self.labels.dtype != torch.int64 or self.labels.shape != self.images.shape[:1]:
            raise ValueError(
                f"labels must be int64, one for each of the {len(self.images)} images, got "
                f"{self.labels.dtype} of shape {tuple(self.labels.shape)}"
            )
        channels = self.images.shape[1]
        if len(self.mean) != channels or len(self.std) != channels or min(self.std) <= 0:
            raise ValueError(
                f"mean and std must have one number for each of {channels} channels, and std be "
                f"above 0, got {self.mean} and {self.std}"
            )
        if self.pad < 0:
            raise ValueError(f"pad must be at least 0, got {self.pad}")

    @property
    def shape(self) -> tuple[int, int, int]:
        _, channels, height, width = self.images.shape
        return channels, height, width

    @property
    def draws(self) -> int:
        return CROP_AND_FLIP_DRAWS if self.pad or self.flip else 0

    def pixels(self, request: Request) -> Pixels:
        indices, draws = request
        images = self.images[indices]
        return images if draws is None else crop_and_flip(images, draws, self.pad, self.flip)


@dataclass(frozen=True)
class Dataset:
    """Images to train on and others to test with, in the same classes."""

    name: str
    train: Split
    test: Split
    classes: tuple[str, ...]

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image."""
        return self.train.shape

    def loaders(
        self, batch_size: int = 128, *, seed: int = 0, rank: int = 0, world: int = 1
    ) -> tuple[Loader, Loader]:
        """Batches for training and for testing, see :class:`rewire.data.Loader`."""
        from rewire.data.loader import Loader

        return (
            Loader(self.train, batch_size, train=True, seed=seed, rank=rank, world=world),
            Loader(self.test, batch_size, train=False, seed=seed, rank=rank, world=world),
        )
