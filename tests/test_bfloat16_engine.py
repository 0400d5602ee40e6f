"""Models under autocast to bfloat16, and in bfloat16: types are exactly those of the densified twin, and
numbers as near to those in float64 as the twin's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import rewire
from engine_models import dense_gradients, leaves
from rewire import ops
from rewire.engine import execute, links, plan
from rounding import GRADIENTS, VALUES, no_worse

pytestmark = [
    pytest.mark.skipif(not ops.available(), reason="needs the compiled kernels"),
    pytest.mark.usefixtures("small_panels"),
]
BF16, F32 = torch.bfloat16, torch.float32
Body = Callable[[Any, Tensor], Any]


class Net(nn.Module):
    """Layers; what is done with them is the body."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.conv, self.conv2 = (nn.Conv2d(4, 4, 3, padding=1) for _ in range(2))
        self.depthwise = nn.Conv2d(4, 4, 3, padding=1, groups=4)
        self.bn, self.bn2, self.bn1 = nn.BatchNorm2d(4), nn.BatchNorm2d(4), nn.BatchNorm1d(4)
        self.ln, self.rms = nn.LayerNorm(4), nn.RMSNorm(4)
        self.fc, self.fc2 = nn.Linear(4, 4), nn.Linear(4, 4)
        self.bias, self.scale = nn.Parameter(torch.randn(4)), nn.Parameter(torch.tensor(0.7))
        for norm in (self.bn, self.bn2, self.bn1, self.ln):
            nn.init.normal_(norm.weight)
            nn.init.normal_(norm.bias)
        self.body = body

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)

    def cast(self, x: Tensor, dtype: torch.dtype, how: str = "to") -> Tensor:
        """A change of type, except in the model that computes without rounding."""
        if self.scale.dtype == torch.float64:
            return x
        return x.to(dtype) if how == "to" else getattr(x, how)()


def tokens(m: Any, x: Tensor) -> Tensor:
    y: Tensor = m.conv(x).flatten(2).transpose(1, 2)
    return y


def _off(m: Any, x: Tensor) -> Any:
    y = m.conv(x)
    with torch.autocast("cpu", enabled=False):
        z = m.conv2(F.relu(m.cast(y, F32)))
    return y, z, m.fc(z.mean((2, 3)))


def _off_and_on(m: Any, x: Tensor) -> Any:
    with torch.autocast("cpu", enabled=False):
        y = m.bn(m.conv(x))
        with torch.autocast("cpu", BF16):
            z = m.conv2(y)
    return y + z


def _in_place(m: Any, x: Tensor) -> Any:
    y = m.conv(x)
    y += x  # keeps its type
    z = m.cast(m.conv2(x), F32)
    z.add_(y).mul_(0.5)
    return y, F.relu_(z)


def _kept(m: Any, x: Tensor) -> Any:
    y = m.bn(m.conv(x))
    z = F.silu(y)
    return y, z, m.conv2(z)


def _transformer(m: Any, x: Tensor) -> Any:
    y = m.cast(tokens(m, x), F32) * 2
    z = m.ln(y)
    y = y + m.fc2(F.gelu(m.fc(z) + m.fc2(z)))
    return m.ln(y)


