"""Regions as chains of autograd functions: the same gradients to the bit, each as soon as it is final."""

from __future__ import annotations

import copy
import gc
import itertools
import random
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine_graphs import Builder, Case, case, random_program
from engine_models import Block, converted, image, loss_of
from rewire.engine import execute, links, plan
from rewire.engine.plan import Buffer, Layout, Role, Segment, Step, segments
from rewire.engine.planned import Backward, Planned, _Pass
from rewire.engine.run import Data, Run
from rewire.ops import native
from rewired import METHODS

pytestmark = pytest.mark.skipif(not native.available(), reason="needs the compiled kernels")


@pytest.fixture(autouse=True)
def _small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "SEGMENT_BYTES", 1)
    monkeypatch.setattr(execute, "_plans", {})


@pytest.fixture
def chained(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Says whether regions are chains from then on; they are from the start."""

    def chain(on: bool) -> None:
        monkeypatch.setattr(links, "wanted", lambda: on)

    chain(True)
    return chain


class Residual(nn.Module):
    """Six convolutions with batch norms, two residual sums, and a classifier."""

    def __init__(self, channels: int = 6) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.blocks = nn.Sequential(*(Block(channels=channels) for _ in range(2)))
        for block in self.blocks:
            del block.c
        self.last = nn.Conv2d(channels, 8, 3, stride=2)
        self.fc = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        x = torch.relu(self.last(self.blocks(x)))
        return self.fc(x.mean((2, 3)))  # type: ignore[no-any-return]


def residual() -> nn.Module:
    torch.manual_seed(0)
    return converted(Residual())


def mlp() -> nn.Module:
    torch.manual_seed(0)
    sizes = (3 * 64, 40, 30, 20, 10)
    parts = [part for n, m in itertools.pairwise(sizes) for part in (nn.Linear(n, m), nn.ReLU())]
    return converted(nn.Sequential(nn.Flatten(), *parts))


MODELS = {"residual": residual, "mlp": mlp}
models = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)


def chain_of(y: Tensor) -> list[Any]:
    """The functions of the region that has computed a tensor, in the order of the backward pass."""
    node: Any = y.grad_fn
    while "_Region" not in node.name():
        node = node.next_functions[0][0]
    found = [node]
    while found[-1] is not None:
        after = (n for n, _ in found[-1].next_functions if n is not None and "_Link" in n.name())
        found.append(next(after, None))
    return found[:-1]


def gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor | None]:
    found = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    return {**found, "input": x.grad}


def backward(model: nn.Module, x: Tensor, **how: Any) -> dict[str, Tensor | None]:
    x = x.clone().requires_grad_()
    loss_of(model(x)).backward(**how)
    return gradients(model, x)


def equal(found: Any, expected: Any) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        mine = found[name]
        assert (mine is None) == (value is None), name
        assert mine is None or torch.equal(mine, value), name


@models
@pytest.mark.parametrize("batch", [4, 128])
def test_gradients_are_the_same_to_the_bit(
    make: Callable[[], nn.Module], batch: int, chained: Callable[[bool], None]
) -> None:
    model, x = make(), image(batch)
    twin = copy.deepcopy(model)
    assert len(chain_of(model(x))) >= 3
    twin(x)  # running statistics move in both
    found = backward(model, x)
    assert all(grad is not None for grad in found.values())
    chained(False)
    assert len(chain_of(twin(x))) == 1
    model(x)
    equal(found, backward(twin, x))
    equal(dict(model.named_buffers()), dict(twin.named_buffers()))


def test_one_process_has_one_function() -> None:
    assert not links.wanted()
    assert len(chain_of(residual()(image()))) == 1


# Segments ------------------------------------------------------------------------------------------


def data_of(of: Case) -> Data:
    return Data(of.topologies, of.scalars, [None] * len(of.topologies), True)


@pytest.mark.parametrize("seed", range(60))
def test_segments_of_random_graphs(seed: int) -> None:
    rng = random.Random(seed)
    of = case(*_program(rng))
    planned, run = Planned(of.graph), Run(of.tensors, data_of(of))
    steps, inputs = planned.plan.backward, len(of.tensors)
    outputs = planned.forward(run)
    grads = [None if rng.random() < 0.2 else torch.randn_like(y) for y in outputs]
    wanted = [meta.requires_grad for meta in of.graph.inputs]
    expected = planned.backward(run, grads, wanted)
    for most in (1, 2, 100):
        cuts = segments(steps, inputs, most)
        assert (len(cuts) == 1) if most == 1 else (len(cuts) <= most + 1)
        assert [cut.last for cut in cuts] == sorted({cut.last for cut in cuts})
        assert cuts[-1].last == len(steps)
        assert sorted(k for cut in cuts for k in cut.inputs) == list(range(inputs))
        found: list[Any] = [None] * inputs
        going = Backward(planned, run, grads)
        for cut in cuts:
            mine = going.take(cut, [wanted[k] for k in cut.inputs])
            for k, grad in zip(cut.inputs, mine, strict=True):
                found[k] = grad
            later = {
                b.number for s in steps[cut.last :] for b in s.buffers() if b.role is Role.INPUT
            }
            final = {k for k in cut.inputs if wanted[k] and len(cuts) > 1}
            assert not later & {k for k in final if found[k] is not None}
        equal(dict(enumerate(found)), dict(enumerate(expected)))
        del going


def _program(rng: random.Random) -> tuple[Any, ...]:
    b, outputs = random_program(rng)
    return b, *outputs


def test_a_parameter_stays_until_nothing_reads_it() -> None:
    """Whoever gets its gradient may change it."""

    def buffer(role: Role, number: int) -> Buffer:
        return Buffer((4,), Layout.FLAT, role, number, torch.float64)

    steps = [
        Step("A", 0, (), {"out_dw": buffer(Role.INPUT_GRAD, 0), "x": buffer(Role.INPUT, 2)}),
        Step("B", 0, (), {"out_dw": buffer(Role.INPUT_GRAD, 1)}),
        Step("C", 0, (), {"inner": {"w": buffer(Role.INPUT, 0)}}),
        Step("D", 0, (), {"out_dw": buffer(Role.INPUT_GRAD, 3), "w": buffer(Role.INPUT, 3)}),
        Step("E", 0, (), {}),
    ]
    assert segments(steps, 5, 100) == [
        Segment(2, (1, 2, 4), (2,)),
        Segment(3, (0,), (0,)),
        Segment(5, (3,), (3,)),
    ]
    assert segments(steps, 5, 1) == [Segment(5, (0, 1, 2, 3, 4), (0, 2, 3))]


def test_the_gradient_of_an_activation_does_not_count() -> None:
    """It may be much larger than those of all parameters together."""
    b = Builder()
    x = b.input(64, 3, 9, 9)
    for _ in range(4):
        x = b.relu(b.conv(x, 3))
    assert len(segments(Planned(case(b, x).graph).plan.backward, len(b.inputs), 4)) == 4


def test_a_parameter_that_is_used_twice_is_final_at_the_end() -> None:
    b = Builder()
    first = b.conv(b.input(4, 3, 5, 5, grad=False), 3)
    node = b.nodes[first]
    second = b.node("conv2d", node.attrs, (b.relu(first), *node.inputs[1:]), node.shape)
    last = b.conv(b.relu(second), 2)
    steps = Planned(case(b, last).graph).plan.backward
    cuts = segments(steps, len(b.inputs), 100)
    values, bias = (~ref for ref in b.nodes[last].inputs[1:] if ref is not None)
    assert {values, bias} <= {*cuts[0].inputs}
    shared = {~ref for ref in node.inputs[1:] if ref is not None}
    assert shared <= {*cuts[-1].inputs, *cuts[-2].inputs}
    assert not shared & {*cuts[0].inputs}


# When gradients are there --------------------------------------------------------------------------


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """How many steps have run, each time that some have."""
    found: list[Any] = []
    whole = _Pass.run

    def run(self: Any, given: Any, run: Any, first: int = 0, last: int | None = None) -> None:
        whole(self, given, run, first, last)
        found.append(self.count if last is None else last)

    monkeypatch.setattr(_Pass, "run", run)
    return found


@models
def test_hooks_of_late_layers_run_before_the_steps_of_early_ones(
    make: Callable[[], nn.Module], chained: Callable[[bool], None], events: list[Any]
) -> None:
    model = make()
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: events.append(name))
    y = loss_of(model(image()))
    (planned,) = execute._plans.values()
    count = len(planned.plan.backward)
    names = list(dict(model.named_parameters()))
    events.clear()
    y.backward()
    assert [e for e in events if isinstance(e, int)] == [s.last for s in planned.segments]
    assert events.index(names[-1]) < events.index(planned.segments[1].last)
    assert events.index(names[0]) > events.index(count)
    before = events[: events.index(count)]
    assert sum(isinstance(e, str) for e in before) >= len(names) // 2
    chained(False)
    y = loss_of(model(image()))
    events.clear()
    y.backward()
    assert events[0] == count
    assert {*events[1:]} == {*names}


def test_steps_that_nothing_depends_on_do_not_run(
    chained: Callable[[bool], None], events: list[Any]
) -> None:
    model = residual()
    y = loss_of(model(image()))
    (planned,) = execute._plans.values()
    events.clear()
    torch.autograd.grad(y, [model.fc.values], retain_graph=True)  # type: ignore[list-item]
    assert events == [planned.segments[0].last]


def test_gradients_are_not_copied(
    chained: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses = set()
    empty = native.empty

    def spy(*given: Any) -> Tensor:
        tensor = empty(*given)
        addresses.add(tensor.data_ptr())
        return tensor

    monkeypatch.setattr(native, "empty", spy)
    model = residual()
    loss_of(model(image())).backward()
    assert all(p.grad.data_ptr() in addresses for p in model.parameters())  # type: ignore[union-attr]


# What people do with backward passes ---------------------------------------------------------------


@models
def test_backward_twice(make: Callable[[], nn.Module], chained: Callable[[bool], None]) -> None:
    model, x = make(), image().requires_grad_()
    y = loss_of(model(x))
    y.backward(retain_graph=True)
    once = gradients(model, x)
    x.grad = None
    y.backward()
    equal(gradients(model, x), once)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.backward()


@models
def test_gradients_of_some(make: Callable[[], nn.Module], chained: Callable[[bool], None]) -> None:
    model, x = make(), image().requires_grad_()
    named = {**dict(model.named_parameters()), "input": x}
    y = loss_of(model(x))
    y.backward(retain_graph=True)
    expected = gradients(model, x)
    rng = random.Random(0)
    for names in ([*named], *([n] for n in named), *(rng.sample([*named], 4) for _ in range(5))):
        found = torch.autograd.grad(y, [named[n] for n in names], retain_graph=True)
        equal(dict(zip(names, found, strict=True)), {n: expected[n] for n in names})


def test_frozen_parameters(chained: Callable[[bool], None]) -> None:
    found = {}
    for on in (True, False):
        chained(on)
        model = residual()
        for part in (model.last, model.norm, model.blocks[0]):  # type: ignore[index]
            part.requires_grad_(False)  # type: ignore[union-attr]
        loss_of(model(image())).backward()
        found[on] = {name: p.grad for name, p in model.named_parameters()}
        assert found[on]["last.values"] is None
    equal(found[True], found[False])


@models
def test_gradients_of_gradients(
    make: Callable[[], nn.Module], chained: Callable[[bool], None]
) -> None:
    found = {}
    for on in (True, False):
        chained(on)
        model, x = make(), image().requires_grad_()
        parameters = list(model.parameters())
        y = loss_of(model(x))
        first = torch.autograd.grad(y, [x, *parameters], create_graph=True)
        sum((g * g).sum() for g in first[::2]).backward()  # type: ignore[union-attr]
        found[on] = gradients(model, x)
        (penalty,) = torch.autograd.grad(loss_of(model(x)), x, create_graph=True)
        penalty.square().sum().backward()
        found[on] |= {f"again {k}": v for k, v in gradients(model, x).items()}
    equal(found[True], found[False])


def _two_outputs() -> tuple[Case, list[int]]:
    b = Builder()
    x = b.relu(b.norm(b.conv(b.input(64, 3, 5, 5), 4)))
    y = b.relu(b.conv(x, 4))
    z = b.conv(b.relu(b.conv(y, 3)), 3)
    return case(b, y, z), [y, z]


@pytest.mark.parametrize("which", [(0,), (1,), (0, 1), ()])
def test_outputs_without_gradient(which: tuple[int, ...], chained: Callable[[bool], None]) -> None:
    of, _ = _two_outputs()
    found = {}
    for on in (True, False):
        chained(on)
        tensors = [
            t.clone().requires_grad_(meta.requires_grad)
            for t, meta in zip(of.tensors, of.graph.inputs, strict=True)
        ]
        outputs = execute.run(tuple(of.graph), tensors, [False] * len(tensors), data_of(of), True)
        taken = [Nothing.apply(y) if i not in which else y for i, y in enumerate(outputs)]
        assert len(chain_of(outputs[0])) == (
            len(next(iter(execute._plans.values())).segments) if on else 1
        )
        sum(loss_of(y) for y in taken).backward()  # type: ignore[union-attr]
        found[on] = {str(k): t.grad for k, t in enumerate(tensors)}
    equal(found[True], found[False])
    assert any(g is not None for g in found[True].values()) == bool(which)


class Nothing(torch.autograd.Function):
    """Passes its input on, and no gradient back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return None


def test_a_backward_pass_in_a_hook(chained: Callable[[bool], None]) -> None:
    """It begins when some segments of another one have run."""
    model, x = residual(), image()
    parameters = dict(model.named_parameters())
    expected = backward(copy.deepcopy(model), x)
    x.requires_grad_()
    y = loss_of(model(x))
    inside: dict[str, Tensor] = {}

    def hook(parameter: Tensor) -> None:
        handle.remove()
        with torch.enable_grad():
            z = (3 * y).sum()
        found = torch.autograd.grad(z, [*parameters.values(), x], retain_graph=True)
        inside.update(zip([*parameters, "input"], found, strict=True))

    handle = parameters["last.values"].register_post_accumulate_grad_hook(hook)
    y.backward(retain_graph=True)
    equal(gradients(model, x), expected)
    equal(inside, _scaled(model, y, x, 3))


def _scaled(model: nn.Module, y: Tensor, x: Tensor, factor: float) -> dict[str, Tensor]:
    named = {**dict(model.named_parameters()), "input": x}
    found = torch.autograd.grad((factor * y).sum(), list(named.values()), retain_graph=True)
    return dict(zip(named, found, strict=True))


def test_two_threads(chained: Callable[[bool], None]) -> None:
    model, x = residual(), image(64).requires_grad_()
    y = loss_of(model(x))
    expected = {factor: _scaled(model, y, x, factor) for factor in (1, -2)}
    problems: list[BaseException] = []

    def work(factor: int) -> None:
        try:
            for _ in range(20):
                equal(_scaled(model, y, x, factor), expected[factor])
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(factor,)) for factor in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems, problems[0]


