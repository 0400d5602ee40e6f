"""Recording: what becomes a node, what escapes, and that a region is its program."""

from __future__ import annotations

import copy
import dataclasses
import gc
import io
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

import rewire
from engine_models import (
    Block,
    Reverse,
    Triple,
    assert_same,
    close,
    converted,
    dense_gradients,
    image,
    leaves,
    loss_of,
    observe,
    plain_step,
    same,
)
from rewire.engine import execute, scope, use_engine
from rewire.engine.graph import Graph
from rewire.engine.lazy import LazyTensor
from rewire.engine.ops import EAGER
from rewire.models import build


class Recorded:
    """The graphs that are run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.graphs: list[Graph] = []
        run = execute.run

        def spy(key: Any, *rest: Any) -> Any:
            self.graphs.append(Graph.of(*key))
            return run(key, *rest)

        monkeypatch.setattr(execute, "run", spy)

    @property
    def ops(self) -> list[list[str]]:
        return [[node.op for node in graph.nodes] for graph in self.graphs]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    return Recorded(monkeypatch)


def ordinary(value: Any) -> bool:
    return all(type(t) is Tensor for t in leaves(value))


class Ops(nn.Module):
    """Every operation of the table."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.flat = nn.Linear(8 * 4 * 4, 6)
        self.norm1 = nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Any:
        y = F.relu(self.norm(self.conv(x)))
        y = F.pad(y[:, :, ::2, ::2], (0, 0, 0, 0, 2, 2)) + F.pad(
            F.max_pool2d(y, 2), (0, 0, 0, 0, 1, 3), value=2.0
        )
        z = F.adaptive_avg_pool2d(y, 2) + F.avg_pool2d(y, 3, 2, 1, count_include_pad=False)
        m = z.mean((2, 3), keepdim=True) + F.adaptive_avg_pool2d(z, 1)
        v = self.last(torch.relu(self.norm1(self.flat(torch.flatten(y, 1)))))
        return (
            v,
            m.view(-1, 8).reshape(2, -1),
            z.mean([-1, -2]),
            F.max_pool2d(y, 3, 1, 1).flatten(1),
        )


@pytest.mark.parametrize("training", [True, False])
def test_every_operation(training: bool, recorded: Recorded) -> None:
    model = converted(Ops()).train(training)
    same(model, image())
    recorded.graphs.clear()
    with torch.no_grad():
        model(image())
    assert len(recorded.graphs) == 1
    ops = {op for graph in recorded.ops for op in graph}
    assert ops == {
        *("conv2d", "linear", "batch_norm", "relu", "add", "max_pool2d", "avg_pool2d", "mean"),
        *("slice", "pad", "view"),
    }


def test_one_region_and_one_key(recorded: Recorded) -> None:
    model = converted(build("resnet20", width=0.25))
    x = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    for _ in range(3):
        assert ordinary(model(x))
    assert len(recorded.graphs) == 3
    assert len(set(recorded.graphs)) == 1
    (graph,) = set(recorded.graphs)
    assert len(graph.outputs) == 1
    assert len(graph.nodes) > 60


@pytest.mark.parametrize("name", ["resnet20", "vgg11", "mlp", "vit"])
def test_models(name: str, recorded: Recorded) -> None:
    arguments = {"mlp": {"in_features": 3 * 32 * 32}}.get(name, {})
    model = converted(build(name, width=0.25, **arguments))
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0  # the engine has noise of its own
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    same(model.eval(), x)
    # Attention divides a transformer; layers by themselves have no graphs.
    assert len(recorded.graphs) == (10 if name == "vit" else 2)
    same(model.train(), x)


# What escapes


@dataclasses.dataclass
class Output:
    logits: Tensor
    hidden: tuple[Tensor, ...]
    extra: dict[str, Any]


class Escapes(Block):
    """Gives what it computes to everybody."""

    def forward(self, x: Tensor) -> Any:
        self.list: list[Tensor] = []
        y = self.a(x)
        self.list.append(y)
        z = torch.relu(self.n(y))
        self.attribute = z
        w = self.m(self.b(z)) + z
        self.closure = lambda: w
        v = self.c(torch.relu(w))
        self.ids = [id(t) for t in (y, z, w, v)]
        return Output(v, (y, z), {"w": [w]})


