"""What the kernels do together in one pass over memory, by each instruction set: converted models against
dense PyTorch in double precision."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import rewire
from bodies import Net, assert_close, assert_same, normal, plain
from products import assert_same_bits
from rewire import SparseConv2d, ops, use_engine
from sequences import norm

pytestmark = pytest.mark.skipif(not ops.available(), reason="needs the compiled kernels")
DTYPES = [torch.float32, torch.float64]

# batch, in and out channels, height, width, kernel, stride, padding, dilation
SIZES = [
    (128, 16, 8, 16, 16, 3, 1, 1, 1),  # panels of whole vectors, several bands
    (70, 6, 5, 13, 9, 3, 1, 1, 1),  # a cut panel
    (40, 7, 6, 12, 12, 3, 2, 1, 1),  # four phases
    (48, 8, 4, 9, 9, 1, 2, 0, 1),  # positions that nothing reads
    (36, 5, 4, 14, 14, 3, 1, 6, 1),  # outputs that see padding alone
    (64, 8, 8, 12, 12, 3, 1, 2, 2),
    (5, 3, 4, 6, 6, 3, 1, 1, 1),  # read where it lies
    (1, 3, 4, 6, 6, 3, 1, 1, 1),
]


def blocks(sizes: tuple[int, ...], normalize: bool, relu: bool) -> nn.Sequential:
    """A convolution between whose neighbours all that a convolution can take over happens."""
    _, n_in, n_out, _, _, *rest = sizes
    torch.manual_seed(1)
    first: list[nn.Module] = [nn.Conv2d(n_in, n_in, 1)]
    first += [norm(n_in, eps=1e-3), nn.ReLU()] if normalize else []
    last: list[nn.Module] = [nn.ReLU()] if relu else [norm(n_out, eps=1e-3)]
    model = nn.Sequential(*first, nn.Conv2d(n_in, n_out, *rest), *last).double()
    return rewire.sparsify(model, sparsity=0.6, weights="fresh")


def run(
    sizes: tuple[int, ...], dtype: torch.dtype, normalize: bool, training: bool, relu: bool
) -> None:
    model = blocks(sizes, normalize, relu).train(training)
    dense = rewire.densify(copy.deepcopy(model))
    found = []
    for each, kind in ((model.to(dtype), dtype), (dense, torch.float64)):
        x = normal(sizes[0], sizes[1], *sizes[3:5], seed=2).to(kind).requires_grad_()
        y = each(x)
        y.backward(normal(*y.shape, seed=3).to(kind))
        rest = [p.grad for m in each if not hasattr(m, "kernel_size") for p in m.parameters()]
        found.append([y.detach(), x.grad, *rest, *(m.running_var for m in each if norm_of(m))])
    for ours, right in zip(*found, strict=True):
        assert_close(ours, right, 1e-4 if dtype == torch.float32 else 1e-8)


def norm_of(module: nn.Module) -> bool:
    return isinstance(module, nn.BatchNorm2d)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("how", ["plain", "training", "evaluation"])
def test_one_pass_is_the_operations_one_by_one(
    isa: str, how: str, relu: bool, dtype: torch.dtype
) -> None:
    for sizes in SIZES:
        if dtype == torch.float32 and sizes[0] == 1:
            continue  # the moments of 36 numbers magnify rounding
        run(sizes, dtype, how != "plain", how != "evaluation", relu)


@settings(max_examples=40, deadline=None)
@given(
    st.tuples(
        st.integers(1, 70),
        *(st.integers(1, 6) for _ in range(2)),
        *(st.integers(5, 12) for _ in range(2)),
        *(st.integers(1, 3) for _ in range(2)),
        st.integers(0, 3),
        st.integers(1, 2),
    ),
    st.booleans(),
    st.booleans(),
)
def test_any_sizes(sizes: tuple[int, ...], normalize: bool, relu: bool) -> None:
    run(sizes, torch.float64, normalize, sizes[0] > 1, relu)


def passing(channels: int, *after: nn.Module, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """A converted model whose first layer returns its input."""
    first = nn.Conv2d(channels, channels, 1, bias=False)
    with torch.no_grad():
        first.weight.copy_(torch.eye(channels)[:, :, None, None])
    layer = SparseConv2d.from_dense(first, mask=first.weight != 0)
    model = nn.Sequential(layer, *after).to(dtype)
    use_engine(model)
    return model


def assert_as_torch(model: nn.Sequential, x: Tensor) -> None:
    """Of numbers that are not finite: the same ones are NaN, and all others the same."""
    found = []
    for each in (model, lambda x: model[1:](x * 1)):  # a dense first layer would multiply by zeros
        own = x.detach().clone().requires_grad_()
        y = each(own)
        y.backward(normal(*y.shape, seed=3).to(x.dtype))
        assert own.grad is not None
        # Of a batch norm the gradient is a sum with the input, times zero in evaluation.
        normed = any(map(norm_of, model))
        found.append([y.detach(), own.grad[x.isfinite()] if normed else own.grad])
    for ours, right in zip(*found, strict=True):
        torch.testing.assert_close(ours, right, equal_nan=True)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
def test_a_relu_at_zero_and_of_nan_and_infinities(isa: str, normalize: bool, inplace: bool) -> None:
    """Where the output is exactly zero torch's ReLU passes no gradient; NaN goes through."""
    x = torch.tensor([2.0, 1.0, 3.0, torch.nan, -torch.inf, torch.inf]).repeat(12, 3, 2, 2)
    after: list[nn.Module] = [nn.ReLU(inplace)]
    if normalize:
        bn = nn.BatchNorm2d(3, eps=0.0, affine=False)
        bn.running_mean = torch.full((3,), 2.0)
        after.insert(0, bn)
    model = passing(3, *after).eval()
    for batch in (1, 5, 12, 32):
        assert_as_torch(model, x.repeat(3, 1, 1, 1)[:batch])


