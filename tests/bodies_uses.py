"""What forward passes do with the output of a batch norm or a sparse layer: torch's answer is due."""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bodies import Bodies, Doubled
from rewire import SparseConv2d

USES = Bodies()

# Rectified batch norms, in every spelling.
USES.update(
    nothing=lambda m, x: m.bn(m.conv(x)),
    f_relu=lambda m, x: F.relu(m.bn(m.conv(x))),
    f_relu_in_place=lambda m, x: F.relu(m.bn(m.conv(x)), inplace=True),
    f_relu_positional=lambda m, x: F.relu(m.bn(m.conv(x)), True),
    f_relu_=lambda m, x: F.relu_(m.bn(m.conv(x))),
    torch_relu=lambda m, x: torch.relu(m.bn(m.conv(x))),
    torch_relu_keyword=lambda m, x: torch.relu(input=m.bn(m.conv(x))),
    torch_relu_=lambda m, x: torch.relu_(m.bn(m.conv(x))),
    method_relu=lambda m, x: m.bn(m.conv(x)).relu(),
    method_relu_=lambda m, x: m.bn(m.conv(x)).relu_(),
    module_relu=lambda m, x: m.relu(m.bn(m.conv(x))),
    module_relu_in_place=lambda m, x: m.relu_in_place(m.bn(m.conv(x))),
    clamp=lambda m, x: m.bn(m.conv(x)).clamp(min=0),
    relu6=lambda m, x: F.relu6(m.bn(m.conv(x))),
    two_layers=lambda m, x: F.relu(m.bn2(m.conv2(F.relu(m.bn(m.conv(x)))))),
    norm_of_norm=lambda m, x: F.relu(m.bn2(m.bn(m.conv(x)))),
    norm_of_relu=lambda m, x: m.bn2(F.relu(m.bn(m.conv(x)))),
    norm_of_relu_of_conv=lambda m, x: m.bn(F.relu(m.conv(x))),
    norm_of_padded=lambda m, x: F.relu(m.bn(F.pad(m.conv(x), (1, 1)))),
    sparse_layer_of_norm=lambda m, x: m.conv2(m.bn(m.conv(x))),
)

# Rectified sparse layers, without a batch norm between.
USES.update(
    rectified_layer=lambda m, x: F.relu(m.conv(x)),
    rectified_layer_in_place=lambda m, x: m.relu_in_place(m.conv(x)),
    rectified_layers=lambda m, x: F.relu(m.conv2(F.relu(m.conv(x)))),
    layer_of_layer=lambda m, x: m.conv2(m.conv(x)),
    layer_plus_layer=lambda m, x: F.relu(m.conv(x) + m.conv2(m.conv(x))),
    layer_of_one_image=lambda m, x: F.relu(m.conv(x[0])),
    layer_of_no_image=lambda m, x: F.relu(m.conv(x[:0])),
    layer_of_float=lambda m, x: F.relu(m.conv(x.float().double())),
    custom_function_of_a_layer=lambda m, x: F.relu(Doubled.apply(m.conv(x))),
)


@USES.add
def layer_rectified_and_plain(m: Any, x: Tensor) -> list[Tensor]:
    y = m.conv(x)
    return [F.relu(y), y, m.bn(y)]


@USES.add
def layer_scaled_in_place(m: Any, x: Tensor) -> Tensor:
    y = m.conv(x)
    y.mul_(2)
    return F.relu(y)


@USES.add
def layer_written_to(m: Any, x: Tensor) -> Tensor:
    y = m.conv(x)
    y[:, 0] = 1
    return m.bn(F.relu(y))


@USES.add
def layer_added_to_in_place(m: Any, x: Tensor) -> Tensor:
    y = m.conv(x)
    y += m.conv(-x)
    return F.relu(y)


@USES.add
def layer_rectified_twice(m: Any, x: Tensor) -> list[Tensor]:
    with torch.no_grad():
        y = m.conv(x)
        first, second = F.relu(y), F.relu(y)
        first.add_(1)
        return [first, second, y]


