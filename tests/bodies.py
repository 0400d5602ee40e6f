"""What the tests of converted models share: a model with a given forward pass, and torch's answer to it."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rewire import SparseConv2d, SparseLinear, ops, use_engine

marks = [
    pytest.mark.skipif(not ops.available(), reason="needs the compiled kernels"),
    pytest.mark.usefixtures("small_panels"),
]
DTYPES = [torch.float32, torch.float64]
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-11}


def batch_last(x: Tensor) -> Tensor:
    return x.detach().movedim(0, -1).contiguous().movedim(-1, 0)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def assert_close(actual: Tensor, expected: Tensor, tolerance: float | None = None) -> None:
    tolerance = TOLERANCE[actual.dtype] if tolerance is None else tolerance
    expected = expected.to(torch.float64)
    scale = max(1.0, float(expected.detach().abs().nan_to_num().max())) if expected.numel() else 1.0
    torch.testing.assert_close(
        actual.to(torch.float64), expected, rtol=0, atol=tolerance * scale, equal_nan=True
    )


class Doubled(torch.autograd.Function):
    """A function of a user's own: C++ code calls it, which does not ask ``__torch_function__``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return dy * 2


Body = Callable[[Any, Tensor], Any]


class Net(nn.Module):
    """Two sparse convolutions and two batch norms; what is done with them is the body."""

    def __init__(self, body: Body, **options: Any) -> None:
        super().__init__()
        settings: dict[str, Any] = {"sparsity": 0.5, "generator": torch.Generator().manual_seed(0)}
        self.conv = SparseConv2d(3, 6, 3, padding=1, **settings)
        self.conv2 = SparseConv2d(6, 6, 3, padding=1, bias=False, **settings)
        self.bn, self.bn2 = nn.BatchNorm2d(6, **options), nn.BatchNorm2d(6, **options)
        self.relu, self.relu_in_place = nn.ReLU(), nn.ReLU(inplace=True)
        self.body = body
        self.seen: list[Any] = []
        for i, bn in enumerate((self.bn, self.bn2)):
            if bn.affine:
                bn.weight.data = normal(6, seed=1 + i)
                bn.bias.data = normal(6, seed=3 + i)
            if bn.running_mean is not None and bn.running_var is not None:
                bn.running_mean.copy_(normal(6, seed=5 + i))
                bn.running_var.copy_(normal(6, seed=7 + i).square())
        self.double()

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


def plain(model: nn.Module) -> Any:
    """The same model on torch's own layers."""
    model = copy.deepcopy(model)
    for module in list(model.modules()):
        use_engine(module, False)
        for name, child in list(module.named_children()):
            if isinstance(child, SparseConv2d | SparseLinear):
                setattr(module, name, child.to_dense())
    return model


def grads_of(model: nn.Module, like: nn.Module) -> dict[str, Tensor | None]:
    """Gradients by name; those of dense weights at the connections of ``like``'s sparse layers."""
    result: dict[str, Tensor | None] = {}
    for name, module in like.named_modules():
        twin = model.get_submodule(name)
        for key, parameter in twin.named_parameters(recurse=False):
            grad = parameter.grad
            if isinstance(module, SparseConv2d | SparseLinear) and key == "weight":
                c = module.connections
                if grad is not None:
                    flat = grad.permute(0, 2, 3, 1).flatten(1) if grad.dim() == 4 else grad
                    grad = flat[c.outputs(), c.inputs()][:, None]
                key = "values"
            result[f"{name}.{key}"] = grad
    return result


def tensors_in(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    items = output.values() if isinstance(output, dict) else output
    return [t for item in items for t in tensors_in(item)]


def loss_of(tensors: list[Tensor]) -> Tensor | None:
    parts = [
        (t * torch.linspace(-1, 2, t.numel(), dtype=t.dtype).view(t.shape)).sum() + t.square().sum()
        for t in tensors
        if t.requires_grad
    ]
    return torch.stack(parts).sum() if parts else None


def same_buffers(ours: nn.Module, theirs: nn.Module) -> None:
    expected = dict(theirs.named_buffers())
    for name, buffer in ours.named_buffers():
        if name in expected:
            if buffer.is_floating_point():
                assert_close(buffer, expected[name])
            else:
                assert torch.equal(buffer, expected[name]), name
    assert any("running" in name for name in expected) == any(
        "running" in name for name, _ in ours.named_buffers()
    )


def assert_same(
    model: Any,
    x: Tensor | None = None,
    *,
    steps: int = 2,
    leaf: bool = True,
) -> None:
    """Outputs, gradients (of the input, too, if it is a leaf) and buffers of the converted model are
    torch's, over a few steps."""
    reference = plain(model)
    use_engine(model)
    for step in range(steps):
        data = normal(8, 3, 6, 6, seed=20 + step) if x is None else x
        inputs = [data.detach().clone().requires_grad_(leaf) for _ in range(2)]
        expected = tensors_in(reference(inputs[1]))
        results = tensors_in(model(inputs[0]))
        for result, right in zip(results, expected, strict=True):
            assert result.requires_grad == right.requires_grad
            assert_close(result.detach(), right.detach())
        same_buffers(model, reference)
        for m in (model, reference):
            m.zero_grad()
        loss, right_loss = loss_of(results), loss_of(expected)
        assert (loss is None) == (right_loss is None)
        if loss is None or right_loss is None:
            continue
        right_loss.backward()
        loss.backward()
        assert (inputs[0].grad is None) == (inputs[1].grad is None)
        if inputs[0].grad is not None and inputs[1].grad is not None:
            assert_close(inputs[0].grad, inputs[1].grad, 1e-9)
        ours, theirs = grads_of(model, model), grads_of(reference, model)
        for name, grad in theirs.items():
            mine = ours[name]
            if grad is None or mine is None:
                assert mine is None or not mine.any(), name
                assert grad is None or not grad.any(), name
            else:
                assert_close(mine, grad, 1e-9)
        same_buffers(model, reference)


class Bodies(dict[str, Body]):
    """What a forward pass may do, by name."""

    def add(self, function: Body) -> Body:
        """A function under its own name; a decorator."""
        self[function.__name__] = function
        return function
