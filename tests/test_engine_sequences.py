"""Sequences of layers: values and gradients are those of dense PyTorch, of any batch size; whoever looks at
one of the layers sees it."""

import copy
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import rewire
from bodies import assert_close, assert_same, marks, normal, plain
from rewire import SparseConv2d, SparseLinear, use_engine
from rewire.ops.topology import TopologyError
from sequences import SEQUENCES, conv, linear, norm, sequence

pytestmark = marks


def assert_same_apart(model: nn.Module) -> None:
    """Output and gradients are those of the same model when it runs layer by layer."""
    apart = copy.deepcopy(model)
    use_engine(model)
    use_engine(apart, False)
    results = []
    for m in (model, apart):
        data = normal(8, 3, 8, 8).requires_grad_()
        y = m(data)
        (y.square().sum() + y[:, 0].sum()).backward()
        results.append([y.detach(), data.grad, *(p.grad for p in m.parameters())])
    for ours, right in zip(*results, strict=True):
        assert (ours is None) == (right is None)
        if ours is not None and right is not None:
            assert_close(ours, right, 1e-9)


@pytest.mark.parametrize("name", SEQUENCES)
def test_sequences(name: str) -> None:
    assert_same(sequence(name), normal(8, 3, 8, 8))
    assert_same(sequence(name).eval(), normal(8, 3, 8, 8), steps=1)


def test_a_layer_and_a_batch_norm_used_twice() -> None:
    twice = [conv(6, 6), norm(6), nn.ReLU()]
    assert_same_apart(nn.Sequential(conv(3, 6), nn.ReLU(), *twice, *twice).double())


@pytest.mark.parametrize("batch", [0, 1, 2, 3, 12])
def test_any_batch_size(batch: int) -> None:
    for name in ("vgg", "strides", "ReLUs", "classifier"):
        model = sequence(name).train(batch > 0)  # torch refuses to normalise nothing
        assert_same(model, normal(batch, 3, 8, 8), steps=1)


@pytest.mark.parametrize("sparsity", [0.3, 0.9, 0.97])
def test_gradients_through_relus(sparsity: float) -> None:
    """Of more and fewer connections: some units have none."""
    layers: list[nn.Module] = []
    wide: list[nn.Module] = []
    for k in range(4):
        made = torch.Generator().manual_seed(k)
        layers += [SparseConv2d(8, 8, 3, padding=1, sparsity=sparsity, generator=made), nn.ReLU()]
        wide += [SparseLinear(300, 300, sparsity=sparsity, generator=made), nn.ReLU()]
    assert_same(nn.Sequential(*layers).double(), normal(64, 8, 10, 10), steps=1)
    assert_same(nn.Sequential(*wide).double(), normal(130, 300), steps=1)


@pytest.mark.parametrize("frozen", ["0.values", "2.values", "2.bias", "4.bias", "6.values", "7"])
def test_some_frozen(frozen: str) -> None:
    model = sequence("ReLUs")
    part: Any = model[7] if frozen == "7" else model.get_parameter(frozen)
    part.requires_grad_(False)
    assert_same_apart(model)


def test_a_batch_norm_in_evaluation_and_statistics_that_are_switched_off() -> None:
    model = sequence("vgg")
    model[4].eval()
    model[1].track_running_stats = False
    model[8].num_batches_tracked = None
    before = model[1].running_mean.clone()
    assert_same_apart(model)
    assert torch.equal(model[1].running_mean, before)
    assert model[1].num_batches_tracked == 0


def test_two_threads_go_back_through_one_graph() -> None:
    model = nn.Sequential(linear(64, 2000), nn.ReLU(), linear(2000, 64))
    use_engine(model)
    y = model(normal(128, 64).float())
    weights = [torch.full_like(y, k + 1.0) for k in range(2)]

    def gradient(k: int) -> Tensor:
        return torch.autograd.grad(y, model[0].bias, weights[k], retain_graph=True)[0]

    def passes(k: int) -> bool:
        return all(torch.equal(gradient(k), right[k]) for _ in range(20))

    right = [gradient(0), gradient(1)]
    with ThreadPoolExecutor(2) as threads:
        assert all(threads.map(passes, range(2)))


