"""What the layer benchmark runs: our layers and the same work done by others.

- A *chain* is four equal layers, each with ReLU; ours run as one plan of the engine. Input, output and
  the output's gradient are contiguous, or for dense convolutions channels-last, whichever is faster.
- A *drop-in chain* is the same, built by hand of ``SparseLinear`` and ``nn.ReLU``, without the engine.
- A single *linear layer* has row-major input, output and gradients, so that ours has to turn them.
- A single *convolution* is one that changes the channels or the size of the image.

Backward computes all gradients, the input's too. Dense layers run in float32 and in bfloat16, and so do
ours where that is asked for: for training under autocast, without gradients as a model in bfloat16.
Whoever can take the weights of our layers has them, and must agree with ours before anything is timed.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import rewire
from rewire import SparseConv2d, SparseLinear
from rewire.bench import limits, peers
from rewire.bench.case import (
    CHANNELS_LAST,
    CSR,
    DENSE,
    FORWARD,
    INFERENCE,
    OURS,
    TRAINING,
    Functions,
    Groups,
)
from rewire.bench.timing import Function
from rewire.engine import use_engine
from rewire.ops import layout
from rewire.precision import BFLOAT16, FLOAT32, PRECISIONS, autocast

LAYERS = 4  # of a chain

Model = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class ConvShape:
    """A 3x3 convolution with padding 1 on square images."""

    n_in: int
    n_out: int
    image: int
    stride: int = 1

    @property
    def chains(self) -> bool:
        """Whether its output can be its input."""
        return self.n_in == self.n_out and self.stride == 1

    def __str__(self) -> str:
        channels = str(self.n_in) if self.chains else f"{self.n_in}->{self.n_out}"
        stride = "" if self.stride == 1 else f" /{self.stride}"
        return f"{channels}x{self.image}x{self.image}{stride}"


@dataclass(frozen=True)
class How:
    """How workloads run.

    Attributes:
        batch: samples, but for inference, which has one.
        precisions: which ours runs in.
        limit: GB that a dense linear model may take.
    """

    batch: int = 128
    precisions: tuple[str, ...] = PRECISIONS
    limit: float = 8.0


def linear_chain(width: int, sparsity: float, how: How) -> Groups:
    """Four linear layers, forward and backward, and forward alone also against CSR."""
    ours = _linears(width, LAYERS, sparsity)
    use_engine(ours, True)
    x = torch.randn(how.batch, width)
    turned = layout.to_batch_last(x)
    csr = _csr_chain(ours)
    training: Functions = {**_all_training(OURS, ours, x, how.precisions), **_limits(ours, x)}
    forward = _all_forward(OURS, ours, x, how.precisions) | {(CSR, ""): _forward(csr, turned)}
    _check("torch.sparse", csr, turned, like=ours)
    if (dense := _dense(ours, how.limit, gradients=True)) is not None:
        _check("dense", dense, x, like=ours)
        training |= _all_training(DENSE, dense, x)
        forward |= _all_forward(DENSE, dense, x)
    yield TRAINING, training
    yield FORWARD, forward


def drop_in_chain(width: int, sparsity: float, how: How) -> Groups:
    """Four linear layers in place of dense ones in an ``nn.Sequential``: nothing is converted."""
    ours = _linears(width, LAYERS, sparsity)
    x = torch.randn(how.batch, width)
    training = _all_training(OURS, ours, x, how.precisions)
    forward = _all_forward(OURS, ours, x, how.precisions)
    if (dense := _dense(ours, how.limit, gradients=True)) is not None:
        _check("dense", dense, x, like=ours)
        training |= _all_training(DENSE, dense, x)
        forward |= _all_forward(DENSE, dense, x)
    yield TRAINING, training
    yield FORWARD, forward


def linear_layer(width: int, sparsity: float, how: How) -> Groups:
    """One linear layer, row-major in and out, also against peers and CSR."""
    model = _linears(width, 1, sparsity)
    layer = model[0]
    assert isinstance(layer, SparseLinear)
    ours = _RowMajor(model)
    x = torch.randn(how.batch, width)
    training: Functions = {**_all_training(OURS, ours, x, how.precisions), **_limits(model, x)}
    forward = _all_forward(OURS, ours, x, how.precisions)
    for name, csr in _csr_layers(layer).items():
        _check("torch.sparse", csr, x, like=ours)
        forward[CSR, name] = _forward(csr, x)
    if (dense := _dense(model, how.limit, gradients=True)) is not None:
        _check("dense", dense, x, like=ours)
        training |= _all_training(DENSE, dense, x)
        forward |= _all_forward(DENSE, dense, x)
        for peer, variants in peers.linear(layer).items():  # they start from a dense weight
            for name, _, module in variants:
                training[peer, name] = _training(_RowMajor(module), x)
    yield TRAINING, training
    yield FORWARD, forward


def convolution(shape: ConvShape, sparsity: float, how: How) -> Groups:
    """Four convolutions, or one that cannot be chained, also against peers."""
    ours = _convs(shape, sparsity)
    x = torch.randn(how.batch, shape.n_in, shape.image, shape.image)
    turned = layout.to_batch_last(x)
    dense = _dense_formats(ours, x)
    training: Functions = {**_all_training(OURS, ours, x, how.precisions), **_limits(ours, x)}
    for name, (model, its_x) in dense.items():
        training |= _all_training(DENSE, model, its_x, name=name)
    layers = [module for module in ours if isinstance(module, SparseConv2d)]
    for peer, variants in peers.convs(layers, rectify=len(ours) > 1).items():
        for name, batch_last, module in variants:
            its_x = turned if batch_last else x
            if _agrees(module, its_x, like=ours):  # one of them is wrong for odd batch sizes
                training[peer, name] = _training(module, its_x)
    yield TRAINING, training
    forward = _all_forward(OURS, ours, x, how.precisions)
    for name, (model, its_x) in dense.items():
        forward |= _all_forward(DENSE, model, its_x, name=name)
    yield FORWARD, forward


def linear_inference(width: int, sparsity: float, how: How) -> Groups:
    """One sample through four linear layers."""
    ours = _linears(width, LAYERS, sparsity)
    use_engine(ours, True)
    x = torch.randn(1, width)
    functions = _all_forward(OURS, ours, x, how.precisions)
    for name, csr in (("matrix", _csr_chain(ours)), ("vector", _csr_chain_of_vectors(ours))):
        _check("torch.sparse", csr, x, like=ours)
        functions[CSR, name] = _forward(csr, x)
    if (dense := _dense(ours, how.limit, gradients=False)) is not None:
        _check("dense", dense, x, like=ours)
        functions |= _all_forward(DENSE, dense, x)
    yield INFERENCE, functions


def conv_inference(shape: ConvShape, sparsity: float, how: How) -> Groups:
    """One sample through four convolutions, or through one that cannot be chained."""
    ours = _convs(shape, sparsity)
    x = torch.randn(1, shape.n_in, shape.image, shape.image)
    functions = _all_forward(OURS, ours, x, how.precisions)
    for name, (model, its_x) in _dense_formats(ours, x).items():
        functions |= _all_forward(DENSE, model, its_x, name=name)
    yield INFERENCE, functions


# Models -------------------------------------------------------------------------------------------


def _linears(width: int, count: int, sparsity: float) -> nn.Sequential:
    """One layer, or copies of it with ReLU: drawing the connections anew would take long."""
    layer = SparseLinear(width, width, sparsity=sparsity)
    if count == 1:
        return nn.Sequential(layer)
    copies = [layer, *(copy.deepcopy(layer) for _ in range(count - 1))]
    return nn.Sequential(*(module for each in copies for module in (each, nn.ReLU())))


def _convs(shape: ConvShape, sparsity: float) -> nn.Sequential:
    """One layer, or four with ReLU, converted as a user's model would be."""
    arguments = (shape.n_in, shape.n_out, 3, shape.stride, 1)
    with torch.device("meta"):
        if shape.chains:
            pairs = [(nn.Conv2d(*arguments), nn.ReLU()) for _ in range(LAYERS)]
            model = nn.Sequential(*(module for pair in pairs for module in pair))
        else:
            model = nn.Sequential(nn.Conv2d(*arguments))
    model = rewire.sparsify(model, sparsity=sparsity, assignment="uniform")
    use_engine(model, True)
    return model


