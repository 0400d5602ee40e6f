"""Optimizer state follows the connections, for every optimizer of torch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import rewire
from rewire import SparseLinear

OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "sgd": lambda p: optim.SGD(p, lr=0.1),
    "momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
    "nesterov": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "sgd foreach": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "sgd fused": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "sgd tensor lr": lambda p: optim.SGD(p, lr=torch.tensor(0.1), momentum=0.9),
    "adam": lambda p: optim.Adam(p, lr=0.1),
    "adam amsgrad": lambda p: optim.Adam(p, lr=0.1, amsgrad=True, maximize=True),
    "adam foreach": lambda p: optim.Adam(p, lr=0.1, foreach=True),
    "adam fused": lambda p: optim.Adam(p, lr=0.1, fused=True),
    "adamw": lambda p: optim.AdamW(p, lr=0.1, amsgrad=True),
    "adamw fused": lambda p: optim.AdamW(p, lr=0.1, fused=True),
    "nadam": lambda p: optim.NAdam(p, lr=0.1),
    "nadam foreach": lambda p: optim.NAdam(p, lr=0.1, foreach=True),
    "radam": lambda p: optim.RAdam(p, lr=0.1),
    "rmsprop": lambda p: optim.RMSprop(p, lr=0.1),
    "rmsprop centered": lambda p: optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True),
    "adagrad": lambda p: optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.25),
    "adagrad fused": lambda p: optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.25, fused=True),
    "adadelta": lambda p: optim.Adadelta(p, lr=0.1),
    "adamax": lambda p: optim.Adamax(p, lr=0.1),
    "asgd": lambda p: optim.ASGD(p, lr=0.1),
    "rprop": lambda p: optim.Rprop(p, lr=0.1),
    "rprop foreach": lambda p: optim.Rprop(p, lr=0.1, foreach=True),
    "adafactor": lambda p: optim.Adafactor(p, lr=0.1),
}
FRESH = {("Adagrad", "sum"): 0.25, ("Rprop", "step_size"): 0.1}


def model() -> nn.Module:
    dense = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 4))
    return rewire.sparsify(dense, sparsity=0.6)


def step(net: nn.Module, optimizer: optim.Optimizer, seed: int) -> None:
    optimizer.zero_grad()
    generator = torch.Generator().manual_seed(seed)
    net(torch.randn(5, 12, generator=generator)).square().mean().backward()
    optimizer.step()


def by_key(layer: SparseLinear, tensor: Tensor) -> dict[int, float]:
    return dict(zip(layer.connections.keys().tolist(), tensor.flatten().tolist(), strict=True))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_survivors_keep_their_state_and_grown_ones_get_fresh(name: str) -> None:
    net = model()
    optimizer = OPTIMIZERS[name](net.parameters())
    rewirer = rewire.GSE(net, optimizer, every=2, until=8, fraction=0.5)
    layers = [net[0], net[2]]
    changed = 0
    for t in range(6):
        step(net, optimizer, t)
        before = [
            {
                key: by_key(layer, state) if state.numel() > 1 else float(state)
                for key, state in states.items()
            }
            for layer in layers
            if (states := _tensors(optimizer, layer.values)) is not None
        ]
        values = [by_key(layer, layer.values) for layer in layers]
        dense = {k: v.clone() for k, v in _tensors(optimizer, net[0].bias).items()}
        rewiring = rewirer.step()
        for layer, old, weights in zip(layers, before, values, strict=True):
            now = _tensors(optimizer, layer.values)
            assert set(now) == set(old)
            for key, state in now.items():
                if not state.dim():
                    assert float(state) == old[key]
                    continue
                if key == "col_var":  # of a single column
                    torch.testing.assert_close(state, now["row_var"].mean(0, keepdim=True))
                    continue
                assert state.shape == layer.values.shape
                fresh = FRESH.get((type(optimizer).__name__, key), 0.0)
                for connection, value in by_key(layer, state).items():
                    assert value == pytest.approx(old[key].get(connection, fresh), rel=0, abs=1e-7)
                    if connection in old[key]:
                        assert value == old[key][connection]
            for connection, value in by_key(layer, layer.values).items():
                assert value == weights.get(connection, 0.0)
        assert all(torch.equal(v, dense[k]) for k, v in _tensors(optimizer, net[0].bias).items())
        changed += 0 if rewiring is None else rewiring.grown
    assert changed > 0


def _tensors(optimizer: optim.Optimizer, parameter: Any) -> dict[str, Tensor]:
    state = optimizer.state.get(parameter, {})
    return {key: value for key, value in state.items() if isinstance(value, Tensor)}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rewiring_before_there_is_any_state(name: str) -> None:
    net = model()
    optimizer = OPTIMIZERS[name](net.parameters())
    rewirer = rewire.SET(net, optimizer, every=1, until=4)
    assert rewirer.step().grown > 0  # type: ignore[union-attr]
    step(net, optimizer, 0)
    assert rewirer.step().grown > 0  # type: ignore[union-attr]
    step(net, optimizer, 1)
    assert all(bool(p.isfinite().all()) for p in net.parameters())


def test_groups_and_schedulers_are_unaffected() -> None:
    net = model()
    optimizer = optim.AdamW(
        [
            {"params": [net[0].values], "lr": 0.01, "weight_decay": 0.1},
            {"params": [net[0].bias, net[2].bias], "weight_decay": 0.0},
            {"params": [net[2].values], "lr": 0.03},
        ],
        lr=0.02,
    )
    scheduler = optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    rewirer = rewire.GSE(net, optimizer, every=1, until=8)
    for t in range(4):
        step(net, optimizer, t)
        scheduler.step()
        rewirer.step()
    assert [g["lr"] for g in optimizer.param_groups] == [0.01 / 4, 0.02 / 4, 0.03 / 4]
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.1, 0.0, 0.01]
    assert optimizer.param_groups[0]["params"][0] is net[0].values


def test_fresh_step_sizes_follow_the_scheduler() -> None:
    net = model()
    optimizer = optim.Rprop(net.parameters(), lr=0.1)
    rewirer = rewire.SET(net, optimizer, every=2, until=8)
    step(net, optimizer, 0)
    rewirer.step()
    before = set(net[0].connections.keys().tolist())
    for group in optimizer.param_groups:
        group["lr"] = 0.025
    rewirer.step()
    sizes = by_key(net[0], optimizer.state[net[0].values]["step_size"])
    fresh = {value for key, value in sizes.items() if key not in before}
    assert len(fresh) == 1
    assert fresh.pop() == pytest.approx(0.025)


def test_unknown_state_is_refused_before_anything_changes() -> None:
    for strange in (torch.zeros(3, 3), [torch.zeros(2)], {"a": 1}):
        net = model()
        optimizer = optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        rewirer = rewire.GSE(net, optimizer, every=1, until=8)
        step(net, optimizer, 0)
        optimizer.state[net[2].values]["strange"] = strange
        before = {key: value.clone() for key, value in net.state_dict().items()}
        with pytest.raises(ValueError, match="strange"):
            rewirer.step()
        assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
        del optimizer.state[net[2].values]["strange"]
        assert rewirer.step().grown > 0  # type: ignore[union-attr]


def test_what_is_kept_of_no_shape_stays() -> None:
    net = model()
    optimizer = optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    rewirer = rewire.GSE(net, optimizer, every=1, until=8)
    step(net, optimizer, 0)
    kept = {"none": None, "count": 3, "flag": True, "name": "x", "scalar": torch.tensor(2.0)}
    optimizer.state[net[0].values].update(kept)
    rewirer.step()
    assert {k: optimizer.state[net[0].values][k] for k in kept} == kept


@pytest.mark.parametrize("name", ["LBFGS", "SparseAdam", "Muon"])
def test_refused_optimizers(name: str) -> None:
    net = model()
    kind = getattr(optim, name, None)
    if kind is None:
        pytest.skip(f"this torch has no {name}")
    parameters = [nn.Parameter(torch.zeros(3, 3))] if name == "Muon" else net.parameters()
    with pytest.raises(ValueError, match=f"{name} cannot train"):
        rewire.GSE(net, kind(parameters), until=9000)
