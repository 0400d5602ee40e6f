"""Batch normalisation and dropout of batch-last activations.

In batch-last memory a channel is one contiguous run, so these are short loops; torch's own kernels
are several times slower on such strides. Their results and gradients are those of
``torch.nn.functional``, which is also what runs where these do not apply: each function here returns
None then.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rewire.ops import differentiable, layout, native, recording
from rewire.ops.norms import Norm, Relay, relay_of


def apply(function: Any, *args: Any) -> Tensor:
    result: Tensor = recording.apply(function, *args)
    return result


def kernels_for(x: Tensor) -> Any | None:
    """The kernels, if ``x`` is batch-last memory that they can read."""
    if x.numel() == 0 or not layout.prefers_batch_last(x):
        return None
    return native.kernels(x)


class _BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        norm: Norm,
        twice: bool,
        relay: Relay | None,
    ) -> Any:
        z = _batch_norm(x, residual, norm)
        kept = z if residual is not None and norm.relu else None
        ctx.save_for_backward(x, weight, bias, norm.mean, norm.variance, kept)
        ctx.options, ctx.relay, ctx.below = norm[4:], relay, relay_of(residual)
        if ctx.below is not None:
            ctx.below.sums += 1
        ctx.set_materialize_grads(False)
        norm.read()
        return (z, z.detach()) if twice else z

    @staticmethod
    def backward(ctx: Any, dz: Tensor | None, more: Tensor | None = None) -> Any:
        if torch.is_grad_enabled():
            return *_BatchNorm._recorded(ctx, dz, more), None, None, None
        x, weight, bias, mean, variance, z = ctx.saved_tensors
        found = None if ctx.relay is None else ctx.relay.take(dz, more)
        if found is not None:
            assert dz is not None
            norm = Norm(weight, bias, mean, variance, *ctx.options)
            dweight, dbias, factors = found
            return _BatchNorm._gradients(ctx, norm.leave(dz, x, factors), dweight, dbias, dz)
        if dz is None:
            dz, more = more, None
        if dz is None:
            return (None,) * 7
        kernels = native.module().f32 if x.dtype == torch.float32 else native.module().f64
        norm = Norm(weight, bias, mean, variance, *ctx.options)
        dz = layout.as_in(dz, x)
        more = None if more is None else layout.as_in(more, x)
        if more is not None and not norm.relu:
            dz, more = dz + more, None
        factors = norm.factors()
        # What passes the rectifier, which is also the residual's gradient: dz itself if there is none.
        passed: Tensor | None = dz
        if norm.relu:
            wanted = ctx.needs_input_grad[3] or factors is not None
            passed = layout.empty_like(kernels, x) if wanted else None
        if factors is None:
            dx = layout.empty_like(kernels, x)
        else:
            assert passed is not None
            dx = norm.leave(passed, x, factors)
        dweight, dbias = (torch.empty_like(mean) for _ in range(2))
        kernels.batch_norm_gradient(
            *(norm.kernel(kernels, x), x.data_ptr(), native.address(z)),
            *(dz.data_ptr(), native.address(more), dx.data_ptr()),
            native.address(passed) if norm.relu else 0,
            *(dweight.data_ptr(), dbias.data_ptr(), native.address(factors), native.threads()),
        )
        return _BatchNorm._gradients(ctx, dx, dweight, dbias, passed)

    @staticmethod
    def _recorded(ctx: Any, dz: Tensor | None, more: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradients in a backward pass that autograd records."""
        x, weight, bias, mean, variance, z = ctx.saved_tensors
        if dz is None:
            dz, more = more, None
        if dz is None:
            return (None,) * 4
        if more is not None:
            dz = dz + more

        def again(
            x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None
        ) -> Tensor:
            norm = Norm(weight, bias, mean, variance, *ctx.options)
            if z is not None:
                norm = norm._replace(relu=False)
            y = differentiable.batch_norm(x, norm)
            if residual is not None:
                y = y + differentiable.images(residual)
            return differentiable.rectified(y, z)

        needs = ctx.needs_input_grad[:4]
        # Its elements do not matter: the ReLU's mask is known.
        residual = torch.zeros_like(x) if needs[3] else None
        return differentiable.gradients(again, (x, weight, bias, residual), needs, dz)

    @staticmethod
    def _gradients(
        ctx: Any, dx: Tensor, dweight: Tensor, dbias: Tensor, passed: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad
        if wanted[3] and ctx.below is not None and passed is not None:
            ctx.below.leave(passed)
        affine = (dweight if wanted[1] else None, dbias if wanted[2] else None)
        return dx, *affine, passed if wanted[3] else None, None, None, None


def _batch_norm(x: Tensor, residual: Tensor | None, norm: Norm) -> Tensor:
    kernels = native.kernels(x)
    assert kernels is not None
    z = layout.empty_like(kernels, x)
    kernels.batch_norm(
        *(norm.kernel(kernels, x), x.data_ptr(), native.address(residual), z.data_ptr()),
        native.threads(),
    )
    return z


def can_batch_norm(x: Tensor, *others: Tensor | None, known: bool = False) -> bool:
    """Whether :func:`batch_norm` has a kernel for these tensors; ``known`` says that ``x`` is
    batch-last."""
    if (native.kernels(x) if known else kernels_for(x)) is None:
        return False
    dtype, shape = x.dtype, (x.shape[1],)
    for t in others:
        if t is not None and not (
            t.dtype == dtype and t.is_cpu and t.shape == shape and t.is_contiguous()
        ):
            return False
    return True


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of each channel, for the same ``x``."""
    kernels = native.kernels(x)
    assert kernels is not None
    channels = x.shape[1]
    mean, variance = (torch.empty(channels, dtype=x.dtype) for _ in range(2))
    kernels.moments(
        *(x.data_ptr(), channels, x.numel() // channels, layout.panel_rows(x)),
        *(mean.data_ptr(), variance.data_ptr(), native.threads()),
    )
    return mean, variance


def track(
    mean: Tensor, variance: Tensor, size: int, momentum: float, running: tuple[Tensor, Tensor]
) -> None:
    """Move the ``running`` mean and variance towards the moments of a batch, ``size`` elements each.

    Their version stays, as in torch's own batch norm: the same module may have run before, and autograd
    have saved them there.
    """
    kernels = native.kernels(mean)
    assert kernels is not None
    kernels.track(
        *(mean.data_ptr(), variance.data_ptr(), mean.numel(), momentum, size / (size - 1)),
        *(tensor.data_ptr() for tensor in running),
    )


def settle_gradient(g: Tensor, x: Tensor, factors: Tensor) -> Tensor:
    """The gradient of ``x``, of which ``factors`` say what is left to do to ``g``."""
    kernels = native.kernels(x)
    assert kernels is not None
    g, dx, channels = layout.as_in(g, x), layout.empty_like(kernels, x), x.shape[1]
    kernels.settle_gradient(
        *(g.data_ptr(), x.data_ptr(), factors.data_ptr(), channels, x.numel() // channels),
        *(layout.panel_rows(x), dx.data_ptr(), native.threads()),
    )
    return dx


def batch_norm(x: Tensor, norm: Norm, residual: Tensor | None = None) -> Tensor:
    """``relu(batch_norm(x) + residual)``, for an ``x`` that :func:`can_batch_norm` has accepted."""
    result: Tensor = _apply(x, norm, residual, False)
    return result


def residual_sum(x: Tensor, norm: Norm, residual: Tensor) -> Tensor | tuple[Tensor, Tensor]:
    """The same, where ``x`` is in panels twice: two outputs in one memory, for two readers whose
    gradients autograd then need not add up. The kernel does, as it reads them."""
    if not layout.is_panels(x):
        return batch_norm(x, norm, residual)
    relay = Relay(x, norm) if norm.relu and norm.owed is not None else None
    result: Tensor | tuple[Tensor, Tensor] = _apply(x, norm, residual, True, relay)
    if relay is not None and isinstance(result, tuple):
        for output in result:
            output._rewire_relay = relay  # type: ignore[attr-defined]
    return result


def _apply(
    x: Tensor, norm: Norm, residual: Tensor | None, twice: bool, relay: Relay | None = None
) -> Any:
    if residual is not None and not layout.just_as(residual, x):
        same = layout.image_shape(residual) == layout.image_shape(x)
        if not same or residual.dtype != x.dtype:
            raise ValueError("the residual must have the shape and type of the input")
        if not layout.lies_as(residual, x):
            moved = residual.requires_grad
            residual = apply(_Moved, residual, x) if moved else layout.as_in(residual, x)
    tensors = (x, norm.weight, norm.bias, residual)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        return apply(_BatchNorm, *tensors, norm, twice, relay)
    return _batch_norm(x, residual, norm)


class _Ready(torch.autograd.Function):
    """See :func:`ready`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return layout.ready(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        if torch.is_grad_enabled():
            return dy
        return layout.to_row_major(dy) if dy.dim() == 2 else dy


def ready(x: Tensor) -> Tensor:
    """``layout.ready(x)``, where that is a copy with a place in the graph: a layer saves it, and second
    derivatives go by way of what is saved. The gradient of rows is in rows again."""
    if not x.requires_grad or layout.is_ready(x):
        return x
    return apply(_Ready, x)


class _Moved(torch.autograd.Function):
    """Any tensor in the memory of another one, batch-last or panels."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor) -> Tensor:
        ctx.given = x.shape
        return layout.as_in(x, other)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        if torch.is_grad_enabled():
            dy = differentiable.images(dy)
            return (differentiable.panels(dy, ctx.given[-1]) if len(ctx.given) == 5 else dy), None
        if dy.shape != ctx.given:
            panels = len(ctx.given) == 5
            dy = layout.to_panels(dy, ctx.given[-1]) if panels else layout.from_panels(dy)
        return dy, None


class _FromPanels(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.panel = x.shape[-1]
        return layout.from_panels(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        if torch.is_grad_enabled():
            return differentiable.panels(dy, ctx.panel)
        return layout.to_panels(dy, ctx.panel)


def from_panels(x: Tensor) -> Tensor:
    """A result of our layers as an ordinary batch-last tensor."""
    return apply(_FromPanels, x) if layout.is_panels(x) else x


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, probability: float, seed: int) -> Tensor:
        ctx.probability, ctx.seed = probability, seed
        return _drop_out(x, probability, seed)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        if torch.is_grad_enabled():
            ones = layout.to_batch_last(torch.ones_like(dy))
            return dy * _drop_out(ones, ctx.probability, ctx.seed), None, None
        return _drop_out(layout.to_batch_last(dy), ctx.probability, ctx.seed), None, None


def _drop_out(x: Tensor, probability: float, seed: int) -> Tensor:
    kernels = native.kernels(x)
    assert kernels is not None
    y = layout.empty_like(kernels, x)
    kernels.drop_out(
        *(x.data_ptr(), x.numel(), probability, 1 / (1 - probability), seed),
        *(y.data_ptr(), native.threads()),
    )
    return y


def dropout(x: Tensor, probability: float) -> Tensor | None:
    """``F.dropout`` of a batch-last tensor, or None where torch has to do it. Takes one number from torch's
    generator, and all noise from that."""
    if kernels_for(x) is None or not 0 < probability < 1:
        return None
    return apply(_Dropout, x, probability, int(torch.randint(1 << 62, ())))
