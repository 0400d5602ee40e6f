"""``layer.weight`` of sparse layers: its shape and dtype, products with it, and what it refuses."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune
from torch.utils.checkpoint import checkpoint

import rewire
from rewire import SparseConv2d, SparseLinear
from rewire.nn import SparseWeight
from rewire.ops import native
from some_layers import Layer, both, conv, data, linear, seeded

csr = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
DOUBLE = {"dtype": torch.float64}


def random(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(shape, generator=seeded(seed), dtype=torch.float64)


def at_connections(layer: Layer, gradient: Tensor) -> Tensor:
    """The gradient of a dense weight as that of the layer's values."""
    connections = layer.connections
    flat = gradient if gradient.dim() == 2 else gradient.permute(0, 2, 3, 1).flatten(1)
    return flat[connections.outputs(), connections.inputs()].unsqueeze(1)


# What code asks for -------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_it_has_the_shape_and_type_of_the_dense_weight(make: Any, dtype: torch.dtype) -> None:
    layer = make(dtype=dtype)
    weight, dense = layer.weight, layer.to_dense().weight
    assert isinstance(weight, Tensor)
    assert weight.shape == dense.shape
    assert weight.size() == dense.size()
    assert weight.size(1) == dense.size(1)
    assert (weight.dim(), weight.ndim, len(weight)) == (dense.dim(), dense.ndim, len(dense))
    assert torch.numel(weight) == weight.numel() == dense.numel()
    assert (weight.dtype, weight.device) == (dtype, dense.device)
    assert weight.element_size() == dense.element_size()
    assert torch.is_floating_point(weight)
    assert weight.is_floating_point()
    assert not weight.is_complex()
    assert not weight.is_cuda
    assert weight.is_cpu
    assert weight.requires_grad
    assert weight.layout == torch.sparse_csr
    assert weight.is_sparse_csr
    assert not hasattr(weight, "SCB")
    assert "connections" in f"{weight}"


def test_it_follows_its_layer() -> None:
    layer = linear()
    weight = layer.weight
    layer.double()
    assert weight.dtype == torch.float64
    layer.requires_grad_(False)
    assert not weight.requires_grad
    weight.requires_grad = True
    assert layer.values.requires_grad
    assert not weight.requires_grad_(False).requires_grad
    assert not layer.values.requires_grad


@csr
def test_no_dense_weight_is_built() -> None:
    layer = SparseLinear(1_000_000, 1_000_000, connections=1000)  # 4 TB
    assert layer.weight.shape == (1_000_000, 1_000_000)
    assert F.linear(torch.ones(1, 1_000_000), layer.weight).shape == (1, 1_000_000)
    assert layer.weight.to_sparse_csr().values().shape == (1000,)


@csr
@both
def test_csr_and_dense_copies(make: Any) -> None:
    layer = make(**DOUBLE)
    dense = layer.to_dense().weight
    matrix = layer.weight.to_sparse_csr()
    assert matrix.layout == torch.sparse_csr
    assert torch.equal(matrix.to_dense(), dense.flatten(1))
    assert torch.equal(layer.weight.crow_indices(), matrix.crow_indices())
    assert torch.equal(layer.weight.col_indices(), matrix.col_indices())
    assert torch.equal(layer.weight.values(), matrix.values())
    copied = layer.weight.to_dense()
    assert torch.equal(copied, dense)
    factor = random(*dense.shape)
    (gradient,) = torch.autograd.grad((copied * factor).sum(), layer.values)
    assert torch.equal(gradient, at_connections(layer, factor))


@csr
def test_the_transpose() -> None:
    layer = linear(**DOUBLE)
    dense = layer.to_dense().weight
    for turned in (layer.weight.t(), layer.weight.T, layer.weight.transpose(-1, 0)):
        assert turned.shape == (12, 9)
        assert torch.equal(turned.to_dense(), dense.t())
        assert torch.equal(turned.to_sparse_csr().to_dense(), dense.t())
        assert turned.t().shape == (9, 12)
    assert layer.weight.transpose(0, -2).shape == (9, 12)