BODIES: dict[str, Body] = {
    "conv": lambda m, x: m.conv(x),
    "linear": lambda m, x: m.fc(x.mean((2, 3))),
    "tokens": lambda m, x: m.fc(F.relu(m.fc2(x.flatten(2).transpose(1, 2)))),
    "unit": lambda m, x: F.relu(m.bn(m.conv(x))),
    "units": lambda m, x: F.relu(m.bn2(m.conv2(F.relu(m.bn(m.conv(x)))))),
    "no statistics": lambda m, x: F.batch_norm(m.conv(x), None, None, training=True),
    "residual": lambda m, x: (lambda y: m.conv(F.relu(m.bn2(m.conv2(y)) + y)))(
        F.relu(m.bn(m.conv(x)))
    ),
    "residual of float32": lambda m, x: m.conv2(F.relu(m.bn(m.conv(x)) + x)),
    "products with ReLU": lambda m, x: m.conv2(F.relu(m.conv(F.relu(m.conv2(x))))),
    "linears with ReLU": lambda m, x: m.fc(F.relu(m.fc2(F.relu(m.fc(x.mean((2, 3))))))),
    "norm of float32": lambda m, x: m.conv(F.relu(m.bn(m.cast(m.conv(x), F32)))),
    "norm of float32 alone": lambda m, x: F.silu(m.bn(m.cast(m.conv(x), F32)) * 2) + m.conv2(x),
    "norm of rows": lambda m, x: m.fc2(F.relu(m.bn1(m.fc(m.conv(x).mean((2, 3)))))),
    "depthwise": lambda m, x: m.conv2(m.depthwise(m.conv(x))),
    "max pooling": lambda m, x: F.max_pool2d(F.relu(m.bn(m.conv(x))), 2),
    "average pooling": lambda m, x: F.avg_pool2d(m.conv(x), 2),
    "mean": lambda m, x: m.conv(x).mean((2, 3), keepdim=True),
    "pooled to one": lambda m, x: m.fc(F.adaptive_avg_pool2d(m.conv(x), 1).flatten(1)),
    "shortcut": lambda m, x: F.pad(m.conv(x)[:, :, ::2, ::2], (0, 0, 0, 0, 1, 1)),
    "padding": lambda m, x: F.pad(m.conv(x), (1, 0, 0, 1), value=0.5),
    "cat": lambda m, x: torch.cat([m.conv(x), m.conv2(x)], 1),
    "cat with float32": lambda m, x: torch.cat([m.conv(x), x, m.conv2(x)], 1),
    "parts": lambda m, x: (lambda a, b: torch.cat([F.silu(a), b], 1))(*m.conv(x).chunk(2, 1)),
    "numbers": lambda m, x: 1.5 - (m.conv(x) * 0.3 + 1) / 7,
    "sum": lambda m, x: m.conv(x) + m.conv2(x),
    "sum with float32": lambda m, x: (m.conv(x) + x) * m.conv2(x),
    "difference": lambda m, x: x - m.conv(x),
    "quotient": lambda m, x: m.conv(x) / (2 + x.square()),
    "gate": lambda m, x: (lambda y: y * torch.sigmoid(y.mean((2, 3), keepdim=True)))(m.conv(x)),
    "bias": lambda m, x: m.conv2(m.conv(x) + m.bias[:, None, None]),
    "bias of tokens": lambda m, x: m.fc(tokens(m, x) * m.bias),
    "number of a parameter": lambda m, x: m.conv(x) * m.scale,
    "layer norm": lambda m, x: m.fc(m.ln(tokens(m, x))),
    "layer norm of float32": lambda m, x: m.fc(m.ln(m.cast(tokens(m, x), F32))),
    "root mean square norm": lambda m, x: m.fc(m.rms(m.cast(tokens(m, x), F32))),
    "norm that is kept": lambda m, x: (lambda y: (y, m.fc(y)))(m.ln(m.cast(tokens(m, x), F32))),
    "channels last": lambda m, x: m.fc(m.ln(m.conv(x).permute(0, 2, 3, 1))).permute(0, 3, 1, 2),
    "transformer": _transformer,
    "float": lambda m, x: m.cast(m.conv(x), F32, "float") + 1,
    "and back": lambda m, x: m.cast(m.cast(m.conv(x), F32) * 2, BF16, "bfloat16"),
    "type of another": lambda m, x: m.conv(x).type_as(x) * x,
    "to another": lambda m, x: m.conv(x).to(x) * x,
    "opaque": lambda m, x: m.conv2(torch.softmax(m.bn(m.conv(x)), 1)),
    "autocast off": _off,
    "autocast off and on": _off_and_on,
    "in place": _in_place,
    "kept": _kept,
    "no gradient": lambda m, x: m.conv(x).detach() + m.conv2(x),
}
ACTIVATIONS: list[Callable[[Tensor], Tensor]] = [
    *(F.relu, F.silu, F.gelu, torch.sigmoid, torch.tanh, F.hardswish, F.hardsigmoid, F.hardtanh),
    *(F.relu6, F.leaky_relu, F.elu, F.selu, F.softplus),
    lambda y: F.gelu(y, approximate="tanh"),
]


def net(body: Body, engine: bool = True) -> nn.Module:
    torch.manual_seed(0)
    return rewire.sparsify(Net(body), 0.4, weights="fresh", engine=engine, keep_dense=["depthwise"])


def image() -> Tensor:
    return torch.randn((8, 4, 6, 6), generator=torch.Generator().manual_seed(1))


def step(model: nn.Module, x: Tensor, autocast: bool) -> dict[str, Any]:
    """Outputs, gradients and running statistics."""
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", BF16, enabled=autocast):
        outputs = leaves(model(x))
    found: dict[str, Any] = {f"output {i}": y.detach() for i, y in enumerate(outputs)}
    loss = torch.zeros((), dtype=torch.float64)
    for y in outputs:
        weights = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view(y.shape)
        loss = loss + (y.double() * weights).sum()
    loss.backward()
    found["input"] = x.grad
    found |= {f"gradient {name}": p.grad for name, p in model.named_parameters()}
    return found | {n: b.clone() for n, b in model.named_buffers() if b.is_floating_point()}


