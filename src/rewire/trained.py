"""Detect whether a model has been trained."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor, nn
from torch.nn.parameter import is_lazy


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a normalisation layer, torch's own or one that is called so."""
    return "Norm" in type(module).__name__


def evidence(names: Mapping[nn.Module, Sequence[str]], layers: Iterable[nn.Module]) -> str | None:
    """What shows that a model has been trained, or None if nothing does.

    Weights themselves say little: there are too many initialisations. But all of them set the bias of a
    norm to a constant, or the weight of a norm without a bias, and training does not leave it so; and a
    layer that has a gradient is being trained. Running statistics are no evidence: one forward pass
    changes them.

    Args:
        names: all modules of the model, and their names.
        layers: those whose weights are in question.
    """
    for layer in layers:
        if any(p is not None and p.grad is not None for p in layer._parameters.values()):
            return f"{names[layer][0] or 'the layer'} has a gradient"
    for module, places in names.items():
        if is_norm(module):
            tensors = {**module._buffers, **module._parameters}
            key = "weight" if tensors.get("bias") is None else "bias"
            tensor = tensors.get(key)
            if tensor is not None and _varies(tensor):
                return f"{places[0]}.{key} of its {type(module).__name__} is not constant"
    return None


def _varies(tensor: Tensor) -> bool:
    """Whether the elements of a vector differ; False for what has no elements to compare."""
    if is_lazy(tensor) or tensor.is_meta or tensor.dim() != 1 or tensor.numel() < 2:
        return False
    return bool((tensor != tensor[0]).any())
