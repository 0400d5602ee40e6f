"""What changes in place something that an output is still to be computed from: torch's answer is due.

``REFUSED`` says which of them raise, and with what message, where gradients are recorded. Torch refuses all
of these, too.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bodies import Bodies

CHANGES = Bodies()


@CHANGES.add
def input_shifted(m: Any, x: Tensor) -> Tensor:
    h = m.conv(x)
    y = m.bn(h)
    h.add_(1)
    return F.relu(y)


@CHANGES.add
def input_rectified_in_place(m: Any, x: Tensor) -> Tensor:
    h = m.conv(x)
    y = m.bn(h)
    F.relu(h, inplace=True)
    return y


@CHANGES.add
def input_rectified_in_place_and_added(m: Any, x: Tensor) -> Tensor:
    h = m.conv(x)
    y = m.bn(h)
    h = F.relu(h, inplace=True)
    return y + h


@CHANGES.add
def input_dropped_in_place(m: Any, x: Tensor) -> Tensor:
    h = m.conv(x)
    y = m.bn(h)
    F.dropout(h, 1.0, training=True, inplace=True)
    y += m.conv(x)
    return F.relu(y)


@CHANGES.add
def input_written_to(m: Any, x: Tensor) -> Tensor:
    h = m.conv(x)
    y = m.bn(h)
    h[:, 0] = 3
    return F.relu(y)


@CHANGES.add
def view_of_the_input_changed(m: Any, x: Tensor) -> Tensor:
    h = m.conv(x)
    view = h[:, 1:3]
    y = m.bn(h)
    view.mul_(2)
    return F.relu(y)


@CHANGES.add
def data_of_the_input_changed(m: Any, x: Tensor) -> Tensor:
    h = m.conv(x)
    y = m.bn(h)
    h.data.mul_(2)
    return y.detach()


@CHANGES.add
def input_overwritten_through_out(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        h = m.conv(x)
        y = m.bn(h)
        torch.mul(h, 2, out=h)
        return F.relu(y)


@CHANGES.add
def input_used_by_foreach(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        h = m.conv(x)
        y = m.bn(h)
        torch._foreach_mul_([h], 2.0)
        return F.relu(y)


@CHANGES.add
def residual_changed(m: Any, x: Tensor) -> Tensor:
    h = m.conv(x)
    y = m.bn(m.conv(x)) + h
    h.mul_(2)
    return F.relu(y)


@CHANGES.add
def residual_rectified_in_place(m: Any, x: Tensor) -> Tensor:
    h = m.conv(x)
    y = m.bn(m.conv(x))
    y += h
    F.relu(h, inplace=True)
    return F.relu(y)


@CHANGES.add
def residual_rectified_in_place_and_added_again(m: Any, x: Tensor) -> Tensor:
    h = m.conv(x)
    y = m.bn(m.conv(x)) + h
    F.relu(h, inplace=True)
    return F.relu(y + h)


@CHANGES.add
def residual_is_a_norm_changed_in_place(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        h = m.bn(m.conv(x))
        y = m.bn2(m.conv(x)) + h
        h.mul_(2)
        return F.relu(y)


@CHANGES.add
def input_of_a_layer_changed(m: Any, x: Tensor) -> Tensor:
    h = x * 2
    y = m.conv(h)
    h.add_(1)
    return F.relu(y)


@CHANGES.add
def input_of_a_layer_rectified_in_place(m: Any, x: Tensor) -> Tensor:
    h = x * 2
    y = m.conv(h)
    F.relu(h, inplace=True)
    return F.relu(y)


@CHANGES.add
def bias_of_a_layer_changed(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = m.conv(x)
        m.conv.bias.add_(1)
        result = F.relu(y)
        m.conv.bias.sub_(1)
        return result


@CHANGES.add
def bias_of_a_layer_rectified_in_place(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        kept = m.conv.bias.clone()
        y = m.conv(x)
        F.relu(m.conv.bias, inplace=True)
        result = F.relu(y)
        m.conv.bias.copy_(kept)
        return result


@CHANGES.add
def weight_changed(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = m.bn(m.conv(x))
        m.bn.weight.mul_(2)
        result = F.relu(y)
        m.bn.weight.div_(2)
        return result


@CHANGES.add
def statistics_changed(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = m.bn(m.conv(x))
        m.bn.reset_running_stats()
        return F.relu(y)


_BY_AUTOGRAD = "modified by an inplace operation"
REFUSED = {
    **dict.fromkeys(
        (*("input_dropped_in_place", "input_written_to", "view_of_the_input_changed"),),
        _BY_AUTOGRAD,
    ),
    "input_of_a_layer_changed": "was changed in place",
    "input_of_a_layer_rectified_in_place": "was changed in place",
}
# The engine keeps what it has computed for the backward pass in an arena: it may be changed.
ONLY_BY_TORCH = (
    "input_rectified_in_place",
    "input_rectified_in_place_and_added",
    "input_shifted",
)