@pytest.mark.parametrize("method", ["grabo", "graest", "rigl", "snfs"])
def test_rewirers_see_the_same(method: str, chained: Callable[[bool], None]) -> None:
    found = {}
    for on in (True, False):
        chained(on)
        model = residual()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        rewirer = METHODS[method](model, optimizer)
        for step in range(8):
            optimizer.zero_grad()
            loss_of(model(image(8, seed=step))).backward()
            optimizer.step()
            rewirer.step()
        assert sum(r.grown for r in rewirer.history) > 0
        found[on] = dict(model.state_dict())
    equal(found[True], found[False])


# Memory and changes --------------------------------------------------------------------------------


def test_the_arena_is_free_after_the_pass(
    chained: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    arenas: list[Any] = []
    forward = Planned.forward

    def spy(self: Planned, run: Run) -> list[Tensor]:
        outputs = forward(self, run)
        arenas.append(weakref.ref(run.arena))
        return outputs

    monkeypatch.setattr(Planned, "forward", spy)
    model = residual()
    gc.disable()
    try:
        y = loss_of(model(image()))
        y.backward(retain_graph=True)
        assert arenas[0]() is not None
        y.backward()
        assert arenas[0]() is None
        z = loss_of(model(image()))  # nobody wants its gradients
        assert arenas[1]() is not None
        del z
        assert arenas[1]() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("name", ["fc.values", "last.values", "stem.values"])
def test_a_change_before_the_backward_pass(name: str, chained: Callable[[bool], None]) -> None:
    model = residual()
    y = loss_of(model(image().requires_grad_()))
    with torch.no_grad():
        dict(model.named_parameters())[name].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_a_change_during_the_backward_pass(chained: Callable[[bool], None]) -> None:
    """Of what later segments read."""
    model, x = residual(), image().requires_grad_()

    def hook(parameter: Tensor) -> None:
        with torch.no_grad():
            model.stem.values.add_(1)  # type: ignore[operator, union-attr]

    model.fc.values.register_post_accumulate_grad_hook(hook)  # type: ignore[union-attr, operator]
    y = loss_of(model(x))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()
    del y


@models
def test_an_optimizer_in_the_backward_pass(
    make: Callable[[], nn.Module], chained: Callable[[bool], None]
) -> None:
    """Parameters change as soon as their gradients are there."""
    found = {}
    for on in (True, False):
        chained(on)
        model = make()

        def step(parameter: Tensor) -> None:
            with torch.no_grad():
                assert parameter.grad is not None
                parameter.sub_(parameter.grad, alpha=0.1)
            parameter.grad = None

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        for seed in range(3):
            loss_of(model(image(seed=seed).requires_grad_())).backward()
        found[on] = dict(model.state_dict())
    equal(found[True], found[False])


def test_other_defaults_in_the_backward_pass(chained: Callable[[bool], None]) -> None:
    model, x = residual(), image()
    expected = backward(copy.deepcopy(model), x)
    x.requires_grad_()
    y = loss_of(model(x))
    torch.set_default_dtype(torch.float64)
    try:
        y.backward()
    finally:
        torch.set_default_dtype(torch.float32)
    equal(gradients(model, x), expected)


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_detecting_anomalies(chained: Callable[[bool], None]) -> None:
    model, x = residual(), image()
    expected = backward(copy.deepcopy(model), x)
    with torch.autograd.detect_anomaly(check_nan=True):
        equal(backward(model, x), expected)
