"""Layers that are frozen, unused or contested, a method of one's own, and bad arguments."""

import copy
import gc
import io
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import rewire
from rewire import Connections, SparseLinear
from rewired import METHODS, backward, hand_made, keys, layers, mlp, net, sgd, topology, train

pytestmark = pytest.mark.usefixtures("same_random_numbers")


def half(t: int) -> float:
    return 0.5


# Frozen, unused, copied, contested -------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in METHODS if name != "static"])
def test_frozen_layers_are_left_alone(name: str) -> None:
    model = net()
    model.fc1.values.requires_grad_(False)  # type: ignore[union-attr]
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    rewirer = METHODS[name](model, optimizer)
    before = model.fc1.values.clone(), topology(model)["fc1"]  # type: ignore[union-attr]
    rewirings = train(model, optimizer, rewirer, range(6))
    assert rewirings
    assert all(r.layers["fc1"].grown == r.layers["fc1"].pruned == 0 for r in rewirings)
    assert torch.equal(model.fc1.values, before[0])  # type: ignore[union-attr]
    assert topology(model)["fc1"] == before[1]
    model.fc1.values.requires_grad_()  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"fc1\.values"):
        train(model, optimizer, rewirer, range(6, 9))


def test_layers_without_a_gradient_sit_out() -> None:
    model = nn.ModuleList([SparseLinear(10, 10, connections=30) for _ in range(2)])
    optimizer = sgd(model, lr=0.0)
    rewirer = rewire.GSE(model, optimizer, every=1, until=9, fraction=half, subset=9.0)
    model[0](torch.randn(3, 10)).sum().backward()
    rewiring = rewirer.step()
    assert rewiring is not None
    assert (rewiring.layers["0"].grown, rewiring.layers["1"].pruned) == (15, 0)
    with pytest.raises(RuntimeError, match="backward"):
        rewirer.step()
    assert rewirer.t == 1
    model[1](torch.randn(3, 10)).sum().backward()  # and it can go on
    assert rewirer.step().layers["1"].grown == 15  # type: ignore[union-attr]


def test_copies_and_pickles_of_an_armed_model_are_not_armed() -> None:
    model = mlp()
    rewirer = rewire.GSE(model, sgd(model), every=1, until=9)
    twin = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (twin, torch.load(file, weights_only=False)):
        backward(other, 0)
        assert all(layer.probe is None for layer in layers(other).values())
    assert not rewirer.subsets
    backward(model, 0)
    assert len(rewirer.subsets) == 2


def test_armed_only_when_due_and_while_the_rewirer_lives() -> None:
    model = mlp()
    optimizer = sgd(model)
    rewirer = rewire.GSE(model, optimizer, every=3, until=3)
    armed = []
    for step in range(5):
        armed.append([layer.probe is not None for layer in layers(model).values()])
        train(model, optimizer, rewirer, range(step, step + 1))
    assert armed == [[False] * 2, [False] * 2, [True] * 2, [False] * 2, [False] * 2]
    second = rewire.GSE(model, optimizer, every=1, until=3)
    with pytest.raises(RuntimeError, match="another rewirer"):
        rewire.GSE(model, optimizer, every=1, until=3)
    del second
    gc.collect()
    backward(model, 0)
    assert all(layer.probe is None for layer in layers(model).values())


def test_connections_that_change_under_a_rewirer_are_noticed() -> None:
    layer = hand_made([(0, 0, 0.5), (0, 1, -0.1), (1, 2, 2.0)])
    rewirer = rewire.GSE(layer, sgd(layer), every=1, until=9, fraction=half, subset=9.0)
    layer(torch.ones(1, 3)).sum().backward()
    before, values = layer.connections, layer.values.detach().clone()
    layer.set_connections(Connections.from_keys(torch.tensor([2, 3, 4]), 3, 2), torch.ones(3))
    for _ in range(2):
        with pytest.raises(
            RuntimeError, match=r"connections of SparseLinear were replaced between"
        ):
            rewirer.step()
    layer.set_connections(before, values)  # those that S was drawn for
    assert rewirer.step() is not None


# Your own method -------------------------------------------------------------------------------------


