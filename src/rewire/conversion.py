"""Which layers of a model can be converted, and putting converted ones in their place."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, TypeVar, cast

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.lazy import LazyModuleMixin

from rewire import equivalents
from rewire.budgets import LayerSize
from rewire.leftover import (
    Leftover,
    described,
    holds_matrix,
    leftover,
    noticeable,
    reasons,
    shortened,
    unknown_kind,
)
from rewire.nn.attention import SparseMultiheadAttention, attention_obstacle, block_fused_path
from rewire.nn.kinds import kind_of
from rewire.nn.layer import ConnectedLayer
from rewire.slow import is_depthwise

M = TypeVar("M", bound=nn.Module)
Dense = nn.Linear | _ConvNd
Names = dict[nn.Module, list[str]]  # each module, once, and every name that it has
Apart = dict[
    nn.Module, nn.Module
]  # attentions with layers for projections, transposed layers as nn.Linear

# What a user may expect to become sparse; not all do.
_LAYERS = (nn.Linear, nn.Bilinear, _ConvNd, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)
_OURS = (ConnectedLayer, SparseMultiheadAttention)
_HOOKS = (
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
    *("_backward_hooks", "_backward_pre_hooks", "_is_full_backward_hook"),
)


_SLOW = 'a sparse product would be slower at its density (skip="slow")'


class Plan(NamedTuple):
    """What can be converted in a model.

    Attributes:
        names: of all modules, as if what is in ``apart`` had been replaced.
        layers: to convert.
        dense: others that might be expected to be converted, and why they are not.
        apart: the attentions that hold such layers, and what takes their place; and the ``nn.Linear`` of
            layers whose weight is transposed.
    """

    names: Names
    layers: list[Dense]
    dense: list[Leftover]
    apart: Apart

    def without(self, model: nn.Module, slow: Collection[Dense]) -> Plan:
        """The plan where these layers stay dense."""
        layers = [layer for layer in self.layers if layer not in slow]
        if not layers:
            raise ValueError(
                "every layer would be slower when it is sparse at its density; ask for fewer connections, "
                'or convert them nevertheless with skip="depthwise"'
            )
        dense = [
            leftover(layer, self.names[layer][0], _SLOW) for layer in self.layers if layer in slow
        ]
        apart = {
            m: new for m, new in self.apart.items() if not {*new.children()}.isdisjoint(layers)
        }
        return Plan(_names(model, apart), layers, [*self.dense, *dense], apart)

    def warn(self, stacklevel: int) -> None:
        """Say in one warning what stays dense; ``stacklevel`` is as for a caller of ``warnings.warn``."""
        if self.dense:
            text = described(self.dense, _all_parameters(self.names))
            warnings.warn(text, stacklevel=stacklevel + 1)


def plan(
    model: nn.Module,
    densities: Mapping[str, float] | None = None,
    keep_dense: str | Iterable[str] = (),
    skip: str = "depthwise",
    again: bool = False,
) -> Plan:
    """Find the layers to convert; the model stays as it is.

    Args:
        model: the model, or one layer.
        densities: if given, only layers that it names.
        keep_dense: names or globs of layers, or names of modules that hold them, to leave alone.
        skip: ``"none"`` converts depthwise convolutions, too, as ``densities`` does.
        again: whether the model may have sparse layers already, which stay as they are.
    """
    apart, whole = _take_apart(model)
    if not again:
        _refuse_sparse(model)
    depthwise = skip == "none" or densities is not None
    layers, dense = _sort_out(_names(model, apart), whole, densities, keep_dense, depthwise)
    apart = {m: new for m, new in apart.items() if not {new, *new.children()}.isdisjoint(layers)}
    return Plan(_names(model, apart), layers, dense, apart)


def _take_apart(model: nn.Module) -> tuple[Apart, dict[nn.Module, Obstacle]]:
    """The attentions that can be taken apart and the layers that become ``nn.Linear`` first, and why others
    cannot."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    apart: Apart = {}
    whole: dict[nn.Module, Obstacle] = {}
    attentions = [m for m in model.modules() if isinstance(m, nn.MultiheadAttention)]
    turned = [m for m in model.modules() if equivalents.transposed(m)]
    owners = _owners(_names(model, {}) if attentions or turned else {})
    for module in attentions:
        reason = attention_obstacle(module)
        tied = _tied(module._parameters.values(), owners)
        if reason is not None:
            whole[module] = Obstacle(reason)
        elif tied is not None:
            whole[module] = tied
        else:
            apart[module] = SparseMultiheadAttention.from_dense(module)
    for layer in turned:
        obstacle = _weight_obstacle(layer, owners)
        if obstacle is not None:
            whole[layer] = obstacle
        else:
            apart[layer] = equivalents.as_linear(layer)
    return apart, whole


def _refuse_sparse(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, ConnectedLayer):
            raise ValueError(
                f"the model is sparse already ({name or 'it'} is a {type(module).__name__}); "
                "call rewire.densify first"
            )


