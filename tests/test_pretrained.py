"""Models with ``save_pretrained`` and ``from_pretrained``, as Hugging Face's have them."""

import copy
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rewire


class Pretrained(nn.Module):
    """A stand-in for ``transformers.PreTrainedModel``: weights that a file lacks stay fresh."""

    def __init__(self, config: dict[str, int]) -> None:
        super().__init__()
        self.config = config
        size = config["size"]
        self.body = nn.Sequential(nn.Linear(size, size), nn.ReLU(), nn.Linear(size, size))
        self.head = nn.Linear(size, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))

    def save_pretrained(self, path: Path, state_dict: dict[str, Tensor] | None = None) -> None:
        torch.save(self.state_dict() if state_dict is None else state_dict, path)

    def push_to_hub(self, path: Path) -> None:
        self.save_pretrained(path)

    @classmethod
    def from_pretrained(cls, path: Path, config: dict[str, int]) -> "Pretrained":
        model = cls(config)
        model.load_state_dict(torch.load(path), strict=False)
        return model


CONFIG = {"size": 12}
MESSAGE = r"from_pretrained would .*rewire\.save\(.*rewire\.load\(.*rewire\.densify\("


def sparse(storage: str = "sparse") -> Pretrained:
    return rewire.sparsify(Pretrained(CONFIG), 0.5, storage=storage)


@pytest.mark.parametrize("storage", ["sparse", "masked"])
@pytest.mark.parametrize("method", ["save_pretrained", "push_to_hub"])
def test_save_pretrained_of_a_sparse_model_warns_once_with_the_remedy(
    tmp_path: Path, storage: str, method: str
) -> None:
    model = sparse(storage)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        getattr(model, method)(tmp_path / "file")
    (warning,) = caught
    assert warning.category is UserWarning
    assert "Pretrained" in str(warning.message)
    assert warning.filename == __file__
    with pytest.warns(UserWarning, match=MESSAGE):
        getattr(model, method)(tmp_path / "file")
    again = sparse(storage)  # nothing is lost: the file is that of the sparse model
    again.load_state_dict(torch.load(tmp_path / "file"))
    x = torch.randn(3, 12)
    assert torch.equal(again(x), model(x))


def _of_a_part() -> nn.Module:
    model = Pretrained(CONFIG)
    rewire.sparsify(model.body, 0.5)
    return model


def _by_hand() -> nn.Module:
    model = Pretrained(CONFIG)
    model.head = rewire.SparseLinear(12, 2, sparsity=0.5)
    return model


@pytest.mark.parametrize(
    "build",
    [
        _of_a_part,
        _by_hand,
        lambda: copy.deepcopy(sparse()),
        lambda: pickle.loads(pickle.dumps(sparse())),
    ],
    ids=["part", "by hand", "copy", "pickle"],
)
def test_so_does_every_model_that_holds_sparse_layers(build: Any, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=MESSAGE):
        build().save_pretrained(tmp_path / "file")


def test_dense_models_and_plain_state_dicts_do_not_warn(tmp_path: Path) -> None:
    Pretrained(CONFIG).save_pretrained(tmp_path / "file")
    model = sparse()
    rewire.save(model, tmp_path / "sparse.safetensors")
    torch.save(model.state_dict(), tmp_path / "state.pt")
    with pytest.raises(RuntimeError, match="Unexpected key"):
        Pretrained(CONFIG).load_state_dict(torch.load(tmp_path / "state.pt"))


def test_what_the_warning_recommends_works(tmp_path: Path) -> None:
    model, x = sparse(), torch.randn(3, 12)
    rewire.save(model, tmp_path / "model.safetensors")
    assert torch.equal(rewire.load(tmp_path / "model.safetensors", Pretrained(CONFIG))(x), model(x))
    rewire.densify(copy.deepcopy(model)).save_pretrained(tmp_path / "dense")
    dense = Pretrained.from_pretrained(tmp_path / "dense", CONFIG)
    torch.testing.assert_close(dense(x), model(x))
    assert isinstance(model.head, rewire.SparseLinear)


def test_it_works_with_the_models_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(**sizes, intermediate_size=24, vocab_size=30)
    model = rewire.sparsify(transformers.BertModel(config), 0.5).eval()
    ids = torch.tensor([[1, 2, 3]])
    expected = model(ids).last_hidden_state
    with pytest.warns(UserWarning, match=MESSAGE):
        model.save_pretrained(tmp_path / "warned")
    rewire.save(model, tmp_path / "model.safetensors")
    loaded = rewire.load(tmp_path / "model.safetensors", transformers.BertModel(config)).eval()
    assert torch.equal(loaded(ids).last_hidden_state, expected)
    rewire.densify(copy.deepcopy(model)).save_pretrained(tmp_path / "dense")
    dense = transformers.BertModel.from_pretrained(tmp_path / "dense").eval()
    torch.testing.assert_close(dense(ids).last_hidden_state, expected)
