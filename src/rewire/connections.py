"""The set A of active connections of one layer: sorted coordinates, drawn and checked in linear time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rewire.ops import topology
from rewire.ops.reference import rows_of

_LIMIT = 2**31 - 1


@dataclass(frozen=True)
class Domain:
    """Which connections a layer can have: all between its units or, in a grouped convolution, those
    between units of the same group.

    The inputs that an output unit can have are numbered in their order: that is the *column* of a
    connection, and its place in a row of the dense weight, (n_out, width), taps before channels. What is
    counted, drawn or scanned over all possible connections works on columns, as if the layer were one of
    ``width`` by ``n_out`` units without groups; :meth:`Connections.packed` and :meth:`unpacked` translate.

    Attributes:
        n_in, n_out: units on each side.
        groups: the channels of both sides are cut into so many groups of the same size.
        taps: positions of the kernel; input unit ``tap * channels + c`` belongs to channel c.
    """

    n_in: int
    n_out: int
    groups: int = 1
    taps: int = 1

    @property
    def width(self) -> int:
        """How many inputs an output unit can have."""
        return self.n_in // self.groups

    @property
    def size(self) -> int:
        """How many connections are possible."""
        return self.n_out * self.width

    def columns(self, outputs: Tensor, inputs: Tensor) -> Tensor:
        """The columns of connections, int64; meaningless for those outside of the domain."""
        if self.groups == 1:
            return inputs
        channels, each = self._channels
        first = self._group(outputs) * each
        return inputs // channels * each + inputs % channels - first

    def inputs(self, outputs: Tensor, columns: Tensor) -> Tensor:
        """The input units of connections with these columns."""
        if self.groups == 1:
            return columns
        channels, each = self._channels
        return columns // each * channels + self._group(outputs) * each + columns % each

    def check(self, indptr: Tensor, indices: Tensor) -> None:
        """Raise a TopologyError if one of these connections, sound otherwise, is between groups."""
        if self.groups == 1 or not indices.numel():
            return
        channels, each = self._channels
        outputs = rows_of(indptr)
        wrong = indices.long() % channels // each != self._group(outputs)
        if bool(wrong.any()):
            at = int(wrong.nonzero()[0])
            channel, group = int(indices[at]) % channels, int(self._group(outputs[at]))
            raise topology.TopologyError(
                f"output unit {int(outputs[at])} has a connection from channel {channel}, but belongs to "
                f"group {group} of {self.groups}, with channels {group * each} to {(group + 1) * each - 1}"
            )

    def unpacked(self, packed: Connections) -> Connections:
        """The layer's connections, from connections whose inputs are column indices."""
        if self.groups == 1:
            return packed
        inputs = self.inputs(packed.outputs(), packed.inputs()).int()
        return Connections(self.n_in, self.n_out, packed.indptr, inputs, self.groups, self.taps)

    def taken(self, connections: Connections) -> Connections:
        """The connections, after checking that all of them belong to this domain."""
        if connections.domain == self:
            return connections
        if (connections.n_in, connections.n_out) != (self.n_in, self.n_out):
            raise ValueError(
                f"connections of {connections.n_out} x {connections.n_in} units do not fit a layer "
                f"of {self.n_out} x {self.n_in}"
            )
        return self.of(connections.indptr, connections.indices)

    def of(self, indptr: Tensor, indices: Tensor) -> Connections:
        """Connections by output unit."""
        return Connections(self.n_in, self.n_out, indptr, indices, self.groups, self.taps)

    def random(self, count: int, generator: torch.Generator | None = None) -> Connections:
        """``count`` distinct connections, every such set as likely as any other, in O(count)."""
        return self.unpacked(Connections.random(self.width, self.n_out, count, generator))

    def from_keys(self, keys: Tensor) -> Connections:
        """From distinct ``output * n_in + input``, in any order."""
        found = Connections.from_keys(keys, self.n_in, self.n_out)
        return found if self.groups == 1 else self.of(found.indptr, found.indices)

    def from_mask(self, mask: Tensor) -> Connections:
        """From a mask of the dense weight, (n_out, width)."""
        return self.unpacked(Connections.from_mask(mask))

    @property
    def _channels(self) -> tuple[int, int]:
        """How many input channels there are, and in each group."""
        channels = self.n_in // self.taps
        return channels, channels // self.groups

    def _group(self, outputs: Tensor) -> Tensor:
        return outputs // (self.n_out // self.groups)


@dataclass(frozen=True, eq=False)
class Connections:
    """Which of the possible connections of a layer are active: the inputs of each output unit, ascending.

    Attributes:
        n_in, n_out: units on each side.
        indptr: int32, (n_out + 1,): output unit o owns entries indptr[o] to indptr[o + 1].
        indices: int32: the input unit of each entry.
        groups, taps: see :class:`Domain`; all ``n_in * n_out`` connections are possible by default.
    """

    n_in: int
    n_out: int
    indptr: Tensor
    indices: Tensor
    groups: int = 1
    taps: int = 1

    def __post_init__(self) -> None:
        topology.check_rows(self.indptr, self.indices, self.n_in, self.n_out)
        self.domain.check(self.indptr, self.indices)

    def __len__(self) -> int:
        return self.indices.numel()

    @property
    def domain(self) -> Domain:
        """Which connections are possible."""
        return Domain(self.n_in, self.n_out, self.groups, self.taps)

    @property
    def density(self) -> float:
        """Share of all possible connections that are active."""
        return len(self) / max(1, self.domain.size)

    def columns(self) -> Tensor:
        """The column of each connection in a row of the dense weight, int64."""
        return self.domain.columns(self.outputs(), self.inputs())

    def packed(self) -> Connections:
        """The same with columns for inputs, as of a layer of ``width`` by ``n_out`` units."""
        if self.groups == 1:
            return self
        return Connections(self.domain.width, self.n_out, self.indptr, self.columns().int())

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

    def where(self, mask: Tensor) -> Connections:
        """The connections selected by a mask, in linear time."""
        mask = mask.to(self.indices.device)
        before = torch.zeros(len(self) + 1, dtype=torch.int32, device=mask.device)
        before[1:] = mask.cumsum(0)
        return self.domain.of(before[self.indptr.long()], self.indices[mask])

    @staticmethod
    def from_keys(keys: Tensor, n_in: int, n_out: int) -> Connections:
        """From distinct ``output * n_in + input``, in any order; keys that ascend are not sorted."""
        if bool((keys[1:] <= keys[:-1]).any()):
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
