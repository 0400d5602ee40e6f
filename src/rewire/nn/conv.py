"""Convolutions in one, two and three dimensions that hold only their active connections."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rewire import ops
from rewire.connections import Connections, Domain
from rewire.engine import layers
from rewire.engine.lazy import ordinary
from rewire.nn import tracing
from rewire.nn.linear import _from_csr
from rewire.nn.shape import ConvShape, Size, domain_of, flatten, per_dim, unflatten
from rewire.nn.sparse import SparseLayer, keep_mask


class SparseConv(SparseLayer, ConvShape):
    """What sparse convolutions have in common.

    An input unit is one tap of one input channel, so a layer has ``n_in = in_channels * taps`` and
    ``n_out = out_channels`` units. With ``groups`` the possible connections are those inside of groups.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        padding: Size | str = 0,
        dilation: Size = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        sparsity: float | None = None,
        connections: int | Connections | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        self._set_shape(
            *(in_channels, out_channels, kernel_size, stride, padding),
            *(dilation, groups, padding_mode),
        )
        self._begin(bias, sparsity, connections, device, dtype, generator)

    weight_shape = ConvShape.weight_shape

    def _begin(self, bias: bool, *rest: Any) -> None:
        rows, others, *kernel = self.weight_shape
        taps = math.prod(kernel)
        super().__init__(others * self.groups * taps, rows, taps, bias, *rest)

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, ...), or (C, ...), to the same with ``out_channels``."""
        if tracing.is_symbolic(x):
            return tracing.node(self, x)  # type: ignore[no-any-return]
        layers.by_itself(self, x)
        x = ordinary(x)
        self._check_image(x)
        batch = self._padded(x if x.dim() == self.dims + 2 else x.unsqueeze(0))
        images = self._images(batch)
        y = ops.conv2d(images, *self.parts, self.sizes, probe=self.probe)
        if self.dims == 3:
            depth = self._depth(batch)
            y = y.unflatten(0, (batch.shape[0], depth)).transpose(1, 2).contiguous()
        elif self.dims == 1:
            y = y.squeeze(2)
        return y if x.dim() == self.dims + 2 else y.squeeze(0)

    def extra_repr(self) -> str:
        return f"{self._described(self.bias is not None)}, {super().extra_repr()}"

    @classmethod
    def from_dense(
        cls,
        layer: Any,
        mask: Tensor | None = None,
        *,
        sparsity: float | None = None,
        connections: int | None = None,
    ) -> Any:
        """The sparse layer with the weights of ``mask``, or the largest ones, of a dense layer."""
        weight = layer.weight.detach()
        keep = flatten(keep_mask(weight, mask, sparsity, connections))
        new = cls(
            **cls.arguments_of(layer),
            bias=layer.bias is not None,
            device=weight.device,
            dtype=weight.dtype,
            connections=domain_of(weight, layer.groups).from_mask(keep),
        )
        with torch.no_grad():
            new.assign(flatten(weight)[keep])
            if layer.bias is not None and new.bias is not None:
                new.bias.copy_(layer.bias)
        return new

    def to_dense(self) -> Any:
        """The equivalent layer of torch; inactive connections become zeros."""
        dense = self._empty_dense(self.values, self.bias is not None)
        connections = self.connections
        flat = self.values.new_zeros((self.n_out, self.domain.width))
        with torch.no_grad():
            flat[connections.outputs(), connections.columns()] = self.values.flatten()
            dense.weight.copy_(unflatten(flat, self.kernel_size))
            if self.bias is not None:
                dense.bias.copy_(self.bias)
        return dense

    def to_sparse_csr(self) -> Tensor:
        """The weight as a sparse CSR copy with the columns of ``weight.flatten(1)``."""
        connections, width = self.connections, self.domain.width
        columns = _places(width, self.kernel_size, self.indices.device)[connections.columns()]
        order = torch.argsort(connections.outputs() * width + columns)
        return torch.sparse_csr_tensor(
            self.indptr.long(),
            columns[order],
            self.values.detach().flatten()[order],
            size=(self.n_out, width),
            check_invariants=False,
        )

    @classmethod
    def from_sparse_csr(
        cls, weight: Tensor, bias: Tensor | None = None, *, kernel_size: Size, **sizes: Any
    ) -> Any:
        """The layer of a sparse CSR weight with the columns of ``weight.flatten(1)``; ``sizes`` are
        stride, padding, dilation and groups."""
        flat, values = _from_csr(weight)
        kernel = per_dim(kernel_size, cls.dims, "kernel_size", 1)
        taps, groups = math.prod(kernel), sizes.get("groups", 1)
        if flat.n_in % taps:
            raise ValueError(f"{flat.n_in} columns are no multiple of the kernel's {taps} taps")
        places = _places(flat.n_in, kernel, flat.indices.device)
        keys, order = (flat.outputs() * flat.n_in + places.argsort()[flat.inputs()]).sort()
        domain = Domain(flat.n_in * groups, flat.n_out, groups, taps)
        new = cls(
            *(*cls._sides(flat.n_out, flat.n_in // taps * groups), kernel),
            **sizes,
            bias=bias is not None,
            device=values.device,
            dtype=values.dtype,
            connections=domain.unpacked(Connections.from_keys(keys, flat.n_in, flat.n_out)),
        )
        with torch.no_grad():
            new.assign(values[order])
            if bias is not None and new.bias is not None:
                new.bias.copy_(bias)
        return new


def _places(width: int, kernel: tuple[int, ...], device: torch.device) -> Tensor:
    """Where each of our columns (taps first) is in ``weight.flatten(1)`` (channels first)."""
    places = torch.arange(width, device=device).view(1, -1, *kernel)
    return flatten(places)[0]


class SparseConv1d(SparseConv):
    """Drop-in for ``nn.Conv1d``; its arguments are as for :class:`SparseConv2d`.

    Example:
        >>> layer = SparseConv1d(16, 32, 5, padding="same", sparsity=0.9)
        >>> layer(torch.randn(8, 16, 100)).shape
        torch.Size([8, 32, 100])
    """

    dims: ClassVar[int] = 1
    dense: ClassVar[type[nn.Module]] = nn.Conv1d


class SparseConv2d(SparseConv):
    """Drop-in for ``nn.Conv2d``.

    An input unit is one tap of one input channel, so a layer has
    ``n_in = in_channels * kh * kw`` and ``n_out = out_channels`` units. With ``groups`` the possible
    connections are those inside of groups.

    Args:
        in_channels ... dtype: as for ``nn.Conv2d``.
        sparsity: share of the weights that is absent; or
        connections: how many are present (drawn at random), or which (a ``Connections``, its input
            units numbered ``(kh * KW + kw) * in_channels + channel``).
        generator: source of randomness, torch's default if None.

    Example:
        >>> layer = SparseConv2d(16, 32, 3, padding=1, sparsity=0.9)
        >>> layer(torch.randn(8, 16, 10, 10)).shape
        torch.Size([8, 32, 10, 10])
    """

    dims: ClassVar[int] = 2
    dense: ClassVar[type[nn.Module]] = nn.Conv2d

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W), or (C, H, W), to the same with ``out_channels``."""
        if tracing.is_symbolic(x):
            return tracing.node(self, x)  # type: ignore[no-any-return]
        if (lazy := layers.conv2d(self, x)) is not NotImplemented:
            return lazy  # type: ignore[no-any-return]
        x = ordinary(x)
        self._check_image(x)
        image = self._padded(x if x.dim() == 4 else x.unsqueeze(0))
        y = ops.conv2d(image, *self.parts, self.sizes, probe=self.probe)
        return y if x.dim() == 4 else y.squeeze(0)


class SparseConv3d(SparseConv):
    """Drop-in for ``nn.Conv3d``; its arguments are as for :class:`SparseConv2d`, and input units are
    numbered ``((kh * KW + kw) * KD + kd) * in_channels + channel``.

    The input is copied once for each tap in depth.

    Example:
        >>> layer = SparseConv3d(3, 16, (3, 5, 5), padding=(1, 2, 2), sparsity=0.9)
        >>> layer(torch.randn(2, 3, 8, 16, 16)).shape
        torch.Size([2, 16, 8, 16, 16])
    """

    dims: ClassVar[int] = 3
    dense: ClassVar[type[nn.Module]] = nn.Conv3d
