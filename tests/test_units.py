"""Sequences whose convolutions, batch norms, rectifiers and poolings run as one step: torch's answer is
due, or that of the same layers one by one."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import rewire
from fused import assert_close, assert_same, marks, normal, plain
from rewire import SparseConv2d, SparseLinear
from rewire.nn import units
from rewire.nn.fusion import fuse, unfuse

pytestmark = marks


def conv(n_in: int, n_out: int, kernel: int = 3, **options: Any) -> SparseConv2d:
    options = {"padding": kernel // 2, "bias": False} | options
    return SparseConv2d(
        *(n_in, n_out, kernel),
        **options,
        sparsity=0.5,
        generator=torch.Generator().manual_seed(n_in),
    )


def linear(n_in: int, n_out: int) -> SparseLinear:
    return SparseLinear(n_in, n_out, sparsity=0.5, generator=torch.Generator().manual_seed(n_in))


def norm(channels: int, **options: Any) -> nn.BatchNorm2d:
    bn = nn.BatchNorm2d(channels, **options)
    if bn.affine:
        bn.weight.data, bn.bias.data = normal(channels, seed=1), normal(channels, seed=2)
    return bn


SEQUENCES: dict[str, tuple[list[nn.Module], int]] = {  # and how many units there are
    "vgg": (
        [
            *(conv(3, 6, bias=True), norm(6), nn.ReLU(), conv(6, 6), norm(6), nn.ReLU()),
            *(nn.MaxPool2d(2), conv(6, 8), norm(8), nn.ReLU(), nn.MaxPool2d(2)),
        ],
        3,
    ),
    "in place": ([conv(3, 6), norm(6), nn.ReLU(inplace=True), conv(6, 6), norm(6)], 2),
    "no rectifier": ([conv(3, 6), norm(6), conv(6, 6), norm(6), nn.MaxPool2d(3, 1, 1)], 2),
    "another activation": ([conv(3, 6), norm(6), nn.SiLU(), conv(6, 6), norm(6), nn.GELU()], 2),
    "strides": ([conv(3, 6, stride=2), norm(6), nn.ReLU(), conv(6, 4, 1), norm(4)], 2),
    "no batch norm": ([conv(3, 6), nn.ReLU(), conv(6, 6), nn.Sigmoid()], 0),
    "rectified alone": ([conv(3, 6), nn.ReLU(), nn.MaxPool2d(2), conv(6, 6), nn.ReLU(True)], 0),
    "rectified": (
        [
            *(conv(3, 6, bias=True), nn.ReLU(), conv(6, 8, stride=2, bias=True), nn.ReLU()),
            *(conv(8, 4, bias=True), nn.ReLU(), conv(4, 6, bias=True), norm(6), nn.ReLU()),
        ],
        1,
    ),
    "rectified at the end": ([conv(3, 6), norm(6), conv(6, 6), nn.ReLU()], 1),
    "classifier": (
        [
            *(conv(3, 6), nn.ReLU(), nn.Flatten(), linear(384, 20), nn.ReLU(inplace=True)),
            *(linear(20, 10), nn.ReLU(), linear(10, 4)),
        ],
        0,
    ),
    "sequences": ([linear(8, 6), nn.ReLU(), linear(6, 5), nn.ReLU()], 0),  # of the last dimension
    "batch norm first": ([norm(3), nn.ReLU(), conv(3, 6), norm(6), nn.ReLU()], 1),
    "nested": (
        [nn.Sequential(conv(3, 6), norm(6), nn.ReLU()), nn.Sequential(conv(6, 6), norm(6))],
        2,
    ),
    "not affine": ([conv(3, 6), norm(6, affine=False), nn.ReLU(), conv(6, 6)], 1),
    "not tracked": ([conv(3, 6), norm(6, track_running_stats=False), nn.ReLU(), conv(6, 6)], 1),
    "another momentum": ([conv(3, 6), norm(6, momentum=0.3), nn.ReLU(), conv(6, 6)], 1),
    "mean of all batches": ([conv(3, 6), norm(6, momentum=None), nn.ReLU(), conv(6, 6)], 0),
    "rounded up": ([conv(3, 6), norm(6), nn.ReLU(), nn.MaxPool2d(4, ceil_mode=True)], 1),
    "spread": ([conv(3, 6), norm(6), nn.ReLU(), nn.MaxPool2d(2, dilation=2), conv(6, 3)], 1),
    "padded": ([conv(3, 6, padding_mode="circular"), norm(6), nn.ReLU(), conv(6, 3)], 0),
    "alone": ([conv(3, 6)], 0),
}


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many units with a batch norm have run."""
    seen, track = [0], units.NormParts.track

    def counted(*args: Any) -> Any:
        seen[0] += 1
        return track(*args)

    monkeypatch.setattr(units.NormParts, "track", counted)
    return seen


