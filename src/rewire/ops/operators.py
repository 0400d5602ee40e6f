"""The products as torch.library operators (``torch.ops.rewire.*``) with autograd, fake and autocast
rules: this is what ``torch.compile``, ``torch.jit.trace`` and dispatch modes see."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rewire.engine.graph import numbers
from rewire.ops import flop_formulas, precision, products
from rewire.ops.reference import LINEAR, Convolution, convolution
from rewire.ops.topology import Topology

_TOPOLOGY = "Tensor indptr, Tensor indices, Tensor slots, Tensor outputs, Tensor order"
_CONV = "int[] kernel, int[] stride, int[] padding, int[] dilation"
_library = torch.library.Library("rewire", "FRAGMENT")


def _conv(*sizes: list[int]) -> Convolution:
    return convolution(*((a, b) for a, b in sizes))


def _checked_backward(
    conv: Convolution,
    dy: Tensor,
    x: Tensor,
    values: Tensor,
    topology: Topology,
    needs: tuple[bool, ...],
) -> tuple[Tensor, ...]:
    topology = products.check(conv, x, values, None, topology)
    products.check_gradient(conv, dy, x, topology.indptr.numel() - 1)
    grads = products.backward(conv, dy, x, values, topology, needs)
    owners = x, values, values
    return tuple(
        owner.new_empty(0) if grad is None else grad
        for owner, grad in zip(owners, grads, strict=True)
    )


def _linear_op(x: Tensor, values: Tensor, bias: Tensor | None, *topology: Any) -> Tensor:
    products.check_dims(x, 2, "linear")
    products.refuse_tangents()
    held = products.check(LINEAR, x, values, bias, Topology(*topology))
    return products.forward(LINEAR, x, values, bias, held)


def _linear_backward_op(dy: Tensor, x: Tensor, values: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    *tensors, needs = rest
    return _checked_backward(LINEAR, dy, x, values, Topology(*tensors), tuple(needs))


def _linear_gradient_at_op(dy: Tensor, x: Tensor, outputs: Tensor, inputs: Tensor) -> Tensor:
    return products.gradient_at(LINEAR, dy, x, outputs, inputs)


def _conv2d_op(x: Tensor, values: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    topology, conv = Topology(*rest[:5]), _conv(*rest[5:])
    products.check_dims(x, 4, "conv2d")
    products.refuse_tangents()
    topology = products.check(conv, x, values, bias, topology)
    products.check_image(conv, x)
    return products.forward(conv, x, values, bias, topology)


def _conv2d_backward_op(dy: Tensor, x: Tensor, values: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    topology, conv = Topology(*rest[:5]), _conv(*rest[5:9])
    return _checked_backward(conv, dy, x, values, topology, tuple(rest[9]))


def _conv2d_gradient_at_op(
    dy: Tensor, x: Tensor, outputs: Tensor, inputs: Tensor, *conv: Any
) -> Tensor:
    return products.gradient_at(_conv(*conv), dy, x, outputs, inputs)


def _linear_fake(
    x: Tensor, values: Tensor, bias: Tensor | None, indptr: Tensor, *rest: Any
) -> Tensor:
    return x.new_empty((x.shape[0], indptr.shape[0] - 1))


def _conv2d_fake(
    x: Tensor, values: Tensor, bias: Tensor | None, indptr: Tensor, *rest: Any
) -> Tensor:
    size = _conv(*rest[4:]).output_size(x.shape[2], x.shape[3])
    return x.new_empty((x.shape[0], indptr.shape[0] - 1, *size))


def _backward_fake(dy: Tensor, x: Tensor, values: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    needs = rest[-1]
    return (
        x.new_empty(x.shape) if needs[0] else x.new_empty(0),
        values.new_empty(values.shape) if needs[1] else values.new_empty(0),
        values.new_empty(dy.shape[1]) if needs[2] else values.new_empty(0),
    )


def _gradient_at_fake(dy: Tensor, x: Tensor, outputs: Tensor, *rest: Any) -> Tensor:
    return x.new_empty(outputs.shape, dtype=numbers(x.dtype))


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
    return _grads(ctx, grads, 8)


def _conv2d_autograd(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, values, *topology = ctx.saved_tensors
    grads = torch.ops.rewire.conv2d_backward(dy, x, values, *topology, *ctx.rest, _needs(ctx))
    return _grads(ctx, grads, 12)


def _save_backward(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    dy, x, values, *rest = inputs
    ctx.save_for_backward(dy, x, values, *rest[:5])
    ctx.sizes, ctx.needs = rest[5:-1], rest[-1]
    ctx.set_materialize_grads(False)


def _second_derivatives(
    ctx: Any, dx: Tensor | None, dvalues: Tensor | None, dbias: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Gradients of output gradient, input and values, from those of what a backward operator returns."""
    dy, x, values, *topology = ctx.saved_tensors
    if ctx.sizes:
        ops, last = (torch.ops.rewire.conv2d, torch.ops.rewire.conv2d_backward), tuple(ctx.sizes)
    else:
        ops, last = (torch.ops.rewire.linear, torch.ops.rewire.linear_backward), ()

    def forward(x: Tensor, values: Tensor) -> Tensor:
        return ops[0](x, values, None, *topology, *last)  # type: ignore[no-any-return]

    def backward(dy: Tensor, x: Tensor, values: Tensor, needs: list[bool]) -> Any:
        return ops[1](dy, x, values, *topology, *last, needs)

    given, wanted = (dy, x, values), ctx.needs_input_grad[:3]
    with torch.autocast(dy.device.type, enabled=False):
        found = bilinear(forward, backward, given, (dx, dvalues, dbias), ctx.needs, wanted)
    return *found, *[None] * (len(topology) + len(ctx.sizes) + 1)


