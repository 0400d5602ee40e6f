"""LoRA of peft on sparse layers: the base stays sparse and frozen, the adapters are dense and small."""

from __future__ import annotations

from typing import Any

try:
    from peft import LoraConfig
    from peft.tuners import lora
except ImportError as error:
    raise ImportError("rewire.integrations.peft needs peft: pip install 'rewire[peft]'") from error

from torch import nn

from rewire.nn.linear import SparseLinear


class SparseLora(lora.Linear):  # type: ignore[misc]
    """A sparse linear layer with LoRA adapters."""

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        if not isinstance(module, SparseLinear):
            raise TypeError(f"expected a SparseLinear, got {type(module).__name__}")
        return module.in_features, module.out_features

    @property
    def lora_variants(self) -> dict[tuple[str, ...], Any]:
        """Plain LoRA alone: the others (DoRA, ...) compute with the dense weight."""
        return {(): None}

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Refused while the base is sparse: the sum with an adapter is dense."""
        if isinstance(self.get_base_layer(), SparseLinear):
            raise NotImplementedError(
                "an adapter of low rank is a dense matrix, so a sparse layer cannot take it in: "
                "serve the model "
                "with its adapters, or make the base dense with rewire.densify(model) and merge then"
            )
        super().merge(safe_merge, adapter_names)


def with_sparse_layers(config: LoraConfig) -> LoraConfig:
    """Let a ``LoraConfig`` apply to sparse linear layers, too; returns it.

    peft does not save this, so give the configuration again where you load adapters::

        model = get_peft_model(model, with_sparse_layers(LoraConfig(target_modules=["query", "value"])))
        model.save_pretrained(folder)
        config = with_sparse_layers(LoraConfig.from_pretrained(folder))
        model = PeftModel.from_pretrained(base, folder, config=config)

    Args:
        config: names its ``target_modules``; ``"all-linear"`` finds dense layers alone and is refused.
    """
    if config.target_modules == "all-linear":
        raise ValueError(
            'target_modules="all-linear" finds dense layers alone: name the layers, such as '
            'target_modules=["query", "value"]; rewire.summary(model) has all names'
        )
    config._register_custom_module({SparseLinear: SparseLora})
    return config
