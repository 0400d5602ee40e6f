"""Products over the connections of a layer: forward, all gradients, and the gradient anywhere.

These compute and know nothing of autograd: by the kernels where there are any, else by their reference
twins.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from rewire.ops import channels, layout, native, reference, sharding
from rewire.ops.norms import Moments, Norm, Relay
from rewire.ops.reference import Convolution
from rewire.ops.topology import Topology, ensure

LINEAR = Convolution()


@lru_cache(maxsize=1024)
def output_shape(conv: Convolution, shape: tuple[int, ...], n_out: int) -> tuple[int, ...]:
    """The shape of the output of images of the given shape."""
    return (shape[0], n_out, *conv.output_size(shape[2], shape[3]))


@lru_cache(maxsize=1024)
def geometry_of(
    conv: Convolution, shape: tuple[int, ...], n_out: int, panel: int = 0
) -> tuple[Any, tuple[int, ...]]:
    """The kernel's sizes and the shape of the output, for an input that is in panels if it has five
    dimensions, and an output that is in panels of so many columns, or in none."""
    panels = shape[-1] if len(shape) == 5 else 0
    batch, n_in = shape[0] * max(panels, 1), shape[1]
    height, width = shape[2:4] if len(shape) > 2 else (1, 1)
    out = conv.output_size(height, width)
    sizes = native.geometry(
        *(batch, n_in, height, width, n_out, *out),
        *(*conv.kernel, *conv.stride, *conv.padding, *conv.dilation),
        *(panel or panels, panels > 0, panel > 0),
    )
    if panel:
        return sizes, (batch // panel, n_out, *out, panel)
    return sizes, (batch, n_out, *out) if len(shape) > 2 else (batch, n_out)


def check(
    conv: Convolution, x: Tensor, values: Tensor, bias: Tensor | None, topology: Topology
) -> None:
    check_layer(conv, x.shape[1], x.dtype, values, bias, topology)


def check_layer(
    conv: Convolution,
    channels: int,
    dtype: torch.dtype,
    values: Tensor,
    bias: Tensor | None,
    topology: Topology,
) -> None:
    """The same for an input of so many channels."""
    indptr, indices = topology[:2]
    taps, n_out = conv.kernel[0] * conv.kernel[1], indptr.numel() - 1
    if type(values) is not Parameter and type(values) is not Tensor:
        sharding.refuse_sharded(values)
    count = indices.numel()
    if values.shape not in ((count, 1), (count,)):
        raise ValueError(
            f"values has shape {tuple(values.shape)}, expected one value for each of the "
            f"{count} connections: ({count}, 1) or ({count},)"
        )
    if dtype != values.dtype or (bias is not None and bias.dtype != dtype):
        given = f"input {dtype}, values {values.dtype}"
        raise ValueError(
            f"types differ ({given}{'' if bias is None else f', bias {bias.dtype}'}): "
            "convert the input or the layer with .to(dtype)"
        )
    if bias is not None and (bias.dim() != 1 or bias.numel() != n_out):
        raise ValueError(f"bias has shape {tuple(bias.shape)}, expected ({n_out},)")
    ensure(topology, channels * taps, taps)


def check_dims(x: Tensor, dims: int, name: str) -> None:
    if x.dim() != dims:
        wanted = (
            "2-D input (batch, units)"
            if dims == 2
            else "4-D input (batch, channels, height, width)"
        )
        raise ValueError(f"{name} takes a {wanted}, got {tuple(x.shape)}")


def check_image(conv: Convolution, x: Tensor) -> None:
    height, width = conv.output_size(x.shape[2], x.shape[3])
    if height < 1 or width < 1:
        raise ValueError(
            f"an image of {x.shape[2]} x {x.shape[3]} is smaller than the kernel {conv.kernel} "
            f"with dilation {conv.dilation} and padding {conv.padding}"
        )


def check_gradient(conv: Convolution, dy: Tensor, x: Tensor, n_out: int) -> None:
    out = conv.output_size(x.shape[2], x.shape[3]) if x.dim() == 4 else ()
    fits = x.dim() in (2, 4) and tuple(dy.shape) == (x.shape[0], n_out, *out)
    if not fits or dy.dtype != x.dtype or (x.dim() == 2 and conv.kernel != (1, 1)):
        raise ValueError(
            f"input {tuple(x.shape)} {x.dtype} and output gradient {tuple(dy.shape)} {dy.dtype} "
            f"do not belong together in a layer with {n_out} output units"
        )


def refuse_tangents() -> None:
    """Forward-mode differentiation has no rule here; it must not lose its tangents silently."""
    if forward_ad._current_level >= 0:
        raise NotImplementedError("sparse layers have no forward-mode derivative")


def image(x: Tensor) -> Tensor:
    return x[:, :, None, None] if x.dim() == 2 else x


def forward(
    conv: Convolution,
    x: Tensor,
    values: Tensor,
    bias: Tensor | None,
    topology: Topology,
    relu: bool = False,
    norm: Norm | None = None,
    moments: Moments | None = None,
    panels: bool = False,
) -> Tensor:
    """``x`` is batch-last or in panels where there are kernels for it. ``norm`` is done to ``x`` on the
    way in; ``moments`` receives the result's mean and variance by channel. The result is batch-last, or
    in ``panels`` if the batch fills them."""
    n_out = topology.indptr.numel() - 1
    kernels = native.kernels(x)
    if kernels is None:
        if x.is_cpu and native.available() and x.dtype not in native.KERNEL_DTYPES:
            native.warn_of_reference(x.dtype)
        outputs = reference.rows_of(topology.indptr)
        inputs, flat = topology.indices.long(), values.flatten()
        y = reference.forward(conv, image(x), flat, bias, outputs, inputs, n_out)
        y = layout.to_batch_last(y if x.dim() == 4 else y.flatten(1))
        return measured(y.relu_() if relu else y, moments)
    values = values.contiguous()
    bias = None if bias is None else bias.contiguous()
    panel = _panel(x) if panels else 0
    geometry, shape = geometry_of(conv, tuple(x.shape), n_out, panel)
    strides = layout.panel_strides if panel else layout.strides
    y = native.empty(kernels, shape, strides(shape), x)
    if y.numel():
        mean, variance = (0, 0) if moments is None else (t.data_ptr() for t in moments[:2])
        kernels.forward(
            *(geometry, topology.indptr.data_ptr(), topology.indices.data_ptr()),
            *(values.data_ptr(), native.address(bias), x.data_ptr()),
            *(None if norm is None else norm.kernel(kernels, x), y.data_ptr()),
            *(relu, mean, variance, native.threads()),
        )
    return y


def _panel(x: Tensor) -> int:
    """Columns of the panels that an output can be in; 0 if it cannot."""
    if x.dim() == 5:
        return int(x.shape[-1])
    shape = layout.panel_shape(tuple(x.shape), x)
    return 0 if shape is None else shape[-1]


def measured(y: Tensor, moments: Moments | None) -> Tensor:
    """``y``, whose mean and variance by channel have been written to ``moments``."""
    if moments is not None:
        with torch.no_grad():
            variance, mean = torch.var_mean(y, (0, 2, 3), correction=0)
            moments[0].copy_(mean)
            moments[1].copy_(variance)
    return y


def rectify_gradient(dz: Tensor, z: Tensor) -> Tensor:
    """``dz`` where the rectified ``z`` is positive."""
    kernels = native.kernels(z)
    if kernels is None or z.numel() == 0:
        return dz * (z > 0)
    rows = z.dim() == 2 and z.is_contiguous()
    dz = dz.contiguous() if rows else layout.as_in(dz, z)
    dy = native.empty(kernels, tuple(z.shape), z.stride(), z)
    kernels.rectify_gradient(
        dz.data_ptr(), z.data_ptr(), dy.data_ptr(), z.numel(), native.threads()
    )
    return dy


def complete(dy: Tensor, z: Tensor | None, owed: tuple[Tensor, Tensor] | None) -> Tensor:
    """The gradient of a layer's output once all that is left to do to it is done."""
    if z is not None:
        dy = rectify_gradient(dy, z)
    return dy if owed is None else channels.settle_gradient(dy, *owed)


