"""Data: the packaged digits, augmentation, and the order of batches."""

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rewire import data
from rewire.data import Images, Loader
from rewire.data.augment import crop_and_flip, normalise

Batch = tuple[torch.Tensor, torch.Tensor]


def some_images(
    n: int = 50, size: int = 6, seed: int = 0, pad: int = 2, flip: bool = True
) -> Images:
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (n, 3, size, size), dtype=np.uint8)
    labels = torch.arange(n)  # so that a label says which image it belongs to
    return Images(images, labels, (0.4, 0.5, 0.6), (0.2, 0.3, 0.25), pad=pad, flip=flip)


def assert_same(batches: list[Batch], expected: list[Batch]) -> None:
    assert len(batches) == len(expected)
    for (x, y), (x_expected, y_expected) in zip(batches, expected, strict=True):
        assert torch.equal(x, x_expected)
        assert torch.equal(y, y_expected)


# Digits -------------------------------------------------------------------------------------------


def test_digits_are_the_default_and_complete() -> None:
    digits = data.load()
    assert digits.name == "digits"
    assert digits.shape == (1, 8, 8)
    assert digits.num_classes == 10
    assert (len(digits.train), len(digits.test)) == (1297, 500)
    for part in (digits.train, digits.test):
        per_class = part.labels.bincount()
        assert len(per_class) == 10
        assert per_class.min() > 0.9 * per_class.float().mean()


def test_digits_are_normalised() -> None:
    digits = data.load("digits")
    x = digits.train.read((np.arange(len(digits.train)), None))
    assert x.mean().abs() < 0.01
    assert (x.std() - 1).abs() < 0.01


def test_the_first_digit_is_the_one_of_the_original() -> None:
    digits = data.load()
    assert isinstance(digits.train, Images)
    assert digits.train.labels[0] == 0
    shades = np.round(digits.train.images[0, 0] * (16 / 255)).astype(int)
    assert shades.tolist() == [
        [0, 0, 5, 13, 9, 1, 0, 0],
        [0, 0, 13, 15, 10, 15, 5, 0],
        [0, 3, 15, 2, 0, 11, 8, 0],
        [0, 4, 12, 0, 0, 8, 8, 0],
        [0, 5, 8, 0, 0, 9, 8, 0],
        [0, 4, 11, 0, 1, 12, 7, 0],
        [0, 2, 14, 5, 10, 12, 0, 0],
        [0, 0, 6, 13, 10, 0, 0, 0],
    ]


# Augmentation -------------------------------------------------------------------------------------


@given(
    n=st.integers(0, 5),
    height=st.integers(1, 6),
    width=st.integers(1, 6),
    pad=st.integers(0, 4),
    flip=st.booleans(),
    seed=st.integers(0, 99),
)
def test_crop_and_flip_agrees_with_one_image_at_a_time(
    n: int, height: int, width: int, pad: int, flip: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    images = rng.integers(1, 256, (n, 2, height, width), dtype=np.uint8)
    draws = rng.random((n, 3))
    before = images.copy()
    result = crop_and_flip(images, draws, pad, flip)
    assert np.array_equal(images, before)
    for image, (top, left, mirror), crop in zip(images, draws, result, strict=True):
        padded = np.pad(image, ((0, 0), (pad, pad), (pad, pad)))
        i, j = int(top * (2 * pad + 1)), int(left * (2 * pad + 1))
        expected = padded[:, i : i + height, j : j + width]
        if flip and mirror < 0.5:
            expected = expected[:, :, ::-1]
        assert np.array_equal(crop, expected)


def test_uniform_numbers_give_every_crop_as_often() -> None:
    steps = (np.arange(12) + 0.5) / 12
    draws = np.stack(np.meshgrid(steps, steps, steps), axis=-1).reshape(-1, 3)
    images = np.arange(1, 26, dtype=np.uint8).reshape(1, 1, 5, 5).repeat(len(draws), 0)
    crops = crop_and_flip(images, draws, pad=1, flip=True)
    _, counts = np.unique(crops.reshape(len(draws), 25), axis=0, return_counts=True)
    assert counts.tolist() == [12**3 // 18] * 18  # nine positions, two ways round


def test_normalise() -> None:
    images = np.random.default_rng(0).integers(0, 256, (4, 3, 5, 5), dtype=np.uint8)
    mean, std = torch.tensor([0.491, 0.482, 0.447]), torch.tensor([0.247, 0.243, 0.262])
    x = normalise(images, mean.tolist(), std.tolist())
    scaled = torch.from_numpy(images).double() / 255
    expected = (scaled - mean[:, None, None]) / std[:, None, None]
    assert x.dtype == torch.float32
    torch.testing.assert_close(x.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"images": np.zeros((50, 3, 6), np.uint8)}, "images must be uint8"),
        ({"images": np.zeros((50, 3, 6, 6), np.float32)}, "images must be uint8"),
        ({"labels": torch.arange(49)}, "one for each of the 50 images"),
        ({"labels": torch.zeros(50)}, "labels must be int64"),
        ({"mean": (0.5,)}, "each of 3 channels"),
        ({"std": (0.2, 0.2, 0.0)}, "above 0"),
        ({"pad": -1}, "pad must be at least 0"),
    ],
)
def test_images_that_do_not_fit_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(some_images(), **change)  # type: ignore[arg-type]


# Order and position -------------------------------------------------------------------------------


def test_training_goes_through_all_images_and_drops_a_partial_batch() -> None:
    loader = Loader(some_images(50), 8, train=True)
    assert len(loader) == 6
    labels = torch.cat([y for _, y in loader])
    assert len(labels) == 48
    assert len(labels.unique()) == 48
    assert labels.tolist() != sorted(labels.tolist())