@both
def test_it_is_no_part_of_the_state(make: Any) -> None:
    layer = make()
    names = {name for name, _ in layer.named_parameters()}, {*layer.state_dict()}
    assert layer.weight is not None
    assert ({name for name, _ in layer.named_parameters()}, {*layer.state_dict()}) == names
    assert "weight" not in names[0] | names[1]
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other.weight.to_dense(), layer.weight.to_dense())
        with torch.no_grad():
            other.values.zero_()
        assert not other.weight.to_dense().any()
        assert layer.weight.to_dense().any()


# Products -----------------------------------------------------------------------------------------

LINEAR: dict[str, Callable[[Tensor, Any, Tensor], Tensor]] = {
    "linear": lambda x, w, b: F.linear(x, w, b),
    "keywords": lambda x, w, b: F.linear(input=x, weight=w, bias=b),
    "other bias": lambda x, w, b: F.linear(x, w, torch.cat([b[:4], torch.zeros_like(b[4:])])),
    "no bias": lambda x, w, b: F.linear(x, w),
    "sequences": lambda x, w, b: F.linear(x.view(1, 5, 12), w, b),
    "vector": lambda x, w, b: F.linear(x[0], w, b),
    "x @ w.t()": lambda x, w, b: x @ w.t() + b,
    "x @ w.T": lambda x, w, b: torch.matmul(x.view(1, 5, 12), w.T),
    "mm": lambda x, w, b: x.mm(w.transpose(0, 1)),
    "addmm": lambda x, w, b: torch.addmm(b, x, w.t()),
    "w @ x": lambda x, w, b: w @ x.t(),
    "w @ batch": lambda x, w, b: w @ torch.stack([x.t(), 2 * x.t()]),
    "w @ vector": lambda x, w, b: torch.matmul(w, x[1]),
    "to": lambda x, w, b: F.linear(x.float(), w.to(torch.float32), b.to(dtype=torch.float32)),
    "type_as": lambda x, w, b: F.linear(x.float(), w.type_as(x.float())).double(),
    "same type": lambda x, w, b: F.linear(x, w.to(x.dtype).contiguous(), b),
    "dense": lambda x, w, b: x @ (w.to_dense() * 2).t(),
}


@pytest.mark.parametrize("name", LINEAR)
def test_products_of_a_linear_layer(name: str) -> None:
    layer = linear(**DOUBLE)
    dense = layer.to_dense()
    found = []
    for one in (layer, dense):
        x = data(layer).requires_grad_()
        y = LINEAR[name](x, one.weight, one.bias)
        parameter = one.values if one is layer else one.weight
        wanted = [x, parameter, one.bias]
        grads = torch.autograd.grad(y.square().sum(), wanted, allow_unused=True)
        found.append((y, *grads))
    (ours, dx, dvalues, dbias), (theirs, dx2, dweight, dbias2) = found
    tolerance = (
        {"rtol": 1e-4, "atol": 1e-5} if ours.dtype == torch.float32 or "type" in name else {}
    )
    torch.testing.assert_close(ours, theirs, **tolerance)  # type: ignore[arg-type]
    torch.testing.assert_close(dx, dx2, **tolerance)  # type: ignore[arg-type]
    torch.testing.assert_close(dvalues, at_connections(layer, dweight), **tolerance)  # type: ignore[arg-type]
    torch.testing.assert_close(dbias, dbias2, **tolerance)  # type: ignore[arg-type]


CONV: dict[str, dict[str, Any]] = {
    "as it is": {"stride": 2, "padding": 1},
    "defaults": {},
    "dilated": {"dilation": 2, "padding": (2, 0)},
    "same": {"padding": "same"},
    "no bias": {"bias": None, "stride": (1, 3)},
}


@pytest.mark.parametrize("name", CONV)
def test_products_of_a_convolution(name: str) -> None:
    layer = conv(**DOUBLE)
    dense = layer.to_dense()
    found = []
    for one in (layer, dense):
        x = data(layer).requires_grad_()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch copies for "same" with an even kernel
            y = F.conv2d(x, one.weight, **{"bias": one.bias, **CONV[name]})
        parameter = one.values if one is layer else one.weight
        found.append((y, *torch.autograd.grad(y.square().sum(), [x, parameter])))
    (ours, dx, dvalues), (theirs, dx2, dweight) = found
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(dx, dx2)
    torch.testing.assert_close(dvalues, at_connections(layer, dweight))  # type: ignore[arg-type]
    assert layer.stride == (2, 2)


