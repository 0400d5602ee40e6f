"""Counting the distinct connections that a layer has ever had, in memory linear in those it has."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rewire.ops import native
from rewire.ops.sampling import Rows, _keys

REGISTERS = 1 << 12
_BITS = torch.tensor([byte.bit_count() for byte in range(256)], dtype=torch.uint8)
_EXACT = 1 << 17  # bytes of a bitmap that are always worth an exact count


class Counter:
    """How many different connections were ever added.

    Exact, in a bitmap, where that takes no more memory than 8 bytes per active connection (or 128 KB);
    else an estimate with a standard error of 1.6 % from a HyperLogLog sketch of 4 KB.

    Attributes:
        memory: uint8: the bitmap or the sketch's registers.
        exact: how many bits of the bitmap are set; None for a sketch.
    """

    def __init__(self, n_in: int, n_out: int, active: int) -> None:
        self.n_in, self.n_out = n_in, n_out
        size = -(-n_in * n_out // 8)
        fits = size <= max(_EXACT, 8 * active)
        self.exact: int | None = 0 if fits else None
        self.memory = torch.zeros(size if fits else REGISTERS, dtype=torch.uint8)

    def add(self, rows: Rows, chosen: Tensor | None = None) -> None:
        """Count connections; of these, the chosen ones alone if a mask is given."""
        if not native.available():
            keys = _keys(rows, self.n_in)
            keys = keys if chosen is None else keys[chosen]
            if self.exact is not None:
                self.exact += _mark(keys.numpy(), self.memory.numpy())
            else:
                _sketch(keys.numpy(), self.memory.numpy())
        elif self.exact is not None:
            self.exact += native.extension.mark(
                indptr=rows.indptr,
                indices=rows.indices,
                chosen=chosen,
                n_in=self.n_in,
                n_out=self.n_out,
                bits=self.memory,
            )
        else:
            native.extension.sketch(
                indptr=rows.indptr,
                indices=rows.indices,
                chosen=chosen,
                n_in=self.n_in,
                n_out=self.n_out,
                registers=self.memory,
            )

    def load(self, memory: Tensor, exact: int | None) -> None:
        """Take ``memory`` and ``exact`` of another counter for as many units.

        Raises:
            ValueError: if they are of no such counter.
        """
        size = REGISTERS if exact is None else -(-self.n_in * self.n_out // 8)
        if memory.dtype != torch.uint8 or tuple(memory.shape) != (size,):
            raise ValueError(
                f"the count of connections that were ever active is {memory.dtype} of shape "
                f"{tuple(memory.shape)}, expected {size} bytes for {self.n_out} x {self.n_in} units"
            )
        memory = memory.detach().to("cpu", copy=True)
        marked = None if exact is None else int(_BITS[memory.int()].sum())
        if type(exact) is not type(marked) or marked != exact:
            raise ValueError(f"{exact!r} connections were ever active, but {marked} are marked")
        if exact is None and int(memory.max()) > 64 - 11:
            raise ValueError("the sketch of the connections that were ever active is corrupt")
        self.memory, self.exact = memory, exact

    def total(self) -> int:
        """How many there are, or about how many."""
        if self.exact is not None:
            return self.exact
        rank, m = self.memory.double(), REGISTERS
        estimate = 0.7213 / (1 + 1.079 / m) * m * m / float(torch.exp2(-rank).sum())
        empty = int((rank == 0).sum())
        if estimate <= 2.5 * m and empty:
            estimate = m * math.log(m / empty)
        return min(round(estimate), self.n_in * self.n_out)


def _mark(keys: Any, bits: Any) -> int:
    before = int(np.unpackbits(bits).sum())
    np.bitwise_or.at(bits, keys >> 3, (1 << (keys & 7)).astype(np.uint8))
    return int(np.unpackbits(bits).sum()) - before


def _sketch(keys: Any, registers: Any) -> None:
    h = keys.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    h ^= h >> np.uint64(31)
    rest = h << np.uint64(12) | np.uint64(1 << 11)
    # The leading zeros: halves of a word are exact in double precision.
    high, low = (
        (rest >> np.uint64(32)).astype(np.float64),
        (rest & np.uint64(2**32 - 1)).astype(np.float64),
    )
    zeros = np.where(high > 0, 32 - np.frexp(high)[1], 64 - np.frexp(low)[1])
    np.maximum.at(registers, (h >> np.uint64(52)).astype(np.int64), (zeros + 1).astype(np.uint8))
