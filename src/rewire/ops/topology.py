"""The connections of one layer as the kernels read them, and the check that they are sound."""

from __future__ import annotations

import operator
from typing import NamedTuple

import torch
from torch import Tensor

from rewire.ops import native


class Topology(NamedTuple):
    """Connections in both traversal orders, all int32.

    By output unit o: ``indices[indptr[o]:indptr[o + 1]]`` are its input units, ascending.
    By input: slot ``c * taps + tap`` holds ``outputs[slots[slot]:slots[slot + 1]]``, ascending, and
    ``order`` says where each of these connections stands by output. Input unit ``tap * channels + c``
    is tap ``tap`` of channel ``c``; a linear layer has one tap.
    """

    indptr: Tensor
    indices: Tensor
    slots: Tensor
    outputs: Tensor
    order: Tensor


OUTDATED = (
    "the connections of this layer have changed since it was traced or exported, and the program shares "
    "its values: trace or export the model again, or trace copy.deepcopy(model), which stays as it is"
)


class TopologyError(ValueError):
    """Connections that are not sorted, distinct and in range."""


def check_rows(indptr: Tensor, indices: Tensor, n_in: int, n_out: int) -> None:
    """Raise a TopologyError unless the rows hold ascending, distinct inputs in [0, n_in)."""
    for name, tensor in (("indptr", indptr), ("indices", indices)):
        if tensor.dtype != torch.int32 or tensor.dim() != 1:
            raise TopologyError(
                f"{name} must be a 1-D int32 tensor, got {tensor.dim()}-D {tensor.dtype}"
            )
        _check_memory(name, tensor)
    if indptr.numel() != n_out + 1 or indptr.numel() == 0:
        raise TopologyError(
            f"indptr has {indptr.numel()} elements, expected out units + 1 = {max(n_out, 0) + 1}"
        )
    if n_out == 0 and indices.numel():
        raise TopologyError(f"{indices.numel()} connections belong to no output unit")
    row = _first_bad_row(indptr, indices, n_in)
    if row >= 0:
        raise TopologyError(
            f"the connections of output unit {row} are corrupt: input units must be distinct, "
            f"ascending and in [0, {n_in}), and indptr must rise from 0 to the number of "
            f"connections, {indices.numel()}"
        )


def _check_memory(name: str, tensor: Tensor) -> None:
    """Raise if the storage of a tensor was cut shorter than the tensor."""
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (tensor.storage_offset() + last + 1) * tensor.element_size() if tensor.numel() else 0
    if tensor.device.type == "cpu" and tensor.untyped_storage().nbytes() < needed:
        raise TopologyError(f"the memory of {name} is gone: its storage was resized")


def _first_bad_row(indptr: Tensor, indices: Tensor, n_in: int) -> int:
    n_out, count = indptr.numel() - 1, indices.numel()
    if native.available() and indptr.is_cpu and indptr.is_contiguous() and indices.is_contiguous():
        return native.extension.first_bad_row(
            indptr=indptr, indices=indices, n_in=n_in, threads=native.threads()
        )
    counts = indptr.diff()
    if int(indptr[0]) != 0:
        return 0
    bad = (counts < 0) | (indptr[1:] > count)
    if bool(bad.any()):
        return int(bad.nonzero()[0])
    if int(indptr[-1]) != count:
        return n_out - 1
    rows = torch.repeat_interleave(torch.arange(n_out, device=indptr.device), counts.long())
    wrong = (indices < 0) | (indices >= n_in)
    wrong[1:] |= (rows.diff() == 0) & (indices.diff() <= 0)
    return int(rows[wrong][0]) if bool(wrong.any()) else -1


def build(indptr: Tensor, indices: Tensor, n_in: int, taps: int = 1) -> Topology:
    """Check the rows and derive the other traversal order."""
    n_out, channels = indptr.numel() - 1, n_in // taps
    check_rows(indptr, indices, n_in, n_out)
    topology = _by_input(indptr.contiguous(), indices.contiguous(), channels, taps)
    _remember(topology, n_in, taps)
    return topology