def test_what_is_kept_is_ordinary_and_the_same_object() -> None:
    model = converted(Escapes())
    out = model(image())
    y, z, w, v = model.list[0], model.attribute, model.closure(), out.logits
    assert ordinary([y, z, w, v])
    assert [id(t) for t in (y, z, w, v)] == model.ids
    assert out.hidden[0] is y
    assert out.hidden[1] is z
    assert out.extra["w"][0] is w
    assert all(t.requires_grad and t.grad_fn is not None for t in (y, z, w, v))
    assert all(t.is_contiguous() for t in (y, z, w, v))


def test_gradients_of_what_is_kept() -> None:
    def step(model: nn.Module, x: Tensor) -> Any:
        out = model(x)
        kept = [model.list[0], model.attribute, model.closure()]
        for tensor in kept:
            tensor.retain_grad()
        seen: list[Tensor] = []
        kept[1].register_hook(lambda g: seen.append(g) or g * 3)
        loss_of([out.logits, model.closure()]).backward()
        return [out.logits, *kept, *(t.grad for t in kept), *seen]

    model = converted(Escapes())
    model.list, model.attribute, model.closure = [], None, None
    same(model, image(), step)


def test_autograd_grad_of_intermediates() -> None:
    def step(model: nn.Module, x: Tensor) -> Any:
        out = model(x)
        first, second = model.list[0], model.attribute
        a = torch.autograd.grad(out.logits.sum(), [second, first], retain_graph=True)
        b = torch.autograd.grad((second**2).sum(), first, retain_graph=True)
        out.logits.mean().backward(retain_graph=True)
        loss_of(out.logits).backward()
        return [*a, *b]

    model = converted(Escapes())
    model.list, model.attribute, model.closure = [], None, None
    same(model, image(), step)