@pytest.mark.parametrize("norms", [False, True])
def test_many_samples_are_summed_exactly(norms: bool) -> None:
    """The gradient of a bias before a ReLU, in numbers of single precision."""
    middle: list[nn.Module] = [nn.BatchNorm2d(4)] if norms else []
    model = nn.Sequential(conv(3, 4, bias=True), *middle, nn.ReLU(), conv(4, 4, 1))
    shift: Any = model[1] if norms else model[0]
    shift.bias.data.fill_(50.0)  # nothing is cut off, which rounding might decide otherwise
    double = copy.deepcopy(model).double()
    x, dy = normal(1000, 3, 32, 32), normal(1000, 4, 32, 32, seed=1)
    for m, dtype in ((model, torch.float32), (double, torch.float64)):
        use_engine(m)
        m(x.to(dtype)).backward(dy.to(dtype))
    right = (double[1] if norms else double[0]).bias.grad
    error = (shift.bias.grad.double() - right) / right.abs().mean()
    assert error.square().mean().sqrt() < 4e-7


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("kind", ["forward", "before", "backward"])
def test_a_hook_may_change_what_it_sees(place: int, kind: str) -> None:
    model = sequence("vgg")
    register = {
        "forward": lambda m: m.register_forward_hook(lambda m, args, y: y * 2),
        "before": lambda m: m.register_forward_pre_hook(lambda m, args: (args[0] * 2,)),
        "backward": lambda m: m.register_full_backward_hook(lambda m, g, _: (g[0] * 2,)),
    }
    register[kind](model[place])
    assert_same_apart(model)


def test_a_forward_of_ones_own() -> None:
    model = sequence("vgg")
    model[1].forward = lambda x: x + 1  # type: ignore[method-assign]
    assert_same_apart(model)
    model.forward = lambda x: x * 3  # type: ignore[method-assign]
    x = normal(8, 3, 8, 8)
    assert torch.equal(model(x), x * 3)


def test_a_batch_norm_that_becomes_another_type() -> None:
    class Frozen(nn.BatchNorm2d):
        def forward(self, x: Tensor) -> Tensor:
            return x * 3

    model = sequence("vgg")
    use_engine(model)
    model[1].__class__ = Frozen  # type: ignore[assignment]
    assert_same_apart(model)
    assert model[1].num_batches_tracked == 0


def test_densified_and_converted_again() -> None:
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU()).double()
    rewire.sparsify(model, sparsity=0.5)
    x = normal(8, 3, 8, 8)
    first = model(x)
    rewire.densify(model)
    assert_close(model(x), first, 1e-9)
    rewire.sparsify(model, sparsity=0.2, weights="keep")
    assert_same(model, x)


def test_a_wrong_number_of_channels_is_refused() -> None:
    model = sequence("vgg")
    use_engine(model)
    with pytest.raises(ValueError, match=r"expected an input of \(N, 3, H, W\)"):
        model(normal(8, 4, 8, 8))


def test_gse_takes_the_same_connections() -> None:
    kept = []
    for engine in (True, False):
        model = sequence("vgg")
        use_engine(model, engine)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rewirer = rewire.GSE(model, optimizer, every=1, until=10, seed=0)
        for step in range(3):
            optimizer.zero_grad()
            model(normal(8, 3, 8, 8, seed=step)).square().mean().backward()
            optimizer.step()
            rewirer.step()
        kept.append([m.indices for m in model.modules() if isinstance(m, SparseConv2d)])
    assert all(torch.equal(a, b) for a, b in zip(*kept, strict=True))


@pytest.mark.filterwarnings("ignore::rewire.ops.PerformanceWarning")
def test_types_without_kernels() -> None:
    model = sequence("vgg").half()
    apart = copy.deepcopy(model)
    use_engine(model)
    x = normal(8, 3, 8, 8).half()
    assert torch.equal(model(x), apart(x))