def test_attention_with_separate_weights() -> None:
    layers = [SparseLinear(8, 8, sparsity=0.5, generator=seeded(i), **DOUBLE) for i in range(4)]
    found = []
    for q, k, v, out in (layers, [layer.to_dense() for layer in layers]):
        x = random(5, 2, 8).requires_grad_()
        y, _ = F.multi_head_attention_forward(
            *(x, x, x, 8, 2, None, torch.cat([q.bias, k.bias, v.bias]), None, None, False, 0.0),
            *(out.weight, out.bias),
            use_separate_proj_weight=True,
            q_proj_weight=q.weight,
            k_proj_weight=k.weight,
            v_proj_weight=v.weight,
        )
        found.append((y, *torch.autograd.grad(y.square().sum(), [x, v.bias])))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_second_derivatives() -> None:
    layer = linear(**DOUBLE)
    x = data(layer).requires_grad_()

    def product(x: Tensor, values: Tensor) -> Tensor:
        state = {"values": values, "bias": layer.bias}
        return torch.func.functional_call(
            _Call(layer), {f"0.{k}": v for k, v in state.items()}, (x,)
        )

    values = layer.values.detach().clone().requires_grad_()
    assert torch.autograd.gradcheck(product, (x, values))
    assert torch.autograd.gradgradcheck(product, (x, values))


class _Call(nn.ModuleList):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__([layer])

    def forward(self, x: Tensor) -> Tensor:
        layer: Any = self[0]
        return F.linear(x, layer.weight, layer.bias).square()


def test_a_detached_weight_gets_no_gradient() -> None:
    layer = linear(**DOUBLE)
    x = data(layer).requires_grad_()
    for weight in (layer.weight.detach(), layer.weight.data):
        assert not weight.requires_grad
        y = F.linear(x, weight)
        y.sum().backward()
        assert layer.values.grad is None
        assert x.grad is not None
    with torch.no_grad():
        assert not F.linear(x, layer.weight).requires_grad
    with torch.inference_mode():
        assert torch.equal(F.linear(x, layer.weight), y)
        assert layer.weight.shape == (9, 12)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(reentrant: bool) -> None:
    layer = linear(**DOUBLE)
    x = data(layer).requires_grad_()
    y = checkpoint(lambda x: F.linear(x, layer.weight, layer.bias), x, use_reentrant=reentrant)
    y.square().sum().backward()
    expected = torch.autograd.grad(layer(x).square().sum(), layer.values)[0]
    assert torch.equal(layer.values.grad, expected)  # type: ignore[arg-type]


def test_scaling_scales_the_values() -> None:
    layer = linear(**DOUBLE)
    before = layer.values.detach().clone()
    with torch.no_grad():
        layer.weight.mul_(4)
        layer.weight.div_(torch.tensor(2.0))
    assert torch.equal(layer.values, 2 * before)
    layer.weight.data.mul_(0.5)
    assert torch.equal(layer.values, before)
    with pytest.raises(RuntimeError, match="leaf"):
        layer.weight.mul_(2)
    with pytest.raises(RuntimeError, match=r"mul_: the weight.*cannot be written to"):
        layer.weight.data.mul_(torch.ones(9, 12))


def test_several_threads() -> None:
    layer = linear(**DOUBLE)
    xs = [random(5, 12, seed=seed) for seed in range(8)]
    expected = [layer(x) for x in xs]
    found: list[list[bool]] = []

    def run() -> None:
        pairs = zip(xs, expected, strict=True)
        found.append([torch.equal(F.linear(x, layer.weight, layer.bias), y) for x, y in pairs])

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[True] * 8] * 4


def test_reading_it_leaves_nothing_behind() -> None:
    layer = linear()
    gc.collect()
    gc.disable()
    try:
        weight = layer.weight
        turned, kept = weight.t(), weakref.ref(weight)
        dtype, gone = weight.dtype, weakref.ref(layer)
        del weight, turned
        assert dtype == torch.float32
        assert kept() is None
        F.linear(data(layer), layer.weight, layer.bias).sum().backward()
        del layer
        assert gone() is None
    finally:
        gc.enable()


# Inside a model -----------------------------------------------------------------------------------