def sequence(name: str) -> nn.Sequential:
    return copy.deepcopy(nn.Sequential(*SEQUENCES[name][0])).double()


def assert_same_apart(model: nn.Module) -> None:
    """Output and gradients are those of the same model when it runs layer by layer."""
    apart = copy.deepcopy(model)
    fuse(model)
    unfuse(apart)
    x = normal(8, 3, 8, 8)
    results = []
    for m in (model, apart):
        data = x.clone().requires_grad_()
        y = m(data)
        (y.square().sum() + y[:, 0].sum()).backward()
        results.append([y.detach(), data.grad, *(p.grad for p in m.parameters())])
    for ours, right in zip(*results, strict=True):
        assert (ours is None) == (right is None)
        if ours is not None and right is not None:
            assert_close(ours, right, 1e-9)


@pytest.mark.parametrize("name", SEQUENCES)
def test_training(name: str, count: list[int]) -> None:
    assert_same(sequence(name), normal(8, 3, 8, 8))
    assert count[0] == 2 * SEQUENCES[name][1]  # two steps


@pytest.mark.parametrize("name", SEQUENCES)
def test_evaluation(name: str, count: list[int]) -> None:
    assert_same(sequence(name).eval(), normal(8, 3, 8, 8), steps=1)
    assert count[0] == 0


@pytest.mark.parametrize("batch", [1, 2, 3, 12])
def test_any_batch_size(batch: int) -> None:
    for name in ("vgg", "strides", "rectified", "classifier"):
        assert_same(sequence(name), normal(batch, 3, 8, 8), steps=1)


@pytest.mark.parametrize("sparsity", [0.3, 0.9, 0.97])
def test_gradients_through_rectifiers(sparsity: float) -> None:
    """In panels, of more and fewer connections, some of which are of no channel."""
    layers: list[nn.Module] = []
    wide: list[nn.Module] = []
    for k in range(4):
        made = torch.Generator().manual_seed(k)
        layers += [SparseConv2d(8, 8, 3, padding=1, sparsity=sparsity, generator=made), nn.ReLU()]
        wide += [SparseLinear(300, 300, sparsity=sparsity, generator=made), nn.ReLU()]
    assert_same(nn.Sequential(*layers).double(), normal(64, 8, 10, 10), steps=1)
    assert_same(nn.Sequential(*wide).double(), normal(130, 300), steps=1)


@pytest.mark.parametrize("frozen", ["0.values", "2.values", "2.bias", "4.bias", "6.values"])
def test_some_frozen_between_rectifiers(frozen: str) -> None:
    model = sequence("rectified")
    model.get_parameter(frozen).requires_grad_(False)
    assert_same_apart(model)


def test_two_threads_go_back_through_one_graph() -> None:
    model = nn.Sequential(linear(64, 2000), nn.ReLU(), linear(2000, 64))
    fuse(model)
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
    """The gradient of a bias before a rectifier, in numbers of single precision."""
    middle: list[nn.Module] = [nn.BatchNorm2d(4)] if norms else []
    model = nn.Sequential(conv(3, 4, bias=True), *middle, nn.ReLU(), conv(4, 4, 1))
    shift: Any = model[1] if norms else model[0]
    shift.bias.data.fill_(50.0)  # nothing is cut off, which rounding might decide otherwise
    double = copy.deepcopy(model).double()
    x, dy = normal(1000, 3, 32, 32), normal(1000, 4, 32, 32, seed=1)
    for m, dtype in ((model, torch.float32), (double, torch.float64)):
        fuse(m)
        m(x.to(dtype)).backward(dy.to(dtype))
    right = (double[1] if norms else double[0]).bias.grad
    error = (shift.bias.grad.double() - right) / right.abs().mean()
    assert error.square().mean().sqrt() < 4e-7


