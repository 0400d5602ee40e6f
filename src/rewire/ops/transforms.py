"""The products under ``torch.func``: functions that ``grad``, ``jacrev`` and ``vmap`` take apart.

A batch of inputs to one layer is one larger batch. Everything else, such as weights of their own for each
(ensembles) or gradients of weights for each (per-sample gradients), is one call for each. Forward mode
does not come here: see :func:`rewire.ops.products.reference_forward`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rewire.ops.operators import bilinear
from rewire.ops.reference import LINEAR, Convolution
from rewire.ops.topology import Topology


class _Product(torch.autograd.Function):
    """The output of a layer."""

    @staticmethod
    def forward(x: Tensor, values: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
        *topology, conv = rest
        y: Tensor
        if conv is LINEAR:
            y = torch.ops.rewire.linear(x, values, bias, *topology)
        else:
            y = torch.ops.rewire.conv2d(x, values, bias, *topology, *sizes(conv))
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, values, _, *topology, ctx.conv = inputs
        ctx.save_for_backward(x, values, *topology)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        needs = tuple(ctx.needs_input_grad[:3])
        grads = _apply(_Gradients, dy, *ctx.saved_tensors, ctx.conv, needs)
        kept = (g if need else None for g, need in zip(grads, needs, strict=True))
        return *kept, *(None,) * 6

    @staticmethod
    def vmap(info: Any, dims: Any, x: Tensor, *rest: Any) -> Any:
        if not _is_batched(dims[0]) or any(map(_is_batched, dims[1:])):
            return _one_by_one(_Product, info.batch_size, dims, (x, *rest))
        y = _apply(_Product, _merged(x, dims[0]), *rest)
        return y.unflatten(0, (info.batch_size, -1)), 0


class _Gradients(torch.autograd.Function):
    """The gradients of input, values and bias; empty where one is not needed."""

    @staticmethod
    def forward(dy: Tensor, x: Tensor, values: Tensor, *rest: Any) -> Any:
        *topology, conv, needs = rest
        if conv is LINEAR:
            return torch.ops.rewire.linear_backward(dy, x, values, *topology, list(needs))
        return torch.ops.rewire.conv2d_backward(dy, x, values, *topology, *sizes(conv), list(needs))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, ctx.conv, ctx.needs = inputs
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        dy, x, values, *topology = ctx.saved_tensors

        def forward(x: Tensor, values: Tensor) -> Tensor:
            return _apply(_Product, x, values, None, *topology, ctx.conv)  # type: ignore[no-any-return]

        def backward(dy: Tensor, x: Tensor, values: Tensor, needs: list[bool]) -> Any:
            return _apply(_Gradients, dy, x, values, *topology, ctx.conv, tuple(needs))

        found = bilinear(
            forward, backward, (dy, x, values), grads, ctx.needs, ctx.needs_input_grad[:3]
        )
        return *found, *(None,) * 7

    @staticmethod
    def vmap(info: Any, dims: Any, dy: Tensor, x: Tensor, *rest: Any) -> Any:
        needs = rest[-1]
        batched = [_is_batched(d) for d in dims]
        if not (batched[0] and batched[1]) or any(batched[2:]) or needs[1] or needs[2]:
            return _one_by_one(_Gradients, info.batch_size, dims, (dy, x, *rest))
        dx, *others = _apply(_Gradients, _merged(dy, dims[0]), _merged(x, dims[1]), *rest)
        return (dx.unflatten(0, (info.batch_size, -1)), *others), (0, None, None)


def product(
    x: Tensor, values: Tensor, bias: Tensor | None, topology: Topology, conv: Convolution
) -> Tensor:
    """The output of a layer."""
    return _apply(_Product, x, values, bias, *topology, conv)  # type: ignore[no-any-return]


def input_gradient(
    dy: Tensor, x: Tensor, values: Tensor, topology: Topology, conv: Convolution
) -> Tensor:
    """The gradient of the input, of which the shape of ``x`` is all that matters."""
    needs = (True, False, False)
    return _apply(_Gradients, dy, x, values, *topology, conv, needs)[0]  # type: ignore[no-any-return]


def sizes(conv: Convolution) -> tuple[list[int], ...]:
    """Sizes of a convolution as arguments of the operators."""
    return list(conv.kernel), list(conv.stride), list(conv.padding), list(conv.dilation)


def _apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    return function.apply(*args)


def _is_batched(dim: Any) -> bool:
    return isinstance(dim, int)


def _merged(x: Tensor, dim: int) -> Tensor:
    """Both batches as one."""
    return x.movedim(dim, 0).flatten(0, 1)


def _one_by_one(function: type[torch.autograd.Function], size: int, dims: Any, args: Any) -> Any:
    """The results of a call for each, stacked."""
    found = []
    for i in range(size):
        pairs = zip(args, dims, strict=True)
        found.append(_apply(function, *(a.select(d, i) if _is_batched(d) else a for a, d in pairs)))
    if isinstance(found[0], Tensor):
        return torch.stack(found), 0
    return tuple(torch.stack(parts) for parts in zip(*found, strict=True)), (0, 0, 0)