@USES.add
def layer_rectified_in_place_through_a_view(m: Any, x: Tensor) -> list[Tensor]:
    y = m.conv(x)
    view = y.detach()
    return [m.relu_in_place(y), view]


@USES.add
def layer_with_other_values(m: Any, x: Tensor) -> Tensor:
    key = "values" if isinstance(m.conv, SparseConv2d) else "weight"
    own = getattr(m.conv, key)
    return F.relu(torch.func.functional_call(m.conv, {key: own * 2 + 1 * (own != 0)}, (x,)))


@USES.add
def layer_replaced_before_its_output_is_used(m: Any, x: Tensor) -> Tensor:
    y = m.conv(x)
    kept, m.conv.bias = m.conv.bias, nn.Parameter(torch.zeros_like(m.conv.bias))
    z = F.relu(y)
    m.conv.bias = kept
    return z


@USES.add
def layer_that_another_one_stands_in_for(m: Any, x: Tensor) -> list[Tensor]:
    y = m.conv(x)
    z = m.conv(-x)
    return [F.relu(z), F.relu(y)]


# Sums.
USES.update(
    plus=lambda m, x: F.relu(m.bn(m.conv(x)) + m.conv(x)),
    plus_from_right=lambda m, x: F.relu(m.conv(x) + m.bn(m.conv(x))),
    torch_add=lambda m, x: torch.add(m.bn(m.conv(x)), m.conv(x)).relu_(),
    torch_add_right=lambda m, x: torch.add(m.conv(x), m.bn(m.conv(x))).relu_(),
    torch_add_keywords=lambda m, x: torch.add(input=m.bn(m.conv(x)), other=m.conv(x)).relu(),
    torch_add_alpha=lambda m, x: F.relu(torch.add(m.bn(m.conv(x)), m.conv(x), alpha=2)),
    method_add=lambda m, x: F.relu(m.bn(m.conv(x)).add(m.conv(x))),
    method_add_=lambda m, x: F.relu(m.bn(m.conv(x)).add_(m.conv(x))),
    method_add_alpha=lambda m, x: F.relu(m.bn(m.conv(x)).add_(m.conv(x), alpha=0.5)),
    plus_number=lambda m, x: F.relu(m.bn(m.conv(x)) + 1),
    number_plus=lambda m, x: F.relu(1 + m.bn(m.conv(x))),
    plus_channel=lambda m, x: F.relu(m.bn(m.conv(x)) + m.bn.weight.view(6, 1, 1)),
    plus_one_sample=lambda m, x: F.relu(m.bn(m.conv(x)) + m.conv(x)[:1]),
    plus_contiguous=lambda m, x: F.relu(m.bn(m.conv(x)) + m.conv(x).contiguous()),
    plus_row_major=lambda m, x: F.relu(m.bn(m.conv(x)) + torch.cat([x, x], 1)),
    plus_float=lambda m, x: F.relu(m.bn(m.conv(x)) + m.conv(x).float()),
    plus_not_rectified=lambda m, x: m.bn(m.conv(x)) + m.conv(x),
    plus_twice=lambda m, x: F.relu(m.bn(m.conv(x)) + m.conv(x) + m.conv(x).exp()),
    plus_itself=lambda m, x: (lambda y: F.relu(y + y))(m.bn(m.conv(x))),
    two_norms=lambda m, x: F.relu(m.bn(m.conv(x)) + m.bn2(m.conv(x))),
    minus=lambda m, x: F.relu(m.bn(m.conv(x)) - m.conv(x)),
    times=lambda m, x: F.relu(m.bn(m.conv(x)) * m.conv(x)),
    minus_from_right=lambda m, x: F.relu(m.conv(x) - m.bn(m.conv(x))),
    plus_frozen=lambda m, x: F.relu(m.bn(m.conv(x)) + m.conv(x).detach()),
)


@USES.add
def residual_in_place(m: Any, x: Tensor) -> Tensor:
    identity = m.conv(x)
    out = m.bn(m.conv2(identity))
    out += identity
    return m.relu_in_place(out)


