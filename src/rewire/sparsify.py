"""Turning the dense layers of a model into sparse ones, and back."""

from __future__ import annotations

import hashlib
import operator
import warnings
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.lazy import LazyModuleMixin

from rewire.budgets import SHARES, LayerSize, assign
from rewire.nn.attention import (
    SparseMultiheadAttention,
    allow_fused_path,
    attention_obstacle,
    block_fused_path,
)
from rewire.nn.conv import SparseConv2d, conv_arguments
from rewire.nn.fusion import fuse, unfuse
from rewire.nn.linear import SparseLinear
from rewire.nn.sparse import SparseLayer

M = TypeVar("M", bound=nn.Module)
Names = dict[nn.Module, list[str]]  # each module, once, and every name that it has
Apart = dict[
    nn.Module, SparseMultiheadAttention
]  # what attentions are once their projections are layers

# What a user may expect to become sparse; not all do.
_LAYERS = (nn.Linear, nn.Bilinear, _ConvNd, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)
_HOOKS = (
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
    *("_backward_hooks", "_backward_pre_hooks", "_is_full_backward_hook"),
)


def sparsify(
    model: M,
    sparsity: float | None = None,
    *,
    density: float | Mapping[str, float] | None = None,
    epsilon: float | None = None,
    connections: int | None = None,
    assignment: str = "erdos-renyi",
    exact: bool = False,
    weights: str = "fresh",
    keep_dense: str | Iterable[str] = (),
    seed: int = 0,
) -> M:
    """Convert every ``nn.Linear`` and ``nn.Conv2d`` of a model, in place, into its sparse form.

    So are the projections of every ``nn.MultiheadAttention``, and with them torch's transformer layers: it
    becomes a :class:`rewire.SparseMultiheadAttention` with layers ``q_proj``, ``k_proj``, ``v_proj`` and
    ``out_proj``.

    Exactly one of ``sparsity``, ``density``, ``epsilon`` and ``connections`` must be given; they
    count the weights of the converted layers, not biases and not layers that stay dense. A layer
    whose share is all its weights becomes a sparse layer with every connection, so that rewiring
    sees all layers.

    No dense weight is ever built: layers on the ``meta`` device are created sparse on the CPU.
    What else such a model holds (norms, embeddings, layers that stay dense) is created by its
    ``reset_parameters``, which must set all parameters and buffers of that module.

    Layers that have no sparse form (grouped convolutions, tied weights, parametrizations, ...) stay
    dense, and one warning names them all. An error leaves the model as it was.

    Args:
        model: the model, or one layer.
        sparsity: fraction of the weights that will be missing, in [0, 1).
        density: fraction that will exist, in (0, 1]; or a mapping from layer names or globs to
            fractions, where the first match counts, every layer is rounded up by itself whatever
            the ``assignment``, and layers without a match stay dense.
        epsilon: connections per unit, for ``"erdos-renyi"`` alone.
        connections: the number of connections of the whole model, met exactly.
        assignment: how they are shared out among layers: ``"erdos-renyi"``, ``"uniform"`` or
            ``"erk"``; see :func:`rewire.budgets.assign`.
        exact: meet ``sparsity`` or ``density`` exactly, where otherwise layers that cannot take their
            share leave the model with less.
        weights: ``"fresh"`` draws a random graph and new values; ``"keep"`` keeps the largest
            weights of each layer, and its biases.
        keep_dense: names or globs of layers, or names of modules that hold them, to leave alone.
        seed: what is drawn for a layer depends on this and its name, and on no global state.

    Returns:
        The model; if the model is itself such a layer, the sparse layer.

    Example:
        >>> model = nn.Sequential(nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10))
        >>> sparsify(model, sparsity=0.95)[2]
        SparseLinear(in_features=100, out_features=10, bias=True, connections=440 of 1,000 (44 %))
        >>> with torch.device("meta"):
        ...     layer = nn.Linear(1_000_000, 1_000_000)  # 4 TB
        >>> sparsify(layer, connections=5_000).values.shape
        torch.Size([5000])
    """
    targets = {"sparsity": sparsity, "density": density, "epsilon": epsilon}
    targets["connections"] = connections
    given = [name for name, value in targets.items() if value is not None]
    if len(given) != 1:
        raise ValueError(
            f"give exactly one of {', '.join(targets)}, got {' and '.join(given) or 'none'}"
        )
    _check_choice("assignment", assignment, SHARES)
    _check_choice("weights", weights, ("fresh", "keep"))
    seed = operator.index(seed)

    densities = density if isinstance(density, Mapping) else None
    apart, whole = _take_apart(model)
    names = _names(model, apart)
    layers, obstacles = _sort_out(names, whole, densities, keep_dense)
    apart = {m: new for m, new in apart.items() if not {*new.children()}.isdisjoint(layers)}
    names = _names(model, apart)
    sizes = [_size(layer, names[layer][0]) for layer in layers]
    if densities is not None:
        wanted = [_wanted(densities, names[layer]) for layer in layers]
        pairs = zip(sizes, wanted, strict=True)
        counts = [assign([size], density=d, assignment="uniform")[0] for size, d in pairs]
    else:
        counts = assign(sizes, assignment=assignment, exact=exact, **cast(Any, targets))
    for size, layer in zip(sizes, layers, strict=True):
        if weights == "keep" and layer.weight.is_meta:
            raise ValueError(
                f'weights="keep" needs weights, but {size.name or "the layer"} is on the meta '
                'device and has none; load the model first, or use weights="fresh"'
            )
    on_meta = _on_meta(names, layers)
    if obstacles:
        message = f"rewire.sparsify leaves dense (keep_dense silences this): {_listed(obstacles)}"
        warnings.warn(message, stacklevel=2)

    # What torch draws from its global generator in here is undone, or seeded first.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        sparse: dict[nn.Module, nn.Module] = {
            layer: _sparse(layer, count, weights, _seed(seed, names[layer][0]))
            for layer, count in zip(layers, counts, strict=True)
        }
        _create(on_meta, names, seed)
    for old, new in apart.items():
        _carry_hooks(old, new)
        _own_memory(new, but=sparse)
    model = _replace(_replace(model, apart), sparse)
    for module in model.modules():
        if any(isinstance(inner, SparseLayer) for inner in module.modules()):
            block_fused_path(module)
    if model not in sparse.values():
        fuse(model)
    return model


