"""Turning the dense layers of a model into sparse ones, and back."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from rewire import trained
from rewire.budgets import SHARES, assign
from rewire.conversion import (
    Dense,
    M,
    Names,
    block_fused_paths,
    carry_hooks,
    carry_over,
    layer_seed,
    open_attentions,
    plan,
    replace,
    restore,
    size_of,
    wanted_of,
)
from rewire.engine import use_engine
from rewire.nn.attention import SparseMultiheadAttention, allow_fused_path
from rewire.nn.kinds import masked_kind, sparse_kind
from rewire.nn.layer import ConnectedLayer
from rewire.nn.masked_layer import MaskedLayer
from rewire.nn.sparse import SparseLayer, largest
from rewire.slow import SKIPS, is_slow


def sparsify(
    model: M,
    sparsity: float | None = None,
    *,
    density: float | Mapping[str, float] | None = None,
    epsilon: float | None = None,
    connections: int | None = None,
    assignment: str = "erdos-renyi",
    exact: bool = False,
    weights: str | None = None,
    storage: str = "sparse",
    keep_dense: str | Iterable[str] = (),
    skip: str = "depthwise",
    seed: int = 0,
    engine: bool = True,
) -> M:
    """Convert every linear layer and convolution of a model, in place, into its sparse form.

    These are ``nn.Linear``, ``nn.Conv1d``, ``nn.Conv2d``, ``nn.Conv3d``, ``nn.ConvTranspose1d`` and
    ``nn.ConvTranspose2d``.

    So are the projections of every ``nn.MultiheadAttention``, and with them torch's transformer layers: it
    becomes a :class:`rewire.SparseMultiheadAttention` with layers ``q_proj``, ``k_proj``, ``v_proj`` and
    ``out_proj``.

    Subclasses that inherit the forward are converted, too, and so are classes that are known to compute the
    same with a forward of their own, such as the ``Conv1D`` of GPT-2; see :func:`rewire.register_layer`.

    A model that has sparse layers may be converted again, after its head was replaced, say: they stay as
    they are, the dense layers are converted, and the arguments count these alone. Give the same
    ``keep_dense`` again, and make optimizer and rewirer anew.

    Exactly one of ``sparsity``, ``density``, ``epsilon`` and ``connections`` must be given; they
    count the weights of the converted layers, not biases and not layers that stay dense. A layer
    whose share is all its weights becomes a sparse layer with every connection, so that rewiring
    sees all layers.

    No dense weight is ever built, unless masked storage is requested: layers on the ``meta`` device
    are created sparse on the CPU. What else such a model holds (norms, embeddings, layers that stay
    dense) is created by its ``reset_parameters``, which must set all parameters and buffers of that
    module.

    Layers that have no sparse form (tied weights, parametrizations, ...) or are better dense (``skip``)
    stay dense, and one warning tells how many there are for each reason, with a few names and their
    share of the parameters. It includes modules of other kinds that hold weight matrices, if those are
    1 % of the parameters or more, but no embeddings; :func:`rewire.summary` shows all. An error leaves
    the model as it was.

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
            weights of each layer, and its biases; ``"dense"``, for masked storage, keeps all weights
            under a mask of the largest: what :class:`rewire.TopKAST` and, at ``density=1``,
            :class:`rewire.Gradual` start with. The default is ``"fresh"``, with a warning if the model
            looks trained: the bias of a norm (its weight, if it has no bias) is not constant, or a layer
            to convert has a gradient. A trained model that shows neither is not recognised.
        storage: ``"sparse"``, or ``"masked"`` for dense weights with a mask (:mod:`rewire.nn.masked`):
            slower and larger, for devices without sparse kernels. Connections and weights are the same.
        keep_dense: names or globs of layers, or names of modules that hold them, to leave alone; no
            warning mentions them.
        skip: what stays dense by itself: ``"depthwise"`` convolutions, in which every output channel sees
            one input channel; ``"slow"``, these and all layers whose sparse product would take longer than
            the dense one at the density that they would get, by the rule of :mod:`rewire.slow`; or
            ``"none"``. The target counts the weights of the layers that are left: with ``"slow"`` the
            others are given their shares anew. A mapping of densities converts whatever it names.
            :func:`rewire.summary` marks sparse layers that are likely to be slow.
        seed: what is drawn for a layer depends on this and its name, and on no global state.
        engine: let the model record its layers and run them together (:func:`rewire.use_engine`);
            masked layers are dense, and run one by one.

    Returns:
        The model; if the model is itself such a layer, the sparse layer.

    Example:
        >>> model = nn.Sequential(nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10))
        >>> sparsify(model, sparsity=0.95)[2]
        SparseLinear(in_features=100, out_features=10, bias=True, connections=440 of 1,000 (44 %))
        >>> with torch.device("meta"):
        ...     layer = nn.Linear(1_000_000, 1_000_000)  # 4 TB
        >>> sparsify(layer, connections=5_000).values.shape
        torch.Size([5000, 1])
    """
    targets = {"sparsity": sparsity, "density": density, "epsilon": epsilon}
    targets["connections"] = connections
    given = [name for name, value in targets.items() if value is not None]
    if len(given) != 1:
        raise ValueError(
            f"give exactly one of {', '.join(targets)}, got {' and '.join(given) or 'none'}"
        )
    _check_choice("assignment", assignment, SHARES)
    chosen = "fresh" if weights is None else weights
    _check_choice("weights", chosen, ("fresh", "keep", "dense"))
    _check_choice("storage", storage, ("sparse", "masked"))
    _check_choice("skip", skip, SKIPS)
    if chosen == "dense" and storage != "masked":
        raise ValueError(
            'weights="dense" needs storage="masked": sparse layers hold no other weights'
        )
    seed = operator.index(seed)

    densities = density if isinstance(density, Mapping) else None
    found = plan(model, densities, keep_dense, skip, again=True)
    _check_storage(found.names, storage)
    while True:
        names, layers, _, apart = found
        sizes = [size_of(layer, names[layer][0]) for layer in layers]
        if densities is not None:
            wanted = [wanted_of(densities, names[layer]) for layer in layers]
            pairs = zip(sizes, wanted, strict=True)
            counts = [assign([size], density=d, assignment="uniform")[0] for size, d in pairs]
            break
        counts = assign(sizes, assignment=assignment, exact=exact, **cast(Any, targets))
        shares = zip(layers, counts, sizes, strict=True)
        slow = {layer for layer, n, size in shares if is_slow(layer, n / size.weights)}
        if skip != "slow" or not slow:
            break
        found = found.without(model, slow)
    for size, layer in zip(sizes, layers, strict=True):
        if chosen != "fresh" and layer.weight.is_meta:
            raise ValueError(
                f'weights="{chosen}" needs weights, but {size.name or "the layer"} is on the meta '
                'device and has none; load the model first, or use weights="fresh"'
            )
    on_meta = _on_meta(names, layers)
    found.warn(stacklevel=2)
    if weights is None and (sign := trained.evidence(names, layers)):
        warnings.warn(
            f"rewire.sparsify gives the converted layers new random weights, but the model looks trained: "
            f'{sign}. Pass weights="keep" to keep the largest weights of each layer, or weights="fresh" to '
            "start anew without this warning",
            stacklevel=2,
        )

    # What torch draws from its global generator in here is undone, or seeded first.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        sparse: dict[nn.Module, nn.Module] = {
            layer: carry_over(
                layer, _converted(layer, count, chosen, storage, layer_seed(seed, names[layer][0]))
            )
            for layer, count in zip(layers, counts, strict=True)
        }
        _create(on_meta, names, seed)
    model = replace(open_attentions(model, apart, but=sparse), sparse)
    block_fused_paths(model)
    if storage == "sparse" and model not in sparse.values():
        use_engine(model, engine)
    return model


def densify(model: M) -> M:
    """Convert every sparse or masked layer of a model, in place, back into its dense form.

    Returns:
        The model; if the model is itself a sparse layer, the dense layer.

    Example:
        >>> densify(sparsify(nn.Sequential(nn.Linear(20, 10)), sparsity=0.5))
        Sequential(
          (0): Linear(in_features=20, out_features=10, bias=True)
        )
    """
    dense: dict[nn.Module, nn.Module] = {}
    use_engine(model, False)
    for module in model.modules():
        allow_fused_path(module)
        if isinstance(module, ConnectedLayer):
            dense[module] = restore(carry_over(module, module.to_dense()))
    model = replace(model, dense)
    whole: dict[nn.Module, nn.Module] = {}
    for module in model.modules():
        if isinstance(module, SparseMultiheadAttention) and module.packable:
            whole[module] = carry_hooks(module, module.to_dense())
    return replace(model, whole)


def make_room(model: M, layers: Iterable[str]) -> M:
    """Make layers sparse, in place, for connections and weights that are loaded afterwards.

    Args:
        model: may be on the meta device, where all but these layers is left as it is.
        layers: their names, as ``named_modules`` of the sparse model has them.
    """
    found = plan(model, dict.fromkeys(layers, 1.0), (), "none", again=True)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        sparse: dict[nn.Module, nn.Module] = {
            layer: carry_over(layer, _sparse(layer, 0, "fresh", 0)) for layer in found.layers
        }
    model = replace(open_attentions(model, found.apart, but=sparse), sparse)
    block_fused_paths(model)
    use_engine(model)
    return model


# New layers ---------------------------------------------------------------------------------------


def _converted(layer: Dense, count: int, weights: str, storage: str, seed: int) -> nn.Module:
    if weights == "dense":
        return masked(layer, largest(layer.weight, count))
    sparse = _sparse(layer, count, weights, seed)
    if storage == "sparse":
        return sparse
    kind: Any = masked_kind(layer)
    return cast(ConnectedLayer, kind.from_sparse(sparse))


def _sparse(layer: Dense, count: int, weights: str, seed: int) -> ConnectedLayer:
    if weights == "keep":
        return pruned(layer, largest(layer.weight, count))
    arguments: dict[str, Any] = {
        "bias": layer.bias is not None,
        "device": "cpu" if layer.weight.is_meta else layer.weight.device,
        "dtype": layer.weight.dtype,
        "connections": count,
        "generator": torch.Generator().manual_seed(seed),
    }
    kind: Any = sparse_kind(layer)
    return cast(ConnectedLayer, kind(**kind.arguments_of(layer), **arguments))


def pruned(layer: Dense, mask: Tensor) -> ConnectedLayer:
    """The sparse layer with these weights of a dense one."""
    kind: Any = sparse_kind(layer)
    return cast(ConnectedLayer, kind.from_dense(layer, mask))


def masked(layer: Dense, mask: Tensor) -> ConnectedLayer:
    """The masked layer with the weights of a dense one."""
    kind: Any = masked_kind(layer)
    return cast(ConnectedLayer, kind.from_dense(layer, mask))


def _check_storage(names: Names, storage: str) -> None:
    """A model that is converted again keeps one kind of storage."""
    masked_ones = [m for m in names if isinstance(m, MaskedLayer)]
    if any(isinstance(m, SparseLayer) for m in names) if storage == "masked" else masked_ones:
        other = "sparse" if storage == "masked" else "masked"
        raise ValueError(f'the model has {other} layers already: pass storage="{other}"')


def _check_choice(name: str, value: str, choices: Iterable[str]) -> None:
    if value not in choices:
        raise ValueError(f"there is no {name} {value!r}; choose one of {', '.join(choices)}")


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
        torch.default_generator.manual_seed(layer_seed(seed, names[module][0]))
        cast("Callable[[], None]", _reset(module))()
    created: dict[int, nn.Parameter | None] = {}
    for module, parameters in before.items():
        for key, old in parameters.items():
            module._parameters[key] = created.setdefault(id(old), module._parameters[key])
