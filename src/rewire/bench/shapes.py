"""How the time per sample depends on the batch and on the size of images: looking for cliffs.

A layer or a small model runs at neighbouring batches, or sizes, all in turns. Where the time of one
sample (for sizes: of one pixel) differs by more than ``LIMIT`` between neighbours there is a *jump*: a
rise, or a fall. A call takes some time however little there is to compute; where this alone explains a
fall, because the larger call takes no less time than the smaller one, that is said.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import rewire
from rewire.bench.timing import Function, Tick, interleaved

LIMIT = 1.3  # times as much as its neighbour is a jump
BATCHES = (
    *(1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 31, 32, 33, 40, 48, 56, 63, 64, 65),
    *(
        72,
        80,
        96,
        112,
        127,
        128,
        129,
        144,
        160,
        191,
        192,
        193,
        224,
        255,
        256,
        257,
        320,
        384,
        448,
        511,
        512,
    ),
)
SIZES = (
    4,
    5,
    6,
    7,
    8,
    10,
    12,
    14,
    16,
    20,
    24,
    28,
    32,
    40,
    48,
    56,
    64,
    80,
    96,
    112,
    128,
    160,
    192,
    224,
)
QUICK_BATCHES, QUICK_SIZES = (1, 8, 31, 32, 33, 64, 128), (4, 8, 16, 32)
TRAINING, FORWARD = "forward+backward", "forward"
RISE = "rises: more work in a call takes more time for each part of it"
FALL = "falls: the smaller call before takes more time than the larger one"
SPREAD = "falls that are the fixed time of a call, spread over more work"
KINDS = (RISE, FALL, SPREAD)
MOST = 64 * 64 * 64  # pixels of all images of a batch, where nobody asks for more
_CHANNELS, _UNITS = 64, 512


def linear() -> nn.Module:
    """One layer of 512 units."""
    return nn.Sequential(nn.Linear(_UNITS, _UNITS))


def conv() -> nn.Module:
    """One 3 x 3 convolution of 64 channels."""
    return nn.Sequential(nn.Conv2d(_CHANNELS, _CHANNELS, 3, padding=1))


def convnet() -> nn.Module:
    """Three convolutions with batch norm and ReLU, one of them with stride 2, and a classifier."""
    parts: list[nn.Module] = []
    for n_in, n_out, stride in ((3, 32, 1), (32, 64, 2), (64, 64, 1)):
        conv = nn.Conv2d(n_in, n_out, 3, stride, 1, bias=False)
        parts += [conv, nn.BatchNorm2d(n_out), nn.ReLU()]
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


MODELS: dict[str, Callable[[], nn.Module]] = {"linear": linear, "conv": conv, "convnet": convnet}


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes:
        models: names of ``MODELS``.
        batches: to go through, with images of ``size`` x ``size``.
        sizes: of images to go through, at each of ``at``.
        at: batches at which sizes are gone through.
        most: pixels that a batch may have there; larger sizes are left out.
        size: of images where batches are gone through.
        sparsity: share of the weights that is absent.
        mode: ``"forward+backward"``, or ``"forward"`` without gradients.
    """

    models: tuple[str, ...] = tuple(MODELS)
    batches: tuple[int, ...] = BATCHES
    sizes: tuple[int, ...] = SIZES
    at: tuple[int, ...] = (4, 64)
    most: float = MOST
    size: int = 16
    sparsity: float = 0.95
    mode: str = TRAINING


