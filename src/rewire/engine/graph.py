"""The intermediate representation: what a region computes, with no tensors and no modules in it.

A graph is hashable, so it is the key under which plans are kept. While a region records, nodes are plain
tuples with the fields of :class:`Node`, which compare and hash alike.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch

Ref = int | None
"""What a node reads: ``i >= 0`` is the output of node i, ``~k`` the region's k-th input, None an optional
operand that is absent."""


def numbers(dtype: torch.dtype) -> torch.dtype:
    """The type of sums and statistics beside values of a type, and of a layer's parameters: float32 beside
    bfloat16, else the same."""
    return torch.float32 if dtype is torch.bfloat16 else dtype


class InputMeta(NamedTuple):
    """An ordinary tensor that the region reads."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


class Node(NamedTuple):
    """One operation. Every operation has one output.

    The values that it reads have the dtype of its output; only ``cast`` changes that. Parameters, running
    statistics among them, have this dtype or that of its :func:`numbers`.
    """

    op: str  # key into the table of operations
    attrs: Hashable  # its static arguments, one of the tuples below
    inputs: tuple[Ref, ...]
    shape: tuple[int, ...]  # of the output
    requires_grad: bool
    dtype: torch.dtype  # of the output


class Graph(NamedTuple):
    """Nodes in the order of the program, what they read, and which of them are wanted."""

    nodes: tuple[Node, ...]
    inputs: tuple[InputMeta, ...]
    outputs: tuple[int, ...]  # ascending

    @property
    def dtype(self) -> torch.dtype:
        """Of the kernels: bfloat16 if any value is, which may have values of float32 beside."""
        kinds = {node.dtype for node in self.nodes} | {meta.dtype for meta in self.inputs}
        return torch.bfloat16 if torch.bfloat16 in kinds else self.inputs[0].dtype

    @classmethod
    def of(
        cls, nodes: Sequence[tuple[Any, ...]], inputs: Sequence[InputMeta], outputs: Sequence[int]
    ) -> Graph:
        """The graph of nodes that are plain tuples."""
        return cls(tuple(Node(*node) for node in nodes), tuple(inputs), tuple(outputs))


class Nothing(NamedTuple):
    """Of ``relu`` (x), of ``cat`` (x, y, ...) along the channels, and of ``add``, ``sub``, ``mul`` and
    ``div`` (x, y): one of the two has the shape of the output, the other one is broadcast to it."""


class Activation(NamedTuple):
    """Of ``activation`` (x): ReLU is an operation of its own."""

    kind: str  # key into the table of activations
    p: float = (
        0.0  # its parameters: slope, alpha and scale, lower and upper bound, beta and threshold
    )
    q: float = 0.0


class Cast(NamedTuple):
    """Of ``cast`` (x): the same numbers, rounded to another dtype."""

    dtype: torch.dtype


class Affine(NamedTuple):
    """Of ``affine`` (x): ``x * scale + shift``."""

    scale: float
    shift: float


class Conv(NamedTuple):
    """Of ``conv2d`` (x, values, bias)."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    topology: int  # index into the run's topologies
    probe: bool  # whether a rewirer watches: the run has the probe under the same index


class Linear(NamedTuple):
    """Of ``linear`` (x, values, bias), x being (..., C)."""

    topology: int
    probe: bool


class BatchNorm(NamedTuple):
    """Of ``batch_norm`` (x, weight, bias, running_mean, running_var), x being (N, C, H, W) or (N, C)."""

    training: bool
    momentum: int | None  # index into the run's scalars; None where nothing is tracked
    eps: float
    track: bool  # whether the running statistics are updated


class LayerNorm(NamedTuple):
    """Of ``layer_norm`` (x, weight, bias), x being (..., C); not centered, a root mean square norm."""

    eps: float
    centered: bool


class GroupNorm(NamedTuple):
    """Of ``group_norm`` (x, weight, bias), x being (N, C, H, W) or (N, C)."""

    groups: int
    eps: float


class Pool(NamedTuple):
    """Of ``max_pool2d`` (x)."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    ceil: bool = False


class AvgPool(NamedTuple):
    """Of ``avg_pool2d`` (x)."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    count_include_pad: bool
    ceil: bool = False


class Mean(NamedTuple):
    """Of ``mean`` (x): over the last two of four dimensions."""

    keepdim: bool


class Slice(NamedTuple):
    """Of ``slice`` (x): ``x[:, :, ::down, ::across]``."""

    down: int
    across: int


class Narrow(NamedTuple):
    """Of ``narrow`` (x): ``x[:, first:last]``."""

    first: int
    last: int


class Pad(NamedTuple):
    """Of ``pad`` (x): (before, after) for N, C, H and W in a row."""

    amounts: tuple[int, ...]
    value: float


class Resample(NamedTuple):
    """Of ``resample`` (x): images whose pixels are weighted sums of those of x, along either side."""

    kind: str  # size or scale: F.interpolate; pad: F.pad; mean: F.adaptive_avg_pool2d
    down: Any  # what it says about rows: their number, their factor, or (before, after)
    across: Any  # and about columns
    mode: str = ""  # that of F.interpolate, or of F.pad
    align_corners: bool | None = None


class Shuffle(NamedTuple):
    """Of ``shuffle`` (x): the first channels of all groups, then the second ones, and so on."""

    groups: int


class View(NamedTuple):
    """Of ``view`` (x): another shape in row-major order."""

    shape: tuple[int, ...]


class Permute(NamedTuple):
    """Of ``permute`` (x)."""

    dims: tuple[int, ...]


class Alias(NamedTuple):
    """Of ``alias`` (x): a view that leaves the region and that no kernel reads, such as heads of tokens."""

    kind: str  # key into the table of functions
    arguments: tuple[Hashable, ...]
    part: int  # which of the views that the function makes


class Dropout(NamedTuple):
    """Of ``dropout`` (x)."""

    p: float
    seed: int  # index into the run's scalars


NOTHING = Nothing()
VIEWS = frozenset(("view", "slice", "narrow", "permute", "alias"))
"""Operations whose output shares the memory of their input in PyTorch."""
STRIDED = frozenset(("slice", "narrow", "permute", "alias"))
"""Those of them whose output does not lie in memory as its shape says."""


def is_strided(nodes: Sequence[tuple[Any, ...]], index: int) -> bool:
    """Whether a node's output does not lie in memory as its shape says: a view of such a one, too."""
    while nodes[index][0] == "view" and nodes[index][2][0] >= 0:
        index = nodes[index][2][0]
    return nodes[index][0] in STRIDED


def root(nodes: Sequence[tuple[Any, ...]], index: int) -> int:
    """The node whose memory a node's output shares; itself unless it is a view."""
    while nodes[index][0] in VIEWS:
        index = nodes[index][2][0]
    return index
