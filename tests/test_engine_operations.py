"""What the engine knows: each operation in a converted model is recorded, and does what it does without."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rewire
from engine_models import close, converted
from rewire import ops

pytestmark = pytest.mark.skipif(not ops.available(), reason="needs the compiled kernels")
CHANNELS, SIZE = 8, (6, 7)


class Around(nn.Module):
    """An operation, or a module, between two sparse layers."""

    def __init__(self, made: Any) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, CHANNELS, 3, padding=1)
        self.between = made if isinstance(made, nn.Module) else Function(made)
        channels = self.between(torch.ones(2, CHANNELS, *SIZE)).shape[1]
        self.head = nn.Conv2d(channels, 4, 1)

    def forward(self, x: Tensor) -> Any:
        y = self.between(self.stem(x))
        return self.head(y) if y.dim() == 4 else y


class Function(nn.Module):
    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


def as_timm(x: Tensor, rate: float = 0.4) -> Tensor:
    """Stochastic depth."""
    kept = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(1 - rate)
    return x * kept.div_(1 - rate)


def as_torchvision(x: Tensor, rate: float = 0.4) -> Tensor:
    noise = torch.empty([x.shape[0], 1, 1, 1], dtype=x.dtype, device=x.device)
    return x * noise.bernoulli_(1 - rate).div_(1 - rate)


def shuffled(x: Tensor, groups: int = 4) -> Tensor:
    batch, channels, height, width = x.shape
    split = x.view(batch, groups, channels // groups, height, width)
    return torch.transpose(split, 1, 2).contiguous().view(batch, channels, height, width)


class Gated(nn.Module):
    """Squeeze-and-excitation and a scale for each channel."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(CHANNELS, 2, 1), nn.Conv2d(2, CHANNELS, 1)
        self.scale = nn.Parameter(torch.rand(CHANNELS, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        gate = self.up(F.silu(self.down(x.mean((2, 3), keepdim=True))))
        return x + x * torch.sigmoid(gate) * self.scale


class ChannelsLast(nn.Module):
    """A ConvNeXt block without its depthwise convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(CHANNELS)
        self.body = nn.Sequential(nn.Linear(CHANNELS, 12), nn.GELU(), nn.Linear(12, CHANNELS))

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(self.norm(x.permute(0, 2, 3, 1)))
        return x + as_timm(y).permute(0, 3, 1, 2)


class Scaled(nn.Module):
    """Tokens as ResMLP and CaiT have them, with a scale of channels and layers on places."""

    def __init__(self, places: int) -> None:
        super().__init__()
        self.one, self.two, self.shift = (nn.Parameter(torch.rand(CHANNELS)) for _ in range(3))
        self.body = nn.Linear(CHANNELS, CHANNELS)
        self.places = nn.Linear(places, places)

    def forward(self, x: Tensor) -> Tensor:
        y = x.flatten(2).transpose(1, 2)
        y = y + self.one * self.body(y)
        z = torch.addcmul(self.shift, self.two, y)
        y = y + self.two * self.places(z.transpose(1, 2)).transpose(1, 2)
        return x + y.transpose(1, 2).reshape(x.shape)


class ScaledLast(nn.Module):
    """A ConvNeXt block that scales its channels while they are last."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.body = nn.Parameter(torch.rand(CHANNELS)), nn.Linear(CHANNELS, CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(F.layer_norm(x.permute(0, 2, 3, 1), (CHANNELS,))) * self.scale
        return x + y.permute(0, 3, 1, 2)


class RowBias(nn.Module):
    """Along the last dimension of images."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.rand(SIZE[1]))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.bias)


class Blurred(nn.Module):
    """A depthwise convolution with weights that are not learnt."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.rand(1, 1, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.expand(CHANNELS, -1, -1, -1)
        return F.conv2d(F.pad(x, (1, 1, 1, 1), "reflect"), weight, stride=2, groups=CHANNELS)


def pre_activation() -> nn.Module:
    return nn.Sequential(nn.BatchNorm2d(CHANNELS), nn.ReLU(), nn.Conv2d(CHANNELS, CHANNELS, 3))


KNOWN: dict[str, Callable[[], Any]] = {
    # Activations
    "relu": lambda: F.relu,
    "relu6": lambda: nn.ReLU6(True),
    "leaky_relu": lambda: nn.LeakyReLU(0.1),
    "silu": lambda: nn.SiLU(),
    "gelu": lambda: nn.GELU(),
    "gelu tanh": lambda: nn.GELU("tanh"),
    "hardswish": lambda: nn.Hardswish(),
    "sigmoid": lambda: torch.sigmoid,
    "tanh": lambda: torch.tanh,
    "elu": lambda: nn.ELU(),
    "selu": lambda: nn.SELU(),
    "softplus": lambda: nn.Softplus(),
    "hardtanh": lambda: nn.Hardtanh(),
    # Sums, products, pieces
    "squeeze and excitation": Gated,
    "concatenation": lambda: lambda x: torch.cat([x, F.relu(x)], 1),
    "chunk": lambda: lambda x: torch.mul(*x.chunk(2, 1)),
    "split": lambda: lambda x: torch.cat(x.split([3, 5], 1)[::-1], 1),
    "flatten": lambda: lambda x: x.flatten(1),
    "clone": lambda: lambda x: x.clone() + x,
    "channel shuffle": lambda: nn.ChannelShuffle(2),
    "channel shuffle by views": lambda: shuffled,
    # Poolings
    "max pool": lambda: nn.MaxPool2d(3, 2, 1),
    "average pool": lambda: nn.AvgPool2d(2, ceil_mode=True, count_include_pad=False),
    "mean": lambda: nn.AdaptiveAvgPool2d(1),
    "adaptive mean": lambda: nn.AdaptiveAvgPool2d((4, 3)),
    "adaptive mean that divides": lambda: nn.AdaptiveAvgPool2d((3, None)),
    "adaptive max": lambda: nn.AdaptiveMaxPool2d((3, 1)),
    # Other sizes
    "nearest": lambda: nn.Upsample(scale_factor=2),
    "nearest exact": lambda: nn.Upsample(scale_factor=1.7, mode="nearest-exact"),
    "bilinear": lambda: nn.Upsample(scale_factor=2.5, mode="bilinear"),
    "bilinear corners": lambda: nn.Upsample((11, 5), mode="bilinear", align_corners=True),
    "bilinear recomputed": lambda: (
        lambda x: F.interpolate(x, scale_factor=1.6, mode="bilinear", recompute_scale_factor=True)
    ),
    "bicubic": lambda: lambda x: F.interpolate(x, (9, 12), mode="bicubic"),
    "area": lambda: lambda x: F.interpolate(x, scale_factor=0.7, mode="area"),
    "pad": lambda: nn.ConstantPad2d((1, 2, 0, 1), 0.5),
    "crop": lambda: nn.ZeroPad2d((-1, 2, 1, -2)),
    "reflect": lambda: nn.ReflectionPad2d((1, 2, 3, 0)),
    "replicate": lambda: nn.ReplicationPad2d(2),
    "circular": lambda: nn.CircularPad2d((1, 0, 2, 3)),
    "blur": Blurred,
    # Noise
    "dropout2d": lambda: nn.Dropout2d(0.3),
    "stochastic depth of timm": lambda: lambda x: x + as_timm(torch.tanh(x)),
    "stochastic depth of torchvision": lambda: lambda x: x + as_torchvision(torch.tanh(x)),
    # Norms
    "batch norm": lambda: nn.BatchNorm2d(CHANNELS),
    "synchronised": lambda: nn.SyncBatchNorm(CHANNELS),
    "pre-activation": pre_activation,
    "group norm": lambda: nn.GroupNorm(4, CHANNELS),
    "group norm of all": lambda: nn.Sequential(nn.GroupNorm(1, CHANNELS), nn.SiLU()),
    "group norm alone": lambda: nn.GroupNorm(2, CHANNELS, affine=False),
    "instance norm": lambda: nn.InstanceNorm2d(CHANNELS),
    "instance norm with weights": lambda: nn.InstanceNorm2d(CHANNELS, affine=True),
    "layer norm over channels": ChannelsLast,
    "scaled tokens": lambda: Scaled(SIZE[0] * SIZE[1]),
    "scaled channels last": ScaledLast,
    "bias of rows": lambda: RowBias(),
}


def compared(on: nn.Module, batch: int) -> rewire.Explanation:
    """What the engine says of a model that does the same without it, in training and evaluation."""
    off = copy.deepcopy(on)
    rewire.use_engine(off, False)
    x = torch.randn(batch, 3, *SIZE, generator=torch.Generator().manual_seed(batch)).double()
    for training in (True, False):
        found = []
        for model in (on.train(training), off.train(training)):
            given = x.clone().requires_grad_()
            model.zero_grad()
            torch.manual_seed(5)
            y = model(given)
            y.backward(torch.linspace(-1, 1, y.numel(), dtype=y.dtype).cos().view(y.shape))
            found.append([y, given.grad, *(p.grad for p in model.parameters())])
        for a, b in zip(*found, strict=True):
            close(a, b)
    return rewire.explain(on.train(), x)


@pytest.mark.parametrize("batch", [1, 3, 64])
@pytest.mark.parametrize("name", KNOWN)
def test_it_is_recorded_and_right(name: str, batch: int) -> None:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # parameters that are no layer's stay dense
        model = converted(Around(KNOWN[name]()))
    explanation = compared(model, batch)
    assert not explanation.stops
    assert len(explanation.regions) == 1


def test_hardsigmoid() -> None:
    """The gradient of torch's own has 1 / 6 as a float has it, also in float64."""
    on = converted(Around(nn.Hardsigmoid())).float()
    x = torch.randn(4, 3, *SIZE)
    assert not rewire.explain(on, x).stops
    off = copy.deepcopy(on)
    rewire.use_engine(off, False)
    grads = [torch.autograd.grad(m(x).square().sum(), m.stem.values)[0] for m in (on, off)]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["BatchNormAct2d", "GroupNormAct", "LayerNorm2d", "DropPath"])
def test_modules_of_timm(name: str) -> None:
    layers = pytest.importorskip("timm.layers")
    made = {
        "BatchNormAct2d": lambda: layers.BatchNormAct2d(CHANNELS, act_layer=nn.SiLU),
        "GroupNormAct": lambda: layers.GroupNormAct(CHANNELS, num_groups=2),
        "LayerNorm2d": lambda: layers.LayerNorm2d(CHANNELS),
        "DropPath": lambda: layers.DropPath(0.4),
    }
    assert not compared(converted(Around(made[name]())), 64).stops


UNKNOWN: dict[str, Callable[[], Any]] = {
    "antialiased": lambda: lambda x: F.interpolate(x, (9, 9), mode="bilinear", antialias=True),
    "adaptive max that does not divide": lambda: nn.AdaptiveMaxPool2d((4, 3)),
    "crop with a value": lambda: nn.ConstantPad2d((-1, 1, 0, 0), 0.5),
    "instance norm that tracks": lambda: nn.InstanceNorm2d(CHANNELS, track_running_stats=True),
    "pixel shuffle": lambda: nn.PixelShuffle(2),
    "group norm of tokens": lambda: lambda x: F.group_norm(x.flatten(2), 2).view(x.shape),
    "groups that are not put together": lambda: (
        lambda x: x.view(x.shape[0], 2, 4, *x.shape[2:]).transpose(1, 2)[:, 1]
    ),
    "groups that are read": lambda: (
        lambda x: x.view(x.shape[0], 2, 4, *x.shape[2:]).transpose(1, 2).sum(1)
    ),
    "groups in other groups": lambda: (
        lambda x: (
            x.view(x.shape[0], 2, 4, *x.shape[2:])
            .transpose(1, 2)
            .reshape(x.shape[0], 4, -1, *x.shape[2:])
            .flatten(1, 2)
        )
    ),
}


@pytest.mark.parametrize("batch", [1, 3, 64])
@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_left_to_torch_is_right_as_well(name: str, batch: int) -> None:
    torch.manual_seed(0)
    compared(converted(Around(UNKNOWN[name]())), batch)


@pytest.mark.parametrize("name", ["nearest", "bilinear", "reflect", "replicate", "crop"])
@pytest.mark.parametrize("autocast", [True, False])
def test_dtypes_are_those_of_torch(name: str, autocast: bool) -> None:
    """Under autocast some paddings are done in float32."""
    between = KNOWN[name]()
    seen: list[Any] = []
    between.register_forward_hook(lambda module, args, y: seen.append((args[0].dtype, y.dtype)))
    model = Around(between)
    sparse = rewire.sparsify(model, 0.5)
    x = torch.randn(2, 3, *SIZE)
    if not autocast:
        sparse, x = sparse.bfloat16(), x.bfloat16()
    seen.clear()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        sparse(x)
        between(torch.zeros(2, CHANNELS, *SIZE, dtype=torch.bfloat16))
    assert seen[0] == seen[1]


def test_wrong_arguments_are_torchs_to_refuse() -> None:
    for wrong, problem in (
        (lambda x: F.interpolate(x, (3, 3), mode="trilinear"), "trilinear|4D|5D"),
        (lambda x: F.interpolate(x, scale_factor=2, align_corners=True), "align_corners"),
        (lambda x: F.pad(x, (9, 9, 0, 0), mode="reflect"), "[Pp]adding size"),
        (lambda x: F.group_norm(x, 3), "divisible"),
        (lambda x: F.channel_shuffle(x, 3), "divisible"),
    ):
        model = converted(Around(nn.Identity()))
        model.between = Function(wrong)
        with pytest.raises((RuntimeError, ValueError, NotImplementedError), match=problem):
            model(torch.randn(2, 3, *SIZE, dtype=torch.float64))


def test_dropout_of_channels_draws_what_torch_draws() -> None:
    model = converted(Around(nn.Identity()))
    x = torch.randn(5, 3, *SIZE, dtype=torch.float64)
    seen = []
    for engine in (True, False):
        rewire.use_engine(model, engine)
        model.between = Function(lambda y: F.dropout2d(torch.ones_like(y) + 0 * y, 0.5))
        torch.manual_seed(2)
        seen.append(model(x))
    close(*seen)
