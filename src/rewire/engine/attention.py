"""Attention over short sequences: matrix products and a softmax, with its weights in memory.

torch's attention on the CPU works on tiles and keeps no weights, which pays where there are many tokens.
Its backward pass is slow, in bfloat16 above all: several times as long as these products for 64 or 128.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def pays(tokens: int, head_size: int) -> bool:
    """Whether the weights take no more memory than queries, keys, values and output together."""
    return tokens <= 4 * head_size


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> Tensor:
    """``scaled_dot_product_attention`` of (batch, head, token, size), float32 or bfloat16."""
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    y: Tensor = _Attention.apply(q, k, v, causal, scale)  # type: ignore[no-untyped-call]
    return y


def _heads(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """As one batch of contiguous matrices."""
    x = x.to(dtype or x.dtype, memory_format=torch.contiguous_format)
    return x.reshape(-1, *x.shape[2:])  # which copies what is of the type already


def _hidden(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """What is added to scores: minus infinity where a token does not look."""
    if not causal:
        return torch.zeros(1, 1, 1)
    return torch.full((1, q.shape[2], k.shape[2]), -math.inf).triu_(1)


class _Attention(torch.autograd.Function):
    """Scores, weights and sums are float32; in bfloat16 the weights are rounded before they are used."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            transposed = _heads(k, torch.float32).transpose(1, 2)
            scores = torch.baddbmm(
                _hidden(q, k, causal), _heads(q, torch.float32), transposed, alpha=scale
            )
            weights = scores.softmax(-1).to(v.dtype)
            y = torch.bmm(weights, _heads(v)).view(*q.shape[:-1], v.shape[-1])
        ctx.save_for_backward(q, k, v, weights, y)
        ctx.causal, ctx.scale = causal, scale
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        q, k, v, weights, y = ctx.saved_tensors
        with torch.autocast("cpu", enabled=False):
            if torch.is_grad_enabled():
                return *_derivatives(ctx, q, k, v, dy), None, None
            dy3, weights32 = _heads(dy), weights.float()
            dv = torch.bmm(weights.transpose(1, 2), dy3)
            dweights = torch.bmm(dy3, _heads(v).transpose(1, 2)).float()
            mean = (dy3.float() * _heads(y).float()).sum(-1, keepdim=True)
            dscores = weights32.mul(dweights.sub_(mean)).mul_(ctx.scale).to(q.dtype)
            dq = torch.bmm(dscores, _heads(k))
            dk = torch.bmm(dscores.transpose(1, 2), _heads(q))
        return dq.view(q.shape), dk.view(k.shape), dv.view(v.shape), None, None


def _derivatives(ctx: Any, q: Tensor, k: Tensor, v: Tensor, dy: Tensor) -> list[Tensor | None]:
    """The same with a graph: for second derivatives."""
    wanted = ctx.needs_input_grad[:3]
    given = [t.view_as(t) for t in (q, k, v)]
    scores = given[0].float() @ given[1].float().transpose(-2, -1) * ctx.scale
    scores = scores + _hidden(q, k, ctx.causal)
    y = scores.softmax(-1).to(v.dtype) @ given[2]
    needed = [t for t, want in zip(given, wanted, strict=True) if want]
    found = iter(torch.autograd.grad(y, needed, dy, create_graph=True))
    return [next(found) if want else None for want in wanted]