@USES.add
def residual_block(m: Any, x: Tensor) -> Tensor:
    identity = m.conv(x)
    out = m.bn2(m.conv2(F.relu(m.bn(identity))))
    return F.relu(out + identity)


@USES.add
def in_place_sum_with_a_norm(m: Any, x: Tensor) -> Tensor:
    out = m.conv(x).clone()
    out += m.bn(m.conv(x))
    return F.relu(out)


@USES.add
def in_place_sum_with_itself(m: Any, x: Tensor) -> Tensor:
    y = m.bn(m.conv(x))
    y += y
    return F.relu(y)


@USES.add
def in_place_sum_twice(m: Any, x: Tensor) -> Tensor:
    y = m.bn(m.conv(x))
    y += m.conv(x)
    y += m.conv(x)
    return F.relu(y)


@USES.add
def in_place_sum_seen_through_another_name(m: Any, x: Tensor) -> Tensor:
    y = m.bn(m.conv(x))
    same = y
    y.add_(m.conv(x))
    return F.relu(same)


# The same output used more than once.


@USES.add
def rectified_and_plain(m: Any, x: Tensor) -> list[Tensor]:
    y = m.bn(m.conv(x))
    return [F.relu(y), y]


@USES.add
def plain_and_rectified(m: Any, x: Tensor) -> list[Tensor]:
    y = m.bn(m.conv(x))
    return [y * 2, F.relu(y)]


@USES.add
def sum_and_plain(m: Any, x: Tensor) -> list[Tensor]:
    y, s = m.bn(m.conv(x)), m.conv(x)
    return [F.relu(y + s), F.relu(y), y, y + s]


@USES.add
def rectified_twice(m: Any, x: Tensor) -> list[Tensor]:
    y = m.bn(m.conv(x))
    return [F.relu(y), F.relu(y) * 2]


@USES.add
def rectified_twice_and_one_changed(m: Any, x: Tensor) -> list[Tensor]:
    with torch.no_grad():
        y = m.bn(m.conv(x))
        first, second = F.relu(y), F.relu(y)
        first.add_(1)
    return [first, second]


@USES.add
def rectified_changed_and_rectified_again(m: Any, x: Tensor) -> list[Tensor]:
    with torch.no_grad():
        y = m.bn(m.conv(x))
        first = F.relu(y)
        first.mul_(3)
        return [first, F.relu(y), y]


@USES.add
def rectified_in_place_and_used_again(m: Any, x: Tensor) -> list[Tensor]:
    y = m.bn(m.conv(x))
    z = F.relu(y, inplace=True)
    return [z, y * 2, y + m.conv(x)]


@USES.add
def sum_kept_while_the_norm_is_rectified_in_place(m: Any, x: Tensor) -> list[Tensor]:
    y = m.bn(m.conv(x))
    total = y + m.conv(x)
    F.relu_(y)
    return [total, y]


# The output changed in place.


@USES.add
def scaled_in_place(m: Any, x: Tensor) -> Tensor:
    y = m.bn(m.conv(x))
    y.mul_(2)
    return F.relu(y)


@USES.add
def shifted_in_place(m: Any, x: Tensor) -> Tensor:
    y = m.bn(m.conv(x))
    y.add_(1)
    return F.relu(y)


@USES.add
def written_to(m: Any, x: Tensor) -> Tensor:
    y = m.bn(m.conv(x))
    y[:, 0] = 1
    return F.relu(y)


@USES.add
def written_to_after_rectifying(m: Any, x: Tensor) -> list[Tensor]:
    with torch.no_grad():
        y = m.bn(m.conv(x))
        z = F.relu(y)
        y.add_(1)
        return [z, F.relu(y), y]


@USES.add
def clamped_in_place(m: Any, x: Tensor) -> Tensor:
    y = m.bn(m.conv(x))
    y.clamp_(-0.5, 0.5)
    return torch.relu(y)


@USES.add
def leaky_in_place(m: Any, x: Tensor) -> Tensor:
    y = m.bn(m.conv(x))
    F.leaky_relu(y, 0.1, inplace=True)
    return y + m.conv(x)


