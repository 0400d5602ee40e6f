"""Error messages for uses of a sparse weight that only a dense one supports."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NoReturn

from torch import nn

if TYPE_CHECKING:
    from rewire.nn.weight import Weight

NO_ASSIGNMENT = (
    "the weight of a {} cannot be assigned: it is no parameter. Write to layer.values, or call "
    "layer.set_connections(connections, values); to tie it to another weight, keep the layer dense "
    "(rewire.sparsify(model, ..., keep_dense=[its name])), or convert the model once they are tied"
)
DENSE_STATE = (
    "{} is sparse, and the state dict is that of a dense model: load it into the dense model, "
    "and then call "
    'rewire.sparsify(model, sparsity, weights="keep"), which keeps the largest weights'
)
SPARSE_STATE = (
    "{} is masked, and the state dict is that of a sparse model: load it into a model of "
    'rewire.sparsify(model, sparsity, storage="sparse"), or a file of rewire.save with '
    "rewire.load(path, model)"
)
_REMEDY = (
    "Its numbers are layer.values (one for each connection, in the order of layer.connections), "
    "layer.weight.to_sparse_csr() is a copy, and layer.weight.to_dense() a dense tensor with a gradient. "
    "If code that is not yours needs a dense weight, keep the layer dense: "
    "rewire.sparsify(model, ..., keep_dense=[{name}])"
)

WRITE = (
    "cannot be written to: write to layer.values instead, call layer.reset_parameters(), or initialise the "
    'model before rewire.sparsify(model, ..., weights="keep")'
)

_IN_PLACE = {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")}


def refuse(weight: Weight | None, function: str, why: str | None = None) -> NoReturn:
    """Raise for what a sparse weight cannot do."""
    if weight is None:
        raise RuntimeError(f"{function} got a sparse weight where it takes none")
    name = _name_of(weight._layer)
    kind = type(weight._layer).__name__
    told = f"the weight of {name} ({kind})" if name else f"the weight of a {kind}"
    if why is None:
        why = f"is sparse, and {function} needs a dense one"
    raise RuntimeError(
        f"{function}: {told}, of shape {tuple(weight.shape)}, {why}. "
        f"{_REMEDY.format(name=repr(name) if name else '...')}"
    )


def writes(func: Any, weight: Weight | None, args: Any, kwargs: Any) -> bool:
    """Whether a function would change the weight."""
    name = getattr(func, "__name__", "")
    if name in ("__set__", "__setitem__") or kwargs.get("out") is weight:
        return True
    first = args[0] if args else next(iter(kwargs.values()), None)
    in_place = name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
    return in_place and first is weight


def _name_of(layer: nn.Module) -> str | None:
    """Its name in the outermost module that is being called, as far as one is."""
    name, frame = None, sys._getframe(1)
    while frame is not None:
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and module is not layer:
            name = next((n for n, part in module.named_modules() if part is layer), name)
        frame = frame.f_back  # type: ignore[assignment]
    return name
