"""Images that are rare or absurd: scaled, or refused by name, and never a flood of pixels."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rewire.data import DataError
from rewire.data.decode import decode

GREYS = [0, 300, 20000, 60000, 65535]
EIGHT = [0, 1, 78, 233, 255]  # of 65535, rounded


def saved(pixels: np.ndarray, path: Path) -> str:  # type: ignore[type-arg]
    Image.fromarray(pixels).save(path)
    return str(path)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_greys_of_sixteen_bits_are_scaled(suffix: str, channels: int, tmp_path: Path) -> None:
    pixels = np.tile(np.array(GREYS, dtype=np.uint16), (5, 1))
    path = saved(pixels, tmp_path / f"grey.{suffix}")
    found = decode(path, channels, 5, margin=1.0)
    assert found[0, 0].tolist() == EIGHT
    assert (found == found[:1, :1]).all()


def test_floats_are_scaled_from_one(tmp_path: Path) -> None:
    pixels = np.tile(np.array([0.0, 0.25, 1.0], dtype=np.float32), (3, 1))
    found = decode(saved(pixels, tmp_path / "f.tif"), 1, 3, margin=1.0)
    assert found[0, 0].tolist() == [0, 64, 255]


@pytest.mark.parametrize("odd", [-0.1, 255.0, float("nan"), float("inf")])
def test_other_floats_are_refused(odd: float, tmp_path: Path) -> None:
    path = saved(np.full((3, 3), odd, dtype=np.float32), tmp_path / "odd.tif")
    with pytest.raises(DataError, match=r"odd\.tif.*floats"):
        decode(path, 1, 3)


def test_integers_of_32_bits_are_refused(tmp_path: Path) -> None:
    path = saved(np.full((3, 3), 70000, dtype=np.int32), tmp_path / "deep.tif")
    with pytest.raises(DataError, match=r"deep\.tif.*32 bits"):
        decode(path, 1, 3)


@pytest.mark.parametrize("shape", [(1, 10_000), (10_000, 1), (3, 301)])
def test_a_line_is_refused_without_its_pixels(shape: tuple[int, int], tmp_path: Path) -> None:
    path = saved(np.zeros(shape, dtype=np.uint8), tmp_path / "line.png")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DataError, match=r"line\.png.*pixels"):
        decode(path, 3, 224)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # KB


def test_long_images_are_fine(tmp_path: Path) -> None:
    path = saved(np.full((3, 300), 7, dtype=np.uint8), tmp_path / "long.png")
    assert decode(path, 3, 16).tolist() == np.full((3, 16, 16), 7).tolist()


@pytest.mark.parametrize("most", [65535, 4095])
def test_portable_greys_of_sixteen_bits(most: int, tmp_path: Path) -> None:
    pixels = np.array([0, most // 3, most], dtype=">u2")
    path = tmp_path / "grey.pgm"
    path.write_bytes(b"P5\n3 1\n%d\n" % most + pixels.tobytes())
    assert decode(str(path), 1, 1, np.full(23, 0.999), crop="plain").tolist() == [[[255]]]
    assert decode(str(path), 1, 1, margin=1.0).tolist() == [[[85]]]


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("draws", [None, np.linspace(0.2, 0.9, 23)])
def test_what_is_cut_out_of_a_long_image(draws: Any, turned: bool, tmp_path: Path) -> None:
    """As of the whole image, resized; in single precision Pillow may round to the next number."""
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 255, (40, 900, 3)).astype(np.uint8)
    pixels = pixels.swapaxes(0, 1).copy() if turned else pixels
    path = saved(pixels, tmp_path / "long.png")
    found = decode(path, 3, 16, draws, crop="plain").astype(int)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rewire.data.decode._LONG", 1000)
        whole = decode(path, 3, 16, draws, crop="plain").astype(int)
    assert abs(found - whole).max() <= 1
    assert (found == whole).mean() > 0.99


def test_long_images_take_no_memory_for_what_is_cut_off(tmp_path: Path) -> None:
    path = saved(np.zeros((1, 100), dtype=np.uint8), tmp_path / "line.png")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert decode(path, 3, 2000).shape == (3, 2000, 2000)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 150_000  # KB


def outcome(path: Path) -> object:
    try:
        return decode(str(path), 3, 8).shape
    except DataError as error:
        return str(error)


@pytest.mark.filterwarnings("ignore")  # of Pillow
@pytest.mark.parametrize("suffix", ["png", "jpg", "tif", "gif", "bmp", "webp"])
def test_cut_and_flipped_files_are_images_or_refused_by_name(suffix: str, tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 255, (9, 11, 3)).astype(np.uint8)
    whole = Path(saved(pixels, tmp_path / f"whole.{suffix}")).read_bytes()
    path = tmp_path / f"damaged.{suffix}"
    for case in range(60):
        damaged = bytearray(whole)
        if case % 2:
            damaged = damaged[: generator.integers(len(whole))]
        else:
            damaged[generator.integers(len(whole))] ^= 1 << generator.integers(8)
        path.write_bytes(damaged)
        found = outcome(path)
        assert found == (3, 8, 8) or path.name in str(found)
