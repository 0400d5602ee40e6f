"""One sample through linear layers that follow each other: all of them are one call."""

import copy
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

import rewire
from rewire.nn import fusion, units
from rewire.ops import native
from rewire.ops.topology import TopologyError

needs_kernels = pytest.mark.skipif(not native.available(), reason="there are no compiled kernels")


def _model(widths: tuple[int, ...], *, bias: bool = True, last_relu: bool = False) -> nn.Sequential:
    torch.manual_seed(sum(widths))
    modules: list[nn.Module] = []
    for n_in, n_out in pairwise(widths):
        modules += [nn.Linear(n_in, n_out, bias=bias), nn.ReLU()]
    return rewire.sparsify(nn.Sequential(*modules[: None if last_relu else -1]), sparsity=0.7)


def _plain(model: nn.Sequential) -> nn.Sequential:
    plain = copy.deepcopy(model)
    fusion.unfuse(plain)
    return plain


@needs_kernels
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("last_relu", [True, False])
@pytest.mark.parametrize("widths", [(5, 3), (40, 17, 1), (64, 300, 2, 50), (300, 1500, 1200, 10)])
def test_as_layer_by_layer(widths: tuple[int, ...], last_relu: bool, bias: bool, isa: str) -> None:
    model = _model(widths, bias=bias, last_relu=last_relu)
    x = torch.randn(1, widths[0])
    with torch.no_grad():
        y = units.single(model, x)
        assert y is not None
        torch.testing.assert_close(y, _plain(model)(x))
        assert torch.equal(model(x), y)
        torch.testing.assert_close(model.double()(x.double()).float(), y)


@needs_kernels
def test_the_same_for_any_thread_count(threads: Callable[[int], None]) -> None:
    model, x = _model((500, 4000, 3000, 20)), torch.randn(1, 500)
    found = []
    for count in (1, 2, 5):
        threads(count)
        with torch.no_grad():
            found.append(model(x))
    assert all(torch.equal(y, found[0]) for y in found)


@needs_kernels
def test_sees_changes() -> None:
    model, x = _model((30, 20, 10)), torch.randn(1, 30)
    with torch.no_grad():
        before = model(x)
        model[0].values.mul_(2)
        assert not torch.equal(model(x), before)
        model[2] = _model((20, 7))[0]
        assert model(x).shape == (1, 7)
        torch.testing.assert_close(model(x), _plain(model)(x))


@needs_kernels
def test_refuses_what_the_layers_refuse() -> None:
    model = _model((30, 20, 10))
    with torch.no_grad():
        with pytest.raises(ValueError, match="30 features"):
            model(torch.randn(1, 31))
        with pytest.raises(ValueError, match="types differ"):
            model(torch.randn(1, 30, dtype=torch.float64))
        model[0].indices[0] = 1000
        with pytest.raises(TopologyError):
            model(torch.randn(1, 30))


@needs_kernels
def test_runs_as_usual_where_somebody_watches() -> None:
    x = torch.randn(1, 30)
    seen: list[Tensor] = []
    for where in (lambda model: model, lambda model: model[0], lambda model: model[1]):
        model = _model((30, 20, 10))
        where(model).register_forward_hook(lambda *args: seen.append(args[-1]))
        with torch.no_grad():
            assert units.single(model, x) is None
            model(x)
    assert [tuple(y.shape) for y in seen] == [(1, 10), (1, 20), (1, 20)]
    model = _model((30, 20, 10))
    assert model(x).requires_grad  # which is recorded
    with torch.no_grad():
        assert units.single(model, x.expand(2, 30)) is None
        assert units.single(model, torch.randn(30, 1).t()[:, ::1]) is not None
        assert units.single(model, torch.randn(1, 60)[:, ::2]) is None
        torch.testing.assert_close(model(x.expand(2, 30))[:1], model(x))
        model[1] = nn.Tanh()
        assert units.single(model, x) is None
        torch.testing.assert_close(model(x), _plain(model)(x))
        model[1] = nn.ReLU()
    with torch.inference_mode():
        torch.testing.assert_close(model(x), _plain(model)(x))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert model(x).dtype == torch.float32


def test_connections_of_fewer_units_run_as_usual() -> None:
    model = _model((20, 30), bias=False)
    layer = model[0]
    kept = rewire.SparseLinear(20, 12, bias=False, sparsity=0.7)
    for name in ("indptr", "indices", "slots", "outputs", "order"):
        layer._buffers[name] = kept._buffers[name]
    layer.values = kept.values
    x = torch.randn(1, 20)
    with torch.no_grad():
        assert units.single(model, x) is None
        torch.testing.assert_close(model(x), kept(x))