@USES.add
def a_view_of_it_written_to(m: Any, x: Tensor) -> Tensor:
    y = m.bn(m.conv(x))
    y[:, :2].mul_(3)
    return F.relu(y)


@USES.add
def a_view_of_it_before_rectifying_in_place(m: Any, x: Tensor) -> Tensor:
    y = m.bn(m.conv(x))
    view = y.view(y.shape)
    F.relu_(y)
    return view * 1


@USES.add
def a_detached_view_before_rectifying_in_place(m: Any, x: Tensor) -> list[Tensor]:
    y = m.bn(m.conv(x))
    view = y.detach()
    return [m.relu_in_place(y), view]


@USES.add
def a_view_before_adding_in_place(m: Any, x: Tensor) -> list[Tensor]:
    with torch.no_grad():
        y = m.bn(m.conv(x))
        view = y[:, 1]
        y += m.conv(x)
        return [y, view]


# Not used, or only looked at.


@USES.add
def dropped(m: Any, x: Tensor) -> Tensor:
    m.bn(m.conv(x))
    return m.conv(x) * 1


@USES.add
def kept_but_not_used(m: Any, x: Tensor) -> Tensor:
    m.seen = [m.bn(m.conv(x))]
    return m.conv(x) * 1


@USES.add
def overwritten(m: Any, x: Tensor) -> Tensor:
    y = m.bn(m.conv(x))
    y = m.bn(m.conv2(m.conv(x)))
    return F.relu(y)


@USES.add
def only_its_shape(m: Any, x: Tensor) -> Tensor:
    return torch.full(m.bn(m.conv(x)).shape, 2.0) * m.conv(x).sum()


@USES.add
def looked_at(m: Any, x: Tensor) -> list[Tensor]:
    y = m.bn(m.conv(x))
    facts = [
        *(y.shape, y.size(), y.size(1), y.size(dim=0), len(y), y.dim(), y.ndim, y.numel()),
        *(y.nelement(), y.ndimension(), y.dtype, y.device, y.layout, y.is_cpu, y.is_cuda),
        *(torch.numel(y), torch.is_floating_point(y), y.is_floating_point(), y.element_size()),
        *(y.requires_grad, y.is_leaf, y.grad_fn is None, isinstance(y, Tensor)),
        *(torch.is_tensor(y), y.is_sparse, y.type(), y.itemsize, y.nbytes, y.is_meta),
        *(
            torch.is_complex(y),
            bool((y > 9).any()),
            torch.numel(input=y),
            y.untyped_storage().nbytes(),
        ),
    ]
    m.seen.append(facts)
    return [F.relu(y)]


@USES.add
def statistics_read_after_the_call(m: Any, x: Tensor) -> list[Tensor]:
    y = m.bn(m.conv(x))
    if m.bn.running_mean is None:
        return [y]
    mean, variance = m.bn.running_mean.clone(), m.bn.running_var * 1
    return [F.relu(y), mean, variance]


@USES.add
def statistics_used_by_another_norm(m: Any, x: Tensor) -> list[Tensor]:
    h = m.conv(x)
    mean, variance = m.bn.running_mean, m.bn.running_var
    if mean is None:
        return [h]
    first = F.batch_norm(h, mean, variance, training=True, momentum=0.3)
    second = F.batch_norm(h * 2, mean, variance, training=True, momentum=0.3)
    third = F.batch_norm(h, mean.clone(), variance.clone(), training=False)
    return [F.relu(third), F.relu(second), F.relu(first)]


