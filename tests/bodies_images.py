"""Every so many rows and columns of images, as shortcuts of ResNets take them, and means over images."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from bodies import Body, Doubled

CHANNELS = (0, 0, 0, 0, 1, 2)


def _block(m: Any, x: Tensor) -> Tensor:
    return F.relu(m.bn(m.conv(x)))


def _sum(m: Any, x: Tensor) -> Tensor:
    """A rectified residual sum."""
    y = m.conv(x)
    return F.relu(m.bn(m.conv2(y)) + y)


def _half(y: Tensor) -> Tensor:
    return y[:, :, ::2, ::2]


def _shortcut(m: Any, x: Tensor) -> Tensor:
    y = _sum(m, x)
    out = m.bn2(m.conv2(F.max_pool2d(y, 2)))
    return F.relu(F.pad(out, CHANNELS) + F.pad(_half(y), CHANNELS))


def _changed_after(m: Any, x: Tensor) -> Tensor:
    """A view sees what becomes of the whole."""
    y = m.bn(m.conv(x))
    half = _half(y)
    y.mul_(2)
    return half + 1


def _changed_before_padding(m: Any, x: Tensor) -> Tensor:
    y = m.bn(m.conv(x))
    half = _half(y)
    y.mul_(2)
    return F.pad(half, CHANNELS)


def _changed_itself(m: Any, x: Tensor) -> list[Tensor]:
    y = m.bn(m.conv(x))
    half = _half(y)
    half += 1
    return [F.pad(half, CHANNELS), y * 1]


def _padded_then_changed(m: Any, x: Tensor) -> list[Tensor]:
    y = m.bn(m.conv(x))
    half = _half(y)
    padded = F.pad(half, CHANNELS)
    half.add_(1)
    return [padded, half * 1, y * 1]


def _rectified_after(m: Any, x: Tensor) -> list[Tensor]:
    """In place."""
    y = m.bn(m.conv(x))
    half = _half(y)
    F.relu_(y)
    return [F.pad(half, CHANNELS), half * 1]


def _added_after(m: Any, x: Tensor) -> list[Tensor]:
    z = m.conv(x)
    y = m.bn(m.conv2(z))
    half = _half(y)
    y += z
    F.relu_(y)
    return [half * 1, F.pad(half, CHANNELS), y * 1]


def _functions(m: Any, x: Tensor) -> Tensor:
    """Those of a user's own; whole and halves have readers besides."""
    y = m.bn(m.conv(x))
    return Doubled.apply(_half(y)).sum() + Doubled.apply(_half(y)).sum() + m.conv2(y).sum()


def _functions_of_what_is_there(m: Any, x: Tensor) -> Tensor:
    y = _sum(m, x)
    z = m.conv2(y)
    return Doubled.apply(_half(y)).sum() + z.sum()


def _checkpointed(m: Any, x: Tensor) -> Tensor:
    y = _block(m, x)
    half = _half(y)
    doubled = checkpoint(lambda t: t * 2, half, use_reentrant=True)
    assert isinstance(doubled, Tensor)
    return doubled.sum() + m.conv2(y).sum()


def _hooked(m: Any, x: Tensor) -> Tensor:
    half = _half(_block(m, x))
    half.register_hook(lambda gradient: 3 * gradient)
    return F.pad(half, CHANNELS)


