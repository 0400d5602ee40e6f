"""Recorded values that are read by code which the engine does not see."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from engine_models import (
    Block,
    Identity,
    Rectify,
    Reverse,
    Square,
    Triple,
    Untouched,
    close,
    converted,
    image,
    loss_of,
    same,
)
from rewire.engine import use_engine
from rewire.engine.lazy import LazyTensor


@torch.jit.script
def scripted(x: Tensor) -> Tensor:
    return torch.relu(x) * 2


@torch.jit.script
def scripted_in_place(x: Tensor) -> Tensor:
    return x.relu_() * 2


def _reentrant(m: Any, x: Tensor) -> Tensor:
    return checkpoint(m.c, x, use_reentrant=True)


def _recomputed(m: Any, x: Tensor) -> Tensor:
    return checkpoint(lambda y: m.c(torch.relu(m.n(y))), x, use_reentrant=False)


def _in_place_sum(m: Any, x: Tensor) -> Tensor:
    y = m.b(x)
    y += x
    return m.c(F.relu(y, inplace=True))


def _jit_after_view(m: Any, x: Tensor) -> Tensor:
    return scripted(x.flatten(1))


def _no_grad_inside(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = m.b(x).abs().mean()
    return m.c(x) * scale


def _grad_inside_function(m: Any, x: Tensor) -> Tensor:
    return Inner.apply(x, m)


class Inner(torch.autograd.Function):
    """Builds a graph of its own inside, with layers of the model."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, m: Any) -> Tensor:
        with torch.enable_grad():
            ctx.x = x.detach().requires_grad_()
            ctx.y = m.c(F.relu(m.b(ctx.x)))
        ctx.parameters = [*m.c.parameters(), *m.b.parameters()]
        return ctx.y.detach()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        found = torch.autograd.grad(ctx.y, [ctx.x, *ctx.parameters], dy)
        for parameter, grad in zip(ctx.parameters, found[1:], strict=True):
            parameter.grad = grad if parameter.grad is None else parameter.grad + grad
        return found[0], None


class Through(torch.autograd.Function):
    """Returns what was recorded inside it, as its output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, m: Any) -> Tensor:
        with torch.enable_grad():
            return F.relu(m.b(x.detach()))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return 5 * dy, None


CONSUMERS = {
    "none": lambda m, x: m.c(x),
    "function": lambda m, x: m.c(Reverse.apply(x)),
    "function and layer": lambda m, x: m.c(Reverse.apply(x)) + m.c(x),
    "layer and function": lambda m, x: m.c(x) + m.c(Reverse.apply(x)),
    "function of the input itself": lambda m, x: m.c(Identity.apply(x)) + m.c(x),
    "function that saves": lambda m, x: m.c(Square.apply(x)) + m.c(F.relu(x)),
    "function that looks later": lambda m, x: (
        m.c(x) * Untouched.apply(x).exp() + Untouched.apply(x)
    ),
    "function in place": lambda m, x: m.c(Rectify.apply(m.b(x))),
    "function in place, read again": lambda m, x: _twice_rectified(m, m.b(x)),
    "function of a rectified": lambda m, x: m.c(Reverse.apply(F.relu(x, inplace=True))),
    "function of a function": lambda m, x: m.c(Reverse.apply(Square.apply(Reverse.apply(x)))),
    "function builds a graph": _grad_inside_function,
    "function returns a recorded one": lambda m, x: m.c(Through.apply(x, m)),
    "script": lambda m, x: m.c(scripted(x)) + x.mean(),
    "script in place": lambda m, x: _script_in_place(m, m.b(x)),
    "function of an untouched input": lambda m, x: m.c(Same.apply(x)) + m.c(x),
    "script of a view": _jit_after_view,
    "script beside views": lambda m, x: _beside_view(m, x),
    "reentrant checkpoint": _reentrant,
    "checkpoint": _recomputed,
    "reentrant checkpoint and layer": lambda m, x: _reentrant(m, x) + m.c(x),
    "checkpoint and layer": lambda m, x: _recomputed(m, x) + m.c(x),
    "sum in place": _in_place_sum,
    "silu": lambda m, x: m.c(F.silu(x)) + m.c(x),
    "cat": lambda m, x: torch.cat([m.c(x), m.c(F.relu(x))], 1),
    "operator": lambda m, x: m.c(torch.ops.aten.tanh(x)) + m.c(x),
    "gradient mode": _no_grad_inside,
    "func": lambda m, x: m.c(torch.func.vmap(torch.sin)(x)) + m.c(x),
    "numpy": lambda m, x: m.c(x) * float(x.detach().numpy().sum()),
}


def _twice_rectified(m: Any, x: Tensor) -> Tensor:
    y = Rectify.apply(x)
    return m.c(y) + m.c(x)  # the same tensor


class Same(torch.autograd.Function):
    """Returns its input untouched: torch makes a view of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return 2 * dy


def _beside_view(m: Any, x: Tensor) -> Any:
    y = m.b(x).contiguous()
    v, w = y.flatten(1), y.view(4, 3, -1)
    del y
    z = scripted(m.c(x))
    w.mul_(2)
    return z, (v**2).mean(), v[:, 0]


def _script_in_place(m: Any, x: Tensor) -> Tensor:
    y = scripted_in_place(x)
    return m.c(y) + m.c(x)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", CONSUMERS)
def test_consumers(name: str, training: bool) -> None:
    same(converted(Block(CONSUMERS[name])).train(training), image())


_WARNS = ("reentrant checkpoint", "reentrant checkpoint and layer")  # of what it is there for


