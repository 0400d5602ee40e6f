"""Folders of images by class, ImageNet among them: decoding, crops, many processes."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from rewire import data
from rewire.data import DataError, ImageFiles, Loader, decode, folder, places
from rewire.data.augment import normalise

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

CLASSES = ("bee", "cat", "dog")


def write_image(path: Path, seed: int, width: int = 40, height: int = 30) -> None:
    """A smooth picture, so that JPEG and resizing change it little."""
    rng = np.random.default_rng(seed)
    corners = Image.fromarray(rng.integers(0, 256, (3, 3, 3), dtype=np.uint8))
    path.parent.mkdir(parents=True, exist_ok=True)
    corners.resize((width, height), Image.Resampling.BICUBIC).save(path, quality=95)


def write_imagenet(place: Path, train: int = 8, val: int = 3) -> Path:
    for part, n in (("train", train), ("val", val)):
        for i, label in enumerate(CLASSES):
            for j in range(n):
                seed = 100 * i + j + (50 if part == "val" else 0)
                write_image(place / "imagenet" / part / label / f"{j:03}.JPEG", seed, 40 + seed % 7)
    return place / "imagenet"


def files(dataset: data.Dataset) -> tuple[ImageFiles, ImageFiles]:
    assert isinstance(dataset.train, ImageFiles)
    assert isinstance(dataset.test, ImageFiles)
    return dataset.train, dataset.test


def batches(split: ImageFiles, **settings: int) -> list[torch.Tensor]:
    return [x for x, _ in Loader(split, 8, train=True, **settings)]


# What is found ------------------------------------------------------------------------------------


def test_imagenet_is_found_and_labelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_imagenet(tmp_path)
    monkeypatch.setenv(places.VARIABLE, str(tmp_path))
    imagenet = data.load("imagenet")
    assert imagenet.name == "imagenet"
    assert imagenet.classes == CLASSES
    assert imagenet.shape == (3, 224, 224)
    train, test = files(imagenet)
    assert train.labels.tolist() == [0] * 8 + [1] * 8 + [2] * 8
    assert test.labels.tolist() == [0] * 3 + [1] * 3 + [2] * 3
    assert train.paths[9] == str(path / "train" / "cat" / "001.JPEG")
    assert train.mean == (0.485, 0.456, 0.406)
    assert train.workers >= 1
    assert files(data.load("imagenet", path, workers=0))[0].paths == train.paths


def test_a_folder_is_given_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_imagenet(tmp_path)
    (path / "val").rename(path / "test")
    photos = data.load(str(path), size=16, workers=0)
    assert (photos.name, photos.shape, photos.classes) == ("imagenet", (3, 16, 16), CLASSES)
    monkeypatch.chdir(path.parent)
    assert len(data.load("./imagenet").train) == 24
    with pytest.raises(DataError, match="cannot be read"):
        data.load("./nothing")


def test_without_a_split_every_fifth_image_is_for_testing(tmp_path: Path) -> None:
    for label in CLASSES:
        for i in range(11):
            write_image(tmp_path / label / f"{i:02}.png", i)
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "cat" / "notes.txt").write_text("no image")
    train, test = files(data.load(str(tmp_path)))
    names = [Path(path).name for path in test.paths]
    assert names == ["04.png", "09.png"] * 3
    assert len(train) == 27
    assert not set(train.paths) & set(test.paths)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: (p / "val" / "ant").mkdir(), "no images in .*ant"),
        (lambda p: write_image(p / "val" / "ant" / "1.png", 0), "ant is only in one of them"),
        (lambda p: (p / "train").rename(p / "other"), "no images in .*other"),
    ],
)
def test_folders_that_do_not_fit(
    tmp_path: Path, change: Callable[[Path], None], message: str
) -> None:
    path = write_imagenet(tmp_path)
    change(path)
    with pytest.raises(DataError, match=message):
        data.load(str(path))


def test_a_folder_without_classes(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="one folder of images for each class, but holds none"):
        data.load(str(tmp_path))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": 0}, "size must be at least 1"),
        ({"crop": "centre"}, "crop must be one of area, plain"),
        ({"workers": -1}, "workers must be at least 0"),
    ],
)
def test_bad_options(tmp_path: Path, change: dict[str, object], message: str) -> None:
    write_imagenet(tmp_path)
    with pytest.raises(ValueError, match=message):
        data.load("imagenet", tmp_path, **change)  # type: ignore[arg-type]


# Crops --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "height"), [(60, 40), (40, 60), (20, 11), (32, 32)])
def test_test_images_are_the_centre_at_a_larger_side(
    tmp_path: Path, width: int, height: int
) -> None:
    write_image(tmp_path / "x.png", 0, width, height)
    result = decode.decode(str(tmp_path / "x.png"), 3, 28)
    with Image.open(tmp_path / "x.png") as image:
        scale = 32 / min(width, height)  # 28 * 256 / 224
        resized = image.resize((int(width * scale), int(height * scale)), Image.Resampling.BILINEAR)
    left, top = round((resized.width - 28) / 2), round((resized.height - 28) / 2)
    expected = np.asarray(resized)[top : top + 28, left : left + 28].transpose(2, 0, 1)
    assert np.array_equal(result, expected)


@pytest.mark.parametrize("crop", ["area", "plain"])
@pytest.mark.parametrize("mirror", [0.2, 0.7])
def test_training_crops(tmp_path: Path, crop: decode.Crop, mirror: float) -> None:
    write_image(tmp_path / "x.png", 0, 60, 40)
    draws = np.random.default_rng(0).random(decode.CROP_DRAWS)
    draws[-1] = mirror
    result = decode.decode(str(tmp_path / "x.png"), 3, 28, draws, crop)
    with Image.open(tmp_path / "x.png") as image:
        if crop == "area":
            part = image.crop(decode.area_box(60, 40, draws))
            part = part.resize((28, 28), Image.Resampling.BILINEAR)
        else:
            resized = image.resize((48, 32), Image.Resampling.BILINEAR)
            left, top = int(draws[-3] * 21), int(draws[-2] * 5)
            part = resized.crop((left, top, left + 28, top + 28))
    expected = np.asarray(part)
    if mirror < 0.5:
        expected = expected[:, ::-1]
    assert np.array_equal(result, expected.transpose(2, 0, 1))


@given(width=st.integers(1, 900), height=st.integers(1, 900), seed=st.integers(0, 999))
def test_an_area_lies_within_the_image(width: int, height: int, seed: int) -> None:
    draws = np.random.default_rng(seed).random(decode.CROP_DRAWS)
    left, top, right, bottom = decode.area_box(width, height, draws)
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height


@pytest.mark.parametrize("u", [0, 0.3, 0.7])
@pytest.mark.parametrize("v", [0, 0.5, 1])
@pytest.mark.parametrize("corner", [0, 1 - 1e-9])
def test_area_shape_and_place_follow_the_numbers(u: float, v: float, corner: float) -> None:
    draws = np.full(decode.CROP_DRAWS, float(corner))
    draws[:2] = u, v
    left, top, right, bottom = decode.area_box(1000, 1000, draws)
    w, h = right - left, bottom - top
    assert w * h / 1000**2 == pytest.approx(0.08 + 0.92 * u, rel=0.005)
    assert w / h == pytest.approx((4 / 3) ** (2 * v - 1), rel=0.005)
    assert (left, top) == (0, 0) if corner == 0 else (right, bottom) == (1000, 1000)


def test_an_area_that_does_not_fit_is_drawn_again() -> None:
    draws = np.zeros(decode.CROP_DRAWS)
    draws[:4] = 0.99, 1, 0.3, 0.5
    left, top, right, bottom = decode.area_box(1000, 1000, draws)
    assert right - left == bottom - top == round(1000 * (0.08 + 0.92 * 0.3) ** 0.5)


def test_an_image_of_an_extreme_shape_falls_back_to_its_centre() -> None:
    draws = np.full(decode.CROP_DRAWS, 0.99)
    left, top, right, bottom = decode.area_box(1000, 10, draws)
    assert (top, bottom) == (0, 10)
    assert right - left == 13
    assert abs(left + right - 1000) <= 1


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK", "1"])
def test_images_of_all_kinds_become_colour(tmp_path: Path, mode: str) -> None:
    path = tmp_path / ("x.tif" if mode == "CMYK" else "x.png")
    Image.new(mode, (20, 20)).save(path)
    assert decode.decode(str(path), 3, 8).shape == (3, 8, 8)
    assert decode.decode(str(path), 1, 8).shape == (1, 8, 8)


# Batches ------------------------------------------------------------------------------------------


def test_processes_give_the_same_batches_as_none(tmp_path: Path) -> None:
    write_imagenet(tmp_path)
    alone, helped = (
        data.load("imagenet", tmp_path, size=16, workers=workers) for workers in (0, 2)
    )
    state = torch.get_rng_state()
    for one, other in zip(files(alone), files(helped), strict=True):
        expected, result = batches(one, seed=1), batches(other, seed=1)
        assert len(result) == len(expected) > 0
        assert all(torch.equal(x, y) for x, y in zip(result, expected, strict=True))
    assert torch.equal(torch.get_rng_state(), state)
    _, test = files(helped)
    x = torch.cat([x for x, _ in Loader(test, 4, train=False)])
    expected_pixels = np.stack([decode.decode(path, 3, 16) for path in test.paths])
    assert torch.equal(x, normalise(expected_pixels, folder.MEAN, folder.STD))


def test_resume_and_shares_with_processes(tmp_path: Path) -> None:
    write_imagenet(tmp_path)
    train, _ = files(data.load("imagenet", tmp_path, size=16, workers=2))
    whole = batches(train)
    left = Loader(train, 8, train=True)
    assert torch.equal(next(iter(left))[0], whole[0])
    assert left.state_dict()["batch"] == 1  # handed over, whatever was decoded ahead
    resumed = Loader(train, 8, train=True, rank=1, world=2)
    resumed.load_state_dict(left.state_dict())
    rest = [x for x, _ in resumed]
    assert all(torch.equal(x, y[4:]) for x, y in zip(rest, whole[1:], strict=True))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("content", [b"", b"<html>404</html>", "half"])
def test_a_damaged_image_is_named(tmp_path: Path, workers: int, content: bytes | str) -> None:
    path = write_imagenet(tmp_path) / "val" / "cat" / "001.JPEG"
    path.write_bytes(path.read_bytes()[:300] if isinstance(content, str) else content)
    _, test = files(data.load("imagenet", tmp_path, size=16, workers=workers))
    with pytest.raises(DataError, match=r"cat.001\.JPEG cannot be read as an image") as caught:
        list(Loader(test, 4, train=False))
    assert "Traceback" not in str(caught.value)


# Single images ------------------------------------------------------------------------------------


def test_single_images_are_prepared_as_those_of_the_data_set(tmp_path: Path) -> None:
    digits = data.load("digits")
    assert isinstance(digits.test, data.Images)
    Image.fromarray(digits.test.images[3, 0]).save(tmp_path / "3.png")
    x = data.open_images([tmp_path / "3.png"], digits.shape, digits.test.mean, digits.test.std)
    assert torch.equal(x, digits.test.read((np.array([3]), None)))
    write_image(tmp_path / "photo.jpg", 0, 90, 50)
    x = data.open_images([tmp_path / "photo.jpg"] * 2, (3, 32, 32), (0.5,) * 3, (0.2,) * 3)
    assert x.shape == (2, 3, 32, 32)
    with pytest.raises(ValueError, match="must be square"):
        data.open_images([tmp_path / "photo.jpg"], (3, 32, 30), (0.5,) * 3, (0.2,) * 3)
