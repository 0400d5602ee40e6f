"""Converted models against the same model on torch's own layers, through everything a forward pass may do
with the output of a layer or a batch norm: torch's answer is due, or an error that is listed."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bodies import (
    Net,
    assert_close,
    assert_same,
    loss_of,
    marks,
    normal,
    plain,
    same_buffers,
    tensors_in,
)
from bodies_changes import CHANGES, ONLY_BY_TORCH, REFUSED
from bodies_images import IMAGES
from bodies_uses import USES
from rewire import SparseLinear, use_engine

pytestmark = marks
BODIES = USES | IMAGES | CHANGES


@pytest.mark.parametrize("name", [n for n in BODIES if n not in (*REFUSED, *ONLY_BY_TORCH)])
@pytest.mark.filterwarnings(
    "ignore:None of the inputs have requires_grad=True"
)  # torch's checkpoints
def test_bodies(name: str) -> None:
    """In training and in evaluation; of a batch that fills no panels, and where only parameters have
    gradients."""
    assert_same(Net(BODIES[name]))
    assert_same(Net(BODIES[name]).eval(), steps=1)
    assert_same(Net(BODIES[name]), normal(13, 3, 6, 6), steps=1, leaf=False)


def backward(model: Any) -> None:
    loss = loss_of(tensors_in(model(normal(8, 3, 6, 6).requires_grad_())))
    assert loss is not None
    loss.backward()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", REFUSED)
def test_changes_that_are_refused(name: str, training: bool) -> None:
    model = Net(BODIES[name]).train(training)
    reference = plain(model)
    use_engine(model)
    with pytest.raises(RuntimeError, match=REFUSED[name]):
        backward(model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        backward(reference)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ONLY_BY_TORCH)
def test_changes_that_torch_refuses(name: str, training: bool) -> None:
    """The gradients are those of the program with a change of a copy."""
    bodies = {  # what these programs are
        "input_rectified_in_place": lambda m, h: m.bn(h),
        "input_rectified_in_place_and_added": lambda m, h: m.bn(h) + F.relu(h),
        "input_shifted": lambda m, h: F.relu(m.bn(h)),
    }
    model = Net(BODIES[name]).train(training)
    copied = plain(model)
    copied.body = lambda m, x: bodies[name](m, m.conv(x))
    use_engine(model)
    for m in (model, copied):
        backward(m)
    assert_close(model.bn.weight.grad, copied.bn.weight.grad, 1e-9)  # type: ignore[arg-type]
    assert_close(model.conv.bias.grad, copied.conv.bias.grad, 1e-9)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["f_relu", "residual_block", "rectified_and_plain", "max_pool"])
@pytest.mark.parametrize(
    "options",
    [
        {"affine": False},
        {"track_running_stats": False},
        {"momentum": None},
        {"momentum": 0.0},
        {"momentum": 1.0},
        {"momentum": 0.3, "eps": 0.1},
        {"affine": False, "track_running_stats": False},
    ],
)
def test_kinds_of_batch_norm(name: str, options: dict[str, Any]) -> None:
    assert_same(Net(USES[name], **options), steps=3)
    assert_same(Net(USES[name], **options).eval(), steps=1)


def test_a_batch_norm_frozen_in_a_training_model() -> None:
    model = Net(USES["residual_block"])
    model.bn.eval()
    for parameter in model.bn.parameters():
        parameter.requires_grad_(False)
    assert_same(model)


def test_training_and_evaluation_in_turn() -> None:
    model = Net(USES["residual_block"])
    reference = plain(model)
    use_engine(model)
    optimizers = [torch.optim.SGD(m.bn.parameters(), lr=0.1) for m in (model, reference)]
    for step in range(6):
        x = normal(8, 3, 6, 6, seed=step)
        for m, optimizer in zip((model, reference), optimizers, strict=True):
            m.train(step % 2 == 0)
            m.zero_grad()
            m(x).square().sum().backward()
            optimizer.step()
        assert_close(model(x), reference(x), 1e-9)
        same_buffers(model, reference)


@pytest.mark.parametrize("batch", [1, 2, 3, 16, 33])
def test_any_batch_size(batch: int) -> None:
    for name in ("residual_block", "max_pool", "global_pool", "pad"):
        assert_same(Net(USES[name]), normal(batch, 3, 6, 6), steps=1)


def test_float32() -> None:
    model = Net(USES["residual_block"]).float()
    reference = plain(model)
    use_engine(model)
    x = normal(16, 3, 6, 6, dtype=torch.float32)
    torch.testing.assert_close(model(x), reference(x), rtol=1e-4, atol=1e-4)


def test_a_batch_that_is_too_small_is_refused_as_by_torch() -> None:
    model = Net(lambda m, x: F.relu(m.bn(m.conv(x)[:, :, :1, :1])))
    use_engine(model)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        model(normal(1, 3, 6, 6))
    assert_same(model)


@pytest.mark.parametrize("count", [12, 1, 3])
@pytest.mark.parametrize("tracks", [True, False])
def test_a_batch_norm_of_other_channels_is_refused_as_by_torch(count: int, tracks: bool) -> None:
    model = Net(lambda m, x: F.relu(m.bn(m.conv(x))))
    model.bn = nn.BatchNorm2d(count, track_running_stats=tracks, dtype=torch.float64)
    use_engine(model)
    for training in (True, False):
        model.train(training)
        with pytest.raises(RuntimeError, match=f"should contain 6 elements not {count}"):
            model(normal(8, 3, 6, 6))


def test_running_statistics_are_updated_once_per_call() -> None:
    for name in ("sum_and_plain", "rectified_twice", "kept_but_not_used", "dropped"):
        model = Net(USES[name])
        reference = plain(model)
        use_engine(model)
        for step in range(4):
            for m in (model, reference):
                m(normal(8, 3, 6, 6, seed=step))
        assert model.bn.num_batches_tracked == reference.bn.num_batches_tracked == 4
        same_buffers(model, reference)


class Features(nn.Module):
    """Linear layers and sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.first = SparseLinear(7, 12, sparsity=0.5, generator=torch.Generator().manual_seed(0))
        self.norm = nn.BatchNorm1d(12)
        self.second = SparseLinear(12, 4, sparsity=0.5, generator=torch.Generator().manual_seed(1))
        self.norm2 = nn.BatchNorm1d(4)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm(self.first(x)))
        return self.norm2(self.second(y))


def test_batch_norm_after_linear_layers() -> None:
    assert_same(Features(), normal(9, 7))
    assert_same(Features(), normal(2, 7))
    assert_same(Features().eval(), normal(1, 7))


def test_three_dimensional_batch_norm() -> None:
    def sequences(m: Any, x: Tensor) -> Tensor:
        return F.relu(m.norm(m.conv(x).flatten(2)))

    model = Net(sequences)
    model.norm = nn.BatchNorm1d(6).double()
    assert_same(model)
