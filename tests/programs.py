"""Random programs: a forward pass is a list of steps, which a converted model and its dense twin both take.

A step is the name of an operation and two numbers. The first one says which of the values computed so far
is read (counted from the last one), the second one which variant. A step that does not fit the shape of its
value does nothing, so that every list is a program, and hypothesis may drop any step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from engine_models import Reverse, Square

Step = tuple[str, int, int]
Operation = Callable[["Program", list[Tensor], Tensor, int], Any]
OPERATIONS: dict[str, Operation] = {}


def operation(function: Operation) -> Operation:
    OPERATIONS[function.__name__] = function
    return function


class Halved(torch.autograd.Function):
    """In place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(0.5)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return dy * 0.5


class Mixed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor) -> Any:
        return x + other, x - 2 * other

    @staticmethod
    def backward(ctx: Any, dy: Tensor, dz: Tensor) -> Any:
        return dy + dz, dy - 2 * dz


@torch.jit.script
def _scripted(x: Tensor, scale: float) -> Tensor:
    return torch.relu(x) * scale + x


def _norm(channels: int, kind: int) -> nn.BatchNorm2d:
    kinds: list[dict[str, Any]] = [
        *({}, {}, {"momentum": None}, {"affine": False}),
        *({"track_running_stats": False}, {"eps": 0.1}),
    ]
    options = kinds[kind % 6]
    bn = nn.BatchNorm2d(channels, **options)
    if bn.affine:
        nn.init.normal_(bn.weight)
        nn.init.normal_(bn.bias)
    if bn.running_mean is not None and bn.running_var is not None:
        nn.init.normal_(bn.running_mean)
        nn.init.uniform_(bn.running_var, 0.5, 2)
    return bn


def _conv(i: int, o: int, kind: int) -> nn.Conv2d:
    options: dict[str, Any] = [
        {"kernel_size": 3, "padding": 1},
        {"kernel_size": 3, "padding": 1, "bias": False},
        {"kernel_size": 1},
        {"kernel_size": 3, "padding": "same", "dilation": 2},
        {"kernel_size": 3, "padding": 1, "padding_mode": "reflect"},
        {"kernel_size": (1, 3), "padding": (0, 1), "padding_mode": "circular"},
        {"kernel_size": 3, "padding": 1, "stride": 2},
        {"kernel_size": 1, "stride": (2, 1), "bias": False},
        {"kernel_size": 2, "padding": 1},
    ][kind % 9]
    return nn.Conv2d(i, o, **options)


WIDTHS = (4, 6)
UNITS = {"checkpointed_unit", "unit", "hidden", "residual", "quiet", "hooked", "twice"}


