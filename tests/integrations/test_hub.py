"""Models of one's own on the Hub, by a folder that stands in for it."""

import json
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import rewire

pytest.importorskip("huggingface_hub")

from rewire.integrations.hub import SparseHubMixin


class Model(nn.Module, SparseHubMixin):  # type: ignore[misc]
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, width), nn.ReLU(), nn.Linear(width, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("storage", ["sparse", "masked"])
def test_connections_travel(tmp_path: Path, storage: str) -> None:
    model = rewire.sparsify(Model(width=16), 0.6, storage=storage)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()) == {"width": 16}
    loaded = Model.from_pretrained(tmp_path)
    assert type(loaded.net[0]) is type(model.net[0])
    x = torch.randn(3, 5)
    assert torch.equal(loaded(x), model(x))


def test_dense_models_are_saved_too(tmp_path: Path) -> None:
    model = Model()
    model.save_pretrained(tmp_path)
    x = torch.randn(3, 5)
    assert torch.equal(Model.from_pretrained(tmp_path)(x), model(x))


def test_files_of_others_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file(Model().state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"was not written by rewire\.save"):
        Model.from_pretrained(tmp_path)