class ByWeight(nn.Module):
    """A block that multiplies with its layers' weights itself, or calls its layers."""

    def __init__(self, calls: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.hidden, self.head = nn.Linear(8, 20), nn.Linear(20, 4)
        self.calls = calls

    def forward(self, x: Tensor) -> Tensor:
        conv, hidden, head = self.conv, self.hidden, self.head
        x = x.to(conv.weight.dtype).to(conv.weight.device)
        if self.calls:
            return head(F.relu(hidden(F.relu(self.norm(conv(x))).mean((2, 3)))))  # type: ignore[no-any-return]
        x = F.conv2d(x, conv.weight, conv.bias, 2, 1)
        x = F.relu(self.norm(x)).mean((2, 3))
        x = F.relu(F.linear(x, hidden.weight, hidden.bias))
        return F.linear(x, weight=head.weight, bias=head.bias)


def block(calls: bool, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return rewire.sparsify(nn.Sequential(ByWeight(calls)), 0.5, weights="fresh", **options)


def test_products_are_recorded_as_layers_are() -> None:
    if not native.available():
        pytest.skip("needs the compiled kernels")
    x = random(64, 3, 8, 8).float()
    found, expected = (rewire.explain(block(calls), x) for calls in (False, True))
    assert found.recorded == expected.recorded == 3
    assert not found.stops
    assert str(found) == str(expected)
    assert torch.equal(block(False)(x), block(True)(x))


@pytest.mark.parametrize("engine", [True, False])
def test_a_rewirer_sees_the_gradients_of_products(engine: bool) -> None:
    x, indices = random(32, 3, 8, 8).float(), []
    for calls in (False, True):
        model = block(calls, engine=engine)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rewirer = rewire.GSE(model, optimizer, every=1, until=10, fraction=0.3, subset=1.0)
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            rewirer.step()
        indices.append(
            {k: v for k, v in model.state_dict().items() if "indices" in k or "values" in k}
        )
    assert indices[0].keys() == indices[1].keys()
    for key, value in indices[0].items():
        torch.testing.assert_close(value, indices[1][key])


def test_an_optimizer_may_change_values_between_products() -> None:
    model = block(False)
    x = random(16, 3, 8, 8).float()
    first = model(x)
    with torch.no_grad():
        model[0].head.values.zero_()  # type: ignore[index,union-attr,operator]
    assert not torch.equal(model(x), first)


def test_compiled_and_exported_models() -> None:
    layer = linear()
    x = data(layer)
    model = _Call(layer)
    expected = model(x)
    try:
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        assert torch.equal(compiled(x), expected)
    finally:
        torch.compiler.reset()
    exported = torch.export.export(model, (x,)).module()
    assert torch.equal(exported(x), expected)


def test_autocast_and_bfloat16() -> None:
    layer = linear()
    with torch.autocast("cpu", torch.bfloat16):
        x = data(layer)
        assert torch.equal(F.linear(x, layer.weight, layer.bias), layer(x))
    layer.bfloat16()
    x = data(layer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rewire.PerformanceWarning)
        assert torch.equal(F.linear(x, layer.weight, layer.bias), layer(x))


# What it refuses ----------------------------------------------------------------------------------

WRITES: dict[str, Callable[[Any], Any]] = {
    "init": lambda layer: nn.init.xavier_uniform_(layer.weight),
    "constant": lambda layer: nn.init.zeros_(layer.weight),
    "normal_": lambda layer: layer.weight.data.normal_(0, 0.02),
    "copy_": lambda layer: layer.weight.copy_(layer.weight.to_dense()),
    "zero_": lambda layer: layer.weight.detach().zero_(),
    "item": lambda layer: layer.weight.__setitem__(0, 1.0),
    "data": lambda layer: setattr(layer.weight, "data", torch.ones(9, 12)),
    "add": lambda layer: layer.weight.__iadd__(1.0),
    "out": lambda layer: torch.mm(torch.ones(9, 2), torch.ones(2, 12), out=layer.weight),
}


@pytest.mark.parametrize("name", WRITES)
def test_writing_is_refused(name: str) -> None:
    layer = linear()
    before = layer.values.detach().clone()
    with (
        torch.no_grad(),
        pytest.raises(RuntimeError, match=r"cannot be written to: write to layer\.values") as error,
    ):
        WRITES[name](layer)
    assert "keep_dense=" in str(error.value)
    assert torch.equal(layer.values, before)


REFUSED: dict[str, Callable[[Any], Any]] = {
    "sum": lambda w: w.sum(),
    "add": lambda w: w + 1,
    "abs": lambda w: torch.abs(w),
    "getitem": lambda w: w[:3],
    "iter": lambda w: list(w),
    "cat": lambda w: torch.cat([w, w]),
    "bool": lambda w: bool(w),
    "numpy": lambda w: w.numpy(),
    "data_ptr": lambda w: w.data_ptr(),
    "deepcopy": lambda w: copy.deepcopy(w),
    "pickle": lambda w: pickle.dumps(w),
    "view": lambda w: w.view(-1),
    "embedding": lambda w: F.embedding(torch.tensor([1]), w),
    "x @ w": lambda w: torch.ones(2, 9) @ w,
    "transposed": lambda w: F.linear(torch.ones(2, 9), w.t()),
    "w.t() @ x": lambda w: w.t() @ torch.ones(9, 2),
    "w @ w": lambda w: w @ w.t(),
    "as input": lambda w: F.linear(w, torch.ones(2, 12)),
    "as bias": lambda w: F.linear(torch.ones(2, 12), torch.ones(3, 12), w),
    "conv": lambda w: F.conv2d(torch.ones(1, 12, 4, 4), w),
    "beta": lambda w: torch.addmm(torch.ones(9), torch.ones(2, 12), w.t(), beta=2),
    "permute": lambda w: w.permute(1, 0),
    "device": lambda w: w.to("meta"),
    "grad": lambda w: w.grad,
    "hook": lambda w: w.register_hook(print),
    "parameter": lambda w: nn.Parameter(w.detach()),
    "prune": lambda w: torch.ones_like(w),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_dense_numbers_is_refused(name: str) -> None:
    layer = linear()
    with pytest.raises(RuntimeError, match=r"the weight of a SparseLinear.*keep_dense=\[\.\.\.\]"):
        REFUSED[name](layer.weight)


def test_other_groups_are_refused() -> None:
    with pytest.raises(RuntimeError, match=r"conv2d: the weight of a SparseConv2d"):
        F.conv2d(torch.ones(1, 8, 9, 9), conv().weight, groups=2)


def test_the_error_names_the_layer() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(linear())

        def forward(self, x: Tensor) -> Tensor:
            weight: Any = self.inner[0].weight
            return x @ weight.abs().t()

    with pytest.raises(
        RuntimeError, match=r"abs: the weight of inner\.0 .*keep_dense=\['inner\.0'\]"
    ):
        Outer()(torch.ones(2, 12))


def test_it_cannot_be_assigned() -> None:
    layer, dense = linear(), nn.Linear(12, 9)
    for value in (dense.weight, dense.weight.detach(), None):
        with pytest.raises(AttributeError, match=r"cannot be assigned.*layer\.values"):
            layer.weight = value
    with pytest.raises(AttributeError, match="cannot be assigned"):
        layer.register_parameter("weight", dense.weight)
    with pytest.raises(TypeError, match="cannot assign"):
        dense.weight = layer.weight
    with pytest.raises(ValueError, match="does not have a parameter"):
        parametrize.register_parametrization(layer, "weight", nn.Identity())
    with pytest.raises(TypeError, match="cannot assign"):
        prune.l1_unstructured(layer, "weight", 0.5)
    assert {name for name, _ in layer.named_parameters()} == {"values", "bias"}


class _Dense(torch.autograd.Function):
    """An autograd function that computes the gradient of a weight itself, which is a dense one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return None, dy.t() @ x


@torch.jit.script
def _scripted(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight.t()


def test_no_gradient_is_lost_in_code_that_no_python_sees() -> None:
    layer = linear()
    x = data(layer)
    y: Tensor = _Dense.apply(x, layer.weight)  # type: ignore[no-untyped-call]
    assert torch.equal(y, F.linear(x, layer.weight))
    with pytest.raises(RuntimeError, match="has computed a dense gradient for it"):
        y.sum().backward()
    _Dense.apply(x, layer.weight.to_dense()).sum().backward()  # type: ignore[no-untyped-call]
    assert torch.allclose(layer.values.grad, torch.autograd.grad(layer(x).sum(), layer.values)[0])  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="TorchScript"):
        _scripted(x, layer.weight)


def test_its_class_is_public() -> None:
    assert type(linear().weight) is SparseWeight
    assert isinstance(conv().weight, SparseWeight)
    assert type(SparseConv2d.weight) is property
