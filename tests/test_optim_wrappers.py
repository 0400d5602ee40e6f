"""State of optimizers inside optimizers follows the connections, or is refused."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, Optimizer

import rewire
from rewire import SparseLinear, wrappers
from rewirings import mlp, normal
from wrapping import (
    SAM,
    WRAPPERS,
    Delegate,
    ListedLookahead,
    Lookahead,
    MappedLookahead,
    momentum,
)

METHODS: dict[str, Callable[..., rewire.Rewirer]] = {
    "gse": lambda *a: rewire.GSE(*a, every=3, until=30, fraction=0.5),
    "gse layer": lambda *a: rewire.GSE(*a, every=3, until=30, fraction=0.5, scope="layer"),
    "set layer": lambda *a: rewire.SET(*a, every=3, until=30, fraction=0.5, scope="layer"),
    "dsr": lambda *a: rewire.DSR(*a, every=3, until=30, threshold=0.05),
}


class Twin(nn.Module):
    """The dense computation: weights of all connections under a mask."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(rewire.densify(copy.deepcopy(m)) for m in model)  # type: ignore[attr-defined]
        self.masks = masks_of(model)

    def forward(self, x: Tensor) -> Tensor:
        masks = iter(self.masks)
        for layer in self.layers:
            if isinstance(layer, nn.Linear):
                x = F.linear(x, layer.weight * next(masks), layer.bias)
            else:
                x = layer(x)
        return x

    def weights(self) -> list[nn.Parameter]:
        return [layer.weight for layer in self.layers if isinstance(layer, nn.Linear)]


def sparse_layers(model: nn.Module) -> list[SparseLinear]:
    return [m for m in model.modules() if isinstance(m, SparseLinear)]


def masks_of(model: nn.Module) -> list[Tensor]:
    masks = []
    for layer in sparse_layers(model):
        mask = torch.zeros(layer.n_out, layer.n_in, dtype=torch.float64)
        mask[layer.connections.outputs(), layer.connections.inputs()] = 1
        masks.append(mask)
    return masks


def tensors_of(optimizer: Optimizer, p: Tensor) -> Iterator[Tensor]:
    """All that the optimizers of these tests keep for a parameter, in its shape."""
    for one in wrappers.optimizers(optimizer):
        yield from (v for v in one.state.get(p, {}).values() if torch.is_tensor(v) and v.dim())
        if isinstance(one, ListedLookahead | MappedLookahead):
            yield one.slow(p)


def train(net: nn.Module, optimizer: Optimizer, t: int) -> None:
    def closure() -> None:
        net(normal(6, 12, seed=t)).square().mean().backward()

    optimizer.zero_grad()
    closure()
    optimizer.step(closure)


def narrow(model: nn.Module) -> nn.Module:
    first = next(m for m in model.modules() if isinstance(m, SparseLinear))
    assert first.n_in == 12
    return model


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", WRAPPERS)
def test_training_is_that_of_dense_weights_under_masks(name: str, method: str) -> None:
    net = narrow(mlp())
    twin = Twin(net)
    optimizer, dense = WRAPPERS[name](net.parameters()), WRAPPERS[name](twin.parameters())
    rewirer = METHODS[method](net, optimizer)
    grown = 0
    for t in range(14):
        train(net, optimizer, t)
        train(twin, dense, t)
        rewiring = rewirer.step()
        if rewiring is not None:
            grown += rewiring.grown
            now = masks_of(net)
            for weight, old, new in zip(twin.weights(), twin.masks, now, strict=True):
                for tensor in [weight.data, *tensors_of(dense, weight)]:
                    tensor.mul_(old * new)
                weight.grad = None
            twin.masks = now
        for layer, weight in zip(sparse_layers(net), twin.weights(), strict=True):
            at = layer.connections.outputs(), layer.connections.inputs()
            torch.testing.assert_close(
                layer.values.detach().flatten(), weight.detach()[at], rtol=1e-9, atol=1e-12
            )
            mine, theirs = tensors_of(optimizer, layer.values), tensors_of(dense, weight)
            for own, other in zip(mine, theirs, strict=True):
                assert own.shape == layer.values.shape
                torch.testing.assert_close(own.flatten(), other[at], rtol=1e-9, atol=1e-12)
    assert grown > 20


def test_fresh_state_is_what_the_inner_optimizer_gives() -> None:
    net = mlp()
    optimizer = Delegate(Adagrad(net.parameters(), lr=0.1, initial_accumulator_value=0.25))
    rewirer = rewire.SET(net, optimizer, every=1, until=9, scope="layer")
    train(net, optimizer, 0)
    before = set(net[0].connections.keys().tolist())
    rewirer.step()
    state = optimizer.optimizer.state[net[0].values]["sum"].flatten().tolist()
    keys = net[0].connections.keys().tolist()
    fresh = {s for key, s in zip(keys, state, strict=True) if key not in before}
    assert fresh == {0.25}


