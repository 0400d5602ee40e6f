"""Image files to arrays of one size: decoding, resizing and cropping, one image at a time."""

from __future__ import annotations

import math
import os
import struct
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
from torch import Tensor

from rewire.data.augment import Draws, Pixels, normalise
from rewire.data.places import DataError

if TYPE_CHECKING:
    from PIL import Image

Crop = Literal["area", "plain"]
"""How a training image is cut out: a random part of it resized, or a random square at test size."""

TRIES = 10  # at a random area that fits
CROP_DRAWS = 2 * TRIES + 3
_LONG = 4  # times the shorter side: from there on only what is needed of an image is resized
_LONGEST = 100
_DAMAGE = (
    *(OSError, SyntaxError, ValueError, EOFError, OverflowError),
    *(KeyError, IndexError, TypeError, struct.error, zlib.error),
)  # what Pillow raises for files that are not whole
MARGIN = 256 / 224  # shorter side to crop, as in the paper


def decode(
    path: str,
    channels: int,
    size: int,
    draws: Draws | None = None,
    crop: Crop = "area",
    margin: float = MARGIN,
) -> Pixels:
    """The image in a file, cropped to a square, uint8 (channels, size, size).

    Without ``draws`` it is the centre, after the shorter side was resized to ``margin * size``.
    """
    from PIL import Image

    try:
        with Image.open(path) as file:
            _check_size(*file.size)
            image = _eight_bits(file).convert("L" if channels == 1 else "RGB")
    except (*_DAMAGE, Image.DecompressionBombError) as error:
        raise DataError(f"{path} cannot be read as an image: {error}") from error
    if draws is not None and crop == "area":
        image = image.crop(area_box(*image.size, draws))
        image = image.resize((size, size), Image.Resampling.BILINEAR)
    else:
        whole = _shorter(image.size, round(margin * size))
        spare = [side - size for side in whole]
        if draws is None:
            left, top = (round(extra / 2) for extra in spare)
        else:
            left, top = (int(u * (n + 1)) for u, n in zip(draws[-3:-1], spare, strict=True))
        image = _part(image, whole, (left, top, left + size, top + size))
    pixels = np.asarray(image)
    if draws is not None and draws[-1] < 0.5:
        pixels = pixels[:, ::-1]
    return pixels.reshape(size, size, channels).transpose(2, 0, 1)


def _check_size(width: int, height: int) -> None:
    """Raise a ValueError for an image whose shorter side cannot be resized without a flood of pixels."""
    if min(width, height) * _LONGEST < max(width, height):
        raise ValueError(
            f"it has {width} x {height} pixels; one side may be at most {_LONGEST} times the other"
        )


def _eight_bits(image: Image.Image) -> Image.Image:
    """The same with eight bits for each colour: Pillow cuts larger numbers off, and does not scale them."""
    from PIL import Image

    # As some versions read PNG, and all read PGM, whose numbers Pillow itself scales.
    sixteen = image.mode == "I" and image.format in ("PNG", "PPM")
    if image.mode.startswith("I;16") or sixteen:
        wide = np.asarray(image).astype(np.uint32)
        return Image.fromarray(((wide * 255 + 32767) // 65535).astype(np.uint8))
    if image.mode == "F":
        values = np.asarray(image)
        if not (np.isfinite(values).all() and values.min() >= 0 and values.max() <= 1):
            raise ValueError("its pixels are floats that are not all in [0, 1]")
        return Image.fromarray((values * 255).round().astype(np.uint8))
    if image.mode == "I":
        raise ValueError("its pixels are integers of 32 bits, of an unknown range")
    return image


def _shorter(sides: tuple[int, int], size: int) -> tuple[int, int]:
    """Width and height in the same proportions with a shorter side of ``size``."""
    width, height = sides
    shorter = min(width, height)
    return size * width // shorter, size * height // shorter


def _part(
    image: Image.Image, whole: tuple[int, int], box: tuple[int, int, int, int]
) -> Image.Image:
    """The image resized to ``whole``, and of that what is in the box."""
    from PIL import Image

    if max(whole) <= _LONG * min(whole):
        return image.resize(whole, Image.Resampling.BILINEAR).crop(box)
    # The rest is not worked out at all: it may be a hundred times as much.
    across, down = (side / new for side, new in zip(image.size, whole, strict=True))
    source = (box[0] * across, box[1] * down, box[2] * across, box[3] * down)
    sides = (box[2] - box[0], box[3] - box[1])
    return image.resize(sides, Image.Resampling.BILINEAR, box=source)


def area_box(width: int, height: int, draws: Draws) -> tuple[int, int, int, int]:
    """A random part of an image, 8 to 100 % of its area and 3/4 to 4/3 as wide as high.

    The first of some tries that fits in; if none does, the centre in a shape within these bounds.
    """
    low, high = 3 / 4, 4 / 3
    for u, v in draws[: 2 * TRIES].reshape(-1, 2):
        area = width * height * (0.08 + 0.92 * u)
        ratio = math.exp(math.log(low) + (math.log(high) - math.log(low)) * v)
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left = int(draws[-3] * (width - w + 1))
            top = int(draws[-2] * (height - h + 1))
            return left, top, left + w, top + h
    w = min(width, max(1, round(height * high)))
    h = min(height, max(1, round(width / low)))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def check_crop(crop: str) -> None:
    if crop not in get_args(Crop):
        raise ValueError(f"crop must be one of {', '.join(get_args(Crop))}, got {crop!r}")


def open_images(
    paths: Sequence[str | os.PathLike[str]],
    shape: tuple[int, int, int],
    mean: Sequence[float],
    std: Sequence[float],
    margin: float = 1.0,
) -> Tensor:
    """Image files of any size as a model that was trained on ``shape`` expects them.

    Args:
        paths: the files.
        shape: channels, height and width; images are square.
        mean, std: of every channel, as in the :class:`~rewire.data.Split` of the training.
        margin: how much longer than the crop the shorter side is, ``MARGIN`` for folders of images.
    """
    channels, height, width = shape
    if height != width:
        raise ValueError(f"images must be square, got {height}x{width}")
    images = [decode(os.fspath(p), channels, height, margin=margin) for p in paths]
    return normalise(np.stack(images), mean, std)
