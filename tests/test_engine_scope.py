"""Calls of a model that end early, are nested, take turns, or have something replaced meanwhile."""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrize

from engine_models import (
    Block,
    assert_same,
    close,
    converted,
    image,
    leaves,
    loss_of,
    observe,
    plain_step,
    same,
)
from rewire.engine import scope, use_engine
from rewire.engine.lazy import LazyTensor


def use_c(m: Any, x: Tensor) -> Any:
    return m.c(x)


def alike(model: nn.Module, step: Any = plain_step) -> None:
    """A step does the same with the engine on and off, twice, and leaves nothing behind. For models of
    which there is no dense twin."""
    off = copy.deepcopy(model)
    use_engine(off, False)
    for _ in range(2):
        model.zero_grad()
        off.zero_grad()
        assert_same(observe(model, image(), step), observe(off, image(), step))
    assert all(type(b) is Tensor for b in model.buffers())


@pytest.fixture(autouse=True)
def left() -> Iterator[None]:
    """No test leaves a call behind that has not ended."""
    yield
    found, scope._local.scope = scope._local.scope, None
    assert found is None


# Calls that end early


def _interrupt(m: Any, x: Tensor) -> Any:
    raise m.error


class Catches(nn.Module):
    """Goes on after a part of it has failed."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.inner, self.outer = Block(_interrupt), Block(use_c)
        self.middle = nn.Sequential(self.inner)
        self.inner.error = error

    def forward(self, x: Tensor) -> Any:
        y = self.outer.n(self.outer.a(x))
        try:
            self.middle(y)
        except type(self.inner.error):
            z = self.outer(y)
        return z, self.inner.m.running_mean + 0, self.outer.n.running_var + 0


@pytest.mark.parametrize("error", [ValueError(), KeyboardInterrupt(), GeneratorExit()])
def test_parts_that_fail(error: BaseException) -> None:
    def step(model: nn.Module, x: Tensor) -> Any:
        outputs = model(x)
        assert all(type(y) is Tensor for y in leaves(outputs))
        assert scope._local.scope is None
        return _backward(outputs)

    same(converted(Catches(error)), image(), step)


class Recursive(Block):
    """Calls itself, and fails in the innermost call."""

    error: type[BaseException] | None = None

    def forward(self, x: Tensor, depth: int = 2) -> Any:
        y = self.m(self.b(self.n(self.a(x))))
        if depth:
            try:
                y = y + self(y, depth - 1)
            except (ValueError, KeyboardInterrupt):
                y = self.b(y)
        elif self.error is not None:
            raise self.error
        return self.c(y)[:, :3] + self.n.running_mean.sum()


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_recursion(error: type[BaseException] | None) -> None:
    def step(model: nn.Module, x: Tensor) -> Any:
        y = model(x)
        assert type(y) is Tensor
        assert scope._local.scope is None
        return _backward(y)

    model = converted(Recursive())
    model.error = error
    same(model, image(), step)


def test_recursion_that_is_interrupted_as_a_whole() -> None:
    class Deep(Recursive):
        def forward(self, x: Tensor, depth: int = 2) -> Any:
            y = self.n(self.a(x))
            if depth and self.error is not None:
                return self(y, depth - 1)
            if self.error is not None:
                raise self.error
            return self.c(y)

    def step(model: nn.Module, x: Tensor) -> Any:
        model.error = KeyboardInterrupt
        with pytest.raises(KeyboardInterrupt):
            model(x)
        model.error = None
        return plain_step(model, x)

    same(converted(Deep()), image(), step)


def test_a_part_is_called_after_an_interrupt() -> None:
    """It is no part of the call that was interrupted."""

    def use(m: Any, x: Tensor) -> Any:
        if m.fail:
            raise KeyboardInterrupt
        return m.c(x)

    def step(model: nn.Module, x: Tensor) -> Any:
        model[0].fail = True
        with pytest.raises(KeyboardInterrupt):
            model(x)
        model[0].fail = False
        y = model[0](x)
        assert type(y) is Tensor
        return _backward([y, model[0].n(model[0].a(x))])

    same(converted(nn.Sequential(Block(use))), image(), step)


def test_exceptions_stop_early() -> None:
    """A hook that raises, to have the output of a part and no more."""

    class Enough(Exception):
        pass

    def step(model: nn.Module, x: Tensor) -> Any:
        found: list[Tensor] = []

        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            found.append(output)
            raise Enough

        handle = model[0].n.register_forward_hook(hook)
        with pytest.raises(Enough):
            model(x)
        handle.remove()
        return _backward(found)

    same(converted(nn.Sequential(Block(use_c))), image(), step)


def test_turned_off_in_the_middle() -> None:
    """By code that the model calls: what was recorded is computed, the rest runs layer by layer."""

    def use(m: Any, x: Tensor) -> Any:
        use_engine(m, m.on)
        y = m.b(x)
        assert type(y) is Tensor
        return m.c(y)

    def step(model: nn.Module, x: Tensor) -> Any:
        y = plain_step(model, x)
        assert type(y) is Tensor
        assert type(model.c(x)) is Tensor
        scope._local.scope = None
        return y

    for on in (True, False):
        model = converted(Block(use))
        model.on = on
        same(model, image(), step)


# Generators


class Lazily(Block):
    def forward(self, x: Tensor) -> Iterator[Tensor]:
        y = self.n(self.a(x))
        yield y
        yield self.n.running_mean + 0
        z = self.m(self.b(y))
        yield self.c(z)


def _backward(outputs: Any) -> Any:
    loss_of(outputs).backward()
    return outputs


def test_generators_inside_a_model() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.a = Lazily(), nn.Conv2d(3, 3, 1)

        def forward(self, x: Tensor) -> Any:
            return [y * 2 for y in self.inner(self.a(x))]

    same(converted(Outer()), image())


def test_generators_that_outlive_the_call() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.a = Lazily(), nn.Conv2d(3, 3, 1)

        def forward(self, x: Tensor) -> Any:
            rest = self.inner(self.a(x))
            return next(rest), rest

    def step(model: nn.Module, x: Tensor) -> Any:
        first, rest = model(x)
        return _backward([first, *rest])

    same(converted(Outer()), image(), step)


# Other models


@pytest.mark.parametrize("where", ["before", "after", "inside"])
@pytest.mark.parametrize("order", ["hook first", "engine first"])
def test_models_called_in_hooks(where: str, order: str) -> None:
    pair = nn.ModuleDict({"a": Block(use_c), "b": Block(use_c)})
    pair = converted(pair)

    def step(pair: Any, x: Tensor) -> Any:
        found: list[Tensor] = []

        def hook(module: nn.Module, args: Any, output: Any = None) -> None:
            found.append(pair["b"](args[0]))

        part = pair["a"].n if where == "inside" else pair["a"]
        on = bool(pair["a"]._forward_hooks)
        if order == "hook first":
            use_engine(pair, False)
        if where == "before":
            handle = part.register_forward_pre_hook(hook)
        else:
            handle = part.register_forward_hook(hook)
        use_engine(pair, on)
        y = pair["a"](x)
        handle.remove()
        return _backward([y, *found, pair["b"].n.running_mean + 0])

    alike(pair, step)


# Threads


def test_a_thread_that_fails() -> None:
    """One thread's call ends with an exception, others go on."""

    def use(m: Any, x: Tensor) -> Any:
        if threading.current_thread().name == "fails":
            raise KeyboardInterrupt
        return m.c(x)

    model = converted(nn.Sequential(Block(use))).eval()
    expected = model(image()).detach()
    found: list[Tensor] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(20):
                found.append(model(image()).detach())
        except KeyboardInterrupt as error:
            errors.append(error)

    threads = [threading.Thread(target=work, name=name) for name in ("fails", "works", "works")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 1
    assert len(found) == 40
    for y in found:
        assert torch.equal(y, expected)


def test_an_interrupted_thread_is_caught_up_with() -> None:
    def use(m: Any, x: Tensor) -> Any:
        if threading.current_thread() is not threading.main_thread():
            raise SystemExit
        return m.c(x)

    def step(model: nn.Module, x: Tensor) -> Any:
        def work() -> None:
            with pytest.raises(SystemExit):
                model(x)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        return plain_step(model, x)

    same(converted(nn.Sequential(Block(use))), image(), step)


# What is replaced


def test_functional_call() -> None:
    """With parameters and running statistics of one's own, which get the gradients and updates."""

    def step(model: nn.Module, x: Tensor) -> Any:
        own = {
            name: p.detach().mul(1.5).requires_grad_()
            for name, p in model.named_parameters()
            if not name.endswith(("values", "weight")) or p.dim() == 1
        }
        own |= {name: b + 1 for name, b in model.named_buffers() if "running" in name}
        y = functional_call(model, own, (x,))
        loss_of(y).backward()
        return [y, *(t.grad if t.requires_grad else t for t in own.values())]

    same(converted(Block(use_c)), image(), step)


def test_functional_call_with_values() -> None:
    def step(model: nn.Module, x: Tensor) -> Any:
        own = {name: p.detach().mul(1.5).requires_grad_() for name, p in model.named_parameters()}
        y = functional_call(model, own, (x,))
        loss_of(y).backward()
        return [y, *(p.grad for p in own.values())]

    alike(converted(Block(use_c)), step)


def test_functional_call_inside_a_model() -> None:
    def use(m: Any, x: Tensor) -> Any:
        own = {
            "running_mean": torch.ones(3, dtype=torch.float64),
            "running_var": torch.ones(3, dtype=torch.float64),
        }
        y = functional_call(m.n, own, (m.b(x),))
        return m.c(y), m.n(m.b(y)), own["running_mean"] + 0, own["running_var"]

    same(converted(Block(use)), image())


class Double(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


@pytest.mark.parametrize("cached", [True, False])
def test_parametrizations(cached: bool) -> None:
    def step(model: nn.Module, x: Tensor) -> Any:
        if not cached:
            return plain_step(model, x)
        with parametrize.cached():
            return plain_step(model, x)

    model = converted(Block(lambda m, x: (m.c(x), m.n(m.b(x)))))
    parametrize.register_parametrization(model.n, "weight", Double())
    parametrize.register_parametrization(model.n, "bias", Double())
    same(model, image(), step)


def test_shared_layers_and_norms() -> None:
    model = converted(Block(lambda m, x: m.c(m.b(m.n(m.b(x))))))
    model.m = model.n
    same(model, image())
    model.n.running_var = model.n.running_mean  # nonsense, and the same nonsense
    alike(model)


# Copies


def test_copies_made_in_the_middle() -> None:
    """Of a model that is being called, and of its lazy tensors."""
    copies: list[Any] = []

    def use(m: Any, x: Tensor) -> Any:
        y = m.c(x)
        assert type(y) is LazyTensor or not m._forward_hooks
        twin = copy.deepcopy(m)
        file = io.BytesIO()
        torch.save({"model": m.state_dict(), "y": y}, file)
        file.seek(0)
        saved = torch.load(file)
        copies.append(twin)
        close(saved["y"], y)
        return y, saved["model"]["n.running_mean"], twin.m.running_var + 0

    model = converted(Block(use))
    model(image())
    for twin in copies:
        assert all(type(b) is Tensor for b in twin.buffers())
        twin.use = use_c
        same(twin, image())
    same(model, image())


def test_shared_memory() -> None:
    model = converted(Block(use_c))
    model.share_memory()
    pointers = [t.data_ptr() for t in (*model.parameters(), *model.buffers())]
    same(model, image())
    assert pointers == [t.data_ptr() for t in (*model.parameters(), *model.buffers())]
    assert all(t.is_shared() for t in (*model.parameters(), *model.buffers()))


def test_functions_applied_to_all_parts() -> None:
    """``Module.apply`` in the middle, reading and resetting running statistics."""

    def visit(part: nn.Module) -> None:
        if isinstance(part, nn.BatchNorm2d):
            seen.append(float(part.running_mean.sum()))
            part.reset_running_stats()

    def use(m: Any, x: Tensor) -> Any:
        y = m.c(x)
        seen.clear()
        m.apply(visit)
        return y * sum(seen), m.n(m.b(x))

    seen: list[float] = []

    def step(model: nn.Module, x: Tensor) -> Any:
        with torch.no_grad():
            return model(x)

    same(converted(Block(use)), image(), step)


def test_other_dtypes_in_the_middle() -> None:
    def use(m: Any, x: Tensor) -> Any:
        y = m.b(x)
        z = F.relu(y.float()).double()
        return m.c(y), z, m.n.running_mean.to(torch.float32).double()

    same(converted(Block(use)), image())


def test_conversion_between_calls() -> None:
    model = converted(Block(use_c))
    model(image())
    model.float()
    y = model(image().float())
    assert y.dtype is torch.float32
    assert model.n.running_mean.dtype is torch.float32
    same(model.double(), image())
