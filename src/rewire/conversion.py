"""Which layers of a model can be converted, and putting converted ones in their place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import TypeVar, cast

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.lazy import LazyModuleMixin

from rewire.budgets import LayerSize
from rewire.nn.layer import ConnectedLayer

M = TypeVar("M", bound=nn.Module)
Dense = nn.Linear | nn.Conv2d
Names = dict[nn.Module, list[str]]  # each module, once, and every name that it has

# What a user may expect to become sparse; only nn.Linear and nn.Conv2d do.
_LAYERS = (nn.Linear, nn.Bilinear, _ConvNd, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)
_HOOKS = (
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
    *("_backward_hooks", "_backward_pre_hooks", "_is_full_backward_hook"),
)


def names_of(model: nn.Module) -> Names:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    names: Names = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, ConnectedLayer):
            raise ValueError(
                f"the model is sparse already ({name or 'it'} is a {type(module).__name__}); "
                "call rewire.densify first"
            )
        names.setdefault(module, []).append(name)
    return names


def sort_out(
    names: Names, densities: Mapping[str, float] | None, keep_dense: str | Iterable[str]
) -> tuple[list[Dense], dict[str, str]]:
    """The layers to convert, and what is in the way of the others, by name."""
    attentions = [module for module in names if isinstance(module, nn.MultiheadAttention)]
    inside = {inner for module in attentions for inner in module.modules()} - {*attentions}
    found = [m for m in names if isinstance(m, _LAYERS) and m not in inside]
    keep_dense = (keep_dense,) if isinstance(keep_dense, str) else tuple(keep_dense)
    for argument, patterns in (("keep_dense", keep_dense), ("density", tuple(densities or ()))):
        for pattern in patterns:
            if not any(matches(pattern, names[module]) for module in found):
                existing = ", ".join(names[module][0] for module in found)
                raise ValueError(
                    f"{argument} names {pattern!r}, which matches no layer; the layers are: "
                    f"{existing or 'none'}"
                )
    owners: dict[int, list[str]] = {}
    for module, places in names.items():
        for key, parameter in module._parameters.items():
            owners.setdefault(id(parameter), []).append(f"{places[0]}.{key}".lstrip("."))
    encoders = (module for module in names if isinstance(module, nn.TransformerEncoderLayer))
    bypassed = {child for encoder in encoders for child in encoder.children()}

    layers: list[Dense] = []
    obstacles: dict[str, str] = {}
    for module in found:
        places = names[module]
        unasked = densities is not None and wanted_of(densities, places) is None
        if unasked or any(matches(pattern, places) for pattern in keep_dense):
            continue
        obstacle = _obstacle(module, owners, module in bypassed)
        if obstacle is None:
            layers.append(cast(Dense, module))
        else:
            obstacles[places[0]] = obstacle
    if not layers:
        reasons = listed(obstacles) or "it needs an nn.Linear or nn.Conv2d that may be sparse"
        raise ValueError(f"the model has no layer to convert: {reasons}")
    return layers, obstacles


def _obstacle(layer: nn.Module, owners: Mapping[int, list[str]], bypassed: bool) -> str | None:
    """Why a layer has no sparse form, or None if it has one."""
    if not isinstance(layer, nn.Linear | nn.Conv2d):
        return f"there is no sparse {type(layer).__name__}"
    if isinstance(layer, LazyModuleMixin) and layer.has_uninitialized_params():
        return "its size is not known yet, run one batch first"
    if set(layer._parameters) != {"weight", "bias"} or layer._buffers or layer._modules:
        return "its weight is computed (parametrization, weight norm, pruning), remove that first"
    base = nn.Linear if isinstance(layer, nn.Linear) else nn.Conv2d
    for method in ("forward", "_conv_forward"):
        own = getattr(type(layer), method, None) is not getattr(base, method, None)
        if own or method in vars(layer):
            return f"{type(layer).__name__} has a {method} of its own"
    if isinstance(layer, nn.Conv2d) and layer.groups != 1:
        return f"a grouped convolution, groups={layer.groups}"
    for parameter in (layer.weight, layer.bias):
        if parameter is not None and len(owners[id(parameter)]) > 1:
            return f"tied weights: {' = '.join(owners[id(parameter)])}"
    if type(layer.weight) is not nn.Parameter or not layer.weight.is_floating_point():
        return f"its weight is a {type(layer.weight).__name__} that is not plain real numbers"
    if bypassed:
        return "nn.TransformerEncoderLayer reads its weight past its forward"
    return None if layer.weight.numel() else "it has no weights"


def matches(pattern: str, places: Iterable[str]) -> bool:
    """Whether a layer of these names is meant: its name, a glob, or the name of what holds it."""
    return any(
        name == pattern or name.startswith(f"{pattern}.") or fnmatchcase(name, pattern)
        for name in places
    )


def wanted_of(densities: Mapping[str, float], places: Iterable[str]) -> float | None:
    return next((value for glob, value in densities.items() if matches(glob, places)), None)


def size_of(layer: Dense, name: str) -> LayerSize:
    n_out, n_in, *kernel = layer.weight.shape
    return LayerSize(name, n_in, n_out, cast("tuple[int, int]", tuple(kernel) or (1, 1)))


def listed(obstacles: Mapping[str, str]) -> str:
    return "; ".join(f"{name or 'the layer'} ({why})" for name, why in obstacles.items())


def carry_over(old: nn.Module, new: nn.Module) -> nn.Module:
    """Give ``new`` the mode, the frozen parameters and the hooks of ``old``."""
    new.training = old.training
    for parameter, like in zip(_parameters(new), _parameters(old), strict=True):
        parameter.requires_grad_(like.requires_grad)
    for name in _HOOKS:  # the same objects, so that a hook's handle still removes it
        setattr(new, name, getattr(old, name))
    return new


def _parameters(layer: nn.Module) -> list[Tensor]:
    """Weight or values, then the bias if there is one."""
    first = layer.parameter if isinstance(layer, ConnectedLayer) else layer.weight
    return [tensor for tensor in (first, layer.bias) if isinstance(tensor, Tensor)]


def replace(model: M, new: Mapping[nn.Module, nn.Module]) -> M:
    for parent in list(model.modules()):
        for key, child in parent._modules.items():
            if child is not None and child in new:
                parent._modules[key] = new[child]
    return cast(M, new.get(model, model))