def test_intermediates_inside_the_model() -> None:
    def use(m: Any, x: Tensor) -> Any:
        y = m.c(x)
        x.retain_grad()
        (g,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        return y * g.mean()

    same(converted(Block(use)), image())


def test_what_nobody_keeps_does_not_escape(recorded: Recorded) -> None:
    class Forgetful(Block):
        def forward(self, x: Tensor) -> Any:
            y = torch.relu(self.n(self.a(x)))
            z = y + x
            del y
            z = self.c(z)
            return torch.sin(z)

    model = converted(nn.Sequential(Forgetful()))
    model(image())
    assert [(len(graph.nodes), graph.outputs) for graph in recorded.graphs] == [(5, (4,))]


def test_what_is_kept_and_read_again_is_a_cut(recorded: Recorded) -> None:
    """Else hooks on it would not see the gradient of what reads it."""
    model = converted(Escapes())
    model(image())
    # A convolution by itself, and a batch norm and a ReLU, need no plan.
    assert recorded.ops == [["conv2d", "batch_norm", "add"], _LAST]
    recorded.graphs.clear()
    with torch.no_grad():
        converted(Escapes())(image())
    assert [graph.outputs for graph in recorded.graphs] == [(0, 2, 5, 7)]


_LAST = ["relu", "conv2d"]


def test_nothing_else_gets_a_gradient() -> None:
    """Not even an undefined one: autograd would call hooks with None, and functions with zeros."""

    def use(m: Any, x: Tensor) -> Any:
        y = F.silu(x)
        y.register_hook(lambda g: called.append("y"))
        z = Triple.apply(x)
        m.b(z)
        m.unused = m.m(m.b(y))
        return m.c(z)

    called: list[str] = []
    for on in (True, False):
        called.clear()
        model = converted(Block(use), engine=on)
        for name in ("a.values", "b.values", "c.values", "m.weight"):
            parameter = model.get_parameter(name)
            parameter.register_hook(lambda g, name=name: called.append(name))
            parameter.register_post_accumulate_grad_hook(
                lambda p, name=name: called.append(f"+{name}")
            )
        model(image()).sum().backward(retain_graph=True)
        # Those before the sum; not the second call of b.
        names = {"a.values", "b.values", "c.values", "m.weight"}
        assert sorted(called) == sorted([*names, *(f"+{name}" for name in names)])
        called.clear()
        model.c(model.unused).sum().backward()
        assert "y" in called


def test_weak_references_of_the_user() -> None:
    refs: list[Any] = []

    def use(m: Any, x: Tensor) -> Any:
        refs.append(weakref.ref(x))
        y = m.c(x)
        refs.append(weakref.ref(y))
        return y

    model = converted(Block(use))
    y = model(image())
    gc.collect()
    assert refs[0]() is None
    assert refs[1]() is y
    assert type(y) is Tensor


def test_attributes_of_the_user() -> None:
    def use(m: Any, x: Tensor) -> Any:
        x.mark = "mine"
        return m.c(x), x

    _, x = converted(Block(use))(image())
    assert x.__dict__ == {"mark": "mine"}


def test_generators() -> None:
    class Lazily(Block):
        def forward(self, x: Tensor) -> Iterator[Tensor]:
            y = self.a(x)
            yield y
            yield self.c(torch.relu(self.n(y)))

    model = converted(Lazily())
    same(model, image(), lambda m, x: _backward(list(m(x))))


def _backward(outputs: Any) -> Any:
    loss_of(outputs).backward()
    return outputs


def test_metadata_does_not_run_anything(recorded: Recorded) -> None:
    def use(m: Any, x: Tensor) -> Any:
        assert type(x) is LazyTensor
        assert x.shape == (4, 3, 8, 8) == x.size()
        assert (x.dtype, x.device.type, x.dim(), x.ndim) == (torch.float64, "cpu", 4, 4)
        assert (x.numel(), len(x), x.requires_grad, x.is_leaf) == (768, 4, True, False)
        assert (x.stride(), x.is_contiguous(), x.size(1)) == ((192, 64, 8, 1), True, 3)
        assert (x.is_floating_point(), x.is_cuda, x.layout) == (True, False, torch.strided)
        assert x[:, :, ::2, ::3].stride() == (192, 64, 16, 3)
        assert x[:, :, ::2, ::3].shape == (4, 3, 4, 3)
        assert recorded.graphs == []
        return m.c(x)

    converted(Block(use))(image())
    assert len(recorded.graphs) == 1


# Changes in place, views


IN_PLACE: dict[str, Callable[[Any, Tensor], Any]] = {
    "relu_": lambda m, x: m.c(x.relu_()) + x.mean(),
    "read before": lambda m, x: _read_before(m, x),
    "add to a layer": lambda m, x: m.c(_iadd(m.b(x), x)) + x.mean(),
    "add itself": lambda m, x: m.c(_iadd(x, x)),
    "add a number": lambda m, x: m.c(_iadd(x, 2.0)),
    "alpha": lambda m, x: m.c(torch.add(x, m.b(x), alpha=2).add_(m.b(x))),
    "view then base": lambda m, x: _view_then_base(m, x),
    "base then view": lambda m, x: _base_then_view(m, x),
    "slice then base": lambda m, x: _slice_then_base(m, x),
    "write a slice": lambda m, x: _write_slice(m, x),
    "view escapes": lambda m, x: (m.c(x), x.view(4, -1), x.view(4, -1).view(-1)),
    "view read again": lambda m, x: _view_read_again(m, x),
    "ordinary += lazy": lambda m, x: _iadd(torch.ones_like(x, requires_grad=False), m.b(x)),
    "contiguous": lambda m, x: (m.c(x.contiguous()), x.contiguous() is x),
    "keywords": lambda m, x: (x.view(size=(4, -1)), x.reshape(shape=(4, -1))),
    "flatten of a slice": lambda m, x: x[:, :, ::2, ::2].flatten(1),
    "slice of a slice": lambda m, x: m.c(x[:, :, ::2, ::2][:, :, ::2, ::2]),
    "unknown indices": lambda m, x: m.c(x[1:, :, :, ::2])[0],
}


def _iadd(x: Any, y: Any) -> Any:
    before = id(x)
    x += y
    assert id(x) == before
    return x


def _read_before(m: Any, x: Tensor) -> Any:
    y = F.relu(x)  # saves its output, not its input
    x += y
    z = x.mean((2, 3))
    x.add_(m.b(y))
    F.relu(x, inplace=True)
    return x, z, y


def _view_then_base(m: Any, x: Tensor) -> Any:
    y = m.b(x)
    v = y.view(4, -1)
    y += x
    return v.exp().mean() + m.c(y)


def _base_then_view(m: Any, x: Tensor) -> Any:
    y = m.b(x).contiguous()
    v = y.view(4, 3, 64)
    v.mul_(2)
    w = y.view(-1)
    w.relu_()
    return m.c(y), v


def _slice_then_base(m: Any, x: Tensor) -> Any:
    y = m.b(x)
    v = y[:, :, ::2, ::2]
    y.relu_()
    return m.c(v), v, v._base is y


def _write_slice(m: Any, x: Tensor) -> Any:
    y = m.b(x)
    v = y[:, :, ::2, ::2]
    v += 1
    y[0] = 0
    return m.c(y)


def _view_read_again(m: Any, x: Tensor) -> Any:
    y = m.b(x)
    v = y[:, :, ::2, ::2]
    z = m.c(v)
    return v, z, torch.autograd.grad(z.sum(), v, retain_graph=True)[0]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place_and_views(name: str, training: bool) -> None:
    same(converted(Block(IN_PLACE[name])).train(training), image())


def _input(m: Any, x: Tensor) -> Any:
    given = torch.ones_like(x, requires_grad=False)
    y = m.c(given)
    given.add_(1)
    return y


def _values(m: Any, x: Tensor) -> Any:
    y = m.c(x)
    with torch.no_grad():
        m.c.values.mul_(2)
    return y


def _data(m: Any, x: Tensor) -> Any:
    y = m.c(x)
    m.c.bias.data = m.c.bias.data.clone()
    return y


def _weight(m: Any, x: Tensor) -> Any:
    y = m.n(m.b(x))
    with torch.no_grad():
        m.n.weight[0] = 5.0
    return y


def _operand(m: Any, x: Tensor) -> Any:
    given = torch.ones_like(x, requires_grad=False)
    y = m.b(x) + given
    torch.zeros(given.shape, dtype=torch.float64, out=given)
    return y


def _converted(m: Any, x: Tensor) -> Any:
    y = m.c(x)
    m.float()
    return y


CHANGED: dict[str, tuple[Callable[[Any, Tensor], Any], str, str, str]] = {
    "input": (_input, "conv2d", "input", "(4, 3, 8, 8)"),
    "values": (_values, "conv2d", "values", "({connections}, 1)"),
    "data": (_data, "conv2d", "bias", "(4,)"),
    "weight": (_weight, "batch_norm", "weight", "(3,)"),
    "operand": (_operand, "add", "second operand", "(4, 3, 8, 8)"),
    "converted": (_converted, "conv2d", "values", "({connections}, 1)"),
}


@pytest.mark.parametrize("mode", ["training", "evaluating", "no_grad", "inference_mode"])
@pytest.mark.parametrize("name", CHANGED)
def test_changing_what_a_layer_reads(name: str, mode: str) -> None:
    """It cannot be right, as nothing tells the engine in time, but it is loud."""
    use, op, operand, shape = CHANGED[name]
    model = converted(Block(use)).train(mode == "training")
    context = getattr(torch, mode)() if mode in ("no_grad", "inference_mode") else nullcontext()
    shape = shape.format(connections=len(model.a.values))
    if name == "values":
        shape = f"({len(model.c.values)}, 1)"
    message = (
        f"the {operand} of a {op}, a tensor of shape {shape}, was changed in place after the {op} was "
        "called and before it was computed: inside a converted model layers are computed when somebody "
        "wants numbers, or when the model returns. Look in the model's forward, after that call, for what "
        "changes this tensor (x += y, x.add_(y), x[0] = y, out=x, x.data = y, x.detach_(), "
        ".to(dtype) of a module) and "
        "change a copy instead, or let layers run one by one with rewire.use_engine(model, False)"
    )
    with context:
        if mode == "inference_mode" and name in ("input", "operand"):
            # What is made in this mode has no version: it is copied, so this is right.
            y = model(image())
            use_engine(model, False)
            close(y, model(image()))
            return
        for _ in range(2):
            with pytest.raises(RuntimeError) as caught:
                model.double()(image())
            assert str(caught.value) == message
            assert all(type(b) is Tensor for b in model.buffers())
        use_engine(model, False)
        model.double()(image())


def test_changing_a_parameter_before_backward_raises() -> None:
    model = converted(Block(lambda m, x: m.c(x)))
    y = model(image())
    with torch.no_grad():
        model.b.values.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_backward_twice() -> None:
    model = converted(Block(lambda m, x: m.c(x)))
    y = model(image())
    y.sum().backward(retain_graph=True)
    first = model.a.values.grad.clone()
    y.sum().backward()
    close(model.a.values.grad, 2 * first)
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()


def test_steps_before_backward() -> None:
    """Two forward passes, then their backward passes: running statistics have changed by then."""

    def step(model: nn.Module, x: Tensor) -> Any:
        a, b = model(x), model(2 * x)
        loss_of(a).backward()
        loss_of(b).backward()
        return a, b

    same(converted(Block(lambda m, x: m.c(x))), image(), step)


# Modules: shared, nested, interleaved


def test_shared_batch_norm() -> None:
    same(converted(Block(lambda m, x: m.c(m.n(m.b(m.n(x)))))), image())


def test_shared_batch_norm_of_an_ordinary_input() -> None:
    """Torch computes it at once, after what was recorded."""
    same(converted(Block(lambda m, x: m.c(m.n(m.b(F.silu(x))) + m.n(F.silu(x.detach()))))), image())
    same(converted(Block(lambda m, x: (m.n(m.n(m.b(x))), m.n(torch.ones_like(x))))), image())


def test_shared_statistics_of_functions() -> None:
    class Functional(Block):
        def forward(self, x: Tensor) -> Any:
            mean, variance = self.n.running_mean, self.n.running_var
            y = F.batch_norm(self.a(x), mean, variance, training=True)
            z = F.batch_norm(self.b(x), mean, variance, training=True, momentum=0.5)
            return y, z, self.c(z) + F.batch_norm(self.c(z)[:, :3], mean, variance).mean()

    same(converted(Functional()), image())


def test_batch_norm_in_both_modes() -> None:
    def use(m: Any, x: Tensor) -> Any:
        a = m.n(m.b(x))
        b = m.n.eval()(m.b(x))
        m.n.train()
        return m.c(m.n(a + b))

    same(converted(Block(use)), image())


def test_cumulative_and_untracked_batch_norm() -> None:
    block = Block(lambda m, x: m.c(x))
    block.n.momentum = None
    block.m = nn.BatchNorm2d(3, track_running_stats=False, affine=False)
    model = converted(block)
    same(model, image())
    same(model.eval(), image())


def test_unused_output_updates_statistics() -> None:
    def use(m: Any, x: Tensor) -> Any:
        m.n(m.b(x))
        return torch.ones(2, dtype=torch.float64)

    same(converted(Block(use)), image())


def test_same_layer_twice_and_recursion() -> None:
    class Twice(Block):
        def forward(self, x: Tensor, depth: int = 2) -> Any:
            y = self.n(self.b(F.relu(x)))
            return self(y, depth - 1) + x if depth else y

    same(converted(Twice()), image())


def test_nested_converted_models() -> None:
    inner = converted(Block(lambda m, x: x))
    outer = converted(nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1)))
    outer.insert(1, inner)
    same(outer, image())


