"""Which layers of a model can be converted, and putting converted ones in their place."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import NamedTuple, TypeVar, cast

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.lazy import LazyModuleMixin

from rewire.budgets import LayerSize
from rewire.leftover import (
    Leftover,
    described,
    holds_matrix,
    leftover,
    noticeable,
    reasons,
    shortened,
)
from rewire.nn.attention import SparseMultiheadAttention, attention_obstacle, block_fused_path
from rewire.nn.layer import ConnectedLayer

M = TypeVar("M", bound=nn.Module)
Dense = nn.Linear | nn.Conv2d
Names = dict[nn.Module, list[str]]  # each module, once, and every name that it has
Apart = dict[nn.Module, SparseMultiheadAttention]  # attentions, once their projections are layers

# What a user may expect to become sparse; not all do.
_LAYERS = (nn.Linear, nn.Bilinear, _ConvNd, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)
_OURS = (ConnectedLayer, SparseMultiheadAttention)
_HOOKS = (
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
    *("_backward_hooks", "_backward_pre_hooks", "_is_full_backward_hook"),
)


class Plan(NamedTuple):
    """What can be converted in a model.

    Attributes:
        names: of all modules, as if the attentions of ``apart`` were apart.
        layers: to convert.
        dense: others that might be expected to be converted, and why they are not.
        apart: the attentions that hold such layers, and what takes their place.
    """

    names: Names
    layers: list[Dense]
    dense: list[Leftover]
    apart: Apart

    def warn(self, stacklevel: int) -> None:
        """Say in one warning what stays dense; ``stacklevel`` is as for a caller of ``warnings.warn``."""
        if self.dense:
            text = described(self.dense, _all_parameters(self.names))
            warnings.warn(text, stacklevel=stacklevel + 1)


def plan(
    model: nn.Module,
    densities: Mapping[str, float] | None = None,
    keep_dense: str | Iterable[str] = (),
) -> Plan:
    """Find the layers to convert; the model stays as it is.

    Args:
        model: the model, or one layer.
        densities: if given, only layers that it names.
        keep_dense: names or globs of layers, or names of modules that hold them, to leave alone.
    """
    apart, whole = _take_apart(model)
    layers, dense = _sort_out(_names(model, apart), whole, densities, keep_dense)
    apart = {m: new for m, new in apart.items() if not {*new.children()}.isdisjoint(layers)}
    return Plan(_names(model, apart), layers, dense, apart)


def _take_apart(model: nn.Module) -> tuple[Apart, dict[nn.Module, Obstacle]]:
    """The attentions that can be taken apart, and why the others cannot."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    apart: Apart = {}
    whole: dict[nn.Module, Obstacle] = {}
    attentions = [m for m in model.modules() if isinstance(m, nn.MultiheadAttention)]
    owners = _owners(_names(model, {}) if attentions else {})
    for module in attentions:
        reason = attention_obstacle(module)
        tied = _tied(module._parameters.values(), owners)
        if reason is not None:
            whole[module] = Obstacle(reason)
        elif tied is not None:
            whole[module] = tied
        else:
            apart[module] = SparseMultiheadAttention.from_dense(module)
    return apart, whole


def _names(model: nn.Module, apart: Apart) -> Names:
    """As if these attentions were apart; their projections answer to the attention's name too."""
    names: Names = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, ConnectedLayer):
            raise ValueError(
                f"the model is sparse already ({name or 'it'} is a {type(module).__name__}); "
                "call rewire.densify first"
            )
        new = apart.get(module)
        names.setdefault(new or module, []).append(name)
        for key, child in (new or nn.Module()).named_children():
            names.setdefault(child, []).extend((f"{name}.{key}".lstrip("."), name))
    return names


def _owners(names: Names) -> dict[int, list[str]]:
    """Where each parameter is held."""
    owners: dict[int, list[str]] = {}
    for module, places in names.items():
        for key, parameter in module._parameters.items():
            owners.setdefault(id(parameter), []).append(f"{places[0]}.{key}".lstrip("."))
    return owners


class Obstacle(NamedTuple):
    """Why a layer has no sparse form: a reason in the same words for all such layers and, where it says
    more than the name of the layer, what to show instead."""

    reason: str
    instead: str | None = None


def _tied(parameters: Iterable[Tensor | None], owners: Mapping[int, list[str]]) -> Obstacle | None:
    for parameter in parameters:
        if parameter is not None and len(places := owners[id(parameter)]) > 1:
            more = ["..."] if len(places) > 3 else []
            return Obstacle("tied weights", " = ".join([*places[:3], *more]))
    return None


def _all_parameters(names: Names) -> list[Tensor]:
    return [p for m in names for p in m._parameters.values() if p is not None]