def test_gradual_hands_inner_state_over() -> None:
    dense = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 4)).double()
    for make in (lambda p: Lookahead(momentum(p)), lambda p: MappedLookahead(momentum(p))):
        net = rewire.sparsify(copy.deepcopy(dense), density=1, weights="keep", storage="masked")
        optimizer = make(net.parameters())
        rewirer = rewire.Gradual(net, optimizer, sparsity=0.5, every=2, until=4)
        weights = [net[0].weight, net[2].weight]
        for t in range(4):
            train(net, optimizer, t)
            if t < 3:
                rewirer.step()
        before = [[s.clone() for s in tensors_of(optimizer, w)] for w in weights]
        rewirer.step()
        for layer, states, old in zip(sparse_layers(net), before, weights, strict=True):
            at = layer.connections.outputs(), layer.connections.inputs()
            now = list(tensors_of(optimizer, layer.values))
            assert len(now) == len(states) == 2
            for a, b in zip(now, states, strict=True):
                assert torch.equal(a.flatten(), b[at])
            for one in wrappers.optimizers(optimizer):
                assert not any(p is old for p in wrappers.held(one))
                assert not any(p is old for p in one.state)
        train(net, optimizer, 4)


class Shard(Optimizer):
    """The optimizer inside holds but a part of the parameters."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.optim = momentum(self.param_groups[0]["params"][:1])


class Masters(Optimizer):
    """The optimizer inside trains copies."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.copies = momentum([p.detach().clone() for p in self.param_groups[0]["params"]])


def flat(net: nn.Module, optimizer: Optimizer) -> None:
    optimizer.buffer = torch.zeros(sum(p.numel() for p in net.parameters()))  # type: ignore[attr-defined]


def other_shape(net: nn.Module, optimizer: Optimizer) -> None:
    optimizer.moments = {net[2].values: torch.zeros(3, 5)}  # type: ignore[attr-defined, index]


def by_number(net: nn.Module, optimizer: Optimizer) -> None:
    optimizer.moments = {id(p): torch.zeros_like(p) for p in net.parameters()}  # type: ignore[attr-defined]


def in_group(net: nn.Module, optimizer: Optimizer) -> None:
    optimizer.param_groups[0]["slow"] = [torch.zeros_like(net[0].values)]  # type: ignore[index]


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (Shard, "Shard holds .*2.values.* inside it .SGD. does not"),
        (Masters, "Masters holds 0.values, .* inside it .SGD. does not"),
        (lambda p: Delegate(torch.optim.LBFGS(p)), "LBFGS cannot train"),
    ],
)
def test_shards_and_copies_are_refused_at_once(make: Any, match: str) -> None:
    net = mlp()
    with pytest.raises(ValueError, match=match):
        rewire.GSE(net, make(net.parameters()), until=9000)


def test_the_sharded_optimizer_of_torch_is_refused_at_once() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        net = mlp()
        optimizer = ZeroRedundancyOptimizer(net.parameters(), SGD, lr=0.1)
        with pytest.raises(ValueError, match="ZeroRedundancyOptimizer cannot train"):
            rewire.GSE(net, optimizer, until=9000)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("place", [flat, other_shape, by_number, in_group])
def test_what_cannot_be_matched_is_refused_before_anything_changes(place: Any) -> None:
    net = mlp()
    optimizer = Lookahead(momentum(net.parameters()))
    rewirer = rewire.GSE(net, optimizer, every=1, until=9)
    train(net, optimizer, 0)
    place(net, optimizer._base_optimizer)
    before = {key: value.clone() for key, value in net.state_dict().items()}
    state = copy.deepcopy(optimizer._base_optimizer.state_dict())
    with pytest.raises(ValueError, match="not known how that follows a rewiring; keep it in"):
        rewirer.step()
    with pytest.raises(ValueError, match="not known how that follows a rewiring; keep it in"):
        rewire.GSE(net, optimizer, until=9000)
    assert rewirer.t == 0
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    now = optimizer._base_optimizer.state_dict()["state"]
    assert all(torch.equal(v, state["state"][i][k]) for i, s in now.items() for k, v in s.items())