@pytest.mark.parametrize("name", CONSUMERS)
def test_consumers_without_gradients(name: str) -> None:
    model = converted(Block(CONSUMERS[name])).eval()

    def step(m: nn.Module, x: Tensor) -> Any:
        with torch.no_grad():
            return m(x)

    if name not in ("function builds a graph", "function returns a recorded one", *_WARNS):
        same(model, image(), step)


def test_a_consumer_in_a_sequence_of_blocks() -> None:
    model = nn.Sequential(
        Block(lambda m, x: Reverse.apply(x)), Block(lambda m, x: x), Block(lambda m, x: m.c(x))
    )
    same(converted(model), image())


@pytest.mark.parametrize("kind", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_backward_hooks_on_modules_turn_it_off(kind: str) -> None:
    model = converted(Block(lambda m, x: m.c(F.relu(x, inplace=True))))
    kinds, seen = [], []
    model.b.register_forward_hook(lambda m, args, y: kinds.append(type(y)))
    getattr(model.c, kind)(lambda m, *grads: seen.append(grads[0][0].clone()))
    x = image()
    loss_of(model(x)).backward()
    use_engine(model, False)
    loss_of(model(x)).backward()
    assert LazyTensor not in kinds
    assert len(seen) == 2
    close(seen[0], seen[1])
    same(model, x)


def test_backward_hooks_on_a_new_part_are_right() -> None:
    """The engine looked for hooks before there were any."""
    model = converted(Block(lambda m, x: m.d(m.c(F.relu(x)))))
    model.d = nn.Identity()
    model(image())
    model.d = nn.Conv2d(4, 4, 1).double()
    model.d.register_full_backward_hook(lambda m, *grads: None)
    same(model, image())


def test_hooks_see_the_sum_of_all_gradients() -> None:
    """Those that come by way of C++ code, too, and those of recorded consumers."""
    seen: dict[bool, list[Tensor]] = {}

    def use(m: Any, x: Tensor) -> Tensor:
        y = m.c(x)
        z = Reverse.apply(x)
        x.register_hook(lambda g: seen.setdefault(m.on, []).append(g) or 2 * g)
        return y.mean() + (z**3).mean() + (x**2).mean()

    model = converted(Block(use))
    for on in (True, False):
        model.on = on
        use_engine(model, on)
        model.zero_grad()
        model(image()).backward()
        seen[on].append(model.a.values.grad.clone())
    assert len(seen[True]) == len(seen[False]) == 2
    for a, b in zip(seen[True], seen[False], strict=True):
        close(a, b)


@pytest.mark.parametrize("use", [Reverse.apply, Square.apply, scripted])
def test_gradients_of_what_was_kept_and_read_by_all(use: Any) -> None:
    def body(m: Any, x: Tensor) -> Any:
        v = F.relu(x)
        return x, v, use(v), m.c(v)

    model = converted(Block(body))
    found = []
    for on in (True, False):
        use_engine(model, on)
        x, v, y, z = model(image())
        x.retain_grad()
        v.retain_grad()
        ((y**2).sum() + (z**2).sum() + v.sum()).backward()
        found.append((x.grad, v.grad))
        again = model(image())
        found[-1] += torch.autograd.grad((again[2] ** 2).sum() + again[3].sum(), again[:2])
    for a, b in zip(*found, strict=True):
        close(a, b)


def test_in_place_on_what_c_code_saved() -> None:
    def use(m: Any, x: Tensor) -> Tensor:
        y = Square.apply(x)
        x.mul_(2)
        return y + x

    for on in (True, False):
        model = converted(Block(use), engine=on)
        y = model(image())
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_in_place_after_c_code_read() -> None:
    def use(m: Any, x: Tensor) -> Tensor:
        y = Reverse.apply(x.clone())
        z = Untouched.apply(x.detach()) + Triple.apply(x)
        x.mul_(2)
        x += m.b(y)
        return m.c(x) + z.mean()

    same(converted(Block(use)), image())


def test_in_place_on_a_linked_view_raises() -> None:
    def use(m: Any, x: Tensor) -> Tensor:
        v = x.flatten(1)
        Reverse.apply(v)
        x.mul_(2)
        return v

    with pytest.raises(RuntimeError, match="shares its memory with a view"):
        converted(Block(use))(image())


def test_in_place_on_the_other_view_raises() -> None:
    def use(m: Any, x: Tensor) -> Tensor:
        y = m.b(x)
        v, w = y.flatten(1), y.view(4, 3, -1)
        del y
        Reverse.apply(v)
        w.mul_(2)
        return v

    with pytest.raises(RuntimeError, match="shares its memory with a view"):
        converted(Block(use))(image())


def test_c_code_may_change_parameters_later_loudly() -> None:
    model = converted(Block(lambda m, x: Reverse.apply(x)))
    y = model(image())
    with torch.no_grad():
        model.b.values.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_copies_of_linked_tensors() -> None:
    def use(m: Any, x: Tensor) -> Any:
        with torch.no_grad():
            y = m.c(x.detach())
        return y, x, Reverse.apply(x)

    model = converted(Block(use))
    with torch.no_grad():
        _y, x, z = model(image())
        assert torch.equal(copy.deepcopy(x), x)
        assert repr(x).startswith("tensor(")
        assert torch.equal(torch.from_numpy(x.numpy()), z)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_compiled_part() -> None:
    model = converted(Block(lambda m, x: m.c(m.compiled(x)) + x.mean()))
    model.compiled = torch.compile(lambda x: torch.tanh(x) * 2, backend="eager")
    same_without_copy(model)


def same_without_copy(model: Any) -> None:
    found = []
    for on in (True, False):
        use_engine(model, on)
        model.zero_grad()
        y = model(image())
        loss_of(y).backward()
        found.append([y, *(p.grad.clone() for p in model.parameters())])
    for a, b in zip(*found, strict=True):
        close(a, b)