# Other functions of it.
USES.update(
    cat=lambda m, x: torch.cat([m.bn(m.conv(x)), m.conv(x)], 1),
    stack=lambda m, x: torch.stack([m.bn(m.conv(x)), m.bn2(m.conv(x))]),
    chunk=lambda m, x: list(m.bn(m.conv(x)).chunk(2, 1)),
    unbind=lambda m, x: list(m.bn(m.conv(x)).unbind(0)),
    iterate=lambda m, x: [t * 2 for t in m.bn(m.conv(x))],
    index=lambda m, x: m.bn(m.conv(x))[:, 1:4, ::2],
    mask=lambda m, x: (lambda y: y[y > 0])(m.bn(m.conv(x))),
    where=lambda m, x: (lambda y: torch.where(y > 0, y, 0.1 * y))(m.bn(m.conv(x))),
    mean=lambda m, x: m.bn(m.conv(x)).mean((2, 3)),
    flatten=lambda m, x: m.bn(m.conv(x)).flatten(1),
    permute=lambda m, x: m.bn(m.conv(x)).permute(0, 2, 3, 1).contiguous(),
    negative=lambda m, x: -m.bn(m.conv(x)),
    power=lambda m, x: m.bn(m.conv(x)) ** 2,
    matmul=lambda m, x: m.bn(m.conv(x)) @ torch.ones(6, 2, dtype=x.dtype),
    einsum=lambda m, x: torch.einsum("nchw,nchw->nc", m.bn(m.conv(x)), m.conv(x)),
    silu=lambda m, x: F.silu(m.bn(m.conv(x))),
    detach=lambda m, x: F.relu(m.bn(m.conv(x)).detach()) + m.conv(x),
    clone=lambda m, x: F.relu(m.bn(m.conv(x)).clone()),
    to_float=lambda m, x: F.relu(m.bn(m.conv(x)).float()),
    contiguous=lambda m, x: F.relu(m.bn(m.conv(x)).contiguous()),
    numpy=lambda m, x: torch.from_numpy(m.bn(m.conv(x)).detach().numpy().copy()),
    to_list=lambda m, x: torch.tensor(m.bn(m.conv(x))[0].tolist(), dtype=x.dtype),
    item=lambda m, x: m.conv(x) * m.bn(m.conv(x)).max().item(),
    deepcopied=lambda m, x: copy.deepcopy(m.bn(m.conv(x)).detach()),
    zeros_like=lambda m, x: torch.zeros_like(m.bn(m.conv(x))) + m.conv(x),
    new_zeros=lambda m, x: m.bn(m.conv(x)).new_zeros(3) + m.conv(x).sum(),
    layer_norm=lambda m, x: F.layer_norm(m.bn(m.conv(x)), (6, 6)),
    dense_convolution=lambda m, x: F.conv2d(m.bn(m.conv(x)), torch.ones(2, 6, 3, 3, dtype=x.dtype)),
    as_a_dict=lambda m, x: {"a": m.bn(m.conv(x)), "b": (F.relu(m.bn2(m.conv(x))),)},
    without_grad=lambda m, x: _no_grad(m, x),
    dropout_in_eval=lambda m, x: F.dropout(F.relu(m.bn(m.conv(x))), 0.5, training=False),
)