def as_its_twin(
    body: Body, *, training: bool = True, pure: bool = False, engine: bool = True
) -> None:
    """A step of a converted model beside one of its densified twin, and one of that in float64."""
    model, x = net(body, engine).train(training), image()
    if pure:
        model, x = model.to(BF16), x.to(BF16)
    twin = rewire.densify(copy.deepcopy(model))
    exact = copy.deepcopy(twin).double()
    ours = step(model, x, not pure)
    dense, truth = (
        dense_gradients(model, step(m, t, not pure)) for m, t in ((twin, x), (exact, x.double()))
    )
    grads = [g for name, g in truth.items() if name.startswith("gradient") and g is not None]
    size = max((float(g.norm()) for g in grads), default=0.0)
    for name, right in truth.items():
        if right is None:
            assert ours[name] is None, name
            continue
        gradient = name == "input" or name.startswith("gradient")
        room = (GRADIENTS, size) if gradient else (VALUES,)
        try:
            no_worse(ours[name], dense[name], right, *room)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_under_autocast(body: Body, training: bool) -> None:
    as_its_twin(body, training=training)


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_layer_by_layer(body: Body) -> None:
    as_its_twin(body, engine=False)


REFUSED = {"root mean square norm", "norm that is kept", "transformer", "autocast off"}  # by torch
PURE = {n: body for n, body in BODIES.items() if n not in REFUSED and "float32" not in n}


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("body", PURE.values(), ids=PURE)
def test_models_in_bfloat16(body: Body, training: bool) -> None:
    as_its_twin(body, training=training, pure=True)


@pytest.mark.parametrize("function", ACTIVATIONS)
def test_activations(function: Callable[[Tensor], Tensor]) -> None:
    as_its_twin(lambda m, x: m.conv2(function(m.bn(m.conv(x)))))
    as_its_twin(lambda m, x: function(m.conv(x)), training=False)


# What is recorded -----------------------------------------------------------------------------------


def explained(body: Body, dtype: torch.dtype = BF16) -> rewire.Explanation:
    with torch.autocast("cpu", dtype):
        return rewire.explain(net(body), image())


UNKNOWN = {"opaque", "no gradient", "quotient", "bias of tokens", "number of a parameter"}
KNOWN = {name: body for name, body in BODIES.items() if name not in UNKNOWN}


@pytest.mark.parametrize("body", KNOWN.values(), ids=KNOWN)
def test_it_is_one_region(body: Body) -> None:
    found = explained(body)
    assert found.stops == ()
    assert len(found.regions) == 1
    assert all(not layer.alone for layer in found.layers)


def test_explanations_show_types() -> None:
    found = explained(_transformer)
    (region,) = found.regions
    assert region.dtype == "bfloat16 and float32"
    norm = next(step for step in region.forward if step.name == "LayerNormForward")
    assert (norm.dtype, norm.fused) == ("bfloat16", ("cast",))
    assert {step.dtype for step in region.forward if step.op == "linear"} == {"bfloat16"}
    assert "bfloat16  panels" in str(found)
    assert "of bfloat16 and float32 in" in str(found)


def test_nothing_converts_between_layers() -> None:
    """In a transformer whose residual stream is float32, either."""
    for body in (_transformer, BODIES["units"], BODIES["residual"], BODIES["tokens"]):
        (region,) = explained(body).regions
        inside = [step for step in region.forward + region.backward if step.name == "Convert"]
        assert len(inside) == 1  # of the model's input
        assert not any(
            step.fused == ("cast",) for step in region.forward if step.name == "Pointwise"
        )


def test_autocast_to_float16_runs_layer_by_layer() -> None:
    found = explained(BODIES["units"], torch.float16)
    assert found.recorded == 0
    reasons = {layer.reason for layer in found.layers if layer.alone}
    assert reasons == {
        "autocast is to float16, and the engine records float32, bfloat16 and float64"
    }


def test_modes_are_those_of_the_call() -> None:
    """A model that is called again under another autocast is recorded again."""
    model = net(BODIES["units"])
    kinds = []
    for enabled in (True, False, True):
        with torch.autocast("cpu", BF16, enabled=enabled):
            y = model(image())
        kinds.append(y.dtype)
        y.float().sum().backward()
    assert kinds == [BF16, F32, BF16]


