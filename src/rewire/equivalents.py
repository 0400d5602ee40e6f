"""Classes of layers with a forward of their own that computes what ``nn.Linear`` or ``nn.Conv2d`` computes.

A class that inherits the forward of ``nn.Linear`` or ``nn.Conv2d`` is converted like these. One that has
its own is converted if it is in this table, which names public ones; :func:`register_layer` adds to it.
Nothing is tried out: a forward that only looks alike (weight standardisation, padding, scaling) leaves its
layer dense.
"""

from __future__ import annotations

import copy
from typing import Any, cast

from torch import nn
from torch.nn.modules.conv import _ConvNd

ORIGIN = "_rewire_origin"
"""Where a converted layer keeps its :class:`Origin`."""

_TORCH = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d)
_PLAIN: set[type[nn.Module] | str] = {
    "timm.layers.linear.Linear",
    "transformers.models.falcon.modeling_falcon.FalconLinear",
}
_TRANSPOSED: set[type[nn.Module] | str] = {"transformers.pytorch_utils.Conv1D"}


def register_layer(kind: type[nn.Module], *, transposed: bool = False) -> None:
    """Let :func:`rewire.sparsify` convert the layers of a class that has a forward of its own.

    Its parameters must be ``weight`` and ``bias``, which may be None, and its forward must compute
    ``F.linear(x, weight, bias)`` or, in a subclass of ``nn.Conv2d``, what that computes; subclasses that
    inherit this forward are converted, too. :func:`rewire.densify` restores the class. Known already are
    timm's ``Linear`` and the ``FalconLinear`` and ``Conv1D`` of transformers.

    Args:
        kind: a subclass of ``nn.Linear`` or ``nn.Conv2d``, or with ``transposed`` any module.
        transposed: the weight is (in, out), and the forward computes ``x @ weight + bias``.

    Example:
        >>> class Linear16(nn.Linear):
        ...     def forward(self, x):
        ...         return x.matmul(self.weight.t()) + self.bias
        >>> register_layer(Linear16)
    """
    if not isinstance(kind, type) or not issubclass(kind, nn.Module):
        raise TypeError(f"expected a class of modules, got {kind!r}")
    if not transposed and not issubclass(kind, nn.Linear | nn.Conv2d):
        raise TypeError(
            f"{kind.__qualname__} is no subclass of nn.Linear or nn.Conv2d; if it multiplies with a weight "
            "of shape (in, out), pass transposed=True"
        )
    (_TRANSPOSED if transposed else _PLAIN).add(kind)


def plain(layer: nn.Module, method: str) -> bool:
    """Whether a method of an ``nn.Linear`` or ``nn.Conv2d`` computes what torch's does."""
    owner = _owner(type(layer), method)
    return owner in (*_TORCH, _ConvNd, None) or _listed(owner, _PLAIN)


def transposed(layer: nn.Module) -> bool:
    """Whether a module computes ``x @ weight + bias``."""
    return "forward" not in vars(layer) and _listed(_owner(type(layer), "forward"), _TRANSPOSED)


def _owner(kind: type[nn.Module], method: str) -> type[nn.Module] | None:
    return next((c for c in kind.__mro__ if method in vars(c)), None)


def _listed(kind: type[nn.Module] | None, table: set[type[nn.Module] | str]) -> bool:
    return kind is not None and (kind in table or f"{kind.__module__}.{kind.__qualname__}" in table)


class Origin:
    """What a layer of another class was before it was converted, without its parameters."""

    def __init__(self, layer: nn.Module) -> None:
        self.transposed = transposed(layer)
        self.shell = object.__new__(type(layer))
        state = {key: copy.copy(value) for key, value in vars(layer).items()}
        self.shell.__dict__.update({**state, "_parameters": dict.fromkeys(layer._parameters)})

    def restored(self, layer: nn.Linear | nn.Conv2d) -> nn.Module:
        """A layer of that class with the parameters of a dense layer."""
        new = copy.copy(self.shell)
        weight, bias = layer.weight, layer.bias
        if self.transposed:
            turned = weight.detach().t().contiguous()
            weight = nn.Parameter(turned, weight.requires_grad)
        new.__dict__["_parameters"] = {"weight": weight, "bias": bias}
        new.training = layer.training
        return new


def as_linear(layer: nn.Module) -> nn.Linear:
    """The ``nn.Linear`` of a transposed layer, whose weight shares its memory."""
    weight, bias = cast(nn.Parameter, layer.weight), cast("nn.Parameter | None", layer.bias)
    n_in, n_out = weight.shape
    new = nn.Linear(n_in, n_out, bias is not None, device="meta")
    new.weight = nn.Parameter(weight.detach().t(), weight.requires_grad)
    new.weight.grad = None if weight.grad is None else weight.grad.t()
    new.register_parameter("bias", bias)
    new.training = layer.training
    new.__dict__[ORIGIN] = Origin(layer)
    return new


def origin_of(layer: nn.Module) -> Any:
    """What a layer was before it was converted, or would be now; None for torch's own classes."""
    known = vars(layer).get(ORIGIN)
    return known if known is not None or type(layer) in _TORCH else Origin(layer)
