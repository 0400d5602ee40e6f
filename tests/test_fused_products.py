"""What a convolution does in its own pass over memory: a batch norm on the way in, a rectifier and the
output's moments on the way out, the rectifier's and the bias's gradient on the way back. Each is
compared with the same operations one after the other, in double precision, by torch."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import rewire
from rewire import SparseConv2d, SparseLinear, ops
from rewire.ops import channels
from rewire.ops.norms import Moments, Norm

pytestmark = pytest.mark.skipif(not ops.available(), reason="needs the compiled kernels")

# batch, in and out channels, height, width, kernel, stride, padding, dilation
SIZES = [
    (128, 16, 8, 16, 16, 3, 1, 1, 1),  # packed panels of whole vectors, several bands
    (70, 6, 5, 13, 9, 3, 1, 1, 1),  # a cut panel
    (40, 7, 6, 12, 12, 3, 2, 1, 1),  # four phases
    (48, 8, 4, 9, 9, 1, 2, 0, 1),  # positions that nothing reads
    (36, 5, 4, 14, 14, 3, 1, 6, 1),  # outputs that see padding alone
    (64, 8, 8, 12, 12, 3, 1, 2, 2),
    (5, 3, 4, 6, 6, 3, 1, 1, 1),  # read where it lies
    (1, 3, 4, 6, 6, 3, 1, 1, 1),
]


def batch_last(x: Tensor) -> Tensor:
    return x.movedim(0, -1).contiguous().movedim(-1, 0)


def close(actual: Tensor, expected: Tensor) -> None:
    scale = max(1.0, float(expected.detach().abs().max()))
    tolerance = (3e-5 if actual.dtype == torch.float32 else 1e-10) * scale
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=tolerance)


def layer_of(sizes: tuple[int, ...], dtype: torch.dtype) -> SparseConv2d:
    _, n_in, n_out, _, _, kernel, stride, padding, dilation = sizes
    torch.manual_seed(1)
    return SparseConv2d(n_in, n_out, kernel, stride, padding, dilation, sparsity=0.6, dtype=dtype)


def run(
    sizes: tuple[int, ...], dtype: torch.dtype, normalize: bool, training: bool, relu: bool
) -> None:
    batch, n_in, _, height, width, *_ = sizes
    layer = layer_of(sizes, dtype)
    dense = layer.to_dense().double()
    generator = torch.Generator().manual_seed(2)
    data = 3 * torch.randn(batch, n_in, height, width, generator=generator, dtype=torch.float64) + 1
    weight, bias = (torch.randn(n_in, generator=generator, dtype=torch.float64) for _ in range(2))

    theirs = [t.clone().requires_grad_() for t in (data, weight, bias)]
    x, mean, variance = (
        theirs[0],
        torch.full((n_in,), 0.7).double(),
        torch.full((n_in,), 2.0).double(),
    )
    if normalize:
        x = F.relu(F.batch_norm(x, mean, variance, *theirs[1:], training, 0.0, 1e-3))
    expected = dense(x)
    moments = torch.var_mean(expected.detach(), (0, 2, 3), correction=0)
    expected = F.relu(expected) if relu else expected

    ours = [t.to(dtype).requires_grad_() for t in (batch_last(data), weight, bias)]
    norm = None
    if normalize:
        batch_moments = channels.moments(ours[0].detach())
        given_moments = (mean.to(dtype), variance.to(dtype))
        norm = Norm(
            *ours[1:], *(batch_moments if training else given_moments), training, 1e-3, True
        )
    measured = Moments(*(torch.empty(layer.n_out, dtype=dtype) for _ in range(2)))
    y = ops.conv2d(
        *(ours[0], layer.values, layer.bias, layer.topology, layer.sizes, relu),
        moments=None if relu else measured,
        norm=norm,
    )
    close(y, expected)
    if not relu:
        close(measured[1], moments[0])
        close(measured[0], moments[1])

    up = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    expected.backward(up)
    y.backward(batch_last(up).to(dtype))
    kept = layer.connections
    flat = dense.weight.grad.permute(0, 2, 3, 1).flatten(1)
    close(layer.values.grad, flat[kept.outputs(), kept.inputs(), None])
    close(layer.bias.grad, dense.bias.grad)
    for mine, right in zip(ours if normalize else ours[:1], theirs, strict=False):
        close(mine.grad, right.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("how", ["plain", "training", "evaluation"])
@pytest.mark.parametrize("sizes", SIZES)
def test_one_pass_is_the_operations_one_by_one(
    isa: None, sizes: tuple[int, ...], how: str, relu: bool, dtype: torch.dtype
) -> None:
    if how == "training" and dtype == torch.float32 and sizes[0] == 1:
        pytest.skip("the moments of 36 numbers magnify rounding")
    run(sizes, dtype, how != "plain", how == "training", relu)


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


def test_moments_far_from_zero() -> None:
    """A channel whose mean is a thousand times its deviation keeps its variance."""
    layer = SparseConv2d(4, 4, 3, padding=0, sparsity=0.0)
    with torch.no_grad():
        layer.values.mul_(1e-3)
        layer.bias.copy_(torch.tensor([10.0, -1000.0, 0.0, 3.0]))
    x = batch_last(torch.randn(64, 4, 12, 12, generator=torch.Generator().manual_seed(0)))
    moments = Moments(torch.empty(4), torch.empty(4))
    y = ops.conv2d(x, layer.values, layer.bias, layer.topology, layer.sizes, moments=moments)
    variance, mean = torch.var_mean(y.detach().double(), (0, 2, 3), correction=0)
    torch.testing.assert_close(moments[0].double(), mean, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(moments[1].double(), variance, rtol=1e-3, atol=0)


@pytest.mark.parametrize("sizes", SIZES[:5])
def test_bitwise_equal_for_any_number_of_threads(sizes: tuple[int, ...]) -> None:
    batch, n_in, _, height, width, *_ = sizes
    results = []
    before = torch.get_num_threads()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        layer = layer_of(sizes, torch.float32)
        generator = torch.Generator().manual_seed(3)
        x = batch_last(
            torch.randn(batch, n_in, height, width, generator=generator)
        ).requires_grad_()
        norm = Norm(torch.ones(n_in), None, *channels.moments(x.detach()), True, 1e-5, True)
        moments = Moments(torch.empty(layer.n_out), torch.empty(layer.n_out))
        y = ops.conv2d(
            *(x, layer.values, layer.bias, layer.topology, layer.sizes),
            moments=moments,
            norm=norm,
        )
        y.square().sum().backward()
        results.append((y.detach(), *moments[:2], x.grad, layer.values.grad, layer.bias.grad))
    torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_linear_masks_and_adds_on_the_way_back() -> None:
    layer = SparseLinear(300, 200, sparsity=0.9, dtype=torch.float64)
    dense = layer.to_dense()
    x = torch.randn(128, 300, dtype=torch.float64)
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    y = ops.linear(mine, layer.values, layer.bias, layer.topology, relu=True)
    expected = F.relu(dense(theirs))
    up = torch.randn_like(expected)
    y.backward(up)
    expected.backward(up)
    close(mine.grad, theirs.grad)
    close(layer.bias.grad, dense.bias.grad)
    kept = layer.connections
    close(layer.values.grad, dense.weight.grad[kept.outputs(), kept.inputs(), None])


def test_a_model_normalizes_where_it_convolves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two convolutions nothing but the first one's output is in memory."""
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        *(nn.BatchNorm2d(16), nn.ReLU()),
        nn.Conv2d(16, 8, 3, padding=1),
    )
    model = rewire.sparsify(model, sparsity=0.5)
    calls = []
    for name in ("moments", "batch_norm"):
        real = getattr(channels, name)
        monkeypatch.setattr(
            channels, name, lambda *a, real=real, name=name: (calls.append(name), real(*a))[1]
        )
    model(torch.randn(64, 3, 16, 16)).sum().backward()
    assert calls == []
    assert model[1].weight.grad is not None
    assert model[1].running_mean.abs().sum() > 0


def test_a_tensor_changed_between_two_layers_is_seen() -> None:
    """Counters that change in place leave promises alone; parameters that do are refused."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3)
    )
    sparse = rewire.sparsify(model, sparsity=0.5)
    x = torch.randn(64, 3, 16, 16)

    class Meddler(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = sparse

        def forward(self, x: Tensor) -> Tensor:
            h = self.inner[2](self.inner[1](self.inner[0](x)))
            with torch.no_grad():
                self.inner[1].weight.mul_(2)
            out: Tensor = self.inner[3](h)
            return out

    plain = sparse(x)
    sparse[1].reset_running_stats()
    meddler = Meddler()
    rewire.nn.fusion.fuse(meddler)
    torch.testing.assert_close(meddler(x), plain)  # what was promised before the change
