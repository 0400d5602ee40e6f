"""What a plan consists of: buffers, steps that read and write them, and where they lie in one arena."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch

ALIGNMENT = 64  # bytes: a cache line
SEGMENTS = 8  # of a backward pass whose gradients are handed out as it runs
SEGMENT_BYTES = 1 << 14  # of gradients: less is not worth a function of autograd


class Layout(Enum):
    """How a tensor (N, C, H, W) or (N, C) lies in memory."""

    CONTIGUOUS = "contiguous"  # as torch has it
    BATCH_LAST = "batch-last"  # [C][H][W][N]
    PANELS = "panels"  # [N / P][H][C][W][P]
    FLAT = "flat"  # a vector by channel, or bytes


class Role(Enum):
    """Where a buffer's memory comes from."""

    SAVED = "saved"  # the arena of the forward pass, which the backward pass reads
    SCRATCH = "scratch"  # the arena of one pass
    INPUT = "input"  # the k-th tensor that the region reads
    OUTPUT = "output"  # the j-th value that escapes
    OUTPUT_GRAD = "output gradient"
    INPUT_GRAD = "input gradient"
    INDEX = "connections"  # number 5 * t + part of the t-th layer's index vectors
    EXPORT = "export"  # what a rewirer looks at


class Window(NamedTuple):
    """Some channels of a tensor."""

    first: int
    shape: tuple[int, ...]  # of the whole


@dataclass(eq=False)
class Buffer:
    """Memory that steps read and write."""

    shape: tuple[int, ...]
    layout: Layout
    role: Role
    number: int = 0  # of an input, output or gradient
    dtype: torch.dtype = torch.uint8
    offset: int = -1  # in the arena
    base: Buffer | None = None  # whose memory this is, seen as another shape
    window: Window | None = None  # if it is a part of the base

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def root(self) -> Buffer:
        return self if self.base is None else self.base

    def seen_as(self, shape: tuple[int, ...], layout: Layout | None = None) -> Buffer:
        """The same memory as another shape, or another layout of which it is one as well."""
        layout = layout or self.layout
        return Buffer(shape, layout, self.role, self.number, self.dtype, base=self.root)

    def channels(self, first: int, last: int) -> Buffer:
        """Some channels of this tensor, in the same memory."""
        whole = self.shape if self.window is None else self.window.shape
        start = first if self.window is None else first + self.window.first
        part = self.seen_as((self.shape[0], last - first, *self.shape[2:]))
        part.window = Window(start, whole)
        return part


@dataclass(eq=False)
class Step:
    """One kernel call.

    Attributes:
        name: of the native step.
        node: of the graph, for which it works.
        fused: what the kernel does besides, for people to read.
        arguments: sizes, and buffers; the names of those that are written start with ``out_``.
    """

    name: str
    node: int
    fused: tuple[str, ...]
    arguments: dict[str, Any]

    def buffers(self) -> Iterator[Buffer]:
        """All buffers, those of nested arguments among them."""
        return _buffers(self.arguments.values())


def _buffers(arguments: Iterable[Any]) -> Iterator[Buffer]:
    for argument in arguments:
        if isinstance(argument, Buffer):
            yield argument.root
        elif isinstance(argument, dict):
            yield from _buffers(argument.values())
        elif isinstance(argument, list):
            yield from _buffers(argument)


@dataclass(eq=False)
class Plan:
    """The steps of one graph.

    Attributes:
        forward, backward: steps in order.
        saved: bytes of the arena that the forward pass uses.
        arena: bytes of all of it: the backward pass has its own part behind.
        probes: node, input and output gradient that a rewirer sees after so many backward steps.
    """

    forward: list[Step]
    backward: list[Step]
    saved: int
    arena: int
    probes: dict[int, list[tuple[int, Buffer, Buffer]]]


def place(steps: list[Step], role: Role, keep: set[Buffer], start: int = 0) -> int:
    """Give every buffer of a role its offset in the arena, from ``start`` on; returns the bytes they take.

    Buffers whose uses do not overlap in time share memory. Those in ``keep`` are used until the end.
    """
    first: dict[Buffer, int] = {}
    last: dict[Buffer, int] = {}
    for index, step in enumerate(steps):
        for buffer in step.buffers():
            if buffer.role is role:
                first.setdefault(buffer, index)
                last[buffer] = len(steps) if buffer in keep else index
    taken: list[tuple[int, int, Buffer]] = []  # offset, end, buffer; placed so far
    total = 0
    # The largest first: small ones fill the gaps between them.
    for buffer in sorted(first, key=lambda b: (-b.bytes, first[b])):
        size = -(-max(buffer.bytes, 1) // ALIGNMENT) * ALIGNMENT
        busy = sorted(
            (offset, end)
            for offset, end, other in taken
            if first[other] <= last[buffer] and first[buffer] <= last[other]
        )
        at = 0
        for offset, end in busy:
            if offset - at >= size:
                break
            at = max(at, end)
        buffer.offset = start + at
        taken.append((at, at + size, buffer))
        total = max(total, at + size)
    return total


class Segment(NamedTuple):
    """A part of the backward steps.

    Attributes:
        last: the number of backward steps that have run at its end.
        inputs: those of the region whose gradients are final then, and which no later step reads.
        reads: inputs that its steps read.
    """

    last: int
    inputs: tuple[int, ...]
    reads: tuple[int, ...]


def segments(steps: list[Step], inputs: int, most: int) -> list[Segment]:
    """Cut backward steps into about ``most`` segments, each as soon as enough gradients are final.

    Args:
        steps: of the backward pass.
        inputs: how many the region has; those without a gradient are the first segment's.
        most: each segment but the last has at least one part in so many of the bytes of all parameters'
            gradients, and at least SEGMENT_BYTES.
    """
    last: dict[int, int] = {}  # step that writes the gradient of an input, or reads the input
    sizes: dict[int, int] = {}
    reads: list[set[int]] = []
    for index, step in enumerate(steps):
        buffers = list(step.buffers())
        reads.append({b.number for b in buffers if b.role is Role.INPUT})
        sizes |= {
            b.number: b.bytes if b.layout is Layout.FLAT else 0  # of parameters: what may be sent
            for b in buffers
            if b.role is Role.INPUT_GRAD
        }
        last |= {b.number: index for b in buffers if b.role in (Role.INPUT, Role.INPUT_GRAD)}
    final = [0] * len(steps)  # bytes of gradients that nothing is done to after a step
    for number, size in sizes.items():
        final[last[number]] += size
    least = max(SEGMENT_BYTES, sum(final) / most)
    ends, size = [], 0
    for index, more in enumerate(final):
        size += more
        if size >= least:
            ends.append(index + 1)
            size = 0
    ends = [*(ends if size else ends[:-1]), len(steps)]
    found = []
    for first, end in zip([0, *ends], ends, strict=False):
        mine = [k for k in sizes if first <= last[k] < end]
        if not first:
            mine += set(range(inputs)).difference(sizes)
        read = set().union(*reads[first:end])
        found.append(Segment(end, tuple(sorted(mine)), tuple(sorted(read))))
    return found
