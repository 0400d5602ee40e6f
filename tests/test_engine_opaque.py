"""Residual sums and other lazy results that are read by code which torch does not show us: autograd
functions, scripted functions, full backward hooks, activation checkpointing. Values and all gradients are
those of the densified twin."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rewire
from bodies import Body, Doubled, grads_of, loss_of, marks, normal, tensors_in

pytestmark = marks


class Reverse(torch.autograd.Function):
    """Gradient reversal."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return -2 * dy


class Square(torch.autograd.Function):
    """Reads its input again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return 2 * ctx.saved_tensors[0] * dy


class Late(torch.autograd.Function):
    """Reads its input in the backward pass alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.ones(x.shape, dtype=x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return ctx.saved_tensors[0] * dy


class Halve(torch.autograd.Function):
    """Changes its input in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(0.5)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return 0.5 * dy


@torch.jit.script
def scripted(x: Tensor) -> Tensor:
    return x * 3 + x.sin()


@torch.jit.script
def scripted_in_place(x: Tensor) -> Tensor:
    return x.mul_(2).add_(1)


def full_hook(m: Any, z: Tensor) -> Tensor:
    return m.watched(z)


def pre_hook(m: Any, z: Tensor) -> Tensor:
    return m.prewatched(z)


READERS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "plain": lambda m, z: m.c(z),
    "scaled": lambda m, z: m.c(z * 2),
    "function": lambda m, z: m.c(Doubled.apply(z)),
    "reversal": lambda m, z: m.c(Reverse.apply(z)),
    "saving function": lambda m, z: m.c(Square.apply(z)),
    "late function": lambda m, z: m.c(Late.apply(z)),
    "in-place function": lambda m, z: m.c(Halve.apply(z)),
    "script": lambda m, z: m.c(scripted(z)),
    "in-place script": lambda m, z: m.c(scripted_in_place(z)),
    "full backward hook": full_hook,
    "full backward pre-hook": pre_hook,
    "reentrant checkpoint": lambda m, z: checkpoint(m.c, z, use_reentrant=True),
    "non-reentrant checkpoint": lambda m, z: checkpoint(m.c, z, use_reentrant=False),
    "reentrant checkpoint of a block": lambda m, z: checkpoint(m.block, z, use_reentrant=True),
    "non-reentrant checkpoint of a block": (
        lambda m, z: checkpoint(m.block, z, use_reentrant=False)
    ),
    "reentrant checkpoint of a ReLU": lambda m, z: checkpoint(F.relu, z, use_reentrant=True),
    "non-reentrant checkpoint of a ReLU": lambda m, z: checkpoint(F.relu, z, use_reentrant=False),
    "non-reentrant checkpoint of a sum": (
        lambda m, z: checkpoint(lambda t: m.c(t) + t, z, use_reentrant=False)
    ),
    "non-reentrant checkpoint of a sequence": (
        lambda m, z: checkpoint(m.sequence, z, use_reentrant=False)
    ),
}


def accumulated(m: Any, x: Tensor) -> Tensor:
    y = m.bn(m.b(x))
    y += x
    return y


def strided(m: Any, x: Tensor) -> Tensor:
    return m.bn(m.s(x)) + F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 0, 0))


SUMS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "residual": lambda m, x: m.bn(m.b(x)) + x,
    "on the left": lambda m, x: x + m.bn(m.b(x)),
    "in place": accumulated,
    "projection": lambda m, x: m.bn(m.b(x)) + m.bn2(m.p(x)),
    "of a sum": lambda m, x: m.bn2(m.p(z := F.relu(m.bn(m.b(x)) + x))) + z,
    "strided shortcut": strided,
    "convolution": lambda m, x: m.b(x) + x,
    "batch norm": lambda m, x: m.bn(m.b(x)),
    "convolution alone": lambda m, x: m.b(x),
    "strided slice": lambda m, x: (m.bn(m.b(x)) + x)[:, :, ::2, ::2],
    "pooled": lambda m, x: F.max_pool2d(m.bn(m.b(x)) + x, 2),
}

RELUS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda z: z,
    "in place": F.relu_,
    "out of place": F.relu,
}


def changed_after(m: Any, z: Tensor, reader: Any) -> Any:
    out = reader(m, z)
    return out, m.c2(F.relu_(z))


def scaled_after(m: Any, z: Tensor, reader: Any) -> Any:
    out = reader(m, z)
    z.mul_(2)
    return out, m.c2(z)


def changed_before(m: Any, z: Tensor, reader: Any) -> Any:
    z.mul_(2)
    return reader(m, z)


def added_before(m: Any, z: Tensor, reader: Any) -> Any:
    z += m.shift
    return reader(m, z), m.c2(z)


# Who else reads the sum, before and after.
USES: dict[str, Callable[[Any, Tensor, Any], Any]] = {
    "alone": lambda m, z, reader: reader(m, z),
    "read before": lambda m, z, reader: (m.c2(z), reader(m, z)),
    "read after": lambda m, z, reader: (reader(m, z), m.c2(z)),
    "a sum after": lambda m, z, reader: (reader(m, z), F.relu(m.bn3(m.c2(z)) + z)),
    "a sum before": lambda m, z, reader: (F.relu(m.bn3(m.c2(z)) + z), reader(m, z)),
    "a mean before": lambda m, z, reader: (z.mean(), reader(m, z)),
    "a ReLU before": lambda m, z, reader: (F.relu(z), reader(m, z)),
    "returned": lambda m, z, reader: (reader(m, z), z),
    "changed by a ReLU after": changed_after,
    "changed after": scaled_after,
    "changed before": changed_before,
    "added to before": added_before,
}


class Net(nn.Module):
    body: Body
    initial: dict[str, Tensor]

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        for name in ("b", "p", "c", "c2", "watched", "prewatched"):
            setattr(self, name, nn.Conv2d(4, 4, 3, padding=1, bias="watched" in name))
        self.s = nn.Conv2d(4, 4, 1, stride=2, bias=False)
        for name in ("bn0", "bn", "bn2", "bn3", "bn4"):
            setattr(self, name, nn.BatchNorm2d(4))
        self.sequence = nn.Sequential(
            *(nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU()),
            nn.Conv2d(4, 4, 3, padding=1),
        )
        self.shift = nn.Parameter(torch.randn(4, 1, 1))
        for part in self.modules():
            if isinstance(part, nn.BatchNorm2d):
                nn.init.normal_(part.weight)
                nn.init.normal_(part.bias)
                nn.init.normal_(part.running_mean)
        self.double()

    def watch(self) -> Net:
        self.initial = copy.deepcopy(self.state_dict())
        self.watched.register_full_backward_hook(lambda *_: None)
        self.prewatched.register_full_backward_pre_hook(lambda *_: None)
        return self

    def block(self, z: Tensor) -> Tensor:
        y: Tensor = self.bn4(self.c(z))
        return F.relu(y + z)

    def forward(self, x: Tensor) -> Any:
        return self.body(self, F.relu(self.bn0(self.a(x))))


@cache
def _twins() -> tuple[Net, Net]:
    sparse = rewire.sparsify(Net(), sparsity=0.4, weights="fresh")
    return sparse.watch(), rewire.densify(copy.deepcopy(sparse)).watch()


def twins(body: Body, training: bool = True) -> tuple[Net, Net]:
    """A converted model with this body and its dense twin, the same ones each time."""
    for net in _twins():
        net.body = body
        net.load_state_dict(net.initial)
        net.train(training).zero_grad()
    return _twins()


def relative(ours: Tensor, right: Tensor) -> float:
    if right.numel() == 0:
        return 0.0
    scale = max(float(right.abs().max()), 1e-3)  # a bias before a batch norm has no gradient
    return float((ours - right).abs().max()) / scale


def backward(net: Net, x: Tensor) -> list[Tensor]:
    found = tensors_in(net(x))
    loss = loss_of(found)
    assert loss is not None
    loss.backward()
    return found


def error(
    body: Body,
    training: bool = True,
    batch: int = 8,
    run: Callable[[Net, Tensor], list[Tensor]] = backward,
) -> float | None:
    """The largest relative error of outputs, gradients and buffers; None where dense raises."""
    sparse, dense = twins(body, training)
    x, like = (normal(batch, 3, 4, 4).requires_grad_() for _ in range(2))
    try:
        expected = run(dense, like)
    except RuntimeError:
        return None
    found = run(sparse, x)
    pairs = list(zip(found, expected, strict=True))
    ours, theirs = grads_of(sparse, sparse), grads_of(dense, sparse)
    ours |= {"input": x.grad, "shift": sparse.shift.grad}
    theirs |= {"input": like.grad, "shift": dense.shift.grad}
    for name, right in theirs.items():
        mine = ours[name]
        if right is None or mine is None:
            assert mine is None or not mine.any(), name
            assert right is None or not right.any(), name
        else:
            pairs.append((mine, right))
    buffers = dict(sparse.named_buffers())
    pairs += [(buffers[name], right) for name, right in dense.named_buffers()]
    return max(relative(a.detach().double(), b.detach().double()) for a, b in pairs)


Case = tuple[str, str, str, str, bool, int]  # sum, reader, ReLU, use, training, batch


def check(cases: Iterator[Case]) -> int:
    """All of these programs are right, and none raises where the dense one does not. How many there are
    where that does not raise either."""
    wrong, compared = {}, 0
    for case in cases:
        kind, reader, relu, use, training, batch = case

        def body(
            m: Any,
            x: Tensor,
            kind: str = kind,
            reader: str = reader,
            relu: str = relu,
            use: str = use,
        ) -> Any:
            return USES[use](m, RELUS[relu](SUMS[kind](m, x)), READERS[reader])

        try:
            found = error(body, training, batch)
        except (RuntimeError, AssertionError) as raised:
            wrong[case] = repr(raised)[:200]
            continue
        compared += found is not None
        if found is not None and not found <= 1e-9:
            wrong[case] = f"relative error {found:.2g}"
    assert not wrong, f"{len(wrong)} wrong: {wrong}"
    return compared


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", SUMS)
def test_a_sum_that_is_read_once(kind: str, reader: str) -> None:
    assert check(itertools.product([kind], [reader], RELUS, ["alone"], (True, False), (3, 8)))


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("use", list(USES)[1:])
def test_a_sum_with_other_readers(use: str, reader: str) -> None:
    kinds = (
        "residual",
        "in place",
        "projection",
        "batch norm",
        "convolution alone",
        "strided slice",
    )
    check(itertools.product(kinds, [reader], RELUS, [use], [True], [8]))