def test_a_sequence_is_one_node() -> None:
    model = sequence("vgg")
    use_engine(model)
    y = model(normal(7, 3, 8, 8))  # fills no panels
    assert y.grad_fn is not None
    inputs = {node.name() for node, _ in y.grad_fn.next_functions if node is not None}
    assert inputs == {"torch::autograd::AccumulateGrad"}


def test_what_the_backward_pass_needs_is_freed_by_it() -> None:
    """The output, which holds the graph, may live on."""
    model = sequence("vgg")
    use_engine(model)
    y = model(normal(7, 3, 8, 8))
    node: Any = y.grad_fn
    assert node.saved_tensors
    y.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()
    with pytest.raises(RuntimeError, match="freed"):
        _ = node.saved_tensors


@pytest.mark.parametrize("place", [0, 1, 7])
def test_a_weight_that_changes_before_backward(place: int) -> None:
    model = sequence("vgg")
    use_engine(model)
    y = model(normal(8, 3, 8, 8)).sum()
    with torch.no_grad():
        next(model[place].parameters()).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", ["vgg", "ReLU and pooling"])
def test_tangents_are_carried(name: str, grad: bool) -> None:
    """Also where autograd records nothing: there the kernels would lose them silently."""
    model = sequence(name)
    use_engine(model)
    x = normal(8, 3, 8, 8)
    with forward_ad.dual_level(), torch.set_grad_enabled(grad):
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        found = forward_ad.unpack_dual(model(dual)).tangent
        expected = forward_ad.unpack_dual(rewire.densify(copy.deepcopy(model))(dual)).tangent
    assert found is not None
    assert_close(found, expected)


def test_a_dispatch_mode_sees_each_layer() -> None:
    """One that is entered inside the model, where it already runs."""
    seen: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = sequence("vgg")

        def forward(self, x: Tensor) -> Any:
            with Watch():
                return self.body(x)

    assert_same(Model(), normal(8, 3, 8, 8), steps=1)
    assert seen.count("rewire.conv2d.default") == 3


# One sample through linear layers.


def perceptron(widths: tuple[int, ...], bias: bool = True, last_relu: bool = False) -> Any:
    torch.manual_seed(sum(widths))
    modules: list[nn.Module] = []
    for n_in, n_out in pairwise(widths):
        modules += [nn.Linear(n_in, n_out, bias=bias), nn.ReLU()]
    return rewire.sparsify(nn.Sequential(*modules[: None if last_relu else -1]), sparsity=0.7)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("last_relu", [True, False])
def test_one_sample(last_relu: bool, bias: bool, isa: str) -> None:
    for widths in ((5, 3), (40, 17, 1), (64, 300, 2, 50), (300, 1500, 1200, 10)):
        model, x = perceptron(widths, bias, last_relu), torch.randn(1, widths[0])
        with torch.no_grad():
            y = model(x)
            torch.testing.assert_close(y, plain(model)(x))
            torch.testing.assert_close(model.double()(x.double()).float(), y)


def test_one_sample_is_the_same_for_any_number_of_threads(threads: Any) -> None:
    model, x = perceptron((500, 4000, 3000, 20)), torch.randn(1, 500)
    found = []
    for count in (1, 2, 5):
        threads(count)
        with torch.no_grad():
            found.append(model(x))
    assert all(torch.equal(y, found[0]) for y in found)


def test_one_sample_sees_changes_of_the_model() -> None:
    model, x = perceptron((30, 20, 10)), torch.randn(1, 30)
    with torch.no_grad():
        before = model(x)
        model[0].values.mul_(2)
        assert not torch.equal(model(x), before)
        model[2] = perceptron((20, 7))[0]
        assert model(x).shape == (1, 7)
        torch.testing.assert_close(model(x), plain(model)(x))
        with pytest.raises(ValueError, match="30 features"):
            model(torch.randn(1, 31))
        with pytest.raises(ValueError, match="types differ"):
            model(torch.randn(1, 30, dtype=torch.float64))
        model[0].indices[0] = 1000
        with pytest.raises(TopologyError):
            model(torch.randn(1, 30))