def test_models_that_call_each_other() -> None:
    a = converted(Block(lambda m, x: m.c(x)))
    b = converted(Block(lambda m, x: m.c(x)))
    pair = nn.ModuleList([a, b])
    pair.forward = lambda x: a(x).mean() * b(x) + b(a(x)[:, :3])
    found = []
    for on in (True, False):
        use_engine(pair, on)
        pair.zero_grad()
        y = pair(image())
        loss_of(y).backward()
        found.append([y, *(p.grad.clone() for p in pair.parameters())])
    for one, two in zip(*found, strict=True):
        close(one, two)


def test_teacher_without_gradients() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student = Block(lambda m, x: m.c(x))
            self.teacher = Block(lambda m, x: m.c(x))

        def forward(self, x: Tensor) -> Any:
            y = self.student.n(self.student.a(x))
            with torch.no_grad():
                t = self.teacher(x)
                s = self.student(2 * x)  # the same batch norms, in order
            return y, t, s, self.student(x)

    same(converted(Pair()), image())


# Modes


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("training", [True, False])
def test_modes_around_the_model(mode: Any, training: bool) -> None:
    def step(model: nn.Module, x: Tensor) -> Any:
        with mode():
            y = model(x)
        assert type(y) is Tensor
        assert not y.requires_grad
        assert y.is_inference() is (mode is torch.inference_mode)
        return y

    same(converted(Block(lambda m, x: m.c(x))).train(training), image(), step)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_modes_inside_the_model(mode: Any) -> None:
    def use(m: Any, x: Tensor) -> Any:
        y = m.b(x)
        with mode():
            z = m.m(m.b(y)).relu()
            mean = z.mean((2, 3))
        return (
            m.c(y)
            + float(mean.detach().sum())
            + (0 if mode is torch.inference_mode else mean.mean())
        )

    same(converted(Block(use)), image())


