"""Products over the connections of a layer: forward, both gradients, and the gradient anywhere.

``linear`` and ``conv2d`` are torch.library operators (``torch.ops.rewire.*``) with autograd and fake
rules, so they live in ``torch.compile`` graphs and under dispatch modes. In plain eager code the
functions here go straight to the same kernels: the dispatcher's Python path costs more than a small
layer computes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import FunctionCtx

from rewire.ops import layout, native, reference
from rewire.ops.reference import Convolution
from rewire.ops.topology import Topology, ensure

LINEAR = Convolution()
# Called in the backward pass of a layer with its sizes, input and output gradient.
Probe = Callable[[Convolution, Tensor, Tensor], None]
_TOPOLOGY = "Tensor indptr, Tensor indices, Tensor slots, Tensor outputs, Tensor order"
_CONV = "int[] kernel, int[] stride, int[] padding, int[] dilation"
_library = torch.library.Library("rewire", "FRAGMENT")


@lru_cache(maxsize=1024)
def _geometry(conv: Convolution, shape: tuple[int, ...], n_out: int) -> tuple[Any, tuple[int, ...]]:
    """The kernel's sizes and the shape of the output."""
    height, width = shape[2:] if len(shape) == 4 else (1, 1)
    out = conv.output_size(height, width)
    sizes = native.geometry(
        *(shape[0], shape[1], height, width, n_out, *out),
        *(*conv.kernel, *conv.stride, *conv.padding, *conv.dilation),
    )
    return sizes, (shape[0], n_out, *out)[: len(shape)]


def _check(
    conv: Convolution, x: Tensor, values: Tensor, bias: Tensor | None, topology: Topology
) -> None:
    taps, n_out = conv.kernel[0] * conv.kernel[1], topology.indptr.numel() - 1
    if values.dim() != 1 or values.numel() != topology.indices.numel():
        raise ValueError(
            f"values has shape {tuple(values.shape)}, expected one value for each of the "
            f"{topology.indices.numel()} connections"
        )
    if x.dtype != values.dtype or (bias is not None and bias.dtype != x.dtype):
        given = f"input {x.dtype}, values {values.dtype}"
        raise ValueError(
            f"types differ ({given}{'' if bias is None else f', bias {bias.dtype}'}): "
            "convert the input or the layer with .to(dtype)"
        )
    if bias is not None and tuple(bias.shape) != (n_out,):
        raise ValueError(f"bias has shape {tuple(bias.shape)}, expected ({n_out},)")
    ensure(topology, x.shape[1] * taps, taps)


def _check_image(conv: Convolution, x: Tensor) -> None:
    height, width = conv.output_size(x.shape[2], x.shape[3])
    if height < 1 or width < 1:
        raise ValueError(
            f"an image of {x.shape[2]} x {x.shape[3]} is smaller than the kernel {conv.kernel} "
            f"with dilation {conv.dilation} and padding {conv.padding}"
        )


def _check_gradient(conv: Convolution, dy: Tensor, x: Tensor, n_out: int) -> None:
    out = conv.output_size(x.shape[2], x.shape[3]) if x.dim() == 4 else ()
    fits = x.dim() in (2, 4) and tuple(dy.shape) == (x.shape[0], n_out, *out)
    if not fits or dy.dtype != x.dtype or (x.dim() == 2 and conv.kernel != (1, 1)):
        raise ValueError(
            f"input {tuple(x.shape)} {x.dtype} and output gradient {tuple(dy.shape)} {dy.dtype} "
            f"do not belong together in a layer with {n_out} output units"
        )


def _refuse_tangents() -> None:
    """Forward-mode differentiation has no rule here; it must not lose its tangents silently."""
    if forward_ad._current_level >= 0:
        raise NotImplementedError("sparse layers have no forward-mode derivative")


def _image(x: Tensor) -> Tensor:
    return x[:, :, None, None] if x.dim() == 2 else x


