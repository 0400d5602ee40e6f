"""Transposed convolutions in one and two dimensions that hold only their active connections."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rewire.connections import Connections
from rewire.engine import layers
from rewire.engine.lazy import ordinary
from rewire.nn import tracing
from rewire.nn.conv import SparseConv
from rewire.nn.shape import ConvShape, Size, per_dim
from rewire.ops.transposed import conv_transpose2d


class TransposedShape(ConvShape):
    """The sizes of a transposed convolution: the convolution whose input gradient it is goes from its
    output channels back to its input channels, which are the rows of the dense weight."""

    arguments: ClassVar[tuple[str, ...]] = (*ConvShape.arguments, "output_padding")

    def _set_transposed(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size,
        padding: Size,
        dilation: Size,
        groups: int,
        padding_mode: str,
        output_padding: Size,
    ) -> None:
        if padding_mode != "zeros":
            raise ValueError(
                f"transposed convolutions pad with zeros alone, got padding_mode={padding_mode!r}"
            )
        per_dim(padding, self.dims, "padding", 0)  # no words
        self._set_shape(
            *(in_channels, out_channels, kernel_size, stride, padding),
            *(dilation, groups, padding_mode),
        )
        self.output_padding = per_dim(output_padding, self.dims, "output_padding", 0)
        largest = [max(s, d) for s, d in zip(self.stride, self.dilation, strict=True)]
        if any(more >= most for more, most in zip(self.output_padding, largest, strict=True)):
            raise ValueError(
                f"output_padding must be smaller than either stride {self.stride} or dilation "
                f"{self.dilation}, got {self.output_padding}"
            )

    @classmethod
    def _sides(cls, rows: int, others: int) -> tuple[int, int]:
        return rows, others

    def _whole(
        self, image: Tensor, more: Sequence[int] | None = None
    ) -> tuple[Tensor, tuple[int, int]]:
        """The input as the convolution's output would be, and the size of the output.

        What the output has behind its last row that is a stride or more belongs to zeros behind the
        input's.
        """
        size, zeros = [], []
        given = (0, *(self.output_padding if more is None else more))[-2:]
        for axis, extra in enumerate(given):
            step, reach = self.sizes.stride[axis], self.sizes.dilation[axis]
            reach *= self.sizes.kernel[axis] - 1
            zeros.append(extra // step)
            length = (image.shape[2 + axis] - 1) * step - 2 * self.sizes.padding[axis] + reach
            size.append(length + extra + 1)
        if min(size) < 1:
            raise ValueError(
                f"an image of {image.shape[2]} x {image.shape[3]} has an output of {size[0]} x {size[1]}: "
                "it is smaller than its padding"
            )
        image = F.pad(image, (0, zeros[1], 0, zeros[0])) if any(zeros) else image
        return image, (size[0], size[1])

    def _more(self, x: Tensor, output_size: Sequence[int]) -> list[int]:
        """The output padding that leads to an output of this size."""
        wanted, found = list(output_size)[-self.dims :], []
        if len(output_size) not in (self.dims, x.dim()):
            raise ValueError(
                f"output_size must have {self.dims} or {x.dim()} elements, got {len(output_size)}"
            )
        for axis, length in enumerate(wanted):
            step, reach = self.stride[axis], self.dilation[axis] * (self.kernel_size[axis] - 1)
            padding = per_dim(self.padding, self.dims, "padding", 0)[axis]
            least = (x.shape[axis - self.dims] - 1) * step - 2 * padding + reach + 1
            if not least <= length <= least + step - 1:
                raise ValueError(
                    f"output_size {tuple(output_size)} is out of reach: dimension {axis} can have "
                    f"{least} to {least + step - 1} elements"
                )
            found.append(length - least)
        return found


class SparseConvTranspose(SparseConv, TransposedShape):
    """What sparse transposed convolutions have in common.

    Its connections are numbered as those of the convolution from its output back to its input: an "output
    unit" is an input channel, an "input unit" one tap of an output channel.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        padding: Size = 0,
        output_padding: Size = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: Size = 1,
        padding_mode: str = "zeros",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        sparsity: float | None = None,
        connections: int | Connections | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        self._set_transposed(
            *(in_channels, out_channels, kernel_size, stride, padding),
            *(dilation, groups, padding_mode, output_padding),
        )
        self._begin(bias, sparsity, connections, device, dtype, generator)

    def forward(self, x: Tensor, output_size: Sequence[int] | None = None) -> Tensor:
        """(N, C, ...), or (C, ...), to the same with ``out_channels``; ``output_size`` as in torch."""
        if tracing.is_symbolic(x):
            return tracing.node(self, x, output_size)  # type: ignore[no-any-return]
        layers.by_itself(self, x)
        x = ordinary(x)
        self._check_image(x)
        batched = x.dim() == self.dims + 2
        image = self._images(x if batched else x.unsqueeze(0))
        more = None if output_size is None else self._more(x, output_size)
        image, size = self._whole(image, more)
        y = conv_transpose2d(image, *self.parts, self.sizes, size, probe=self.probe)
        y = y.squeeze(2) if self.dims == 1 else y
        return y if batched else y.squeeze(0)

    @property
    def _biases(self) -> int:
        return self.out_channels

    def _fan_in(self) -> tuple[Tensor, Tensor]:
        """On average over positions: with a stride each sees its share of the taps."""
        channels = self.connections.inputs() % self.out_channels
        count = torch.bincount(channels, minlength=self.out_channels)
        return count / (self.sizes.stride[0] * self.sizes.stride[1]), channels


class SparseConvTranspose1d(SparseConvTranspose):
    """Drop-in for ``nn.ConvTranspose1d``.

    Example:
        >>> layer = SparseConvTranspose1d(32, 16, 4, stride=2, padding=1, sparsity=0.9)
        >>> layer(torch.randn(8, 32, 50)).shape
        torch.Size([8, 16, 100])
    """

    dims: ClassVar[int] = 1
    dense: ClassVar[type[nn.Module]] = nn.ConvTranspose1d


class SparseConvTranspose2d(SparseConvTranspose):
    """Drop-in for ``nn.ConvTranspose2d``; input units are numbered
    ``(kh * KW + kw) * out_channels + output channel``, output units are input channels.

    Args:
        in_channels ... dtype: as for ``nn.ConvTranspose2d``.
        sparsity, connections, generator: as for :class:`rewire.SparseConv2d`.

    Example:
        >>> layer = SparseConvTranspose2d(32, 16, 4, stride=2, padding=1, sparsity=0.9)
        >>> layer(torch.randn(8, 32, 10, 10)).shape
        torch.Size([8, 16, 20, 20])
    """

    dims: ClassVar[int] = 2
    dense: ClassVar[type[nn.Module]] = nn.ConvTranspose2d
