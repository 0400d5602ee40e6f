"""The products as functions with gradients, for plain eager code.

They go straight to the kernels, past the dispatcher, whose Python path costs more than a small layer
computes; where something else watches (``torch.compile``, ``torch.jit.trace``, dispatch modes), they go
through ``torch.ops.rewire``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rewire.engine import private
from rewire.engine.run import Probe
from rewire.ops import (
    layout,
    operators,  # noqa: F401 (registers them)
    precision,
    products,
    transforms,
)
from rewire.ops.reference import LINEAR, Convolution
from rewire.ops.topology import Topology


class _Product(torch.autograd.Function):
    """The product; ``conv`` is LINEAR for a linear layer."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        values: Tensor,
        bias: Tensor | None,
        topology: Topology,
        conv: Convolution,
        probe: Probe | None,
    ) -> Tensor:
        ctx.save_for_backward(x, values, *topology)
        ctx.conv, ctx.probe = conv, probe
        return products.forward(conv, x, values, bias, topology)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, values, *topology = ctx.saved_tensors
        needs = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():  # it is recorded itself
            if ctx.probe is not None:
                refuse_second_derivatives()
            return *_recorded(ctx.conv, dy, x, values, topology, needs), None, None, None
        if ctx.probe is not None:
            x, dy = layout.to_batch_last(x), layout.to_batch_last(dy)
            ctx.probe(ctx.conv, x, dy)
        grads = products.backward(ctx.conv, dy, x, values, Topology(*topology), needs)
        return *grads, None, None, None


def _recorded(
    conv: Convolution, dy: Tensor, x: Tensor, values: Tensor, topology: Any, needs: Any
) -> list[Tensor | None]:
    """The gradients of a product in a backward pass that autograd records."""
    if conv is LINEAR:
        grads = torch.ops.rewire.linear_backward(dy, x, values, *topology, list(needs))
    else:
        grads = torch.ops.rewire.conv2d_backward(
            dy, x, values, *topology, *transforms.sizes(conv), list(needs)
        )
    return [grad if need else None for grad, need in zip(grads, needs, strict=True)]


def refuse_second_derivatives() -> None:
    """Raise for a backward pass that is recorded while a rewirer collects gradients."""
    raise RuntimeError(
        "a rewirer collects the gradients of inactive connections in this step, and their second "
        "derivatives are not supported: compute what needs create_graph=True (a gradient penalty, say) "
        "only in steps where rewirer.watches(rewirer.t + 1) is False"
    )


def _product(
    x: Tensor,
    values: Tensor,
    bias: Tensor | None,
    topology: Topology,
    conv: Convolution,
    probe: Probe | None,
) -> Tensor:
    if products.has_tangents():
        if probe is not None:
            refuse_second_derivatives()
        return products.reference_forward(conv, x, values, bias, topology)
    if private.functorch_active():
        return transforms.product(x, values, bias, topology, conv)
    wanted = x.requires_grad or values.requires_grad or (bias is not None and bias.requires_grad)
    if not wanted or not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return products.forward(conv, x, values, bias, topology)
    y: Tensor = private.apply(_Product, x, values, bias, topology, conv, probe)
    return y


def _direct(x: Tensor, probe: Probe | None) -> bool:
    """Whether to go past the dispatcher, which cannot take a probe along: nothing but eager autograd
    watches this call, and memory has the numbers as they are."""
    plain = type(x) in (Tensor, torch.nn.Parameter)
    traced = private.tracing_state() is not None
    if products.has_tangents():
        return True
    if probe is None:
        return (
            plain
            and not torch.compiler.is_compiling()
            and private.dispatch_modes() == 0
            and not traced
            and not x.is_neg()
        )
    transformed = private.functorch_active()
    if traced or transformed or not plain:
        source = "transform of torch.func" if transformed else type(x).__name__
        source = "traced call" if traced else source
        raise RuntimeError(
            f"a rewiring is due and its gradients cannot be taken from a {source}: trace or "
            "export the model before the rewirer is made, or between its rewirings"
        )
    return True


def linear(
    x: Tensor,
    values: Tensor,
    bias: Tensor | None,
    topology: Topology,
    probe: Probe | None = None,
) -> Tensor:
    """y[n, o] = bias[o] + sum over connections (o, i) of values * x[n, i].

    Args:
        x: (batch, in units), any strides.
        values: one per connection, in the order of ``topology.indices``: (connections, 1) as layers have
            them, or (connections,). Their gradient has the same shape.
        bias: (out units,) or None.
        topology: the connections, from :func:`rewire.ops.topology.build`.
        probe: called in the backward pass with (sizes, input, output gradient).

    Under autocast ``x`` is converted, as a dense layer's is, and so the output; the parameters are read
    as they are.
    """
    if probe is not None and torch.compiler.is_compiling():
        return _eager_linear(x, values, bias, topology, probe)
    return linear_as_it_is(precision.autocast(x, values), values, bias, topology, probe)


def linear_as_it_is(
    x: Tensor, values: Tensor, bias: Tensor | None, topology: Topology, probe: Probe | None
) -> Tensor:
    """The same whatever autocast says: ``x`` may be of half the precision of the parameters."""
    products.check_dims(x, 2, "linear")
    if not _direct(x, probe):
        y: Tensor = torch.ops.rewire.linear(x, values, bias, *topology)
        return y
    topology = products.check(LINEAR, x, values, bias, topology)
    return _product(x, values, bias, topology, LINEAR, probe)


def conv2d(
    x: Tensor,
    values: Tensor,
    bias: Tensor | None,
    topology: Topology,
    conv: Convolution,
    probe: Probe | None = None,
) -> Tensor:
    """A 2-D convolution of (batch, channels, height, width) over the connections of ``topology``; the
    other arguments are as for :func:`linear`."""
    if probe is not None and torch.compiler.is_compiling():
        return _eager_conv2d(x, values, bias, topology, conv, probe)
    x = precision.autocast(x, values)
    return conv2d_as_it_is(x, values, bias, topology, conv, probe)


def conv2d_as_it_is(
    x: Tensor,
    values: Tensor,
    bias: Tensor | None,
    topology: Topology,
    conv: Convolution,
    probe: Probe | None,
) -> Tensor:
    """The same whatever autocast says, as :func:`linear_as_it_is`."""
    products.check_dims(x, 4, "conv2d")
    if not _direct(x, probe):
        y: Tensor = torch.ops.rewire.conv2d(x, values, bias, *topology, *transforms.sizes(conv))
        return y
    topology = products.check(conv, x, values, bias, topology)
    products.check_image(conv, x)
    return _product(x, values, bias, topology, conv, probe)


# A compiled graph cannot hold a probe either: it is broken there, and the layer runs as in eager code.
_eager_linear: Callable[..., Tensor] = private.uncompiled(linear)
_eager_conv2d: Callable[..., Tensor] = private.uncompiled(conv2d)


def gradient_at(
    dy: Tensor, x: Tensor, outputs: Tensor, inputs: Tensor, conv: Convolution = LINEAR
) -> Tensor:
    """The gradient of a layer's weight at the given coordinates, active or not, in any order.

    Args:
        dy: gradient of the loss at the layer's output.
        x: the layer's input.
        outputs, inputs: coordinates of the connections to evaluate.
        conv: sizes of a convolution; a linear layer by default.
    """
    if conv is LINEAR:
        g: Tensor = torch.ops.rewire.linear_gradient_at(dy, x, outputs, inputs)
        return g
    g = torch.ops.rewire.conv2d_gradient_at(dy, x, outputs, inputs, *transforms.sizes(conv))
    return g
