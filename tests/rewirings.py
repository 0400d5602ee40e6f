"""What the tests of rewirings share: small models, one rewiring of them, and what it should have done.

The subset S is seen from outside: the same model, data and seed with a fraction so large that all
of S is grown. Gradients are those of the dense model of ``layer.to_dense()``, by autograd.
"""

import copy
import io
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import rewire
from rewire import Connections, SparseConv2d, SparseLayer, SparseLinear

DISTRIBUTIONS = ["uniform", "grabo", "graest"]
SCOPES = ["global", "layer"]
distributions = pytest.mark.parametrize("distribution", DISTRIBUTIONS)
scopes = pytest.mark.parametrize("scope", SCOPES)
LONG = 10**9  # an `until` so late that the cosine is still 1

Batch = tuple[Tensor, Tensor]
Make = Callable[[], nn.Module]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64).to(dtype)


def mlp(seed: int = 0, dtype: torch.dtype = torch.float64, bias: bool = True) -> nn.Sequential:
    def layer(n_in: int, n_out: int, count: int, number: int) -> SparseLinear:
        generator = seeded(10 * seed + number)
        options: dict[str, Any] = {"connections": count, "generator": generator, "dtype": dtype}
        return SparseLinear(n_in, n_out, bias, **options)

    return nn.Sequential(
        *(layer(12, 20, 61, 0), nn.Tanh(), layer(20, 15, 47, 1), nn.Tanh(), layer(15, 5, 23, 2))
    )


def cnn(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    options: dict[str, Any] = {"sparsity": 0.8, "dtype": dtype, "generator": seeded(seed)}
    return nn.Sequential(
        SparseConv2d(3, 8, 3, padding=1, **options),
        nn.Tanh(),
        SparseConv2d(8, 6, (3, 2), stride=2, padding=(1, 0), **options),
        nn.Tanh(),
        nn.Flatten(),
        SparseLinear(6 * 3 * 3, 5, **options),
    )


def batch_of(model: nn.Module, seed: int = 0, size: int = 8) -> Batch:
    first = layers_of(model)[0]
    shape = (size, 12) if isinstance(first, SparseLinear) else (size, 3, 6, 6)
    y = torch.randint(5, (size,), generator=seeded(seed + 1000))
    return normal(*shape, seed=seed, dtype=first.values.dtype), y


def layers_of(model: nn.Module) -> list[SparseLayer]:
    return [module for module in model.modules() if isinstance(module, SparseLayer)]


def keys_of(model: nn.Module) -> list[set[int]]:
    return [set(layer.connections.keys().tolist()) for layer in layers_of(model)]


def values_of(model: nn.Module) -> list[dict[int, float]]:
    return [
        dict(zip(layer.connections.keys().tolist(), layer.values.flatten().tolist(), strict=True))
        for layer in layers_of(model)
    ]


def inactive_of(model: nn.Module) -> list[set[int]]:
    return [set(range(layer.n_in * layer.n_out)) - keys for layer, keys in _zip(model)]


def _zip(model: nn.Module) -> Iterator[tuple[SparseLayer, set[int]]]:
    return zip(layers_of(model), keys_of(model), strict=True)


def flat(weight: Tensor) -> Tensor:
    """A dense weight by key: output * n_in + input, a convolution's taps before its channels."""
    return (weight if weight.dim() == 2 else weight.permute(0, 2, 3, 1)).flatten()


def default_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def weighted_sum(model: nn.Module, batch: Batch) -> Tensor:
    return (model(batch[0]) * batch[1]).sum()


Loss = Callable[[nn.Module, Batch], Tensor]


def true_gradients(
    model: nn.Module, batches: Sequence[Batch], loss: Loss = default_loss
) -> list[Tensor]:
    """Of the dense model of the same weights, by key, averaged over the micro-batches."""
    sparse = layers_of(model)
    dense = [layer.to_dense() for layer in sparse]
    memo: dict[int, Any] = {id(a): b for a, b in zip(sparse, dense, strict=True)}
    twin = rewire.densify(copy.deepcopy(model, memo))
    twin.zero_grad()
    for batch in batches:
        loss(twin, batch).backward()
    grads = [layer.weight.grad for layer in dense]
    return [flat(grad if grad is not None else torch.zeros(1)) / len(batches) for grad in grads]


@dataclass
class Outcome:
    """One rewiring, seen from outside."""

    before: list[set[int]]
    after: list[set[int]]
    values: list[dict[int, float]]  # after the optimizer's update, before the rewiring
    gradient: list[Tensor]
    result: Any

    @property
    def grown(self) -> list[set[int]]:
        return [a - b for a, b in zip(self.after, self.before, strict=True)]

    @property
    def pruned(self) -> list[set[int]]:
        return [b - a for a, b in zip(self.after, self.before, strict=True)]


def one_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rewirer: Any,
    batches: Sequence[Batch],
    loss: Loss = default_loss,
    between: Callable[[nn.Module], object] = lambda model: None,
) -> Outcome:
    optimizer.zero_grad()
    before, gradient = keys_of(model), true_gradients(model, batches, loss)
    for batch in batches:
        (loss(model, batch) / len(batches)).backward()
    between(model)
    optimizer.step()
    assert keys_of(model) == before
    values = values_of(model)
    result = rewirer.step()
    return Outcome(before, keys_of(model), values, gradient, result)


