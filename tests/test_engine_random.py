"""Random programs of known and unknown operations do the same with the engine on and off."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rewire
from engine_models import Identity, Reverse, Square, close, loss_of
from rewire.engine import ops, use_engine
from rewire.engine.lazy import LazyTensor

CHANNELS, SIZE = 3, 4


@torch.jit.script
def scripted(x: Tensor) -> Tensor:
    return torch.tanh(x) + x


def _dropout(m: Any, x: Tensor) -> Tensor:
    """With the engine's noise."""
    if type(x) is LazyTensor:
        return F.dropout(x, 0.25)
    return ops.dropout(x, 0.25, int(torch.randint(1 << 62, ())))


def _hooked(m: Any, x: Tensor) -> Tensor:
    if x.requires_grad:
        x.register_hook(lambda g: 2 * g)
    return x


def _control(m: Any, x: Tensor) -> Tensor:
    return x + 1 if float(x.detach().abs().mean()) > 0.7071 else x * 2


def _printed(m: Any, x: Tensor) -> Tensor:
    repr(x)
    return x


def _branch(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = 1 + m.convs[2](F.relu(x)).abs().mean()
    return x / scale


def _reentrant(m: Any, x: Tensor) -> Tensor:
    if not x.requires_grad or not torch.is_grad_enabled():
        return x
    return checkpoint(m.inner, x, use_reentrant=True)


def _kept(m: Any, x: Tensor) -> Tensor:
    m.kept.append(x)
    return x


def _shortcut(m: Any, x: Tensor) -> Tensor:
    y = F.pad(x[:, :, ::2, ::2], (0, 2, 1, 1, 1, 0))
    return y[:, 1:]


def _tokens(m: Any, x: Tensor) -> Tensor:
    """(N, places, channels), as transformers have them."""
    y = x.flatten(2).transpose(1, 2)
    y = y + m.out(F.relu(m.token(m.layer_norm(y))))
    return y.transpose(1, 2).reshape(x.shape)


def _channels_last(m: Any, x: Tensor) -> Tensor:
    """As a ConvNeXt has them; what views share the memory of x may be changed."""
    y = m.out(F.relu(m.token(m.layer_norm(x.permute(0, 2, 3, 1)))))
    return x + y.permute(0, 3, 1, 2)


def _mixed(m: Any, x: Tensor) -> Tensor:
    """Layers on the places of tokens, as an MLP-Mixer has them."""
    y = m.layer_norm(m.out(m.token(x.flatten(2).transpose(-1, -2))))
    y = y + m.places(y.transpose(1, 2)).transpose(1, 2)
    return y.permute(0, 2, 1).view(x.shape)


def _shuffled(x: Tensor) -> Tensor:
    groups = x.reshape(x.shape[0], 2, -1, *x.shape[2:]).transpose(1, 2)
    return groups.contiguous().view(x.shape) if x.shape[0] % 2 else groups.reshape(x.shape)


# Every one takes and gives (N, CHANNELS, SIZE, SIZE).
UNARY: dict[str, Any] = {
    "conv0": lambda m, x: m.convs[0](x),
    "conv1": lambda m, x: m.convs[1](x),
    "norm0": lambda m, x: m.norms[0](x),
    "norm1": lambda m, x: m.norms[1](x),
    "layer": lambda m, x: F.relu(m.norms[1](m.convs[1](x))),
    "relu": lambda m, x: F.relu(x),
    "pool": lambda m, x: F.max_pool2d(x, 3, 1, 1),
    "average": lambda m, x: F.avg_pool2d(x, 3, 1, 1),
    "mean": lambda m, x: x + x.mean((2, 3), keepdim=True),
    "slice": lambda m, x: F.pad(x[:, :, ::2, ::2], (1, 1, 0, 2)),
    "shortcut": _shortcut,
    "linear": lambda m, x: m.linear(x.flatten(1)).reshape(x.shape),
    "adaptive": lambda m, x: x + F.adaptive_avg_pool2d(x, 1),
    "dropout": _dropout,
    "silu": lambda m, x: F.silu(x),
    "cat": lambda m, x: torch.cat(x.chunk(3, 1)[::-1], 1),
    "mul": lambda m, x: x * 0.5,
    "pool up": lambda m, x: F.interpolate(F.max_pool2d(x, 2, 2, 0, 1, True), x.shape[2:]),
    "resize": lambda m, x: F.interpolate(
        F.adaptive_avg_pool2d(x, 3), x.shape[2:], mode="bilinear", align_corners=True
    ),
    "reflect": lambda m, x: F.avg_pool2d(F.pad(x, (1, 1, 1, 1), mode="reflect"), 3, 1),
    "moved": lambda m, x: F.pad(x, (-1, 1, 1, -1)),
    "group norm": lambda m, x: m.group_norm(x),
    "instance norm": lambda m, x: F.silu(F.instance_norm(x)),
    "shuffle": lambda m, x: _shuffled(torch.cat([x, F.relu(x)], 1))[:, :CHANNELS],
    "channels": lambda m, x: F.channel_shuffle(x, CHANNELS) + x.contiguous(),
    "flip": lambda m, x: torch.flip(x, (2, 3)),
    "narrow": lambda m, x: torch.cat([x[:, 1:], torch.narrow(x, 1, 0, 1)], 1),
    "split": lambda m, x: torch.cat([F.relu(part) for part in x.split(2, 1)], 1),
    "depthwise": lambda m, x: m.depthwise(x),
    "one minus": lambda m, x: 1 - x / 2,
    "gelu": lambda m, x: F.gelu(x, approximate="tanh"),
    "gate": lambda m, x: x * torch.sigmoid(x.mean((2, 3), keepdim=True)),
    "gate of norm": lambda m, x: F.hardswish(m.norms[0](x)) * m.norms[0].weight[:, None, None],
    "unknown": lambda m, x: torch.sin(x),
    "clip": lambda m, x: F.relu6(x),
    "swish": lambda m, x: x * x.sigmoid(),
    "tokens": _tokens,
    "channels last": _channels_last,
    "mixed": _mixed,
    "rows": lambda m, x: F.rms_norm(m.rows(x), (SIZE,), eps=1e-3) + x,
    "heads": lambda m, x: m.token(x.transpose(1, 3)).permute(0, 3, 2, 1)[:, :CHANNELS],
    "function": lambda m, x: Reverse.apply(x),
    "identity": lambda m, x: Identity.apply(x),
    "square": lambda m, x: Square.apply(torch.tanh(x)),
    "square of it": lambda m, x: 0.1 * Square.apply(x),
    "script": lambda m, x: scripted(x),
    "hook": _hooked,
    "control": _control,
    "print": _printed,
    "no_grad": _branch,
    "detach": lambda m, x: x + x.detach(),
    "reentrant": _reentrant,
    "checkpoint": lambda m, x: checkpoint(m.inner, x, use_reentrant=False),
    "nested": lambda m, x: m.inner(x),
    "kept": _kept,
    "clone": lambda m, x: x.clone(),
    "view": lambda m, x: x.reshape(x.shape[0], -1).reshape(x.shape),
}
IN_PLACE: dict[str, Any] = {
    "relu_": lambda m, x: F.relu(x, inplace=True),
    "mul_": lambda m, x: x.mul_(0.5),
    "moved_": lambda m, x: x.permute(0, 2, 3, 1).relu_().permute(0, 3, 1, 2),
    "half_": lambda m, x: _write(x),
}


def _write(x: Tensor) -> Tensor:
    x[:, :, ::2, ::2] += 1
    return x


BINARY: dict[str, Any] = {
    "add": lambda m, x, y: x + y,
    "product": lambda m, x, y: torch.tanh(x) * torch.tanh(y),
    "add_": lambda m, x, y: _added(m.convs[0](x), y),
    "linked": lambda m, x, y: Reverse.apply(x) + y,
}


def _added(x: Tensor, y: Tensor) -> Tensor:
    x += y
    return x


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = (
            nn.Conv2d(CHANNELS, CHANNELS, 1),
            nn.BatchNorm2d(CHANNELS, momentum=0.0),
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x))) + x


