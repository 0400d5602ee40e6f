"""Converted models that use the kernels unseen.

A fused model is compared with the same model on torch's own layers, through everything a forward
pass may do with a batch norm's output: it gives torch's answer, or an error where one is allowed.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fused import Net, assert_close, assert_same, marks, normal, plain, same_buffers
from fused_changes import CHANGES
from fused_images import IMAGES
from fused_uses import USES
from rewire import SparseLinear
from rewire import use_engine

pytestmark = marks
BODIES = USES | IMAGES | CHANGES


@pytest.mark.parametrize("name", BODIES)
def test_training(name: str) -> None:
    assert_same(Net(BODIES[name]), may_raise=name in CHANGES)


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.usefixtures("no_panels")
def test_training_without_panels(name: str) -> None:
    assert_same(Net(BODIES[name]), may_raise=name in CHANGES)


@pytest.mark.parametrize("batch", [8, 13])
@pytest.mark.parametrize("name", BODIES)
@pytest.mark.filterwarnings(
    "ignore:None of the inputs have requires_grad=True"
)  # torch's checkpoints
def test_data_without_gradients(name: str, batch: int) -> None:
    """A first layer needs the gradients of its parameters alone."""
    data = normal(batch, 3, 6, 6)
    assert_same(Net(BODIES[name]), data, may_raise=name in CHANGES, steps=1, leaf=False)


@pytest.mark.parametrize("name", BODIES)
def test_evaluation(name: str) -> None:
    assert_same(Net(BODIES[name]).eval(), may_raise=name in CHANGES, steps=1)


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
