"""The sizes of convolutions in one, two and three dimensions, as torch has them and as the kernels do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rewire.connections import Domain
from rewire.ops.reference import Convolution

Size = int | tuple[int, ...]
_WORDS = {1: "one integer", 2: "one or two integers", 3: "one or three integers"}
_AXES = {1: "L", 2: "H, W", 3: "D, H, W"}
_TAPS: dict[int, tuple[int, ...]] = {
    0: (),
    1: (2,),
    2: (2, 3),
    3: (3, 4, 2),
}  # as columns have them


def per_dim(value: Any, dims: int, name: str, least: int) -> tuple[int, ...]:
    """One integer for each dimension; raises unless they are of at least ``least``."""
    found = tuple(value) if isinstance(value, tuple | list) else (value,) * dims
    if len(found) != dims or not all(isinstance(v, int) and v >= least for v in found):
        raise ValueError(f"{name} must be {_WORDS[dims]} of at least {least}, got {value!r}")
    return found


def flatten(weight: Tensor) -> Tensor:
    """A dense weight (out, in, ...) as rows with columns, taps first; see ``Domain``. Of three
    dimensions of a kernel the first comes last."""
    return weight.permute(0, *_TAPS[weight.dim() - 2], 1).flatten(1)


def unflatten(flat: Tensor, kernel: Sequence[int]) -> Tensor:
    """The inverse of :func:`flatten`."""
    taps = _TAPS[len(kernel)]
    found: Tensor = flat.unflatten(1, (*(kernel[axis - 2] for axis in taps), -1))
    return found.permute(0, len(kernel) + 1, *(1 + taps.index(2 + k) for k in range(len(kernel))))


def domain_of(weight: Tensor, groups: int) -> Domain:
    """The possible connections of a convolution with a dense weight."""
    n_out, channels, *kernel = weight.shape
    taps = math.prod(kernel)
    return Domain(channels * taps * groups, n_out, groups, taps)


class ConvShape:
    """The sizes of a convolution, as its dense namesake has them, and as the operators take them.

    The kernels are two-dimensional. One dimension is the width of an image of height one. With three, every
    position of the output in depth is an image of its own, whose channels are the channels of the input at
    each depth that the kernel sees from there.

    Attributes:
        dims: how many dimensions a kernel has.
        dense: the layer of torch that this is a drop-in for.
        in_channels ... padding_mode: as for that one, with one number for each dimension.
        sizes: of the two-dimensional convolution.
    """

    dims: ClassVar[int]
    dense: ClassVar[type[nn.Module]]
    arguments: ClassVar[tuple[str, ...]] = (
        *("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation"),
        *("groups", "padding_mode"),
    )
    sizes: Convolution

    def _set_shape(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size,
        padding: Size | str,
        dilation: Size,
        groups: int,
        padding_mode: str,
    ) -> None:
        if in_channels < 1 or out_channels < 1:
            raise ValueError(f"channels must be positive, got {in_channels} and {out_channels}")
        if groups < 1 or in_channels % groups or out_channels % groups:
            raise ValueError(
                f"groups must divide both numbers of channels, {in_channels} and {out_channels}, "
                f"got {groups}"
            )
        if padding_mode not in ("zeros", "reflect", "replicate", "circular"):
            raise ValueError(f"unknown padding_mode {padding_mode!r}")
        self.in_channels, self.out_channels, self.groups = in_channels, out_channels, groups
        self.kernel_size = per_dim(kernel_size, self.dims, "kernel_size", 1)
        self.stride = per_dim(stride, self.dims, "stride", 1)
        self.dilation = per_dim(dilation, self.dims, "dilation", 1)
        self.padding, self.padding_mode = padding, padding_mode
        around = self._amounts(padding)
        # Padding that the kernels cannot imply is written out before; that of the depth always.
        implied = padding_mode == "zeros" and all(a == b for a, b in around)
        written = [
            (0, 0) if implied and axis > -3 else around[axis] for axis in range(-self.dims, 0)
        ]
        first = [amount for pair in reversed(written) for amount in pair]
        self._pad_first = tuple(first) if any(first) else None
        self._set_sizes(tuple(a for a, _ in around) if implied else (0,) * self.dims)

    def _set_sizes(self, padding: tuple[int, ...]) -> None:
        """Those of height and width, which is 1 where there is but one dimension."""

        def pair(given: tuple[int, ...], missing: int) -> tuple[int, int]:
            height, width = (missing, *given)[-2:]
            return (height, width)

        self.sizes = Convolution(
            pair(self.kernel_size, 1),
            pair(self.stride, 1),
            pair(padding, 0),
            pair(self.dilation, 1),
        )

    def _amounts(self, padding: Size | str) -> list[tuple[int, int]]:
        """Before and after, in each dimension."""
        if isinstance(padding, str):
            if padding == "valid":
                return [(0, 0)] * self.dims
            if padding != "same":
                raise ValueError(f'padding must be numbers, "same" or "valid", got {padding!r}')
            if set(self.stride) != {1}:
                raise ValueError('padding="same" needs stride 1')
            both = [d * (k - 1) for d, k in zip(self.dilation, self.kernel_size, strict=True)]
            return [(total // 2, total - total // 2) for total in both]
        return [(amount, amount) for amount in per_dim(padding, self.dims, "padding", 0)]

    def _check_image(self, x: Tensor) -> None:
        dims = self.dims
        if x.dim() not in (dims + 1, dims + 2) or x.shape[-dims - 1] != self.in_channels:
            raise ValueError(
                f"expected an input of (N, {self.in_channels}, {_AXES[dims]}), got {tuple(x.shape)}"
            )

    def _padded(self, x: Tensor) -> Tensor:
        """A batch with the padding that the sizes do not imply."""
        if self._pad_first is None:
            return x
        mode = "constant" if self.padding_mode == "zeros" else self.padding_mode
        return F.pad(x, self._pad_first, mode=mode)

    def _images(self, x: Tensor) -> Tensor:
        """The images that a padded batch is to the kernels."""
        if self.dims == 1:
            return x.unsqueeze(2)
        return x if self.dims == 2 else self._windows(x).flatten(0, 1)

    def _windows(self, x: Tensor) -> Tensor:
        """(N, depth of the output, depth of the kernel * channels, H, W)."""
        taps, step, apart = self.kernel_size[0], self.stride[0], self.dilation[0]
        last = (self._depth(x) - 1) * step + 1
        seen = [x[:, :, k * apart : k * apart + last : step].transpose(1, 2) for k in range(taps)]
        return torch.stack(seen, 2).flatten(2, 3)

    def _depth(self, x: Tensor) -> int:
        """That of the output of a padded batch of three dimensions."""
        reach = self.dilation[0] * (self.kernel_size[0] - 1) + 1
        if x.shape[2] < reach:
            raise ValueError(
                f"a depth of {x.shape[2]} with its padding is smaller than what a kernel sees, {reach}"
            )
        return (x.shape[2] - reach) // self.stride[0] + 1  # no int(): traced sizes stay variable

    def _outputs_as_images(self, y: Tensor) -> Tensor:
        """What the kernels compute of :meth:`_images`, from a batch of outputs."""
        if self.dims == 1:
            return y.unsqueeze(2)
        return y if self.dims == 2 else y.transpose(1, 2).flatten(0, 1)

    @classmethod
    def arguments_of(cls, layer: Any) -> dict[str, Any]:
        """The sizes of a convolution, dense or not, as arguments."""
        return {name: getattr(layer, name) for name in cls.arguments}

    @classmethod
    def _sides(cls, rows: int, others: int) -> tuple[int, int]:
        """Input and output channels, from those of the rows of a dense weight and the others; or back."""
        return others, rows

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """Shape of the dense layer's weight."""
        rows, others = self._sides(self.in_channels, self.out_channels)
        return (rows, others // self.groups, *self.kernel_size)

    def _empty_dense(self, like: Tensor, bias: bool) -> Any:
        """The dense layer, with memory for its weights."""
        return nn.utils.skip_init(
            self.dense, **self.arguments_of(self), bias=bias, device=like.device, dtype=like.dtype
        )

    def _described(self, bias: bool) -> str:
        parts = [f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}"]
        usual = {"stride": 1, "padding": 0, "output_padding": 0, "dilation": 1, "groups": 1}
        for name in self.arguments[3:]:
            value, default = getattr(self, name), usual.get(name, "zeros")
            if value not in (default, (default,) * self.dims):
                parts.append(f"{name}={value}")
        return ", ".join([*parts, f"bias={bias}"])
