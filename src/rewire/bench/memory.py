"""The memory of a training step: how far the resident memory of a fresh process grows in its first steps.

That is activations, gradients, the optimizer's state and what is kept for the next results; the model and
its data are there before.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import torch

from rewire.bench.step import WORKLOADS, Plan, converted, dense_step, training_step
from rewire.precision import PRECISIONS

_STEPS = 3  # in the first, the optimizer makes its state
_STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class Memory:
    """Megabytes (10^6 bytes) that a training step takes.

    Attributes:
        model: a name of ``WORKLOADS``.
        sparsity: share of the weights that is absent; 0 for the dense model.
        batch: images in a batch.
        engine: ``"on"``, ``"off"``, or None for the dense model.
        precision: ``"float32"`` or ``"bfloat16"``.
        step_mb: the highest resident memory of the process above that before the first step.
        peak_mb: the highest resident memory: with the interpreter, torch, the model and its data.
    """

    model: str
    sparsity: float
    batch: int
    engine: str | None
    precision: str
    step_mb: float
    peak_mb: float


def measure(
    plan: Plan,
    variants: Mapping[str, Sequence[str]] | None = None,
    tick: Callable[[str], None] | None = None,
) -> list[Memory]:
    """The memory of each dense model of a plan, and of the sparse ones, each in a process of its own.

    Args:
        plan: what is measured.
        variants: precisions and memory formats of each dense model; by default contiguous in both.
        tick: called with what is measured next.
    """
    found = []
    for name in plan.models:
        dense = (variants or {}).get(name, PRECISIONS)
        ways: list[tuple[float, str | None, str]] = [(0.0, None, variant) for variant in dense]
        ways += [(s, e, p) for s in plan.sparsities for e in plan.engines for p in plan.precisions]
        for sparsity, engine, variant in ways:
            how = "dense" if engine is None else f"{100 * sparsity:g} % sparse, engine {engine}"
            how += f", {variant}"
            if tick is not None:
                tick(f"memory of {name}, {how}")
            arguments = name, sparsity, plan.batch, engine, variant
            # A process that has trained before has memory to use again.
            with ProcessPoolExecutor(1, get_context("spawn")) as process:
                future = process.submit(_measured, *arguments, torch.get_num_threads())
                try:
                    found.append(future.result())
                except BrokenProcessPool as error:
                    raise RuntimeError(
                        f"the process that measured the memory of {name} ({how}) at batch {plan.batch} was "
                        "killed, probably because there is not enough memory; try a smaller batch"
                    ) from error
    return found


def _measured(
    name: str,
    sparsity: float,
    batch: int,
    engine: str | None,
    variant: str,
    threads: int,
) -> Memory:
    torch.set_num_threads(threads)
    workload = WORKLOADS[name]
    x, y = workload.data(batch)
    if engine is None:
        step = dense_step(workload.build(), x, y, variant)
    else:
        step = training_step(converted(workload, sparsity, engine), x, y, variant)
    gc.collect()
    before = _forget_peak()
    for _ in range(_STEPS):
        step()
    peak = _peak()
    precision = variant.split()[0]
    return Memory(name, sparsity, batch, engine, precision, 1e-6 * (peak - before), 1e-6 * peak)


def _status(key: str) -> int | None:
    """A line of the process's status on Linux, in bytes. ``ru_maxrss`` will not do there: a new process
    begins with that of the process that started it."""
    if not _STATUS.exists():
        return None
    lines = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines() if ":" in line)
    return 1024 * int(lines[key].split()[0])


def _peak() -> int:
    """The highest resident memory of this process so far, in bytes."""
    if (peak := _status("VmHWM")) is not None:
        return peak
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def _forget_peak() -> int:
    """The resident memory of this process, in bytes; where the system lets it, the highest is that from now
    on. Elsewhere it is the highest so far."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return _peak()
    resident = _status("VmRSS")
    assert resident is not None
    return resident