def once(
    make: Make,
    batches: Sequence[Batch] | None = None,
    *,
    lr: float = 0.1,
    loss: Loss = default_loss,
    between: Callable[[nn.Module], object] = lambda model: None,
    **options: Any,
) -> Outcome:
    """A model's first training step, with a rewiring."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    rewirer = rewire.GSE(model, optimizer, **({"every": 1, "until": LONG} | options))
    return one_step(model, optimizer, rewirer, batches or [batch_of(model)], loss, between)


def sample(make: Make, batches: Sequence[Batch] | None = None, **options: Any) -> list[set[int]]:
    """S of that step: the fraction is so large that all of it is grown."""
    outcome = once(make, batches, **(options | {"fraction": constant(0.9)}))
    assert sum(map(len, outcome.grown)) < math.ceil(0.9 * sum(map(len, outcome.before)))
    return outcome.grown


def constant(value: float) -> Callable[[int], float]:
    return lambda t: value


def pools(scope: str, count: int) -> list[list[int]]:
    """Which layers share a k."""
    return [list(range(count))] if scope == "global" else [[i] for i in range(count)]


def assert_grows(
    outcome: Outcome, subset: list[set[int]], alpha: float, scope: str, tolerance: float = 1e-12
) -> None:
    """k of the largest true gradients in the subset, and nothing else."""
    assert all(g <= s for g, s in zip(outcome.grown, subset, strict=True))
    for pool in pools(scope, len(subset)):
        active = sum(len(outcome.before[i]) for i in pool)
        k = min(math.ceil(alpha * active), sum(len(subset[i]) for i in pool))
        score = {(i, key): abs(float(outcome.gradient[i][key])) for i in pool for key in subset[i]}
        grown = [(i, key) for i in pool for key in outcome.grown[i]]
        assert len(grown) == k
        least = min((score[c] for c in grown), default=math.inf)
        best_left = max((score[c] for c in score if c not in set(grown)), default=0.0)
        assert least >= best_left - tolerance


def assert_prunes(outcome: Outcome, scope: str) -> None:
    """As many as were grown, of the smallest weights; every layer keeps its largest."""
    for pool in pools(scope, len(outcome.before)):
        weight = {(i, key): abs(v) for i in pool for key, v in outcome.values[i].items()}
        pruned = {(i, key) for i in pool for key in outcome.pruned[i]}
        assert len(pruned) == sum(len(outcome.grown[i]) for i in pool)
        kept = set(weight) - pruned
        for i in pool:
            mine = [c for c in weight if c[0] == i]
            if mine:
                largest = max(weight[c] for c in mine)
                exempt = [c for c in mine if c in kept and weight[c] == largest]
                assert exempt
                kept.discard(exempt[0])
        most = max((weight[c] for c in pruned), default=0.0)
        assert most <= min((weight[c] for c in kept), default=math.inf)


def total(result: Any, name: str) -> int:
    """What step() says about grown, pruned or subset, over all layers."""
    value = getattr(result, name)
    return value if isinstance(value, int) else len(value)


def assert_rewires(make: Make, batches: Sequence[Batch] | None = None, **options: Any) -> None:
    """S, G and P of one rewiring, at a fraction of 0.2."""
    scope, loss = options.setdefault("scope", "global"), options.get("loss", default_loss)
    subset = sample(make, batches, **options)
    outcome = once(make, batches, **(options | {"fraction": constant(0.2)}))
    tolerance = 1e-12 if layers_of(make())[0].values.dtype == torch.float64 else 1e-5
    assert_grows(outcome, subset, 0.2, scope, tolerance)
    assert_prunes(outcome, scope)
    assert sum(map(len, outcome.grown)) > 0
    assert all(s.isdisjoint(a) for s, a in zip(subset, outcome.before, strict=True))
    bound = [math.ceil(options["subset"] * len(keys)) for keys in outcome.before]
    assert all(len(s) <= b for s, b in zip(subset, bound, strict=True))
    assert total(outcome.result, "subset") == sum(map(len, subset))
    assert total(outcome.result, "grown") == sum(map(len, outcome.grown))
    assert total(outcome.result, "pruned") == sum(map(len, outcome.pruned))
    assert loss is options.get("loss", default_loss)


def assert_frequencies(observed: Counter[Any], expected: dict[Any, float]) -> None:
    """Chi-square test at about one in a hundred thousand; cells with little are put together."""
    assert set(observed) <= set(expected)
    count = sum(observed.values())
    assert math.isclose(sum(expected.values()), count, rel_tol=1e-9)
    large = [cell for cell, mean in expected.items() if mean >= 5]
    rest = [cell for cell in expected if cell not in large]
    pairs = [(observed[cell], expected[cell]) for cell in large]
    pairs.append((sum(observed[c] for c in rest), sum(expected[c] for c in rest)))
    pairs = [(o, e) for o, e in pairs if e > 1e-9]
    freedom = len(pairs) - 1
    statistic = sum((o - e) ** 2 / e for o, e in pairs)
    assert statistic < freedom * (1 - 2 / (9 * freedom) + 4.3 * math.sqrt(2 / 9 / freedom)) ** 3


def linear_pair() -> nn.Module:
    """4 inputs, 3 outputs, two connections."""
    layer = SparseLinear(4, 3, bias=False, connections=2, dtype=torch.float64)
    given = Connections.from_keys(torch.tensor([1, 10]), 4, 3)
    layer.set_connections(given, torch.tensor([0.5, -0.3], dtype=torch.float64))
    return layer


def state_by_key(optimizer: torch.optim.Optimizer, layer: SparseLayer) -> dict[str, Any]:
    """Per-connection state by key, the rest as it is."""
    keys, state = layer.connections.keys().tolist(), optimizer.state[layer.values]
    return {
        name: dict(zip(keys, value.flatten().tolist(), strict=True))
        if isinstance(value, Tensor) and value.shape == layer.values.shape
        else copy.deepcopy(value)
        for name, value in state.items()
    }


def trio(make: Make, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    model = make()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    defaults = {"every": 3, "until": 20, "fraction": 0.4, "subset": 0.7}
    return model, optimizer, rewire.GSE(model, optimizer, **(defaults | options))


def train(parts: tuple[nn.Module, Any, Any], steps: range) -> nn.Module:
    model, optimizer, rewirer = parts
    for step in steps:
        optimizer.zero_grad()
        for micro in (0, 1):
            (default_loss(model, batch_of(model, 2 * step + micro)) / 2).backward()
        optimizer.step()
        rewirer.step()
    return model


def assert_same(a: nn.Module, b: nn.Module) -> None:
    assert keys_of(a) == keys_of(b)
    for (name, one), (_, other) in zip(a.named_parameters(), b.named_parameters(), strict=True):
        assert torch.equal(one, other), name


def stored(*parts: Any) -> list[Any]:
    """State dicts through a file, without pickled code."""
    file = io.BytesIO()
    torch.save([part.state_dict() for part in parts], file)
    file.seek(0)
    states: list[Any] = torch.load(file, weights_only=True)
    return states


def other(make: Any) -> nn.Module:
    return make(seed=9)


class NothingDense(TorchDispatchMode):
    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit, self.largest = limit, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, Tensor):
                self.largest = max(self.largest, tensor.numel())
                assert tensor.numel() < self.limit, func
        return out