def test_testing_goes_through_all_images_in_order_again_and_again() -> None:
    split = some_images(50)
    loader = Loader(split, 8, train=False)
    assert len(loader) == 7
    next(iter(loader))  # left in the middle
    for _ in range(2):
        batches = list(loader)
        assert len(batches) == 7
        assert torch.cat([y for _, y in batches]).tolist() == list(range(50))
        expected = normalise(split.images, split.mean, split.std)
        assert torch.equal(torch.cat([x for x, _ in batches]), expected)


def test_an_image_keeps_its_label() -> None:
    split = some_images(pad=0, flip=False)
    for x, y in Loader(split, 8, train=True):
        assert torch.equal(x, normalise(split.images[y.numpy()], split.mean, split.std))


def test_order_and_augmentation_follow_from_seed_and_epoch() -> None:
    def epochs(seed: int) -> list[list[Batch]]:
        loader = Loader(some_images(), 8, train=True, seed=seed)
        return [list(loader), list(loader)]

    first, second = epochs(0)
    torch.manual_seed(1)
    again_first, again_second = epochs(0)
    assert_same(again_first, first)
    assert_same(again_second, second)
    others = [second, epochs(1)[0]]
    for other in others:
        assert not torch.equal(other[0][1], first[0][1])


def test_augmentation_differs_between_epochs_and_batches() -> None:
    same = replace(some_images(40), images=some_images(1).images.repeat(40, 0))
    loader = Loader(same, 8, train=True)
    batches = [x for _ in range(3) for x, _ in loader]
    assert len({x.numpy().tobytes() for x in batches}) == len(batches)


def test_torch_and_numpy_keep_their_global_random_state() -> None:
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()  # noqa: NPY002
    list(Loader(some_images(), 8, train=True))
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert np.array_equal(np.random.get_state()[1], numpy_state[1])  # noqa: NPY002


@pytest.mark.parametrize("after", [0, 1, 5, 6, 7, 12, 13])
def test_resuming_gives_the_same_batches(after: int) -> None:
    def steps(loader: Loader) -> list[Batch]:
        return [batch for _ in range(loader.epoch, 3) for batch in loader]

    expected = steps(Loader(some_images(), 8, train=True))
    interrupted = Loader(some_images(), 8, train=True)
    seen = []
    while len(seen) < after:
        for batch in interrupted:
            seen.append(batch)
            if len(seen) == after:
                break
    resumed = Loader(some_images(), 8, train=True)
    resumed.load_state_dict(interrupted.state_dict())
    assert_same(seen + steps(resumed), expected)
    assert resumed.state_dict() == {**interrupted.state_dict(), "epoch": 3, "batch": 0}


def test_resuming_again_after_every_batch() -> None:
    whole = Loader(some_images(), 8, train=True)
    expected = [batch for _ in range(2) for batch in whole]
    seen: list[Batch] = []
    state = Loader(some_images(), 8, train=True).state_dict()
    for _ in range(2 * (6 + 1)):  # the batches of two epochs, and their ends
        loader = Loader(some_images(), 8, train=True)
        loader.load_state_dict(state)
        seen += islice(loader, 1)
        state = loader.state_dict()
    assert_same(seen, expected)
    assert (state["epoch"], state["batch"]) == (2, 0)


def test_after_the_last_batch_the_epoch_still_has_to_end() -> None:
    loader = Loader(some_images(), 8, train=True)
    for _ in loader:
        state = loader.state_dict()
    assert (state["epoch"], state["batch"]) == (0, 6)
    resumed = Loader(some_images(), 8, train=True)
    resumed.load_state_dict(state)
    assert list(resumed) == []
    assert (resumed.epoch, resumed.batch) == (1, 0)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("train", [True, False])
def test_shares_of_all_ranks_are_the_batch(world: int, train: bool) -> None:
    def loader(rank: int, world: int) -> Loader:
        return Loader(some_images(50), 8, train=train, seed=3, rank=rank, world=world)

    whole = list(loader(0, 1))
    shares = [list(loader(rank, world)) for rank in range(world)]
    for rank, share in enumerate(shares):
        assert len(share) == len(loader(rank, world))
        assert all(len(y) == 8 // world for _, y in share[:6])
        assert all(len(y) > 0 for _, y in share)
    for i, (x, y) in enumerate(whole):
        parts = [share[i] for share in shares if i < len(share)]
        assert torch.equal(torch.cat([part for part, _ in parts]), x)
        assert torch.equal(torch.cat([part for _, part in parts]), y)


def test_a_position_holds_on_another_number_of_processes() -> None:
    one = Loader(some_images(), 8, train=True)
    next(iter(one))
    two = Loader(some_images(), 8, train=True, rank=1, world=2)
    two.load_state_dict(one.state_dict())
    assert torch.equal(next(iter(two))[0], next(iter(one))[0][4:])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"batch_size": 51}, "use a smaller batch_size"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"rank": 2, "world": 2}, "got 2 of 2"),
        ({"rank": 0, "world": 3}, "multiple of the number of processes"),
    ],
)
def test_bad_loader_arguments(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Loader(some_images(50), **{"batch_size": 8, **arguments}, train=True)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, "with seed 1, but this one has 0"),
        ({"batch_size": 16}, "with batch_size 16"),
        ({"samples": 3}, "with samples 3"),
        ({"batch": 7}, "there is no batch 7"),
        ({"epoch": -1}, "in epoch -1"),
        ({"more": 1}, "has the keys"),
    ],
)
def test_a_position_in_other_data_is_refused(change: dict[str, int], message: str) -> None:
    loader = Loader(some_images(), 8, train=True)
    with pytest.raises(ValueError, match=message):
        loader.load_state_dict({**loader.state_dict(), **change})
    assert (loader.epoch, loader.batch) == (0, 0)
