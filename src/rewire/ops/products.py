"""Products over the connections of a layer: forward, all gradients, and the gradient anywhere.

These compute and know nothing of autograd: by the kernels where there are any, else by their reference
twins. What comes in is in any memory, what goes out is contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from rewire.engine import graph as ir
from rewire.engine.planned import Planned
from rewire.engine.run import Data, Run
from rewire.ops import layout, native, precision, reference, sharding
from rewire.ops.reference import Convolution
from rewire.ops.topology import Topology, ensure, refuse_retired


@lru_cache(maxsize=1024)
def output_shape(conv: Convolution, shape: tuple[int, ...], n_out: int) -> tuple[int, ...]:
    """The shape of the output of images of the given shape."""
    return (shape[0], n_out, *conv.output_size(shape[2], shape[3]))


def check(
    conv: Convolution, x: Tensor, values: Tensor, bias: Tensor | None, topology: Topology
) -> Topology:
    """Raise unless these belong together; returns the connections as :func:`forward` may read them."""
    return check_layer(conv, x.shape[1], x.dtype, values, bias, topology)


def check_layer(
    conv: Convolution,
    channels: int,
    dtype: torch.dtype,
    values: Tensor,
    bias: Tensor | None,
    topology: Topology,
) -> Topology:
    """The same for an input of so many channels."""
    indptr, indices = topology[:2]
    taps, n_out = conv.kernel[0] * conv.kernel[1], indptr.numel() - 1
    if type(values) is not Parameter and type(values) is not Tensor:
        sharding.refuse_sharded(values)
    count = indices.numel()
    if values.shape not in ((count, 1), (count,)):
        refuse_retired(topology)
        raise ValueError(
            f"values has shape {tuple(values.shape)}, expected one value for each of the "
            f"{count} connections: ({count}, 1) or ({count},)"
        )
    if not precision.belong(dtype, values.dtype) or (
        bias is not None and bias.dtype != values.dtype
    ):
        given = f"input {dtype}, values {values.dtype}"
        raise ValueError(
            f"types differ ({given}{'' if bias is None else f', bias {bias.dtype}'}): "
            "convert the input or the layer with .to(dtype)"
        )
    if bias is not None and (bias.dim() != 1 or bias.numel() != n_out):
        raise ValueError(f"bias has shape {tuple(bias.shape)}, expected ({n_out},)")
    return ensure(topology, channels * taps, taps)


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


def has_tangents() -> bool:
    """Whether forward-mode differentiation is active (``torch.func.jvp``, dual numbers)."""
    return forward_ad._current_level >= 0


def refuse_tangents() -> None:
    """The operators have no rule for forward mode; they must not lose its tangents silently."""
    if has_tangents():
        raise NotImplementedError(
            "torch.ops.rewire has no forward-mode derivatives: call the layers, or the functions "
            "in rewire.ops"
        )


def image(x: Tensor) -> Tensor:
    return x[:, :, None, None] if x.dim() == 2 else x


def reference_forward(
    conv: Convolution, x: Tensor, values: Tensor, bias: Tensor | None, topology: Topology
) -> Tensor:
    """The output of a layer in torch's own operations, which every transform differentiates."""
    outputs, inputs = reference.rows_of(topology.indptr), topology.indices.long()
    n_out = topology.indptr.numel() - 1
    y = reference.forward(conv, image(x), values.flatten(), bias, outputs, inputs, n_out)
    return (y if x.dim() == 4 else y.flatten(1)).contiguous()


def _computed_in(x: Tensor, values: Tensor) -> torch.dtype:
    """The type in which a product that has no kernels of its own is computed."""
    return values.dtype if x.dtype != values.dtype else ir.numbers(x.dtype)


def forward(
    conv: Convolution, x: Tensor, values: Tensor, bias: Tensor | None, topology: Topology
) -> Tensor:
    """The output of a layer."""
    n_out = topology.indptr.numel() - 1
    kernels = native.kernels(x)
    if kernels is None and (wide := _computed_in(x, values)) is not x.dtype:
        bias = None if bias is None else bias.to(wide)
        return forward(conv, x.to(wide), values.to(wide), bias, topology).to(x.dtype)
    if kernels is None:
        if x.is_cpu and native.available() and x.dtype not in native.KERNEL_DTYPES:
            native.warn_of_reference(x.dtype)
        return reference_forward(conv, x, values, bias, topology)
    if x.numel() == 0 or n_out == 0:
        size = conv.output_size(x.shape[2], x.shape[3]) if x.dim() == 4 else ()
        y = x.new_zeros((x.shape[0], n_out, *size))
        return y if bias is None else y.add_(bias.view(-1, *(1,) * len(size)))
    planned = _planned(conv, x, n_out, bias is not None, (False,) * 3)
    return planned.forward(_run(topology, x, values, bias))[0]


