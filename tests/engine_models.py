"""What the tests of the engine share: small models, and their twins without it and dense."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import rewire
from rewire import use_engine


def converted(model: nn.Module, sparsity: float = 0.5, engine: bool = True) -> nn.Module:
    """A model with sparse layers in float64."""
    return rewire.sparsify(model.double(), sparsity, engine=engine)


def image(batch: int = 4, channels: int = 3, size: int = 8, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, channels, size, size)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def close(a: Any, b: Any) -> None:
    """Equal to 1e-9 of the largest element."""
    assert (a is None) == (b is None), "only one of them is None"
    if a is not None:
        assert a.shape == b.shape
        scale = float(b.detach().abs().max()) if b.numel() else 1.0
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9 * max(scale, 1.0))


def loss_of(outputs: Any) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for y in leaves(outputs):
        if y.requires_grad:
            weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)
            total = total + (y * weights).sum() + (y * y).mean()
    return total


def leaves(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [t for part in value for t in leaves(part)]
    return []


Step = Callable[[nn.Module, Tensor], Any]


def plain_step(model: nn.Module, x: Tensor) -> Any:
    outputs = model(x)
    loss = loss_of(outputs)
    if loss.requires_grad:
        loss.backward()
    return outputs


def observe(model: nn.Module, x: Tensor, step: Step, grad: bool = True) -> dict[str, Any]:
    """All that a step leaves behind."""
    x = x.clone().requires_grad_(grad)
    torch.manual_seed(3)
    outputs = step(model, x)
    found: dict[str, Any] = {
        f"output {i}": y.detach().clone() for i, y in enumerate(leaves(outputs))
    }
    found["input"] = x.grad
    found |= {f"gradient {name}": p.grad for name, p in model.named_parameters()}
    found |= {name: b.clone() for name, b in model.named_buffers() if b.is_floating_point()}
    found |= {name: b.clone() for name, b in model.named_buffers() if name.endswith("tracked")}
    return found


def dense_gradients(model: nn.Module, found: dict[str, Any]) -> dict[str, Any]:
    """What is known of the dense twin, as the sparse model has it."""
    found = dict(found)
    for name, layer in model.named_modules():
        if isinstance(layer, rewire.SparseLayer):
            key = f"gradient {name}.weight" if name else "gradient weight"
            grad = found.pop(key)
            if grad is not None:
                flat = grad if grad.dim() == 2 else grad.permute(0, 2, 3, 1).flatten(1)
                grad = flat[layer.connections.outputs(), layer.connections.inputs()][:, None]
            found[key.replace("weight", "values")] = grad
    return found


def same(model: nn.Module, x: Tensor, step: Step = plain_step, grad: bool = True) -> None:
    """A step does the same with the engine on, with it off, and in the dense twin; twice."""
    on, off = model, copy.deepcopy(model)
    use_engine(off, False)
    dense = rewire.densify(copy.deepcopy(off))
    for _ in range(2):
        for m in (on, off, dense):
            m.zero_grad()
        result = observe(on, x, step, grad)
        assert_same(result, observe(off, x, step, grad))
        twin = dense_gradients(on, observe(dense, x, step, grad))
        assert_same({k: v for k, v in result.items() if k in twin}, twin)


def assert_same(result: dict[str, Any], expected: dict[str, Any]) -> None:
    assert set(result) == set(expected)
    for name, value in expected.items():
        try:
            close(result[name], value)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


class Block(nn.Module):
    """Convolution, batch norm, residual sum; what happens to the sum is up to the test."""

    def __init__(
        self, use: Callable[[Any, Tensor], Tensor] = lambda m, x: x, channels: int = 3
    ) -> None:
        super().__init__()
        self.a = nn.Conv2d(channels, channels, 3, padding=1)
        self.n = nn.BatchNorm2d(channels)
        self.b = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.m = nn.BatchNorm2d(channels)
        self.c = nn.Conv2d(channels, 4, 3, padding=1)
        self.use = use

    def forward(self, x: Tensor) -> Any:
        y = torch.relu(self.n(self.a(x)))
        y = self.m(self.b(y)) + y
        return self.use(self, y)


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return -dy


class Identity(torch.autograd.Function):
    """Returns its very input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.sum()
        return x

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return 3 * dy


class Triple(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 3 * x

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return 3 * dy


class Square(torch.autograd.Function):
    """Saves its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return 2 * x * dy


class Untouched(torch.autograd.Function):
    """Looks at its input in the backward pass alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.zeros((), dtype=torch.float64)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return x.cos() * dy


class Rectify(torch.autograd.Function):
    """In place, as compiled extensions do it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.relu_()
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        (y,) = ctx.saved_tensors
        return dy * (y > 0)
