"""The kernels of pooling and padding in batch-last memory."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fused import DTYPES, assert_close, batch_last, marks, normal
from rewire.ops import pooling

pytestmark = marks


def assert_pool(
    ours: Callable[[Tensor], Tensor | None], theirs: Callable[[Tensor], Tensor], x: Tensor
) -> None:
    mine, reference = batch_last(x).requires_grad_(), x.detach().double().requires_grad_()
    y = ours(mine)
    assert y is not None
    expected = theirs(reference)
    assert_close(y.detach(), expected.detach())
    dy = normal(*expected.shape, seed=3, dtype=x.dtype)
    (dx,) = torch.autograd.grad(y, mine, dy)
    (right,) = torch.autograd.grad(expected, reference, dy.double())
    assert_close(dx, right)
    with torch.no_grad():
        again = ours(mine)
        assert again is not None
        assert torch.equal(torch.nan_to_num(again, 7.0), torch.nan_to_num(y, 7.0))
        assert not again.requires_grad


@st.composite
def pools(draw: st.DrawFn) -> tuple[Tensor, dict[str, Any]]:
    def pair(low: int, high: int) -> tuple[int, int]:
        return draw(st.integers(low, high)), draw(st.integers(low, high))

    kernel = pair(1, 5)
    padding = draw(st.integers(0, kernel[0] // 2)), draw(st.integers(0, kernel[1] // 2))
    least = [max(1, k - 2 * p) for k, p in zip(kernel, padding, strict=True)]
    size = [n + draw(st.integers(0, 8)) for n in least]
    stride = draw(st.one_of(st.none(), st.just(pair(1, 4))))
    batch, count = draw(st.integers(2, 40)), draw(st.integers(2, 5))
    dtype = draw(st.sampled_from(DTYPES))
    x = normal(batch, count, *size, seed=draw(st.integers(0, 2**20)), dtype=dtype)
    if draw(st.booleans()):  # ties
        x = x.round()
    return x, {"kernel_size": kernel, "stride": stride, "padding": padding}


@settings(max_examples=120, deadline=None)
@given(pools())
def test_max_pool_of_any_shape(drawn: tuple[Tensor, dict[str, Any]]) -> None:
    x, options = drawn
    assert_pool(lambda t: pooling.max_pool2d(t, **options), lambda t: F.max_pool2d(t, **options), x)


@settings(max_examples=120, deadline=None)
@given(pools(), st.booleans())
def test_mean_pool_of_any_shape(drawn: tuple[Tensor, dict[str, Any]], count: bool) -> None:
    x, options = drawn
    options["count_include_pad"] = count
    assert_pool(lambda t: pooling.avg_pool2d(t, **options), lambda t: F.avg_pool2d(t, **options), x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [2, 3, 17, 64, 130])
@pytest.mark.parametrize(
    ("kernel", "stride", "padding"),
    [(2, None, 0), (3, 2, 1), ((2, 3), (1, 2), (1, 0)), (1, 3, 0), (5, 1, 2), (2, 3, 1)],
)
def test_pools(
    isa: str, kernel: Any, stride: Any, padding: Any, batch: int, dtype: torch.dtype
) -> None:
    x = normal(batch, 3, 9, 8, dtype=dtype)
    for count in (True, False):
        assert_pool(
            lambda t, count=count: pooling.avg_pool2d(t, kernel, stride, padding, count),
            lambda t, count=count: F.avg_pool2d(
                t, kernel, stride, padding, count_include_pad=count
            ),
            x,
        )
    for values in (x, x.round(), torch.zeros_like(x)):
        assert_pool(
            lambda t: pooling.max_pool2d(t, kernel, stride, padding),
            lambda t: F.max_pool2d(t, kernel, stride, padding),
            values,
        )


def test_max_pool_of_nan_and_infinities(isa: str) -> None:
    x = normal(35, 3, 9, 8)
    x.view(-1)[::7] = torch.nan
    x[0] = torch.nan
    x[1] = -torch.inf
    x[2, :, ::2] = torch.inf
    for kernel, stride, padding in ((2, 2, 0), (3, 2, 1), (3, 1, 1)):
        assert_pool(
            lambda t, a=(kernel, stride, padding): pooling.max_pool2d(t, *a),
            lambda t, a=(kernel, stride, padding): F.max_pool2d(t, *a),
            x,
        )


@pytest.mark.parametrize(
    "size", [1, 2, (1, 4), (4, None), (None, 1), (None, None), [2, 2], (8, 4), 4]
)
def test_adaptive_mean_pool(isa: str, size: Any) -> None:
    assert_pool(
        lambda t: pooling.adaptive_avg_pool2d(t, size),
        lambda t: F.adaptive_avg_pool2d(t, size),
        normal(19, 3, 8, 4),
    )


def test_what_the_pooling_kernels_do_not_take() -> None:
    x = batch_last(normal(4, 3, 8, 8))
    assert pooling.max_pool2d(x.contiguous(), 2) is None
    assert pooling.max_pool2d(x[0], 2) is None
    assert pooling.max_pool2d(x, 3, padding=2) is None  # torch says what is wrong
    assert pooling.max_pool2d(x, 9) is None
    assert pooling.avg_pool2d(x, 0) is None
    assert pooling.avg_pool2d(x, 2, 0) is None
    assert pooling.adaptive_avg_pool2d(x, 3) is None  # windows of several sizes
    assert pooling.adaptive_avg_pool2d(x, 16) is None
    assert pooling.max_pool2d(batch_last(normal(4, 3, 20, 20)), 16) is None


@pytest.mark.parametrize(
    "amounts", [(1, 2), (0, 0), (1, 0, 0, 3), (0, 0, 0, 0, 4, 4), (1, 2, 3, 4, 5, 6), (0, 1)]
)
@pytest.mark.parametrize("value", [None, 0.0, -1.5])
def test_pad(amounts: tuple[int, ...], value: float | None) -> None:
    x = normal(6, 3, 4, 5)
    assert_pool(
        lambda t: pooling.pad(t, amounts, value=value),
        lambda t: F.pad(t, amounts, value=value),
        x,
    )
    padded = pooling.pad(batch_last(x), amounts, value=value)
    assert padded is not None
    assert padded.stride(0) == 1  # still batch-last
    # A strided slice, as a shortcut takes it.
    sliced = pooling.pad(batch_last(x)[:, :, ::2, ::2], amounts, value=value)
    assert sliced is not None
    assert torch.equal(sliced, F.pad(x[:, :, ::2, ::2], amounts, value=value))


def test_what_the_padding_does_not_take() -> None:
    x = batch_last(normal(6, 3, 4, 5))
    assert pooling.pad(x.contiguous(), (1, 1)) is None
    assert pooling.pad(x, (1, -1)) is None
    assert pooling.pad(x, (1, 1), "reflect") is None
    assert pooling.pad(x, (0, 0, 0, 0, 0, 0, 1, 1)) is None
    assert pooling.pad(x, (1,)) is None
    assert pooling.pad(x, ()) is None
