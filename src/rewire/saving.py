"""Saving and loading models: sparse ones with their connections, or as ordinary dense state dicts."""

from __future__ import annotations

import copy
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rewire import files, models
from rewire.nn.layer import ConnectedLayer
from rewire.nn.masked_layer import MaskedLayer
from rewire.nn.sparse import SparseLayer
from rewire.sparsify import densify, sparsify

_FORMAT = "rewire model 1"
_CONNECTIONS = "rewire connections 1"
_FIELDS = {"sparse": list, "masked": list, "build": list | None, "notes": dict}
_ONE = 1e-300  # the density of a layer whose connections are about to be loaded

Path_ = str | os.PathLike[str]


def save(model: nn.Module, path: Path_, *, notes: Mapping[str, Any] | None = None) -> None:
    """Write a model's weights and connections to a safetensors file.

    The file is written whole or not at all. It has no code in it: a model of :func:`rewire.models.build`
    can be loaded by the file alone, any other together with an instance of its class.

    Args:
        model: any model, sparse or dense.
        path: the file, by custom ``.safetensors``.
        notes: what to keep with it, as JSON; :func:`read_notes` gives it back.

    Example:
        >>> save(sparsify(models.build("mlp"), sparsity=0.9), "mlp.safetensors")  # doctest: +SKIP
    """
    from safetensors.torch import save_file

    state = model.state_dict()
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} is a {type(value).__name__}; only tensors can be saved")
    tensors = {
        name: value.detach().to("cpu", copy=True).contiguous() for name, value in state.items()
    }
    about = {
        "format": _FORMAT,
        "sparse": _names(model, SparseLayer),
        "masked": _names(model, MaskedLayer),
        "build": models.built_with(model),
        "notes": dict(notes or {}),
    }
    about["sha256"] = _checksum(about, tensors)
    metadata = {"rewire": json.dumps(about)}
    files.write(Path(path), lambda hidden: save_file(tensors, hidden, metadata))


def _checksum(about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """Of all that a file holds; tensors are contiguous and on the CPU."""
    rest = {key: value for key, value in about.items() if key != "sha256"}
    digest = hashlib.sha256(json.dumps(rest, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)} ".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def save_connections(
    model: nn.Module, path: Path_, *, notes: Mapping[str, Any] | None = None
) -> None:
    """Write which connections the sparse layers of a model have, without weights, to a safetensors file.

    For each layer it holds ``NAME.indptr`` and ``NAME.indices``, as the layer has them, and its sizes.
    """
    from safetensors.torch import save_file

    layers = {n: m for n, m in model.named_modules() if isinstance(m, SparseLayer)}
    tensors = {
        f"{name}.{part}": getattr(layer, part).to("cpu", copy=True)
        for name, layer in layers.items()
        for part in ("indptr", "indices")
    }
    sizes = {name: [layer.n_out, layer.n_in, layer.groups] for name, layer in layers.items()}
    about = {"format": _CONNECTIONS, "sizes": sizes, "notes": dict(notes or {})}
    metadata = {"rewire": json.dumps(about)}
    files.write(Path(path), lambda hidden: save_file(tensors, hidden, metadata))


def load(path: Path_, model: nn.Module | None = None) -> nn.Module:
    """Load a model that :func:`save` has written.

    Args:
        path: the file.
        model: an instance of the model's class, dense or sparse, to load into, in place; its layers
            become sparse, or masked, where they were so when it was saved. Not needed for models of
            :func:`rewire.models.build`.

    Example:
        >>> model = load("mine.safetensors", MyModel())  # doctest: +SKIP
    """
    about, tensors = _read(Path(path))
    sparse, masked = about["sparse"], about["masked"]
    layers = [*sparse, *masked]
    if model is None:
        if about["build"] is None:
            raise ValueError(
                f"{path} holds a model of your own class; give an instance of it to load into: "
                "rewire.load(path, MyModel())"
            )
        model = _built(Path(path), about["build"], "meta")
        _check_sizes(Path(path), model, sparse, tensors)
        if not layers:
            model = _built(Path(path), about["build"], "cpu")
    if layers and not _names(model, ConnectedLayer):
        if sparse and masked:
            raise ValueError(
                f"{path} holds sparse and masked layers; give a model with the same layers to load into"
            )
        storage = "masked" if masked else "sparse"
        try:
            densities = dict.fromkeys(layers, _ONE)
            model = sparsify(model, density=densities, weights="fresh", storage=storage)
        except ValueError as error:
            raise ValueError(
                f"{path} does not fit the given {type(model).__name__}: give an instance of the class "
                f"that was saved ({error})"
            ) from error
    model.load_state_dict(tensors)
    return model


def _built(path: Path, build: list[Any], device: str) -> nn.Module:
    try:
        name, arguments = build
        with torch.device(device):
            return models.build(name, **arguments)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise ValueError(f"{path} says it holds {build}, which cannot be made: {error}") from error


def _check_sizes(
    path: Path, model: nn.Module, sparse: list[str], tensors: Mapping[str, Tensor]
) -> None:
    """Raise a ValueError unless a model that has no memory yet is as large as what the file holds."""
    for name, tensor in model.state_dict().items():
        layer, _, part = name.rpartition(".")
        connected = part == "weight" and layer in sparse
        found = tensors.get(f"{layer}.indptr" if connected else name)
        expected = (tensor.shape[0] + 1,) if connected else tuple(tensor.shape)
        if found is None or tuple(found.shape) != expected:
            held = "nothing" if found is None else f"a tensor of shape {tuple(found.shape)}"
            raise ValueError(
                f"{path} is damaged: it holds {held} for {name}, expected one of shape {expected}"
            )


def _names(model: nn.Module, kind: type[nn.Module]) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, kind)]


def read_notes(path: Path_) -> dict[str, Any]:
    """The notes that a model was saved with."""
    notes: dict[str, Any] = _about(Path(path))["notes"]
    return notes


def dense_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of the equivalent dense model: ``weight`` with zeros for missing connections."""
    return dict(densify(copy.deepcopy(model)).state_dict())


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    about = _about(path)
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    checksum = about.get("sha256")  # older files have none
    if checksum is not None and checksum != _checksum(about, tensors):
        raise ValueError(f"{path} is damaged: it does not match its checksum")
    return about, tensors


def _about(path: Path) -> dict[str, Any]:
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        with safe_open(path, "pt") as file:
            text = (file.metadata() or {}).get("rewire")
    except SafetensorError as error:
        raise ValueError(f"{path} is no safetensors file, or damaged: {error}") from error
    try:
        about = {} if text is None else files.parse_json(text)
    except ValueError as error:
        raise ValueError(
            f"{path} is damaged: what it says of itself is no JSON ({error})"
        ) from error
    if not isinstance(about, dict) or about.get("format") != _FORMAT:
        raise ValueError(f"{path} was not written by rewire.save, or by another version of it")
    if missing := [name for name, kind in _FIELDS.items() if not isinstance(about.get(name), kind)]:
        raise ValueError(f"{path} is damaged: it does not say, or not well, {', '.join(missing)}")
    return about