def test_detach_and_frozen_parameters() -> None:
    def use(m: Any, x: Tensor) -> Any:
        return m.c(x.detach()) + m.c(x)

    model = converted(Block(use))
    model.b.values.requires_grad_(False)
    model.n.requires_grad_(False)
    same(model, image())
    model.requires_grad_(False)
    same(model, image())
    same(model, image(), grad=False)


def test_no_gradient_at_all() -> None:
    model = converted(Block(lambda m, x: (m.c(x), x))).requires_grad_(False)
    y, x = model(image())
    assert ordinary([y, x])
    assert not y.requires_grad
    assert not x.requires_grad


def test_autocast() -> None:
    class Mixed(Block):
        def __init__(self) -> None:
            super().__init__(lambda m, x: x)
            self.d = nn.Conv2d(3, 3, 1)

        def forward(self, x: Tensor) -> Any:
            y = self.n(self.a(x))
            with torch.autocast("cpu", dtype=torch.bfloat16):
                z = F.relu(self.m(self.b(y))) + y
                w = F.linear(z.mean((2, 3)), torch.ones(2, 3))
            return self.c(z), w.dtype, w.double()

    torch.manual_seed(0)
    model = rewire.sparsify(Mixed(), 0.5, keep_dense="d")
    x = image().float()
    found = []
    for on in (True, False):
        use_engine(model, on)
        model.zero_grad()
        y, dtype, w = model(x)
        y.sum().backward()
        found.append((y.detach(), w, *(p.grad for p in model.a.parameters())))
        assert dtype is torch.bfloat16
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=5e-2, atol=5e-2)  # of a middle part in bfloat16


