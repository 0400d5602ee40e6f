"""Layers that are better dense: which stay so by themselves, and who says it."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import rewire
from rewire import flops
from rewire.budgets import held
from rewire.slow import SLOW_FROM, is_slow


def separable() -> nn.Module:
    """A depthwise convolution between two that are not, and a small layer that is dense at most shares."""
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 3), nn.Conv2d(32, 64, 3, groups=32), nn.Conv2d(64, 64, 3, groups=2)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 4)),
    )


def is_slow_row(row: rewire.LayerSummary) -> bool:
    kind = nn.Linear if len(row.shape) == 2 else nn.Conv2d
    return row.density >= SLOW_FROM[kind]


def sparse(model: nn.Module) -> list[str]:
    return [n for n, m in model.named_modules() if isinstance(m, rewire.SparseLayer)]


def weights(model: nn.Module, names: list[str]) -> int:
    return sum(model.get_submodule(name).weight.numel() for name in names)  # type: ignore[operator,union-attr,misc]


@pytest.mark.filterwarnings("ignore:.*dense")
@pytest.mark.parametrize("assignment", ["erdos-renyi", "uniform", "erk"])
@pytest.mark.parametrize("skip", ["depthwise", "slow", "none"])
def test_the_target_counts_the_layers_that_are_left(skip: str, assignment: str) -> None:
    dense = separable()
    model = rewire.sparsify(separable(), sparsity=0.8, exact=True, skip=skip, assignment=assignment)
    names = sparse(model)
    found = rewire.summary(model, show=False)
    assert found.connections == held(weights(dense, names), 0.2)
    slow = [row.name for row in found.layers if row.slow]
    assert slow == [row.name for row in found.layers if row.sparse and is_slow_row(row)]
    every = ["0", "1", "2", "5"]
    if skip == "none":
        assert names == every
    elif skip == "depthwise":
        assert names == ["0", "2", "5"]
    else:
        assert slow == []
        assert "2" in names
        assert "1" not in names
        if assignment == "erdos-renyi":
            assert "5" not in names  # 68 units, 256 weights


def test_what_stays_dense_is_said() -> None:
    with pytest.warns(UserWarning, match="stay dense") as caught:
        rewire.sparsify(separable(), sparsity=0.8, skip="slow")
    text = str(caught[0].message)
    assert (
        'a depthwise convolution is hardly faster when it is sparse (skip="none" converts it): 1 ('
        in text
    )
    assert 'a sparse product would be slower at its density (skip="slow"): 5 (' in text
    assert caught[0].filename == __file__


def test_summary_names_slow_layers(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(50, 50), nn.Linear(50, 50))
    rewire.sparsify(model, density={"0": 1.0, "1": 0.05})
    rewire.summary(model)
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "likely slower than dense at their density: 0"
    rewire.summary(rewire.densify(model))
    assert "slower" not in capsys.readouterr().out
    masked = rewire.sparsify(nn.Linear(9, 9), density=1.0, weights="keep", storage="masked")
    assert not rewire.summary(masked, show=False).layers[0].slow  # it is a dense layer


def test_a_mapping_converts_what_it_names() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = rewire.sparsify(separable(), density={"1": 0.5, "0": 1.0}, skip="slow")
    assert sparse(model) == ["0", "1"]


def test_depthwise_layers_are_saved_and_loaded(tmp_path: Any) -> None:
    model = rewire.sparsify(separable(), sparsity=0.5, skip="none")
    rewire.save(model, tmp_path / "m.safetensors")
    loaded = rewire.load(tmp_path / "m.safetensors", separable())
    x = torch.randn(2, 3, 9, 9)
    torch.testing.assert_close(loaded(x), model(x))


def test_mistakes() -> None:
    with pytest.raises(
        ValueError, match="there is no skip 'all'; choose one of depthwise, slow, none"
    ):
        rewire.sparsify(separable(), 0.5, skip="all")
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r'every layer would be slower .* with skip="depthwise"'):
        rewire.sparsify(model, density=1.0, skip="slow")
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize("kind", SLOW_FROM)
def test_the_rule(kind: type[nn.Module]) -> None:
    layer = kind(8, 8) if kind is nn.Linear else kind(8, 8, 3)  # type: ignore[call-arg]
    assert is_slow(layer, SLOW_FROM[kind])
    assert not is_slow(layer, SLOW_FROM[kind] - 1e-6)
    assert not is_slow(nn.Embedding(3, 3), 1.0)


def test_assigned_flops_are_those_of_the_converted_model() -> None:
    expected = flops.assigned(separable(), (3, 9, 9), 0.8)
    with pytest.warns(UserWarning, match="depthwise"):
        model = rewire.sparsify(separable(), sparsity=0.8)
    assert flops.count(model, (3, 9, 9)) == expected


@pytest.mark.filterwarnings("ignore:.*dense")
def test_attentions_that_are_left_whole() -> None:
    """One that loses all its projections to the rule stays what it was."""
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(4, 2), "wide": nn.Linear(1000, 1000)})
    rewire.sparsify(model, sparsity=0.9, skip="slow")
    assert type(model["attention"]) is nn.MultiheadAttention
    assert sparse(model) == ["wide"]
    assert model["wide"].count == 100_000
