"""Where the time of a training step goes: by kind, and by kernel.

Three kinds of steps take turns: as they are, for the time of each phase; with a timer around native
kernels, for their share of it; and with plans run one step at a time, for the time of each kernel. Which
share of the rest is in torch's own operators comes from ``torch.profiler``, in a few steps of their own.
What is left of the forward pass is *recording* (with the engine off: Python), of the backward pass
*autograd*.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from torch.profiler import ProfilerActivity, profile, record_function

from rewire.bench.step import WORKLOADS, converted, phases
from rewire.bench.timing import Function, no_collections
from rewire.engine.planned import _Pass
from rewire.precision import FLOAT32

FORWARD, BACKWARD = "forward", "backward"
STEPS = 30  # of each kind
_ENOUGH = 5  # where they take long
_PATIENCE = 20.0  # seconds that are long

Phases = Mapping[str, Function]
Numbers = dict[str, float]  # by phase


@dataclass(frozen=True)
class Kind:
    """What one kind of work takes of a step: milliseconds, and their share of it."""

    name: str
    milliseconds: float
    share: float


@dataclass(frozen=True)
class Kernel:
    """What one kernel takes of a step, in all its calls."""

    name: str
    phase: str
    milliseconds: float
    calls: float


@dataclass(frozen=True)
class Profile:
    """Where the time of a step goes with the engine on or off, in one precision.

    Attributes:
        engine: ``"on"`` or ``"off"``.
        precision: ``"float32"`` or ``"bfloat16"``.
        step_ms: the whole step.
        kinds: all of it by kind; shares sum to 1.
        kernels: the kernels that take most, slowest first.
    """

    engine: str
    precision: str
    step_ms: float
    kinds: list[Kind]
    kernels: list[Kernel]


def where_time_goes(
    name: str,
    sparsity: float,
    batch: int = 128,
    *,
    engines: Sequence[str] = ("on",),
    precisions: Sequence[str] = (FLOAT32,),
    steps: int = STEPS,
    top: int = 12,
) -> list[Profile]:
    """Profiles of a model's training step with the engine on, off or both, in each precision, in turns."""
    workload = WORKLOADS[name]
    data = workload.data(batch)
    runs = {
        (engine, precision): _Steps(phases(converted(workload, sparsity, engine), *data, precision))
        for engine in engines
        for precision in precisions
    }
    start = time.perf_counter()
    with no_collections():
        for done in range(steps):
            if done >= _ENOUGH and time.perf_counter() - start > _PATIENCE:
                break
            for run in runs.values():
                run.take()
    return [run.profile(*how, top) for how, run in runs.items()]


class _Clock:
    """Seconds and calls of native kernels, by phase and name."""

    def __init__(self) -> None:
        self.phase = ""
        self.seconds: dict[tuple[str, str], float] = defaultdict(float)
        self.calls: dict[tuple[str, str], int] = defaultdict(int)

    def time(self, name: str, kernel: Callable[..., Any], *args: Any) -> Any:
        start = time.perf_counter()
        try:
            return kernel(*args)
        finally:
            key = self.phase, name
            self.seconds[key] += time.perf_counter() - start
            self.calls[key] += 1


class _TimedPlan:
    """A native plan that is timed: as a whole, or step by step."""

    def __init__(self, plan: Any, clock: _Clock, one_by_one: bool) -> None:
        self.plan, self.clock, self.one_by_one = plan, clock, one_by_one

    def run(self, first: int, last: int, *args: Any) -> None:
        if not self.one_by_one:
            self.clock.time("plan", self.plan.run, first, last, *args)
            return
        steps = self.plan.steps
        for i in range(first, last):
            self.clock.time(steps[i].name, self.plan.run, i, i + 1, *args)


@contextmanager
def _timed(clock: _Clock, one_by_one: bool) -> Iterator[None]:
    """Time the runs of plans."""
    run = _Pass.run

    def timed_run(self: Any, *args: Any, **kwargs: Any) -> None:
        plan = self.plan
        self.plan = _TimedPlan(plan, clock, one_by_one)
        try:
            run(self, *args, **kwargs)
        finally:
            self.plan = plan

    with patch.object(_Pass, "run", timed_run):
        yield


