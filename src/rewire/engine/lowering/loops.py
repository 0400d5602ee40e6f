"""How the elements of tensors are gone through: five nested loops, and strides of what is read in them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from rewire.engine.lowering.base import Lowering
from rewire.engine.plan import Buffer, Layout

_ONE_RUN = 1 << 15
"""Elements that threads need not share."""


class Loops(NamedTuple):
    """Five loops over a tensor, outermost first; the innermost two are one run of memory.

    Attributes:
        sizes: of the loops.
        channel: the loop that goes over channels.
        panel_rows: how many runs a channel has.
        order: what each loop goes over: dimensions p (panels), c, h, w and n (samples in a panel), the
            innermost last.
        image: the sizes of these dimensions.
        rank: how many dimensions the tensor has.
    """

    sizes: tuple[int, ...]
    channel: int
    panel_rows: int
    order: tuple[str, ...]
    image: dict[str, int]
    rank: int

    def access(self, x: Buffer) -> dict[str, Any]:
        """How an operand, which may be broadcast to the tensor or a part of a larger one, is read."""
        whole = x.shape if x.window is None else x.window.shape
        lifted = (1,) * (self.rank - len(whole)) + whole
        n, c, h, w = image_of(lifted)
        panel = min(n, self.image["n"])
        size = {"p": n // panel, "n": panel, "c": c, "h": h, "w": w}
        memory = {Layout.PANELS: "phcwn", Layout.BATCH_LAST: "pchwn"}.get(x.layout, "pnchw")
        strides, step = dict.fromkeys("pchwn", 0), 1
        for dim in reversed(memory):
            if size[dim] > 1:
                strides[dim] = step
            step *= size[dim]
        # A loop over several dimensions has the stride of the innermost; those of size 1 do not count.
        inner = ([d for d in dims if self.image[d] > 1] for dims in self.order)
        offset = 0 if x.window is None else x.window.first * strides["c"]
        if x.window is not None and x.shape[1] == 1:  # one channel of several is broadcast, too
            strides["c"] = 0
        found = tuple(strides[dims[-1]] if dims else 0 for dims in inner)
        return {"operand": x, "strides": found, "offset": offset}


def image_of(shape: tuple[int, ...]) -> tuple[int, int, int, int]:
    """A shape as that of images (N, C, H, W)."""
    if len(shape) > 4:
        return shape[0], math.prod(shape[1:]), 1, 1
    return (*shape, *(1,) * (4 - len(shape)))  # type: ignore[return-value]


def loops_of(
    low: Lowering,
    shape: tuple[int, ...],
    operands: Sequence[tuple[int, ...]],
    layout: Layout | None = None,
    by_channel: bool = False,
) -> Loops:
    """The loops over a tensor, with operands that are broadcast to it; ``by_channel`` if something else
    differs from channel to channel."""
    layout = layout or low.layout(shape)
    n, c, h, w = image_of(shape)
    rank = len(shape)
    if not by_channel and all(
        one == shape for one in operands
    ):  # long runs, in the order of memory
        panel = low.panel if layout is Layout.PANELS else n
        image = {"p": n // panel, "c": c, "h": h, "w": w, "n": panel}
        memory = {Layout.PANELS: "phcwn", Layout.BATCH_LAST: "cphwn"}.get(layout, "npchw")
        size = image[memory[0]] if math.prod(shape) > _ONE_RUN else 1  # runs that threads share
        order = ("", "", "", "", memory) if size == 1 else (memory[0], "", "", "", memory[1:])
        return Loops((size, 1, 1, 1, math.prod(shape) // size), 2, 1, order, image, rank)
    if layout is Layout.PANELS:
        image = {"p": n // low.panel, "c": c, "h": h, "w": w, "n": low.panel}
        sizes = (image["p"], h, c, w, low.panel)
        return Loops(sizes, 2, image["p"] * h, ("p", "h", "c", "w", "n"), image, rank)
    image = {"p": 1, "c": c, "h": h, "w": w, "n": n}
    if layout is not Layout.BATCH_LAST and rank == 3:  # (N, C, places): samples are panels
        image = {"p": 1, "c": c, "h": h, "w": w, "n": n}
        return Loops((n, 1, c, 1, h), 2, n, ("n", "", "c", "", "h"), image, rank)
    if layout is not Layout.BATCH_LAST:  # in the order of memory: nothing is broadcast
        return Loops((1, 1, 1, 1, math.prod(shape)), 2, 1, ("", "", "", "", "pnchw"), image, rank)
    # Rows of an image are one run, unless an operand is broadcast along one side alone.
    sides = [image_of((1,) * (rank - len(one)) + one)[2:] for one in operands]
    if h == 1 or w == 1 or all(side in ((1, 1), (h, w)) for side in sides):
        return Loops((1, 1, c, h * w, n), 2, 1, ("p", "", "c", "hw", "n"), image, rank)
    return Loops((1, h, c, w, n), 2, 1, ("p", "h", "c", "w", "n"), image, rank)
