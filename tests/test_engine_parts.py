"""The engine in parts of a converted model that are called by themselves."""

from __future__ import annotations

import collections
import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import rewire
from bodies import assert_close, grads_of, marks, normal
from rewire import use_engine
from rewire.engine import scope
from rewire.nn.layer import ConnectedLayer

pytestmark = marks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(4, 4, 3, padding=1, bias=False) for _ in range(2))
        self.bn1, self.bn2 = nn.BatchNorm2d(4), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.blocks(self.stem(x)).mean((2, 3)))
        return y


class Task(nn.Module):
    """A model inside something that calls it from a method of its own, as trainers' modules do."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Tensor, index: int = 0) -> Tensor:
        return self.net(batch).square().mean()  # type: ignore[no-any-return]


def lightning_task(net: nn.Module) -> Any:
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        training_step = Task.training_step

    return Module()


def converted(make: Callable[[nn.Module], Any] = Task) -> Any:
    torch.manual_seed(0)
    return rewire.sparsify(make(Net().double()), sparsity=0.5, weights="fresh")


def nodes(tensor: Tensor) -> collections.Counter[str]:
    """The kinds of autograd nodes behind a tensor."""
    found, rest = set(), [tensor.grad_fn]
    while rest:
        node = rest.pop()
        if node is not None and node not in found:
            found.add(node)
            rest += [following for following, _ in node.next_functions]
    return collections.Counter(node.name() for node in found)


def by_itself(net: Any) -> Any:
    """A copy of a part, as if it had been converted alone."""
    alone = copy.deepcopy(net)
    use_engine(alone, False)
    use_engine(alone)
    return alone


def same_run(net: Any, x: Tensor) -> None:
    """Values, nodes and all gradients are those of the net by itself, and the gradients its twin's."""
    alone, apart = by_itself(net), copy.deepcopy(net)
    use_engine(apart, False)
    dense = rewire.densify(copy.deepcopy(net))
    outs = [model(x) for model in (net, alone, apart, dense)]
    assert nodes(outs[0]) == nodes(outs[1])
    assert nodes(outs[0]) != nodes(outs[2])
    assert torch.equal(outs[0], outs[1])
    for model, out in zip((net, alone, apart, dense), outs, strict=True):
        model.zero_grad()
        out.square().mean().backward()
    assert_close(outs[0].detach(), outs[3].detach(), 1e-9)
    ours, theirs = grads_of(net, net), grads_of(dense, net)
    for name, right in theirs.items():
        assert right is not None
        assert_close(ours[name], right, 1e-9)  # type: ignore[arg-type]
    for mine, right in zip(net.parameters(), alone.parameters(), strict=True):
        assert torch.equal(mine.grad, right.grad)


@pytest.mark.parametrize("make", [Task, lightning_task])
def test_a_wrapper_that_calls_its_net(make: Callable[[nn.Module], Any]) -> None:
    wrapper = converted(make)
    x = normal(8, 3, 6, 6)
    same_run(wrapper.net, x)
    alone = by_itself(wrapper.net)
    loss = wrapper.training_step(x, 0)
    assert nodes(loss) == nodes(alone(x).square().mean())


@pytest.mark.parametrize("part", ["net.stem", "net.blocks", "net.blocks.0"])
def test_parts_at_any_depth(part: str) -> None:
    x = normal(8, 3 if part == "net.stem" else 4, 6, 6)
    same_run(converted().get_submodule(part), x)


def test_layers_and_parts_without_sparse_layers_are_called_as_always() -> None:
    net = converted().net
    net.extra = nn.Sequential(nn.ReLU(), nn.Sequential(nn.Identity()))
    use_engine(net)
    hooked = {name for name, part in net.named_modules() if part._forward_hooks}
    assert hooked == {"", "stem", "blocks", "blocks.0", "blocks.1"}
    use_engine(net, False)
    assert not any(part._forward_hooks for part in net.modules())


def through_pickle(part: Any) -> Any:
    return pickle.loads(pickle.dumps(part))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, through_pickle])
def test_copies_of_a_part_run_themselves(duplicate: Callable[[Any], Any]) -> None:
    blocks = converted().net.blocks
    copied = duplicate(blocks)
    for parameter in copied.parameters():
        parameter.data.mul_(1.5)
    x = normal(8, 4, 6, 6)
    assert not torch.equal(copied(x), blocks(x))
    same_run(copied, x)


def test_hooks_of_parts_are_called_once() -> None:
    net = converted().net
    seen: list[str] = []
    for name, part in net.named_modules():
        part.register_forward_pre_hook(
            lambda module, args, name=name: seen.append(f"before {name}")
        )
        part.register_forward_hook(
            lambda module, args, out, name=name: seen.append(f"after {name}")
        )
    net(normal(8, 3, 6, 6))
    expected = collections.Counter(
        f"{when} {name}" for name, _ in net.named_modules() for when in ("before", "after")
    )
    assert collections.Counter(seen) == expected


def test_an_error_in_a_part_ends_its_run() -> None:
    net = converted().net
    with pytest.raises(ValueError, match="expected an input"):
        net.blocks(normal(8, 3, 6, 6))
    assert not scope.active()
    same_run(net, normal(8, 3, 6, 6))


class Tracer(fx.Tracer):
    """Sparse layers are called, not looked into."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, ConnectedLayer) or super().is_leaf_module(m, module_qualified_name)


def test_a_traced_model() -> None:
    net = converted().net.eval()
    traced = fx.GraphModule(net, Tracer().trace(net))
    x = normal(8, 3, 6, 6)
    assert_close(traced(x).detach(), net(x).detach(), 1e-9)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_wrapper() -> None:
    net = converted().net
    dense = rewire.densify(copy.deepcopy(net))
    torch.compiler.reset()
    try:
        compiled = torch.compile(net, backend="aot_eager")
    except RuntimeError as error:
        pytest.skip(f"torch.compile is unavailable: {error}")
    x = normal(8, 3, 6, 6)
    out, right = compiled(x), dense(x)
    assert_close(out.detach(), right.detach(), 1e-9)
    for model, y in ((net, out), (dense, right)):
        model.zero_grad()
        y.square().mean().backward()
    for name, grad in grads_of(dense, net).items():
        assert_close(grads_of(net, net)[name], grad, 1e-9)  # type: ignore[arg-type]
