"""Benchmarks: sparse layers and training steps against dense PyTorch and others, and rewirings.

Everything is timed in one process, interleaved, so that ratios hold whatever else the machine does.
``rewire bench`` on the command line is the way in; :mod:`rewire.bench.layers`,
:mod:`rewire.bench.step` and :mod:`rewire.bench.rewiring` say what is measured.
"""

from rewire.bench.case import Case, Result
from rewire.bench.timing import Timing, interleaved, ratios

__all__ = ["Case", "Result", "Timing", "interleaved", "ratios"]