def test_two_backward_passes_through_rectifiers() -> None:
    model = sequence("rectified")
    fuse(model)
    y = model(normal(8, 3, 8, 8))
    grads = []
    for weight in (1.0, 3.0):
        model.zero_grad()
        (weight * y.square().sum()).backward(retain_graph=True)
        grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for once, thrice in zip(*grads, strict=True):
        assert_close(3 * once, thrice, 1e-9)


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("kind", ["forward", "before", "backward"])
def test_what_is_watched_runs_by_itself(place: int, kind: str, count: list[int]) -> None:
    """A hook sees its module's input and output, and may change them."""

    def forward(module: Any, args: Any, output: Tensor) -> Tensor:
        return output * 2

    def before(module: Any, args: Any) -> Any:
        return (args[0] * 2,)

    def backward(module: Any, gradients: Any, outer: Any) -> Any:
        return (gradients[0] * 2,)

    model = sequence("vgg")
    if kind == "forward":
        model[place].register_forward_hook(forward)
    elif kind == "before":
        model[place].register_forward_pre_hook(before)
    else:
        model[place].register_full_backward_hook(backward)
    assert_same_apart(model)
    # A rectifier that is watched leaves convolution and batch norm together.
    assert count[0] == (3 if place == 2 else 2)


def test_a_forward_of_ones_own(count: list[int]) -> None:
    model = sequence("vgg")
    model[1].forward = lambda x: x + 1  # type: ignore[method-assign]
    fuse(model)
    y = model(normal(8, 3, 8, 8))
    unfuse(model)
    assert_close(y, model(normal(8, 3, 8, 8)), 1e-9)
    assert count[0] == 2


def test_a_sequence_with_a_forward_of_its_own() -> None:
    model = sequence("vgg")
    model.forward = lambda x: x * 3  # type: ignore[method-assign]
    fuse(model)
    x = normal(8, 3, 8, 8)
    assert torch.equal(model(x), x * 3)
    unfuse(model)
    assert torch.equal(model(x), x * 3)


def test_a_part_that_is_frozen() -> None:
    model = sequence("vgg")
    for module in model[:2]:
        for parameter in module.parameters():
            parameter.requires_grad_(False)
    assert_same_apart(model)
    model.zero_grad()
    model[4].eval()
    assert_same_apart(model)


def test_copies_and_files_run_by_themselves(count: list[int]) -> None:
    model = sequence("vgg")
    fuse(model)
    x = normal(8, 3, 8, 8)
    right = plain(model)(x)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            model[0].values.zero_()  # is nothing to the copy
        count[0] = 0
        assert_close(twin(x), right, 1e-9)
        assert count[0] == 3


def test_densified_and_converted_again(count: list[int]) -> None:
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU()).double()
    rewire.sparsify(model, sparsity=0.5)
    x = normal(8, 3, 8, 8)
    first = model(x)
    assert count[0] == 1
    rewire.densify(model)
    assert "forward" not in model.__dict__
    assert_close(model(x), first, 1e-9)
    assert count[0] == 1


def test_a_wrong_number_of_channels_is_refused() -> None:
    model = sequence("vgg")
    fuse(model)
    with pytest.raises(ValueError, match=r"expected an input of \(N, 3, H, W\)"):
        model(normal(8, 4, 8, 8))


