"""Optimizers inside optimizers, and values of shape (n, 1): factors follow, and old 1-D state goes on."""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adafactor, AdamW, Optimizer

import rewire
from rewire import SparseLinear, wrappers
from rewire.optim import reshape_old_state
from rewirings import mlp, normal
from test_old_files import aged
from test_optim_wrappers import by_key, sparse_layers, train
from test_weight_decay import Factored, Vectors, trained
from wrapping import WRAPPERS, Delegate, ListedLookahead, Lookahead, MappedLookahead

LOOKAHEADS: list[Callable[[Optimizer], Lookahead]] = [Lookahead, ListedLookahead, MappedLookahead]


# Rewirings ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("around", [*LOOKAHEADS, Delegate])
def test_factors_inside_of_wrappers_follow_as_if_there_were_none(around: Any) -> None:
    found = trained(lambda p, lr: around(Factored(p, lr))).state_dict()
    expected = trained(lambda p, lr: around(Vectors(p, lr))).state_dict()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("scope", ["layer", "global"])
@pytest.mark.parametrize("around", LOOKAHEADS)
def test_lookahead_around_adafactor(around: Any, scope: str) -> None:
    net = mlp()
    optimizer = around(Adafactor(net.parameters(), lr=0.1))
    rewirer = rewire.GSE(net, optimizer, every=2, until=30, fraction=0.5, scope=scope)

    def states(layer: SparseLinear) -> list[dict[int, float]]:
        inner = optimizer._base_optimizer.state[layer.values]
        assert inner["row_var"].shape == optimizer.slow(layer.values).shape == (layer.count, 1)
        torch.testing.assert_close(inner["col_var"], inner["row_var"].mean(0, keepdim=True))
        return [
            by_key(layer, tensor) for tensor in (inner["row_var"], optimizer.slow(layer.values))
        ]

    grown = 0
    for t in range(8):
        train(net, optimizer, t)
        before = [states(layer) for layer in sparse_layers(net)]
        rewiring = rewirer.step()
        grown += 0 if rewiring is None else rewiring.grown
        for layer, old in zip(sparse_layers(net), before, strict=True):
            keys = layer.connections.keys().tolist()
            assert states(layer) == [{key: one.get(key, 0.0) for key in keys} for one in old]
    assert grown > 20


# Old state ----------------------------------------------------------------------------------------

OLD: dict[str, Any] = {
    **{name: make for name, make in WRAPPERS.items() if name != "schedule-free"},
    "lookahead around adamw": lambda p: Lookahead(AdamW(p, lr=0.01, weight_decay=0.1)),
}


def loadable(optimizer: Optimizer) -> list[Optimizer]:
    """All that have been through the constructor of their base class."""
    found = wrappers.optimizers(optimizer)
    return [one for one in found if "_optimizer_load_state_dict_post_hooks" in vars(one)]


def lookahead(optimizer: Optimizer) -> Lookahead | None:
    found = wrappers.optimizers(optimizer)
    return next((one for one in found if isinstance(one, Lookahead)), None)


