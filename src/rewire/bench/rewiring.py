"""What a rewiring costs: guided stochastic exploration, and RigL with its dense gradient.

One linear layer of ten connections per unit trains three steps at a time. The second is an ordinary one.
The third ends with a rewiring, and the first meets connections that are new to it. What these two take
longer than two ordinary steps is the cost of the rewiring: the work in the backward pass, ``step()``, and
all that comes of it.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations

import torch
from torch import Tensor

from rewire import GSE, Connections, Rewirer, RigL, SparseLinear, sampling
from rewire.bench.timing import Tick, interleaved, no_collections
from rewire.ops import layout
from rewire.ops.reference import LINEAR
from rewire.ops.sampling import Stream
from rewire.sampling import DISTRIBUTIONS, DRAWS, Batch

WIDTHS = (1_000, 3_000, 10_000, 30_000, 100_000, 180_000, 320_000, 560_000, 1_000_000)
QUICK_WIDTHS = (1_000, 10_000, 100_000)
CONNECTIONS = 10  # per unit
EVERY = 1000  # steps between rewirings, for their share of the time
SPLIT = 100_000  # growth is fitted below and above this width
DENSE_LIMIT = 40_000  # the dense gradient of wider layers takes minutes
RIGL = "RigL"
STEP = "training step"
MILLION = 1_000_000  # draws
_ENOUGH = 3  # rounds
_UNTIL = 10**12  # so far off that the fraction stays what it is at the start


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes:
        widths: units on each side of the layer.
        batch: samples.
        dense_limit: the widest layer for RigL's dense gradient.
    """

    widths: tuple[int, ...] = WIDTHS
    batch: int = 128
    dense_limit: int = DENSE_LIMIT


@dataclass(frozen=True)
class Cost:
    """What one rewiring of a layer costs.

    Attributes:
        width: units on each side.
        connections: of the layer.
        batch: samples of a step.
        method: a distribution of GSE, or ``"RigL"``.
        rewiring_ms: milliseconds of one rewiring.
        step_ms: those of an ordinary training step.
        steps: the rewiring in training steps.
        share: of the training time that goes into rewirings, one every 1000 steps.
    """

    width: int
    connections: int
    batch: int
    method: str
    rewiring_ms: float
    step_ms: float
    steps: float
    share: float


# Timing -------------------------------------------------------------------------------------------


class Training:
    """A layer as inside a network: batch-last activations, both gradients, SGD with momentum."""

    def __init__(self, width: int, batch: int) -> None:
        generator = torch.Generator().manual_seed(0)
        connections = min(CONNECTIONS * width, width * width)
        self.layer = SparseLinear(width, width, connections=connections, generator=generator)
        self.optimizer = torch.optim.SGD(self.layer.parameters(), lr=0.01, momentum=0.9)
        self.x = _batch_last(width, batch, generator).requires_grad_()
        self.gradient = _batch_last(width, batch, generator)

    def step(self) -> None:
        """One training step."""
        self.optimizer.zero_grad()
        self.x.grad = None
        self.layer(self.x).backward(self.gradient)
        self.optimizer.step()

    def cost(self, rewirer: Rewirer) -> tuple[float, float]:
        """Seconds of one rewiring, and of one step."""
        after, plain, rewiring = (_seconds(self.step, rewirer.step) for _ in range(3))
        return after + rewiring - 2 * plain, plain


def _batch_last(width: int, batch: int, generator: torch.Generator) -> Tensor:
    """As another layer of the network would give it."""
    return layout.to_batch_last(torch.randn(batch, width, generator=generator))


def _seconds(*functions: Callable[[], object]) -> float:
    start = time.perf_counter()
    for function in functions:
        function()
    return time.perf_counter() - start


