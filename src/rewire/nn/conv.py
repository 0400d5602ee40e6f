"""A 2-D convolution that holds only its active connections."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rewire import ops
from rewire.connections import Connections
from rewire.engine import layers
from rewire.engine.lazy import ordinary
from rewire.nn.linear import _from_csr
from rewire.nn.sparse import SparseLayer, keep_mask
from rewire.ops.reference import Convolution


def _pair(value: Any, name: str, least: int) -> tuple[int, int]:
    pair = tuple(value) if isinstance(value, tuple | list) else (value, value)
    if len(pair) != 2 or not all(isinstance(v, int) and v >= least for v in pair):
        raise ValueError(f"{name} must be one or two integers of at least {least}, got {value!r}")
    return pair


class ConvShape:
    """The sizes of a 2-D convolution, as ``nn.Conv2d`` has them, and as the operators take them."""

    def _set_shape(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int],
        padding: int | tuple[int, int] | str,
        dilation: int | tuple[int, int],
        groups: int,
        padding_mode: str,
    ) -> None:
        if groups != 1:
            raise ValueError(f"sparse convolutions have groups=1, got {groups}; keep it dense")
        if in_channels < 1 or out_channels < 1:
            raise ValueError(f"channels must be positive, got {in_channels} and {out_channels}")
        if padding_mode not in ("zeros", "reflect", "replicate", "circular"):
            raise ValueError(f"unknown padding_mode {padding_mode!r}")
        self.in_channels, self.out_channels, self.groups = in_channels, out_channels, groups
        self.kernel_size = _pair(kernel_size, "kernel_size", 1)
        self.stride = _pair(stride, "stride", 1)
        self.dilation = _pair(dilation, "dilation", 1)
        self.padding, self.padding_mode = padding, padding_mode
        around = self._amounts(padding)
        # Padding that the kernels cannot imply is written out before.
        implied = padding_mode == "zeros" and around[0] == around[1] and around[2] == around[3]
        self._pad_first = None if implied else around
        self.sizes = Convolution(
            self.kernel_size,
            self.stride,
            (around[2], around[0]) if implied else (0, 0),
            self.dilation,
        )

    def _amounts(self, padding: int | tuple[int, int] | str) -> tuple[int, int, int, int]:
        """Left, right, top, bottom."""
        if isinstance(padding, str):
            if padding == "valid":
                return (0, 0, 0, 0)
            if padding != "same":
                raise ValueError(f'padding must be numbers, "same" or "valid", got {padding!r}')
            if self.stride != (1, 1):
                raise ValueError('padding="same" needs stride 1')
            high, wide = (d * (k - 1) for d, k in zip(self.dilation, self.kernel_size, strict=True))
            return (wide // 2, wide - wide // 2, high // 2, high - high // 2)
        high, wide = _pair(padding, "padding", 0)
        return (wide, wide, high, high)

    def _check_image(self, x: Tensor) -> None:
        if x.dim() not in (3, 4) or x.shape[-3] != self.in_channels:
            raise ValueError(
                f"expected an input of (N, {self.in_channels}, H, W), got {tuple(x.shape)}"
            )

    def _padded(self, image: Tensor) -> Tensor:
        """The image with the padding that the sizes do not imply."""
        if self._pad_first is None:
            return image
        mode = "constant" if self.padding_mode == "zeros" else self.padding_mode
        return F.pad(image, self._pad_first, mode=mode)

    def _arguments(self) -> dict[str, Any]:
        """The arguments of the equivalent ``nn.Conv2d``, but for its bias."""
        names = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation")
        return {name: getattr(self, name) for name in (*names, "padding_mode")}

    def _described(self, bias: bool) -> str:
        parts = [f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}"]
        for name, default in (("stride", (1, 1)), ("padding", 0), ("dilation", (1, 1))):
            if (value := getattr(self, name)) not in (default, (0, 0)):
                parts.append(f"{name}={value}")
        if self.padding_mode != "zeros":
            parts.append(f"padding_mode={self.padding_mode}")
        return ", ".join([*parts, f"bias={bias}"])


class SparseConv2d(SparseLayer, ConvShape):
    """Drop-in for ``nn.Conv2d`` with ``groups=1``.

    An input unit is one tap of one input channel, so a layer has
    ``n_in = in_channels * kh * kw`` and ``n_out = out_channels`` units.

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

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] | str = 0,
        dilation: int | tuple[int, int] = 1,
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
        taps = self.kernel_size[0] * self.kernel_size[1]
        super().__init__(
            *(in_channels * taps, out_channels, taps, bias, sparsity, connections),
            *(device, dtype, generator),
        )

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W), or (C, H, W), to the same with ``out_channels``."""
        if (lazy := layers.conv2d(self, x)) is not NotImplemented:
            return lazy  # type: ignore[no-any-return]
        x = ordinary(x)
        self._check_image(x)
        image = self._padded(x if x.dim() == 4 else x.unsqueeze(0))
        y = ops.conv2d(image, *self.parts, self.sizes, probe=self.probe)
        return y if x.dim() == 4 else y.squeeze(0)

    def extra_repr(self) -> str:
        return f"{self._described(self.bias is not None)}, {super().extra_repr()}"

    @classmethod
    def from_dense(
        cls,
        layer: nn.Conv2d,
        mask: Tensor | None = None,
        *,
        sparsity: float | None = None,
        connections: int | None = None,
    ) -> SparseConv2d:
        """The sparse layer with the weights of ``mask``, or the largest ones, of a dense layer."""
        weight = layer.weight.detach()
        keep = flatten(keep_mask(weight, mask, sparsity, connections))
        chosen = Connections.from_mask(keep)
        new = cls(
            **conv_arguments(layer),
            bias=layer.bias is not None,
            device=weight.device,
            dtype=weight.dtype,
            connections=chosen,
        )
        with torch.no_grad():
            new.assign(flatten(weight)[keep])
            if layer.bias is not None and new.bias is not None:
                new.bias.copy_(layer.bias)
        return new

    def to_dense(self) -> nn.Conv2d:
        """The equivalent ``nn.Conv2d``; inactive connections become zeros."""
        dense: nn.Conv2d = nn.utils.skip_init(
            nn.Conv2d,
            **self._arguments(),
            bias=self.bias is not None,
            device=self.values.device,
            dtype=self.values.dtype,
        )
        connections = self.connections
        flat = self.values.new_zeros((self.n_out, self.n_in))
        with torch.no_grad():
            flat[connections.outputs(), connections.inputs()] = self.values.flatten()
            dense.weight.copy_(unflatten(flat, self.kernel_size))
            if self.bias is not None and dense.bias is not None:
                dense.bias.copy_(self.bias)
        return dense

    def _channel_major(self, units: Tensor) -> Tensor:
        """Our input units (tap first) as positions in ``weight.flatten(1)`` (channel first)."""
        return units % self.in_channels * self.taps + units // self.in_channels

    def to_sparse_csr(self) -> Tensor:
        """The weight as a sparse CSR copy, out x in, columns as in ``weight.flatten(1)``."""
        connections = self.connections
        columns = self._channel_major(connections.inputs())
        order = torch.argsort(connections.outputs() * self.n_in + columns)
        return torch.sparse_csr_tensor(
            self.indptr.long(),
            columns[order],
            self.values.detach().flatten()[order],
            size=(self.n_out, self.n_in),
            check_invariants=False,
        )

    @classmethod
    def from_sparse_csr(
        cls,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] | str = 0,
        dilation: int | tuple[int, int] = 1,
    ) -> SparseConv2d:
        """The layer of a sparse CSR weight, out x in, columns as in ``weight.flatten(1)``."""
        flat, values = _from_csr(weight)
        kh, kw = _pair(kernel_size, "kernel_size", 1)
        taps = kh * kw
        if flat.n_in % taps:
            raise ValueError(f"{flat.n_in} columns are no multiple of the kernel's {taps} taps")
        channels, columns = flat.n_in // taps, flat.inputs()
        keys = flat.outputs() * flat.n_in + columns % taps * channels + columns // taps
        keys, order = keys.sort()
        new = cls(
            *(channels, flat.n_out, (kh, kw), stride, padding, dilation),
            bias=bias is not None,
            device=values.device,
            dtype=values.dtype,
            connections=Connections.from_keys(keys, flat.n_in, flat.n_out),
        )
        with torch.no_grad():
            new.assign(values[order])
            if bias is not None and new.bias is not None:
                new.bias.copy_(bias)
        return new


def conv_arguments(layer: nn.Conv2d) -> dict[str, Any]:
    """The sizes of a dense convolution as arguments."""
    names = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation")
    return {name: getattr(layer, name) for name in (*names, "groups", "padding_mode")}


def flatten(weight: Tensor) -> Tensor:
    """(out, in, kh, kw) as (out, kh * kw * in)."""
    return weight.permute(0, 2, 3, 1).flatten(1)


def unflatten(flat: Tensor, kernel: tuple[int, int]) -> Tensor:
    """(out, kh * kw * in) as (out, in, kh, kw)."""
    taps = kernel[0] * kernel[1]
    return flat.view(flat.shape[0], *kernel, flat.shape[1] // taps).permute(0, 3, 1, 2)