def backward(
    conv: Convolution,
    dy: Tensor,
    x: Tensor,
    values: Tensor,
    topology: Topology,
    needs: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """Gradients of input, values and bias, None for each that is not needed."""
    if native.kernels(x) is None and (wide := _computed_in(x, values)) is not x.dtype:
        found = backward(conv, dy.to(wide), x.to(wide), values.to(wide), topology, needs)
        types = (x.dtype, values.dtype, values.dtype)
        pairs = zip(found, types, strict=True)
        return tuple(None if grad is None else grad.to(dtype) for grad, dtype in pairs)
    if native.kernels(x) is None:
        dx = dw = db = None
        outputs, inputs = reference.rows_of(topology.indptr), topology.indices.long()
        picture = image(x)
        if needs[0]:
            dx = reference.input_gradient(
                conv, image(dy), tuple(picture.shape), values.flatten(), outputs, inputs
            )
            dx = dx.view(x.shape).contiguous()
        if needs[1]:
            dw = reference.weight_gradient(conv, image(dy), picture, outputs, inputs)
            dw = dw.view(values.shape)
        if needs[2]:
            db = dy.transpose(0, 1).flatten(1).sum(1)
        return dx, dw, db
    n_out = topology.indptr.numel() - 1
    if dy.numel() == 0 or x.numel() == 0:
        zeros = torch.zeros(x.shape, dtype=x.dtype), torch.zeros_like(values)
        found = (*zeros, values.new_zeros(n_out))
        if needs[2] and dy.numel():
            found[2].copy_(dy.transpose(0, 1).flatten(1).sum(1))
        return tuple(grad if need else None for grad, need in zip(found, needs, strict=True))
    if not any(needs):
        return None, None, None
    planned = _planned(conv, x, n_out, bool(needs[2]), tuple(map(bool, needs)))
    bias = values.new_empty(n_out) if needs[2] else None  # its elements do not matter
    run = _run(topology, x, values, bias)
    if needs[1]:
        planned.prepare(run)
    else:  # nothing reads the input
        run.arena = planned.new_arena()
    dx, dw, *rest = planned.backward(run, [dy], needs if needs[2] else needs[:2])
    db = rest[0] if rest else None
    return dx, *(None if grad is None else grad.to(values.dtype) for grad in (dw, db))


@lru_cache(maxsize=4096)
def _plan(
    instructions: str,
    dtype: torch.dtype,
    conv: Convolution,
    shape: tuple[int, ...],
    n_out: int,
    bias: bool,
    needs: tuple[bool, ...],
) -> Planned:
    """The plan of a graph with one node."""
    attrs: Any = ir.Linear(0, False)
    out: tuple[int, ...] = (shape[0], n_out)
    if len(shape) == 4:
        attrs = ir.Conv(conv.kernel, conv.stride, conv.padding, conv.dilation, 0, False)
        out = output_shape(conv, shape, n_out)
    shapes = (shape, (), (n_out,)) if bias else (shape, ())  # connections come and go
    types = (dtype, ir.numbers(dtype), ir.numbers(dtype))
    inputs = tuple(ir.InputMeta(*meta) for meta in zip(shapes, types, needs, strict=False))
    operands = (~0, ~1, ~2 if bias else None)
    node = ir.Node(
        "conv2d" if len(shape) == 4 else "linear", attrs, operands, out, any(needs), dtype
    )
    return Planned(ir.Graph((node,), inputs, (0,)))


def _planned(
    conv: Convolution, x: Tensor, n_out: int, bias: bool, needs: tuple[bool, ...]
) -> Planned:
    kind = native.instruction_set()
    return _plan(kind, x.dtype, conv, tuple(x.shape), n_out, bias, needs)


def _run(topology: Topology, x: Tensor, *parameters: Tensor | None) -> Run:
    dtype = ir.numbers(x.dtype)
    given = [x, *(t.to(dtype) for t in parameters if t is not None)]
    return Run(given, Data((topology,), (), (None,), False))


def gradient_over(
    conv: Convolution, dy: Tensor, x: Tensor, indptr: Tensor, indices: Tensor
) -> Tensor:
    """The weight gradient at connections that are given by output unit, int32; there are kernels."""
    kernels, x, dy = native.kernels(x), layout.to_batch_last(x), layout.to_batch_last(dy)
    assert kernels is not None
    if dy.numel() == 0 or x.numel() == 0 or indices.numel() == 0:
        return torch.zeros(indices.numel(), dtype=ir.numbers(x.dtype))
    grad = native.empty((indices.numel(),), (1,), ir.numbers(x.dtype))
    size, out = (tuple(t.shape[2:]) or (1, 1) for t in (x, dy))
    geometry = native.module().Geometry(
        *(x.shape[0], x.shape[1], *size, dy.shape[1], *out),
        *(*conv.kernel, *conv.stride, *conv.padding, *conv.dilation),
        *(0, False, False),
    )
    connections = native.module().TopologyOperands(indptr=0, indices=1)
    step = native.module().WeightGradient(
        geometry=geometry, topology=connections, x=2, dy=3, dvalues=4
    )
    native.run_step(kernels, step, (indptr, indices, x, dy, grad))
    return grad


def gradient_at(
    conv: Convolution, dy: Tensor, x: Tensor, outputs: Tensor, inputs: Tensor
) -> Tensor:
    """The weight gradient at given coordinates, in any order."""
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
    if native.kernels(x) is None:
        wide = _computed_in(x, x)
        return reference.weight_gradient(
            conv, image(dy).to(wide), image(x).to(wide), outputs, inputs
        )
    keys = outputs * n_in + inputs
    order = None if bool((keys.diff() >= 0).all()) else torch.argsort(keys)
    indices = (inputs if order is None else inputs[order]).int()
    indptr = torch.zeros(n_out + 1, dtype=torch.int32)
    indptr[1:] = torch.bincount(outputs, minlength=n_out).cumsum(0)
    grad = gradient_over(conv, dy, x, indptr, indices)
    return grad if order is None else torch.empty_like(grad).index_copy_(0, order, grad)
