"""Attention over short sequences: matrix products and a softmax, with its weights in memory.

torch's attention on the CPU works on tiles and keeps no weights, which pays where there are many tokens.
Its backward pass is slow, in bfloat16 above all: several times as long as these products for 64 or 128.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

_CACHED = 2**18  # weights


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


def _hidden(q: Tensor, k: Tensor) -> Tensor:
    """Where a token does not look: at those that come after it."""
    return torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device="cpu").triu_(1)


def _output(q: Tensor, v: Tensor) -> Tensor:
    """Memory for the result, laid out as torch's kernels do: heads of a token side by side."""
    samples, heads, tokens, size = *q.shape[:3], v.shape[3]
    if size != q.shape[3]:
        return v.new_empty(samples, heads, tokens, size)
    return v.new_empty(samples, tokens, heads, size).transpose(1, 2)


def _slices(q: Tensor, k: Tensor) -> list[slice]:
    """Samples whose weights fit the cache, so that little more than the results is ever there."""
    samples, heads, tokens, _ = q.shape
    few = max(1, _CACHED // (heads * tokens * k.shape[2]))
    return [slice(first, first + few) for first in range(0, samples, few)]


class _Attention(torch.autograd.Function):
    """Scores, weights and sums are float32; in bfloat16 the weights are rounded before they are used."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
        hidden, zero = _hidden(q, k), torch.zeros((1, 1, 1), dtype=torch.float32, device="cpu")
        weights = v.new_empty((*q.shape[:3], k.shape[2]))
        y = _output(q, v)
        with torch.autocast("cpu", enabled=False):
            for at in _slices(q, k):
                queries, keys = _heads(q[at], torch.float32), _heads(k[at], torch.float32)
                scores = torch.baddbmm(zero, queries, keys.transpose(1, 2), alpha=scale)
                if causal:
                    scores.masked_fill_(hidden, -math.inf)
                some = _heads(weights[at]).copy_(scores.softmax(-1))
                mixed = y[at]
                mixed.copy_(torch.bmm(some, _heads(v[at])).view(mixed.shape))
        ctx.save_for_backward(q, k, v, weights)
        ctx.causal, ctx.scale = causal, scale
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        q, k, v, weights = ctx.saved_tensors
        with torch.autocast("cpu", enabled=False):
            if torch.is_grad_enabled():
                return *_derivatives(ctx, q, k, v, dy), None, None
            dq, dk, dv = (
                torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v)
            )
            for at in _slices(q, k):
                grad, some = _heads(dy[at]), _heads(weights[at])
                torch.bmm(some.transpose(1, 2), grad, out=_heads(dv[at]))
                dweights = torch.bmm(grad, _heads(v[at]).transpose(1, 2)).float()
                mean = (dweights * some).sum(-1, keepdim=True)
                dscores = dweights.sub_(mean).mul_(some).mul_(ctx.scale).to(q.dtype)
                torch.bmm(dscores, _heads(k[at]), out=_heads(dq[at]))
                torch.bmm(dscores.transpose(1, 2), _heads(q[at]), out=_heads(dk[at]))
        return dq, dk, dv, None, None


def _derivatives(ctx: Any, q: Tensor, k: Tensor, v: Tensor, dy: Tensor) -> list[Tensor | None]:
    """The same with a graph: for second derivatives."""
    wanted = ctx.needs_input_grad[:3]
    given = [t.view_as(t) for t in (q, k, v)]
    scores = given[0].float() @ given[1].float().transpose(-2, -1) * ctx.scale
    if ctx.causal:
        scores = scores.masked_fill(_hidden(q, k), -math.inf)
    y = scores.softmax(-1).to(v.dtype) @ given[2]
    needed = [t for t, want in zip(given, wanted, strict=True) if want]
    found = iter(torch.autograd.grad(y, needed, dy, create_graph=True))
    return [next(found) if want else None for want in wanted]
