"""The one door to the kernels: torch operators over connections, with their reference twins."""

from rewire.ops.eager import conv2d, gradient_at, linear
from rewire.ops.native import (
    PerformanceWarning,
    available,
    empty_cache,
    instruction_set,
    instruction_sets,
    use_instruction_set,
)
from rewire.ops.reference import Convolution
from rewire.ops.topology import Topology, TopologyError

__all__ = [
    "Convolution",
    "PerformanceWarning",
    "Topology",
    "TopologyError",
    "available",
    "conv2d",
    "empty_cache",
    "gradient_at",
    "instruction_set",
    "instruction_sets",
    "linear",
    "use_instruction_set",
]
