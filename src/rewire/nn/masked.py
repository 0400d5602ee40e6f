"""Masked versions of the sparse layers: a dense weight and a mask, on any device.

They compute what sparse layers with the same connections compute, and rewirers treat them alike. A dense
weight costs the memory and time of a dense layer: they are for devices without sparse kernels, and for
methods that need dense weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rewire.engine.lazy import ordinary
from rewire.nn.conv import SparseConv1d, SparseConv2d, SparseConv3d
from rewire.nn.linear import SparseLinear
from rewire.nn.masked_layer import MaskedLayer
from rewire.nn.shape import ConvShape, Size, flatten, unflatten
from rewire.nn.sparse import SparseLayer
from rewire.nn.transposed import SparseConvTranspose1d, SparseConvTranspose2d, TransposedShape
from rewire.ops.reference import LINEAR, Convolution
from rewire.ops.transposed import watch as _watch

D = TypeVar("D", bound=nn.Module)


class MaskedLinear(MaskedLayer):
    """The masked version of :class:`rewire.SparseLinear`.

    Args:
        weight: (out_features, in_features), copied.
        mask: the active connections, of the same shape.
        bias: (out_features,) or None, copied.

    Example:
        >>> layer = MaskedLinear.from_dense(nn.Linear(784, 512), torch.rand(512, 784) < 0.05)
        >>> layer(torch.randn(8, 784)).shape
        torch.Size([8, 512])
    """

    def __init__(self, weight: Tensor, mask: Tensor, bias: Tensor | None = None) -> None:
        super().__init__(weight, mask, bias)
        self.out_features, self.in_features = self.n_out, self.n_in = weight.shape
        self.taps = 1

    def flat(self, tensor: Tensor) -> Tensor:
        """The tensor itself."""
        return tensor

    def shaped(self, flat: Tensor) -> Tensor:
        """The tensor itself."""
        return flat

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) to (..., out_features)."""
        x = ordinary(x)
        y = F.linear(x, self.effective, self.bias)
        if self.probe is None or not y.requires_grad:
            return y
        rows = x.detach().reshape(-1, self.in_features).to(self.weight.dtype)
        watched: Tensor = _watch(y.reshape(-1, self.out_features), rows, LINEAR, self.probe)
        return watched.view(y.shape)

    @classmethod
    def from_dense(cls, layer: nn.Linear, mask: Tensor | None = None) -> MaskedLinear:
        """With all weights of a dense layer, under a mask (by default of ones)."""
        weight = layer.weight.detach()
        mask = torch.ones_like(weight, dtype=torch.bool) if mask is None else mask
        return cls(weight, mask, layer.bias)

    @classmethod
    def from_sparse(cls, layer: SparseLinear) -> MaskedLinear:
        """With the connections and weights of a sparse layer."""
        dense = layer.to_dense()
        mask = torch.zeros_like(dense.weight, dtype=torch.bool)
        connections = layer.connections
        mask[connections.outputs(), connections.inputs()] = True
        return cls.from_dense(dense, mask)

    def to_sparse(self) -> SparseLinear:
        """The sparse layer with the same connections."""
        return SparseLinear.from_dense(self.to_dense(), self.mask)

    def to_dense(self) -> nn.Linear:
        """The equivalent ``nn.Linear``; inactive connections become zeros."""
        dense: nn.Linear = nn.utils.skip_init(
            *(nn.Linear, self.in_features, self.out_features),
            bias=self.bias is not None,
            device=self.weight.device,
            dtype=self.weight.dtype,
        )
        return _filled(dense, self)

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.bias is not None}, {super().extra_repr()}"