def test_values_that_c_plus_plus_code_holds() -> None:
    """Their gradients go through the shadow graph, under autocast or not."""

    class Triple(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return 3 * x

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Tensor:
            return 3 * dy

    def body(m: Any, x: Tensor) -> Tensor:
        y: Tensor = m.bn(m.conv(x))
        return m.conv2(Triple.apply(y) + y)  # type: ignore[no-any-return]

    as_its_twin(body)


def test_second_derivatives() -> None:
    """Of a loss under autocast, whose backward pass is inside of it."""
    model = net(BODIES["units"]).eval()
    twin = rewire.densify(copy.deepcopy(model))
    exact = copy.deepcopy(twin).double()

    def penalty(m: nn.Module, x: Tensor, autocast: bool) -> Tensor:
        x = x.clone().requires_grad_()
        with torch.autocast("cpu", BF16, enabled=autocast):
            (slope,) = torch.autograd.grad(m(x).double().square().sum(), x, create_graph=True)
            slope.square().sum().backward()
        assert x.grad is not None
        return x.grad

    ours, dense = (penalty(m, image(), True) for m in (model, twin))
    no_worse(ours, dense, penalty(exact, image().double(), False), GRADIENTS)


@pytest.mark.parametrize("way", ["autocast", "bfloat16"])
def test_gradients_that_are_handed_out_early(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where processes cooperate: the same bits in a chain of functions of autograd."""
    found = []
    for chained in (False, True):
        monkeypatch.setattr(links, "wanted", lambda on=chained: on)
        monkeypatch.setattr(plan, "SEGMENT_BYTES", 1)
        execute._plans.clear()
        model, x = net(BODIES["units"]), image()
        if way == "bfloat16":
            model, x = model.to(BF16), x.to(BF16)
        found.append(step(model, x, way == "autocast"))
        (planned,) = execute._plans.values()
        assert len(planned.segments) > 1
    for name, tensor in found[0].items():
        assert (tensor is None) == (found[1][name] is None)
        assert tensor is None or torch.equal(tensor, found[1][name]), name


@pytest.mark.parametrize("way", ["autocast", "bfloat16"])
def test_every_instruction_set(way: str, isa: str) -> None:
    for name in ("units", "residual", "transformer" if way == "autocast" else "tokens", "gate"):
        as_its_twin(BODIES[name], pure=way == "bfloat16")


NOT_FINITE = [
    "conv",
    "products with ReLU",
    "max pooling",
    "average pooling",
    "unit",
    "mean",
    "gate",
]


@pytest.mark.parametrize("name", [*NOT_FINITE, "linears with ReLU", "layer norm", "residual"])
def test_nan_and_infinity_stay_where_they_are(name: str, isa: str) -> None:
    """As in float32, forward and backward, of one sample each."""
    found = []
    for autocast in (False, True):
        model, x = net(BODIES[name]).eval(), image()
        x[1, 2, 3, 3], x[4, 0, 1, 2], x[6, 1, 5, 5] = torch.nan, torch.inf, -torch.inf
        found.append(step(model, x, autocast))
    single, half = found
    for key, right in single.items():
        if right is None:
            continue
        mine = half[key].float()
        assert torch.equal(mine.isnan(), right.isnan()), key
        assert torch.equal(mine.isinf(), right.isinf()), key
    assert not single["output 0"].isfinite().all()


@pytest.mark.usefixtures("no_panels")
@pytest.mark.parametrize("name", ["units", "residual", "layer norm of float32", "gate"])
def test_without_panels(name: str) -> None:
    as_its_twin(BODIES[name])


def test_dropout_drops_the_same_in_both_passes() -> None:
    model = net(lambda m, x: F.dropout(m.conv(x), 0.5))
    x = image().requires_grad_()
    with torch.autocast("cpu", BF16):
        y = model(x)
    assert y.dtype is BF16
    y.backward(torch.ones_like(y))
    assert 0.4 < float((y == 0).float().mean()) < 0.6
    kept = (y != 0).to(BF16) * 2
    with torch.autocast("cpu", BF16):
        (right,) = torch.autograd.grad(model.conv(x), x, kept)  # type: ignore[operator]
    assert x.grad is not None
    torch.testing.assert_close(x.grad, right, rtol=2e-2, atol=2e-2)


def test_autocast_is_that_of_the_recording() -> None:
    """Not that of a backward pass that computes everything again, through the dispatcher at that."""
    found = []
    for around in (False, True):
        model, x = net(_off).eval(), image().requires_grad_()
        with torch.autocast("cpu", BF16):
            _, y, _ = model(x)
        with torch.autocast("cpu", BF16, enabled=around), FlopCounterMode(display=False):
            (slope,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        found.append(slope.detach())
    assert torch.equal(*found)
