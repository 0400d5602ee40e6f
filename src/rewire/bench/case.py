"""One measurement of the benchmark: what is built, how it is timed, and the numbers it gives."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from rewire.bench.timing import Function, Tick, Timing, interleaved
from rewire.precision import FLOAT32

OURS, DENSE, CSR = "ours", "dense", "torch.sparse CSR"
OFF = "engine off"  # ours, layer by layer, where it is timed beside the engine
LIMIT = "limit"  # what ours cannot be faster than; its variants are parts of it
FORWARD, TRAINING, INFERENCE, STEP = "forward", "forward+backward", "inference", "training step"
CHANNELS_LAST = " channels-last"  # what follows the precision of a dense variant

Key = tuple[str, str]  # who, and which of its variants; only the fastest of them counts
Functions = dict[Key, Function]
Groups = Iterator[tuple[str, Functions]]  # for each mode, what to time side by side


class _Failed(Exception):
    """A peer raised an error."""

    def __init__(self, key: Key) -> None:
        super().__init__(key)
        self.key = key


def _guarded(key: Key, function: Function) -> Function:
    def run() -> None:
        try:
            function()
        except Exception as error:
            raise _Failed(key) from error

    return run


def _timed(functions: Functions, rounds: int, patience: float, tick: Tick) -> dict[Key, Timing]:
    """Time them side by side; a peer that raises an error is left out, and named in a warning."""
    mine = (OURS, OFF, DENSE, CSR, LIMIT)
    left = {key: f if key[0] in mine else _guarded(key, f) for key, f in functions.items()}
    while True:
        try:
            return interleaved(left, rounds, patience=patience, tick=tick)
        except _Failed as failed:
            del left[failed.key]
            cause = repr(failed.__cause__)
            warnings.warn(f"{failed.key[0]} is left out here, it failed: {cause}", stacklevel=2)


def least(milliseconds: Mapping[str, float]) -> float | None:
    """What ours takes at least, by its limits: connections and activations at the same time, and autograd.

    >>> least({"connections": 3.0, "activations": 1.0, "autograd": 0.5})
    3.5
    """
    if not milliseconds:
        return None
    return max(milliseconds["connections"], milliseconds["activations"]) + milliseconds["autograd"]


@dataclass(frozen=True)
class Result:
    """Milliseconds of one call, ours and the others'.

    Attributes:
        kind: what was measured: ``"linear chain"``, ``"drop-in chain"``, ``"linear layer"``,
            ``"conv chain"``, ``"conv layer"``, ``"model"``.
        shape: its size, or its name.
        sparsity: share of the weights that is absent in ours.
        batch: number of samples.
        mode: ``"forward"``, ``"forward+backward"``, ``"inference"`` or ``"training step"``.
        ours_ms: our time, in the precision that we are fastest in.
        dense_ms: dense PyTorch's in the precision and memory format that it is fastest in; None if it was
            too large to run.
        best_dense: which variant that was, such as ``"bfloat16 channels-last"``.
        csr_ms: torch.sparse's, where it was timed.
        peers: the times of other libraries that are installed.
        ratio: how many times faster than dense.
        limits: milliseconds of what ours cannot do without; see :mod:`rewire.bench.limits`.
        least_ms: what ours takes at least, by these.
        engine: how ours ran: ``"on"`` or ``"off"`` for training steps of models, else None.
        off_ms: our time with the engine off, where both were timed.
        off_ratio: how many times faster than dense that is.
        float32_ms: dense PyTorch's in float32 in its faster memory format.
        ratio_float32: how many times faster than that.
        best_ours: the precision that we are fastest in.
        ours_by, off_by: our times by precision, with the engine off where both were timed.
        dense_by: dense PyTorch's by variant.
    """

    kind: str
    shape: str
    sparsity: float
    batch: int
    mode: str
    ours_ms: float
    dense_ms: float | None = None
    best_dense: str | None = None
    csr_ms: float | None = None
    peers: dict[str, float] = field(default_factory=dict)
    ratio: float | None = None
    limits: dict[str, float] = field(default_factory=dict)
    least_ms: float | None = None
    engine: str | None = None
    off_ms: float | None = None
    off_ratio: float | None = None
    float32_ms: float | None = None
    ratio_float32: float | None = None
    best_ours: str = FLOAT32
    ours_by: dict[str, float] = field(default_factory=dict)
    off_by: dict[str, float] = field(default_factory=dict)
    dense_by: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """One thing to measure.

    Attributes:
        kind, shape, sparsity, batch: as in :class:`Result`.
        modes: how it is run.
        groups: builds what is timed, one mode after the other, and yields it; nothing is built, and
            no memory taken, before the case runs.
        engine: as in :class:`Result`.
    """

    kind: str
    shape: str
    sparsity: float
    batch: int
    modes: tuple[str, ...]
    groups: Callable[[], Groups]
    engine: str | None = None

    @property
    def label(self) -> str:
        """One line for the screen."""
        return f"{self.kind} {self.shape}, {100 * self.sparsity:g} % sparse, batch {self.batch}"

    def run(
        self, rounds: int, *, patience: float = math.inf, tick: Tick | None = None
    ) -> list[Result]:
        """Build, time and compare; one result for each mode. See :func:`interleaved`."""
        results = []
        for index, (mode, functions) in enumerate(self.groups()):

            def part(share: float, done: int = index) -> None:
                if tick is not None:
                    tick((done + share) / len(self.modes))

            timings = _timed(functions, rounds, patience, part)
            results.append(self._result(mode, timings))
        assert tuple(result.mode for result in results) == self.modes
        return results

    def _result(self, mode: str, timings: Mapping[Key, Timing]) -> Result:
        taken: dict[str, dict[str, float]] = {}
        for (who, variant), timing in timings.items():
            taken.setdefault(who, {})[variant] = 1e3 * timing.median
        all_ours, all_dense = taken.pop(OURS), taken.pop(DENSE, {})
        all_off, limits = taken.pop(OFF, {}), taken.pop(LIMIT, {})
        ours, dense, off = (_fastest(times) for times in (all_ours, all_dense, all_off))
        assert ours is not None
        single = _fastest({v: t for v, t in all_dense.items() if v.startswith(FLOAT32)})
        return Result(
            *(self.kind, self.shape, self.sparsity, self.batch, mode),
            ours_ms=ours,
            dense_ms=dense,
            best_dense=min(all_dense, key=all_dense.__getitem__, default=None),
            csr_ms=_fastest(taken.pop(CSR, {})),
            peers={who: min(times.values()) for who, times in taken.items()},
            ratio=None if dense is None else dense / ours,
            limits=limits,
            least_ms=least(limits),
            engine=self.engine,
            off_ms=off,
            off_ratio=None if dense is None or off is None else dense / off,
            float32_ms=single,
            ratio_float32=None if single is None else single / ours,
            best_ours=min(all_ours, key=all_ours.__getitem__),
            ours_by=all_ours,
            off_by=all_off,
            dense_by=all_dense,
        )


def _fastest(milliseconds: Mapping[str, float]) -> float | None:
    return min(milliseconds.values(), default=None)
