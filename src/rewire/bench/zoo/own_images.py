"""Our own definitions of common convolutional networks, for machines without the libraries they come from.

Each computes what torchvision's or timm's model of that name does; parameters are in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rewire.bench.zoo.public import CLASSES

Make = Callable[[], nn.Module]


def unit(
    n_in: int,
    n_out: int,
    kernel: int = 1,
    stride: int = 1,
    groups: int = 1,
    act: Make | None = nn.ReLU,
) -> nn.Sequential:
    """Convolution, batch norm, activation."""
    conv = nn.Conv2d(n_in, n_out, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(n_out), *([act()] if act else []))


class StochasticDepth(nn.Module):
    """Drops whole samples in training."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.p:
            return x
        shape = [x.shape[0]] + [1] * (x.dim() - 1)
        return x * torch.empty(shape, dtype=x.dtype).bernoulli_(1 - self.p).div_(1 - self.p)


class Squeeze(nn.Module):
    """Squeeze-and-excitation: channels are scaled by a function of their means."""

    def __init__(self, channels: int, squeezed: int, act: Make) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Conv2d(channels, squeezed, 1), nn.Conv2d(squeezed, channels, 1)
        self.act = act()

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.fc1(F.adaptive_avg_pool2d(x, 1)))
        return x * torch.sigmoid(self.fc2(y))


class Residual(nn.Module):
    """``act(body(x) + shortcut(x))``."""

    def __init__(
        self, body: nn.Module, shortcut: nn.Module | None = None, act: bool = False
    ) -> None:
        super().__init__()
        self.body, self.shortcut, self.act = body, shortcut, act

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x) + (x if self.shortcut is None else self.shortcut(x))
        return F.relu(y) if self.act else y


def _head(channels: int, dropout: float = 0.0) -> list[nn.Module]:
    drop = [nn.Dropout(dropout)] if dropout else []
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), *drop, nn.Linear(channels, CLASSES)]


def resnet18(size: int) -> nn.Module:
    parts: list[nn.Module] = [*unit(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)]
    n_in = 64
    for n_out in (64, 64, 128, 128, 256, 256, 512, 512):
        stride = 1 if n_in == n_out else 2
        body = nn.Sequential(*unit(n_in, n_out, 3, stride), *unit(n_out, n_out, 3, act=None))
        shortcut = None if n_in == n_out else unit(n_in, n_out, 1, stride, act=None)
        parts.append(Residual(body, shortcut, act=True))
        n_in = n_out
    return nn.Sequential(*parts, *_head(n_in))


def resnet26d(size: int) -> nn.Module:
    stem = (*unit(3, 32, 3, 2), *unit(32, 32, 3), *unit(32, 64, 3))
    parts: list[nn.Module] = [*stem, nn.MaxPool2d(3, 2, 1)]
    n_in = 64
    for n_mid in (64, 64, 128, 128, 256, 256, 512, 512):
        n_out = 4 * n_mid
        stride = 2 if n_in != n_out and n_mid > 64 else 1
        units = (unit(n_in, n_mid), unit(n_mid, n_mid, 3, stride), unit(n_mid, n_out, act=None))
        shortcut = None
        if n_in != n_out:
            pool = [nn.AvgPool2d(2, 2, ceil_mode=True, count_include_pad=False)] * (stride > 1)
            shortcut = nn.Sequential(*pool, *unit(n_in, n_out, act=None))
        parts.append(Residual(nn.Sequential(*units), shortcut, act=True))
        n_in = n_out
    return nn.Sequential(*parts, *_head(n_in))


class _DenseLayer(nn.Sequential):
    """Adds 32 channels to those it gets."""

    def __init__(self, n_in: int) -> None:
        first = (nn.BatchNorm2d(n_in), nn.ReLU(), nn.Conv2d(n_in, 128, 1, bias=False))
        second = (nn.BatchNorm2d(128), nn.ReLU(), nn.Conv2d(128, 32, 3, padding=1, bias=False))
        super().__init__(*first, *second)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, super().forward(x)], 1)  # type: ignore[no-untyped-call]


