"""Masked twins of the sparse layers: a dense weight and a mask, on any device.

They compute what sparse layers with the same connections compute, and rewirers treat them alike. A dense
weight costs the memory and time of a dense layer: they are for devices without sparse kernels, and for
methods that need dense weights.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rewire.connections import Connections
from rewire.engine import private
from rewire.engine.lazy import ordinary
from rewire.engine.run import Probe
from rewire.nn.conv import ConvShape, SparseConv2d, flatten, unflatten
from rewire.nn.layer import ConnectedLayer
from rewire.nn.linear import SparseLinear
from rewire.ops.eager import refuse_second_derivatives
from rewire.ops.reference import LINEAR, Convolution


class MaskedLayer(ConnectedLayer):
    """A layer that stores a dense weight, of which the active connections count.

    Attributes:
        weight: dense parameter, as torch shapes it.
        mask: bool buffer of the same shape: the active connections.
        reach: bool tensor of the same shape, the connections that get gradients, if these are more than
            the active ones; else None. It is not saved.
    """

    holds: ClassVar[str] = "weight"
    weight: nn.Parameter
    mask: Tensor
    reach: Tensor | None

    def __init__(self, weight: Tensor, mask: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach().clone())
        if bias is None:
            self.register_parameter("bias", None)
        else:
            self.bias = nn.Parameter(bias.detach().clone())
        # Laid out as the weight is, or results would depend on where the mask came from.
        self.register_buffer("mask", torch.empty_like(self.weight, dtype=torch.bool).copy_(mask))
        self.register_buffer("reach", None, persistent=False)
        self._known: tuple[Tensor, int, Connections] | None = None

    @abstractmethod
    def flat(self, tensor: Tensor) -> Tensor:
        """(out units, in units), of a tensor that is shaped like the weight."""

    @abstractmethod
    def shaped(self, flat: Tensor) -> Tensor:
        """Shaped like the weight, of a tensor of (out units, in units)."""

    @property
    def effective(self) -> Tensor:
        """The weight that counts, with its gradient."""
        zero = self.weight.new_zeros(())
        if self.reach is None:
            return torch.where(self.mask, self.weight, zero)
        hidden = torch.where(self.reach & ~self.mask, self.weight.detach(), zero)
        return torch.where(self.reach, self.weight, zero) - hidden

    @property
    def connections(self) -> Connections:
        """The active connections."""
        mask = self.mask
        version = -1 if mask.is_inference() else mask._version
        known = self._known
        if known is None or known[0] is not mask or known[1] != version:
            known = self._known = (mask, version, Connections.from_mask(self.flat(mask)))
        return known[2]

    @property
    def count(self) -> int:
        """How many connections are active."""
        return len(self.connections)

    def has(self, connections: Connections) -> bool:
        """Whether these very connections are still the layer's."""
        return connections is self.connections

    def gather(self, tensor: Tensor) -> Tensor:
        """One element per active connection (1-D), of a tensor that is shaped like the weight."""
        return self.flat(tensor)[self.flat(self.mask)]

    def scatter(self, connections: Connections, values: Tensor, rest: float = 0.0) -> Tensor:
        """A tensor shaped like the weight with these elements, and ``rest`` elsewhere."""
        flat = values.new_full((self.n_out, self.n_in), rest)
        flat[connections.outputs().to(flat.device), connections.inputs().to(flat.device)] = values
        return self.shaped(flat)

    def assign(self, values: Tensor) -> None:
        """Give the active connections these weights; the others become zero."""
        self.weight.data.copy_(self.scatter(self.connections, values.to(self.weight)))

    def set_connections(self, connections: Connections, values: Tensor) -> None:
        """Replace the connections and their weights; the others become zero."""
        values = self._vector(connections, values)
        with torch.no_grad():
            self.mask.copy_(self.scatter(connections, torch.ones_like(values, dtype=torch.bool)))
        self.assign(values.detach())
        self.weight.grad = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_known": None}


