"""The products as functions with gradients, for plain eager code.

They go straight to the kernels, past the dispatcher, whose Python path costs more than a small layer
computes; where something else watches (``torch.compile``, ``torch.jit.trace``, dispatch modes), they go
through ``torch.ops.rewire``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rewire.ops import (
    channels,
    differentiable,
    layout,
    native,
    operators,  # noqa: F401 (registers them)
    products,
    recording,
    rows,
)
from rewire.ops.chain import Link
from rewire.ops.norms import Moments, Norm, relay_of
from rewire.ops.products import LINEAR
from rewire.ops.reference import Convolution
from rewire.ops.topology import Topology

# Called in the backward pass of a layer with its sizes, input and output gradient.
Probe = Callable[[Convolution, Tensor, Tensor], None]


class _Extras(NamedTuple):
    """What is done besides the product; see :func:`linear` and :func:`conv2d`."""

    row_major: bool = False
    relu: bool = False
    moments: Moments | None = None
    norm: Norm | None = None
    probe: Probe | None = None
    panels: bool = False
    rectified: bool = False  # the input, by the link before this one


class _Product(torch.autograd.Function):
    """The product; ``conv`` is LINEAR for a linear layer. A batch norm on the way in has no output in
    memory, and its own gradients come with those of the product."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        values: Tensor,
        bias: Tensor | None,
        norm_weight: Tensor | None,
        norm_bias: Tensor | None,
        topology: Topology,
        conv: Convolution,
        extras: _Extras,
    ) -> Tensor:
        row_major, relu, moments, norm, ctx.probe, panels, ctx.rectified = extras
        ctx.by_rows = row_major and rows.usable(x)
        ctx.relay = relay_of(x) if norm is None else None
        if ctx.relay is not None:
            ctx.relay.layers += 1
        if ctx.by_rows:
            y = rows.forward(x, values, bias, topology, relu)
        else:
            x = layout.ready(x)
            y = products.forward(conv, x, values, bias, topology, relu, norm, moments, panels)
        kept = (None,) * 4 if norm is None else norm[:4]
        ctx.owed = None if moments is None else moments.owed
        if ctx.owed is not None:
            ctx.owed.kept = True
        ctx.save_for_backward(x, values, y if relu else None, *kept, *topology)
        ctx.conv, ctx.norm = conv, None if norm is None else norm[4:]
        if norm is not None:
            norm.read()
        return layout.to_row_major(y) if row_major else y

    @staticmethod
    def again(
        ctx: Any,
        saved: Sequence[Any],
        x: Tensor,
        values: Tensor,
        bias: Tensor | None,
        norm_weight: Tensor | None,
        norm_bias: Tensor | None,
    ) -> Tensor:
        """The output in operations that autograd can differentiate, not in panels."""
        z, _, _, mean, variance, *topology = saved[2:]
        if ctx.relay is not None:
            ctx.relay.hidden = True
        if ctx.norm is not None:
            norm = Norm(norm_weight, norm_bias, mean, variance, *ctx.norm)
            x = differentiable.batch_norm(x, norm)
        y = differentiable.product(ctx.conv, x, values, bias, Topology(*topology))
        return differentiable.rectified(y, z)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        if torch.is_grad_enabled():
            return *_recorded(ctx, dy), None, None, None
        x, values, z, *rest = ctx.saved_tensors
        topology = Topology(*rest[4:])
        needs = ctx.needs_input_grad[:5]
        if ctx.by_rows:
            return *_by_rows(ctx, dy, x, values, z, topology), *(None,) * 5
        norm = None if ctx.norm is None else Norm(*rest[:4], *ctx.norm)
        owed = None if ctx.owed is None else ctx.owed.take(dy)
        if ctx.probe is not None:
            dy, z, owed = products.complete(dy, z, owed), None, None
            ctx.probe(ctx.conv, *(layout.from_panels(t) if t.dim() == 5 else t for t in (x, dy)))
        relay = ctx.relay if needs[0] and needs[1] and ctx.probe is None else None
        relay = relay if relay is not None and relay.usable() else None
        sums = passed = None
        if ctx.rectified and needs[0] and needs[1] and dy.numel() and native.kernels(x) is not None:
            # x is at hand here: what the link before would do to its output's gradient is done now.
            sums = ctx.hands_back = x.new_empty(x.shape[1])
        wanted = needs[:3]
        if z is not None and (passed := getattr(ctx, "passed", None)) is not None:
            # The link after this one has done so: dy has passed the rectifier, and been summed up.
            wanted, z = (*needs[:2], False), None
        dx, dw, db, scale, shift = products.backward(
            *(ctx.conv, dy, x, values, topology, wanted, z, norm, owed, relay, sums)
        )
        if passed is not None and needs[2]:
            db = passed
        affine = (scale if needs[3] else None, shift if needs[4] else None)
        return dx, dw, db, *affine, None, None, None