def backward(
    conv: Convolution,
    dy: Tensor,
    x: Tensor,
    values: Tensor,
    topology: Topology,
    needs: Sequence[bool],
    z: Tensor | None = None,
    norm: Norm | None = None,
    owed: tuple[Tensor, Tensor] | None = None,
    relay: Relay | None = None,
    sums: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """Gradients of input, values, bias and of the weight and bias of ``norm``, None for each that is
    not needed.

    Args:
        x: in any memory; a checkpointed layer may have read another than is there now.
        needs: which of the first three are.
        z: the output of a rectifier, which ``dy`` has yet to pass.
        norm: what was done to ``x`` on the way in; then input and values are both needed.
        owed: the layer's output and the factors of what is left to do to ``dy``.
        relay: of the residual sum that ``x`` is, whose own gradient is then computed; input and values are
            both needed.
        sums: receives the sums by channel of the first gradient, which is then that of what was rectified
            to give ``x``; input and values are both needed, and kernels.
    """
    kernels = native.kernels(x)
    together = needs[1] and kernels is not None
    if not together:
        dy, z, owed = complete(dy, z, owed), None, None
    if kernels is None:
        dx = dw = db = None
        outputs, inputs = reference.rows_of(topology.indptr), topology.indices.long()
        picture = image(x)
        if needs[0]:
            dx = reference.input_gradient(
                conv, image(dy), tuple(picture.shape), values.flatten(), outputs, inputs
            ).view(x.shape)
            dx = layout.to_batch_last(dx)
        if needs[1]:
            dw = reference.weight_gradient(conv, image(dy), picture, outputs, inputs)
            dw = dw.view(values.shape)
        if needs[2]:
            db = dy.transpose(0, 1).flatten(1).sum(1)
        return dx, dw, db, None, None
    x, dy, values = layout.ready(x), layout.ready(dy), values.contiguous()
    n_out, threads = topology.indptr.numel() - 1, native.threads()
    panel = int(dy.shape[-1]) if dy.dim() == 5 else 0
    geometry, _ = geometry_of(conv, tuple(x.shape), n_out, panel)
    dx = layout.empty_like(kernels, x) if needs[0] else None
    dw = x.new_empty(values.shape) if needs[1] else None
    db = x.new_empty(n_out) if needs[2] else None
    given, source, more = norm, x, None  # the batch norm, what it reads, and what comes besides
    if relay is not None:
        assert relay.x is not None
        given, source, more = relay.norm, relay.x, relay.more()
    dscale = dshift = factors = None
    if given is not None:
        dscale, dshift, factors = x.new_empty(x.shape[1]), x.new_empty(x.shape[1]), given.factors()
    found = dx, dw, db, dscale, dshift
    if dy.numel() == 0:
        return tuple(None if grad is None else grad.zero_() for grad in found)
    rest = (
        native.address(z),
        *((0, 0) if owed is None else map(native.address, owed)),
    )  # to be done to dy
    if (
        together and not needs[0]
    ):  # a first layer: the input has few channels, and is read many times
        kernels.weight_gradient(
            *(geometry, topology.indptr.data_ptr(), topology.indices.data_ptr()),
            *(x.data_ptr(), dy.data_ptr(), *rest),
            *(native.address(dw), native.address(db), threads),
        )
        return found
    slots = (topology.slots.data_ptr(), topology.outputs.data_ptr(), topology.order.data_ptr())
    if together:
        kernels.gradients(
            *(geometry, *slots, values.data_ptr(), x.data_ptr()),
            None if given is None else given.kernel(kernels, source),
            *(0 if relay is None else source.data_ptr(), native.address(more), dy.data_ptr()),
            *(*rest, native.address(dx), native.address(dw), native.address(db)),
            *(native.address(dscale), native.address(dshift), native.address(factors)),
            *(native.address(sums), threads),
        )
        if norm is not None:
            assert dx is not None
            norm.leave(dx, x, factors)
        if relay is not None:
            assert dx is not None
            assert dscale is not None
            assert dshift is not None
            assert factors is not None
            relay.done(dx, dscale, dshift, factors)
        return found
    if dx is not None:
        kernels.input_gradient(
            geometry, *slots, values.data_ptr(), dy.data_ptr(), dx.data_ptr(), threads
        )
    if db is not None:
        dy = layout.from_panels(dy) if panel else dy
        kernels.row_sums(dy.data_ptr(), n_out, dy.numel() // n_out, db.data_ptr(), threads)
    return found


def gradient_at(
    conv: Convolution, dy: Tensor, x: Tensor, outputs: Tensor, inputs: Tensor
) -> Tensor:
    taps, n_out = conv.kernel[0] * conv.kernel[1], dy.shape[1]
    n_in = x.shape[1] * taps
    if outputs.shape != inputs.shape or outputs.dim() != 1:
        raise ValueError(
            f"coordinates must be two 1-D tensors of one length, got {tuple(outputs.shape)} and "
            f"{tuple(inputs.shape)}"
        )
    check_gradient(conv, dy, x, n_out)
    for name, units, size in (("output", outputs, n_out), ("input", inputs, n_in)):
        if units.numel() and (int(units.min()) < 0 or int(units.max()) >= size):
            raise ValueError(f"{name} coordinates must be in [0, {size})")
    outputs, inputs = outputs.long(), inputs.long()
    kernels = native.kernels(x)
    if kernels is None:
        return reference.weight_gradient(conv, image(dy), image(x), outputs, inputs)
    keys = outputs * n_in + inputs
    order = None if bool((keys.diff() >= 0).all()) else torch.argsort(keys)
    indices = (inputs if order is None else inputs[order]).int()
    indptr = torch.zeros(n_out + 1, dtype=torch.int32)
    indptr[1:] = torch.bincount(outputs, minlength=n_out).cumsum(0)
    grad = torch.zeros(indices.numel(), dtype=x.dtype)
    x, dy = layout.to_batch_last(x), layout.to_batch_last(dy)
    if dy.numel():
        geometry, _ = geometry_of(conv, tuple(x.shape), n_out)
        kernels.weight_gradient(
            *(geometry, indptr.data_ptr(), indices.data_ptr(), x.data_ptr(), dy.data_ptr()),
            *(0, 0, 0, grad.data_ptr(), 0, native.threads()),
        )
    if order is None:
        return grad
    return torch.empty_like(grad).index_copy_(0, order, grad)