def test_watchers_see_ordinary_tensors() -> None:
    seen: list[type] = []
    model = converted(Block(lambda m, x: seen.append(type(x)) or m.c(x)))
    with FlopCounterMode(display=False):
        model(image())
    with torch.overrides.BaseTorchFunctionMode():
        model(image())
    with torch.autograd.graph.save_on_cpu():
        model(image())
    handle = nn.modules.module.register_module_forward_hook(lambda *a: None)
    model(image())
    handle.remove()
    assert seen == [Tensor] * 4
    model(image())
    assert seen.pop() is LazyTensor


def test_saved_tensor_hooks_inside() -> None:
    count = {"n": 0}

    def pack(t: Tensor) -> Tensor:
        count["n"] += 1
        return t

    def use(m: Any, x: Tensor) -> Any:
        y = m.b(x)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            z = y * y  # runs the region, which is not theirs
        return m.c(z)

    same(converted(Block(use)), image())
    assert count["n"] == 2 * 3 * 2


def test_forward_mode_inside() -> None:
    def use(m: Any, x: Tensor) -> Any:
        with forward_ad.dual_level():
            ones = torch.ones(4, 3, 8, 8).double()
            return forward_ad.unpack_dual(m.c(forward_ad.make_dual(ones, ones))).tangent

    same(converted(Block(use)), image())


def test_flops_inside() -> None:
    def use(m: Any, x: Tensor) -> Any:
        with FlopCounterMode(display=False):
            y = m.b(x)
        return m.c(y)

    same(converted(Block(use)), image())


# Errors


def test_shape_errors_are_those_of_the_layers() -> None:
    def wrong(m: Any, x: Tensor) -> Any:
        try:
            return m.c(F.pad(x, (0, 0, 0, 0, 1, 0)))
        except ValueError as error:
            m.message = str(error)
            raise

    model = converted(Block(wrong))
    for on in (True, False):
        use_engine(model, on)
        model.message = ""
        with pytest.raises(
            ValueError, match=r"expected an input of \(N, 3, H, W\), got \(4, 4, 8, 8\)"
        ):
            model(image())
        assert model.message


