"""Hooks of converted models see what those of plain models see."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor

from bodies import Body, Net, assert_close, loss_of, marks, normal, plain, tensors_in
from rewire import use_engine

pytestmark = marks


def hooked(register: Callable[[Any, list[Any]], None], body: Body) -> tuple[list[Any], list[Any]]:
    """What hooks have seen, in the converted and in the plain model, after one step of each."""
    model = Net(body)
    seen = []
    for engine in (True, False):
        mine: list[Any] = []
        m = copy.deepcopy(model) if engine else plain(model)
        if engine:
            use_engine(m)
        register(m, mine)
        x = normal(8, 3, 6, 6).requires_grad_()
        loss = loss_of(tensors_in(m(x)))
        assert loss is not None
        loss.backward()
        seen.append([*mine, x.grad, m.bn.weight.grad, m.bn2.weight.grad])
    return seen[0], seen[1]


def on_output(register: Callable[[Tensor, list[Any]], Any]) -> Callable[[Any, list[Any]], None]:
    """A forward hook of the first batch norm."""

    def attach(model: Any, seen: list[Any]) -> None:
        model.bn.register_forward_hook(lambda module, args, output: register(output, seen))

    return attach


HOOKS: dict[str, Callable[[Any, list[Any]], None]] = {
    "keeps the output": on_output(lambda y, seen: seen.append(y)),
    "keeps a detached output": on_output(lambda y, seen: seen.append(y.detach())),
    "keeps a copy": on_output(lambda y, seen: seen.append(y.detach().clone())),
    "keeps the mean": on_output(lambda y, seen: seen.append(y.mean())),
    "scales the output": on_output(lambda y, seen: y * 2),
    "changes the output in place": on_output(lambda y, seen: y.mul_(2)),
    "changes the output in place, returns nothing": on_output(
        lambda y, seen: seen.append(float(y.mul_(2).detach().sum()))
    ),
    "sees the gradient": on_output(
        lambda y, seen: seen.append(y.register_hook(lambda g: seen.append(g))) and None
    ),
    "changes the gradient": on_output(
        lambda y, seen: seen.append(y.register_hook(lambda g: 2 * g)) and None
    ),
    "module gradient": lambda m, seen: m.bn.register_full_backward_hook(
        lambda module, before, after: seen.extend([*before, *after])
    ),
    "module gradient of the rectifier": lambda m, seen: m.relu.register_full_backward_hook(
        lambda module, before, after: seen.extend([*before, *after])
    ),
    "module gradient of the whole": lambda m, seen: m.register_full_backward_hook(
        lambda module, before, after: seen.extend(after)
    ),
    "input of the rectifier": lambda m, seen: m.relu.register_forward_pre_hook(
        lambda module, args: seen.append(args[0].detach().clone())
    ),
    "changes the input of the rectifier": lambda m, seen: m.relu.register_forward_pre_hook(
        lambda module, args: (args[0] - 0.3,)
    ),
    "output of the whole": lambda m, seen: m.register_forward_hook(
        lambda module, args, output: seen.append(output.detach().clone())
    ),
}
HOOKS |= {
    "sees the gradient of the layer": lambda m, seen: m.conv.register_forward_hook(
        lambda module, args, output: (
            seen.append(output.register_hook(lambda g: seen.append(g))) and None
        )
    ),
    "module gradient of the layer": lambda m, seen: m.conv.register_full_backward_hook(
        lambda module, before, after: seen.extend(after)
    ),
}
HOOKED: dict[str, Body] = {
    "rectified": lambda m, x: m.relu(m.bn(m.conv(x))),
    "residual": lambda m, x: m.relu(m.bn(m.conv(x)) + m.conv(x)),
    "plain": lambda m, x: m.conv2(m.relu(m.bn(m.conv(x)) * 1)),
    "without a norm": lambda m, x: m.bn2(m.relu(m.conv(x))) + m.bn(m.relu(m.conv(2 * x))),
}


@pytest.mark.parametrize("body", HOOKED)
@pytest.mark.parametrize("hook", HOOKS)
def test_hooks(hook: str, body: str) -> None:
    ours, theirs = hooked(HOOKS[hook], HOOKED[body])
    assert len(ours) == len(theirs)
    for mine, right in zip(ours, theirs, strict=True):
        if isinstance(right, Tensor):
            assert_close(mine.detach().clone(), right.detach(), 1e-9)
        elif isinstance(right, float):
            assert mine == pytest.approx(right)
        else:
            assert type(mine) is type(right)


def test_a_gradient_kept_at_the_output() -> None:
    def retained(m: Any, x: Tensor) -> Tensor:
        y = m.bn(m.conv(x))
        y.retain_grad()
        m.seen.append(y)
        return F.relu(y)

    model = Net(retained)
    reference = plain(model)
    use_engine(model)
    for m in (model, reference):
        m(normal(8, 3, 6, 6)).square().sum().backward()
    assert reference.seen[0].grad is not None
    assert model.seen[0].grad is not None
    assert_close(model.seen[0].grad, reference.seen[0].grad, 1e-9)
