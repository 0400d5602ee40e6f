"""A linear layer that holds only its active connections."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rewire import ops
from rewire.connections import Connections
from rewire.engine import layers
from rewire.engine.lazy import ordinary
from rewire.nn import tracing
from rewire.nn.sparse import SparseLayer, keep_mask


class SparseLinear(SparseLayer):
    r"""Drop-in for ``nn.Linear``: :math:`y_o = b_o + \sum_{(o,i) \in A} w_{oi} x_i`.

    Args:
        in_features, out_features, bias, device, dtype: as for ``nn.Linear``.
        sparsity: share of the weights that is absent; or
        connections: how many are present (drawn at random), or which (a ``Connections``).
        generator: source of randomness, torch's default if None.

    Example:
        >>> layer = SparseLinear(784, 512, sparsity=0.95)
        >>> layer.values.shape
        torch.Size([20071, 1])
        >>> layer(torch.randn(8, 784)).shape
        torch.Size([8, 512])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        sparsity: float | None = None,
        connections: int | Connections | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        if in_features < 0 or out_features < 0:
            raise ValueError(f"features must not be negative, got {in_features} and {out_features}")
        self.in_features, self.out_features = in_features, out_features
        super().__init__(
            in_features, out_features, 1, bias, sparsity, connections, device, dtype, generator
        )

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) to (..., out_features)."""
        if tracing.is_symbolic(x):
            return tracing.node(self, x)  # type: ignore[no-any-return]
        if (lazy := layers.linear(self, x)) is not NotImplemented:
            return lazy  # type: ignore[no-any-return]
        x = ordinary(x)
        if x.shape[-1:] != (self.in_features,):
            raise ValueError(
                f"expected an input with {self.in_features} features in its last dimension, "
                f"got shape {tuple(x.shape)}"
            )
        if x.dim() == 2:
            return ops.linear(x, *self.parts, probe=self.probe)
        rows = x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0)
        y = ops.linear(rows, *self.parts, probe=self.probe)
        return y.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.bias is not None}, {super().extra_repr()}"

    @classmethod
    def arguments_of(cls, layer: nn.Linear) -> dict[str, Any]:
        """The sizes of a dense layer as arguments."""
        n_out, n_in = layer.weight.shape
        return {"in_features": n_in, "out_features": n_out}

    @classmethod
    def from_dense(
        cls,
        layer: nn.Linear,
        mask: Tensor | None = None,
        *,
        sparsity: float | None = None,
        connections: int | None = None,
    ) -> SparseLinear:
        """The sparse layer with the weights of ``mask``, or the largest ones, of a dense layer."""
        weight = layer.weight.detach()
        return cls._with_values(
            Connections.from_mask(keep := keep_mask(weight, mask, sparsity, connections)),
            weight[keep],
            layer.bias,
        )

    @classmethod
    def _with_values(
        cls, connections: Connections, values: Tensor, bias: Tensor | None
    ) -> SparseLinear:
        new = cls(
            *(connections.n_in, connections.n_out, bias is not None, values.device, values.dtype),
            connections=connections,
        )
        with torch.no_grad():
            new.assign(values)
            if bias is not None and new.bias is not None:
                new.bias.copy_(bias)
        return new

    def to_dense(self) -> nn.Linear:
        """The equivalent ``nn.Linear``; inactive connections become zeros."""
        dense: nn.Linear = nn.utils.skip_init(
            nn.Linear,
            *(self.in_features, self.out_features),
            bias=self.bias is not None,
            device=self.values.device,
            dtype=self.values.dtype,
        )
        with torch.no_grad():
            dense.weight.zero_()
            connections = self.connections
            dense.weight[connections.outputs(), connections.inputs()] = self.values.flatten()
            if self.bias is not None:
                dense.bias.copy_(self.bias)
        return dense

    def to_sparse_csr(self) -> Tensor:
        """The weight as a torch sparse CSR tensor, out x in (a copy)."""
        return torch.sparse_csr_tensor(
            self.indptr.long(),
            self.indices.long(),
            self.values.detach().flatten().clone(),
            size=(self.out_features, self.in_features),
            check_invariants=False,
        )

    @classmethod
    def from_sparse_csr(cls, weight: Tensor, bias: Tensor | None = None) -> SparseLinear:
        """The layer of a sparse CSR weight, out x in."""
        connections, values = _from_csr(weight)
        return cls._with_values(connections, values, bias)


def _from_csr(weight: Tensor) -> tuple[Connections, Tensor]:
    """Connections and values of a CSR matrix, whose columns may be in any order."""
    if weight.layout != torch.sparse_csr or weight.dim() != 2:
        raise ValueError(f"expected a 2-D sparse CSR tensor, got {weight.dim()}-D {weight.layout}")
    n_out, n_in = weight.shape
    counts = weight.crow_indices().diff()
    outputs = torch.repeat_interleave(torch.arange(n_out, device=weight.device), counts)
    columns = weight.col_indices().long()
    if columns.numel() and (int(columns.min()) < 0 or int(columns.max()) >= n_in):
        raise ValueError(f"the CSR tensor has columns outside [0, {n_in})")
    keys, order = (outputs * n_in + columns).sort()
    if bool((keys.diff() == 0).any()):
        raise ValueError("the CSR tensor has the same connection twice; coalesce it first")
    return Connections.from_keys(keys, n_in, n_out), weight.values()[order].detach()
