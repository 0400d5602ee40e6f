"""What the tests of products share: a layer on data, and what dense PyTorch makes of it."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from rewire import Connections, ops
from rewire.ops import Convolution, Topology
from rewire.ops.topology import build

LINEAR = Convolution()
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12, torch.float16: 1e-2, torch.bfloat16: 5e-2}
NEEDS = [needs for needs in itertools.product([False, True], repeat=3) if any(needs)]


@dataclass
class Case:
    """A layer with random connections, values and data; ``conv`` is LINEAR and x 2-D, or 4-D."""

    conv: Convolution
    connections: Connections
    x: Tensor
    values: Tensor
    bias: Tensor
    dy: Tensor

    @cached_property
    def topology(self) -> Topology:
        c = self.connections
        return build(c.indptr, c.indices, c.n_in, self.taps)

    @property
    def taps(self) -> int:
        return self.conv.kernel[0] * self.conv.kernel[1]

    def run(self, x: Tensor, values: Tensor, bias: Tensor | None) -> Tensor:
        if self.x.dim() == 2:
            return ops.linear(x, values, bias, self.topology)
        return ops.conv2d(x, values, bias, self.topology, self.conv)

    def run_and_relu(self, x: Tensor, values: Tensor, bias: Tensor | None) -> Tensor:
        return F.relu(self.run(x, values, bias))

    def dense(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.x.dim() == 2:
            return F.linear(x, weight, bias)
        return F.conv2d(x, weight, bias, self.conv.stride, self.conv.padding, self.conv.dilation)

    def places(self) -> tuple[Tensor, ...]:
        """Where each connection lies in the dense weight."""
        outputs, inputs = self.connections.outputs(), self.connections.inputs()
        if self.x.dim() == 2:
            return outputs, inputs
        channels, wide = self.x.shape[1], self.conv.kernel[1]
        tap = inputs // channels
        return outputs, inputs % channels, tap // wide, tap % wide

    def weight(self, values: Tensor) -> Tensor:
        shape: tuple[int, ...] = (self.connections.n_out, self.x.shape[1])
        if self.x.dim() == 4:
            shape += self.conv.kernel
        weight = values.new_zeros(shape)
        weight[self.places()] = values
        return weight


def make(
    conv: Convolution,
    shape: tuple[int, ...],
    n_out: int,
    density: float,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    empty_rows: bool = False,
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    n_in = shape[1] * conv.kernel[0] * conv.kernel[1]
    if density < 0.01:
        connections = Connections.random(n_in, n_out, int(density * n_in * n_out), generator)
    else:
        mask = torch.rand(n_out, n_in, generator=generator) < density
        if empty_rows:
            mask[::2] = False
            mask[:, ::3] = False
        connections = Connections.from_mask(mask)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).to(dtype)

    out = conv.output_size(*shape[2:]) if len(shape) == 4 else ()
    values, bias = normal(len(connections)), normal(n_out)
    return Case(conv, connections, normal(*shape), values, bias, normal(shape[0], n_out, *out))


def gradients(
    run: Callable[..., Tensor], tensors: tuple[Tensor, ...], dy: Tensor, needs: tuple[bool, ...]
) -> tuple[Tensor, list[Tensor | None]]:
    """The output and the gradients that are needed."""
    leaves = [t.detach().requires_grad_(n) for t, n in zip(tensors, needs, strict=True)]
    y = run(*leaves)
    grads = iter(torch.autograd.grad(y, [t for t in leaves if t.requires_grad], dy))
    return y.detach(), [next(grads) if n else None for n in needs]


def dense_gradients(case: Case, dtype: torch.dtype = torch.float64) -> tuple[Tensor, list[Tensor]]:
    """Output and gradients of input, values and bias, by dense PyTorch."""
    x, values, bias, dy = (t.to(dtype) for t in (case.x, case.values, case.bias, case.dy))
    y, (dx, dw, db) = gradients(
        case.dense, (x.contiguous(), case.weight(values), bias), dy, (True,) * 3
    )
    assert dx is not None
    assert dw is not None
    assert db is not None
    return y, [dx, dw[case.places()], db]


def assert_close(actual: Tensor | None, expected: Tensor, tolerance: float | None = None) -> None:
    assert actual is not None
    assert actual.shape == expected.shape
    if not expected.numel():
        return
    tolerance = TOLERANCE[actual.dtype] if tolerance is None else tolerance
    error = float((actual.to(expected.dtype) - expected).abs().max())
    assert error <= tolerance * max(1.0, float(expected.abs().max()))  # false for NaN


def assert_agrees(case: Case, needs: tuple[bool, ...] = (True, True, True)) -> None:
    """Output and gradients are those of dense PyTorch in float64."""
    expected_y, expected = dense_gradients(case)
    y, grads = gradients(case.run, (case.x, case.values, case.bias), case.dy, needs)
    assert y.dtype == case.x.dtype
    assert_close(y, expected_y)
    # Gradients of parameters are long sums, in which terms cancel.
    terms = case.dy.numel() / max(case.dy.shape[1], 1)
    longer = TOLERANCE[case.x.dtype] * max(1.0, terms**0.5 / 4)
    for grad, right, need, tolerance in zip(
        grads, expected, needs, (None, longer, longer), strict=True
    ):
        if need:
            assert_close(grad, right, tolerance)


def arranged(x: Tensor, how: str) -> Tensor:
    """The values of ``x`` (or for "expanded" its first sample's) in other memory."""
    if how == "batch-last":
        return x.movedim(0, -1).contiguous().movedim(-1, 0)
    if how == "channels-last" and x.dim() == 4:
        return x.contiguous(memory_format=torch.channels_last)
    if how == "transposed":
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)
    if how == "expanded":
        return x[:1].expand(x.shape) if x.shape[0] else x
    if how == "sliced":
        room = x.new_full([2 * n + 3 for n in x.shape], torch.nan)
        view = room[tuple(slice(1, 2 * n + 1, 2) for n in x.shape)]
        return view.copy_(x)
    if how == "offset":
        room = x.new_full((x.numel() + 1,), torch.nan)[1:]
        return room.copy_(x.flatten()).view(x.shape)
    return x.contiguous()


def conv3(stride: int = 1) -> Convolution:
    return Convolution((3, 3), (stride, stride), (1, 1))


def sizes_of(conv: Convolution) -> list[list[int]]:
    return [list(pair) for pair in (conv.kernel, conv.stride, conv.padding, conv.dilation)]


def as_operator(case: Case, x: Tensor, values: Tensor, bias: Tensor | None) -> Tensor:
    """The same through the dispatcher, as torch.compile and dispatch modes see it."""
    if case.x.dim() == 2:
        y: Tensor = torch.ops.rewire.linear(x, values, bias, *case.topology)
        return y
    y = torch.ops.rewire.conv2d(x, values, bias, *case.topology, *sizes_of(case.conv))
    return y


def assert_same_bits(everything: Callable[[int], list[Tensor | None]]) -> None:
    """Whether all results are the same for any number of threads."""
    single = everything(1)
    for count in (2, 3, 5):
        for result, expected in zip(everything(count), single, strict=True):
            assert result is not None
            assert expected is not None
            assert torch.equal(result, expected), f"{count} threads"