def _forward(
    conv: Convolution,
    x: Tensor,
    values: Tensor,
    bias: Tensor | None,
    topology: Topology,
    relu: bool = False,
) -> Tensor:
    """``x`` is batch-last where there are kernels for it, and so is the result."""
    n_out = topology.indptr.numel() - 1
    kernels = native.kernels(x)
    if kernels is None:
        outputs = reference.rows_of(topology.indptr)
        y = reference.forward(
            conv, _image(x), values, bias, outputs, topology.indices.long(), n_out
        )
        y = layout.to_batch_last(y if x.dim() == 4 else y.flatten(1))
        return y.relu_() if relu else y
    values = values.contiguous()
    bias = None if bias is None else bias.contiguous()
    geometry, shape = _geometry(conv, tuple(x.shape), n_out)
    y = native.empty(kernels, shape, layout.strides(shape), x)
    if y.numel():
        kernels.forward(
            *(geometry, topology.indptr.data_ptr(), topology.indices.data_ptr()),
            *(values.data_ptr(), native.address(bias), x.data_ptr(), y.data_ptr()),
            *(relu, native.threads()),
        )
    return y


def _backward(
    conv: Convolution,
    dy: Tensor,
    x: Tensor,
    values: Tensor,
    topology: Topology,
    needs: tuple[bool, ...],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of input, values and bias, an empty tensor for each that is not needed."""
    kernels = native.kernels(x)
    dx, dw, db = (values.new_empty(0) for _ in range(3))
    if kernels is None:
        outputs, inputs = reference.rows_of(topology.indptr), topology.indices.long()
        image = _image(x)
        if needs[0]:
            dx = reference.input_gradient(
                conv, _image(dy), tuple(image.shape), values, outputs, inputs
            ).view(x.shape)
            dx = layout.to_batch_last(dx)
        if needs[1]:
            dw = reference.weight_gradient(conv, _image(dy), image, outputs, inputs)
        if needs[2]:
            db = dy.transpose(0, 1).flatten(1).sum(1)
        return dx, dw, db
    x, dy, values = layout.to_batch_last(x), layout.to_batch_last(dy), values.contiguous()
    geometry, _ = _geometry(conv, tuple(x.shape), topology.indptr.numel() - 1)
    threads = native.threads()
    rows = (topology.indptr.data_ptr(), topology.indices.data_ptr())
    slots = (topology.slots.data_ptr(), topology.outputs.data_ptr(), topology.order.data_ptr())
    if needs[0]:
        dx = native.empty(kernels, tuple(x.shape), layout.strides(tuple(x.shape)), x)
    if needs[1]:
        dw = torch.empty_like(values)
    if dy.numel() == 0:
        return dx.zero_(), dw.zero_(), dy.new_zeros(topology.indptr.numel() - 1 if needs[2] else 0)
    source = (values.data_ptr(), x.data_ptr(), dy.data_ptr())
    if needs[0] and needs[1]:
        kernels.gradients(geometry, *slots, *source, dx.data_ptr(), dw.data_ptr(), threads)
    elif needs[0]:
        kernels.input_gradient(geometry, *slots, source[0], source[2], dx.data_ptr(), threads)
    elif needs[1]:
        kernels.weight_gradient(geometry, *rows, *source[1:], dw.data_ptr(), threads)
    if needs[2]:
        n_out = dy.shape[1]
        db = torch.empty(n_out, dtype=dy.dtype)
        kernels.row_sums(dy.data_ptr(), n_out, dy.numel() // n_out, db.data_ptr(), threads)
    return dx, dw, db


def _gradient_at(
    conv: Convolution, dy: Tensor, x: Tensor, outputs: Tensor, inputs: Tensor
) -> Tensor:
    taps, n_out = conv.kernel[0] * conv.kernel[1], dy.shape[1]
    n_in = x.shape[1] * taps
    if outputs.shape != inputs.shape or outputs.dim() != 1:
        raise ValueError(
            f"coordinates must be two 1-D tensors of one length, got {tuple(outputs.shape)} and "
            f"{tuple(inputs.shape)}"
        )
    _check_gradient(conv, dy, x, n_out)
    for name, units, size in (("output", outputs, n_out), ("input", inputs, n_in)):
        if units.numel() and (int(units.min()) < 0 or int(units.max()) >= size):
            raise ValueError(f"{name} coordinates must be in [0, {size})")
    outputs, inputs = outputs.long(), inputs.long()
    kernels = native.kernels(x)
    if kernels is None:
        return reference.weight_gradient(conv, _image(dy), _image(x), outputs, inputs)
    keys = outputs * n_in + inputs
    order = None if bool((keys.diff() >= 0).all()) else torch.argsort(keys)
    indices = (inputs if order is None else inputs[order]).int()
    indptr = torch.zeros(n_out + 1, dtype=torch.int32)
    indptr[1:] = torch.bincount(outputs, minlength=n_out).cumsum(0)
    grad = torch.zeros(indices.numel(), dtype=x.dtype)
    x, dy = layout.to_batch_last(x), layout.to_batch_last(dy)
    if dy.numel():
        geometry, _ = _geometry(conv, tuple(x.shape), n_out)
        kernels.weight_gradient(
            *(geometry, indptr.data_ptr(), indices.data_ptr(), x.data_ptr(), dy.data_ptr()),
            *(grad.data_ptr(), native.threads()),
        )
    if order is None:
        return grad
    return torch.empty_like(grad).index_copy_(0, order, grad)


# The operators -----------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def _interned(*sizes: tuple[int, int]) -> Convolution:
    return Convolution(*sizes)


def _conv(*sizes: list[int]) -> Convolution:
    return _interned(*((a, b) for a, b in sizes))


def _check_dims(x: Tensor, dims: int, name: str) -> None:
    if x.dim() != dims:
        wanted = (
            "2-D input (batch, units)"
            if dims == 2
            else "4-D input (batch, channels, height, width)"
        )
        raise ValueError(f"{name} takes a {wanted}, got {tuple(x.shape)}")


def _checked_backward(
    conv: Convolution,
    dy: Tensor,
    x: Tensor,
    values: Tensor,
    topology: Topology,
    needs: tuple[bool, ...],
) -> tuple[Tensor, Tensor, Tensor]:
    _check(conv, x, values, None, topology)
    _check_gradient(conv, dy, x, topology.indptr.numel() - 1)
    return _backward(conv, dy, x, values, topology, needs)


def _linear_op(x: Tensor, values: Tensor, bias: Tensor | None, *topology: Any) -> Tensor:
    *tensors, row_major = topology
    a = Topology(*tensors)
    _check_dims(x, 2, "linear")
    _refuse_tangents()
    _check(LINEAR, x, values, bias, a)
    y = _forward(LINEAR, layout.to_batch_last(x), values, bias, a)
    return layout.to_row_major(y) if row_major else y


def _linear_backward_op(dy: Tensor, x: Tensor, values: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    *tensors, needs = rest
    return _checked_backward(LINEAR, dy, x, values, Topology(*tensors), tuple(needs))


def _linear_gradient_at_op(dy: Tensor, x: Tensor, outputs: Tensor, inputs: Tensor) -> Tensor:
    return _gradient_at(LINEAR, dy, x, outputs, inputs)


def _conv2d_op(x: Tensor, values: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    topology, conv = Topology(*rest[:5]), _conv(*rest[5:])
    _check_dims(x, 4, "conv2d")
    _refuse_tangents()
    _check(conv, x, values, bias, topology)
    _check_image(conv, x)
    return _forward(conv, layout.to_batch_last(x), values, bias, topology)


def _conv2d_backward_op(dy: Tensor, x: Tensor, values: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    topology, conv = Topology(*rest[:5]), _conv(*rest[5:9])
    return _checked_backward(conv, dy, x, values, topology, tuple(rest[9]))


def _conv2d_gradient_at_op(
    dy: Tensor, x: Tensor, outputs: Tensor, inputs: Tensor, *conv: Any
) -> Tensor:
    return _gradient_at(_conv(*conv), dy, x, outputs, inputs)


def _linear_fake(
    x: Tensor, values: Tensor, bias: Tensor | None, indptr: Tensor, *rest: Any
) -> Tensor:
    n_out = indptr.shape[0] - 1
    return x.new_empty((x.shape[0], n_out)) if rest[-1] else x.new_empty((n_out, x.shape[0])).t()


def _conv2d_fake(
    x: Tensor, values: Tensor, bias: Tensor | None, indptr: Tensor, *rest: Any
) -> Tensor:
    size = _conv(*rest[4:]).output_size(x.shape[2], x.shape[3])
    return x.new_empty((indptr.shape[0] - 1, *size, x.shape[0])).permute(3, 0, 1, 2)


def _backward_fake(dy: Tensor, x: Tensor, values: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    needs = rest[-1]
    shape = (*x.shape[1:], x.shape[0])
    dx = x.new_empty(shape).permute(-1, *range(x.dim() - 1))
    return (
        dx if needs[0] else x.new_empty(0),
        values.new_empty(values.shape) if needs[1] else values.new_empty(0),
        dy.new_empty(dy.shape[1]) if needs[2] else dy.new_empty(0),
    )


def _gradient_at_fake(dy: Tensor, x: Tensor, outputs: Tensor, *rest: Any) -> Tensor:
    return x.new_empty(outputs.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, values, _, *rest = inputs
    ctx.save_for_backward(x, values, *rest[:5])
    ctx.rest = rest[5:]


def _needs(ctx: Any) -> list[bool]:
    return list(ctx.needs_input_grad[:3])


def _grads(ctx: Any, grads: tuple[Tensor, ...], total: int) -> tuple[Tensor | None, ...]:
    kept = [g if need else None for g, need in zip(grads, _needs(ctx), strict=True)]
    return (*kept, *[None] * (total - 3))


def _linear_autograd(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, values, *topology = ctx.saved_tensors
    grads = torch.ops.rewire.linear_backward(dy, x, values, *topology, _needs(ctx))
    return _grads(ctx, grads, 9)


def _conv2d_autograd(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, values, *topology = ctx.saved_tensors
    grads = torch.ops.rewire.conv2d_backward(dy, x, values, *topology, *ctx.rest, _needs(ctx))
    return _grads(ctx, grads, 12)


def _define(name: str, schema: str, implementation: Any, fake: Any) -> None:
    _library.define(f"{name}({schema}", tags=())
    _library.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"rewire::{name}", fake, lib=_library)


_define(
    "linear",
    f"Tensor x, Tensor values, Tensor? bias, {_TOPOLOGY}, bool row_major) -> Tensor",
    _linear_op,
    _linear_fake,
)
_define(
    "linear_backward",
    f"Tensor dy, Tensor x, Tensor values, {_TOPOLOGY}, bool[] needs) -> (Tensor, Tensor, Tensor)",
    _linear_backward_op,
    _backward_fake,
)
_define(
    "linear_gradient_at",
    "Tensor dy, Tensor x, Tensor outputs, Tensor inputs) -> Tensor",
    _linear_gradient_at_op,
    _gradient_at_fake,
)
_define(
    "conv2d",
    f"Tensor x, Tensor values, Tensor? bias, {_TOPOLOGY}, {_CONV}) -> Tensor",
    _conv2d_op,
    _conv2d_fake,
)
_define(
    "conv2d_backward",
    f"Tensor dy, Tensor x, Tensor values, {_TOPOLOGY}, {_CONV}, bool[] needs) -> (Tensor, Tensor, Tensor)",
    _conv2d_backward_op,
    _backward_fake,
)
_define(
    "conv2d_gradient_at",
    f"Tensor dy, Tensor x, Tensor outputs, Tensor inputs, {_CONV}) -> Tensor",
    _conv2d_gradient_at_op,
    _gradient_at_fake,
)


def _no_second_derivative(ctx: Any, *grads: Tensor) -> Any:
    raise RuntimeError("sparse layers have no second derivative")


for _name in ("linear_backward", "conv2d_backward"):
    torch.library.register_autograd(f"rewire::{_name}", _no_second_derivative, lib=_library)
for _name, _rule in (("linear", _linear_autograd), ("conv2d", _conv2d_autograd)):
    torch.library.register_autograd(f"rewire::{_name}", _rule, setup_context=_save, lib=_library)
    for _device in ("cpu", "cuda"):
        torch.library.register_autocast(f"rewire::{_name}", _device, torch.float32, lib=_library)


# Eager calls -------------------------------------------------------------------------------------


class _Product(torch.autograd.Function):
    """The operators above without the dispatcher; ``conv`` is LINEAR for a linear layer."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        x: Tensor,
        values: Tensor,
        bias: Tensor | None,
        topology: Topology,
        conv: Convolution,
        row_major: bool,
        relu: bool,
        probe: Probe | None,
    ) -> Tensor:
        given, x = x, layout.to_batch_last(x)
        y = _forward(conv, x, values, bias, topology, relu)
        ctx.save_for_backward(x, values, *topology, y if relu else None)  # type: ignore[arg-type]
        # The gradient of a row-major input goes back to where rows are wanted.
        ctx.conv, ctx.rows = conv, x is not given and x.dim() == 2  # type: ignore[attr-defined]
        ctx.probe = probe  # type: ignore[attr-defined]
        return layout.to_row_major(y) if row_major else y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, values, *topology, z = ctx.saved_tensors
        needs = ctx.needs_input_grad[:3]
        if z is not None:
            dy = _rectify_gradient(dy, z)
        if ctx.probe is not None:
            ctx.probe(ctx.conv, x, dy)
        dx, dw, db = _backward(ctx.conv, dy, x, values, Topology(*topology), needs)
        if needs[0] and ctx.rows:
            dx = layout.to_row_major(dx)
        return (
            dx if needs[0] else None,
            dw if needs[1] else None,
            db if needs[2] else None,
            *(None, None, None, None, None),
        )


