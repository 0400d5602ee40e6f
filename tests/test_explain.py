"""``rewire.explain``: what is recorded, where the engine stops, at which line and why; nothing changes."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import rewire
from engine_models import Block, Reverse, Untouched, converted, image
from rewire import Explanation
from rewire.engine import execute, observe, private, use_engine
from rewire.models import build
from rewire.ops import native

pytestmark = pytest.mark.skipif(not native.available(), reason="needs the compiled kernels")

_SOURCE = Path(__file__).read_text().splitlines()


def line(mark: str) -> int:
    """Number of the line of this file that ends in ``# mark``."""
    (found,) = [n for n, text in enumerate(_SOURCE, 1) if text.endswith(f"  # {mark}")]
    return found


def explained(use: Callable[[Any, Tensor], Any], x: Tensor | None = None) -> Explanation:
    return rewire.explain(converted(Block(use)), image() if x is None else x)


def reasons(found: Explanation) -> list[str]:
    return [stop.reason for stop in found.stops]


def assert_stop(found: Explanation, reason: str, mark: str, module: str = "") -> None:
    """There is one stop, of this reason, at this line."""
    (stop,) = found.stops
    assert stop.reason == reason
    assert (stop.place.file, stop.place.line) == (__file__, line(mark))
    assert stop.place.module == module


def assert_alone(found: Explanation, reasons: dict[str, tuple[str, str]]) -> None:
    """Just these layers ran by themselves: by name, why, and where."""
    alone = {layer.name: layer for layer in found.layers if layer.reason}
    assert {name: layer.reason for name, layer in alone.items()} == {
        name: reason for name, (reason, _) in reasons.items()
    }
    for name, (_, mark) in reasons.items():
        place = alone[name].place
        assert (place.file, place.line, place.module) == (__file__, line(mark), name)


# What is recorded


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ["resnet20", "vgg11"])
def test_whole_models_are_one_region(name: str, training: bool) -> None:
    model = converted(build(name, width=0.25)).train(training)
    found = rewire.explain(model, torch.randn(2, 3, 32, 32, dtype=torch.float64))
    assert len(found.regions) == 1
    assert found.stops == ()
    assert found.recorded == len(found.layers) == sum(map(is_sparse, model.modules())) > 8
    assert found.training is training
    (region,) = found.regions
    assert region.end == "the model returned"
    assert len(region.outputs) == region.functions == 1
    assert region.arena == found.arena > 0
    assert f"{len(found.layers)} of {len(found.layers)} sparse layers recorded, 1 region" in str(
        found
    )


def is_sparse(module: nn.Module) -> bool:
    return isinstance(module, rewire.SparseLayer)


def test_steps_say_what_they_are() -> None:
    found = explained(lambda m, x: m.c(x))
    (region,) = found.regions
    assert region.nodes == 7
    assert region.dtype == "float64"
    products = [step for step in region.forward if step.op == "conv2d" and "Conv" in step.name]
    assert [(s.module, s.name, s.fused) for s in products] == [
        ("a", "ConvForward", ("moments",)),
        ("b", "ConvForward", ("moments",)),
        ("c", "ConvForward", ()),
    ]
    step = products[0]
    assert (step.shape, step.layout, step.dtype) == ((4, 3, 8, 8), "batch-last", "float64")
    assert step.bytes == 8 * (4 * 3 * 8 * 8 + 2 * 3)  # with mean and variance
    assert step.place.kind == "SparseConv2d"
    norms = [(s.module, s.fused) for s in region.forward if s.name == "NormForward"]
    assert norms == [("n", ("ReLU",)), ("m", ("residual",))]
    first = region.forward[0]
    assert (first.name, first.op, first.module) == ("Relayout", "input", "")
    assert [s.module for s in region.backward if s.name == "ConvBackward"] == ["c", "b"]
    assert [s.module for s in region.backward if s.name == "WeightGradient"] == ["a"]


def test_without_gradients() -> None:
    with torch.no_grad():
        found = explained(lambda m, x: m.c(x))
    assert not found.grad
    assert found.regions[0].backward == ()
    assert "gradients off" in repr(found)


