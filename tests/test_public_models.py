"""Public models of torchvision, timm and transformers, converted, rewired, and compared with their twins.

On demand, with these libraries installed: ``pytest -m slow tests/test_public_models.py``. Their
configurations are small; all together take about a quarter of an hour on one core.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import rewire
from rewire import ops
from rewire.bench.zoo import libraries, twins
from rewire.bench.zoo.catalogue import PUBLIC, SETS, find
from rewire.bench.zoo.own import OWN
from rewire.engine.lazy import LazyTensor

ROUNDING = (
    1e-8  # largest relative difference in float64; batch norms of four images make much of it
)
HARDSIGMOID = F.hardsigmoid
MODELS = [name for name, model in PUBLIC.items() if model.small is not None]


@pytest.mark.slow
@pytest.mark.skipif(not ops.available(), reason="needs the compiled kernels")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore")  # libraries have their own
def test_a_public_model_is_its_densified_twin_before_and_after_rewiring(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(F, "hardsigmoid", hardsigmoid)
    public = PUBLIC[name]
    if (problem := libraries.problem(public.library)) is not None:
        pytest.skip(problem)
    torch.manual_seed(0)
    dense = libraries.build(public, public.size, small=True)
    model = twins.without_randomness(dense).double()
    model = rewire.sparsify(model, sparsity=0.9, weights="fresh")
    x = libraries.inputs(public, 4, public.size, 16, torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rewirer = rewire.GSE(model, optimizer, every=1, until=100)
    for _ in range(2):
        same(twins.compare(model, x))  # leaves its gradients
        optimizer.step()
        rewiring = rewirer.step()
        assert rewiring is not None
        assert rewiring.grown > 0
    same(twins.compare(model, x))
    same(twins.compare(model, x, training=False))


def hardsigmoid(x: Tensor, inplace: bool = False) -> Tensor:
    """The gradient of torch's own has 1 / 6 as a float has it, also in float64."""
    return HARDSIGMOID(x) if type(x) is LazyTensor else F.relu6(x + 3) / 6


def same(difference: twins.Difference) -> None:
    assert difference.largest < ROUNDING, difference


def test_there_are_more_than_a_hundred_with_those_that_once_failed() -> None:
    assert len(MODELS) > 100
    once = (
        *(
            "clip",
            "deit",
            "dinov2",
            "siglip",
            "vit",
            "t5",
            "mamba",
            "rwkv",
            "beit",
            "gpt2",
            "falcon",
        ),
        *("beit_base_patch16_224", "eva02_tiny_patch14_224", "xcit_nano_12_p16_224"),
        *("edgenext_xx_small", "convit_tiny", "swin_t", "swinv2_tiny_window8_256"),
    )
    assert set(once) <= set(MODELS)
    assert all(len(models) == 12 and set(models) <= set(PUBLIC) for models in SETS.values())
    assert not set(SETS["first"]) & set(SETS["second"])


# Rewire's own definitions -------------------------------------------------------------------------


def test_the_first_set_needs_no_library() -> None:
    assert set(SETS["first"]) == set(OWN)


# What the models of the libraries have, with 10 classes and for images of 64 x 64.
PARAMETERS = {
    "resnet18": 11_181_642,
    "densenet121": 6_964_106,
    "mobilenet_v2": 2_236_682,
    "efficientnet_b0": 4_020_358,
    "convnext_tiny": 27_827_818,
    "squeezenet1_1": 727_626,
    "regnet_y_400mf": 3_907_554,
    "vit_tiny_patch16_224": 5_491_786,
    "mixer_s16_224": 17_281_674,
    "resnet26d": 13_985_898,
    "bert": 7_681_154,
    "llama": 7_849_344,
}


@pytest.mark.parametrize("name", OWN)
def test_own_definitions_are_of_the_right_size(name: str) -> None:
    model = OWN[name](64)
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]
    with torch.no_grad():
        x = libraries.inputs(PUBLIC[name], 2, 64, 8)
        output = twins.without_randomness(model)(x)
    assert output.shape == {"bert": (2, 2), "llama": (2, 8, 1000)}.get(name, (2, 10))


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN)
@pytest.mark.filterwarnings("ignore")
def test_own_definitions_compute_what_the_libraries_do(name: str) -> None:
    (public,) = find(name)
    if (problem := libraries.problem(public.library)) is not None:
        pytest.skip(problem)
    torch.manual_seed(0)
    theirs, mine = libraries.build(public, 64), OWN[name](64)
    with torch.no_grad():
        for one, other in zip(theirs.parameters(), mine.parameters(), strict=True):
            other.copy_(one.add_(0.05 * torch.randn_like(one)))
    x = libraries.inputs(public, 4, 64, 32, torch.float64)
    for training in (True, False):
        outputs = [
            twins.outputs_of(twins.without_randomness(model).double().train(training), x)
            for model in (theirs, mine)
        ]
        expected, found = (next(iter(output.values())).detach() for output in outputs)
        # Llama's norms and angles are in float32 there.
        tolerance = 1e-5 if name == "llama" else 1e-10
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


# The comparison itself ----------------------------------------------------------------------------


class Wrong(torch.nn.Module):
    """A model whose first layer does something else where it is sparse."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.first, self.norm = torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8)
        self.last, self.what = torch.nn.Linear(8, 4), what

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        if isinstance(self.first, rewire.SparseLinear):
            if self.what == "output":
                y = y * 1.001
            elif self.what == "gradient":
                y = 2 * y - y.detach()
            elif self.what == "statistics":
                self.norm(y)
        return self.last(self.norm(y))


@pytest.mark.parametrize("what", ["", "output", "gradient", "statistics"])
def test_a_wrong_output_gradient_or_statistic_is_found(what: str) -> None:
    torch.manual_seed(0)
    model = rewire.sparsify(Wrong(what).double(), sparsity=0.5)
    found = twins.compare(model, torch.randn(6, 8, dtype=torch.float64))
    assert (found.largest < 1e-9) == (not what)
    assert found.gradients > 0.1 or what != "gradient"
    assert found.outputs < 1e-12 or what != "gradient"
    assert found.statistics > 1e-3 or what != "statistics"


class Drifts(torch.nn.Linear):
    """Gives another answer each time."""

    calls = 0

    def __deepcopy__(self, memo: object) -> Drifts:
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.calls * super().forward(x)


def test_a_model_that_differs_from_itself_is_no_evidence() -> None:
    sparse = rewire.sparsify(
        torch.nn.Sequential(torch.nn.Linear(8, 8), Drifts(8, 8)), sparsity=0.5, keep_dense="1"
    )
    with pytest.raises(twins.Inexact, match="not the same twice"):
        twins.compare(sparse, torch.randn(4, 8))


def test_dropout_is_turned_off_and_other_random_numbers_are_the_same() -> None:
    class Masked(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.rand(x.shape)

    layers = (torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), Masked())
    sparse = rewire.sparsify(torch.nn.Sequential(*layers), sparsity=0.5)
    state = torch.get_rng_state()
    assert twins.without_randomness(sparse)[1].p == 0
    assert twins.compare(sparse, torch.ones(4, 8)).largest < 1e-5
    assert torch.equal(torch.get_rng_state(), state)
