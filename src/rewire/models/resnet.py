"""Residual networks: the CIFAR ResNets and ResNet-50 for ImageNet.

He, Zhang, Ren, Sun. Deep Residual Learning for Image Recognition. CVPR 2016.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from rewire.models._arguments import check_counts, check_width, scaled


def _conv3x3(n_in: int, n_out: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(n_in, n_out, 3, stride=stride, padding=1, bias=False)


class PaddedShortcut(nn.Module):
    """Shortcut option A: every second pixel, new channels are zero, no weights."""

    def __init__(self, new_channels: int) -> None:
        super().__init__()
        self.before = new_channels // 2
        self.after = new_channels - self.before

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.before, self.after))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut without weights."""

    def __init__(self, n_in: int, n_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _conv3x3(n_in, n_out, stride)
        self.bn1 = nn.BatchNorm2d(n_out)
        self.conv2 = _conv3x3(n_out, n_out)
        self.bn2 = nn.BatchNorm2d(n_out)
        self.shortcut = nn.Identity() if stride == 1 else PaddedShortcut(n_out - n_in)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return F.relu(out + self.shortcut(x))


class CifarResNet(nn.Module):
    """The ResNet for 32x32 images: three stages of basic blocks, ``6*blocks + 2`` layers deep."""

    def __init__(self, blocks: int, num_classes: int, width: float) -> None:
        super().__init__()
        channels = [scaled(base, width) for base in (16, 32, 64)]
        self.conv1 = _conv3x3(3, channels[0])
        self.bn1 = nn.BatchNorm2d(channels[0])
        stages = []
        n_in = channels[0]
        for index, n_out in enumerate(channels):
            first = BasicBlock(n_in, n_out, stride=1 if index == 0 else 2)
            rest = (BasicBlock(n_out, n_out, stride=1) for _ in range(blocks - 1))
            stages.append(nn.Sequential(first, *rest))
            n_in = n_out
        self.stages = nn.Sequential(*stages)
        self.linear = nn.Linear(n_in, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stages(F.relu(self.bn1(self.conv1(x))))
        logits: Tensor = self.linear(x.mean(dim=(2, 3)))
        return logits


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions; the stride is in the 3x3, as torchvision has it."""

    def __init__(self, n_in: int, n_mid: int, stride: int) -> None:
        super().__init__()
        n_out = 4 * n_mid
        self.conv1 = nn.Conv2d(n_in, n_mid, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(n_mid)
        self.conv2 = _conv3x3(n_mid, n_mid, stride)
        self.bn2 = nn.BatchNorm2d(n_mid)
        self.conv3 = nn.Conv2d(n_mid, n_out, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(n_out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or n_in != n_out:
            projection = nn.Conv2d(n_in, n_out, 1, stride=stride, bias=False)
            self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(n_out))

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = F.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        return F.relu(out + self.shortcut(x))


class ImageNetResNet(nn.Module):
    """The ResNet for 224x224 images: four stages of bottleneck blocks."""

    def __init__(self, blocks: tuple[int, int, int, int], num_classes: int, width: float) -> None:
        super().__init__()
        n_in = scaled(64, width)
        self.conv1 = nn.Conv2d(3, n_in, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(n_in)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        stages = []
        for index, depth in enumerate(blocks):
            n_mid = scaled(64 * 2**index, width)
            first = Bottleneck(n_in, n_mid, stride=1 if index == 0 else 2)
            rest = (Bottleneck(4 * n_mid, n_mid, stride=1) for _ in range(depth - 1))
            stages.append(nn.Sequential(first, *rest))
            n_in = 4 * n_mid
        self.stages = nn.Sequential(*stages)
        self.linear = nn.Linear(n_in, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(F.relu(self.bn1(self.conv1(x))))
        x = self.stages(x)
        logits: Tensor = self.linear(x.mean(dim=(2, 3)))
        return logits


def _cifar_resnet(blocks: int, num_classes: int, width: float) -> CifarResNet:
    check_counts(num_classes=num_classes)
    check_width(width)
    return CifarResNet(blocks, num_classes, width)


def resnet20(num_classes: int = 10, width: float = 1.0) -> CifarResNet:
    """The 20-layer CIFAR ResNet, its channels 16-32-64 times ``width``."""
    return _cifar_resnet(3, num_classes, width)


def resnet32(num_classes: int = 10, width: float = 1.0) -> CifarResNet:
    """The 32-layer CIFAR ResNet, its channels 16-32-64 times ``width``."""
    return _cifar_resnet(5, num_classes, width)


def resnet56(num_classes: int = 10, width: float = 1.0) -> CifarResNet:
    """The 56-layer CIFAR ResNet, its channels 16-32-64 times ``width``.

    Example:
        >>> sum(p.numel() for p in resnet56().parameters())
        853018
    """
    return _cifar_resnet(9, num_classes, width)


def resnet110(num_classes: int = 10, width: float = 1.0) -> CifarResNet:
    """The 110-layer CIFAR ResNet, its channels 16-32-64 times ``width``."""
    return _cifar_resnet(18, num_classes, width)


def resnet50(num_classes: int = 1000, width: float = 1.0) -> ImageNetResNet:
    """The 50-layer ImageNet ResNet; ``width`` multiplies every channel count but the input's.

    Example:
        >>> import torch
        >>> with torch.device("meta"):
        ...     model = resnet50()
        >>> sum(p.numel() for p in model.parameters())
        25557032
    """
    check_counts(num_classes=num_classes)
    check_width(width)
    return ImageNetResNet((3, 4, 6, 3), num_classes, width)
