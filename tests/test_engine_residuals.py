"""Residual sums: their gradients are those of the layers one by one, whoever reads the sum."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bodies import Doubled, assert_close, loss_of, marks, normal, tensors_in
from rewire import SparseConv2d, use_engine

pytestmark = marks
Body = Callable[[Any, Tensor], Any]
Run = Callable[[Any, Tensor], Any]


def conv(generator: torch.Generator, kernel: int = 3, **sizes: int) -> SparseConv2d:
    return SparseConv2d(6, 6, kernel, **sizes, bias=False, sparsity=0.5, generator=generator)


class Net(nn.Module):
    """A first unit, convolutions and batch norms; what is done with them is the body."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.stem = SparseConv2d(3, 6, 3, padding=1, sparsity=0.5, generator=generator)
        self.norm = nn.BatchNorm2d(6)
        self.convs = nn.ModuleList(conv(generator, padding=1) for _ in range(7))
        self.norms = nn.ModuleList(nn.BatchNorm2d(6) for _ in range(7))
        self.chain = nn.Sequential(
            *(conv(generator, padding=1), nn.BatchNorm2d(6), nn.ReLU()),
            *(conv(generator, padding=1), nn.BatchNorm2d(6)),
        )
        self.smaller = conv(generator, 1, stride=2)
        self.in_place = nn.ReLU(inplace=True)
        for i, part in enumerate(self.modules()):
            if isinstance(part, nn.BatchNorm2d):
                part.weight.data, part.bias.data = normal(6, seed=i), normal(6, seed=50 + i)
        self.body = body
        self.double()

    def forward(self, x: Tensor) -> Any:
        return self.body(self, F.relu(self.norm(self.stem(x))))

    def total(self, i: int, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """What a block rectifies."""
        y: Tensor = self.norms[i](self.convs[i](x))
        return y + (x if residual is None else residual)

    def block(self, i: int, x: Tensor) -> Tensor:
        return F.relu(self.total(i, x))


def backward(model: Any, x: Tensor) -> None:
    loss = loss_of(tensors_in(model(x)))
    assert loss is not None
    loss.backward()


def same_as_apart(
    body: Body, run: Run = backward, prepare: Callable[[Net], Any] = lambda net: None
) -> None:
    """All gradients, and what ``run`` returns, are those of the layers one by one."""
    model = Net(body)
    prepare(model)
    use_engine(model)
    apart = copy.deepcopy(model)
    use_engine(apart, False)
    seen: list[list[Tensor | None]] = []
    for net in (model, apart):
        x = normal(8, 3, 6, 6).requires_grad_()
        found = run(net, x) or ()
        seen.append([x.grad, *(p.grad for p in net.parameters()), *found])
    for ours, right in zip(*seen, strict=True):
        assert (ours is None) == (right is None)
        if ours is not None and right is not None:
            assert_close(ours, right, 1e-9)


def in_a_row(m: Any, x: Tensor) -> Tensor:
    z: Tensor = m.block(2, m.block(1, m.block(0, x)))
    return z


def added_on_the_left(m: Any, x: Tensor) -> Tensor:
    for i in range(3):
        x = F.relu(x + m.norms[i](m.convs[i](x)))
    return x


def added_in_place(m: Any, x: Tensor) -> Tensor:
    for i in range(3):
        y = m.norms[i](m.convs[i](x))
        y += x
        x = m.in_place(y)
    return x


def other_way(m: Any, x: Tensor) -> Tensor:
    """A layer that reads the sum, and the next sum of something else."""
    z = m.block(0, x)
    side = F.relu(m.convs[1](z))
    return side, F.relu(m.total(2, x, z))  # type: ignore[return-value]


def thin(z: Tensor) -> Tensor:
    return F.pad(z[:, :, ::2, ::2], (0, 0, 0, 0, 0, 0))


def shortcut(m: Any, z: Tensor) -> Tensor:
    return F.relu(m.norms[1](m.smaller(z)) + thin(z))


USED: dict[str, Body] = {
    "in a row": in_a_row,
    "in place": added_in_place,
    "on the left": added_on_the_left,
    "a chain": lambda m, x: (z := m.block(0, x), F.relu(m.chain(z) + z))[1],
    "no next sum": lambda m, x: m.convs[1](m.block(0, x)),
    "a shortcut": lambda m, x: shortcut(m, m.block(0, x)),
    "fewer positions": lambda m, x: m.smaller(m.block(0, x)),
    "another way": other_way,
    "not rectified": lambda m, x: m.convs[2](m.total(1, m.block(0, x))),
    "a projection": lambda m, x: m.block(3, F.relu(m.total(1, x, m.norms[2](m.convs[2](x))))),
    "of what was not rectified": lambda m, x: m.block(1, F.relu(m.total(0, x))),
    "by a sum alone": lambda m, x: F.relu(m.norms[1](m.convs[1](x)) + m.block(0, x)),
    "by nobody": lambda m, x: (m.block(0, x), m.norms[1](m.convs[1](x)))[1],
    "pooled": lambda m, x: F.max_pool2d(m.block(1, m.block(0, x)), 2),
    "pooled in between": lambda m, x: m.block(1, F.max_pool2d(m.block(0, x), 3, 1, 1)),
    "pooled smaller": lambda m, x: m.block(1, F.max_pool2d(m.block(0, x), 2)),
    "with itself": lambda m, x: (z := m.block(0, x), F.relu(m.norms[1](z) + z))[1],
}


@pytest.mark.parametrize("name", USED)
def test_sums(name: str) -> None:
    same_as_apart(USED[name])


def unrecorded(function: Callable[[], Any]) -> Any:
    with torch.no_grad():
        return function()


# What is done with the sum z of a block.
ALSO_READ: dict[str, Callable[[Any, Tensor], Any]] = {
    "two convolutions": lambda m, z: m.convs[1](z) * m.convs[2](z),
    "a chain and a convolution": lambda m, z: m.chain(z) * m.convs[2](z),
    "a part": lambda m, z: (m.block(1, z), z[:, :2]),
    "a shortcut before": lambda m, z: (side := thin(z), F.relu(m.norms[1](m.smaller(z)) + side))[1],
    "two shortcuts": lambda m, z: shortcut(m, z) * thin(z),
    "a shortcut and a sum": lambda m, z: (shortcut(m, z), m.block(2, z)),
    "a mean before": lambda m, z: (z.mean(), m.block(1, z)),
    "returned": lambda m, z: (m.block(1, z), z),
    "detached": lambda m, z: m.block(1, z) * z.detach(),
    "not recorded": lambda m, z: (unrecorded(lambda: m.convs[2](z)), m.block(1, z))[1],
    "a sum not recorded": lambda m, z: (unrecorded(lambda: m.total(2, z)), m.block(1, z))[1],
    "a function": lambda m, z: m.block(1, z) * Doubled.apply(z),
    "two sums": lambda m, z: F.relu(m.total(2, m.block(1, z), z)),
    "added twice": lambda m, z: F.relu(m.total(1, z) + z),
    "checkpointed": lambda m, z: m.convs[1](z) * checkpoint(m.chain, z, use_reentrant=True),
    "seen": lambda m, z: (m.block(1, z), z * 2, z),
    "seen first": lambda m, z: (z.sigmoid(), m.block(1, z)),
    "hook after": lambda m, z: (y := m.block(1, z), z.register_hook(lambda g: g * 2), y)[2],
    "hook": lambda m, z: (z.register_hook(lambda g: g * 2), m.block(1, z))[1],
}


@pytest.mark.parametrize("name", ALSO_READ)
def test_what_something_else_reads_too(name: str) -> None:
    same_as_apart(lambda m, x: ALSO_READ[name](m, m.block(0, x)))


def conv_used_twice(m: Any, z: Tensor, use: Callable[[Tensor], Tensor]) -> Any:
    y = m.convs[1](z)
    return F.relu(y), use(y)


def sum_used_twice(m: Any, z: Tensor, use: Callable[[Tensor], Tensor]) -> Any:
    total = m.total(1, z)
    return m.block(2, F.relu(total)), use(total)


@pytest.mark.parametrize("read", [conv_used_twice, sum_used_twice])
@pytest.mark.parametrize("use", [Tensor.neg, F.relu, Doubled.apply])
def test_a_reader_that_is_computed_twice(read: Any, use: Callable[[Tensor], Tensor]) -> None:
    """Rectified, and once more for another use: then the sum has two readers."""
    same_as_apart(lambda m, x: read(m, m.block(0, x), use))


def test_a_function_of_a_reader() -> None:
    """Its gradient comes by a way of its own."""

    def body(m: Any, x: Tensor) -> Tensor:
        z = m.block(0, x)
        y = m.convs[1](z)
        return F.relu(m.norms[1](y) + z) * Doubled.apply(y)

    same_as_apart(body)


FROZEN: list[Callable[[Any], list[Any]]] = [
    lambda m: [*m.convs],
    lambda m: [*m.norms],
    lambda m: [m.convs[1], m.norms[0]],
    lambda m: [m.stem, m.norm, m.convs[0], m.norms[0]],
    lambda m: [m.convs[0].values, m.norms[1].weight, m.norms[0].bias],
]


@pytest.mark.parametrize("frozen", FROZEN)
@pytest.mark.parametrize("inputs", [True, False])
def test_frozen_parts(frozen: Callable[[Any], list[Any]], inputs: bool) -> None:
    same_as_apart(
        in_a_row,
        lambda m, x: backward(m, x if inputs else x.detach()),
        lambda m: [part.requires_grad_(False) for part in frozen(m)],
    )


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_batch_norm_in_eval_mode(which: int) -> None:
    same_as_apart(in_a_row, prepare=lambda m: m.norms[which].eval())


def two_losses(m: Any, x: Tensor) -> None:
    out = m(x)
    out.square().sum().backward(retain_graph=True)
    out.sin().sum().backward()


def parts_then_all(m: Any, x: Tensor) -> list[Tensor]:
    loss = m(x).square().sum()
    wanted = [m.convs[2].values, m.norms[1].weight, x]
    found = [torch.autograd.grad(loss, p, retain_graph=True)[0] for p in wanted]
    loss.backward()
    return found


def batches(m: Any, x: Tensor) -> None:
    outs = [m(x[:count]) for count in (8, 3, 4, 8)]
    for out in outs:
        out.square().sum().backward()


@pytest.mark.parametrize("run", [two_losses, parts_then_all, batches])
def test_several_backward_passes(run: Run) -> None:
    same_as_apart(in_a_row, run)


@pytest.mark.parametrize("last", [0, 1])
def test_a_pass_that_ended_before_the_sum(last: int) -> None:
    """What its layer has computed is of no use to the next pass, which may not even come by there."""

    def run(m: Any, x: Tensor) -> Any:
        outs = m(x)
        wanted = [m.convs[1].values, m.convs[2].values]
        loss = sum(out.square().sum() for out in outs)
        found = torch.autograd.grad(loss, wanted, retain_graph=True)  # type: ignore[arg-type]
        outs[last].sum().backward()
        return found

    same_as_apart(other_way, run)


def test_a_hook_between_the_layer_and_the_next_sum() -> None:
    """It sees the gradients of both."""

    def body(m: Any, x: Tensor) -> Tensor:
        z = m.block(0, x)
        y = m.convs[1](z)
        z.register_hook(lambda g: g * 3)
        return F.relu(m.norms[1](y) + z)

    same_as_apart(body)


def test_probes_see_whole_gradients() -> None:
    def run(m: Any, x: Tensor) -> list[Tensor]:
        seen: list[Tensor] = []
        for layer in m.convs[:2]:
            layer.probe = lambda conv, x, dy: seen.extend((x.clone(), dy.clone()))
        backward(m, x)
        return seen

    same_as_apart(in_a_row, run)
