"""Models of your own on the Hugging Face Hub, with their connections."""

from __future__ import annotations

from pathlib import Path

try:
    from huggingface_hub import PyTorchModelHubMixin
except ImportError as error:
    raise ImportError(
        "rewire.integrations.hub needs huggingface_hub: pip install 'rewire[hub]'"
    ) from error

from torch import nn

from rewire import saving

FILE = "model.safetensors"


class SparseHubMixin(PyTorchModelHubMixin):  # type: ignore[misc]
    """``PyTorchModelHubMixin`` for models that may be sparse.

    ``save_pretrained`` and ``push_to_hub`` write what :func:`rewire.save` writes; ``from_pretrained`` makes
    the layers sparse that were, whether or not the class does so itself.

    Example:
        >>> class MyModel(nn.Module, SparseHubMixin):  # doctest: +SKIP
        ...     def __init__(self, width: int = 64): ...
        >>> rewire.sparsify(MyModel(width=128), 0.9).push_to_hub("me/mine")  # doctest: +SKIP
        >>> model = MyModel.from_pretrained("me/mine")  # doctest: +SKIP
    """

    saves_connections = True

    def _save_pretrained(self, save_directory: Path) -> None:
        assert isinstance(self, nn.Module)
        saving.save(self, Path(save_directory) / FILE)

    @classmethod
    def _load_as_safetensor(
        cls, model: nn.Module, model_file: str, map_location: str, strict: bool
    ) -> nn.Module:
        return saving.load(model_file, model).to(map_location)