@dataclass(frozen=True)
class Point:
    """One shape: microseconds of a sample (for sizes: nanoseconds of a pixel), ours and dense.

    Attributes:
        model: name of ``MODELS``.
        varied: ``"batch"`` or ``"size"``.
        batch, size: the shape; size is 0 for linear layers.
        ours, dense: time per sample, or per pixel.
        ratio: how many times faster ours is.
        more: how many times as many samples, or pixels, as the neighbour before; 1 for the first.
        jump: ours by ours of the neighbour before.
        dense_jump: the same for dense.
    """

    model: str
    varied: str
    batch: int
    size: int
    ours: float
    dense: float
    ratio: float
    more: float
    jump: float
    dense_jump: float

    @property
    def kind(self) -> str:
        """What kind of jump this is from its neighbour before: one of ``KINDS``, or empty if it is none."""
        if self.jump > LIMIT:
            return RISE
        if self.jump * LIMIT >= 1:
            return ""
        return FALL if self.jump * self.more < 1 else SPREAD


@dataclass(frozen=True)
class Sweep:
    """A model and the shapes, neighbours one after the other, that it goes through."""

    model: str
    varied: str
    shapes: tuple[tuple[int, int], ...]  # batch, size

    @property
    def label(self) -> str:
        """One line for the screen."""
        batch, size = self.shapes[0]
        if self.varied == "size":
            return f"{self.model}, images of several sizes, batch {batch}"
        images = f", images {size} x {size}" if size else ""
        return f"{self.model}, several batches{images}"


def sweeps(plan: Plan) -> list[Sweep]:
    """All sweeps of a plan; linear layers have no images."""
    found = []
    for model in plan.models:
        size = 0 if model == "linear" else plan.size
        if plan.batches:
            found.append(Sweep(model, "batch", tuple((batch, size) for batch in plan.batches)))
        if size and plan.sizes:
            for batch in plan.at:
                shapes = tuple((batch, s) for s in plan.sizes if batch * s * s <= plan.most)
                found += [Sweep(model, "size", shapes)] if shapes else []
    return found


def measure(
    sweep: Sweep, plan: Plan, rounds: int, *, patience: float = math.inf, tick: Tick | None = None
) -> list[Point]:
    """Time a sweep: all shapes in turns, ours and dense."""
    torch.manual_seed(0)
    build = MODELS[sweep.model]
    ours = rewire.sparsify(build(), sparsity=plan.sparsity, assignment="uniform")
    functions: dict[tuple[str, int, int], Function] = {}
    for who, model in (("ours", ours), ("dense", build())):
        for batch, size in sweep.shapes:
            functions[who, batch, size] = _function(
                model, _input(sweep.model, batch, size), plan.mode
            )
    timings = interleaved(functions, rounds, patience=patience, tick=tick)

    def per(who: str) -> list[float]:
        return [
            1e9 * timings[who, batch, size].median / (batch * size * size)
            if sweep.varied == "size"
            else 1e6 * timings[who, batch, size].median / batch
            for batch, size in sweep.shapes
        ]

    return list(_points(sweep, per("ours"), per("dense")))


def _points(sweep: Sweep, ours: Sequence[float], dense: Sequence[float]) -> Iterator[Point]:
    for index, (batch, size) in enumerate(sweep.shapes):
        before = max(0, index - 1)
        mine, theirs = ours[index], dense[index]
        jumps = (mine / ours[before], theirs / dense[before])
        (few, small), pixels = sweep.shapes[before], sweep.varied == "size"
        more = (size / small) ** 2 if pixels else batch / few
        yield Point(
            sweep.model, sweep.varied, batch, size, mine, theirs, theirs / mine, more, *jumps
        )


def _input(model: str, batch: int, size: int) -> Tensor:
    if not size:
        return torch.randn(batch, _UNITS)
    return torch.randn(batch, 3 if model == "convnet" else _CHANNELS, size, size)


def _function(model: nn.Module, x: Tensor, mode: str) -> Function:
    """A call of the model, with gradients of its input and parameters or without."""
    if mode == FORWARD:

        def forward() -> None:
            with torch.no_grad():
                model(x)

        return forward
    x.requires_grad_()
    leaves = [x, *model.parameters()]

    def training() -> None:
        for leaf in leaves:
            leaf.grad = None
        y = model(x)
        y.backward(torch.ones_like(y))

    return training