def bilinear(
    forward: Callable[[Tensor, Tensor], Tensor],
    backward: Callable[[Tensor, Tensor, Tensor, list[bool]], Any],
    given: tuple[Tensor, Tensor, Tensor],
    grads: Sequence[Tensor | None],
    needs: Sequence[bool],
    wanted: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """Gradients of output gradient, input and values, from those of what a backward pass returns.

    The product is bilinear in input and values, so that these are products of the same kind.

    Args:
        forward: the product of an input and values, without a bias.
        backward: its gradients, from an output gradient, an input and values.
        given: what the backward pass was given: output gradient, input and values.
        grads: of what it returned, or None.
        needs: what it was to return.
        wanted: which of the results are.
    """
    dy, x, values = given
    dx, dvalues, dbias = (g if need else None for g, need in zip(grads, needs, strict=True))
    needs_dy, needs_x, needs_values = wanted
    grad_dy = grad_x = grad_values = None
    if needs_dy:
        terms = []
        if dx is not None:
            terms.append(forward(dx, values))
        if dvalues is not None:
            terms.append(forward(x, dvalues))
        if dbias is not None:
            terms.append(dbias.view(-1, *(1,) * (dy.dim() - 2)).expand(dy.shape))
        grad_dy = sum(terms[1:], terms[0]) if terms else None
    both = [needs_x and dvalues is not None, needs_values and dx is not None, False]
    if any(both):
        # Where one of them is not needed, the other's argument counts for its shape alone.
        first, second = (x if dx is None else dx), (values if dvalues is None else dvalues)
        found = backward(dy, first, second, both)
        grad_x, grad_values = (g if n else None for g, n in zip(found[:2], both[:2], strict=True))
    return grad_dy, grad_x, grad_values


def _define(name: str, schema: str, implementation: Any, fake: Any) -> None:
    _library.define(f"{name}({schema}", tags=())
    _library.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"rewire::{name}", fake, lib=_library)


_define(
    "linear",
    f"Tensor x, Tensor values, Tensor? bias, {_TOPOLOGY}) -> Tensor",
    _linear_op,
    _linear_fake,
)
_define(
    "linear_backward",
    f"Tensor dy, Tensor x, Tensor values, {_TOPOLOGY}, int[] needs) -> (Tensor, Tensor, Tensor)",
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
    f"Tensor dy, Tensor x, Tensor values, {_TOPOLOGY}, {_CONV}, int[] needs) -> (Tensor, Tensor, Tensor)",
    _conv2d_backward_op,
    _backward_fake,
)
_define(
    "conv2d_gradient_at",
    f"Tensor dy, Tensor x, Tensor outputs, Tensor inputs, {_CONV}) -> Tensor",
    _conv2d_gradient_at_op,
    _gradient_at_fake,
)


def _autocast_rule(name: str, device: str) -> Any:
    """What an operator is under autocast. ``torch.library.register_autocast`` would convert the parameters,
    too, and to one type for all."""

    def rule(x: Tensor, values: Tensor, *rest: Any) -> Tensor:
        x = precision.autocast(x, values)
        with torch.autocast(device, enabled=False):
            y: Tensor = getattr(torch.ops.rewire, name)(x, values, *rest)
        return y

    return rule


for _name in ("linear_backward", "conv2d_backward"):
    torch.library.register_autograd(
        f"rewire::{_name}", _second_derivatives, setup_context=_save_backward, lib=_library
    )
for _name, _rule in (("linear", _linear_autograd), ("conv2d", _conv2d_autograd)):
    torch.library.register_autograd(f"rewire::{_name}", _rule, setup_context=_save, lib=_library)
    for _device in ("cpu", "cuda"):
        _library.impl(_name, _autocast_rule(_name, _device), f"Autocast{_device.upper()}")
flop_formulas.register()
