"""Ways to call torch functions on lazy tensors that are easily forgotten."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rewire
from bodies import normal
from rewire import ops
from rewire.engine import use_engine

pytestmark = pytest.mark.skipif(not ops.available(), reason="needs the compiled kernels")

Call = Callable[[Tensor], Tensor]


class Net(nn.Module):
    """A layer, a call, and what reads all that comes of it."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call, self.conv, self.out = call, nn.Conv2d(4, 6, 3, padding=1), nn.Conv2d(6, 6, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.call(self.conv(x))
        same = y.dim() == 4 and y.shape[1] == 6
        return self.out(y) if same else y  # type: ignore[no-any-return]


def both(call: Call, grad: bool = False, batch: int = 5) -> tuple[Any, Any]:
    """Output and gradient, or error, with the engine and without it."""
    torch.manual_seed(0)
    on = rewire.sparsify(Net(call).double(), sparsity=0.4)
    off = copy.deepcopy(on)
    use_engine(off, False)
    found: list[Any] = []
    for model in (on, off):
        x = normal(batch, 4, 5, 5).requires_grad_(grad)
        try:
            with torch.set_grad_enabled(grad):
                y = model(x)
                if grad:
                    y.square().sum().backward()
            found.append((y.detach(), x.grad))
        except Exception as error:
            found.append(error)
    return found[0], found[1]


ALIASES: dict[str, Call] = {
    "rsub, alpha": lambda x: torch.rsub(x, 1, alpha=2),
    "cat, axis": lambda x: torch.cat((x, x), axis=1),  # type: ignore[call-overload]
    "permute, dims": lambda x: x.permute(dims=(0, 2, 3, 1)),
    "mean, axis": lambda x: x.mean(axis=(2, 3)),  # type: ignore[call-overload]
    "swapaxes, axis0": lambda x: torch.swapaxes(x.flatten(2), axis0=1, axis1=2),
    "type_as, other": lambda x: x.type_as(other=x),
    "relu, input": lambda x: torch.relu(input=x),
    "an index of NumPy": lambda x: x[np.array([0, 1]), 1:3],
    "an index of NumPy behind": lambda x: x[:, 1:3, np.array([0, 2])],
    "a small divisor": lambda x: x / 1e-310,
    "a smaller one": lambda x: x / 1e-30,
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", ALIASES)
def test_other_ways_to_call(name: str, grad: bool) -> None:
    mine, right = both(ALIASES[name], grad)
    for ours, theirs in zip(mine, right, strict=True):
        if theirs is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10, equal_nan=True)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.flatten(2).transpose(1, 5),
        lambda x: F.batch_norm(x, None, None, training=True, eps=0.0),
        lambda x: torch.relu(x, inplace=True),  # of F.relu
        lambda x: x.permute(dimensions=(0, 2, 3, 1)),
    ],
)
def test_what_torch_refuses(call: Call) -> None:
    mine, right = both(call)
    assert isinstance(right, Exception)
    assert type(mine) is type(right)


@pytest.mark.parametrize("batch", [5, 128])
@pytest.mark.parametrize("first", [0, 2, 5])
@pytest.mark.parametrize(
    "call",
    [
        lambda x, part: x + part,
        lambda x, part: part * x,
        lambda x, part: F.silu(x) - part.sigmoid(),
        lambda x, part: x.mean((2, 3), keepdim=True) * x / (2 + part.tanh()),
    ],
)
def test_one_channel_that_is_broadcast_to_all(call: Any, first: int, batch: int) -> None:
    """Read as a part of what it comes from."""
    mine, right = both(lambda x: call(x, x[:, first : first + 1]), batch=batch)
    torch.testing.assert_close(mine[0], right[0], rtol=1e-10, atol=1e-10)


def test_one_feature_that_is_broadcast_to_all() -> None:
    def call(x: Tensor) -> Tensor:
        y = x.mean((2, 3))
        return y * y[:, 3:4]

    mine, right = both(call)
    torch.testing.assert_close(mine[0], right[0], rtol=1e-10, atol=1e-10)