def _sort_out(
    names: Names,
    whole: Mapping[nn.Module, Obstacle],
    densities: Mapping[str, float] | None,
    keep_dense: str | Iterable[str],
) -> tuple[list[Dense], list[Leftover]]:
    """The layers to convert, and what stays dense of the others."""
    inside = {inner for module in whole for inner in module.modules()} - {*whole}
    found = [m for m in names if isinstance(m, _LAYERS) and m not in inside]
    inside |= {inner for module in found for inner in module.modules()}
    others = [m for m in names if m not in inside and not isinstance(m, _OURS) and holds_matrix(m)]
    keep_dense = (keep_dense,) if isinstance(keep_dense, str) else tuple(keep_dense)
    for argument, patterns in (("keep_dense", keep_dense), ("density", tuple(densities or ()))):
        for pattern in patterns:
            if not any(_matches(pattern, names[module]) for module in (*found, *others)):
                existing = shortened([names[module][0] for module in found], 20)
                raise ValueError(
                    f"{argument} names {pattern!r}, which matches no layer; the layers are: "
                    f"{existing or 'none'}"
                )

    def asked(module: nn.Module) -> bool:
        places = names[module]
        unasked = densities is not None and wanted_of(densities, places) is None
        return not unasked and not any(_matches(pattern, places) for pattern in keep_dense)

    owners = _owners(names)
    layers: list[Dense] = []
    dense: list[Leftover] = []
    for module in filter(asked, found):
        obstacle = whole.get(module) or _obstacle(module, owners)
        if obstacle is None:
            layers.append(cast(Dense, module))
        else:
            dense.append(leftover(module, obstacle.instead or names[module][0], obstacle.reason))
    unknown = [
        Leftover(names[m][0], f"there is no sparse {type(m).__name__}", (*m.parameters(False),))
        for m in filter(asked, others)
    ]
    parameters = _all_parameters(names)
    dense += noticeable(unknown, parameters)
    if not layers:
        why = "\n" + reasons(dense, parameters) if dense else " it needs an nn.Linear or nn.Conv2d"
        raise ValueError(f"the model has no layer to convert:{why}")
    return layers, dense


def _class_name(layer: nn.Module) -> str:
    """The name of its class; qualified if torch has a class of that name, too (timm's ``Linear``)."""
    kind = type(layer)
    same = kind is not getattr(nn, kind.__name__, kind)
    return f"{kind.__module__}.{kind.__qualname__}" if same else kind.__name__


def _obstacle(layer: nn.Module, owners: Mapping[int, list[str]]) -> Obstacle | None:
    """Why a layer has no sparse form, or None if it has one."""
    if not isinstance(layer, nn.Linear | nn.Conv2d):
        return Obstacle(f"there is no sparse {type(layer).__name__}")
    if isinstance(layer, LazyModuleMixin) and layer.has_uninitialized_params():
        return Obstacle("its size is not known yet, run one batch first")
    if set(layer._parameters) != {"weight", "bias"} or layer._buffers or layer._modules:
        return Obstacle(
            "its weight is computed (parametrization, weight norm, pruning), remove that first"
        )
    base = nn.Linear if isinstance(layer, nn.Linear) else nn.Conv2d
    for method in ("forward", "_conv_forward"):
        own = getattr(type(layer), method, None) is not getattr(base, method, None)
        if own or method in vars(layer):
            return Obstacle(f"{_class_name(layer)} has a {method} of its own")
    if isinstance(layer, nn.Conv2d) and layer.groups != 1:
        return Obstacle("there is no sparse grouped convolution")
    tied = _tied((layer.weight, layer.bias), owners)
    if tied is not None:
        return tied
    if type(layer.weight) is not nn.Parameter or not layer.weight.is_floating_point():
        kind = type(layer.weight).__name__
        return Obstacle(f"its weight is a {kind} that is not plain real numbers")
    return None if layer.weight.numel() else Obstacle("it has no weights")


def _matches(pattern: str, places: Iterable[str]) -> bool:
    """Whether a layer of these names is meant: its name, a glob, or the name of what holds it."""
    return any(
        name == pattern or name.startswith(f"{pattern}.") or fnmatchcase(name, pattern)
        for name in places
    )


def wanted_of(densities: Mapping[str, float], places: Iterable[str]) -> float | None:
    return next((value for glob, value in densities.items() if _matches(glob, places)), None)


def size_of(layer: Dense, name: str) -> LayerSize:
    n_out, n_in, *kernel = layer.weight.shape
    return LayerSize(name, n_in, n_out, cast("tuple[int, int]", tuple(kernel) or (1, 1)))


def carry_over(old: nn.Module, new: nn.Module) -> nn.Module:
    """Give ``new`` the mode, the frozen parameters and the hooks of ``old``."""
    new.training = old.training
    for parameter, like in zip(_parameters(new), _parameters(old), strict=True):
        parameter.requires_grad_(like.requires_grad)
    return carry_hooks(old, new)


def carry_hooks(old: nn.Module, new: nn.Module) -> nn.Module:
    """Give ``new`` the hooks of ``old``."""
    for name in _HOOKS:  # the same objects, so that a hook's handle still removes it
        setattr(new, name, getattr(old, name))
    return new


def _parameters(layer: nn.Module) -> list[Tensor]:
    """Weight or values, then the bias if there is one."""
    first = layer.parameter if isinstance(layer, ConnectedLayer) else layer.weight
    return [tensor for tensor in (first, layer.bias) if isinstance(tensor, Tensor)]


def open_attentions(model: M, apart: Apart, but: Iterable[nn.Module] = ()) -> M:
    """Put attentions whose projections are layers in their place, in the model.

    Projections that stay dense, all ``but`` those given, get memory of their own: they are no part of
    the packed weight any more.
    """
    but = {*but}
    for old, new in apart.items():
        carry_hooks(old, new)
        for name in ("q_proj", "k_proj", "v_proj"):
            layer = getattr(new, name)
            for key, parameter in layer._parameters.items():
                if parameter is not None and layer not in but:
                    own = parameter.detach().clone()
                    layer._parameters[key] = nn.Parameter(own, parameter.requires_grad)
    return replace(model, apart)


def block_fused_paths(model: nn.Module) -> None:
    """Let torch's transformer encoders call their layers where these are not what they expect."""
    for module in model.modules():
        if any(isinstance(inner, _OURS) for inner in module.modules()):
            block_fused_path(module)


def replace(model: M, new: Mapping[nn.Module, nn.Module]) -> M:
    for parent in list(model.modules()):
        for key, child in parent._modules.items():
            if child is not None and child in new:
                parent._modules[key] = new[child]
    return cast(M, new.get(model, model))
