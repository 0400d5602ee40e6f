"""Timing several functions side by side.

A machine's speed drifts (heat, neighbours, memory), so functions are not timed one after the other
but in rounds: every round calls each of them, and each is then judged by its median over the rounds.
"""

from __future__ import annotations

import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch

Function = Callable[[], object]
Tick = Callable[[float], None]  # called with the share that is done, from 0 to 1
K = TypeVar("K", bound=Hashable)

SAMPLE = 2e-3  # seconds that one sample should last at least
_WARM_UP = 0.02  # seconds of calls before anything is timed, at least one
_MOST = 100_000  # calls in one sample
_ENOUGH = 5  # rounds


@dataclass(frozen=True)
class Timing:
    """How long one call takes.

    Attributes:
        samples: seconds of one call, one sample for every round.
        inner: how many calls a sample is the mean of.
    """

    samples: tuple[float, ...]
    inner: int

    @property
    def median(self) -> float:
        """Seconds of one call."""
        return statistics.median(self.samples)


def interleaved(
    functions: Mapping[K, Function],
    rounds: int,
    *,
    sample: float = SAMPLE,
    patience: float = math.inf,
    tick: Tick | None = None,
) -> dict[K, Timing]:
    """Time functions in turns.

    A function that is faster than ``sample`` is called several times for each sample. Their order
    changes from round to round, and each makes a call that is not timed before each sample: it
    should not pay for the caches, or the threads still spinning, that another has left. A layer runs
    after its like, and a training step after another. Python's garbage collector is off meanwhile.

    Args:
        functions: what to call, by name.
        rounds: number of samples of each.
        sample: seconds that a sample should last at least.
        patience: seconds after which five rounds are enough.
        tick: told after each round which share is done.

    Example:
        >>> timings = interleaved({"sum": lambda: sum(range(9)), "max": lambda: max(range(9))}, 3)
        >>> len(timings["sum"].samples)
        3
    """
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")
    names = list(functions)
    samples: dict[K, list[float]] = {name: [] for name in names}
    with no_collections():
        inner = {name: _inner(function, sample) for name, function in functions.items()}
        start = time.perf_counter()
        for turn in range(rounds):
            if turn >= _ENOUGH and time.perf_counter() - start > patience:
                break
            for name in random.Random(turn).sample(names, len(names)):
                function, calls = functions[name], inner[name]
                function()
                samples[name].append(_seconds(function, calls))
            if tick is not None:
                tick((turn + 1) / rounds)
    return {name: Timing(tuple(samples[name]), inner[name]) for name in names}


def ratios(timings: Mapping[K, Timing], baseline: K) -> dict[K, float]:
    """How many times longer each takes than ``baseline``.

    >>> ratios({"a": Timing((1.0,), 1), "b": Timing((4.0,), 1)}, "a")
    {'a': 1.0, 'b': 4.0}
    """
    if baseline not in timings:
        raise ValueError(f"there is no timing {baseline!r}; there are {list(timings)}")
    unit = timings[baseline].median
    return {name: timing.median / unit for name, timing in timings.items()}


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Let torch and the kernels use ``count`` threads, or as many as they do if None."""
    before = torch.get_num_threads()
    try:
        if count is not None:
            torch.set_num_threads(count)
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def no_collections() -> Iterator[None]:
    """Without Python's garbage collector."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _seconds(function: Function, calls: int) -> float:
    """Mean over ``calls`` calls."""
    start = time.perf_counter()
    for _ in range(calls):
        function()
    return (time.perf_counter() - start) / calls


def _inner(function: Function, sample: float) -> int:
    """How many calls fill a sample; warms the function up on the way."""
    start = time.perf_counter()
    function()
    while time.perf_counter() - start < _WARM_UP:
        function()
    calls = 1
    while calls < _MOST:
        took = _seconds(function, calls) * calls
        if took >= sample / 2:
            return min(_MOST, max(1, math.ceil(calls * sample / took)))
        calls *= 4
    return _MOST