def test_the_example_of_the_docs() -> None:
    text = (Path(__file__).parent.parent / "docs" / "methods.md").read_text()
    (code,) = re.findall(r"```python\n(# own-method.*?)```", text, re.DOTALL)
    assert code.count("\n") < 30
    space: dict[str, Any] = {}
    exec(code, space)
    model = net()
    optimizer = sgd(model)
    rewirer = space["Saliency"](model, optimizer, every=2, until=8)
    before = topology(model)
    rewirings = train(model, optimizer, rewirer, range(6))
    assert [r.step for r in rewirings] == [2, 4, 6]
    assert all(r.grown == r.pruned > 0 for r in rewirings)
    assert topology(model) != before


def test_rules_that_break_the_contract_are_told() -> None:
    class Bad(rewire.Rewirer):
        guided = False

    model = mlp()
    with pytest.raises(NotImplementedError, match="growth"):
        Bad(model, sgd(model), every=1, until=9).step()

    class Short(rewire.SET):
        def survival(self, view: rewire.LayerView) -> Tensor:
            return torch.ones(3)

    with pytest.raises(ValueError, match="3 scores for"):
        Short(model, sgd(model), every=1, until=9).step()

    class Greedy(rewire.SET):
        def choose(self, views: Any) -> None:
            super().choose(views)
            views[0].pruned[:] = False

    with pytest.raises(RuntimeError, match="must stay"):
        Greedy(model, sgd(model), every=1, until=9).step()


def test_nan_is_never_preferred() -> None:
    layer = hand_made([(0, 0, 0.5), (0, 1, float("nan")), (1, 2, 2.0)])
    rewirer = rewire.GSE(
        layer, sgd(layer, lr=0.0), every=1, until=9, fraction=lambda t: 0.3, subset=9.0
    )
    layer.values.grad = None
    view = rewirer._views[0]
    layer(torch.ones(1, 3)).sum().backward()
    view.gradient = torch.tensor([float("nan"), 1.0, 2.0])
    rewirer.step()
    assert keys(layer.connections) == {0, 4, 5}


# Arguments -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        (rewire.GSE, {"fraction": 0.0}, "fraction must be in"),
        (rewire.GSE, {"fraction": 1.0}, "fraction must be in"),
        (rewire.GSE, {"fraction": -0.1}, "fraction must be in"),
        (rewire.GSE, {"fraction": float("nan")}, "fraction must be in"),
        (rewire.GSE, {"subset": 0.0}, "subset must be positive"),
        (rewire.GSE, {"subset": -1.0}, "subset must be positive"),
        (rewire.GSE, {"subset": float("nan")}, "subset must be positive"),
        (rewire.GSE, {"every": 0}, "every must be at least 1"),
        (rewire.GSE, {"every": 11}, "before the first rewiring"),
        (rewire.GSE, {"until": None}, "until is missing"),
        (rewire.GSE, {"distribution": "normal"}, "distribution must be one of"),
        (rewire.GSE, {"scope": "model"}, "scope must be one of"),
        (rewire.SET, {"fraction": 2.0}, "fraction must be in"),
        (rewire.DSR, {"scope": "layer"}, "leave scope"),
        (rewire.DSR, {"threshold": 0.0}, "threshold must be positive"),
        (rewire.DeepR, {"l1": -1.0}, "l1 must be"),
        (rewire.DeepR, {"temperature": float("inf")}, "temperature must be"),
        (rewire.DSR, {"threshold": float("inf")}, "threshold must be positive and finite"),
        (rewire.RigL, {"scope": "model"}, "scope must be one of"),
        (rewire.SNFS, {"momentum": 1.0}, "momentum must be"),
        (rewire.Static, {"every": -3}, "every must be at least 1"),
    ],
)
def test_bad_arguments(method: Any, options: dict[str, Any], message: str) -> None:
    model = mlp()
    with pytest.raises(ValueError, match=message):
        method(model, sgd(model), **{"every": 2, "until": 10, **options})


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        (rewire.GSE, {"every": 1.5}, r"every must be an integer, got 1\.5: round it"),
        (rewire.GSE, {"every": None}, "every must be an integer"),
        (rewire.GSE, {"until": 1e4}, "until must be an integer"),
        (rewire.GSE, {"seed": 0.5}, "seed must be an integer"),
        (rewire.GSE, {"fraction": "0.2"}, r"fraction must be a number, got '0\.2' \(str\)"),
        (rewire.GSE, {"fraction": None}, "fraction must be a number"),
        (rewire.GSE, {"subset": "all"}, "subset must be a number"),
        (rewire.SET, {"every": "2"}, "every must be an integer"),
        (rewire.DSR, {"threshold": None}, "threshold must be a number"),
        (rewire.DeepR, {"l1": "small"}, "l1 must be a number"),
        (rewire.DeepR, {"temperature": [1]}, "temperature must be a number"),
        (rewire.Static, {"every": 2.0}, "every must be an integer"),
    ],
)
def test_arguments_of_a_wrong_type(method: Any, options: dict[str, Any], message: str) -> None:
    model = mlp()
    with pytest.raises(TypeError, match=message):
        method(model, sgd(model), **{"every": 2, "until": 10, **options})


