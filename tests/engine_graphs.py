"""Graphs without a recorder: a builder, real tensors for them, and what they mean by plain torch."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rewire.connections import Connections
from rewire.engine import graph as ir
from rewire.engine.graph import Graph, InputMeta, Node, Ref
from rewire.engine.parse.images import inside_groups
from rewire.engine.resampling import resample
from rewire.ops import topology
from rewire.ops.topology import Topology

DENSITY = 0.3


class Builder:
    """Nodes by method calls; a value is a reference, as in the graph."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.inputs: list[InputMeta] = []
        self.layers: list[Connections] = []
        self.scalars: list[float | int] = []

    def graph(self, *outputs: int) -> Graph:
        return Graph(tuple(self.nodes), tuple(self.inputs), tuple(sorted(set(outputs))))

    def input(self, *shape: int, grad: bool = True) -> int:
        self.inputs.append(InputMeta(shape, torch.float64, grad))
        return ~(len(self.inputs) - 1)

    def shape(self, ref: int) -> tuple[int, ...]:
        return self.nodes[ref].shape if ref >= 0 else self.inputs[~ref].shape

    def requires_grad(self, ref: Ref) -> bool:
        if ref is None:
            return False
        return self.nodes[ref].requires_grad if ref >= 0 else self.inputs[~ref].requires_grad

    def node(self, op: str, attrs: Any, inputs: tuple[Ref, ...], shape: tuple[int, ...]) -> int:
        grad = any(map(self.requires_grad, inputs))
        self.nodes.append(Node(op, attrs, inputs, tuple(shape), grad, torch.float64))
        return len(self.nodes) - 1

    def _layer(
        self, n_in: int, n_out: int, bias: bool, frozen: bool
    ) -> tuple[int, int, int | None]:
        number = len(self.layers)
        count = max(1, int(DENSITY * n_in * n_out))
        generator = torch.Generator().manual_seed(number)
        self.layers.append(Connections.random(n_in, n_out, count, generator))
        values = self.input(count, 1, grad=not frozen)
        return number, values, self.input(n_out) if bias else None

    def conv(
        self,
        x: int,
        channels: int,
        kernel: int = 3,
        stride: int = 1,
        padding: int = 1,
        bias: bool = True,
        frozen: bool = False,
        probe: bool = False,
    ) -> int:
        batch, n_in, *size = self.shape(x)
        out = [(n + 2 * padding - kernel) // stride + 1 for n in size]
        number, values, b = self._layer(n_in * kernel**2, channels, bias, frozen)
        sizes = ((n, n) for n in (kernel, stride, padding, 1))
        attrs = ir.Conv(*sizes, number, probe)
        return self.node("conv2d", attrs, (x, values, b), (batch, channels, *out))

    def linear(self, x: int, units: int, bias: bool = True, frozen: bool = False) -> int:
        batch, n_in = self.shape(x)
        number, values, b = self._layer(n_in, units, bias, frozen)
        return self.node("linear", ir.Linear(number, False), (x, values, b), (batch, units))

    def norm(self, x: int, training: bool = True, track: bool = True, affine: bool = True) -> int:
        channels = self.shape(x)[1]
        weight, bias = (self.input(channels) if affine else None for _ in range(2))
        statistics = [self.input(channels, grad=False) if track else None for _ in range(2)]
        momentum = None
        if training and track:
            momentum = len(self.scalars)
            self.scalars.append(0.25)
        attrs = ir.BatchNorm(training, momentum, 1e-5, training and track)
        return self.node("batch_norm", attrs, (x, weight, bias, *statistics), self.shape(x))

    def group_norm(self, x: int, groups: int, affine: bool = True) -> int:
        channels = self.shape(x)[1]
        weight, bias = (self.input(channels) if affine else None for _ in range(2))
        return self.node("group_norm", ir.GroupNorm(groups, 1e-3), (x, weight, bias), self.shape(x))

    def relu(self, x: int) -> int:
        return self.node("relu", ir.NOTHING, (x,), self.shape(x))

    def activation(self, x: int, kind: str, p: float = 0.0, q: float = 0.0) -> int:
        return self.node("activation", ir.Activation(kind, p, q), (x,), self.shape(x))

    def affine(self, x: int, scale: float, shift: float) -> int:
        return self.node("affine", ir.Affine(scale, shift), (x,), self.shape(x))

    def add(self, x: int, y: int) -> int:
        return self.binary("add", x, y)

    def binary(self, op: str, x: int, y: int) -> int:
        """One of the two has the shape of the result."""
        shape = torch.broadcast_shapes(self.shape(x), self.shape(y))
        return self.node(op, ir.NOTHING, (x, y), tuple(shape))

    def grouped(self, x: int, groups: int, each: int = 1, kernel: int = 3, stride: int = 1) -> int:
        """A dense convolution in groups."""
        batch, channels, *size = self.shape(x)
        inside, n_out = channels // groups, groups * each
        topology = inside_groups(channels, n_out, groups, kernel, kernel)
        self.layers.append(
            Connections(channels * kernel**2, n_out, topology.indptr, topology.indices)
        )
        values, padding = self.input(n_out * inside * kernel**2, 1), kernel // 2
        sizes = ((n, n) for n in (kernel, stride, padding, 1))
        attrs = ir.Conv(*sizes, len(self.layers) - 1, False)
        out = [(n + 2 * padding - kernel) // stride + 1 for n in size]
        return self.node("conv2d", attrs, (x, values, None), (batch, n_out, *out))

    def cat(self, *parts: int) -> int:
        batch, _, *size = self.shape(parts[0])
        channels = sum(self.shape(part)[1] for part in parts)
        return self.node("cat", ir.NOTHING, parts, (batch, channels, *size))

    def narrow(self, x: int, first: int, last: int) -> int:
        batch, _, *size = self.shape(x)
        return self.node("narrow", ir.Narrow(first, last), (x,), (batch, last - first, *size))

    def max_pool(self, x: int, kernel: int = 2, padding: int = 0, ceil: bool = False) -> int:
        attrs = ir.Pool((kernel, kernel), (kernel, kernel), (padding, padding), ceil)
        return self.node("max_pool2d", attrs, (x,), self._pooled(x, kernel, padding, ceil))

    def avg_pool(
        self, x: int, kernel: int = 2, padding: int = 0, count: bool = True, ceil: bool = False
    ) -> int:
        attrs = ir.AvgPool((kernel, kernel), (kernel, kernel), (padding, padding), count, ceil)
        return self.node("avg_pool2d", attrs, (x,), self._pooled(x, kernel, padding, ceil))

    def _pooled(self, x: int, kernel: int, padding: int, ceil: bool) -> tuple[int, ...]:
        channels_first = torch.empty((1, 1, *self.shape(x)[2:]))
        size = F.max_pool2d(channels_first, kernel, kernel, padding, 1, ceil).shape[2:]
        return (*self.shape(x)[:2], *size)

    def mean(self, x: int, keepdim: bool = False) -> int:
        shape = self.shape(x)[:2]
        return self.node("mean", ir.Mean(keepdim), (x,), (*shape, 1, 1) if keepdim else shape)

    def slice(self, x: int, down: int = 2, across: int = 2) -> int:
        batch, channels, height, width = self.shape(x)
        shape = (batch, channels, -(-height // down), -(-width // across))
        return self.node("slice", ir.Slice(down, across), (x,), shape)

    def pad(self, x: int, *amounts: int, value: float = 0.0) -> int:
        """``amounts`` before and after channels, rows and columns."""
        batch, *rest = self.shape(x)
        around = (*amounts, *(0,) * (6 - len(amounts)))
        shape = (batch, *(n + around[2 * k] + around[2 * k + 1] for k, n in enumerate(rest)))
        return self.node("pad", ir.Pad((0, 0, *around), value), (x,), shape)

    def resample(self, x: int, kind: str, down: Any, across: Any, **options: Any) -> int:
        attrs = ir.Resample(kind, down, across, **options)
        size = resample(attrs, torch.empty((1, 1, *self.shape(x)[2:]))).shape[2:]
        return self.node("resample", attrs, (x,), (*self.shape(x)[:2], *size))

    def shuffle(self, x: int, groups: int) -> int:
        return self.node("shuffle", ir.Shuffle(groups), (x,), self.shape(x))

    def clone(self, x: int) -> int:
        return self.node("clone", ir.NOTHING, (x,), self.shape(x))

    def view(self, x: int, *shape: int) -> int:
        return self.node("view", ir.View(shape), (x,), shape)

    def dropout(self, x: int, p: float = 0.5) -> int:
        self.scalars.append(1234 + len(self.scalars))
        return self.node("dropout", ir.Dropout(p, len(self.scalars) - 1), (x,), self.shape(x))


class Case(NamedTuple):
    """A graph with something to run it on."""

    graph: Graph
    tensors: list[Tensor]
    topologies: list[Topology]
    layers: list[Connections]
    scalars: list[float | int]


def case(b: Builder, *outputs: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Case:
    generator = torch.Generator().manual_seed(seed)
    inputs = [meta._replace(dtype=dtype) for meta in b.inputs]
    tensors = [torch.randn(meta.shape, dtype=dtype, generator=generator) for meta in inputs]
    for node in b.nodes:
        if node.op == "batch_norm" and (variance := node.inputs[4]) is not None:
            tensors[~variance].abs_().add_(0.1)
    taps = {
        n.attrs.topology: n.attrs.kernel[0] ** 2 if n.op == "conv2d" else 1  # type: ignore[attr-defined]
        for n in b.nodes
        if n.op in ("conv2d", "linear")
    }
    built = [
        topology.build(layer.indptr, layer.indices, layer.n_in, taps[k])
        for k, layer in enumerate(b.layers)
    ]
    nodes = tuple(node._replace(dtype=dtype) for node in b.nodes)
    graph = b.graph(*outputs)._replace(nodes=nodes, inputs=tuple(inputs))
    return Case(graph, tensors, built, b.layers, b.scalars)


ACTIVATIONS: dict[str, tuple[float, float]] = {
    "hardtanh": (-0.5, 1.25),
    "leaky_relu": (0.125, 0.0),
    "elu": (0.75, 1.5),
    **dict.fromkeys(("silu", "gelu", "gelu_tanh", "sigmoid", "tanh"), (0.0, 0.0)),
    **dict.fromkeys(("hardswish", "hardsigmoid"), (0.0, 0.0)),
    "softplus": (2.0, 3.0),
}
TORCH: dict[str, Callable[[Tensor, float, float], Tensor]] = {
    "hardtanh": F.hardtanh,
    "leaky_relu": lambda x, p, q: F.leaky_relu(x, p),
    "elu": lambda x, p, q: q * F.elu(x, p),
    "silu": lambda x, p, q: F.silu(x),
    "gelu": lambda x, p, q: F.gelu(x),
    "gelu_tanh": lambda x, p, q: F.gelu(x, approximate="tanh"),
    "sigmoid": lambda x, p, q: torch.sigmoid(x),
    "tanh": lambda x, p, q: torch.tanh(x),
    "hardswish": lambda x, p, q: F.hardswish(x),
    "hardsigmoid": lambda x, p, q: F.relu6(x + 3) / 6,  # torch's gradient has float's 1 / 6
    "softplus": F.softplus,
}


def meaning(of: Case, tensors: list[Tensor], masks: Any) -> list[Tensor]:
    """The outputs by plain dense torch; ``masks(node, shape)`` is the noise of a dropout."""
    found: list[Tensor] = []
    for index, (op, a, inputs, shape, *_) in enumerate(of.graph.nodes):
        attrs: Any = a
        x, *rest = (None if r is None else found[r] if r >= 0 else tensors[~r] for r in inputs)
        assert x is not None
        if op in ("conv2d", "linear"):
            layer, (values, bias) = of.layers[attrs.topology], rest
            weight = torch.zeros(layer.n_out, layer.n_in, dtype=x.dtype)
            values, bias = values.to(x.dtype), bias if bias is None else bias.to(x.dtype)
            weight = weight.index_put((layer.outputs(), layer.inputs()), values.view(-1))
            if op == "conv2d":
                weight = weight.view(layer.n_out, *attrs.kernel, -1).permute(0, 3, 1, 2)
                y = F.conv2d(x, weight, bias, attrs.stride, attrs.padding, attrs.dilation)
            else:
                y = F.linear(x, weight, bias)
        elif op == "batch_norm":
            weight, bias, *statistics = rest
            momentum = 0.0 if attrs.momentum is None else of.scalars[attrs.momentum]
            y = F.batch_norm(x, *statistics, weight, bias, attrs.training, momentum, attrs.eps)
        elif op == "layer_norm":
            y = F.layer_norm(x, x.shape[-1:], *rest, attrs.eps)
        elif op == "group_norm":
            y = F.group_norm(x, attrs.groups, *rest, attrs.eps)
        elif op == "relu":
            y = F.relu(x)
        elif op == "activation":
            y = TORCH[attrs.kind](x, attrs.p, attrs.q)
        elif op == "affine":
            y = x * attrs.scale + attrs.shift
        elif op in ("add", "sub", "mul", "div"):
            y = getattr(torch, op)(x, rest[0])
        elif op == "max_pool2d":
            y = F.max_pool2d(x, attrs.kernel, attrs.stride, attrs.padding, 1, attrs.ceil)
        elif op == "avg_pool2d":
            y = F.avg_pool2d(x, *attrs[:3], attrs.ceil, attrs.count_include_pad)
        elif op == "mean":
            y = x.mean((2, 3), keepdim=attrs.keepdim)
        elif op == "slice":
            y = x[:, :, :: attrs.down, :: attrs.across]
        elif op == "pad":
            _, _, *amounts = attrs.amounts
            y = F.pad(x, (*amounts[4:], *amounts[2:4], *amounts[:2]), value=attrs.value)
        elif op == "resample" and attrs.kind == "pad":
            y = F.pad(x, (*attrs.across, *attrs.down), attrs.mode)
        elif op == "resample" and attrs.kind == "mean":
            y = F.adaptive_avg_pool2d(x, (attrs.down, attrs.across))
        elif op == "resample":
            how = {attrs.kind.replace("scale", "scale_factor"): (attrs.down, attrs.across)}
            how |= {"mode": attrs.mode, "align_corners": attrs.align_corners}
            y = F.interpolate(x, **how)
        elif op == "shuffle":
            y = F.channel_shuffle(x, attrs.groups)
        elif op == "clone":
            y = x.clone()
        elif op == "cat":
            y = torch.cat([x, *rest], 1)
        elif op == "narrow":
            y = x[:, attrs.first : attrs.last]
        elif op == "view":
            y = x.reshape(attrs.shape)
        elif op == "dropout":
            y = x * masks(index, shape).to(x.dtype)
        elif op == "cast":
            y = x.to(attrs.dtype)
        else:
            raise NotImplementedError(op)
        found.append(y)
    return [found[i] for i in of.graph.outputs]


def random_program(rng: random.Random) -> tuple[Builder, list[int]]:
    """A graph of up to a dozen operations, some of them in the patterns that rules know."""
    b = Builder()
    batch = rng.choice([2, 3, 64, 128, 192])
    images = [
        b.input(batch, rng.randint(1, 5), *rng.choices((4, 5, 6, 7), k=2), grad=rng.random() < 0.5)
    ]
    flats: list[int] = []

    def conv(x: int) -> int:
        kernel, (height, width) = rng.choice((1, 3)), b.shape(x)[2:]
        padding = kernel // 2 if min(height, width) < kernel else rng.choice((0, kernel // 2))
        options = {"bias": rng.random() < 0.5, "frozen": rng.random() < 0.2}
        return b.conv(x, rng.randint(1, 6), kernel, rng.choice((1, 1, 2)), padding, **options)

    def same(x: int, among: list[int]) -> int:
        return rng.choice([y for y in among if b.shape(y) == b.shape(x)])

    def activation(x: int) -> int:
        kind = rng.choice(list(ACTIVATIONS))
        return b.activation(x, kind, *ACTIVATIONS[kind])

    def binary(x: int, among: list[int]) -> int:
        shape = b.shape(x)
        gates = [(shape[1], *(1,) * (len(shape) - 2)), (1, *shape[1:2], *(1,) * (len(shape) - 2))]
        gates += [(*shape[:2], *(1,) * (len(shape) - 2))]
        y = same(x, among) if rng.random() < 0.5 else b.input(*rng.choice(gates))
        return b.binary(
            rng.choice(("add", "sub", "mul")), *((x, y) if rng.random() < 0.5 else (y, x))
        )

    def pointwise(x: int, among: list[int]) -> int:
        for _ in range(rng.randint(1, 5)):
            kind = rng.randrange(4)
            if kind == 0:
                x = b.affine(x, rng.choice((-0.5, 2.0)), rng.choice((0.0, 1.5)))
            elif kind == 1:
                x = b.norm(x, rng.random() < 0.7)
            else:
                x = activation(x) if kind == 2 else binary(x, among)
        return x

    def other_size(x: int) -> int:
        kind = rng.randrange(5)
        if kind == 0:
            return b.resample(x, "size", rng.randint(1, 9), rng.randint(1, 9), mode="nearest")
        if kind == 1:
            align = rng.choice((None, True))
            return b.resample(x, "scale", 1.5, 2, mode="bilinear", align_corners=align)
        if kind == 2:
            return b.resample(x, "mean", rng.randint(1, 5), rng.randint(1, 5))
        amounts = (rng.randint(-1, 2), 1), (0, rng.randint(0, 2))
        mode = rng.choice(("replicate", "constant"))
        return b.resample(x, "pad", *amounts, mode=mode) if min(b.shape(x)[2:]) > 1 else x

    def divisor(n: int) -> int:
        return rng.choice([k for k in range(1, n + 1) if n % k == 0])

    for _ in range(rng.randint(1, 12)):
        x = rng.choice(images[-3:])
        batch, channels, height, width = b.shape(x)
        kind = rng.randrange(26)
        if kind < 2:
            images.append(conv(x))
        elif kind == 2:
            images.append(b.relu(b.norm(conv(x), training=rng.random() < 0.7)))
        elif kind == 3:
            images.append(b.relu(b.add(b.norm(b.conv(x, channels)), x)))
        elif kind == 4:
            images.append(b.norm(x, rng.random() < 0.7, affine=rng.random() < 0.8))
        elif kind == 5:
            images.append(b.relu(x))
        elif kind == 6:
            images.append(b.add(x, same(x, images)))
        elif kind == 7 and min(height, width) > 1:
            images.append(b.max_pool(x, 2, rng.randint(0, 1), rng.random() < 0.5))
        elif kind == 8 and min(height, width) > 1:
            images.append(b.avg_pool(x, padding=rng.randint(0, 1), count=rng.random() < 0.5))
            images.append(b.avg_pool(x, count=False, ceil=True))
        elif kind == 9:
            images.append(b.slice(x, rng.randint(1, 2), rng.randint(1, 3)))
        elif kind == 10:
            images.append(
                b.pad(x, *(rng.randint(0, 2) for _ in range(rng.choice((2, 6)))), value=0.5)
            )
        elif kind == 11:
            keep = rng.random() < 0.5
            (images if keep else flats).append(b.mean(x, keepdim=keep))
        elif kind == 25:
            images.append(b.clone(b.shuffle(x, divisor(channels))))
        elif kind == 24:
            images.append(other_size(x))
        elif kind == 23 and channels * height * width > 1:
            groups = divisor(channels) if height * width > 1 else 1
            y = b.group_norm(x, groups, rng.random() < 0.7)
            images.append(activation(y) if rng.random() < 0.5 else y)
        elif 20 <= kind < 23:
            first = rng.randrange(channels)
            part = b.narrow(x, first, rng.randint(first + 1, channels))
            like = [y for y in images if b.shape(y)[2:] == (height, width)]
            images.append(part if kind == 20 else b.cat(part, x, rng.choice(like)))
        elif kind == 19:
            images.append(b.grouped(x, channels, rng.randint(1, 2), stride=rng.randint(1, 2)))
        elif kind >= 17:
            images.append(pointwise(x, images))
        elif kind == 12:
            flats.append(b.view(x, batch, channels * height * width))
        elif flats:
            y = rng.choice(flats[-2:])
            choice = rng.randrange(6)
            if choice == 0:
                y = b.linear(y, rng.randint(1, 7))
            elif choice == 1:
                y = b.relu(b.linear(b.relu(b.linear(y, 4)), 5, frozen=rng.random() < 0.2))
            elif choice == 2:
                y = b.dropout(y)
            elif choice == 3:
                y = b.norm(y)
            elif choice == 4:
                y = pointwise(b.narrow(b.cat(y, y), 1, b.shape(y)[1] + 1), flats)
            else:
                y = b.add(y, same(y, flats))
            flats.append(y)
        elif kind == 15:
            images.append(b.dropout(x))
    if not b.nodes:
        b.relu(images[0])
    last = len(b.nodes) - 1
    return b, sorted({last, *(i for i in range(last) if rng.random() < 0.1)})