def _dense(ours: nn.Sequential, limit: float, gradients: bool) -> nn.Sequential | None:
    """The dense model with the same weights; None if it takes more than ``limit`` GB."""
    weights = sum(m.n_in * m.n_out for m in ours if isinstance(m, rewire.SparseLayer))
    # Weights, their gradients, and both of them or the weights once more in bfloat16.
    if 1e-9 * weights * (12 if gradients else 6) > limit:
        return None
    return _same_weights(ours)


def _same_weights(ours: nn.Sequential) -> nn.Sequential:
    sparse = (SparseLinear, SparseConv2d)
    return nn.Sequential(*(m.to_dense() if isinstance(m, sparse) else m for m in ours))


def _dense_formats(ours: nn.Sequential, x: Tensor) -> dict[str, tuple[nn.Sequential, Tensor]]:
    """The dense convolutions in either memory format, with their input."""
    dense = _same_weights(ours)
    _check("dense", dense, x, like=ours)
    last = copy.deepcopy(dense).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return {
        "": (dense, x),
        CHANNELS_LAST: (last, x.to(memory_format=torch.channels_last)),
    }


class _RowMajor(nn.Module):
    """A layer whose output is contiguous."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y.contiguous()


# torch.sparse -------------------------------------------------------------------------------------


def _csr(layers: Iterable[nn.Module]) -> list[tuple[Tensor, Tensor]]:
    """Weight and bias (a column) of each layer, with the int32 indices that torch's library wants."""
    found = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
        for layer in layers:
            if isinstance(layer, SparseLinear):
                assert layer.bias is not None
                parts = (layer.indptr, layer.indices, layer.values.detach().flatten())
                size = (layer.n_out, layer.n_in)
                weight = torch.sparse_csr_tensor(*parts, size=size, check_invariants=False)
                found.append((weight, layer.bias.detach()[:, None]))
    return found


