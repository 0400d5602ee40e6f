"""What the tests of methods share: every method, small models and their training."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rewire
from rewire import Connections, SparseLayer, SparseLinear

Make = Callable[..., rewire.Rewirer]


METHODS: dict[str, Make] = {
    "gse": lambda m, o, **k: rewire.GSE(m, o, **{"every": 3, "until": 9, **k}),
    "grabo": lambda m, o, **k: rewire.GSE(
        m, o, **{"every": 3, "until": 9, "distribution": "grabo", "scope": "layer", **k}
    ),
    "graest": lambda m, o, **k: rewire.GSE(
        m, o, **{"every": 3, "until": 9, "distribution": "graest", "subset": 0.5, **k}
    ),
    "set": lambda m, o, **k: rewire.SET(m, o, **{"every": 3, "until": 9, **k}),
    "set layer": lambda m, o, **k: rewire.SET(
        m, o, **{"every": 3, "until": 9, "scope": "layer", **k}
    ),
    "rigl": lambda m, o, **k: rewire.RigL(m, o, **{"every": 3, "until": 9, **k}),
    "rigl layer": lambda m, o, **k: rewire.RigL(
        m, o, **{"every": 3, "until": 9, "scope": "layer", **k}
    ),
    "snfs": lambda m, o, **k: rewire.SNFS(m, o, **{"every": 3, "until": 9, **k}),
    "dsr": lambda m, o, **k: rewire.DSR(m, o, **{"every": 3, "until": 9, "threshold": 0.05, **k}),
    "deepr": lambda m, o, **k: rewire.DeepR(
        m, o, **{"until": 9, "l1": 0.05, "temperature": 0.1, **k}
    ),
    "deepr global": lambda m, o, **k: rewire.DeepR(m, o, **{"l1": 0.05, "scope": "global", **k}),
    "static": lambda m, o, **k: rewire.Static(m, o, **k),
}


class Net(nn.Module):
    """Two convolutions and two linear layers, with what fuses around them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(2, 6, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(6)
        self.conv2 = nn.Conv2d(6, 8, 3, stride=2)
        self.fc1 = nn.Linear(8 * 9, 20)
        self.fc2 = nn.Linear(20, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv1(x)))
        x = F.relu(self.conv2(x)).flatten(1)
        return self.fc2(F.relu(self.fc1(x)))  # type: ignore[no-any-return]


def net(seed: int = 0, sparsity: float = 0.7) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return rewire.sparsify(Net(), sparsity=sparsity, seed=seed)


def mlp(seed: int = 0) -> nn.Module:
    dense = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 4))
    return rewire.sparsify(dense, sparsity=0.6, seed=seed)


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.05, "momentum": 0.9, **options})


def images(step: int, n: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randn(n, 2, 8, 8, generator=generator), torch.arange(n) % 4


def rows(step: int, n: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randn(n, 12, generator=generator), torch.arange(n) % 4


def batch(model: nn.Module, step: int) -> tuple[Tensor, Tensor]:
    return rows(step) if isinstance(model, nn.Sequential) else images(step)


def backward(model: nn.Module, step: int) -> None:
    x, y = batch(model, step)
    F.cross_entropy(model(x), y).backward()


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, rewirer: rewire.Rewirer, steps: range
) -> list[rewire.Rewiring]:
    found = []
    for step in steps:
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
        found.append(rewirer.step())
    return [rewiring for rewiring in found if rewiring is not None]


def layers(model: nn.Module) -> dict[str, SparseLayer]:
    return {n: m for n, m in model.named_modules() if isinstance(m, SparseLayer)}


def keys(connections: Connections) -> set[int]:
    return set(connections.keys().tolist())


def topology(model: nn.Module) -> dict[str, set[int]]:
    return {name: keys(layer.connections) for name, layer in layers(model).items()}


def by_key(layer: SparseLayer, tensor: Tensor | None = None) -> dict[int, float]:
    tensor = layer.values if tensor is None else tensor
    return dict(zip(layer.connections.keys().tolist(), tensor.flatten().tolist(), strict=True))


def dense_gradients(
    model: nn.Module, step: int, backward: Callable[[nn.Module, int], None] = backward
) -> dict[str, Tensor]:
    """The gradient at every possible connection, (out, in) in our numbering of inputs, by torch."""
    full = rewire.densify(copy.deepcopy(model))
    backward(full, step)
    found = {}
    for name, layer in model.named_modules():
        if isinstance(layer, rewire.ConnectedLayer):
            weight = full.get_submodule(name).weight.grad
            assert isinstance(weight, Tensor)
            found[name] = weight.permute(0, 2, 3, 1).flatten(1) if weight.dim() == 4 else weight
    return found


def hand_made(active: list[tuple[int, int, float]], n_in: int = 3, n_out: int = 2) -> SparseLinear:
    """A layer with the given (output, input, weight)."""
    order = sorted(active)
    chosen = Connections.from_keys(torch.tensor([o * n_in + i for o, i, _ in order]), n_in, n_out)
    layer = SparseLinear(n_in, n_out, bias=False, connections=chosen)
    with torch.no_grad():
        layer.assign(torch.tensor([w for _, _, w in order]))
    return layer