def test_modules_that_are_shared_nested_and_called_by_their_forward() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Block(lambda m, x: x)
            self.again = self.inner.b
            self.first = nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU())

        def forward(self, x: Tensor) -> Tensor:
            return self.inner.c.forward(self.again(self.inner(self.first(x))))

    found = rewire.explain(converted(Nested()), image())
    assert [(layer.name, layer.recorded) for layer in found.layers] == [
        ("inner.a", 1),
        ("inner.b", 2),
        ("inner.c", 1),
        ("first.0", 1),
    ]
    (region,) = found.regions
    assert [step.module for step in region.forward if step.name == "ConvForward"] == [
        *("first.0", "inner.a", "inner.b", "inner.b", "inner.c")
    ]


def test_operations_belong_to_the_module_that_calls_them() -> None:
    class Pool(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.pool = nn.Conv2d(3, 3, 1), nn.MaxPool2d(2)

        def forward(self, x: Tensor) -> Tensor:
            return F.avg_pool2d(self.pool(self.conv(x)), 2)  # pooling

    found = rewire.explain(converted(nn.Sequential(Pool())), image())
    steps = {step.name: step for step in found.regions[0].forward}
    assert (steps["MaxPool"].module, steps["MaxPool"].place.kind) == ("0.pool", "MaxPool2d")
    assert steps["AvgPool"].module == "0"
    assert steps["AvgPool"].place.line == steps["MaxPool"].place.line == line("pooling")


def test_kept_values_are_outputs() -> None:
    def use(m: Any, x: Tensor) -> Any:
        y = m.c(x)
        m.kept.append(y)
        return torch.relu(y)  # reads what is kept

    block = Block(use)
    block.kept = []
    found = rewire.explain(converted(block), image())
    (region,) = found.regions
    assert found.stops == ()
    assert [(value.op, value.place.module) for value in region.outputs] == [
        ("conv2d", "c"),
        ("relu", ""),
    ]
    assert region.outputs[1].place.line == line("reads what is kept")
    assert region.functions == 2
    assert "outputs, because somebody holds them; 2 functions to autograd" in str(found)


def test_what_is_seen_is_what_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking at frames does not keep values alive, which would make them outputs."""
    keys: list[Any] = []
    run = execute.run
    monkeypatch.setattr(execute, "run", lambda key, *rest: keys.append(key) or run(key, *rest))

    def use(m: Any, x: Tensor) -> Any:
        y = m.c(torch.relu(x))
        y = torch.tanh(y)
        del x
        return torch.relu(m.d(y)) + m.d(F.max_pool2d(y, 3, 1, 1))

    class More(Block):
        def __init__(self) -> None:
            super().__init__(use)
            self.d = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.Hardswish())

    model = converted(nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU(), More(), nn.Conv2d(4, 4, 1)))
    model[1].register_forward_pre_hook(lambda m, args: (torch.relu(args[0]),))
    use_engine(model, False)
    model.register_forward_hook(lambda m, args, y: torch.relu(y))  # comes before the engine's
    use_engine(model)
    model(image())
    plain, keys[:] = list(keys), []
    rewire.explain(model, image())
    assert len(plain) > 3
    assert keys == plain


# Where the engine stops


def test_unknown_function() -> None:
    found = explained(lambda m, x: torch.sin(m.c(x)))  # sine
    assert_stop(found, "torch.sin is not known to the engine", "sine")
    assert found.stops[0].region == 0
    assert found.regions[0].end == found.stops[0].reason
    assert f"{Path(__file__).name}:{line('sine')} in the model itself" in repr(found)


def test_unknown_module_of_torch() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Mish(), nn.Conv2d(3, 3, 1))

        def forward(self, x: Tensor) -> Any:
            return self.part(x)  # Mish

    found = rewire.explain(converted(Net()), image())
    assert_stop(found, "F.mish is not known to the engine", "Mish", "part.1")
    assert found.stops[0].place.kind == "Mish"
    (stop,) = rewire.explain(converted(Net().part), image()).stops
    assert (stop.place.location, stop.place.module) == ("", "1")


def test_unknown_arguments() -> None:
    found = explained(lambda m, x: m.c(x)[1:, :, None])  # slice
    reason = "Tensor.__getitem__ is not known to the engine with these arguments: "
    assert_stop(found, reason + "float64 4x4x8x8, (1:, :, None)", "slice")
    found = explained(lambda m, x: F.max_pool2d(m.c(x), 3, dilation=2))  # dilated
    reason = "F.max_pool2d is not known to the engine with these arguments: "
    assert reasons(found)[0].startswith(reason + "float64 4x4x8x8, 3")
    assert found.stops[0].place.line == line("dilated")


def test_printed_and_read() -> None:
    found = explained(lambda m, x: repr(m.c(x)))  # printed
    assert_stop(found, "a value is printed (Tensor.__repr__)", "printed")
    found = explained(lambda m, x: m.c(x).tolist())  # tolist
    assert_stop(found, "a value is read by Python code (Tensor.tolist)", "tolist")
    found = explained(lambda m, x: m.c(x).register_hook(print))  # hook of the gradient
    reason = "a value is given a hook for its gradient (Tensor.register_hook)"
    assert_stop(found, reason, "hook of the gradient")


def test_forward_hooks() -> None:
    def watch(seen: list[float], module: nn.Module, args: Any, output: Tensor) -> None:
        seen.append(output.sum().item())  # hook

    def before(module: nn.Module, args: Any) -> None:
        args[0].abs()  # pre-hook

    model = converted(Block(lambda m, x: m.c(x)))
    handle = model.n.register_forward_hook(partial(watch, []))
    found = rewire.explain(model, image())
    assert_stop(found, "a forward hook on n reads a value (Tensor.sum)", "hook", "n")
    handle.remove()
    model.c.register_forward_pre_hook(before)
    found = rewire.explain(model, image())
    assert_stop(found, "a forward pre-hook on c reads a value (Tensor.abs)", "pre-hook", "c")


def test_backward_hooks() -> None:
    model = converted(nn.Sequential(Block(lambda m, x: m.c(x))))
    model[0].n.register_full_backward_hook(lambda *a: None)
    found = rewire.explain(model, image())
    reason = "backward hook on module 0.n: layers run one by one"
    assert reasons(found) == [reason]
    assert found.stops[0].region is None
    assert found.regions == ()
    assert {layer.reason for layer in found.layers} == {reason}
    assert found.recorded == 0
    model[0].m.register_full_backward_pre_hook(lambda *a: None)
    (text,) = reasons(rewire.explain(model, image()))
    assert text == "backward hook on module 0.n and 1 more: layers run one by one"


SAVED = "saved-tensor hooks are active (activation checkpointing, save_on_cpu)"


def test_checkpointing() -> None:
    def use(m: Any, x: Tensor) -> Any:
        return checkpoint(m.c, x, use_reentrant=False)  # checkpoint

    found = explained(use)
    assert_stop(found, f"c is not recorded: {SAVED}", "checkpoint", "c")
    assert_alone(found, {"c": (SAVED, "checkpoint")})
    assert found.recorded == 2


def test_reentrant_checkpointing() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Block(lambda m, x: x), Block(lambda m, x: m.c(x))

        def forward(self, x: Tensor) -> Any:
            return checkpoint(self.second, self.first(x), use_reentrant=True)  # reentrant

    found = rewire.explain(converted(Two()), image())
    reason = (
        "gradient mode changed: gradients are off here, unlike at the model's call by "
        "autograd.Function CheckpointFunction"
    )
    assert_stop(found, reason, "reentrant", "second")
    assert [value.linked for value in found.regions[0].outputs] == [True]
    assert found.regions[1].end == "second returned"
    assert "held by C++ code, so its gradient is computed operation by operation" in str(found)


def test_functions_of_autograd() -> None:
    found = explained(lambda m, x: Reverse.apply(m.c(x)))
    (stop,) = found.stops
    assert stop.reason == (
        "a value is held by C++ code: autograd.Function Reverse reads it (Tensor.view_as)"
    )
    assert Path(stop.place.file).name == "engine_models.py"
    found = explained(lambda m, x: (m.c(x), Untouched.apply(x)))
    assert found.stops == ()
    (region,) = found.regions
    assert [(value.op, value.linked) for value in region.outputs if value.linked] == [("add", True)]


def test_scripted_functions() -> None:
    @torch.jit.script
    def twice(x: Tensor) -> Tensor:
        return 2 * x

    found = explained(lambda m, x: twice(m.c(x)))  # script
    reason = (
        "a value is held by C++ code: aten.mul.Scalar is called past Python (torch.jit.script, "
        "an extension)"
    )
    assert_stop(found, reason, "script")


def test_dispatch_modes() -> None:
    def use(m: Any, x: Tensor) -> Any:
        with FlopCounterMode(display=False):
            return m.c(x)  # counted

    reason = "a dispatch mode is active (_FlopCounterMode)"
    found = explained(use)
    # Its own hook on the module looks at the place in the graph first.
    assert_stop(found, f"Tensor.grad_fn is called while {reason}", "counted", "c")
    assert_alone(found, {"c": (reason, "counted")})
    with FlopCounterMode(display=False):
        found = explained(lambda m, x: m.c(x))
    everywhere = "hooks on all modules are registered (register_module_forward_hook and the like)"
    assert reasons(found) == [f"{reason}; {everywhere}: layers run one by one"]
    assert found.recorded == 0


def test_what_watches_from_outside() -> None:
    model = converted(Block(lambda m, x: m.c(x)))

    def reason() -> str:
        (found,) = reasons(rewire.explain(model, image()))
        assert private.watched_from_outside()
        return found.removesuffix(": layers run one by one")

    with torch.overrides.BaseTorchFunctionMode():
        assert reason() == "a function mode is active (BaseTorchFunctionMode)"
    with torch.autograd.graph.save_on_cpu():
        assert reason() == SAVED
    handle = nn.modules.module.register_module_forward_hook(lambda *a: None)
    try:
        assert reason() == (
            "hooks on all modules are registered (register_module_forward_hook and the like)"
        )
    finally:
        handle.remove()
    assert private.watchers(True) == []
    assert not private.watched_from_outside()


def test_gradient_mode_inside() -> None:
    def use(m: Any, x: Tensor) -> Any:
        y = m.b(x)
        with torch.no_grad():
            z = torch.relu(y)  # no gradients
            m.c(z)  # a layer
        return m.c(y)

    found = explained(use)
    reason = "gradient mode changed: gradients are off here, unlike at the model's call"
    assert_stop(found, f"torch.relu is not recorded: {reason}", "no gradients")
    assert_alone(found, {"c": (reason, "a layer")})
    (layer,) = [layer for layer in found.layers if layer.alone]
    assert (layer.recorded, layer.alone, layer.label) == (1, 1, "c (1 of 2 calls)")
    assert found.recorded == 2


def test_dtypes() -> None:
    model = rewire.sparsify(Block(lambda m, x: m.c(x)), 0.5)
    use_engine(model)
    found = rewire.explain(model.half(), image().half())
    reason = (
        "dtype float16 has no kernels: use bfloat16 (model.bfloat16()), float32 (model.float()) or "
        "float64"
    )
    assert [layer.reason for layer in found.layers] == [reason] * 3
    assert found.recorded == 0
    assert found.regions == ()
    model.float()
    model.c.double()

    def convert(m: Any, x: Tensor) -> Any:
        return m.c(x.double())

    model.use = convert
    found = rewire.explain(model, image().float())
    assert reasons(found) == ["Tensor.double is not known to the engine"]
    assert [region.dtype for region in found.regions] == ["float32", "float64"]


def test_layers_of_sequences() -> None:
    model = converted(nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)))
    found = rewire.explain(model, torch.randn(2, 7, 5, dtype=torch.float64))
    assert {layer.reason for layer in found.layers} == {""}
    assert found.stops == ()
    (region,) = found.regions
    assert [step.name for step in region.forward if step.name != "Relayout"] == ["ConvForward"] * 2


def test_padding_that_kernels_do_not_imply() -> None:
    model = converted(nn.Sequential(nn.Conv2d(3, 3, 3), nn.Conv2d(3, 3, 2, padding="same")))
    found = rewire.explain(model, image())
    reason = "its padding is not the same zeros on both sides"
    assert reasons(found) == [f"1 is not recorded: {reason}"]
    assert [layer.reason for layer in found.layers] == ["", reason]


def test_batch_norm_that_is_called_again() -> None:
    found = explained(lambda m, x: m.c(m.n(x)))  # again
    reason = "running statistics that a recorded batch norm will update are needed"
    assert_stop(found, reason, "again", "n")


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_models_and_parts() -> None:
    block = converted(Block(lambda m, x: m.c(x)))
    compiled = torch.compile(block, backend="eager")
    found = rewire.explain(compiled, image())
    assert [layer.reason for layer in found.layers] == ["it runs inside torch.compile"] * 3
    assert found.recorded == 0
    model = converted(nn.Sequential(nn.Conv2d(3, 3, 1), Block(lambda m, x: m.c(x))))
    model[1].compile(backend="eager")
    found = rewire.explain(model, image())
    assert [layer.reason for layer in found.layers] == [
        "",
        *["it runs inside torch.compile"] * 3,
    ]
    assert reasons(found) == ["code that torch.compile has compiled reads a value"]


def test_layers_that_are_not_called() -> None:
    found = explained(lambda m, x: x)
    assert [layer.reason for layer in found.layers] == ["", "", "it was not called"]
    assert found.recorded == 2


# Models that cannot be explained


def test_engine_off() -> None:
    model = converted(Block(lambda m, x: m.c(x)), engine=False)
    found = rewire.explain(model, image())
    assert not found.on
    assert found.regions == found.stops == ()
    assert {layer.reason for layer in found.layers} == {"the engine is off for this model"}
    assert str(found).endswith(
        "The engine is off for this model: its layers run one by one.\n"
        "Turn it on with rewire.use_engine(model)."
    )
    assert repr(rewire.explain(Block(), image())).endswith(
        "The model has no sparse layers: convert it with rewire.sparsify(model, sparsity) first "
        '(layers with storage="masked" are dense).'
    )


def test_a_single_layer_is_not_told_to_turn_the_engine_on() -> None:
    layer = rewire.sparsify(nn.Linear(8, 4), sparsity=0.5)
    rewire.use_engine(layer)
    assert str(rewire.explain(layer, torch.randn(2, 8))).endswith(
        "The model is a single sparse layer, which runs by itself: "
        "the engine is for models that hold layers."
    )


def test_wrong_arguments() -> None:
    model = converted(Block(lambda m, x: m.c(x)))
    with pytest.raises(TypeError, match=r"model must be an nn\.Module, got function"):
        rewire.explain(image, image())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a dict of keyword arguments, got list"):
        rewire.explain(model, [image()])
    lazy = converted(nn.Sequential(nn.Conv2d(3, 3, 1), nn.Flatten()))
    lazy.append(nn.LazyLinear(3, dtype=torch.float64))
    with pytest.raises(ValueError, match="call it once first"):
        rewire.explain(lazy, image())


def test_examples() -> None:
    class Net(Block):
        def forward(self, x: Tensor, *, scale: list[Tensor]) -> Any:
            return self.c(super().forward(x)).atan2_(scale[0].mul_(2))

    model, scale = converted(Net()), torch.ones((), dtype=torch.float64)
    found = rewire.explain(model, {"x": image(), "scale": [scale]})
    assert reasons(found) == ["Tensor.atan2_ is not known to the engine"]
    assert float(scale) == 1.0
    plain = converted(Block(lambda m, x: m.c(x)))
    assert rewire.explain(plain, (image(),)).recorded == 3


# Nothing changes


class Careless(Block):
    """Changes whatever it can."""

    def __init__(self) -> None:
        super().__init__(lambda m, x: m.c(x))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("rebound", torch.zeros(()))
        self.calls, self.fail = 0, False

    def forward(self, x: Tensor) -> Any:
        x.mul_(2)
        self.count += 1
        self.rebound = self.rebound + 1
        self.calls += 1
        self.extra = super().forward(F.dropout(x, 0.5) * random.random() * np.random.rand())  # noqa: NPY002
        self.extra.sum().backward(retain_graph=True)
        with torch.no_grad():
            self.c.values.add_(1)
        self.n.eval()
        self.register_buffer("new", torch.ones(()))
        if self.fail:
            raise KeyError("mine")
        return self.extra


@pytest.mark.parametrize("fail", [False, True])
@pytest.mark.parametrize("training", [True, False])
def test_nothing_changes(fail: bool, training: bool) -> None:
    model = converted(Careless()).train(training)
    model.fail = fail
    model.a.values.grad = torch.full_like(model.a.values, 7)
    seen: list[Any] = []
    model.b.probe = lambda *a: seen.append(a)
    probe, mine = model.b.probe, model.a.values.grad
    state = copy.deepcopy(model.state_dict())
    before = {name: id(t) for name, t in (*model.named_parameters(), *model.named_buffers())}
    versions = {name: b._version for name, b in model.named_buffers()}
    own = dict(model.__dict__)
    x = image()
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    torch.manual_seed(1)
    expected = torch.rand(()), random.random(), np.random.rand()  # noqa: NPY002
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    torch.manual_seed(1)
    if fail:
        with pytest.raises(KeyError, match="mine"):
            rewire.explain(model, x)
    else:
        rewire.explain(model, x)
    assert (torch.rand(()), random.random(), np.random.rand()) == expected  # noqa: NPY002
    assert torch.equal(x, image())
    after = model.state_dict()
    assert list(after) == list(state)
    assert all(torch.equal(after[name], value) for name, value in state.items())
    assert before == {
        name: id(t) for name, t in (*model.named_parameters(), *model.named_buffers())
    }
    assert versions["n.running_mean"] == model.n.running_mean._version
    assert model.__dict__ == own
    assert (model.calls, model.n.training) == (0, training)
    assert model.a.values.grad is mine
    assert torch.equal(mine, torch.full_like(mine, 7))
    assert all(p.grad is None for p in model.parameters() if p is not model.a.values)
    assert model.b.probe is probe
    assert observe.observer is None
    assert len(model._forward_hooks) == len(model._forward_pre_hooks) == 1


def test_graphs_of_before_stay_valid() -> None:
    model = converted(Block(lambda m, x: m.c(x)))
    twin = copy.deepcopy(model)
    loss, other = model(image()).square().sum(), twin(image()).square().sum()
    rewire.explain(model, image())
    loss.backward()
    other.backward()
    assert torch.equal(model.a.values.grad, twin.a.values.grad)


def test_nothing_is_watched_afterwards() -> None:
    """A tensor that an error leaves behind may still be used."""
    kept: list[Tensor] = []

    def use(m: Any, x: Tensor) -> Any:
        kept.append(m.c(x))
        raise KeyError("now")

    model = converted(Block(use))
    with pytest.raises(KeyError, match="now"):
        rewire.explain(model, image())
    assert kept[0].sum().isfinite()


# The text


def test_text_is_narrow_and_plain() -> None:
    class Long(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a_block_with_quite_a_long_name = nn.Sequential(Block(lambda m, x: x))
            self.last = nn.Conv2d(3, 3, 1)

        def forward(self, x: Tensor) -> Any:
            x = self.a_block_with_quite_a_long_name(x)
            return torch.cat([F.silu(self.last(x)), torch.tanh(self.last(x))])

    text = str(rewire.explain(converted(Long()), image()))
    assert max(map(len, text.splitlines())) <= 120
    assert "\033" not in text
    assert "  …ck_with_quite_a_long_name.0.a  ConvForward" in text
    found = rewire.explain(converted(Long()), image())
    assert str(found).startswith(repr(found))
    assert found._repr_html_().startswith("<pre>Long in training mode")


def test_same_reasons_are_one_line() -> None:
    layers = [part for _ in range(6) for part in (nn.Linear(4, 4), nn.Mish())]
    found = rewire.explain(
        converted(nn.Sequential(*layers)), torch.randn(3, 4, dtype=torch.float64)
    )
    assert len(found.stops) == 6
    assert (
        "  6x F.mish is not known to the engine\n"
        "     in 1 (Mish), 3 (Mish), 5 (Mish), 7 (Mish) and 2 more"
    ) in repr(found)