class _Watched(torch.autograd.Function):
    """Shows a probe what a layer sees in its backward pass."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, conv: Convolution, probe: Probe) -> Tensor:
        ctx.save_for_backward(x)
        ctx.conv, ctx.probe = conv, probe
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        if torch.is_grad_enabled():
            refuse_second_derivatives()
        ctx.probe(ctx.conv, x, dy.to(x.dtype))
        return dy, None, None, None


def _watched(y: Tensor, x: Tensor, conv: Convolution, probe: Probe) -> Tensor:
    watched: Tensor = _Watched.apply(y, x.detach(), conv, probe)  # type: ignore[no-untyped-call]
    return watched


# A compiled graph cannot hold a probe: it is broken there.
_watch = private.uncompiled(_watched)


class MaskedLinear(MaskedLayer):
    """The masked twin of :class:`rewire.SparseLinear`.

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
        _fill(dense, self)
        return dense

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.bias is not None}, {super().extra_repr()}"


class MaskedConv2d(MaskedLayer, ConvShape):
    """The masked twin of :class:`rewire.SparseConv2d`.

    Args:
        weight: (out_channels, in_channels, kh, kw), copied.
        mask: the active connections, of the same shape.
        bias: (out_channels,) or None, copied.
        stride, padding, dilation, padding_mode: as for ``nn.Conv2d``.
    """

    def __init__(
        self,
        weight: Tensor,
        mask: Tensor,
        bias: Tensor | None = None,
        *,
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] | str = 0,
        dilation: int | tuple[int, int] = 1,
        padding_mode: str = "zeros",
    ) -> None:
        super().__init__(weight, mask, bias)
        n_out, channels, kh, kw = weight.shape
        self._set_shape(channels, n_out, (kh, kw), stride, padding, dilation, 1, padding_mode)
        self.n_in, self.n_out, self.taps = channels * kh * kw, n_out, kh * kw

    def flat(self, tensor: Tensor) -> Tensor:
        """(out, kh * kw * in): tap first, as sparse convolutions number their input units."""
        return flatten(tensor)

    def shaped(self, flat: Tensor) -> Tensor:
        """(out, in, kh, kw)."""
        return unflatten(flat, self.kernel_size).contiguous()

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W), or (C, H, W), to the same with ``out_channels``."""
        x = ordinary(x)
        self._check_image(x)
        image = self._padded(x if x.dim() == 4 else x.unsqueeze(0))
        sizes = self.sizes
        y = F.conv2d(
            *(image, self.effective, self.bias),
            *(sizes.stride, sizes.padding, sizes.dilation),
        )
        if self.probe is not None and y.requires_grad:
            y = _watch(y, image.detach().to(self.weight.dtype), sizes, self.probe)
        return y if x.dim() == 4 else y.squeeze(0)

    @classmethod
    def from_dense(cls, layer: nn.Conv2d, mask: Tensor | None = None) -> MaskedConv2d:
        """With all weights of a dense layer, under a mask (by default of ones)."""
        if layer.groups != 1:
            raise ValueError(f"masked convolutions have groups=1, got {layer.groups}")
        weight = layer.weight.detach()
        mask = torch.ones_like(weight, dtype=torch.bool) if mask is None else mask
        names = ("stride", "padding", "dilation", "padding_mode")
        arguments: dict[str, Any] = {name: getattr(layer, name) for name in names}
        return cls(weight, mask, layer.bias, **arguments)

    @classmethod
    def from_sparse(cls, layer: SparseConv2d) -> MaskedConv2d:
        """With the connections and weights of a sparse layer."""
        flat = torch.zeros((layer.n_out, layer.n_in), dtype=torch.bool, device=layer.values.device)
        connections = layer.connections
        flat[connections.outputs(), connections.inputs()] = True
        return cls.from_dense(layer.to_dense(), unflatten(flat, layer.kernel_size))

    def to_sparse(self) -> SparseConv2d:
        """The sparse layer with the same connections."""
        return SparseConv2d.from_dense(self.to_dense(), self.mask)

    def to_dense(self) -> nn.Conv2d:
        """The equivalent ``nn.Conv2d``; inactive connections become zeros."""
        dense: nn.Conv2d = nn.utils.skip_init(
            nn.Conv2d,
            **self._arguments(),
            bias=self.bias is not None,
            device=self.weight.device,
            dtype=self.weight.dtype,
        )
        _fill(dense, self)
        return dense

    def extra_repr(self) -> str:
        return f"{self._described(self.bias is not None)}, {super().extra_repr()}"


def _fill(dense: nn.Linear | nn.Conv2d, layer: MaskedLayer) -> None:
    with torch.no_grad():
        dense.weight.copy_(torch.where(layer.mask, layer.weight, layer.weight.new_zeros(())))
        if layer.bias is not None and dense.bias is not None:
            dense.bias.copy_(layer.bias)