def _recorded_later(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        half = _half(_block(m, x))
    return F.pad(half, CHANNELS) + m.conv(x)[:, :1, :1, :1]


IMAGES: dict[str, Body] = {
    "shortcut": _shortcut,
    "half_of_a_layer": lambda m, x: F.pad(_half(m.conv(x)), CHANNELS),
    "half_of_a_norm": lambda m, x: F.pad(_half(m.bn(m.conv(x))), CHANNELS),
    "half_of_a_sum": lambda m, x: F.pad(_half(_sum(m, x)), CHANNELS, value=2.0),
    "half_and_the_next_layer": lambda m, x: (
        lambda y: [F.pad(_half(y), CHANNELS), m.bn2(m.conv2(y))]
    )(_block(m, x)),
    "half_padded_twice": lambda m, x: (
        lambda h: F.pad(h, CHANNELS) + F.pad(h, (0, 0, 0, 0, 2, 1), value=1.0)
    )(_half(_sum(m, x))),
    "half_padded_and_used": lambda m, x: (lambda h: [F.pad(h, CHANNELS), h * 2])(_half(_sum(m, x))),
    "half_used_and_padded": lambda m, x: (lambda h: [h * 2, F.pad(h, CHANNELS)])(_half(_sum(m, x))),
    "half_of_what_was_used": lambda m, x: (lambda y: [y * 2, F.pad(_half(y), CHANNELS)])(
        _sum(m, x)
    ),
    "half_in_one_direction": lambda m, x: F.pad(m.conv(x)[:, :, :, ::2], (0, 0, 0, 0, 0, 3)),
    "third_and_half": lambda m, x: F.pad(_block(m, x)[:, :, ::3, ::2], CHANNELS),
    "nothing_left_out": lambda m, x: F.pad(_block(m, x)[:, :, :, :], CHANNELS),
    "half_of_half": lambda m, x: F.pad(_half(_half(m.conv(x))), CHANNELS),
    "half_padded_around": lambda m, x: F.pad(_half(m.conv(x)), (1, 1, 0, 2, 1, 2)),
    "half_cut": lambda m, x: F.pad(_half(m.conv(x)), (0, 0, 0, 0, -1, 2)),
    "half_reflected": lambda m, x: F.pad(_half(m.conv(x)), (1, 1, 1, 1), mode="reflect"),
    "half_rectified": lambda m, x: F.relu(_half(m.bn(m.conv(x)))),
    "half_rectified_in_place": lambda m, x: (lambda y: [F.relu_(_half(y)), y * 1])(m.bn(m.conv(x))),
    "half_into_a_layer": lambda m, x: m.bn2(m.conv2(_half(_block(m, x)))),
    "half_into_a_norm": lambda m, x: m.bn2(_half(m.conv(x))),
    "half_pooled": lambda m, x: F.max_pool2d(_half(_block(m, x)), 2, 1),
    "half_into_a_function": lambda m, x: Doubled.apply(_half(_block(m, x))),
    "half_detached": lambda m, x: F.pad(_half(_block(m, x)).detach(), CHANNELS) + m.conv(x).sum(),
    "half_returned": lambda m, x: _half(_sum(m, x)),
    "other_half": lambda m, x: F.pad(_block(m, x)[:, :, 1::2, 1::2], CHANNELS),
    "some_channels": lambda m, x: F.pad(_block(m, x)[:, ::2, ::2, ::2], CHANNELS),
    "some_samples": lambda m, x: F.pad(_block(m, x)[::2, :, ::2, ::2], CHANNELS),
    "dots": lambda m, x: F.pad(_block(m, x)[..., ::2, ::2], CHANNELS),
    "half_hooked": _hooked,
    "half_recorded_later": _recorded_later,
    "half_of_a_whole_that_changes": _changed_after,
    "half_padded_of_a_whole_that_changed": _changed_before_padding,
    "half_of_a_whole_that_is_rectified": _rectified_after,
    "half_of_a_whole_that_grows": _added_after,
    "halves_into_functions": _functions,
    "half_of_what_is_there_into_a_function": _functions_of_what_is_there,
    "half_checkpointed": _checkpointed,
    "half_that_changes": _changed_itself,
    "half_that_changes_after_padding": _padded_then_changed,
    "mean_of_a_layer": lambda m, x: m.conv(x).mean((2, 3)),
    "mean_of_a_block": lambda m, x: _block(m, x).mean(dim=(-1, -2), keepdim=True),
    "mean_of_a_sum": lambda m, x: (lambda y: [torch.mean(y, [2, 3]), m.conv2(y)])(_sum(m, x)),
    "mean_of_mixed_dimensions": lambda m, x: m.conv(x).mean((2, -1)),
    "mean_over_channels": lambda m, x: m.conv(x).mean((1, 2)),
    "mean_of_one_dimension": lambda m, x: m.conv(x).mean(2),
    "mean_of_all": lambda m, x: m.conv(x).mean(),
    "mean_twice_the_same": lambda m, x: m.conv(x).mean((2, 3)) + _block(m, x).mean((2, 3)),
    "mean_in_double": lambda m, x: m.conv(x).mean((2, 3), dtype=torch.float64),
    "mean_by_pooling": lambda m, x: F.avg_pool2d(_sum(m, x), x.shape[2:]).flatten(1),
    "mean_by_padded_pooling": lambda m, x: F.avg_pool2d(m.conv(x), x.shape[-1], padding=1),
    "mean_by_adaptive_pooling": lambda m, x: F.adaptive_avg_pool2d(_sum(m, x), (1, 1)),
    "mean_rectified_in_place": lambda m, x: F.relu_(F.adaptive_avg_pool2d(m.bn(m.conv(x)), 1)),
    "mean_changed": lambda m, x: m.conv(x).mean((2, 3)).add_(1).mul_(2),
    "mean_by_pooling_changed": lambda m, x: F.avg_pool2d(_block(m, x), x.shape[2:]).sub_(0.1),
    "mean_and_half": lambda m, x: (lambda y: [y.mean((2, 3)), F.pad(_half(y), CHANNELS)])(
        _sum(m, x)
    ),
}