def densify(model: M) -> M:
    """Convert every sparse layer of a model, in place, back into its dense form.

    Returns:
        The model; if the model is itself a sparse layer, the dense layer.

    Example:
        >>> densify(sparsify(nn.Sequential(nn.Linear(20, 10)), sparsity=0.5))
        Sequential(
          (0): Linear(in_features=20, out_features=10, bias=True)
        )
    """
    dense: dict[nn.Module, nn.Module] = {}
    for module in model.modules():
        unfuse(module)
        allow_fused_path(module)
        if isinstance(module, SparseLinear | SparseConv2d):
            dense[module] = _carry(module, module.to_dense())
    model = _replace(model, dense)
    whole: dict[nn.Module, nn.Module] = {}
    for module in model.modules():
        if isinstance(module, SparseMultiheadAttention) and module.packable:
            whole[module] = _carry_hooks(module, module.to_dense())
    return _replace(model, whole)


# Which layers -------------------------------------------------------------------------------------


def _take_apart(model: nn.Module) -> tuple[Apart, dict[nn.Module, str]]:
    """The attentions that can be taken apart, and why the others cannot; the model stays as it is."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    apart: Apart = {}
    whole: dict[nn.Module, str] = {}
    attentions = [m for m in model.modules() if isinstance(m, nn.MultiheadAttention)]
    owners = _owners(_names(model, {}) if attentions else {})
    for module in attentions:
        ties = [owners[id(p)] for p in module._parameters.values() if p is not None]
        tied = next((" = ".join(names) for names in ties if len(names) > 1), None)
        obstacle = attention_obstacle(module) or (tied and f"tied weights: {tied}")
        if obstacle:
            whole[module] = obstacle
        else:
            apart[module] = SparseMultiheadAttention.from_dense(module)
    return apart, whole


def _names(model: nn.Module, apart: Apart) -> Names:
    """As if these attentions were apart; their projections answer to the attention's name too."""
    names: Names = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, SparseLayer):
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


