"""Backward passes that autograd records, for second and higher derivatives.

The kernels' backward passes are opaque to autograd. Where a backward pass is recorded itself
(``create_graph=True``), each autograd function here computes its output again with operations that
autograd can differentiate any number of times, and differentiates that. Nothing of the gradient is
deferred to another layer then, and what was deferred in passes that are not recorded is accounted for:
the recorded pass reads its inputs once more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from rewire.ops.norms import Norm
from rewire.ops.reference import Convolution
from rewire.ops.topology import Topology


def gradients(
    again: Callable[..., Tensor],
    inputs: Sequence[Tensor | None],
    needs: Sequence[bool],
    dy: Tensor,
) -> tuple[Tensor | None, ...]:
    """Gradients of ``again(*inputs)`` where they are needed, with a graph of their own; else None.

    Args:
        again: computes the output, with operations that autograd knows.
        inputs: as autograd saved them, so that they are connected to the graph.
        needs: for which of them a gradient is returned.
        dy: gradient of the output, which is in panels if this is.
    """
    # A view each: an input may depend on another one, and only direct dependence counts here.
    views = [_view(x) if need else x for x, need in zip(inputs, needs, strict=True)]
    wanted = [view for view, need in zip(views, needs, strict=True) if need]
    with torch._C.DisableTorchFunction(), torch.autocast(dy.device.type, enabled=False):
        y = again(*views)
        if y.dim() != dy.dim():
            y = panels(y, dy.shape[-1])
        found = iter(torch.autograd.grad(y, wanted, dy, create_graph=True))  # type: ignore[arg-type]
    return tuple(next(found) if need else None for need in needs)


def _view(x: Tensor | None) -> Tensor:
    assert x is not None
    return x.view_as(x) if x.requires_grad else x.detach().requires_grad_()


def refuse_probe() -> None:
    """Raise for a backward pass that is recorded while a rewirer collects gradients."""
    raise RuntimeError(
        "a rewirer collects the gradients of inactive connections in this step, and their second "
        "derivatives are not supported: compute what needs create_graph=True (a gradient penalty, say) "
        "only in steps where rewirer.watches(rewirer.t + 1) is False"
    )


def images(x: Tensor) -> Tensor:
    """(N, C, H, W) of images, in panels or not."""
    if x.dim() != 5:
        return x
    merged: Tensor = x.permute(0, 4, 1, 2, 3).flatten(0, 1)
    return merged


def panels(x: Tensor, panel: int) -> Tensor:
    """Images (N, C, H, W) as (N / panel, C, H, W, panel)."""
    split: Tensor = x.unflatten(0, (-1, panel)).permute(0, 2, 3, 4, 1)
    return split


def product(
    conv: Convolution, x: Tensor, values: Tensor, bias: Tensor | None, topology: Topology
) -> Tensor:
    """The output of a layer, for images in panels or not, or for samples of a linear layer."""
    if x.dim() == 2:
        y: Tensor = torch.ops.rewire.linear(x, values, bias, *topology, False)
        return y
    sizes = (list(conv.kernel), list(conv.stride), list(conv.padding), list(conv.dilation))
    y = torch.ops.rewire.conv2d(images(x), values, bias, *topology, *sizes)
    return y


def rectified(y: Tensor, z: Tensor | None) -> Tensor:
    """``y`` where the ReLU's output ``z``, maybe in panels, is positive; all of it if there is none."""
    return y if z is None else y.masked_fill(images(z.detach()) <= 0, 0)


def batch_norm(x: Tensor, norm: Norm) -> Tensor:
    """The output of a batch norm and maybe its ReLU, for images in panels or not."""
    norm.read()
    # Statistics of the batch are computed again, so that gradients flow through them.
    mean, variance = (None, None) if norm.training else (norm.mean, norm.variance)
    y = F.batch_norm(images(x), mean, variance, norm.weight, norm.bias, norm.training, eps=norm.eps)
    return y.relu() if norm.relu else y