class Program(nn.Module):
    """A list of (operation, operands, what becomes of it); operands count from the end of the values."""

    def __init__(self, steps: list[tuple[str, int, int, bool]]) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(CHANNELS) for _ in range(2))
        self.linear = nn.Linear(CHANNELS * SIZE * SIZE, CHANNELS * SIZE * SIZE)
        self.depthwise = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, groups=CHANNELS)
        self.inner = Inner()
        self.token, self.out = nn.Linear(CHANNELS, 5), nn.Linear(5, CHANNELS)
        self.places, self.rows = nn.Linear(SIZE * SIZE, SIZE * SIZE), nn.Linear(SIZE, SIZE)
        self.layer_norm, self.group_norm = nn.LayerNorm(CHANNELS), nn.GroupNorm(1, CHANNELS)
        self.steps, self.kept = steps, []

    def forward(self, x: Tensor) -> Any:
        self.kept = []
        values = [self.convs[0](x)]
        for name, a, b, forget in self.steps:
            x, y = values[-1 - a % len(values)], values[-1 - b % len(values)]
            if name in IN_PLACE:
                # Of something that nobody has read, so that the twin may do it, too.
                new = IN_PLACE[name](self, self.convs[1](x) + y)
            else:
                new = UNARY[name](self, x) if name in UNARY else BINARY[name](self, x, y)
            del x, y
            if forget and len(values) > 1:
                values.pop()
            values.append(new)
        return values[-1], values[:-1] if len(self.steps) % 2 else None