def _sort_out(
    names: Names,
    whole: Mapping[nn.Module, str],
    densities: Mapping[str, float] | None,
    keep_dense: str | Iterable[str],
) -> tuple[list[nn.Linear | nn.Conv2d], dict[str, str]]:
    """The layers to convert, and what is in the way of the others, by name."""
    inside = {inner for module in whole for inner in module.modules()} - {*whole}
    found = [m for m in names if isinstance(m, _LAYERS) and m not in inside]
    keep_dense = (keep_dense,) if isinstance(keep_dense, str) else tuple(keep_dense)
    for argument, patterns in (("keep_dense", keep_dense), ("density", tuple(densities or ()))):
        for pattern in patterns:
            if not any(_matches(pattern, names[module]) for module in found):
                existing = ", ".join(names[module][0] for module in found)
                raise ValueError(
                    f"{argument} names {pattern!r}, which matches no layer; the layers are: "
                    f"{existing or 'none'}"
                )
    owners = _owners(names)
    layers: list[nn.Linear | nn.Conv2d] = []
    obstacles: dict[str, str] = {}
    for module in found:
        places = names[module]
        unasked = densities is not None and _wanted(densities, places) is None
        if unasked or any(_matches(pattern, places) for pattern in keep_dense):
            continue
        obstacle = whole.get(module) or _obstacle(module, owners)
        if obstacle is None:
            layers.append(cast("nn.Linear | nn.Conv2d", module))
        else:
            obstacles[places[0]] = obstacle
    if not layers:
        reasons = _listed(obstacles) or "it needs an nn.Linear or nn.Conv2d that may be sparse"
        raise ValueError(f"the model has no layer to convert: {reasons}")
    return layers, obstacles


def _obstacle(layer: nn.Module, owners: Mapping[int, list[str]]) -> str | None:
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
    return None if layer.weight.numel() else "it has no weights"


def _matches(pattern: str, places: Iterable[str]) -> bool:
    """Whether a layer of these names is meant: its name, a glob, or the name of what holds it."""
    return any(
        name == pattern or name.startswith(f"{pattern}.") or fnmatchcase(name, pattern)
        for name in places
    )


def _wanted(densities: Mapping[str, float], places: Iterable[str]) -> float | None:
    return next((value for glob, value in densities.items() if _matches(glob, places)), None)


def _size(layer: nn.Linear | nn.Conv2d, name: str) -> LayerSize:
    n_out, n_in, *kernel = layer.weight.shape
    return LayerSize(name, n_in, n_out, cast("tuple[int, int]", tuple(kernel) or (1, 1)))


def _listed(obstacles: Mapping[str, str]) -> str:
    return "; ".join(f"{name or 'the layer'} ({why})" for name, why in obstacles.items())


def _check_choice(name: str, value: str, choices: Iterable[str]) -> None:
    if value not in choices:
        raise ValueError(f"there is no {name} {value!r}; choose one of {', '.join(choices)}")


# New layers ---------------------------------------------------------------------------------------


