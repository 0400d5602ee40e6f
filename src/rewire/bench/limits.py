"""How fast a sparse layer could be on this machine: the roofline of the benchmark.

What no implementation with these inner loops avoids, each timed in turns with the layers themselves:

- *connections*: the inner loops over as many connections and positions, with all they read and write in the
  nearest caches. Two connections of a unit share nothing, so each reads one row of the batch for itself.
- *activations*: reading and writing the activations and their gradients once, as contiguous memory.
- *autograd*: a function that does nothing, with gradients of the same tensors.

The first two can happen at the same time, the last one cannot: the layers take at least the larger of the
first two and the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rewire.bench.case import LIMIT, Functions
from rewire.nn import SparseConv2d, SparseLayer
from rewire.ops import native

_AT_ONCE = 32  # positions of a plane that the loops take together


def functions(layers: Sequence[SparseLayer], x: Tensor) -> Functions:
    """What to time beside ``layers``, which follow each other, forward and backward from ``x``. Nothing
    without kernels, or where the batch does not consist of whole panels."""
    if not native.available() or x.shape[0] % native.module().f32.panel() or not x.shape[0]:
        return {}
    loops = []
    sizes = [tuple(x.shape)]
    for layer in layers:
        sizes.append(_output(layer, sizes[-1]))
        loops += _loops(layer, *sizes[-2:])
    return {
        (LIMIT, "connections"): partial(_run, loops),
        (LIMIT, "activations"): _Activations(sizes),
        (LIMIT, "autograd"): _Autograd(layers, x, sizes[-1]),
    }


def _output(layer: SparseLayer, shape: tuple[int, ...]) -> tuple[int, ...]:
    rest = layer.sizes.output_size(*shape[2:]) if isinstance(layer, SparseConv2d) else ()
    return (shape[0], layer.n_out, *rest)


def _loops(
    layer: SparseLayer, given: tuple[int, ...], output: tuple[int, ...]
) -> list[tuple[Any, int]]:
    """The loops of a forward and a backward pass, and how often they run."""
    (batch, n_in, *image), (_, n_out, *out) = given, output
    height, width = image or (1, 1)
    out_height, out_width = out or (1, 1)
    conv = layer.sizes
    reads = layer.count * float(out_height * out_width)  # of a connection at a position
    for axis, (size, count) in enumerate(((height, out_height), (width, out_width))):
        taps = conv.kernel[axis]
        inside = sum(
            0 <= i * conv.stride[axis] - conv.padding[axis] + k * conv.dilation[axis] < size
            for i in range(count)
            for k in range(taps)
        )
        reads *= inside / (count * taps)
    span = (conv.kernel[0] - 1) * conv.dilation[0] + 1
    panels = batch // int(native.module().f32.panel())
    found = []
    for name, units, (h, w), source, (from_h, from_w) in (
        ("forward", n_out, (out_height, out_width), n_in, (height, width)),
        ("backward", n_in, (height, width), n_out, (out_height, out_width)),
    ):
        rows = max(r for r in range(1, h + 1) if h % r == 0 and (r == 1 or r * w <= _AT_ONCE))
        pieces = source * min(span + rows - 1, from_h) * from_w
        each = reads / (units * h * w)
        loop = native.module().Loops(units, each, max(pieces, rows * w), rows * w, native.threads())
        found.append((getattr(loop, name), panels * (h // rows)))
    return found


def _run(loops: Sequence[tuple[Any, int]]) -> None:
    for loop, times in loops:
        loop(times)


class _Activations:
    """Reads and writes what layers of these sizes read and write."""

    def __init__(self, sizes: Sequence[tuple[int, ...]]) -> None:
        self.kept = [torch.zeros(size).flatten() for size in sizes]
        largest = max(x.numel() for x in self.kept)
        self.gradients = [torch.zeros(largest) for _ in range(2)]

    def __call__(self) -> None:
        for x, y in zip(self.kept, self.kept[1:], strict=False):
            _move(y, x)
        dy, dx = self.gradients
        for x, y in zip(self.kept[-2::-1], self.kept[:0:-1], strict=True):
            _move(dx[: x.numel()], x, dy[: y.numel()])
            dy, dx = dx, dy


def _move(to: Tensor, *sources: Tensor) -> None:
    """Read all of the sources, and write all of ``to``."""
    first, *others = sources
    shared = min(to.numel(), *(source.numel() for source in sources))
    if others:
        torch.add(first[:shared], others[0][:shared], out=to[:shared])
    else:
        to[:shared].copy_(first[:shared])
    for source in sources:
        if source.numel() > shared:
            torch.sum(source[shared:])
    if to.numel() > shared:
        to[shared:].zero_()


class _Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, size: tuple[int, ...], x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(x, *parameters)
        return x.new_empty(size)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return None, *(torch.empty_like(tensor) for tensor in ctx.saved_tensors)


class _Autograd:
    """Forward and backward through a function that computes nothing."""

    def __init__(self, layers: Sequence[SparseLayer], x: Tensor, size: tuple[int, ...]) -> None:
        self.leaves = [torch.zeros_like(p) for layer in layers for p in layer.parameters()]
        self.leaves.insert(0, x.detach().clone())
        for leaf in self.leaves:
            leaf.requires_grad_()
        self.size, self.gradient = size, torch.zeros(size)

    def __call__(self) -> None:
        for leaf in self.leaves:
            leaf.grad = None
        _Nothing.apply(self.size, *self.leaves).backward(self.gradient)  # type: ignore[no-untyped-call]