class Program(nn.Module):
    """What runs a list of steps; convert it before."""

    def __init__(self, steps: list[Step], seed: int = 0, outputs: int = 1) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.steps, self.outputs = steps, outputs
        self.convs = nn.ModuleDict()
        self.norms = nn.ModuleDict()
        self.sequences = nn.ModuleDict()
        for name, _, kind in steps:
            for width in WIDTHS:
                other = WIDTHS[(kind // 9 + WIDTHS.index(width)) % 2]
                key = f"{width}_{kind}"
                if name in UNITS or name == "conv":
                    self.convs[key] = _conv(width, other, kind)
                if name in UNITS or name == "norm":
                    self.norms[key] = _norm(width, kind)
                if name == "sequence":
                    self.sequences[key] = self._sequence(width, other, kind)
        self.fc = nn.Linear(WIDTHS[0], WIDTHS[0])
        self.fc2 = nn.Linear(WIDTHS[1], WIDTHS[0])
        self.bn1 = nn.BatchNorm1d(WIDTHS[0])
        self.relu, self.relu_ = nn.ReLU(), nn.ReLU(inplace=True)
        self.seen: list[Tensor] = []
        self.kept: Tensor | None = None

    def _sequence(self, width: int, other: int, kind: int) -> nn.Module:
        c, n = _conv, _norm
        relu = nn.ReLU(inplace=bool(kind % 2))
        return [
            lambda: nn.Sequential(c(width, other, kind), n(other, kind), relu),
            lambda: nn.Sequential(c(width, other, kind), n(other, 0)),
            lambda: nn.Sequential(
                c(width, other, 0), relu, c(other, width, kind), n(width, 1), nn.ReLU()
            ),
            lambda: nn.Sequential(n(width, kind), relu, c(width, other, kind)),
            lambda: nn.Sequential(
                nn.Sequential(c(width, other, 0), n(other, kind), relu),
                nn.MaxPool2d(2, ceil_mode=True),
                c(other, width, 0),
            ),
            lambda: nn.Sequential(
                c(width, other, 0),
                n(other, kind),
                relu,
                nn.MaxPool2d(3, 2, 1),
                nn.Sequential(c(other, other, 0), nn.ReLU()),
            ),
            lambda: nn.Sequential(c(width, other, 0), nn.ReLU(), c(other, width, kind), nn.ReLU()),
            lambda: nn.Sequential(
                c(width, other, 0), n(other, 1), nn.Identity(), nn.ReLU6(), c(other, width, kind)
            ),
        ][kind % 8]()  # type: ignore[no-untyped-call]

    def forward(self, x: Tensor) -> Any:
        values = [x]
        for name, at, kind in self.steps:
            value = values[-1 - at % len(values)]
            found = OPERATIONS[name](self, values, value, kind)
            if found is None:
                continue
            values.extend(found if isinstance(found, (list, tuple)) else [found])
        results = [v for v in values if v is not x][-self.outputs :]
        return results or [x * 1]


def _fits(m: Program, x: Tensor, least: int = 3) -> bool:
    return x.dim() == 4 and x.shape[1] in WIDTHS and min(x.shape[2:]) >= least


def _other(values: list[Tensor], x: Tensor, kind: int) -> Tensor:
    """Another value of the same shape, if there is one."""
    like = [v for v in values if v.shape == x.shape]
    return like[-1 - kind % len(like)] if like else x


@operation
def conv(m: Program, values: list[Tensor], x: Tensor, kind: int) -> Any:
    return m.convs[f"{x.shape[1]}_{kind}"](x) if _fits(m, x) else None


@operation
def norm(m: Program, values: list[Tensor], x: Tensor, kind: int) -> Any:
    return m.norms[f"{x.shape[1]}_{kind}"](x) if _fits(m, x, 1) else None


def _unit(m: Program, x: Tensor, kind: int) -> Tensor:
    y = m.convs[f"{x.shape[1]}_{kind}"](x)
    key = f"{y.shape[1]}_{kind}"
    y = m.norms[key](y)
    return y if kind % 5 == 4 else (m.relu_ if kind % 2 else m.relu)(y)


@operation
def unit(m: Program, values: list[Tensor], x: Tensor, kind: int) -> Any:
    return _unit(m, x, kind) if _fits(m, x) else None


@operation
def sequence(m: Program, values: list[Tensor], x: Tensor, kind: int) -> Any:
    return m.sequences[f"{x.shape[1]}_{kind}"](x) if _fits(m, x) else None


@operation
def twice(m: Program, values: list[Tensor], x: Tensor, kind: int) -> Any:
    if not _fits(m, x) or kind % 9 > 5 or kind // 9 % 2:
        return None
    return _unit(m, _unit(m, x, kind), kind)


@operation
def residual(m: Program, values: list[Tensor], x: Tensor, kind: int) -> Any:
    if not _fits(m, x):
        return None
    y = m.convs[f"{x.shape[1]}_{kind}"](x)
    y = m.norms[f"{y.shape[1]}_{kind}"](y)
    short = _other(values, y, kind)
    if kind % 3 == 0:
        y += short
    elif kind % 3 == 1:
        y = y + short
    else:
        y = torch.add(short, y)
    return (m.relu_ if kind % 2 else m.relu)(y)


@operation
def hidden(m: Program, values: list[Tensor], x: Tensor, kind: int) -> Any:
    """Computed, and dropped."""
    if _fits(m, x):
        y = _unit(m, x, kind)
        if kind % 2:
            del y
            return None
        return y.detach()
    return None


@operation
def quiet(m: Program, values: list[Tensor], x: Tensor, kind: int) -> Any:
    if not _fits(m, x):
        return None
    with [torch.no_grad, lambda: torch.set_grad_enabled(False), torch.enable_grad][kind % 3]():
        y = _unit(m, x, kind)
        if kind % 2:
            return y
    return [y, torch.relu(y)]


@operation
def checkpointed(m: Program, values: list[Tensor], x: Tensor, kind: int) -> Any:
    if not _fits(m, x):
        return None
    return checkpoint(lambda t: _scripted(t, 0.5), x, use_reentrant=bool(kind % 2))


@operation
def checkpointed_unit(m: Program, values: list[Tensor], x: Tensor, kind: int) -> Any:
    if not _fits(m, x):
        return None
    return checkpoint(lambda t: _unit(m, t, kind), x, use_reentrant=bool(kind // 2 % 2))


@operation
def relu(m: Program, values: list[Tensor], x: Tensor, kind: int) -> Any:
    if kind % 4 > 1 and x is values[0]:
        return None
    return [F.relu, m.relu, m.relu_, torch.relu_][kind % 4](x)


@operation
def activation(m: Program, values: list[Tensor], x: Tensor, kind: int) -> Any:
    functions: list[Callable[[Tensor], Tensor]] = [
        *(F.silu, F.gelu, torch.tanh, F.leaky_relu, F.relu6, F.elu, torch.sigmoid),
        lambda t: t.clamp(min=0),
    ]
    return functions[kind % 8](x)


@operation
def in_place(m: Program, values: list[Tensor], x: Tensor, kind: int) -> Any:
    if x is values[0] and x.requires_grad and x.is_leaf:
        return None
    if kind % 7 == 0:
        x.mul_(0.5)
    elif kind % 7 == 1:
        x += 1
    elif kind % 7 == 2:
        x.add_(_other(values, x, kind), alpha=0.5)
    elif kind % 7 == 3:
        x[:, :1] = 0.25
    elif kind % 7 == 4:
        x[:, 1:].mul_(2)
    elif kind % 7 == 5:
        F.leaky_relu_(x, 0.1)
    else:
        with torch.no_grad():
            x.detach().mul_(1.5)
    return None


@operation
def total(m: Program, values: list[Tensor], x: Tensor, kind: int) -> Any:
    y = _other(values, x, kind)
    return [
        *(lambda: x + y, lambda: torch.add(x, y, alpha=2), lambda: x.add(y), lambda: x - y),
        *(lambda: y + x, lambda: sum([x, y]), lambda: torch.add(y, x)),
    ][kind % 7]()


@operation
def product(m: Program, values: list[Tensor], x: Tensor, kind: int) -> Any:
    y = _other(values, x, kind)
    if kind % 3 == 0 and x.dim() == 4:
        return x * x.mean((2, 3), keepdim=True).sigmoid()
    return [lambda: 0, lambda: x * y.tanh(), lambda: torch.mul(x, 0.5)][kind % 3]()


@operation
def joined(m: Program, values: list[Tensor], x: Tensor, kind: int) -> Any:
    y = _other(values, x, kind)
    if x.dim() != 4:
        return None
    width = WIDTHS[kind % 2]
    z = torch.cat([x, y, x], 1)
    return z[:, :width] if z.shape[1] >= width else None


@operation
def parts(m: Program, values: list[Tensor], x: Tensor, kind: int) -> Any:
    if x.dim() != 4 or x.shape[1] % 2:
        return None
    a, b = x.chunk(2, 1) if kind % 2 else x.split(x.shape[1] // 2, 1)
    if kind % 3 == 0:
        a = F.relu(a)
    return torch.cat([b, a], 1)


@operation
def pool(m: Program, values: list[Tensor], x: Tensor, kind: int) -> Any:
    if not _fits(m, x, 4):
        return None
    return [
        lambda: F.max_pool2d(x, 3, 1, 1),
        lambda: F.avg_pool2d(x, 3, 1, 1),
        lambda: F.max_pool2d(x, 2),
        lambda: F.avg_pool2d(x, 2, ceil_mode=True),
        lambda: F.adaptive_avg_pool2d(x, 3),
        lambda: F.adaptive_max_pool2d(x, (3, 4)),
        lambda: F.interpolate(x, scale_factor=2, mode="nearest")[:, :, :6, :6],
        lambda: F.interpolate(x, size=(5, 5), mode="bilinear"),
        lambda: F.max_pool2d(x, 3, 1, 1, return_indices=True)[0],
        lambda: F.avg_pool2d(x, 3, 1, 1, count_include_pad=False),
    ][kind % 10]()  # type: ignore[no-untyped-call]


@operation
def around(m: Program, values: list[Tensor], x: Tensor, kind: int) -> Any:
    if not _fits(m, x, 3):
        return None
    c = x.shape[1]
    return [
        lambda: F.pad(x, (1, 0, 0, 1)),
        lambda: F.pad(x, (1, 1, 1, 1), "reflect"),
        lambda: F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 1, 1))[:, :c],
        lambda: F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 0, 2)) if c == 4 else None,
        lambda: x[:, :, ::2, ::2],
        lambda: x[:, :, 1:, :-1],
        lambda: x.flip(3),
        lambda: F.pad(x, (-1, 1), value=0.5),
        lambda: x.roll(1, 0),
    ][kind % 9]()


@operation
def shaped(m: Program, values: list[Tensor], x: Tensor, kind: int) -> Any:
    if x.dim() != 4 or 0 in x.shape:
        return None
    n, c, h, w = x.shape
    return [
        lambda: x.permute(0, 1, 3, 2),
        lambda: x.reshape(n, -1).view(n, c, h, w) * 1,
        lambda: x.flatten(2).unflatten(2, (h, w)) * 1,
        lambda: (
            x.view(n, c // 2, 2, h, w).transpose(1, 2).reshape(n, c, h, w) if c % 2 == 0 else None
        ),
        lambda: x.contiguous() * 1,
        lambda: x.to(memory_format=torch.channels_last) * 1,
        lambda: x.transpose(2, 3).contiguous().transpose(2, 3) * 1,
        lambda: x.expand(n, c, h, w),
        lambda: x.clone(),
    ][kind % 9]()


@operation
def reduced(m: Program, values: list[Tensor], x: Tensor, kind: int) -> Any:
    if x.dim() != 4 or x.numel() < 2:
        return None
    return [
        lambda: x - x.mean((2, 3), keepdim=True),
        lambda: x - x.mean([-1, -2])[:, :, None, None],
        lambda: x * F.adaptive_avg_pool2d(x, 1),
        lambda: x / (x.std(1, keepdim=True) + 1),
        lambda: x + x.mean(),
        lambda: x - x.amax((2, 3), keepdim=True),
        lambda: x + F.avg_pool2d(x, tuple(x.shape[2:])),
    ][kind % 7]()


@operation
def linear(m: Program, values: list[Tensor], x: Tensor, kind: int) -> Any:
    if not _fits(m, x, 1):
        return None
    fc = m.fc if x.shape[1] == WIDTHS[0] else m.fc2
    if kind % 3 == 0:
        return fc(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    y = F.relu(fc(x.mean((2, 3)))) if kind % 3 == 1 else m.bn1(fc(x.mean((2, 3)))).relu_()
    return m.bn1(m.fc(y))[:, :, None, None].expand(-1, -1, *x.shape[2:])


@operation
def dropped(m: Program, values: list[Tensor], x: Tensor, kind: int) -> Any:
    return F.dropout(x, 0.0, m.training, inplace=bool(kind % 2) and x is not values[0]) * 1


@operation
def opaque(m: Program, values: list[Tensor], x: Tensor, kind: int) -> Any:
    if kind % 6 == 3 and x is values[0]:
        return None
    if kind % 6 == 5:
        return list(Mixed.apply(x, _other(values, x, kind)))
    functions: list[Callable[[Tensor], Tensor]] = [
        *(Reverse.apply, Square.apply, lambda t: _scripted(t, 0.5), Halved.apply),
        lambda t: Reverse.apply(t) + t,
    ]
    return functions[kind % 6](x)


@operation
def detached(m: Program, values: list[Tensor], x: Tensor, kind: int) -> Any:
    # A copy: PyTorch does not count changes in place through ``.data``, and nobody notices them.
    return [lambda: x.detach(), lambda: x.detach() * 2 - x, lambda: x.data.clone()][kind % 3]()


@operation
def watched(m: Program, values: list[Tensor], x: Tensor, kind: int) -> Any:
    """A hook of a tensor."""
    if not x.requires_grad:
        return None
    _ = x.grad_fn  # without it torch crashes here, where x is a view of which a part was changed
    if kind % 3 == 0:
        x.register_hook(lambda g: m.seen.append(g.detach().clone()))
    elif kind % 3 == 1:
        x.register_hook(lambda g: g * 0.5)
    elif not x.is_leaf:
        x.retain_grad()
        m.kept = x
    return None


@operation
def hooked(m: Program, values: list[Tensor], x: Tensor, kind: int) -> Any:
    """Hooks of modules, for one call."""
    if not _fits(m, x):
        return None
    c = m.convs[f"{x.shape[1]}_{kind}"]
    n = m.norms[f"{c.out_channels}_{kind}"]
    which = n if kind % 2 else c
    hooks = [
        lambda: which.register_forward_hook(lambda mod, a, y: m.seen.append(y.detach().clone())),
        lambda: which.register_forward_hook(lambda mod, a, y: y * 0.5),
        lambda: which.register_forward_pre_hook(lambda mod, a: (a[0] * 0.5,)),
        lambda: which.register_full_backward_hook(
            lambda mod, gi, go: m.seen.append(go[0].detach().clone())
        ),
        lambda: which.register_full_backward_hook(
            lambda mod, gi, go: tuple(None if g is None else g * 2 for g in gi)
        ),
        lambda: which.register_full_backward_pre_hook(lambda mod, go: tuple(g * 2 for g in go)),
        lambda: m.relu.register_forward_hook(
            lambda mod, a, y: m.seen.append(a[0].detach().clone())
        ),
    ]
    handle = hooks[kind % 7]()
    y = F.relu(n(c(x))) if kind % 7 != 6 else m.relu(n(c(x)))
    handle.remove()
    return y


@operation
def compared(m: Program, values: list[Tensor], x: Tensor, kind: int) -> Any:
    """Reads a value in passing."""
    if kind % 3 == 0:
        m.seen.append(x.detach().clone())
    elif kind % 3 == 1:
        float(x.detach().sum())
    elif x.numel():
        return x * (0.5 + (x.detach().flatten()[0] > 0.1))
    return None


@operation
def graph(m: Program, values: list[Tensor], x: Tensor, kind: int) -> Any:
    """A gradient inside the forward pass."""
    if not (torch.is_grad_enabled() and x.requires_grad and values[0].requires_grad):
        return None
    (g,) = torch.autograd.grad(
        *(x.square().sum(), values[0]),
        retain_graph=True,
        create_graph=bool(kind % 2),
        allow_unused=True,
    )
    if g is None:
        return None
    m.seen.append(g.detach().clone())
    return g if kind % 2 else None


@operation
def dropped_references(m: Program, values: list[Tensor], x: Tensor, kind: int) -> Any:
    """Values that nobody will read again."""
    keep = kind % 2
    values[1:-1] = values[1:-1][-keep:] if keep else []
    return None