def _seed(seed: int, name: str) -> int:
    """Independent of every other layer's."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little")


def _sparse(layer: nn.Linear | nn.Conv2d, count: int, weights: str, seed: int) -> nn.Module:
    if weights == "keep":
        kind = SparseLinear if isinstance(layer, nn.Linear) else SparseConv2d
        return _carry(layer, kind.from_dense(cast(Any, layer), connections=count))
    arguments: dict[str, Any] = {
        "bias": layer.bias is not None,
        "device": "cpu" if layer.weight.is_meta else layer.weight.device,
        "dtype": layer.weight.dtype,
        "connections": count,
        "generator": torch.Generator().manual_seed(seed),
    }
    if isinstance(layer, nn.Conv2d):
        return _carry(layer, SparseConv2d(**conv_arguments(layer), **arguments))
    n_out, n_in = layer.weight.shape
    return _carry(layer, SparseLinear(n_in, n_out, **arguments))


def _carry(old: nn.Module, new: nn.Module) -> nn.Module:
    """Give ``new`` the mode, the frozen parameters and the hooks of ``old``."""
    new.training = old.training
    for parameter, like in zip(_parameters(new), _parameters(old), strict=True):
        parameter.requires_grad_(like.requires_grad)
    return _carry_hooks(old, new)


def _carry_hooks(old: nn.Module, new: nn.Module) -> nn.Module:
    for name in _HOOKS:  # the same objects, so that a hook's handle still removes it
        setattr(new, name, getattr(old, name))
    return new


def _own_memory(attention: nn.Module, but: Mapping[nn.Module, nn.Module]) -> None:
    """Projections that stay dense are no part of the packed weight any more."""
    for name in ("q_proj", "k_proj", "v_proj"):
        layer = getattr(attention, name)
        if layer not in but:
            for key, parameter in layer._parameters.items():
                if parameter is not None:
                    own = parameter.detach().clone()
                    layer._parameters[key] = nn.Parameter(own, parameter.requires_grad)


def _parameters(layer: nn.Module) -> list[Tensor]:
    """Weight or values, then the bias if there is one."""
    first = layer.values if isinstance(layer, SparseLayer) else layer.weight
    return [tensor for tensor in (first, layer.bias) if isinstance(tensor, Tensor)]


def _replace(model: M, new: Mapping[nn.Module, nn.Module]) -> M:
    for parent in list(model.modules()):
        for key, child in parent._modules.items():
            if child is not None and child in new:
                parent._modules[key] = new[child]
    return cast(M, new.get(model, model))


# What else a model on the meta device holds -------------------------------------------------------


def _on_meta(names: Names, converted: Iterable[nn.Module]) -> list[nn.Module]:
    """The other modules that hold tensors on the meta device; each knows how to reset itself."""
    result, converted = [], set(converted)
    for module, places in names.items():
        tensors = (*module._parameters.values(), *module._buffers.values())
        if module not in converted and any(t is not None and t.is_meta for t in tensors):
            if _reset(module) is None:
                raise ValueError(
                    f"{places[0] or 'the model'} ({type(module).__name__}) holds tensors on the "
                    "meta device and has no reset_parameters() to create them with; give it that "
                    "method, or build it on the CPU"
                )
            result.append(module)
    return result


def _reset(module: nn.Module) -> Callable[[], None] | None:
    for name in ("reset_parameters", "_reset_parameters"):
        if callable(method := getattr(module, name, None)):
            return cast("Callable[[], None]", method)
    return None


def _create(modules: list[nn.Module], names: Names, seed: int) -> None:
    """Create the tensors of modules on the meta device; tied ones stay tied."""
    before = {module: dict(module._parameters) for module in modules}
    for module in reversed(modules):  # a parent may set what its children hold
        module.to_empty(device="cpu", recurse=False)
        torch.default_generator.manual_seed(_seed(seed, names[module][0]))
        cast("Callable[[], None]", _reset(module))()
    created: dict[int, nn.Parameter | None] = {}
    for module, parameters in before.items():
        for key, old in parameters.items():
            module._parameters[key] = created.setdefault(id(old), module._parameters[key])