def _no_grad(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = m.bn(m.conv(x))
    return F.relu(y) + m.conv(x)


# Pooling and padding, as functions and modules.
USES.update(
    max_pool=lambda m, x: F.max_pool2d(F.relu(m.bn(m.conv(x))), 2),
    max_pool_of_norm=lambda m, x: F.max_pool2d(m.bn(m.conv(x)), 3, 2, 1),
    max_pool_keywords=lambda m, x: F.max_pool2d(m.conv(x), kernel_size=2, stride=1, padding=1),
    max_pool_torch=lambda m, x: torch.max_pool2d(m.conv(x), (2, 3), stride=(1, 2)),
    max_pool_dilated=lambda m, x: F.max_pool2d(m.conv(x), 2, dilation=2),
    max_pool_ceil=lambda m, x: F.max_pool2d(m.conv(x), 4, 3, ceil_mode=True),
    max_pool_module=lambda m, x: nn.MaxPool2d(2, ceil_mode=False)(F.relu(m.bn(m.conv(x)))),
    max_pool_indices=lambda m, x: F.max_pool2d(m.bn(m.conv(x)), 2, return_indices=True)[0],
    max_pool_unbatched=lambda m, x: F.max_pool2d(m.conv(x)[0], 2),
    mean_pool=lambda m, x: F.avg_pool2d(F.relu(m.bn(m.conv(x))), 2),
    mean_pool_of_norm=lambda m, x: F.avg_pool2d(m.bn(m.conv(x)), 3, 2, 1, False, False),
    mean_pool_keywords=lambda m, x: F.avg_pool2d(m.conv(x), kernel_size=3, count_include_pad=False),
    mean_pool_ceil=lambda m, x: F.avg_pool2d(m.conv(x), 4, 3, ceil_mode=True),
    mean_pool_divisor=lambda m, x: F.avg_pool2d(m.conv(x), 2, divisor_override=3),
    mean_pool_module=lambda m, x: nn.AvgPool2d(3, 2, 1, count_include_pad=False)(m.conv(x)),
    global_pool=lambda m, x: F.adaptive_avg_pool2d(F.relu(m.bn(m.conv(x))), 1).flatten(1),
    global_pool_of_norm=lambda m, x: nn.AdaptiveAvgPool2d((1, 1))(m.bn(m.conv(x))),
    adaptive_pool=lambda m, x: F.adaptive_avg_pool2d(m.conv(x), (4, 5)),
    adaptive_max_pool=lambda m, x: F.adaptive_max_pool2d(m.bn(m.conv(x)), 2),
    pad=lambda m, x: F.pad(F.relu(m.bn(m.conv(x))), (1, 2, 0, 1)),
    pad_of_norm=lambda m, x: F.pad(m.bn(m.conv(x)), (1, 1), value=2.0),
    pad_keywords=lambda m, x: F.pad(input=m.bn(m.conv(x)), pad=(1, 1), mode="constant"),
    pad_channels=lambda m, x: F.pad(m.conv(x)[:, :, ::2, ::2], (0, 0, 0, 0, 2, 4)),
    pad_reflect=lambda m, x: F.pad(m.bn(m.conv(x)), (1, 1, 1, 1), mode="reflect"),
    pad_circular=lambda m, x: F.pad(m.conv(x), (1, 1, 1, 1), mode="circular"),
    pad_negative=lambda m, x: F.pad(m.conv(x), (-1, 1)),
    pad_module=lambda m, x: m.conv2(nn.ZeroPad2d(2)(m.bn(m.conv(x)))),
    pad_batch=lambda m, x: F.pad(m.conv(x), (0, 0, 0, 0, 0, 0, 1, 2)),
    pad_nothing=lambda m, x: F.pad(m.conv(x), ()),
    upsample=lambda m, x: F.interpolate(m.bn(m.conv(x)), scale_factor=2),
)

# Functions that torch's overrides do not see.


USES.update(
    custom_function=lambda m, x: Doubled.apply(m.bn(m.conv(x))),
    custom_function_then_relu=lambda m, x: F.relu(Doubled.apply(m.bn(m.conv(x)))) + m.conv(x),
    checkpoint_of_a_block=lambda m, x: checkpoint(
        lambda t: F.relu(m.bn(m.conv(t))), x, use_reentrant=False
    ),
    checkpoint_of_a_block_reentrant=lambda m, x: checkpoint(
        lambda t: F.relu(m.bn(m.conv(t))), x, use_reentrant=True
    ),
    checkpoint_of_a_norm=lambda m, x: F.relu(checkpoint(m.bn, m.conv(x), use_reentrant=False)),
    checkpoint_of_a_norm_reentrant=lambda m, x: F.relu(
        checkpoint(m.bn, m.conv(x), use_reentrant=True)
    ),
    checkpoint_after_a_norm=lambda m, x: checkpoint(
        lambda t: F.relu(m.conv2(t)), m.bn(m.conv(x)), use_reentrant=False
    ),
    checkpoint_after_a_norm_reentrant=lambda m, x: checkpoint(
        lambda t: F.relu(m.conv2(t)), m.bn(m.conv(x)), use_reentrant=True
    ),
    checkpoint_rectifies=lambda m, x: checkpoint(F.relu, m.bn(m.conv(x)), use_reentrant=False),
)