def _product(
    x: Tensor,
    values: Tensor,
    bias: Tensor | None,
    topology: Topology,
    conv: Convolution,
    row_major: bool,
    relu: bool,
    probe: Probe | None,
) -> Tensor:
    _refuse_tangents()
    wanted = x.requires_grad or values.requires_grad or (bias is not None and bias.requires_grad)
    if wanted and torch.is_grad_enabled():
        result: Tensor = _Product.apply(  # type: ignore[no-untyped-call]
            x, values, bias, topology, conv, row_major, relu, probe
        )
        return result
    y = _forward(conv, layout.to_batch_last(x), values, bias, topology, relu)
    return layout.to_row_major(y) if row_major else y


def _rectify_gradient(dz: Tensor, z: Tensor) -> Tensor:
    """``dz`` where the rectified ``z`` is positive."""
    kernels = native.kernels(z)
    if kernels is None or z.numel() == 0:
        return dz * (z > 0)
    dz = layout.to_batch_last(dz)
    dy = native.empty(kernels, tuple(z.shape), layout.strides(tuple(z.shape)), z)
    kernels.rectify_gradient(
        dz.data_ptr(), z.data_ptr(), dy.data_ptr(), z.numel(), native.threads()
    )
    return dy


def _plain(x: Tensor) -> bool:
    """Whether nothing but eager autograd watches this call."""
    return (
        type(x) in (Tensor, torch.nn.Parameter)
        and not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
    )