def test_bad_models_and_optimizers() -> None:
    model, other = mlp(), mlp(1)
    with pytest.raises(ValueError, match="sparsify"):
        rewire.GSE(nn.Linear(3, 3), sgd(model), until=9000)
    with pytest.raises(ValueError, match=r"does not hold 0\.values, 2\.values"):
        rewire.GSE(model, sgd(other), until=9000)
    with pytest.raises(ValueError, match="frozen"):
        rewire.GSE(mlp().requires_grad_(False), sgd(other), until=9000)
    with pytest.raises(TypeError, match="Optimizer"):
        rewire.GSE(model, model, until=9000)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Module"):
        rewire.GSE([model], sgd(model), until=9000)  # type: ignore[arg-type]
    tied = mlp()
    tied.append(copy.deepcopy(tied[2]))
    tied[3].values = tied[2].values
    with pytest.raises(ValueError, match="2 and 3 share"):
        rewire.GSE(tied, sgd(tied), until=9000)


@pytest.mark.parametrize("given", [1.5, -0.1, float("nan"), None, "half"])
def test_a_fraction_that_leaves_its_range_is_told(given: Any) -> None:
    model = mlp()
    rewirer = rewire.SET(model, sgd(model), every=1, until=9, fraction=lambda t: given)
    with pytest.raises(ValueError, match=rf"fraction\(1\) gave {given!r}, expected a number"):
        rewirer.step()


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 20), st.integers(1, 200), st.floats(0.01, 0.99))
def test_alpha_is_the_cosine(every: int, more: int, fraction: float) -> None:
    model = mlp()
    until = every + more
    rewirer = rewire.SET(model, sgd(model), every=every, until=until, fraction=fraction)
    for t in (0, every, until // 2, until):
        assert rewirer.alpha(t) == pytest.approx(fraction / 2 * (1 + math.cos(math.pi * t / until)))
        assert rewirer.due(t) == (t > 0 and t % every == 0)
    assert rewirer.alpha(until) == rewirer.alpha(until + 1) == 0
    assert not rewirer.due(until + every - until % every)


def test_a_loss_that_is_still_held_does_not_stop_training_after_a_rewiring() -> None:
    """Its graph remembers how long the values were."""
    torch.manual_seed(0)
    model = rewire.sparsify(nn.Sequential(nn.Linear(20, 50), nn.Linear(50, 5)), sparsity=0.8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rewirer = rewire.GSE(model, optimizer, every=2, until=100)
    lengths, hooked = set(), []
    model[0].values.register_post_accumulate_grad_hook(lambda p: hooked.append(p.numel()))
    for _ in range(6):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 20)).square().mean()
        loss.backward()
        optimizer.step()
        rewirer.step()
        lengths.add(model[0].values.numel())
    assert len(lengths) > 1
    assert len(hooked) == 6
    other = rewire.sparsify(nn.Sequential(nn.Linear(20, 50), nn.Linear(50, 5)), sparsity=0.5)
    other.load_state_dict(model.state_dict())  # of other lengths, too
    held = other(torch.randn(8, 20)).sum()
    other.load_state_dict(
        rewire.sparsify(nn.Sequential(nn.Linear(20, 50), nn.Linear(50, 5)), 0.9).state_dict()
    )
    other(torch.randn(8, 20)).sum().backward()
    assert held.requires_grad
