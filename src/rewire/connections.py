"""The set A of active connections of one layer: sorted coordinates, drawn and checked in linear time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rewire.ops import topology
from rewire.ops.reference import rows_of

_LIMIT = 2**31 - 1


@dataclass(frozen=True, eq=False)
class Connections:
    """Which of ``n_in * n_out`` connections are active: the inputs of each output unit, ascending.

    Attributes:
        n_in, n_out: units on each side.
        indptr: int32, (n_out + 1,): output unit o owns entries indptr[o] to indptr[o + 1].
        indices: int32: the input unit of each entry.
    """

    n_in: int
    n_out: int
    indptr: Tensor
    indices: Tensor

    def __post_init__(self) -> None:
        topology.check_rows(self.indptr, self.indices, self.n_in, self.n_out)

    def __len__(self) -> int:
        return self.indices.numel()

    @property
    def density(self) -> float:
        """Share of all possible connections that are active."""
        return len(self) / max(1, self.n_in * self.n_out)

    def outputs(self) -> Tensor:
        """The output unit of each connection, int64."""
        return rows_of(self.indptr)

    def inputs(self) -> Tensor:
        """The input unit of each connection, int64."""
        return self.indices.long()

    def keys(self) -> Tensor:
        """``output * n_in + input`` of each connection, int64, ascending."""
        return self.outputs() * self.n_in + self.indices

    def fan_in(self) -> Tensor:
        """Number of inputs of each output unit, int64."""
        return self.indptr.diff().long()

    @staticmethod
    def from_keys(keys: Tensor, n_in: int, n_out: int) -> Connections:
        """From distinct ``output * n_in + input``, in any order."""
        keys = keys.sort().values
        if keys.numel() and (int(keys[0]) < 0 or int(keys[-1]) >= n_in * n_out):
            raise ValueError(f"connections lie outside {n_out} x {n_in} units")
        if keys.numel() > _LIMIT:
            raise ValueError(f"a layer holds at most {_LIMIT:,} connections, got {keys.numel():,}")
        indptr = torch.zeros(n_out + 1, dtype=torch.int32, device=keys.device)
        outputs = torch.div(keys, max(n_in, 1), rounding_mode="floor")
        indptr[1:] = torch.bincount(outputs, minlength=n_out).cumsum(0)
        return Connections(n_in, n_out, indptr, (keys - outputs * n_in).int())

    @staticmethod
    def from_mask(mask: Tensor) -> Connections:
        """From a dense (n_out, n_in) mask: where it is not zero."""
        if mask.dim() != 2:
            raise ValueError(f"a mask has two dimensions (out, in), got {tuple(mask.shape)}")
        outputs, inputs = mask.nonzero(as_tuple=True)
        n_out, n_in = mask.shape
        return Connections.from_keys(outputs * n_in + inputs, n_in, n_out)

    @staticmethod
    def random(
        n_in: int, n_out: int, count: int, generator: torch.Generator | None = None
    ) -> Connections:
        """``count`` distinct connections, every such set as likely as any other, in O(count)."""
        total = n_in * n_out
        if n_in > _LIMIT or n_out > _LIMIT:
            raise ValueError(f"a layer has at most {_LIMIT:,} units on a side")
        if not 0 <= count <= total:
            raise ValueError(f"count must be between 0 and {n_out} * {n_in} = {total}, got {count}")
        if 2 * count >= total:  # most of it: all of it is no larger
            keys = torch.randperm(total, generator=generator)[:count]
            return Connections.from_keys(keys, n_in, n_out)
        keys = torch.empty(0, dtype=torch.int64)
        while keys.numel() < count:
            missing = count - keys.numel()
            drawn = torch.randint(total, (missing + missing // 8 + 1,), generator=generator)
            keys = torch.cat([keys, drawn]).unique()
        surplus = keys.numel() - count
        if surplus:  # dropped at random: unique() has sorted them
            keys = keys[torch.randperm(keys.numel(), generator=generator)[surplus:]]
        return Connections.from_keys(keys, n_in, n_out)