class MaskedConv(MaskedLayer, ConvShape):
    """What masked convolutions have in common.

    Args:
        weight: (out_channels, in_channels / groups, ...), copied.
        mask: the active connections, of the same shape.
        bias: (out_channels,) or None, copied.
        stride, padding, dilation, groups, padding_mode: as for the layer of torch.
    """

    sparse: ClassVar[type[SparseLayer]]

    def __init__(
        self,
        weight: Tensor,
        mask: Tensor,
        bias: Tensor | None = None,
        *,
        stride: Size = 1,
        padding: Size | str = 0,
        dilation: Size = 1,
        groups: int = 1,
        padding_mode: str = "zeros",
    ) -> None:
        super().__init__(weight, mask, bias)
        in_channels, out_channels = self._channels(weight, groups)
        kernel = tuple(weight.shape[2:])
        self._set_shape(
            *(in_channels, out_channels, kernel, stride, padding),
            *(dilation, groups, padding_mode),
        )
        self._set_units(groups)

    def _channels(self, weight: Tensor, groups: int) -> tuple[int, int]:
        if weight.dim() != self.dims + 2:
            raise ValueError(
                f"the weight of a {type(self).__name__} has {self.dims + 2} dimensions, "
                f"got {tuple(weight.shape)}"
            )
        return self._sides(weight.shape[0], weight.shape[1] * groups)

    def _set_units(self, groups: int) -> None:
        self.taps = math.prod(self.kernel_size)
        self.n_out, self.n_in = self.weight.shape[0], self.weight.shape[1] * groups * self.taps

    def flat(self, tensor: Tensor) -> Tensor:
        """Rows with columns as sparse convolutions have them: taps first."""
        return flatten(tensor)

    def shaped(self, flat: Tensor) -> Tensor:
        """Shaped like the weight."""
        return unflatten(flat, self.kernel_size).contiguous()

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, ...), or (C, ...), to the same with ``out_channels``."""
        x = ordinary(x)
        self._check_image(x)
        batch = self._padded(x if x.dim() == self.dims + 2 else x.unsqueeze(0))
        sizes = self.sizes
        # What is padded already needs no more; of depth everything is.
        padding = (0, *sizes.padding)[-self.dims :]
        y: Tensor = _CONVOLUTIONS[self.dims](
            *(batch, self.effective, self.bias, self.stride, padding, self.dilation, self.groups)
        )
        if (probe := self.probe) is not None and y.requires_grad:

            def show(conv: Convolution, x: Tensor, dy: Tensor) -> None:
                probe(conv, self._images(x), self._outputs_as_images(dy))

            y = _watch(y, batch.detach().to(self.weight.dtype), sizes, show)
        return y if x.dim() == self.dims + 2 else y.squeeze(0)

    @classmethod
    def from_dense(cls, layer: Any, mask: Tensor | None = None) -> Any:
        """With all weights of a dense layer, under a mask (by default of ones)."""
        weight = layer.weight.detach()
        mask = torch.ones_like(weight, dtype=torch.bool) if mask is None else mask
        return cls(weight, mask, layer.bias, **{n: getattr(layer, n) for n in cls.arguments[3:]})

    @classmethod
    def from_sparse(cls, layer: Any) -> Any:
        """With the connections and weights of a sparse layer."""
        connections, shape = layer.connections, (layer.n_out, layer.domain.width)
        flat = torch.zeros(shape, dtype=torch.bool, device=layer.values.device)
        flat[connections.outputs(), connections.columns()] = True
        return cls.from_dense(layer.to_dense(), unflatten(flat, layer.kernel_size))

    def to_sparse(self) -> Any:
        """The sparse layer with the same connections."""
        return self.sparse.from_dense(self.to_dense(), self.mask)  # type: ignore[attr-defined]

    def to_dense(self) -> Any:
        """The equivalent layer of torch; inactive connections become zeros."""
        return _filled(self._empty_dense(self.weight, self.bias is not None), self)

    def extra_repr(self) -> str:
        return f"{self._described(self.bias is not None)}, {super().extra_repr()}"


_CONVOLUTIONS: dict[int, Any] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TRANSPOSED: dict[int, Any] = {1: F.conv_transpose1d, 2: F.conv_transpose2d}


class MaskedConv1d(MaskedConv):
    """The masked version of :class:`rewire.SparseConv1d`; arguments as for :class:`MaskedConv2d`."""

    dims, dense, sparse = 1, nn.Conv1d, SparseConv1d


class MaskedConv2d(MaskedConv):
    """The masked version of :class:`rewire.SparseConv2d`.

    Args:
        weight: (out_channels, in_channels / groups, kh, kw), copied.
        mask: the active connections, of the same shape.
        bias: (out_channels,) or None, copied.
        stride, padding, dilation, groups, padding_mode: as for ``nn.Conv2d``.
    """

    dims, dense, sparse = 2, nn.Conv2d, SparseConv2d


class MaskedConv3d(MaskedConv):
    """The masked version of :class:`rewire.SparseConv3d`; arguments as for :class:`MaskedConv2d`."""

    dims, dense, sparse = 3, nn.Conv3d, SparseConv3d


class MaskedConvTranspose(MaskedConv, TransposedShape):
    """What masked transposed convolutions have in common.

    Args:
        weight: (in_channels, out_channels / groups, ...), copied.
        mask: the active connections, of the same shape.
        bias: (out_channels,) or None, copied.
        stride, padding, dilation, groups, padding_mode, output_padding: as for the layer of torch.
    """

    def __init__(
        self,
        weight: Tensor,
        mask: Tensor,
        bias: Tensor | None = None,
        *,
        stride: Size = 1,
        padding: Size = 0,
        dilation: Size = 1,
        groups: int = 1,
        padding_mode: str = "zeros",
        output_padding: Size = 0,
    ) -> None:
        MaskedLayer.__init__(self, weight, mask, bias)
        in_channels, out_channels = self._channels(weight, groups)
        kernel = tuple(weight.shape[2:])
        self._set_transposed(
            *(in_channels, out_channels, kernel, stride, padding),
            *(dilation, groups, padding_mode, output_padding),
        )
        self._set_units(groups)

    def forward(self, x: Tensor, output_size: Sequence[int] | None = None) -> Tensor:
        """(N, C, ...), or (C, ...), to the same with ``out_channels``; ``output_size`` as in torch."""
        x = ordinary(x)
        self._check_image(x)
        batch = x if x.dim() == self.dims + 2 else x.unsqueeze(0)
        more = self.output_padding if output_size is None else self._more(x, output_size)
        y: Tensor = _TRANSPOSED[self.dims](
            *(batch, self.effective, self.bias, self.stride, self.padding),
            *(tuple(more), self.groups, self.dilation),
        )
        if (probe := self.probe) is not None and y.requires_grad:

            def show(conv: Convolution, x: Tensor, dy: Tensor) -> None:
                image, _ = self._whole(self._images(x), more)
                probe(conv, self._images(dy), image)

            y = _watch(y, batch.detach().to(self.weight.dtype), self.sizes, show)
        return y if x.dim() == self.dims + 2 else y.squeeze(0)


class MaskedConvTranspose1d(MaskedConvTranspose):
    """The masked version of :class:`rewire.SparseConvTranspose1d`."""

    dims, dense, sparse = 1, nn.ConvTranspose1d, SparseConvTranspose1d


class MaskedConvTranspose2d(MaskedConvTranspose):
    """The masked version of :class:`rewire.SparseConvTranspose2d`."""

    dims, dense, sparse = 2, nn.ConvTranspose2d, SparseConvTranspose2d


def _filled(dense: D, layer: MaskedLayer) -> D:
    weight, bias = dense.weight, dense.bias
    assert isinstance(weight, Tensor)
    with torch.no_grad():
        weight.copy_(torch.where(layer.mask, layer.weight, layer.weight.new_zeros(())))
        if layer.bias is not None and isinstance(bias, Tensor):
            bias.copy_(layer.bias)
    return dense