def measure(
    width: int, plan: Plan, rounds: int, *, patience: float = math.inf, tick: Tick | None = None
) -> list[Cost]:
    """The cost of a rewiring by each method at one width.

    Methods take turns, and which goes first changes from round to round; of the rounds the medians count.

    Args:
        width: units on each side.
        plan: what else to measure.
        rounds: samples of each.
        patience: seconds after which three rounds are enough.
        tick: told after each round which share is done.
    """
    training = Training(width, plan.batch)
    makers: dict[str, Callable[..., Rewirer]] = {
        name: partial(GSE, distribution=name) for name in DISTRIBUTIONS
    }
    if width <= plan.dense_limit:
        makers[RIGL] = RigL
    methods = {
        name: make(training.layer, training.optimizer, every=3, until=_UNTIL, fraction=0.2)
        for name, make in makers.items()
    }
    inner = max(1, min(10, 10_000 // width))
    samples: dict[str, list[float]] = {name: [] for name in methods}
    steps: list[float] = []
    names = list(methods)
    with no_collections():
        for rewirer in methods.values():
            training.cost(rewirer)  # not timed: memory and connections are new
        start = time.perf_counter()
        for turn in range(rounds):
            if turn >= _ENOUGH and time.perf_counter() - start > patience:
                break
            first = turn % len(names)
            for name in (*names[first:], *names[:first]):
                pairs = [training.cost(methods[name]) for _ in range(inner)]
                samples[name].append(statistics.mean(cost for cost, _ in pairs))
                steps.append(statistics.mean(step for _, step in pairs))
            if tick is not None:
                tick((turn + 1) / rounds)
    step = statistics.median(steps)
    size = (width, training.layer.values.numel(), plan.batch)
    return [_cost(*size, name, statistics.median(samples[name]), step) for name in names]


def _cost(
    width: int, connections: int, batch: int, method: str, rewiring: float, step: float
) -> Cost:
    return Cost(
        *(width, connections, batch, method),
        rewiring_ms=1e3 * rewiring,
        step_ms=1e3 * step,
        steps=rewiring / step,
        share=rewiring / (EVERY * step + rewiring),
    )


def draws(width: int, plan: Plan, rounds: int) -> dict[str, float]:
    """Milliseconds of a million draws of S by each distribution, its alias tables included.

    Unit statistics are taken beforehand. Empty where a million is all there is.
    """
    if width * width <= 2 * MILLION:
        return {}
    generator = torch.Generator().manual_seed(0)
    active = Connections.random(width, width, CONNECTIONS * width, generator)
    x, dy = (_batch_last(width, plan.batch, generator) for _ in range(2))
    batch = Batch(LINEAR, x, dy)
    stream = Stream(seed=0, purpose=DRAWS, step=0, layer=0)
    factor = MILLION / len(active)

    def function(name: str) -> Callable[[], object]:
        weights = DISTRIBUTIONS[name](batch, stream)
        return lambda: sampling.draw(active, factor, stream, weights)

    timings = interleaved({name: function(name) for name in DISTRIBUTIONS}, rounds)
    return {name: 1e3 * timing.median for name, timing in timings.items()}


# Growth -------------------------------------------------------------------------------------------


def exponent(points: Sequence[tuple[float, float]]) -> float:
    """The slope in logarithms, 1 for what grows linearly: the median over all pairs of points, so that one
    point that something else has disturbed does not decide it.

    >>> round(exponent([(10, 3.0), (100, 30.0), (200, 9000.0), (1000, 300.0), (2000, 600.0)]), 6)
    1.0
    """
    logs = sorted((math.log(x), math.log(y)) for x, y in points)
    return statistics.median((d - b) / (c - a) for (a, b), (c, d) in combinations(logs, 2))


@dataclass(frozen=True)
class Growth:
    """How time grows from one width to another: with their quotient to the power ``exponent``."""

    what: str
    first: int
    last: int
    exponent: float


def growth(costs: Sequence[Cost]) -> list[Growth]:
    """Of every method and of the training step, up to 100,000 units and from there on."""
    return [
        Growth(what, int(part[0][0]), int(part[-1][0]), exponent(part))
        for what, points in curves(costs).items()
        for part in _parts(points)
        if len(part) > 1 and all(y > 0 for _, y in part)
    ]


def curves(costs: Sequence[Cost]) -> dict[str, list[tuple[float, float]]]:
    """Width and milliseconds, of every method and of the training step."""
    found: dict[str, dict[float, float]] = {STEP: {}} if costs else {}
    for cost in costs:
        found.setdefault(cost.method, {})[cost.width] = cost.rewiring_ms
        found[STEP][cost.width] = cost.step_ms
    return {what: sorted(points.items()) for what, points in found.items()}


def _parts(points: list[tuple[float, float]]) -> Iterator[list[tuple[float, float]]]:
    yield [point for point in points if point[0] <= SPLIT]
    yield [point for point in points if point[0] >= SPLIT]