WRONG: dict[str, Callable[[Any, Tensor], Any]] = {
    "add": lambda m, x: x + torch.ones(7, dtype=torch.float64),
    "view": lambda m, x: x.view(5, -1),
    "pool": lambda m, x: F.max_pool2d(x, 20),
    "norm": lambda m, x: nn.BatchNorm2d(7).double()(x),
    "norm of vectors": lambda m, x: nn.BatchNorm1d(3).double()(x),
    "one value": lambda m, x: m.n(m.b(x[:1, :, :1, :1])),
    "small": lambda m, x: nn.Conv2d(3, 3, 20)(x.float()),
    "dropout": lambda m, x: F.dropout(x, 2.0),
    "argument": lambda m, x: F.relu(x, nonsense=1),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_are_torchs_own(name: str) -> None:
    errors = []
    for on in (True, False):
        with pytest.raises(Exception) as caught:  # noqa: PT011
            converted(Block(WRONG[name]), engine=on)(image())
        errors.append(caught.value)
    assert type(errors[0]) is type(errors[1])
    if name != "argument":
        assert str(errors[0]) == str(errors[1])


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_exceptions_in_the_middle(error: type[BaseException]) -> None:
    kept: list[Tensor] = []

    def use(m: Any, x: Tensor) -> Any:
        y = m.c(x)
        kept.append(y)
        if m.fail:
            raise error("now")
        return y

    block = Block(use)
    block.fail = False
    model = converted(nn.Sequential(block)).eval()
    expected = model(image()).detach()
    block.fail = True
    kept.clear()
    with pytest.raises(error, match="now"):
        model(image())
    block.fail = False
    assert type(kept[0]) is LazyTensor  # until it is used
    y = model(image())  # another call comes first
    assert type(y) is Tensor
    close(y, expected)
    close(kept[0] + 0, expected)
    assert type(kept[0]) is Tensor
    kept[0].sum().backward()
    assert model[0].a.values.grad is not None
    assert scope._local.scope is None


def test_exception_that_the_model_catches() -> None:
    class Careful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Block(lambda m, x: 1 / 0)
            self.other = Block(lambda m, x: m.c(x))

        def forward(self, x: Tensor) -> Any:
            y = self.other.a(x)
            try:
                self.inner(x)
            except ZeroDivisionError:
                return self.other(y)

    same(converted(Careful()).eval(), image())


def test_called_while_an_exception_is_handled() -> None:
    model = converted(Block(lambda m, x: m.c(x)))
    try:
        raise ValueError
    except ValueError:
        y = model(image())
    assert type(y) is Tensor


# Copies, threads


def test_copies_and_files() -> None:
    model = converted(Block(_use_c))
    x = image()
    plain = copy.deepcopy(model)
    use_engine(plain, False)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        same(other, x)
        model(x)
        use_engine(other, False)
        assert not other._forward_hooks
        assert not other._forward_pre_hooks
    assert model._forward_hooks


def _use_c(m: Any, x: Tensor) -> Any:
    return m.c(x)


def test_switching_twice_is_once() -> None:
    model = converted(Block(_use_c))
    use_engine(model, True)
    assert len(model._forward_hooks) == len(model._forward_pre_hooks) == 1
    assert not model.a._forward_hooks


def test_threads_on_one_model() -> None:
    model = converted(nn.Sequential(Block(_sum), Block(_use_c))).eval()
    inputs = [image(seed=i) for i in range(4)]
    expected = [model(x).detach() for x in inputs]
    grads = []
    for x in inputs:
        grads.append(torch.autograd.grad(model(x).sum(), model[0].a.values)[0])
    found: dict[int, Any] = {}

    def work(i: int) -> None:
        for _ in range(10):
            y = model(inputs[i])
            found[i] = y.detach(), torch.autograd.grad(y.sum(), model[0].a.values)[0]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(4):
        close(found[i][0], expected[i])
        close(found[i][1], grads[i])


def _sum(m: Any, x: Tensor) -> Any:
    return Reverse.apply(F.silu(x)) + x


def test_lazy_tensors_on_another_thread() -> None:
    def use(m: Any, x: Tensor) -> Any:
        found: list[Tensor] = []
        thread = threading.Thread(target=lambda: found.append(m.c(x)))
        thread.start()
        thread.join()
        return found[0] + m.c(x)

    same(converted(Block(use)), image())


def test_backward_on_another_thread() -> None:
    def step(model: nn.Module, x: Tensor) -> Any:
        y = model(x)
        thread = threading.Thread(target=lambda: loss_of(y).backward())
        thread.start()
        thread.join()
        return y

    same(converted(Block(_use_c)), image(), step)


def test_nothing_is_kept_alive() -> None:
    model = converted(Block(lambda m, x: Reverse.apply(m.c(x))))
    gc.collect()
    before = sum(type(o) is LazyTensor for o in gc.get_objects())
    gc.disable()
    try:
        x = image()
        ref = weakref.ref(x)
        plain_step(model, x)
        model.zero_grad()
        del x
        assert ref() is None  # by reference counts alone
        assert sum(type(o) is LazyTensor for o in gc.get_objects()) == before
    finally:
        gc.enable()


def test_probes_see_layers() -> None:
    model = converted(Block(_use_c))
    found: dict[bool, list[Tensor]] = {True: [], False: []}
    for on in (True, False):
        use_engine(model, on)
        model.b.probe = lambda conv, x, dy, on=on: found[on].extend((x.clone(), dy.clone()))
        plain_step(model, image())
    assert len(found[True]) == 2
    for a, b in zip(found[True], found[False], strict=True):
        close(a, b)


def test_dropout_is_one_mask() -> None:
    """The same noise in the forward and the backward pass, and in the shadow graph."""

    def use(m: Any, x: Tensor) -> Any:
        y = F.dropout(x, 0.5)
        z = F.dropout(x, 0.5, inplace=True)
        return x, y, Triple.apply(y), z

    model = converted(Block(use))
    x, y, w, z = model(image())
    assert z is x
    assert not torch.equal(y, z)
    close(torch.autograd.grad((y * y).sum(), y, retain_graph=True)[0], 2 * y.detach())
    source = torch.autograd.grad(y.sum() + w.sum(), model.m.bias)[0]
    kept = (y != 0).to(y.dtype)
    close(source, (kept * 2 * 4).sum((0, 2, 3)))


def test_double_backward() -> None:
    """Through the region and the shadow graph."""

    def step(model: nn.Module, x: Tensor) -> Any:
        y, z = model(x)
        (g,) = torch.autograd.grad(loss_of([y, z]), x, create_graph=True)
        (g**2).sum().backward()
        return y, z, g.detach()

    def use(m: Any, x: Tensor) -> Any:
        v = F.avg_pool2d(F.relu(x), 2)
        return Triple.apply(v) + v, m.c(v)

    model = converted(Block(use))
    x = image().requires_grad_()
    use_engine(model, False)
    try:
        step(model, x)
    except RuntimeError as error:
        assert "once_differentiable" in str(error)  # noqa: PT017
        pytest.skip("sparse products cannot be differentiated twice yet")
    use_engine(model, True)
    model.zero_grad()
    same(model, image(), step)


def _twice_differentiable(a: Any, data: Any, x: Tensor, values: Tensor, bias: Any) -> Tensor:
    topology, (kh, kw), channels = data.topologies[a.topology], a.kernel, x.shape[1]
    counts = topology.indptr.diff().long()
    rows = torch.repeat_interleave(torch.arange(len(counts)), counts)
    flat = torch.zeros(len(counts), channels * kh * kw, dtype=x.dtype)
    flat = flat.index_put((rows, topology.indices.long()), values.view(-1))
    weight = flat.view(-1, kh, kw, channels).permute(0, 3, 1, 2)
    return F.conv2d(x, weight, bias, a.stride, a.padding, a.dilation)


def test_double_backward_of_the_dense_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    """With products that can be differentiated twice: with respect to the input and an intermediate, by way
    of the region and of the shadow graph."""
    monkeypatch.setitem(EAGER, "conv2d", _twice_differentiable)

    def use(m: Any, x: Tensor) -> Any:
        v = F.avg_pool2d(F.relu(x), 2)
        return Triple.apply(v) + v, m.c(v), x

    def step(model: nn.Module, x: Tensor) -> Any:
        y, z, inside = model(x)
        g, h = torch.autograd.grad(loss_of([y, z]), [x, inside], create_graph=True)
        ((g**2).sum() + (h**3).sum()).backward()
        return y, z, g.detach(), h.detach()

    model = converted(Block(use))
    dense = rewire.densify(copy.deepcopy(model))
    result = observe(model, image(), step)
    twin = dense_gradients(model, observe(dense, image(), step))
    assert_same({name: value for name, value in result.items() if name in twin}, twin)


@pytest.mark.parametrize("on", [True, False])
def test_sparsify_turns_the_engine_on(on: bool, recorded: Recorded) -> None:
    model = rewire.sparsify(build("resnet20", width=0.25).double(), sparsity=0.5, engine=on)
    twin = rewire.densify(copy.deepcopy(model))
    x = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    close(model(x), twin(x))
    assert len(recorded.graphs) == (1 if on else 0)


@pytest.mark.parametrize("used", [False, True])
def test_a_region_that_fails_lets_go_of_what_it_has_read(used: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Conv2d(3, 3, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = x * 1
            read.append(weakref.ref(x))
            y = F.relu(self.a(x))
            x += 1
            return y.sum() if used else y

    read: list[Any] = []
    model = converted(Model())
    with pytest.raises(RuntimeError, match="was changed in place"):
        model(image())
    gc.collect()
    assert read[0]() is None