def densenet121(size: int) -> nn.Module:
    parts: list[nn.Module] = [*unit(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)]
    channels = 64
    for layers in (6, 12, 24, 16):
        if channels > 64:
            norm = (nn.BatchNorm2d(channels), nn.ReLU())
            parts += [*norm, nn.Conv2d(channels, channels // 2, 1, bias=False), nn.AvgPool2d(2)]
            channels //= 2
        for _ in range(layers):
            parts.append(_DenseLayer(channels))
            channels += 32
    return nn.Sequential(*parts, nn.BatchNorm2d(channels), nn.ReLU(), *_head(channels))


def mobilenet_v2(size: int) -> nn.Module:
    parts: list[nn.Module] = [*unit(3, 32, 3, 2, act=nn.ReLU6)]
    n_in = 32
    for expansion, n_out, count, first in (
        *((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2)),
        *((6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)),
    ):
        for index in range(count):
            n_mid, stride = expansion * n_in, 1 if index else first
            wider = unit(n_in, n_mid, act=nn.ReLU6) if expansion > 1 else ()
            depthwise = unit(n_mid, n_mid, 3, stride, n_mid, nn.ReLU6)
            body = nn.Sequential(*wider, *depthwise, *unit(n_mid, n_out, act=None))
            parts.append(Residual(body) if stride == 1 and n_in == n_out else body)
            n_in = n_out
    return nn.Sequential(*parts, *unit(n_in, 1280, act=nn.ReLU6), *_head(1280, dropout=0.2))


def efficientnet_b0(size: int) -> nn.Module:
    parts: list[nn.Module] = [*unit(3, 32, 3, 2, act=nn.SiLU)]
    n_in, done = 32, 0
    for expansion, kernel, first, n_out, count in (
        *((1, 3, 1, 16, 1), (6, 3, 2, 24, 2), (6, 5, 2, 40, 2), (6, 3, 2, 80, 3)),
        *((6, 5, 1, 112, 3), (6, 5, 2, 192, 4), (6, 3, 1, 320, 1)),
    ):
        for index in range(count):
            n_mid, stride = expansion * n_in, 1 if index else first
            wider = unit(n_in, n_mid, act=nn.SiLU) if expansion > 1 else ()
            depthwise = unit(n_mid, n_mid, kernel, stride, n_mid, nn.SiLU)
            squeeze = Squeeze(n_mid, max(1, n_in // 4), nn.SiLU)
            body = nn.Sequential(*wider, *depthwise, squeeze, *unit(n_mid, n_out, act=None))
            if stride == 1 and n_in == n_out:
                parts.append(Residual(body.append(StochasticDepth(0.2 * done / 16))))
            else:
                parts.append(body)
            n_in, done = n_out, done + 1
    return nn.Sequential(*parts, *unit(n_in, 1280, act=nn.SiLU), *_head(1280, dropout=0.2))


class Permute(nn.Module):
    """Another order of the dimensions."""

    def __init__(self, *order: int) -> None:
        super().__init__()
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        return x.permute(self.order)


def _channel_norm(channels: int) -> tuple[nn.Module, ...]:
    """Layer norm over the channels of images."""
    return Permute(0, 2, 3, 1), nn.LayerNorm(channels, eps=1e-6), Permute(0, 3, 1, 2)


class _ConvNeXtBlock(nn.Module):
    def __init__(self, channels: int, drop: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((channels, 1, 1), 1e-6))
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 7, padding=3, groups=channels),
            *(Permute(0, 2, 3, 1), nn.LayerNorm(channels, eps=1e-6)),
            *(nn.Linear(channels, 4 * channels), nn.GELU(), nn.Linear(4 * channels, channels)),
            Permute(0, 3, 1, 2),
        )
        self.drop = StochasticDepth(drop)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.drop(self.scale * self.body(x))
        return y


def convnext_tiny(size: int) -> nn.Module:
    parts: list[nn.Module] = [nn.Conv2d(3, 96, 4, 4), *_channel_norm(96)]
    n_in, done = 96, 0
    for n_out, count in ((96, 3), (192, 3), (384, 9), (768, 3)):
        if n_in != n_out:
            parts += [*_channel_norm(n_in), nn.Conv2d(n_in, n_out, 2, 2)]
        for _ in range(count):
            parts.append(_ConvNeXtBlock(n_out, 0.1 * done / 17))
            done += 1
        n_in = n_out
    head = (nn.AdaptiveAvgPool2d(1), *_channel_norm(n_in), nn.Flatten())
    return nn.Sequential(*parts, *head, nn.Linear(n_in, CLASSES))


class _Fire(nn.Module):
    def __init__(self, n_in: int, squeezed: int, expanded: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(n_in, squeezed, 1)
        self.expand1 = nn.Conv2d(squeezed, expanded, 1)
        self.expand3 = nn.Conv2d(squeezed, expanded, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.squeeze(x))
        return torch.cat([F.relu(self.expand1(x)), F.relu(self.expand3(x))], 1)


def squeezenet1_1(size: int) -> nn.Module:
    def pool() -> nn.Module:
        return nn.MaxPool2d(3, 2, ceil_mode=True)

    return nn.Sequential(
        *(nn.Conv2d(3, 64, 3, 2), nn.ReLU(), pool()),
        *(_Fire(64, 16, 64), _Fire(128, 16, 64), pool(), _Fire(128, 32, 128), _Fire(256, 32, 128)),
        *(
            pool(),
            _Fire(256, 48, 192),
            _Fire(384, 48, 192),
            _Fire(384, 64, 256),
            _Fire(512, 64, 256),
        ),
        *(nn.Dropout(0.5), nn.Conv2d(512, CLASSES, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1)),
        nn.Flatten(),
    )


class _RegNetBlock(nn.Module):
    def __init__(self, n_in: int, n_out: int, stride: int) -> None:
        super().__init__()
        changes = n_in != n_out or stride > 1
        self.shortcut = unit(n_in, n_out, 1, stride, act=None) if changes else nn.Identity()
        middle = unit(n_out, n_out, 3, stride, n_out // 8)
        squeeze = Squeeze(n_out, math.floor(n_in / 4 + 0.5), nn.ReLU)
        self.body = nn.Sequential(unit(n_in, n_out), middle, squeeze, unit(n_out, n_out, act=None))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.shortcut(x) + self.body(x))


def regnet_y_400mf(size: int) -> nn.Module:
    parts: list[nn.Module] = [*unit(3, 32, 3, 2)]
    n_in = 32
    stages: Sequence[tuple[int, int]] = ((48, 1), (104, 3), (208, 6), (440, 6))
    for n_out, count in stages:
        for index in range(count):
            parts.append(_RegNetBlock(n_in, n_out, 1 if index else 2))
            n_in = n_out
    return nn.Sequential(*parts, *_head(n_in))
