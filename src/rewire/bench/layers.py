"""The layer benchmark: which shapes and sparsities are measured, and what a tiny call costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from rewire import SparseLinear, models, ops
from rewire.bench import workloads
from rewire.bench.case import FORWARD, INFERENCE, TRAINING, Case, Groups
from rewire.bench.timing import interleaved
from rewire.bench.workloads import ConvShape, How
from rewire.ops import layout
from rewire.precision import PRECISIONS

WIDTHS = (512, 1024, 2048, 4096, 8192, 16384)
SPARSITIES = (0.8, 0.9, 0.95, 0.98, 0.99)
PARTS = ("linear", "conv", "inference")
QUICK_WIDTHS, QUICK_CONVS = (1024,), (ConvShape(64, 64, 8),)
QUICK_SPARSITIES = (0.9, 0.95, 0.98)
DROP_IN_WIDTHS, DROP_IN_SPARSITIES, QUICK_DROP_IN_SPARSITIES = (1024,), (0.98, 0.99), (0.98,)


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes:
        widths: of the linear layers.
        convs: shapes of the convolutions.
        sparsities: shares of the weights that are absent.
        batch: samples, but for inference, which has one.
        parts: any of ``PARTS``.
        max_memory: GB that a dense linear model and its gradients may take; where they would take
            more, ours is timed without it.
        drop_in_widths, drop_in_sparsities: those of the drop-in chains, which belong to the linear part.
        precisions: which ours runs in; dense runs in all.
    """

    widths: tuple[int, ...] = WIDTHS
    convs: tuple[ConvShape, ...] = ()
    sparsities: tuple[float, ...] = SPARSITIES
    batch: int = 128
    parts: tuple[str, ...] = PARTS
    max_memory: float = 8.0
    drop_in_widths: tuple[int, ...] = DROP_IN_WIDTHS
    drop_in_sparsities: tuple[float, ...] = DROP_IN_SPARSITIES
    precisions: tuple[str, ...] = PRECISIONS

    @property
    def how(self) -> How:
        return How(self.batch, self.precisions, self.max_memory)


def conv_shapes() -> tuple[ConvShape, ...]:
    """The distinct 3x3 convolutions of VGG-16 and ResNet-56 on 32x32 images.

    >>> [str(shape) for shape in conv_shapes() if shape.chains]
    ['16x32x32', '32x16x16', '64x8x8', '128x4x4', '128x2x2']
    """
    shapes: dict[ConvShape, None] = {}  # an ordered set

    def look(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        assert isinstance(module, nn.Conv2d)
        sizes = (module.in_channels, module.out_channels, args[0].shape[-1], module.stride[0])
        shapes[ConvShape(*sizes)] = None

    with torch.device("meta"):
        for model in (models.vgg16(), models.resnet56()):
            for module in model.modules():
                if isinstance(module, nn.Conv2d) and module.kernel_size == (3, 3):
                    module.register_forward_pre_hook(look)
            model.eval()(torch.empty(1, 3, 32, 32))
    return tuple(shapes)


def cases(plan: Plan) -> list[Case]:
    """All measurements of a plan, in the order of the tables."""
    found: list[Case] = []
    if "linear" in plan.parts:
        drop_in = (plan.drop_in_widths, plan.drop_in_sparsities)
        found += _linear(plan, "linear chain", workloads.linear_chain)
        found += _linear(plan, "drop-in chain", workloads.drop_in_chain, *drop_in)
        found += _linear(plan, "linear layer", workloads.linear_layer)
    if "conv" in plan.parts:
        found += _conv(plan)
    if "inference" in plan.parts:
        found += _inference(plan)
    return found


def _linear(
    plan: Plan,
    kind: str,
    build: Callable[[int, float, How], Groups],
    widths: Sequence[int] | None = None,
    sparsities: Sequence[float] | None = None,
) -> Iterator[Case]:
    for width in plan.widths if widths is None else widths:
        for sparsity in plan.sparsities if sparsities is None else sparsities:
            groups = partial(build, width, sparsity, plan.how)
            modes = (TRAINING, FORWARD)
            yield Case(kind, str(width), sparsity, plan.batch, modes, groups)


def _conv(plan: Plan) -> Iterator[Case]:
    for shape in plan.convs:
        for sparsity in plan.sparsities:
            groups = partial(workloads.convolution, shape, sparsity, plan.how)
            modes = (TRAINING, FORWARD)
            yield Case(_kind(shape), str(shape), sparsity, plan.batch, modes, groups)


def _inference(plan: Plan) -> Iterator[Case]:
    for width in plan.widths:
        for sparsity in plan.sparsities:
            groups = partial(workloads.linear_inference, width, sparsity, plan.how)
            yield Case("linear chain", str(width), sparsity, 1, (INFERENCE,), groups)
    for shape in plan.convs:
        for sparsity in plan.sparsities:
            groups = partial(workloads.conv_inference, shape, sparsity, plan.how)
            yield Case(_kind(shape), str(shape), sparsity, 1, (INFERENCE,), groups)


def _kind(shape: ConvShape) -> str:
    return "conv chain" if shape.chains else "conv layer"


def overhead(rounds: int = 20) -> dict[str, float]:
    """Microseconds of one call where there is next to nothing to compute: 16 x 16 units, 8 samples.

    Returns:
        Those of ``rewire.ops.linear`` by itself (``"op"``: batch-last input, nothing to record), and
        of the forward pass, row-major and recorded for backward, of a ``SparseLinear``
        (``"layer"``) and an ``nn.Linear``.
    """
    sparse, dense = SparseLinear(16, 16, sparsity=0.75), nn.Linear(16, 16)
    assert sparse.bias is not None
    x = torch.randn(8, 16)
    arguments = (sparse.values.detach(), sparse.bias.detach(), sparse.topology)
    turned = layout.to_batch_last(x)
    timings = interleaved(
        {
            "op": lambda: ops.linear(turned, *arguments),
            "layer": lambda: sparse(x),
            "nn.Linear": lambda: dense(x),
        },
        rounds,
    )
    return {name: 1e6 * timing.median for name, timing in timings.items()}