def _by_input(indptr: Tensor, indices: Tensor, channels: int, taps: int) -> Topology:
    n_out, count, device = indptr.numel() - 1, indices.numel(), indptr.device
    if native.available() and indptr.is_cpu:
        slots, outputs, order = map(native.integers, (channels * taps + 1, count, count))
        native.extension.by_input(
            indptr=indptr,
            indices=indices,
            in_channels=channels,
            taps=taps,
            slots=slots,
            outputs=outputs,
            order=order,
            threads=native.threads(),
        )
        return Topology(indptr, indices, slots, outputs, order)
    slot = indices.long() % channels * taps + indices.long() // channels
    order = torch.argsort(slot, stable=True)
    rows = torch.repeat_interleave(torch.arange(n_out, device=device), indptr.diff().long())
    slots = torch.zeros(channels * taps + 1, dtype=torch.int32, device=device)
    slots[1:] = torch.bincount(slot, minlength=channels * taps).cumsum(0)
    return Topology(indptr, indices, slots, rows[order].int(), order.int())


def same(a: Topology, b: Topology) -> bool:
    """Whether these are the same connections."""
    return not a.order.is_meta and all(map(torch.equal, a, b))


def retire(topology: Topology) -> None:
    """Make the operators refuse connections that their layer has replaced.

    Programs of ``torch.jit.trace`` and ``torch.export`` hold these tensors and share the layer's parameter,
    whose values belong to the new connections from now on.
    """
    if not topology.order.is_meta:
        with torch.inference_mode(topology.order.is_inference()):
            topology.order.resize_(0)


def refuse_retired(topology: Topology) -> None:
    """Raise a TopologyError for connections that :func:`retire` was called for."""
    if topology.order.numel() == 0 < topology.indices.numel():
        raise TopologyError(OUTDATED)


def version(tensor: Tensor) -> int:
    """Changes whenever the tensor is written to; -1 where torch does not count that."""
    return -1 if tensor.is_inference() else tensor._version


def _stamp(topology: Topology, n_in: int, taps: int) -> tuple[int, ...]:
    a, b, c, d, e = topology
    places = a.data_ptr(), b.data_ptr(), c.data_ptr(), d.data_ptr(), e.data_ptr(), n_in, taps
    try:
        return *places, a._version, b._version, c._version, d._version, e._version
    except RuntimeError:  # made in inference mode: they have none
        return *places, *map(version, topology)


def _remember(topology: Topology, n_in: int, taps: int) -> Topology:
    # `tensor.data = ...` and `resize_` change what the user's objects refer to, but not other objects that
    # refer to the same memory. So these keep their sizes and types, and kernels need not look at them.
    held = Topology(*(tensor.detach() for tensor in topology))
    stamp = _stamp(topology, n_in, taps)
    # Kept with the tensors themselves: another tensor could come to lie at the same address.
    topology.indptr._rewire_held = topology[1:], stamp, held  # type: ignore[attr-defined]
    held.indptr._rewire_held = held[1:], stamp, None  # type: ignore[attr-defined]
    return held


def ensure(topology: Topology, n_in: int, taps: int) -> Topology:
    """The same five tensors, whose sizes and types no one else can change; free if these very ones were
    checked before and torch has not counted a write since.

    Raises:
        TopologyError: unless all five agree.
    """
    others, stamp, held = getattr(topology[0], "_rewire_held", ((None,) * 4, None, None))
    if all(map(operator.is_, others, topology[1:])) and stamp == _stamp(topology, n_in, taps):
        return held or topology
    refuse_retired(topology)
    indptr, indices, *rest = topology
    check_rows(indptr, indices, n_in, indptr.numel() - 1)
    if not all(tensor.is_contiguous() for tensor in topology):
        raise TopologyError("the tensors of a topology must be contiguous")
    expected = _by_input(indptr, indices, n_in // taps, taps)[2:]
    for name, given, right in zip(("slots", "outputs", "order"), rest, expected, strict=True):
        _check_memory(name, given)
        if given.dtype != torch.int32 or not torch.equal(given, right):
            raise TopologyError(f"{name} does not match indptr and indices; build it from them")
    return _remember(topology, n_in, taps)