def _names(model: nn.Module, apart: Apart) -> Names:
    """As if these modules were replaced; projections of attentions answer to the attention's name too."""
    names: Names = {}
    for name, module in model.named_modules(remove_duplicate=False):
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
    depthwise: bool,
) -> tuple[list[Dense], list[Leftover]]:
    """The layers to convert, and what stays dense of the others."""
    inside = {inner for module in whole for inner in module.modules()} - {*whole}
    found = [m for m in names if (isinstance(m, _LAYERS) or m in whole) and m not in inside]
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
        obstacle = whole.get(module) or _obstacle(module, owners, depthwise)
        if obstacle is None:
            layers.append(cast(Dense, module))
        else:
            dense.append(leftover(module, obstacle.instead or names[module][0], obstacle.reason))
    unknown = [unknown_kind(m, names[m][0]) for m in filter(asked, others)]
    parameters = _all_parameters(names)
    dense += noticeable(unknown, parameters)
    if not layers:
        raise ValueError(f"the model has no layer to convert:{_why_none(names, found, dense)}")
    return layers, dense


def _why_none(names: Names, found: list[nn.Module], dense: list[Leftover]) -> str:
    """Why a model has no layer to convert."""
    sparse = [names[m][0] or "the layer" for m in names if isinstance(m, ConnectedLayer)]
    why = []
    if dense:
        why.append("\n" + reasons(dense, _all_parameters(names)))
    elif found:
        why.append(" keep_dense= or density= leaves out all that it has")
    elif not sparse:
        why.append(" it needs an nn.Linear or nn.Conv2d")
    if sparse:
        why.append(f"\n  sparse already (rewire.densify makes them dense): {shortened(sparse, 3)}")
    return "".join(why)


def _class_name(layer: nn.Module) -> str:
    """The name of its class; qualified if torch has a class of that name, too (timm's ``Linear``)."""
    kind = type(layer)
    same = kind is not getattr(nn, kind.__name__, kind)
    return f"{kind.__module__}.{kind.__qualname__}" if same else kind.__name__


def _obstacle(
    layer: nn.Module, owners: Mapping[int, list[str]], depthwise: bool
) -> Obstacle | None:
    """Why a layer has no sparse form, or None if it has one."""
    base = kind_of(layer)
    if base is None:
        return Obstacle(f"there is no sparse {type(layer).__name__}")
    assert isinstance(layer, Dense)
    if isinstance(layer, LazyModuleMixin) and layer.has_uninitialized_params():
        return Obstacle("its size is not known yet, run one batch first")
    if (computed := _computed(layer)) is not None:
        return computed
    for method in ("forward", "_conv_forward"):
        if not equivalents.plain(layer, method) or method in vars(layer):
            return Obstacle(f"{_class_name(layer)} has a {method} of its own")
    if isinstance(layer, _ConvNd) and is_depthwise(layer) and not depthwise:
        return Obstacle(
            'a depthwise convolution is hardly faster when it is sparse (skip="none" converts it)'
        )
    return _weight_obstacle(layer, owners)


def _computed(layer: nn.Module) -> Obstacle | None:
    if set(layer._parameters) == {"weight", "bias"} and not layer._buffers and not layer._modules:
        return None
    return Obstacle(
        "its weight is computed (parametrization, weight norm, pruning), remove that first"
    )


def _weight_obstacle(layer: Any, owners: Mapping[int, list[str]]) -> Obstacle | None:
    """Why the parameters of a layer cannot be converted, or None if they can."""
    if (computed := _computed(layer)) is not None:
        return computed
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
    groups = layer.groups if isinstance(layer, _ConvNd) else 1
    return LayerSize(name, n_in * groups, n_out, tuple(kernel) or (1, 1), groups)


def layer_seed(seed: int, name: str) -> int:
    """A seed for what is drawn for a layer, independent of every other layer's."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little")


def carry_over(old: nn.Module, new: nn.Module) -> nn.Module:
    """Give ``new`` the mode, the frozen parameters, the hooks and the original class of ``old``."""
    new.training = old.training
    for parameter, like in zip(_parameters(new), _parameters(old), strict=True):
        parameter.requires_grad_(like.requires_grad)
    origin = equivalents.origin_of(old) if not isinstance(old, ConnectedLayer) else None
    origin = vars(old).get(equivalents.ORIGIN, origin)
    if origin is not None:
        vars(new)[equivalents.ORIGIN] = origin
    return carry_hooks(old, new)


def restore(layer: nn.Module) -> nn.Module:
    """A dense layer as one of the class that it had before it was converted."""
    origin = vars(layer).pop(equivalents.ORIGIN, None)
    return layer if origin is None else carry_hooks(layer, origin.restored(layer))


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
    """Put attentions whose projections are layers, and the ``nn.Linear`` of transposed layers, in place.

    Projections that stay dense, all ``but`` those given, get memory of their own: they are no part of
    the packed weight any more.
    """
    but = {*but}
    for old, new in apart.items():
        carry_hooks(old, new)
        for name in ("q_proj", "k_proj", "v_proj"):
            layer = new._modules.get(name)
            if layer is None:  # a transposed layer as an nn.Linear
                continue
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
