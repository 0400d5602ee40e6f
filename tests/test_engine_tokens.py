"""Models of tokens: layers on the last dimension, norms, permutations, and how kernels see them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine_models import close, converted
from rewire.engine import graph as ir
from rewire.engine import use_engine
from rewire.engine.channels import Turn, channels_second
from rewire.engine.graph import Graph, InputMeta, Node

CHANNELS, TOKENS = 6, 16


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(CHANNELS) for _ in range(2))
        self.places = nn.Sequential(nn.Linear(TOKENS, 5), nn.GELU(), nn.Linear(5, TOKENS))
        self.channels = nn.Sequential(nn.Linear(CHANNELS, 7), nn.GELU(), nn.Linear(7, CHANNELS))
        self.first = nn.Linear(CHANNELS, CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = x + self.places(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norms[1](x))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.scale = nn.RMSNorm(CHANNELS), nn.Parameter(torch.rand(CHANNELS))
        self.qkv = nn.Linear(CHANNELS, 3 * CHANNELS)
        self.out, self.first = nn.Linear(CHANNELS, CHANNELS), nn.Linear(CHANNELS, CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        qkv = self.qkv(self.norm(x)).reshape(*x.shape[:2], 3, 2, CHANNELS // 2)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        return x + self.out(y) * self.scale


class Swin(nn.Module):
    """Images with their channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(CHANNELS, elementwise_affine=False)
        self.body = nn.Sequential(nn.Linear(CHANNELS, 9), nn.SiLU(), nn.Linear(9, CHANNELS))
        self.stem = nn.Conv2d(3, CHANNELS, 3, padding=1)
        self.head = nn.Conv2d(CHANNELS, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x.view(x.shape[0], 4, 4, -1)[..., :3].permute(0, 3, 1, 2)))
        y = x.permute(0, 2, 3, 1)
        y = y + self.body(self.norm(y)) * torch.linspace(0, 1, len(y)).to(y).view(-1, 1, 1, 1)
        return self.head(y.permute(0, 3, 1, 2) + x)


class Gated(nn.Module):
    """As a Llama has it, with a mask for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(CHANNELS, 9, bias=False), nn.Linear(CHANNELS, 9, bias=False)
        self.down = nn.Linear(9, CHANNELS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[0], 1, 1, dtype=x.dtype)
        mask[::2] = 0.5
        y = self.down(F.silu(self.gate(x)) * self.up(x))
        places = torch.linspace(0, 1, TOKENS).to(x.dtype).expand(x.shape[0], -1)
        return y * mask + x * places.contiguous()[..., None]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mixer": Mixer,
    "attention": Attention,
    "swin": Swin,
    "gated": Gated,
}


@pytest.mark.parametrize("batch", [1, 3, 64, 128])
@pytest.mark.parametrize("name", MODELS)
def test_models_of_tokens(name: str, batch: int) -> None:
    torch.manual_seed(batch)
    on = converted(MODELS[name]())
    off = copy.deepcopy(on)
    use_engine(off, False)
    x = torch.randn(batch, TOKENS, CHANNELS, dtype=torch.float64)
    found = []
    for model in (on, off):
        given = x.clone().requires_grad_()
        y = model(given)
        y.backward(torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape))
        found.append([y, given.grad, *(p.grad for p in model.parameters())])
    for a, b in zip(*found, strict=True):
        close(a, b)
    with torch.no_grad():
        close(on(x), off(x))


def test_second_derivatives() -> None:
    on = converted(Mixer())
    off = copy.deepcopy(on)
    use_engine(off, False)
    x = torch.randn(3, TOKENS, CHANNELS, dtype=torch.float64)
    found = []
    for model in (on, off):
        given = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(model(given).square().sum(), given, create_graph=True)
        grad.square().sum().backward()
        found.append([given.grad, *(p.grad for p in model.parameters())])
    for a, b in zip(*found, strict=True):
        close(a, b)


@pytest.mark.parametrize("dims", [(0, 2, 1), (0, 2, 3, 1), (0, 3, 1, 2)])
def test_a_permuted_value_that_is_kept_is_a_view(dims: tuple[int, ...]) -> None:
    class Keeping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(CHANNELS, CHANNELS)

        def forward(self, x: Tensor) -> Any:
            y = self.layer(x)
            return y, y.permute(dims)

    model = converted(Keeping())
    shape = (2, 5, 4, CHANNELS) if len(dims) == 4 else (2, 5, CHANNELS)
    y, view = model(torch.randn(shape, dtype=torch.float64))
    assert view.stride() == y.permute(dims).stride()
    assert view.data_ptr() == y.data_ptr()
    assert torch.equal(view, y.permute(dims))


def _graph(*steps: tuple[str, Any, tuple[int, ...]], shape: tuple[int, ...]) -> Graph:
    """A chain of operations without parameters."""
    nodes: list[Node] = []
    for op, attrs, out in steps:
        nodes.append(Node(op, attrs, (len(nodes) - 1,), out, True, torch.float64))
    return Graph(tuple(nodes), (InputMeta(shape, torch.float64, True),), (len(nodes) - 1,))


NORM = ir.LayerNorm(1e-5, True)


def _ops(graph: Graph) -> list[tuple[str, tuple[int, ...]]]:
    return [(node.op, node.shape) for node in graph.nodes]


def test_tokens_are_rows() -> None:
    graph = _graph(
        ("layer_norm", NORM, (2, 5, 3)), ("relu", ir.NOTHING, (2, 5, 3)), shape=(2, 5, 3)
    )
    rewritten, origin = channels_second(graph)
    assert _ops(rewritten) == [
        ("view", (10, 3)),
        ("channel_norm", (10, 3)),
        ("relu", (10, 3)),
        ("view", (2, 5, 3)),
    ]
    assert origin == [0, 0, 1, 1]
    assert rewritten.outputs == (3,)


def test_what_was_second_is_normalised_where_it_lies() -> None:
    steps = [("permute", ir.Permute((0, 2, 1)), (2, 32, 3)), ("layer_norm", NORM, (2, 32, 3))]
    steps += [("permute", ir.Permute((0, 2, 1)), (2, 3, 32)), ("relu", ir.NOTHING, (2, 3, 32))]
    graph = _graph(("relu", ir.NOTHING, (2, 3, 32)), *steps, shape=(2, 3, 32))
    ops = _ops(channels_second(graph).graph)
    assert ("channel_norm", (2, 3, 32)) in ops
    assert not any(op in ("turn", "permute") for op, _ in ops)


def test_few_places_are_turned() -> None:
    steps = [("permute", ir.Permute((0, 2, 1)), (2, 4, 3)), ("layer_norm", NORM, (2, 4, 3))]
    rewritten, _ = channels_second(_graph(*steps, shape=(2, 3, 4)))
    assert rewritten.nodes[0].op == "turn"
    assert rewritten.nodes[0].attrs == Turn(3)
    assert rewritten.nodes[2].shape == (8, 3)


def test_images_stay_as_they_are() -> None:
    graph = _graph(("relu", ir.NOTHING, (2, 3, 4, 4)), shape=(2, 3, 4, 4))
    assert channels_second(graph) == (graph, [0])
