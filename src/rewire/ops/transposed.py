"""The transposed convolution: the input gradient of a convolution, as a product of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rewire.engine import private
from rewire.engine.run import Probe
from rewire.ops import precision, products, reference, transforms
from rewire.ops.eager import refuse_second_derivatives
from rewire.ops.reference import Convolution
from rewire.ops.topology import Topology


def conv_transpose2d(
    x: Tensor,
    values: Tensor,
    bias: Tensor | None,
    topology: Topology,
    conv: Convolution,
    size: tuple[int, int],
    probe: Probe | None = None,
) -> Tensor:
    """What ``torch.nn.functional.conv_transpose2d`` computes, over connections.

    These are the connections of the convolution from the output back to the input: its output units are
    the channels of ``x``. Its input gradient is this product, and its output is the input gradient here.

    Args:
        x: (batch, channels, height, width).
        values: one for each connection.
        bias: one for each channel of the output, or None.
        topology: the connections of that convolution.
        conv: its sizes.
        size: height and width of the output.
        probe: called in the backward pass with what that convolution would see: (sizes, its input, which is
            the output gradient here, and its output gradient, which is ``x``).
    """
    products.check_dims(x, 4, "conv_transpose2d")
    x = precision.autocast(x, values)
    channels = (topology.slots.numel() - 1) // (conv.kernel[0] * conv.kernel[1])
    like = x.new_empty((x.shape[0], channels, *size))  # for its shape: nobody reads or writes it
    sizes = ([*pair] for pair in (conv.kernel, conv.stride, conv.padding, conv.dilation))
    needs = [1, 0, 0]  # integers: torch.jit.trace has no lists of truth values
    y: Tensor
    if products.has_tangents():
        outputs, inputs = reference.rows_of(topology.indptr), topology.indices.long()
        y = reference.input_gradient(conv, x, tuple(like.shape), values.flatten(), outputs, inputs)
    elif private.functorch_active():
        y = transforms.input_gradient(x, like, values, topology, conv)
    else:
        y = torch.ops.rewire.conv2d_backward(x, like, values, *topology, *sizes, needs)[0]
    if probe is not None and y.requires_grad:
        y = watch(y, x, conv, lambda conv, x, dy: probe(conv, dy, x))
    return y if bias is None else (y + bias[:, None, None]).to(y.dtype)


class _Watched(torch.autograd.Function):
    """Shows a probe what a layer sees in its backward pass."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, conv: Convolution, probe: Probe) -> Tensor:
        ctx.save_for_backward(x)
        ctx.conv, ctx.probe = conv, probe
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        if torch.is_grad_enabled():
            refuse_second_derivatives()
        ctx.probe(ctx.conv, x, dy.to(x.dtype))
        return dy, None, None, None


def _watched(y: Tensor, x: Tensor, conv: Convolution, probe: Probe) -> Tensor:
    watched: Tensor = _Watched.apply(y, x.detach(), conv, probe)  # type: ignore[no-untyped-call]
    return watched


# A compiled graph cannot hold a probe: it is broken there.
watch = private.uncompiled(_watched)