def _run(model: nn.Module, x: Tensor, grad: bool) -> list[Any]:
    torch.manual_seed(5)
    x = x.clone().requires_grad_()
    with torch.set_grad_enabled(grad):
        outputs, others = model(x)
    everything = [outputs, *(others or []), *model.kept]
    found: list[Any] = [t.detach().clone() for t in everything]
    if grad:
        places = [t for t in everything if t.requires_grad]
        loss = loss_of([outputs, *model.kept])
        if loss.requires_grad:
            for place in places:
                place.retain_grad()
            loss.backward()
            found += [place.grad for place in places]
        found += [x.grad, *(p.grad for p in model.parameters())]
    return [*found, *(b.clone() for b in model.buffers() if b.is_floating_point())]


steps = st.lists(
    st.tuples(
        st.sampled_from([*UNARY, *IN_PLACE, *BINARY]),
        st.integers(0, 3),
        st.integers(0, 3),
        st.booleans(),
    ),
    min_size=1,
    max_size=10,
)


def check(program: list[tuple[str, int, int, bool]], training: bool, grad: bool, seed: int) -> None:
    torch.manual_seed(seed)
    on = rewire.sparsify(Program(program).double(), 0.5, keep_dense="depthwise").train(training)
    off = copy.deepcopy(on)
    use_engine(off, False)
    x = torch.randn(4, CHANNELS, SIZE, SIZE, dtype=torch.float64)
    for _ in range(2):
        try:
            expected = _run(off, x, grad)
        except RuntimeError as error:
            # A program that torch refuses is right or refused here.
            assert "inplace" in str(error) or "in-place" in str(error)  # noqa: PT017
            return
        result = _run(on, x, grad)
        assert len(result) == len(expected)
        for a, b in zip(result, expected, strict=True):
            close(a, b)
        for model in (on, off):
            model.zero_grad()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(steps, st.booleans(), st.booleans(), st.integers(0, 99))
def test_random_programs(
    program: list[tuple[str, int, int, bool]], training: bool, grad: bool, seed: int
) -> None:
    check(program, training, grad, seed)


@pytest.mark.slow
@settings(max_examples=5000, deadline=None)
@given(steps, st.booleans(), st.booleans(), st.integers(0, 99))
def test_many_random_programs(
    program: list[tuple[str, int, int, bool]], training: bool, grad: bool, seed: int
) -> None:
    check(program, training, grad, seed)