def _recorded(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients of a product in a backward pass that autograd records."""
    if ctx.probe is not None:
        differentiable.refuse_probe()
    saved = ctx.saved_tensors
    x, values, _, norm_weight, norm_bias, _, _, indptr, *_ = saved
    needs = ctx.needs_input_grad[:5]
    # Its elements do not matter: the ReLU's mask is known, and the product is linear.
    bias = values.new_zeros(indptr.numel() - 1) if needs[2] else None
    inputs = (x, values, bias, norm_weight, norm_bias)
    return differentiable.gradients(partial(_Product.again, ctx, saved), inputs, needs, dy)


def _by_rows(
    ctx: Any, dy: Tensor, x: Tensor, values: Tensor, z: Tensor | None, topology: Topology
) -> tuple[Tensor | None, ...]:
    """The gradients of input, values and bias of a row-major product."""
    needs = ctx.needs_input_grad[:3]
    dy = layout.to_row_major(dy)
    if ctx.probe is not None:
        dy, z = products.complete(dy, z, None), None
        ctx.probe(ctx.conv, layout.to_batch_last(x), layout.to_batch_last(dy))
    grads = rows.backward(dy, x, values, topology, needs, z)
    return tuple(g if need else None for g, need in zip(grads, needs, strict=True))


def _product(
    x: Tensor,
    values: Tensor,
    bias: Tensor | None,
    topology: Topology,
    conv: Convolution,
    extras: _Extras,
) -> Tensor:
    products.refuse_tangents()
    wanted = x.requires_grad or values.requires_grad or (bias is not None and bias.requires_grad)
    row_major, relu, moments, norm, _, panels = extras[:6]
    if wanted and torch.is_grad_enabled():
        affine = (None, None) if norm is None else norm[:2]
        if not (row_major and rows.usable(x)):
            x = channels.ready(x)
        result: Tensor = recording.apply(_Product, x, values, bias, *affine, topology, conv, extras)
        return result
    if row_major and rows.usable(x):
        return rows.forward(x, values, bias, topology, relu)
    x = layout.ready(x)
    y = products.forward(conv, x, values, bias, topology, relu, norm, moments, panels)
    return layout.to_row_major(y) if row_major else y


def link(
    conv: Convolution,
    values: Tensor,
    bias: Tensor | None,
    topology: Topology,
    norm: Norm | None = None,
    after: Callable[[], None] | None = None,
    relu: bool = False,
    moments: Moments | None = None,
    rectified: bool = False,
    last: bool = False,
) -> Link:
    """The product as a part of a chain, of an input that ``products.check_layer`` has accepted; see
    :func:`conv2d`. ``rectified`` says that the link before this one is a product that rectifies its
    result. The result is in panels where the batch fills them, unless it is the ``last`` of a model."""
    panels = conv is not LINEAR and not last
    extras = _Extras(False, relu, moments, norm, None, panels, rectified)
    affine = (None, None) if norm is None else norm[:2]
    return Link(_Product, (values, bias, *affine), (topology, conv, extras), after)


def _plain(x: Tensor) -> bool:
    """Whether nothing but eager autograd watches this call, and memory has the numbers as they are."""
    return (
        type(x) in (Tensor, torch.nn.Parameter)
        and not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._get_tracing_state() is None
        and not x.is_neg()
    )


def _direct(x: Tensor, probe: Probe | None) -> bool:
    """Whether to go past the dispatcher, which cannot take a probe along."""
    if probe is None:
        return _plain(x)
    traced = torch._C._get_tracing_state() is not None
    if traced or type(x) not in (Tensor, torch.nn.Parameter):
        source = "traced call" if traced else type(x).__name__
        raise RuntimeError(
            f"a rewiring is due and its gradients cannot be taken from a {source}: trace or "
            "export the model before the rewirer is made, or between its rewirings"
        )
    return True


def _autocast(x: Tensor, values: Tensor) -> Tensor:
    if x.dtype != values.dtype and torch.is_autocast_enabled(x.device.type):
        return x.to(values.dtype)
    return x


def linear(
    x: Tensor,
    values: Tensor,
    bias: Tensor | None,
    topology: Topology,
    row_major: bool = False,
    relu: bool = False,
    probe: Probe | None = None,
) -> Tensor:
    """y[n, o] = bias[o] + sum over connections (o, i) of values * x[n, i].

    Args:
        x: (batch, in units), any strides.
        values: one per connection, in the order of ``topology.indices``: (connections, 1) as layers have
            them, or (connections,). Their gradient has the same shape.
        bias: (out units,) or None.
        topology: the connections, from :func:`rewire.ops.topology.build`.
        row_major: return contiguous memory instead of batch-last.
        relu: rectify the result, in the same pass over memory.
        probe: called in the backward pass with (sizes, input, output gradient).
    """
    if probe is not None and torch.compiler.is_compiling():
        return _eager_linear(x, values, bias, topology, row_major, relu, probe)
    products.check_dims(x, 2, "linear")
    if not _direct(x, probe):
        y: Tensor = torch.ops.rewire.linear(x, values, bias, *topology, row_major)
        return y.relu() if relu else y
    x = _autocast(x, values)
    products.check(LINEAR, x, values, bias, topology)
    extras = _Extras(row_major, relu, probe=probe)
    return _product(x, values, bias, topology, LINEAR, extras)


def conv2d(
    x: Tensor,
    values: Tensor,
    bias: Tensor | None,
    topology: Topology,
    conv: Convolution,
    relu: bool = False,
    moments: Moments | None = None,
    norm: Norm | None = None,
    probe: Probe | None = None,
    checked: bool = False,
    panels: bool = False,
) -> Tensor:
    """A 2-D convolution of (batch, channels, height, width) over the connections of ``topology``.

    In the same pass over memory ``norm`` is done to an ``x`` that ``channels.can_batch_norm`` has
    accepted, the result is rectified if ``relu``, and its mean and variance by channel are written to
    ``moments``. ``probe`` is as for :func:`linear`, and sees what ``norm`` gives. ``checked`` says that
    :func:`rewire.ops.products.check` has accepted the layer and the image, which may then be in panels
    (see :mod:`rewire.ops.layout`), and so may the result if ``panels``.
    """
    if probe is not None and torch.compiler.is_compiling():
        return _eager_conv2d(x, values, bias, topology, conv, relu, moments, norm, probe)
    if not checked:
        products.check_dims(x, 4, "conv2d")
    if norm is not None and (probe is not None or not takes_norm(x, values)):
        x, norm = channels.batch_norm(x, norm), None
    if not _direct(x, probe):
        x = channels.from_panels(x)
        sizes = (list(conv.kernel), list(conv.stride), list(conv.padding), list(conv.dilation))
        y: Tensor = torch.ops.rewire.conv2d(x, values, bias, *topology, *sizes)
        return products.measured(y.relu() if relu else y, moments)
    x = _autocast(x, values)
    if not checked:
        products.check(conv, x, values, bias, topology)
        products.check_image(conv, x)
    extras = _Extras(False, relu, moments, norm, probe, panels)
    return _product(x, values, bias, topology, conv, extras)


def takes_norm(x: Tensor, values: Tensor) -> bool:
    """Whether a batch norm can be done where a convolution reads: its gradients come with those of
    the convolution, or not at all."""
    if not _plain(x) or x.dtype != values.dtype:
        return False
    return not torch.is_grad_enabled() or (x.requires_grad and values.requires_grad)


# A compiled graph cannot hold a probe either: it is broken there, and the layer runs as in eager code.
_eager_linear: Callable[..., Tensor] = torch._disable_dynamo(linear)  # type: ignore[attr-defined]
_eager_conv2d: Callable[..., Tensor] = torch._disable_dynamo(conv2d)  # type: ignore[attr-defined]


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
    sizes = (list(conv.kernel), list(conv.stride), list(conv.padding), list(conv.dilation))
    g = torch.ops.rewire.conv2d_gradient_at(dy, x, outputs, inputs, *sizes)
    return g