def test_gse_takes_its_gradients_from_units() -> None:
    """A rewiring in a fused model and in one that runs layer by layer: the same connections."""
    kept = []
    for fused in (True, False):
        model = sequence("vgg")
        (fuse if fused else unfuse)(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rewirer = rewire.GSE(model, optimizer, every=1, until=10, seed=0)
        for step in range(3):
            optimizer.zero_grad()
            model(normal(8, 3, 8, 8, seed=step)).square().mean().backward()
            optimizer.step()
            rewirer.step()
        kept.append([m.indices for m in model.modules() if isinstance(m, SparseConv2d)])
    assert all(torch.equal(a, b) for a, b in zip(*kept, strict=True))


def test_statistics_that_are_switched_off_stay(count: list[int]) -> None:
    model = sequence("vgg")
    model[1].track_running_stats = False
    before = model[1].running_mean.clone()
    assert_same_apart(model)
    assert torch.equal(model[1].running_mean, before)
    assert model[1].num_batches_tracked == 0
    assert count[0] == 2


def test_no_count_of_batches() -> None:
    model = sequence("vgg")
    model[1].num_batches_tracked = None
    assert_same_apart(model)


def test_types_without_kernels(count: list[int]) -> None:
    model = sequence("vgg").bfloat16()
    fuse(model)
    model(normal(8, 3, 8, 8).bfloat16()).sum().backward()
    assert count[0] == 0


def test_units_that_follow_each_other_are_one_node() -> None:
    model = nn.Sequential(
        *(conv(3, 6), nn.ReLU(), nn.Sequential(conv(6, 6), norm(6), nn.ReLU(), nn.MaxPool2d(2))),
        *(conv(6, 4), nn.ReLU()),
    ).double()
    fuse(model)
    y = model(normal(7, 3, 8, 8))  # fills no panels
    assert y.grad_fn is not None
    assert y.grad_fn.name() == "_ChainBackward"
    inputs = {node.name() for node, _ in y.grad_fn.next_functions if node is not None}
    assert inputs == {"torch::autograd::AccumulateGrad"}


def test_what_a_chain_has_saved_is_freed_by_backward() -> None:
    """The output, which holds the graph, may live on."""
    model = sequence("vgg")
    fuse(model)
    y = model(normal(7, 3, 8, 8))
    node: Any = y.grad_fn
    assert len(node.saved_tensors) > 20
    y.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()
    with pytest.raises(RuntimeError, match="freed"):
        _ = node.saved_tensors


def test_backward_twice() -> None:
    model = sequence("vgg")
    fuse(model)
    y = model(normal(8, 3, 8, 8)).square().sum()
    first = torch.autograd.grad(y, list(model.parameters()), retain_graph=True)
    second = torch.autograd.grad(y, list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("place", [0, 1, 7])
def test_a_weight_that_changes_before_backward(place: int) -> None:
    model = sequence("vgg")
    fuse(model)
    y = model(normal(8, 3, 8, 8)).sum()
    with torch.no_grad():
        next(model[place].parameters()).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_a_layer_and_a_batch_norm_used_twice() -> None:
    twice = [conv(6, 6), norm(6), nn.ReLU()]
    assert_same_apart(nn.Sequential(conv(3, 6), nn.ReLU(), *twice, *twice).double())


@pytest.mark.parametrize("name", ["vgg", "not affine", "classifier"])
@pytest.mark.parametrize("training", [True, False])
def test_without_gradients(name: str, training: bool) -> None:
    model = sequence(name).train(training)
    apart = copy.deepcopy(model)
    fuse(model)
    unfuse(apart)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert_close(model(normal(64, 3, 8, 8)), apart(normal(64, 3, 8, 8)), 1e-9)
    state = apart.state_dict()
    for key, tensor in model.state_dict().items():
        assert_close(tensor.double(), state[key].double(), 1e-9)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", ["vgg", "rectified alone"])
def test_tangents_are_refused(name: str, grad: bool) -> None:
    """Also where autograd records nothing: there the kernels would lose them silently."""
    model = sequence(name)
    fuse(model)
    x = normal(8, 3, 8, 8)
    with forward_ad.dual_level(), torch.set_grad_enabled(grad):
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            model(dual)


def test_a_dispatch_mode_sees_each_layer(count: list[int]) -> None:
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
    assert count[0] == 0


def test_a_batch_norm_that_becomes_another_type() -> None:
    class Frozen(nn.BatchNorm2d):
        def forward(self, x: Tensor) -> Tensor:
            return x * 3

    model = sequence("vgg")
    fuse(model)
    model[1].__class__ = Frozen  # type: ignore[assignment]
    assert_same_apart(model)
    assert model[1].num_batches_tracked == 0
    unfuse(model)
    assert "forward" not in model[1].__dict__


class ChangesStatistics(nn.Module):
    """Changes what a batch norm has tracked once it has been called."""

    def __init__(self) -> None:
        super().__init__()
        self.units = nn.Sequential(conv(3, 6), norm(6), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.units(x)
        self.units[1].running_mean.add_(1)
        return y + 1


def test_statistics_that_change_after_the_call() -> None:
    model = ChangesStatistics().double().eval()
    apart = copy.deepcopy(model)
    fuse(model)
    x = normal(8, 3, 8, 8)
    assert_close(model(x), apart(x), 1e-9)
