"""Linear layers whose input and output are row-major, as what surrounds them in a transformer wants.

The kernels turn a few rows at a time on the way in and out; no tensor is turned as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rewire.ops import layout, native, products
from rewire.ops.topology import Topology


def usable(x: Tensor) -> bool:
    """Whether ``x`` can be read row by row: it is row-major, and not just as good batch-last."""
    return (
        x.dim() == 2
        and x.is_contiguous()
        and native.kernels(x) is not None
        and not layout.is_batch_last(x)
    )


def forward(
    x: Tensor, values: Tensor, bias: Tensor | None, topology: Topology, relu: bool = False
) -> Tensor:
    """The contiguous output of a ``usable`` input."""
    kernels, n_out = native.kernels(x), topology.indptr.numel() - 1
    assert kernels is not None
    values = values.contiguous()
    bias = None if bias is None else bias.contiguous()
    geometry, shape = products.geometry_of(products.LINEAR, tuple(x.shape), n_out)
    y = native.empty(kernels, shape, (max(n_out, 1), 1), x)
    if y.numel():
        kernels.forward_rows(
            *(geometry, topology.indptr.data_ptr(), topology.indices.data_ptr()),
            *(values.data_ptr(), native.address(bias), x.data_ptr(), y.data_ptr()),
            *(relu, native.threads()),
        )
    return y


def backward(
    dy: Tensor,
    x: Tensor,
    values: Tensor,
    topology: Topology,
    needs: Sequence[bool],
    z: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Gradients of input, values and bias, an empty tensor for each that is not needed.

    Args:
        dy: gradient of the output, contiguous.
        needs: which of the three are needed.
        z: the output of a rectifier, which ``dy`` has yet to pass.
    """
    kernels, n_out = native.kernels(x), dy.shape[1]
    assert kernels is not None
    if z is not None and not needs[1]:
        dy, z = products.rectify_gradient(dy, z), None
    values, threads = values.contiguous(), native.threads()
    geometry, _ = products.geometry_of(products.LINEAR, tuple(x.shape), n_out)
    dx = native.empty(kernels, tuple(x.shape), x.stride(), x) if needs[0] else x.new_empty(0)
    dw, db = x.new_empty(values.shape if needs[1] else 0), x.new_empty(n_out if needs[2] else 0)
    if dy.numel() == 0:
        return dx.zero_(), dw.zero_(), db.zero_()
    slots = (topology.slots.data_ptr(), topology.outputs.data_ptr(), topology.order.data_ptr())
    if needs[1]:
        kernels.gradients_rows(
            *(geometry, *slots, values.data_ptr(), x.data_ptr(), dy.data_ptr(), native.address(z)),
            *(dx.data_ptr() if needs[0] else 0, dw.data_ptr(), db.data_ptr() if needs[2] else 0),
            threads,
        )
        return dx, dw, db
    if needs[0]:
        kernels.input_gradient_rows(
            geometry, *slots, values.data_ptr(), dy.data_ptr(), dx.data_ptr(), threads
        )
    return dx, dw, torch.sum(dy, 0) if needs[2] else db
