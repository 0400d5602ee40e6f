"""The handwritten digits that come with the package: no download, seconds to train on."""

from __future__ import annotations

from importlib import resources

import numpy as np
import torch

from rewire.data.splits import Dataset, Images

TRAIN = 1297  # images, the first of them; the last 500 are for testing


def read() -> Dataset:
    """1,797 images of 8x8 pixels, by E. Alpaydin and C. Kaynak (UCI, CC BY 4.0; see digits.md)."""
    with (
        resources.as_file(resources.files("rewire.data") / "digits.npz") as path,
        np.load(path, allow_pickle=False) as file,
    ):
        shades, labels = file["images"], torch.from_numpy(file["labels"].astype(np.int64))
    images = np.round(shades * (255 / 16)).astype(np.uint8)[:, None]

    def part(which: slice) -> Images:
        return Images(images[which], labels[which], mean=(0.306,), std=(0.376,))

    classes = tuple(str(digit) for digit in range(10))
    return Dataset("digits", part(slice(TRAIN)), part(slice(TRAIN, None)), classes)
