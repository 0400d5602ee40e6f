"""What the tests of the native executor share: operands in memory of their own, and layouts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from products import TOLERANCE, Case
from rewire.ops import native

GUARD = 16  # elements around each operand that no step may touch


KERNELS = {torch.float32: "f32", torch.float64: "f64", torch.bfloat16: "bf16"}


class Program:
    """Operands of one element type, and steps over them, all external unless said otherwise.

    With bfloat16 an operand is of float32 until a step says that it reads or writes bfloat16 there."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        self.dtype = dtype
        self.native = native.module()
        self.kernels = getattr(self.native, KERNELS[dtype])
        self.rooms: list[Tensor] = []
        self.scalars: list[float] = []
        self.seeds: list[int] = []

    def add(self, tensor: Tensor) -> int:
        """A new operand with the elements of ``tensor``, in the order of its memory."""
        if tensor.is_floating_point():
            tensor = tensor.to(torch.float32 if self.dtype == torch.bfloat16 else self.dtype)
        flat = tensor.detach().flatten()
        room = flat.new_full((flat.numel() + 2 * GUARD,), 77)
        room[GUARD : GUARD + flat.numel()] = flat
        self.rooms.append(room)
        return len(self.rooms) - 1

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> int:
        """A new operand for a result: NaN, or 123."""
        dtype = dtype or self.dtype
        return self.add(
            torch.full(shape, torch.nan if dtype.is_floating_point else 123, dtype=dtype)
        )

    def topology(self, case: Case) -> Any:
        names = ("indptr", "indices", "slots", "outputs", "order")
        ids = {name: self.add(t) for name, t in zip(names, case.topology, strict=True)}
        return self.native.TopologyOperands(**ids)

    def memory(self, operand: int) -> Tensor:
        return self.rooms[operand][GUARD:-GUARD]

    def __getitem__(self, operand: int) -> Tensor:
        """The numbers of an operand, in the type that says how exact they are."""
        numbers = self.memory(operand)
        return numbers.to(self.dtype) if numbers.is_floating_point() else numbers

    def narrow(self, *steps: Any) -> None:
        """Give operands the type that steps expect."""
        for step in steps if self.dtype == torch.bfloat16 else ():
            for need in step.needs():
                outside = need.operand < len(self.rooms)
                if need.kind == self.native.Kind.values and not step.wide and outside:
                    self.rooms[need.operand] = self.rooms[need.operand].to(self.dtype)

    def plan(self, *steps: Any) -> Any:
        self.narrow(*steps)
        return self.kernels.Plan(list(steps), [self.native.External() for _ in self.rooms])

    def addresses(self) -> list[int]:
        return [self.memory(k).data_ptr() for k in range(len(self.rooms))]

    def elements(self) -> list[int]:
        return [self.memory(k).numel() for k in range(len(self.rooms))]

    def run(self, *steps: Any, threads: int = 2) -> None:
        """Run the steps, and check that only what they say they write has changed."""
        plan = self.plan(*steps)
        before = [room.clone() for room in self.rooms]
        written = {need.operand for step in steps for need in step.needs() if need.writes}
        plan.run(
            *(0, len(steps), self.addresses(), self.elements()),
            scalars=self.scalars,
            seeds=self.seeds,
            threads=threads,
        )
        for k, (room, old) in enumerate(zip(self.rooms, before, strict=True)):
            if k not in written:
                assert torch.equal(room.nan_to_num(5), old.nan_to_num(5)), f"operand {k}"
            assert (room[:GUARD] == 77).all(), f"operand {k}"
            assert (room[-GUARD:] == 77).all(), f"operand {k}"


def lay(x: Tensor, panel: int) -> Tensor:
    """Images (N, C, H, W) in panels of so many columns; batch-last if 0, contiguous if -1."""
    if panel < 0:
        return x.contiguous()
    if not panel:
        return x.permute(1, 2, 3, 0).contiguous()
    batch, *image = x.shape
    return x.reshape(batch // panel, panel, *image).permute(0, 3, 2, 4, 1).contiguous()


def unlay(flat: Tensor, shape: Sequence[int], panel: int) -> Tensor:
    """The images (N, C, H, W) that lie in such memory."""
    n, c, h, w = shape
    if panel < 0:
        return flat.reshape(n, c, h, w)
    if not panel:
        return flat.reshape(c, h, w, n).permute(3, 0, 1, 2)
    return flat.reshape(n // panel, h, c, w, panel).permute(0, 4, 2, 1, 3).reshape(n, c, h, w)


def panel_rows(shape: Sequence[int], panel: int) -> int:
    return shape[0] // panel * shape[2] if panel else 1


def images(shape: Sequence[int], panel: int) -> Any:
    n, c, h, w = shape
    if panel:
        return native.module().Images(n // panel, c, h, w, panel)
    return native.module().Images(1, c, h, w, n, in_panels=False)


def close(actual: Tensor, expected: Tensor, factor: float = 1) -> None:
    """Within the tolerance of the type of ``actual``, relative to the largest element."""
    assert actual.shape == expected.shape
    actual, expected = actual.detach(), expected.detach()
    scale = max(1.0, float(expected.abs().max()))
    error = float((actual.double() - expected.double()).abs().max())
    assert error <= factor * TOLERANCE[actual.dtype] * scale  # false for NaN
