"""LoRA on sparse layers."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rewire

peft = pytest.importorskip("peft")

from rewire.integrations.peft import SparseLora, with_sparse_layers  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(12, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu())  # type: ignore[no-any-return]


def config(**settings: Any) -> Any:
    settings = {"target_modules": ["first", "last"], "r": 3, "init_lora_weights": False, **settings}
    return peft.LoraConfig(**settings)


def adapted() -> Any:
    base = rewire.sparsify(Model(), 0.6).double()
    torch.manual_seed(1)
    return peft.get_peft_model(base, with_sparse_layers(config()))


def twin(model: Any) -> Any:
    """The same with a dense base."""
    return rewire.densify(copy.deepcopy(model))


X = torch.linspace(-1, 1, 60, dtype=torch.float64).view(5, 12)


def test_adapters_get_the_gradients_of_a_dense_base() -> None:
    model = adapted()
    assert isinstance(model.base_model.model.first, SparseLora)
    other = twin(model)
    for one in (model, other):
        one(X).square().sum().backward()
    torch.testing.assert_close(model(X), other(X))
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 4
    assert all("lora_" in name for name in trained)
    grads = dict(other.named_parameters())
    for name, parameter in trained.items():
        torch.testing.assert_close(parameter.grad, grads[name].grad)
    with model.disable_adapter():
        base = rewire.sparsify(Model(), 0.6).double()
        torch.testing.assert_close(model(X), base(X))


def test_adapters_travel_apart_from_the_base(tmp_path: Path) -> None:
    model = adapted()
    model.save_pretrained(tmp_path)
    base = rewire.sparsify(Model(), 0.6).double()
    with pytest.raises(ValueError, match=r"SparseLinear.* is not supported"):
        peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path)
    again = with_sparse_layers(peft.LoraConfig.from_pretrained(tmp_path))
    loaded = peft.PeftModel.from_pretrained(base, tmp_path, config=again).double()
    torch.testing.assert_close(loaded(X), model(X))


def test_merging_is_refused_until_the_base_is_dense() -> None:
    model = adapted()
    expected = model(X)
    with pytest.raises(NotImplementedError, match=r"rewire\.densify"):
        model.merge_and_unload()
    merged = rewire.densify(model).merge_and_unload()
    assert type(merged.first) is nn.Linear
    torch.testing.assert_close(merged(X), expected)


def test_variants_that_need_a_dense_weight_are_refused() -> None:
    base = rewire.sparsify(Model(), 0.6)
    with pytest.raises(ValueError, match="variant"):
        peft.get_peft_model(base, with_sparse_layers(config(use_dora=True)))
    with pytest.raises(ValueError, match="name the layers"):
        with_sparse_layers(config(target_modules="all-linear"))


def test_a_frozen_base_is_not_rewired() -> None:
    model = adapted()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    with pytest.raises(ValueError, match="all sparse layers are frozen"):
        rewire.GSE(model, optimizer, every=1, until=10)
