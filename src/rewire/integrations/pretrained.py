"""Sparse models in ``save_pretrained`` and ``from_pretrained`` of transformers.

Both ask a quantizer what is special about the layers of a model; ours says which are sparse.
``config.json`` then names them, ``from_pretrained`` makes them sparse before it loads, and their
weights, with their connections, are in the usual file. Whoever loads it without this module gets an
error, not fresh dense weights: the file also has a ``weight`` for each sparse layer, which fits no dense
layer."""

from __future__ import annotations

import copy
import re
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from rewire.nn.masked_layer import MaskedLayer
from rewire.nn.sparse import MARK, SparseLayer
from rewire.sparsify import densify, make_room

METHOD = "rewire"
_TENSORS = ("values", "indptr", "indices")


@register_quantization_config(METHOD)
class RewireConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """The entry of ``config.json`` for a sparse model: the names of its sparse layers."""

    def __init__(self, layers: list[str] | None = None, **kwargs: Any) -> None:
        self.quant_method = METHOD
        self.layers = list(layers or [])

    def to_diff_dict(self) -> dict[str, Any]:
        """The whole configuration; it has no defaults to leave out."""
        return self.to_dict()  # type: ignore[no-any-return]


@register_quantizer(METHOD)
class RewireQuantizer(HfQuantizer):  # type: ignore[misc]
    """Makes layers sparse before weights are loaded, and gives what is saved its mark."""

    is_trainable = True
    is_qat_trainable = True

    def is_serializable(self) -> bool:
        """True: sparse models can always be saved."""
        return True

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Raise if ``from_pretrained(quantization_config=...)`` is to make a dense checkpoint sparse."""
        if not self.pre_quantized:
            raise ValueError(
                "from_pretrained cannot make a dense checkpoint sparse: load it without "
                "quantization_config and "
                'call rewire.sparsify(model, sparsity, weights="keep")'
            )

    def param_needs_quantization(self, model: nn.Module, param_name: str, **kwargs: Any) -> bool:
        """Whether a parameter's length comes from the checkpoint instead of the model."""
        path, _, name = param_name.rpartition(".")
        return name in _TENSORS and isinstance(model.get_submodule(path), SparseLayer)

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        names = _names_in(model, self.quantization_config.layers)
        make_room(model, names)
        model.saves_connections = True
        patterns = {rf"{re.escape(name)}\.weight$" for name in self.quantization_config.layers}
        known = model._keys_to_ignore_on_load_unexpected or set()
        model._keys_to_ignore_on_load_unexpected = set(known) | patterns

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        for layer in _sparse(model).values():  # check what was loaded, and derive what was not
            layer.values.requires_grad_()
            layer.load_state_dict({name: getattr(layer, name) for name in _TENSORS}, strict=False)

    def get_state_dict_and_metadata(
        self, model: PreTrainedModel
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The state dict, with a marker ``weight`` for each sparse layer."""
        layers = _sparse(model)
        self.quantization_config.layers = list(layers)
        marks = {f"{name}.weight": MARK.clone() for name in layers}
        return {**model.state_dict(), **marks}, {}

    def _dequantize(self, model: PreTrainedModel, dtype: torch.dtype | None = None) -> nn.Module:
        model.saves_connections = False
        dense: nn.Module = densify(model)
        return dense


def attach(model: PreTrainedModel) -> None:
    """Let ``save_pretrained`` and ``push_to_hub`` of a sparse model write what ``from_pretrained`` reads.

    To load it, import this module first::

        import rewire.integrations.transformers
        model = AutoModelForSequenceClassification.from_pretrained(folder)

    The Trainer callback, and ``from_pretrained`` itself, do this by themselves. Models with masked layers
    are refused: ``from_pretrained`` has no place for a mask.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"expected a transformers.PreTrainedModel, got {type(model).__name__}: use "
            "rewire.save(model, path) "
            "and rewire.load(path, model) for other models"
        )
    if any(isinstance(module, MaskedLayer) for module in model.modules()):
        raise ValueError(
            "the model has masked layers, which from_pretrained cannot load: use "
            "rewire.save(model, path) and "
            "rewire.load(path, model), or masked.to_sparse() layers"
        )
    names = list(_sparse(model))
    if not names:
        raise ValueError("the model has no sparse layers: call rewire.sparsify(model, ...) first")
    other = getattr(model, "hf_quantizer", None)
    if other is not None and not isinstance(other, RewireQuantizer):
        raise ValueError(
            f"the model is quantized with {other.quantization_config.quant_method}; its sparse "
            "layers cannot be "
            "saved with that"
        )
    config = RewireConfig(names)
    model.hf_quantizer = RewireQuantizer(config)
    old, new = model.config, copy.deepcopy(model.config)  # another model may have been made with it
    for module in model.modules():
        if getattr(module, "config", None) is old:
            module.config = new
    new.quantization_config = config
    model.is_quantized, model.quantization_method = True, METHOD
    model.saves_connections = True


def _sparse(model: nn.Module) -> dict[str, SparseLayer]:
    return {n: m for n, m in model.named_modules() if isinstance(m, SparseLayer)}


def _names_in(model: PreTrainedModel, layers: list[str]) -> list[str]:
    """The names of layers in a model that was saved with another head, or without one."""
    prefix = f"{model.base_model_prefix}."
    there = {name for name, _ in model.named_modules()}
    found = []
    for name in layers:
        names = (name, prefix + name, name.removeprefix(prefix))
        found += [one for one in names if one in there][:1]
    return found