def test_max_pooling_of_nan_infinities_and_ties(isa: str) -> None:
    x = normal(35, 3, 9, 8)
    x.view(-1)[::7] = torch.nan
    x[0] = torch.nan
    x[1] = -torch.inf
    x[2, :, ::2] = torch.inf
    x[5:9] = x[5:9].round()
    x[9] = 0
    for sizes in ((2, 2, 0), (3, 2, 1), (3, 1, 1)):
        for batch in (35, 32):
            assert_as_torch(passing(3, nn.MaxPool2d(*sizes), dtype=x.dtype), x[:batch])


@st.composite
def pools(draw: st.DrawFn) -> tuple[Tensor, dict[str, Any]]:
    def pair(low: int, high: int) -> tuple[int, int]:
        return draw(st.integers(low, high)), draw(st.integers(low, high))

    kernel = pair(1, 5)
    padding = draw(st.integers(0, kernel[0] // 2)), draw(st.integers(0, kernel[1] // 2))
    least = [max(1, k - 2 * p) for k, p in zip(kernel, padding, strict=True)]
    size = [n + draw(st.integers(0, 8)) for n in least]
    stride = draw(st.one_of(st.none(), st.just(pair(1, 4))))
    batch, count = draw(st.integers(1, 40)), draw(st.integers(1, 5))
    x = normal(batch, count, *size, seed=draw(st.integers(0, 2**20)))
    if draw(st.booleans()):  # ties
        x = x.round()
    return x, {"kernel_size": kernel, "stride": stride, "padding": padding}


@settings(max_examples=100, deadline=None)
@given(pools(), st.sampled_from(["max", "mean", "mean of what is there"]))
def test_pooling_of_any_shape(drawn: tuple[Tensor, dict[str, Any]], kind: str) -> None:
    x, options = drawn
    pool = (
        nn.MaxPool2d(**options)
        if kind == "max"
        else nn.AvgPool2d(**options, count_include_pad=kind == "mean")
    )
    assert_as_torch(passing(x.shape[1], pool, dtype=x.dtype), x)


@pytest.mark.parametrize(
    "amounts", [(1, 2), (0, 0), (1, 0, 0, 3), (0, 0, 0, 0, 4, 4), (1, 2, 3, 4, 5, 6)]
)
@pytest.mark.parametrize("value", [0.0, -1.5])
def test_padding(amounts: tuple[int, ...], value: float) -> None:
    for steps in (1, 2):
        body = lambda m, x, k=steps: F.pad(m.conv(x)[:, :, ::k, ::k], amounts, value=value)  # noqa: E731
        assert_same(Net(body), steps=1)


@pytest.mark.parametrize(
    "size", [1, 2, (1, 4), (4, None), (None, 1), (None, None), [2, 2], (8, 4), 4]
)
def test_adaptive_pooling(size: Any) -> None:
    assert_as_torch(
        passing(3, nn.AdaptiveAvgPool2d(size), dtype=torch.float64), normal(19, 3, 8, 4)
    )


def test_a_constant_channel(isa: str) -> None:
    model = passing(3, nn.BatchNorm2d(3, momentum=1.0))
    y = model(torch.full((9, 3, 2, 2), 5.0))
    assert float(y.detach().abs().max()) < 5e-4  # 5 / sqrt(eps) in float32
    assert torch.equal(model[1].running_mean, torch.full((3,), 5.0))
    assert torch.equal(model[1].running_var, torch.zeros(3))


@pytest.mark.parametrize("through", ["input", "bias"])
def test_means_far_from_zero_do_not_cancel(isa: str, through: str) -> None:
    """A channel whose mean is a thousand times its deviation keeps its variance."""
    for batch in (64, 30):
        x = normal(batch, 3, 8, 8, dtype=torch.float32)
        model = passing(3, nn.BatchNorm2d(3, momentum=1.0))
        if through == "bias":
            model[0].bias = nn.Parameter(torch.tensor([10.0, -1000.0, 3.0]))
            exact = x.double() + model[0].bias.detach().double()[:, None, None]
        else:
            x = x + 1000
            exact = x.double()
        y = model(x)
        expected = F.batch_norm(exact, None, None, training=True)
        torch.testing.assert_close(y.double(), expected, rtol=0, atol=1e-3)
        variance, mean = torch.var_mean(exact, (0, 2, 3))
        torch.testing.assert_close(model[1].running_mean.double(), mean, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(model[1].running_var.double(), variance, rtol=1e-3, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("momentum", [0.0, 0.1, 1.0])
def test_running_statistics_take_in_what_is_small_beside_them(
    dtype: torch.dtype, momentum: float
) -> None:
    model = passing(4, nn.BatchNorm2d(4, momentum=momentum), dtype=dtype)
    model[1].running_mean.fill_(-5.0)
    reference = plain(model)
    x = (normal(9, 4, 3, 3) * 1e-6).to(dtype)
    for each in (model, reference):
        each(x)
    for name in ("running_mean", "running_var"):
        ours, right = getattr(model[1], name), getattr(reference[1], name)
        torch.testing.assert_close(ours, right, rtol=1e-5, atol=0)


class Wide(nn.Module):
    """Convolutions, batch norms, a residual sum and poolings."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv2d(3, 13, 3, padding=1), nn.Conv2d(13, 13, 3, padding=1)
        self.norms = nn.ModuleList(norm(13).float() for _ in range(2))

    def forward(self, x: Tensor) -> list[Tensor]:
        y = F.relu(self.norms[0](self.first(x)))
        z = F.relu(self.norms[1](self.second(y)) + y)
        return [F.max_pool2d(z, 3, 2, 1), F.avg_pool2d(self.second(z), 2)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_number_of_threads_gives_the_same_bits(
    isa: str, threads: Callable[[int], None], dtype: torch.dtype
) -> None:
    model = rewire.sparsify(Wide().to(dtype), sparsity=0.7, weights="fresh")
    state = copy.deepcopy(model.state_dict())
    x = normal(96, 3, 12, 12, dtype=dtype)

    def everything(count: int) -> list[Tensor | None]:
        threads(count)
        model.load_state_dict(state)
        model.zero_grad()
        own = x.clone().requires_grad_()
        outputs = model(own)
        torch.stack([y.square().sum() for y in outputs]).sum().backward()
        statistics = [model.norms[1].running_mean.clone(), model.norms[1].running_var.clone()]
        grads = [p.grad for p in model.parameters()]
        return [*(y.detach() for y in outputs), own.grad, *statistics, *grads]

    assert_same_bits(everything)
