"""What is done to images before a model sees them, for whole batches at once.

Randomness comes in as uniform numbers in [0, 1), one row per image, so that the result is a function of
its arguments.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray
from torch import Tensor

Pixels = NDArray[np.uint8]
Draws = NDArray[np.float64]

CROP_AND_FLIP_DRAWS = 3


def crop_and_flip(images: Pixels, draws: Draws, pad: int, flip: bool) -> Pixels:
    """Crops of the size of the images, out of images with ``pad`` black pixels on all sides.

    Half of them are mirrored if ``flip`` is set.

    Args:
        images: (batch, channels, height, width)
        draws: (batch, 3), for top, left and mirroring
    """
    n, channels, height, width = images.shape
    size = 2 * pad + 1
    tops, lefts = (draws[:, :2].T * size).astype(np.intp)
    padded = np.zeros((n, channels, height + 2 * pad, width + 2 * pad), np.uint8)
    padded[:, :, pad : pad + height, pad : pad + width] = images
    image, channel, row, column = padded.strides
    windows = as_strided(  # every crop of every image, not copied
        padded,
        (n, size, size, channels, height, width),
        (image, row, column, channel, row, column),
    )
    crops: Pixels = windows[np.arange(n), tops, lefts]
    if flip:
        mirrored = draws[:, 2] < 0.5
        crops[mirrored] = crops[mirrored, ..., ::-1]
    return crops


def normalise(images: Pixels, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """``(images / 255 - mean) / std`` by channel, as float32."""
    scale = torch.tensor([1 / (255 * s) for s in std])[:, None, None]
    shift = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)])[:, None, None]
    return torch.from_numpy(images).to(torch.float32).mul_(scale).add_(shift)


def generator(seed: int, *key: int) -> np.random.Generator:
    """Random numbers that are a function of the seed and the key, apart for different keys."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=key))