def test_other_tensors_of_an_optimizer_are_left_alone() -> None:
    net = mlp()
    optimizer = momentum(net.parameters())
    kept: Any = {
        "noise": torch.ones(3),
        "count": torch.tensor(2),
        "of": {net[0].bias: torch.ones(7)},
    }
    optimizer.kept, optimizer.all_params = kept, list(net.parameters())  # type: ignore[attr-defined]
    rewirer = rewire.GSE(net, optimizer, every=1, until=9)
    train(net, optimizer, 0)
    assert rewirer.step().grown > 0  # type: ignore[union-attr]
    assert kept["noise"].tolist() == [1, 1, 1]
    assert kept["of"][net[0].bias].tolist() == [1] * 7


def test_topkast_takes_no_wrapped_optimizer_and_refuses_before_anything_changes() -> None:
    dense = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 4)).double()
    net = rewire.sparsify(dense, sparsity=0.6, weights="dense", storage="masked")
    with pytest.raises(ValueError, match="Lookahead leaves to SGD"):
        rewire.TopKAST(net, Lookahead(momentum(net.parameters())), until=9000)
    optimizer = momentum(net.parameters())
    rewirer = rewire.TopKAST(net, optimizer, every=1, until=9)
    train(net, optimizer, 0)
    optimizer.state[net[2].weight]["strange"] = torch.zeros(2)
    before = {key: value.clone() for key, value in net.state_dict().items()}
    moments = optimizer.state[net[0].weight]["momentum_buffer"].clone()
    with pytest.raises(ValueError, match="strange"):
        rewirer.step()
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    assert torch.equal(optimizer.state[net[0].weight]["momentum_buffer"], moments)
    del optimizer.state[net[2].weight]["strange"]
    assert rewirer.step() is not None


# The real ones, where they are installed ---------------------------------------------------------


def timm_lookahead(params: Any) -> Optimizer:
    from timm.optim import Lookahead as Real

    return Real(Adam(params, lr=0.01), k=2)  # type: ignore[no-any-return]


def lightning(params: Any) -> Optimizer:
    from lightning.pytorch.core.optimizer import LightningOptimizer

    return LightningOptimizer(Adam(params, lr=0.01))  # type: ignore[return-value]


def accelerated(params: Any) -> Optimizer:
    from accelerate import Accelerator

    return Accelerator(cpu=True).prepare(Adam(params, lr=0.01))  # type: ignore[no-any-return]


@pytest.mark.parametrize("scope", ["layer", "global"])
@pytest.mark.parametrize(
    ("module", "make"),
    [("timm", timm_lookahead), ("lightning", lightning), ("accelerate", accelerated)],
)
def test_installed_wrappers(module: str, make: Any, scope: str) -> None:
    pytest.importorskip(module)
    net = mlp()
    optimizer = make(net.parameters())
    rewirer = rewire.GSE(net, optimizer, every=3, until=30, fraction=0.5, scope=scope)
    inner = wrappers.optimizers(optimizer)[-1]
    assert type(inner) is Adam
    grown = 0
    for t in range(7):
        optimizer.zero_grad()
        net(normal(6, 12, seed=t)).square().mean().backward()
        inner.step() if module == "lightning" else optimizer.step()
        layers = sparse_layers(net)
        before = [
            {k: by_key(m, s) for k, s in inner.state[m.values].items() if s.dim()} for m in layers
        ]
        rewiring = rewirer.step()
        grown += 0 if rewiring is None else rewiring.grown
        for layer, old in zip(layers, before, strict=True):
            assert len(old) == (2 if module != "timm" or t < 1 else 3)
            for key, states in old.items():
                for connection, value in by_key(layer, inner.state[layer.values][key]).items():
                    assert value == states.get(connection, 0.0)
    assert grown > 5


def by_key(layer: SparseLinear, tensor: Tensor) -> dict[int, float]:
    keys = layer.connections.keys().tolist()
    return dict(zip(keys, tensor.flatten().tolist(), strict=True))


def test_sam_by_its_two_steps() -> None:
    net = mlp()
    optimizer = SAM(net.parameters(), SGD, lr=0.1, momentum=0.9)
    rewirer = rewire.GSE(net, optimizer, every=2, until=9, scope="layer")
    for t in range(4):
        for half in (optimizer.first_step, optimizer.second_step):
            net(normal(6, 12, seed=t)).square().mean().backward()
            half()
        keys = net[0].connections.keys()
        old = by_key(net[0], optimizer.base_optimizer.state[net[0].values]["momentum_buffer"])
        rewiring = rewirer.step()
        now = by_key(net[0], optimizer.base_optimizer.state[net[0].values]["momentum_buffer"])
        assert now == {k: old.get(k, 0.0) for k in net[0].connections.keys().tolist()}
        assert (rewiring is None) == torch.equal(keys, net[0].connections.keys())
        optimizer.zero_grad()
