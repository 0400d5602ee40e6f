"""Sequences of sparse layers, batch norms, activations and poolings."""

import copy
from typing import Any

import torch
from torch import nn

from bodies import normal
from rewire import SparseConv2d, SparseLinear


def conv(n_in: int, n_out: int, kernel: int = 3, **options: Any) -> SparseConv2d:
    options = {"padding": kernel // 2, "bias": False} | options
    return SparseConv2d(
        *(n_in, n_out, kernel),
        **options,
        sparsity=0.5,
        generator=torch.Generator().manual_seed(n_in),
    )


def linear(n_in: int, n_out: int) -> SparseLinear:
    return SparseLinear(n_in, n_out, sparsity=0.5, generator=torch.Generator().manual_seed(n_in))


def norm(channels: int, **options: Any) -> nn.BatchNorm2d:
    bn = nn.BatchNorm2d(channels, **options)
    if bn.affine:
        bn.weight.data, bn.bias.data = normal(channels, seed=1), normal(channels, seed=2)
    return bn


SEQUENCES: dict[str, list[nn.Module]] = {
    "vgg": [
        *(conv(3, 6, bias=True), norm(6), nn.ReLU(), conv(6, 6), norm(6), nn.ReLU()),
        *(nn.MaxPool2d(2), conv(6, 8), norm(8), nn.ReLU(), nn.MaxPool2d(2)),
    ],
    "in place": [conv(3, 6), norm(6), nn.ReLU(inplace=True), conv(6, 6), norm(6)],
    "no ReLU": [conv(3, 6), norm(6), conv(6, 6), norm(6), nn.MaxPool2d(3, 1, 1)],
    "another activation": [conv(3, 6), norm(6), nn.SiLU(), conv(6, 6), norm(6), nn.GELU()],
    "strides": [conv(3, 6, stride=2), norm(6), nn.ReLU(), conv(6, 4, 1), norm(4)],
    "no batch norm": [conv(3, 6), nn.ReLU(), conv(6, 6), nn.Sigmoid()],
    "ReLU and pooling": [conv(3, 6), nn.ReLU(), nn.MaxPool2d(2), conv(6, 6), nn.ReLU(True)],
    "ReLUs": [
        *(conv(3, 6, bias=True), nn.ReLU(), conv(6, 8, stride=2, bias=True), nn.ReLU()),
        *(conv(8, 4, bias=True), nn.ReLU(), conv(4, 6, bias=True), norm(6), nn.ReLU()),
    ],
    "classifier": [
        *(conv(3, 6), nn.ReLU(), nn.Flatten(), linear(384, 20), nn.ReLU(inplace=True)),
        *(linear(20, 10), nn.ReLU(), linear(10, 4)),
    ],
    "last dimension": [linear(8, 6), nn.ReLU(), linear(6, 5), nn.ReLU()],
    "batch norm first": [norm(3), nn.ReLU(), conv(3, 6), norm(6), nn.ReLU()],
    "nested": [nn.Sequential(conv(3, 6), norm(6), nn.ReLU()), nn.Sequential(conv(6, 6), norm(6))],
    "not affine": [conv(3, 6), norm(6, affine=False), nn.ReLU(), conv(6, 6)],
    "not tracked": [conv(3, 6), norm(6, track_running_stats=False), nn.ReLU(), conv(6, 6)],
    "another momentum": [conv(3, 6), norm(6, momentum=0.3), nn.ReLU(), conv(6, 6)],
    "mean of all batches": [conv(3, 6), norm(6, momentum=None), nn.ReLU(), conv(6, 6)],
    "rounded up": [conv(3, 6), norm(6), nn.ReLU(), nn.MaxPool2d(4, ceil_mode=True)],
    "spread": [conv(3, 6), norm(6), nn.ReLU(), nn.MaxPool2d(2, dilation=2), conv(6, 3)],
    "padded": [conv(3, 6, padding_mode="circular"), norm(6), nn.ReLU(), conv(6, 3)],
    "alone": [conv(3, 6)],
}


def sequence(name: str) -> nn.Sequential:
    return copy.deepcopy(nn.Sequential(*SEQUENCES[name])).double()
