"""States of rewirers that are damaged, or of another model: refused whole, with what is wrong."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rewire
from rewire import Connections, SparseLinear
from rewire.methods.base import Rewirer
from rewire.ops.counting import REGISTERS


def dense(width: int = 20) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, width), nn.Tanh(), nn.Linear(width, 5))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _sparse(method: Any, **options: Any) -> Callable[[int], tuple[nn.Module, Any]]:
    def make(width: int = 20) -> tuple[nn.Module, Any]:
        model = rewire.sparsify(dense(width), sparsity=0.7)
        return model, method(model, sgd(model), **options)

    return make


def _masked(method: Any, masked: float, **options: Any) -> Any:
    def make(width: int = 20) -> tuple[nn.Module, Any]:
        model = rewire.sparsify(
            dense(width), sparsity=masked, weights="dense", storage="masked", seed=0
        )
        return model, method(model, sgd(model), **options)

    return make


MAKERS: dict[str, Any] = {
    "gse": _sparse(rewire.GSE, every=2, until=9),
    "set": _sparse(rewire.SET, every=2, until=9),
    "rigl": _sparse(rewire.RigL, every=2, until=9),
    "snfs": _sparse(rewire.SNFS, every=2, until=9),
    "dsr": _sparse(rewire.DSR, every=2, until=9),
    "deepr": _sparse(rewire.DeepR),
    "topkast": _masked(rewire.TopKAST, 0.7, every=2, until=9, backward=2.0),
    "gradual": _masked(rewire.Gradual, 0.0, every=2, until=9, sparsity=0.7, storage="masked"),
}


def trained(name: str) -> tuple[nn.Module, Any]:
    """After two rewirings, and in the middle of the step of another one."""
    model, rewirer = MAKERS[name](20)
    torch.manual_seed(1)
    for step in range(6):
        x, y = torch.randn(8, 12), torch.randint(5, (8,))
        rewirer.optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        if step < 5:
            rewirer.optimizer.step()
            rewirer.step()
    return model, rewirer


Path = tuple[str, ...]


def leaves(state: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    if isinstance(state, dict):
        for key, value in state.items():
            yield from leaves(value, (*path, key))
    else:
        yield path, state


def changed(state: Any, path: Path, value: Any) -> Any:
    new = copy.deepcopy(state)
    at = new
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return new


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(equal(a[k], b[k]) for k in a)
    return bool(a == b)


def wrong(tensor: Tensor) -> list[Any]:
    """What is no tensor of that size or type."""
    double = torch.cat([tensor, tensor]) if tensor.dim() else tensor.repeat(2)
    other = tensor.to(torch.int16 if tensor.dtype != torch.int16 else torch.int64)
    cut = tensor[:-1] if tensor.dim() and tensor.numel() else tensor.new_zeros(3)
    elsewhere = [tensor.to("meta"), tensor.to_sparse()] if tensor.dim() else [tensor.to("meta")]
    return [cut.clone(), double, tensor[None].clone(), other, *elsewhere, "text", None]


@pytest.mark.parametrize("name", MAKERS)
def test_every_tensor_of_a_state_is_looked_at(name: str) -> None:
    _, rewirer = trained(name)
    whole = copy.deepcopy(rewirer.state_dict())
    rewirer.load_state_dict(whole)
    tensors = [(path, leaf) for path, leaf in leaves(whole) if isinstance(leaf, Tensor)]
    assert len(tensors) >= 3
    for path, tensor in tensors:
        for value in wrong(tensor) if tensor.numel() else ():
            if value is None and path[-1] == "gradient":
                continue  # nothing is summed up so far
            with pytest.raises((ValueError, TypeError, AttributeError)):
                rewirer.load_state_dict(changed(whole, path, value))
            assert equal(rewirer.state_dict(), whole), (path, value)


@pytest.mark.parametrize("name", MAKERS)
def test_the_state_of_a_narrower_model_is_refused(name: str) -> None:
    _, rewirer = trained(name)
    model, narrow = MAKERS[name](7)
    for _ in range(3):
        F.cross_entropy(model(torch.randn(8, 12)), torch.randint(5, (8,))).backward()
        narrow.optimizer.step()
        narrow.step()
    with pytest.raises(ValueError, match="does not fit"):
        rewirer.load_state_dict(narrow.state_dict())


@pytest.mark.parametrize("name", MAKERS)
def test_settings_and_numbers(name: str) -> None:
    _, rewirer = trained(name)
    whole = copy.deepcopy(rewirer.state_dict())
    for path, value in [
        (("settings", "load_state_dict"), 1),
        (("settings", "every"), 0),
        (("settings", "every"), "2"),
        (("settings", "scope"), "galaxy"),
        (("settings", "until"), None),
        (("settings", "until"), 1.5),
        (("settings", "until"), 0),
        (("settings", "fraction"), None),
        (("settings", "fraction"), float("nan")),
        (("settings", "fraction"), 1.5),
        (("settings", "seed"), None),
        (("settings", "seed"), 1.5),
        (("t",), 1.5),
        (("t",), -1),
        (("history", "counts"), None),
        (("history", "steps"), [1]),
        (("layers", "0", "ever", "exact"), 3),
        (("layers", "0", "ever", "exact"), None),
        (("layers", "0", "ever", "exact"), torch.zeros(2)),
    ]:
        if path[0] == "layers" and "ever" not in whole["layers"]["0"]:
            continue
        if path == ("settings", "until") and value is None and name in ("deepr", "topkast"):
            continue  # they need no end
        with pytest.raises((ValueError, TypeError)):
            rewirer.load_state_dict(changed(whole, path, value))
        assert equal(rewirer.state_dict(), whole), path


def test_methods_that_never_rewire_take_their_own_state() -> None:
    model = rewire.sparsify(dense(), sparsity=0.7)
    for rewirer in (rewire.Static(model, sgd(model)), rewire.Dense(dense(), sgd(model))):
        state = copy.deepcopy(rewirer.state_dict())
        rewirer.load_state_dict(state)
        assert equal(rewirer.state_dict(), state)


def test_a_sketch_that_no_connections_give() -> None:
    layer = SparseLinear(2000, 2000, connections=50)
    rewirer = rewire.SET(layer, sgd(layer), every=1, until=9)
    rewirer.step()
    state = rewirer.state_dict()
    assert state["layers"][""]["ever"]["exact"] is None
    state["layers"][""]["ever"]["memory"] = torch.full((REGISTERS,), 255, dtype=torch.uint8)
    with pytest.raises(ValueError, match="sketch"):
        rewirer.load_state_dict(state)


class Hostile(rewire.SET):
    """Does as it is told."""

    masks: Any = None
    other: Any = None
    weights: Any = None

    def explore(self, view: Any) -> Connections:
        if self.weights is not None:
            return view.draw(1.0, self.weights)  # type: ignore[no-any-return]
        return self.other or super().explore(view)

    def choose(self, views: Any) -> None:
        super().choose(views)
        if self.masks is not None:
            for name, mask in self.masks.items():
                setattr(views[0], name, mask)


def hostile(**rules: Any) -> Rewirer:
    torch.manual_seed(0)
    layer = SparseLinear(30, 20, connections=100)
    rewirer = Hostile(layer, sgd(layer), every=1, until=9)
    vars(rewirer).update(rules)
    return rewirer


@pytest.mark.parametrize("size", [0, 99, 101, 10_000])
@pytest.mark.parametrize("name", ["pruned", "grown"])
def test_masks_of_a_wrong_length(name: str, size: int) -> None:
    masks = {"pruned": torch.zeros(100, dtype=torch.bool)}
    masks["grown"] = torch.zeros(500, dtype=torch.bool)  # S is all the others
    masks[name] = torch.zeros(size, dtype=torch.bool)
    with pytest.raises(ValueError, match=f"set '{name}'"):
        hostile(masks=masks, explore=lambda view: rewire.sampling.inactive(view.active)).step()


def test_masks_of_a_wrong_type() -> None:
    masks = {"pruned": torch.zeros(100, dtype=torch.uint8), "grown": torch.zeros(0)}
    with pytest.raises(ValueError, match="uint8"):
        hostile(masks=masks).step()


@pytest.mark.parametrize("units", [(31, 20), (29, 20), (3000, 20), (30, 21), (30, 19)])
def test_an_s_of_other_units(units: tuple[int, int]) -> None:
    rewirer = hostile(other=Connections.random(*units, 40))
    before = rewirer._views[0].layer.indices.clone()  # type: ignore[union-attr, operator]
    with pytest.raises(ValueError, match="20 x 30"):
        rewirer.step()
    assert torch.equal(rewirer._views[0].layer.indices, before)  # type: ignore[arg-type]


@pytest.mark.parametrize("sizes", [(29, 20), (31, 20), (30, 19), (30, 21), (0, 20), (30, 5000)])
def test_weights_of_a_wrong_length_to_draw_with(sizes: tuple[int, int]) -> None:
    weights = tuple(torch.ones(size) for size in sizes)
    if sizes[0] == 0:  # they have no sum: uniform
        hostile(weights=weights).step()
        return
    with pytest.raises(ValueError, match="puts has"):
        hostile(weights=weights).step()