class _Steps:
    """Steps of one model in all three ways, and what they took."""

    def __init__(self, parts: Phases) -> None:
        self.parts = parts
        self.phases: list[Numbers] = []  # seconds of each
        self.native: list[Numbers] = []  # shares of kernels in each
        self.kernels: list[_Clock] = []
        for _ in range(3):  # plans are made, memory is taken
            _seconds(parts)

    def take(self) -> None:
        """One step in each of the three ways, after one that is not timed."""
        _seconds(self.parts)
        self.phases.append(_seconds(self.parts))
        whole, each = _Clock(), _Clock()
        with _timed(whole, one_by_one=False):
            taken = _seconds(self.parts, whole)
        inside = _by_phase(whole, self.parts)
        self.native.append({phase: inside[phase] / taken[phase] for phase in self.parts})
        with _timed(each, one_by_one=True):
            _seconds(self.parts, each)
        self.kernels.append(each)

    def profile(self, engine: str, precision: str, top: int) -> Profile:
        taken, shares = _medians(self.phases), _medians(self.native)
        more = _torch_operators(self.parts)
        native, operators, left = {}, {}, {}
        for phase in (FORWARD, BACKWARD):
            native[phase] = shares[phase] * taken[phase]
            left[phase] = taken[phase] - native[phase]
            operators[phase] = more[phase] * left[phase]
            left[phase] -= operators[phase]
        total = sum(taken.values())
        kinds = {
            "kernels, forward": native[FORWARD],
            "kernels, backward": native[BACKWARD],
            "torch operators": sum(operators.values()),
            "recording" if engine == "on" else "Python, forward": left[FORWARD],
            "autograd": left[BACKWARD],
            "optimizer": taken["optimizer"],
            "zero_grad + loss": taken["zero_grad"] + taken["loss"],
        }
        return Profile(
            engine=engine,
            precision=precision,
            step_ms=1e3 * total,
            kinds=[Kind(kind, 1e3 * s, s / total) for kind, s in kinds.items()],
            kernels=_slowest(self.kernels)[:top],
        )


def _seconds(parts: Phases, clock: _Clock | None = None) -> Numbers:
    """Take a step; the seconds of each phase."""
    taken = {}
    for name, part in parts.items():
        if clock is not None:
            clock.phase = name
        start = time.perf_counter()
        part()
        taken[name] = time.perf_counter() - start
    return taken


def _medians(steps: Sequence[Numbers]) -> Numbers:
    return {name: statistics.median(step[name] for step in steps) for name in steps[0]}


def _slowest(clocks: Sequence[_Clock]) -> list[Kernel]:
    """All kernels, the slowest first."""
    found = []
    for phase, name in dict.fromkeys(key for clock in clocks for key in clock.seconds):
        seconds = statistics.median(clock.seconds[phase, name] for clock in clocks)
        calls = statistics.median(clock.calls[phase, name] for clock in clocks)
        found.append(Kernel(name, phase, 1e3 * seconds, calls))
    return sorted(found, key=lambda kernel: -kernel.milliseconds)


def _torch_operators(parts: Phases, steps: int = 5) -> Numbers:
    """What torch's own operators take of all that is no native kernel, by phase: a share of it."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler writes log lines otherwise
    clocks = [_Clock() for _ in range(steps)]
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        _seconds(parts)  # the first is slower
        for step, clock in enumerate(clocks):
            with _timed(clock, one_by_one=False):
                for name, part in parts.items():
                    clock.phase = name
                    with record_function(f"{name} {step}"):
                        part()
    inside: Numbers = defaultdict(float)  # microseconds in operators, by phase and step
    lasted: Numbers = {}
    for event in profiled.events() or ():
        outermost = event
        while outermost.cpu_parent is not None:
            outermost = outermost.cpu_parent
        if event is outermost:
            lasted[event.name] = event.cpu_time_total
        elif event.name.startswith("aten::"):
            inside[outermost.name] += event.self_cpu_time_total
    shares = []
    for step, clock in enumerate(clocks):
        native = _by_phase(clock, parts)
        outside = {name: lasted[f"{name} {step}"] - 1e6 * native[name] for name in parts}
        shares.append({name: min(1.0, inside[f"{name} {step}"] / outside[name]) for name in parts})
    return _medians(shares)


def _by_phase(clock: _Clock, parts: Phases) -> Numbers:
    """Seconds inside native kernels."""
    return {
        phase: sum(seconds for (its, _), seconds in clock.seconds.items() if its == phase)
        for phase in parts
    }
