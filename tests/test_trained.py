"""sparsify with its default weights warns where that would throw away trained ones."""

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rewire
from rewire import models
from rewire.models import MODELS


class RootMeanSquareNorm(nn.Module):
    """A norm as models outside of torch have them, with a constant of its own."""

    def __init__(self, size: int, start: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), start))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], 1 + self.weight)


class FrozenBatchNorm(nn.Module):
    """A batch norm that is not trained here: all it has are buffers."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.ones(size))
        self.register_buffer("bias", torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + self.bias


NORMS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.BatchNorm1d(8),
    "layer norm": lambda: nn.LayerNorm(8),
    "group norm": lambda: nn.GroupNorm(2, 8),
    "rms norm": lambda: nn.RMSNorm(8),
    "own": lambda: RootMeanSquareNorm(8),
    "frozen": lambda: FrozenBatchNorm(8),
}
MESSAGE = r'looks trained: {}.*weights="keep".*weights="fresh"'


def holding(norm: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), norm, nn.ReLU(), nn.Linear(8, 3))


def saved(model: nn.Module) -> nn.Module:
    """As a file gives it back: trained, with no gradient left."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(5, 6)).square().sum().backward()
        optimizer.step()
    optimizer.zero_grad()
    return model


@pytest.mark.parametrize("norm", [name for name in NORMS if name != "frozen"])
def test_a_trained_model_is_recognised_by_its_norms(norm: str) -> None:
    model = saved(holding(NORMS[norm]()))
    kind, key = type(model[1]).__name__, "bias" if hasattr(model[1], "bias") else "weight"
    with pytest.warns(
        UserWarning, match=MESSAGE.format(rf"1\.{key} of its {kind} is not constant")
    ):
        rewire.sparsify(model, 0.5)
    assert isinstance(model[0], rewire.SparseLinear)


def test_so_are_norms_that_hold_buffers_alone() -> None:
    model = holding(FrozenBatchNorm(8))
    model[1].bias[3] = 0.5
    with pytest.warns(UserWarning, match=MESSAGE.format(r"1\.bias of its FrozenBatchNorm")):
        rewire.sparsify(model, 0.5)


def test_a_gradient_shows_that_a_layer_is_being_trained() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    model(torch.randn(5, 6)).sum().backward()
    with pytest.warns(UserWarning, match=MESSAGE.format("2 has a gradient")):
        rewire.sparsify(model, 0.5, keep_dense="0")


def test_one_warning_points_to_the_caller_and_an_error_in_its_place_changes_nothing() -> None:
    model = saved(holding(nn.LayerNorm(8)))
    with pytest.raises(UserWarning, match="looks trained"):  # warnings are errors in these tests
        rewire.sparsify(model, 0.5)
    assert isinstance(model[0], nn.Linear)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rewire.sparsify(model, 0.5)
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize("weights", ["fresh", "keep"])
def test_who_says_what_to_do_with_the_weights_is_not_warned(weights: str) -> None:
    model = saved(holding(nn.LayerNorm(8)))
    rewire.sparsify(model, 0.5, weights=weights)
    assert isinstance(model[0], rewire.SparseLinear)


def test_the_default_draws_what_fresh_does() -> None:
    one, two = (holding(nn.LayerNorm(8)) for _ in range(2))
    rewire.sparsify(one, 0.5, seed=3)
    rewire.sparsify(two, 0.5, seed=3, weights="fresh")
    assert all(torch.equal(a, two.state_dict()[k]) for k, a in one.state_dict().items())


def test_loading_into_a_trained_model_does_not_warn(tmp_path: Path) -> None:
    rewire.save(rewire.sparsify(holding(nn.LayerNorm(8)), 0.5), tmp_path / "file")
    rewire.load(tmp_path / "file", saved(holding(nn.LayerNorm(8))))


# Fresh models are never taken for trained ones ----------------------------------------------------

INITS: dict[str, Callable[[Tensor], object]] = {
    "xavier": nn.init.xavier_normal_,
    "kaiming": nn.init.kaiming_normal_,
    "truncated": nn.init.trunc_normal_,
    "orthogonal": nn.init.orthogonal_,
    "zeros": nn.init.zeros_,
    "constant": lambda w: nn.init.constant_(w, 0.3),
    "eye": nn.init.eye_,
    "sparse": lambda w: nn.init.sparse_(w, 0.8),
}


@pytest.mark.parametrize("init", INITS)
@pytest.mark.parametrize("norm", NORMS)
def test_any_initialisation_is_fresh(norm: str, init: str) -> None:
    model = holding(NORMS[norm]())
    for layer in (model[0], model[3]):
        INITS[init](layer.weight)
        nn.init.normal_(layer.bias)
    rewire.sparsify(model, 0.5)


@pytest.mark.parametrize("start", [0.0, 0.1, 1e-6])
def test_so_is_any_constant_of_a_norm(start: float) -> None:
    rewire.sparsify(holding(RootMeanSquareNorm(8, start)), 0.5)


def test_the_weight_of_a_norm_with_a_bias_may_be_random() -> None:
    model = holding(nn.BatchNorm1d(8))
    nn.init.normal_(model[1].weight)  # as in MobileViT of transformers
    rewire.sparsify(model, 0.5)


def test_a_forward_pass_is_no_training() -> None:
    model = holding(nn.BatchNorm1d(8))
    model(torch.randn(5, 6))  # to see shapes, say
    assert model[1].num_batches_tracked == 1
    rewire.sparsify(model, 0.5)


def test_the_models_of_the_package_are_fresh() -> None:
    for name in MODELS:
        if name != "resnet50":
            rewire.sparsify(models.build(name), 0.9)


def test_a_model_of_transformers_that_was_loaded_is_recognised(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(**sizes, intermediate_size=24, vocab_size=30)
    model = transformers.BertModel(config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.tensor([[1, 2, 3]])).last_hidden_state.square().sum().backward()
    optimizer.step()
    model.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match=r"LayerNorm\.bias of its LayerNorm is not constant"):
        rewire.sparsify(transformers.BertModel.from_pretrained(tmp_path), 0.5)