class Saved:
    """As a wrapper's own ``state_dict`` and ``load_state_dict``, with slow weights outside of ``state``."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        ahead = lookahead(self.optimizer)
        slow = {}
        if isinstance(ahead, ListedLookahead | MappedLookahead):
            slow = {i: ahead.slow(p) for i, p in enumerate(wrappers.held(ahead))}
        return {
            "inner": {i: one.state_dict() for i, one in enumerate(loadable(self.optimizer))},
            "slow": slow,
            "t": ahead.t if ahead else 0,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        ahead = lookahead(self.optimizer)
        if ahead is not None:
            ahead.t = state["t"]
            for i, tensor in state["slow"].items():
                ahead.slow(wrappers.held(ahead)[i]).data = tensor
        for one, saved in zip(loadable(self.optimizer), state["inner"].values(), strict=True):
            one.load_state_dict(saved)
        if ahead is not None:
            ahead.param_groups = ahead._base_optimizer.param_groups


def run(net: nn.Module, optimizer: Optimizer, rewirer: rewire.Rewirer, steps: range) -> int:
    grown = 0
    for t in steps:
        train(net, optimizer, t)
        rewiring = rewirer.step()
        grown += 0 if rewiring is None else rewiring.grown
    return grown


def parts(net: nn.Module, name: str) -> dict[str, Any]:
    optimizer = OLD[name](net.parameters())
    rewirer = rewire.GSE(net, optimizer, every=3, until=30, fraction=0.5)
    return {"model": net, "optimizer": Saved(optimizer), "rewirer": rewirer}


def all_tensors(state: Any) -> list[Tensor]:
    if isinstance(state, Tensor):
        return [state]
    return (
        [t for one in state.values() for t in all_tensors(one)] if isinstance(state, dict) else []
    )


ORDERS = list(itertools.permutations(["model", "optimizer", "rewirer"]))


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
@pytest.mark.parametrize("name", OLD)
def test_old_state_inside_of_wrappers_goes_on(name: str, order: tuple[str, ...]) -> None:
    first = parts(mlp(), name)
    run(first["model"], first["optimizer"].optimizer, first["rewirer"], range(4))
    saved = {key: copy.deepcopy(part.state_dict()) for key, part in first.items()}
    assert run(first["model"], first["optimizer"].optimizer, first["rewirer"], range(4, 8)) > 5

    old = saved | {key: aged(saved[key]) for key in ("model", "optimizer")}
    assert {t.dim() for t in all_tensors(old["optimizer"])} <= {0, 1}
    second = parts(mlp(), name)
    for key in order:
        second[key].load_state_dict(old[key])
    if old["optimizer"]["slow"] and order[-1] == "model":  # it tells what belongs to a parameter
        with pytest.raises(RuntimeError, match="doesn't match the broadcast shape"):
            run(second["model"], second["optimizer"].optimizer, second["rewirer"], range(4, 8))
        return
    for one in wrappers.optimizers(second["optimizer"].optimizer):
        for layer in sparse_layers(second["model"]):
            entry = one.state.get(layer.values, {})
            assert {v.shape for v in entry.values() if v.dim()} <= {(layer.count, 1)}
    run(second["model"], second["optimizer"].optimizer, second["rewirer"], range(4, 8))
    for key in ("model", "optimizer"):
        found, expected = (all_tensors(one[key].state_dict()) for one in (second, first))
        assert len(found) == len(expected)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def flatten_slow(optimizer: Lookahead, net: nn.Module) -> dict[Tensor, Tensor]:
    """Slow weights as they were when values were 1-D."""
    for layer in sparse_layers(net):
        slow = optimizer.slow(layer.values)
        slow.data = slow.data.flatten()
    return {p: optimizer.slow(p).clone() for p in net.parameters()}


@pytest.mark.parametrize("around", [ListedLookahead, MappedLookahead])
def test_slow_weights_outside_of_state_are_reshaped(around: Any) -> None:
    net = mlp()
    optimizer = around(AdamW(net.parameters(), lr=0.01))
    old = flatten_slow(optimizer, net)
    reshape_old_state(optimizer, net.parameters())
    for parameter, tensor in old.items():
        assert optimizer.slow(parameter).shape == parameter.shape
        assert torch.equal(optimizer.slow(parameter).flatten(), tensor.flatten())
    flatten_slow(optimizer, net)
    rewire.SET(net, optimizer, until=9000)  # so does a rewirer
    assert all(optimizer.slow(p).shape == p.shape for p in net.parameters())


@pytest.mark.parametrize("around", [ListedLookahead, MappedLookahead])
def test_vectors_outside_of_state_follow(around: Any) -> None:
    net = mlp()
    optimizer = around(AdamW(net.parameters(), lr=0.01))
    rewirer = rewire.SET(net, optimizer, every=1, until=9, fraction=0.5)
    net(normal(6, 12, seed=0)).square().mean().backward()
    optimizer._base_optimizer.step()
    flatten_slow(optimizer, net)
    before = [by_key(layer, optimizer.slow(layer.values)) for layer in sparse_layers(net)]
    rewiring = rewirer.step()
    assert rewiring is not None
    assert rewiring.grown > 5
    for layer, old in zip(sparse_layers(net), before, strict=True):
        slow = optimizer.slow(layer.values)
        assert slow.shape == (layer.count,)
        keys = layer.connections.keys().tolist()
        assert by_key(layer, slow) == {key: old.get(key, 0.0) for key in keys}


def test_old_state_is_reshaped_as_soon_as_an_inner_optimizer_loads_it() -> None:
    net = mlp()
    inner = AdamW(net.parameters(), lr=0.01)
    rewirer = rewire.SET(net, Delegate(Delegate(inner)), until=9000)
    train(net, inner, 0)
    inner.load_state_dict(aged(copy.deepcopy(inner.state_dict())))
    for layer in sparse_layers(net):
        assert inner.state[layer.values]["exp_avg"].shape == (layer.count, 1)
        assert layer.bias is not None
        assert inner.state[layer.bias]["exp_avg"].dim() == 1
    del rewirer  # until here: an optimizer does not keep its rewirer alive
    inner.load_state_dict(aged(copy.deepcopy(inner.state_dict())))
    assert inner.state[net[0].values]["exp_avg"].dim() == 1