def _csr_chain(ours: nn.Sequential) -> Model:
    """The chain with all activations as (units, batch), which is what CSR products take and give."""
    layers = _csr(ours)

    def run(x: Tensor) -> Tensor:
        h = x.t()
        for weight, bias in layers:
            h = (weight @ h).add_(bias).relu_()
        return h.t()

    return run


def _csr_chain_of_vectors(ours: nn.Sequential) -> Model:
    layers = [(weight, bias[:, 0]) for weight, bias in _csr(ours)]

    def run(x: Tensor) -> Tensor:
        h = x[0]
        for weight, bias in layers:
            h = (weight @ h).add_(bias).relu_()
        return h[None]

    return run


def _csr_layers(layer: SparseLinear) -> dict[str, Model]:
    """Row-major in and out, the input turned by torch's product or beforehand."""
    ((weight, bias),) = _csr([layer])
    return {
        "strided": lambda x: (weight @ x.t()).add_(bias).t().contiguous(),
        "turned": lambda x: (weight @ x.t().contiguous()).add_(bias).t().contiguous(),
    }


# What is timed ------------------------------------------------------------------------------------


def _all_training(
    who: str, model: nn.Module, x: Tensor, precisions: Iterable[str] = PRECISIONS, name: str = ""
) -> Functions:
    """Forward and backward in each precision."""
    return {(who, p + name): _training(model, x, p) for p in precisions}


def _all_forward(
    who: str, model: nn.Module, x: Tensor, precisions: Iterable[str] = PRECISIONS, name: str = ""
) -> Functions:
    """Forward in each precision, in bfloat16 of a copy of the model in it: nothing is converted again."""
    found: Functions = {}
    for precision in precisions:
        if precision == BFLOAT16:
            half = copy.deepcopy(model).to(torch.bfloat16)
            found[who, precision + name] = _forward(half, x.to(torch.bfloat16))
        else:
            found[who, precision + name] = _forward(model, x)
    return found


def _forward(model: Model, x: Tensor) -> Function:
    def run() -> None:
        with torch.no_grad():
            model(x)

    return run


def _training(model: nn.Module, x: Tensor, precision: str = FLOAT32) -> Function:
    """Forward and backward, from a gradient in the memory format of the output."""
    x = x.detach().requires_grad_()
    leaves = [x, *model.parameters()]
    with autocast(precision):
        gradient = torch.randn_like(model(x).detach())

    def run() -> None:
        for leaf in leaves:
            leaf.grad = None
        with autocast(precision):
            y = model(x)
        y.backward(gradient)

    return run


def _limits(ours: nn.Sequential, x: Tensor) -> Functions:
    return limits.functions([m for m in ours if isinstance(m, rewire.SparseLayer)], x)


def _agrees(model: Model, x: Tensor, like: Model) -> bool:
    """Whether a model gives the output of another, whatever the memory format of ``x``."""
    with torch.no_grad():
        y, expected = model(x), like(x)
        tolerance = 1e-3 * max(1.0, float(expected.abs().max()))
        return torch.allclose(y, expected, rtol=1e-3, atol=tolerance)


def _check(name: str, model: Model, x: Tensor, like: Model) -> None:
    if not _agrees(model, x, like):
        raise RuntimeError(f"{name} and rewire disagree: the benchmark would compare other things")
