"""Measuring a public model: time of a training step, correctness, and what the engine made of it."""

from __future__ import annotations

import copy
import math
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import rewire
from rewire.bench.timing import Function, Tick, interleaved
from rewire.bench.zoo import libraries, twins
from rewire.bench.zoo.own import OWN
from rewire.bench.zoo.public import IMAGES, Public
from rewire.bench.zoo.step import COMPILED, OURS, converted, dense_steps, training_step
from rewire.engine.places import Place
from rewire.precision import BFLOAT16, FLOAT32, PRECISIONS, autocast

TOKENS = 128  # of a sequence
_EXACT = 1e-8  # the largest difference in float64 that is rounding
_AS_DENSE = (
    10.0  # in lower precision ours may differ from float64 by so many times as much as dense does,
)
_FLIPS = 0.05  # or by this: where rounding changes the sign of what a ReLU reads, gradients jump


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes:
        models: by what they are called.
        sparsities: shares of the weights that are absent.
        batch: images; a batch of anything else is a quarter of it.
        size: height and width of images.
        own: use our own definitions though the libraries are installed.
        compiled: time dense steps under torch.compile, too.
        fused: let AdamW use its fused kernel, dense and sparse.
        check: compare outputs and gradients with the densified twin.
        precisions: which ours runs in; dense runs in all.
    """

    models: tuple[Public, ...]
    sparsities: tuple[float, ...] = (0.95,)
    batch: int = 64
    size: int = 64
    own: bool = False
    compiled: bool = False
    fused: bool = False
    check: bool = True
    precisions: tuple[str, ...] = PRECISIONS


@dataclass(frozen=True)
class Check:
    """How much outputs, gradients and statistics of a training pass differ at most, relative to their size.

    Attributes:
        float64: ours from the densified twin, both in float64.
        float32: ours in float32, as it is timed, from the twin in float64.
        dense_float32: the twin in float32 from itself in float64: what rounding does to this model.
        worst: what differs most in float64.
        bfloat16, dense_bfloat16: the same as in float32 under bfloat16 autocast, if ours is timed so.
    """

    float64: float
    float32: float
    dense_float32: float
    worst: str
    bfloat16: float | None = None
    dense_bfloat16: float | None = None

    @property
    def equal(self) -> bool:
        """Whether ours is its twin but for rounding."""
        pairs = [(self.float32, self.dense_float32)]
        if self.bfloat16 is not None and self.dense_bfloat16 is not None:
            pairs.append((self.bfloat16, self.dense_bfloat16))
        rounded = all(ours <= max(_AS_DENSE * dense, _FLIPS) for ours, dense in pairs)
        return self.float64 <= _EXACT and rounded


@dataclass(frozen=True)
class Reason:
    """A reason why the engine stopped, how often, and where: ``file:line in module``."""

    reason: str
    count: int
    places: tuple[str, ...]


@dataclass(frozen=True)
class Measured:
    """One model at one sparsity.

    Attributes:
        model, sparsity, batch: what was measured.
        source: the library, or ``"own definition"``.
        error: why there is nothing else; empty if all is well.
        ours_ms: milliseconds of a sparse step, in the precision that it is fastest in.
        ours_by, best_ours: of sparse steps by precision, and which of these is the fastest.
        dense_ms: of dense steps, by precision and memory format.
        float32, best: which of these is the fastest in float32, and of all.
        ratio_float32, ratio_best: how many times faster ours is than these.
        check: of outputs and gradients, if it was asked for.
        layers, recorded: sparse layers, and how many of them the engine recorded.
        regions: how many regions the engine ran.
        stops: why it stopped before the end of the model.
        alone: why layers were not recorded.
        stays_dense: what the conversion said about layers that stay dense.
        left_out: compiled dense steps that failed, and why.
    """

    model: str
    sparsity: float
    batch: int
    source: str
    error: str = ""
    ours_ms: float = math.nan
    ours_by: dict[str, float] = field(default_factory=dict)
    best_ours: str = ""
    dense_ms: dict[str, float] = field(default_factory=dict)
    float32: str = ""
    best: str = ""
    ratio_float32: float = math.nan
    ratio_best: float = math.nan
    check: Check | None = None
    layers: int = 0
    recorded: int = 0
    regions: int = 0
    stops: tuple[Reason, ...] = ()
    alone: tuple[Reason, ...] = ()
    stays_dense: str = ""
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        """Whether the model did not run, or its numbers are wrong."""
        return bool(self.error) or (self.check is not None and not self.check.equal)


def source(model: Public, own: bool) -> str:
    """Where a model comes from; raises ``MissingLibrary`` if neither its library nor we have it."""
    problem = libraries.problem(model.library)
    if model.name in OWN and (own or problem is not None):
        return "own definition"
    if problem is not None:
        raise libraries.MissingLibrary(f"{model.name} is a model of {model.library}: {problem}")
    return model.library


def measure(
    model: Public, sparsity: float, plan: Plan, rounds: int, *, patience: float, tick: Tick
) -> Measured:
    """Build, check, explain and time one model; an error of the model is in the answer."""
    batch = plan.batch if model.data == IMAGES else max(1, plan.batch // 4)
    known: dict[str, Any] = {"model": model.name, "sparsity": sparsity, "batch": batch}
    known["source"] = source(model, plan.own)
    try:
        torch.manual_seed(0)
        own = known["source"] != model.library
        dense = OWN[model.name](plan.size) if own else libraries.build(model, plan.size)
        dense.train()
        x = libraries.inputs(model, batch, plan.size, TOKENS)
        ours, known["stays_dense"] = converted(copy.deepcopy(dense), sparsity)
        if plan.check:
            known["check"] = check(ours, x, plan.precisions)
        known.update(_explained(ours, x, plan.precisions[-1]))
        steps: dict[str, Function] = {
            OURS + precision: training_step(copy.deepcopy(ours), x, precision, fused=plan.fused)
            for precision in plan.precisions
        }
        steps |= dense_steps(dense, x, model.data, compiled=plan.compiled, fused=plan.fused)
        known["left_out"] = _leave_out_failing(steps)
        timings = interleaved(steps, rounds, patience=patience, tick=tick)
    except Exception as error:  # whatever a model of others raises: the next ones are measured
        message = textwrap.shorten(str(error), 300)
        return Measured(**known, error=f"{type(error).__name__}: {message}")
    return Measured(**known, **_compared({k: 1e3 * t.median for k, t in timings.items()}))


def _leave_out_failing(steps: dict[str, Function]) -> dict[str, str]:
    """Remove the compiled steps that fail, for want of a compiler for example."""
    errors = {}
    for name in [name for name in steps if name.endswith(COMPILED)]:
        try:
            steps[name]()
        except Exception as error:  # torch.compile raises anything
            del steps[name]
            errors[name] = f"{type(error).__name__}: {textwrap.shorten(str(error), 200)}"
    return errors


def _compared(milliseconds: dict[str, float]) -> dict[str, Any]:
    by = {k.removeprefix(OURS): v for k, v in milliseconds.items() if k.startswith(OURS)}
    dense = {k: v for k, v in milliseconds.items() if not k.startswith(OURS)}
    best = min(dense, key=lambda name: dense[name])
    single = min((n for n in dense if n.startswith(FLOAT32)), key=lambda name: dense[name])
    fastest = min(by, key=lambda name: by[name])
    ours = by[fastest]
    return {
        **{"ours_ms": ours, "ours_by": by, "best_ours": fastest},
        **{"dense_ms": dense, "float32": single, "best": best},
        **{"ratio_float32": dense[single] / ours, "ratio_best": dense[best] / ours},
    }


def check(model: nn.Module, x: Any, precisions: Iterable[str] = (FLOAT32,)) -> Check:
    """Compare a sparse model in training mode with its densified twin; neither is changed.

    In float64 and float32, and under bfloat16 autocast if that is among ``precisions``.
    """
    ours = twins.without_randomness(copy.deepcopy(model)).train()
    active = twins.connections(ours)
    twin = twins.twin_of(ours)
    double, double_x = copy.deepcopy(ours).double(), _double(x)
    right = twins.answer(copy.deepcopy(twin).double(), double_x)
    exact = twins.difference(twins.answer(double, double_x), right, active)
    del double
    rounded: list[float] = []
    for precision in (FLOAT32, *(p for p in precisions if p == BFLOAT16)):
        for one in (ours, twin):
            answer = twins.answer(copy.deepcopy(one), x, precision)
            rounded.append(twins.difference(answer, right, active).largest)
    single, half = rounded[:2], rounded[2:] or (None, None)
    return Check(exact.largest, single[0], single[1], exact.worst, *half)


def _double(x: Any) -> Any:
    if isinstance(x, Mapping):
        return {name: _double(part) for name, part in x.items()}
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


def _explained(model: nn.Module, x: Any, precision: str) -> dict[str, Any]:
    with autocast(precision):
        found = rewire.explain(model, x)
    return {
        **{"layers": len(found.layers), "recorded": found.recorded, "regions": len(found.regions)},
        "stops": _reasons((stop.reason, stop.place) for stop in found.stops),
        "alone": _reasons((layer.reason, layer.place) for layer in found.layers if layer.reason),
    }


def _reasons(found: Iterable[tuple[str, Place]]) -> tuple[Reason, ...]:
    """Each reason once, the most frequent first."""
    places: dict[str, list[str]] = {}
    for reason, place in found:
        where = f"in {place.module or 'the model itself'}"
        where = f"{place.location} {where}" if place.location else where
        places.setdefault(reason, []).append(where)
    reasons = [Reason(why, len(at), tuple(dict.fromkeys(at))) for why, at in places.items()]
    return tuple(sorted(reasons, key=lambda reason: -reason.count))
