"""Iterative synaptic flow pruning."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from rewire.conversion import M
from rewire.methods.arguments import check_choice
from rewire.methods.pruning import (
    Layers,
    Loss,
    best,
    check_target,
    evaluating,
    layers_of,
    make_sparse,
    weights_of,
)

SOFTMAX = ("shares", "identity")


def synflow(
    model: M,
    batches: Iterable[Any],
    loss: Loss | None = None,
    *,
    sparsity: float,
    rounds: int = 100,
    softmax: str = "shares",
    scope: str = "global",
    keep_dense: str | Iterable[str] = (),
    seed: int = 0,
) -> M:
    r"""Synaptic flow: prune step by step what carries the least flow, without looking at data.

    A weight's score is ``|dR/dw * w|``, R being the sum of the outputs for an input of ones through the
    model with the magnitudes of its parameters, in float64 and evaluation mode. In round k of n the
    density is :math:`\rho^{(k+1)/n}`, and scores are computed again. Batch norms use their running
    statistics, as in the authors' code. What else is not linear in positive numbers is made so: layer
    norm keeps its scale and shift, activation functions let everything pass, and a softmax divides by its
    sum, held constant (or lets everything pass, too).

    Args:
        model, sparsity, scope, keep_dense: as for :func:`rewire.snip`.
        batches: of these only the shape of one input is looked at; the first is taken, an input or a pair.
        loss, seed: for the others' sake; there is neither loss nor chance.
        rounds: in how many steps.
        softmax: ``"shares"`` of its sum, or ``"identity"``.

    Returns:
        The model, ready for training.

    Reference: Tanaka et al., *Pruning neural networks without any data by iteratively conserving synaptic
    flow*, 2020.
    """
    check_target(sparsity, scope)
    check_choice("softmax", softmax, SOFTMAX)
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")
    model, layers = layers_of(model, keep_dense)
    first = next(iter(batches), None)
    sample = first[0] if isinstance(first, tuple | list) else first
    if not isinstance(sample, Tensor):
        raise ValueError("batches is empty: it must show the shape of an input")
    masks = {name: torch.ones_like(w, dtype=torch.bool) for name, w in weights_of(layers).items()}
    for k in range(rounds):
        scores = synflow_scores(model, layers, sample, masks, softmax)
        masks = best(scores, (1 - sparsity) ** ((k + 1) / rounds), scope)
    return make_sparse(model, layers, masks)


def synflow_scores(
    model: nn.Module,
    layers: Layers,
    sample: Tensor,
    masks: Mapping[str, Tensor] | None = None,
    softmax: str = "shares",
) -> dict[str, Tensor]:
    """``|dR/dw * w|`` of every weight of these layers under masks, by name of the parameter.

    What is masked already has a score below all others.
    """
    names = weights_of(layers)
    state = {name: _positive(tensor) for name, tensor in _tensors(model).items()}
    for name, mask in (masks or {}).items():
        state[name] = state[name] * mask
    weights = {name: state[name].requires_grad_() for name in names}
    ones = torch.ones_like(sample[:1])
    ones = ones.double() if ones.is_floating_point() else ones
    with torch.enable_grad(), evaluating(model):
        with _Linear(softmax):
            output = functional_call(model, state, (ones,))
        flow = output.sum()
        found = torch.autograd.grad(flow, list(weights.values()), materialize_grads=True)
    if not math.isfinite(float(flow.detach())):
        raise ValueError("the flow through the model is not finite, even in float64")
    scores = {}
    for (name, weight), gradient in zip(weights.items(), found, strict=True):
        score = (gradient * weight.detach()).abs()
        scores[name] = score if masks is None else score.masked_fill(~masks[name], -1.0)
    return scores


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _positive(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.double().abs() if tensor.is_floating_point() else tensor.clone()


# What is not linear -------------------------------------------------------------------------------


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None, by_channel: bool) -> Tensor:
    shape = (1, -1, *[1] * (x.dim() - 2)) if by_channel else None
    for tensor, operate in ((weight, torch.mul), (bias, torch.add)):
        if tensor is not None:
            x = operate(x, tensor if shape is None else tensor.view(shape))
    return x


def _layer_norm(
    input: Tensor, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Tensor:
    return _affine(input, weight, bias, by_channel=False)


def _rms_norm(input: Tensor, shape: Any, weight: Any = None, eps: Any = None) -> Tensor:
    return _affine(input, weight, None, by_channel=False)


def _group_norm(
    input: Tensor, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Tensor:
    return _affine(input, weight, bias, by_channel=True)


def _softmax(input: Tensor, dim: int = -1, *rest: Any, **options: Any) -> Tensor:
    """Shares of the sum, which is held constant."""
    total = input.detach().sum(dim, keepdim=True)
    return input / torch.where(total == 0, torch.ones_like(total), total)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    softmax: Callable[..., Tensor] = _softmax,
) -> Tensor:
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = (t.repeat_interleave(groups, -3) for t in (key, value))
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        scores = scores.tril()
    elif attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores * attn_mask
    return softmax(scores) @ value


def _positions(wave: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Positions that a forward pass computes count with their magnitudes, as those in buffers do."""
    return lambda angles: wave(angles).abs()


def _identity(input: Tensor, *rest: Any, **options: Any) -> Tensor:
    return input


_POINTWISE = (
    *(F.gelu, F.silu, F.elu, F.selu, F.celu, F.leaky_relu, F.mish, F.hardswish, F.softplus),
    *(F.hardtanh, F.relu6, F.tanh, F.sigmoid, F.logsigmoid, F.hardsigmoid, F.softsign),
    *(torch.tanh, Tensor.tanh, torch.sigmoid, Tensor.sigmoid),
)
_LINEAR: dict[Any, Callable[..., Tensor]] = {
    **dict.fromkeys(_POINTWISE, _identity),
    **dict.fromkeys((F.softmax, torch.softmax, Tensor.softmax), _softmax),
    **{wave: _positions(wave) for wave in (torch.sin, Tensor.sin, torch.cos, Tensor.cos)},
    F.layer_norm: _layer_norm,
    F.rms_norm: _rms_norm,
    F.group_norm: _group_norm,
    F.scaled_dot_product_attention: _attention,
}


class _Linear(TorchFunctionMode):
    """While it is active, what is not linear in positive numbers is made so."""

    def __init__(self, softmax: str) -> None:
        super().__init__()
        self._softmax = _softmax if softmax == "shares" else _identity

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        linear = _LINEAR.get(func, func)
        if linear is _attention:
            return _attention(*args, **(kwargs or {}), softmax=self._softmax)
        return (self._softmax if linear is _softmax else linear)(*args, **(kwargs or {}))