def _direct(x: Tensor, probe: Probe | None) -> bool:
    """Whether to go past the dispatcher, which cannot take a probe along."""
    if probe is None:
        return _plain(x)
    if type(x) not in (Tensor, torch.nn.Parameter):
        raise RuntimeError(
            f"a rewiring is due and its gradients cannot be taken from a {type(x).__name__}: trace or "
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
        values: one per connection, in the order of ``topology.indices``.
        bias: (out units,) or None.
        topology: the connections, from :func:`rewire.ops.topology.build`.
        row_major: return contiguous memory instead of batch-last.
        relu: rectify the result, in the same pass over memory.
        probe: called in the backward pass with (sizes, input, output gradient).
    """
    if probe is not None and torch.compiler.is_compiling():
        return _eager_linear(x, values, bias, topology, row_major, relu, probe)
    _check_dims(x, 2, "linear")
    if not _direct(x, probe):
        y: Tensor = torch.ops.rewire.linear(x, values, bias, *topology, row_major)
        return y.relu() if relu else y
    x = _autocast(x, values)
    _check(LINEAR, x, values, bias, topology)
    return _product(x, values, bias, topology, LINEAR, row_major, relu, probe)


def conv2d(
    x: Tensor,
    values: Tensor,
    bias: Tensor | None,
    topology: Topology,
    conv: Convolution,
    relu: bool = False,
    probe: Probe | None = None,
) -> Tensor:
    """A 2-D convolution of (batch, channels, height, width) over the connections of ``topology``,
    rectified in the same pass over memory if ``relu``; ``probe`` as for :func:`linear`."""
    if probe is not None and torch.compiler.is_compiling():
        return _eager_conv2d(x, values, bias, topology, conv, relu, probe)
    _check_dims(x, 4, "conv2d")
    if not _direct(x, probe):
        sizes = (list(conv.kernel), list(conv.stride), list(conv.padding), list(conv.dilation))
        y: Tensor = torch.ops.rewire.conv2d(x, values, bias, *topology, *sizes)
        return y.relu() if relu else y
    x = _autocast(x, values)
    _check(conv, x, values, bias, topology)
    _check_image(conv, x)
    return _product(x, values, bias, topology, conv, False, relu, probe)


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
