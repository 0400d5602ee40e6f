"""Heads of tokens as views that leave a region, and attention between regions."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import rewire
from rewire import ops
from rewire.engine import attention, use_engine

pytestmark = pytest.mark.skipif(not ops.available(), reason="needs the compiled kernels")
BATCH, TOKENS, HEADS, SIZE = 3, 10, 2, 4
WIDTH = HEADS * SIZE
Heads = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]


def by_unflatten(y: Tensor) -> Any:
    return y.unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4).unbind()


def as_timm(y: Tensor) -> Any:
    return y.reshape(BATCH, TOKENS, 3, HEADS, SIZE).permute(2, 0, 3, 1, 4).unbind(0)


def by_index(y: Tensor) -> Any:
    qkv = y.view(BATCH, TOKENS, 3, HEADS, SIZE).permute(2, 0, 3, 1, 4)
    return qkv[0], qkv[1], qkv[-1]


def as_gpt2(y: Tensor) -> Any:
    parts = y.split(WIDTH, dim=2)
    return tuple(part.view(BATCH, TOKENS, HEADS, SIZE).transpose(1, 2) for part in parts)


def by_chunks(y: Tensor) -> Any:
    parts = y.chunk(3, dim=-1)
    return tuple(part.reshape(BATCH, TOKENS, HEADS, -1).permute(0, 2, 1, 3) for part in parts)


SPELLINGS = (by_unflatten, as_timm, by_index, as_gpt2, by_chunks)


class Model(nn.Module):
    """Two sparse layers with something between them."""

    def __init__(self, use: Callable[[Tensor], Any], width: int = 3 * WIDTH) -> None:
        super().__init__()
        self.use = use
        self.first, self.last = nn.Linear(WIDTH, width), nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Any:
        y = self.use(self.first(x))
        self.behind = y.shape[-1:] == (WIDTH,)
        return self.last(y) if self.behind else y


def attends(heads: Heads, **more: Any) -> Callable[[Tensor], Tensor]:
    def use(y: Tensor) -> Tensor:
        mixed = F.scaled_dot_product_attention(*heads(y), **more)
        return mixed.transpose(1, 2).flatten(2)

    return use


def names(y: Tensor) -> set[str]:
    """Of the functions in a graph of autograd."""
    found, ahead = set(), [y.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is not None and node not in found:
            found.add(node)
            ahead += [following for following, _ in node.next_functions]
    return {node.name() for node in found}


def passes(
    model: nn.Module, x: Tensor, on: bool, autocast: bool = False
) -> tuple[Tensor, list[Tensor]]:
    model = copy.deepcopy(model)
    use_engine(model, on)
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = model(x)
    y.float().square().sum().backward()
    unused = [] if model.behind else list(model.last.parameters())
    grads = [p.grad for p in (x, *model.parameters()) if not any(p is other for other in unused)]
    assert all(grad is not None for grad in grads)
    return y.detach(), grads


def compared(use: Callable[[Tensor], Any], dtype: torch.dtype, autocast: bool = False) -> set[str]:
    """The functions of the graph with the engine on, which gives what the model gives without."""
    torch.manual_seed(0)
    model = rewire.sparsify(Model(use), 0.4).to(dtype)
    x = torch.randn(BATCH, TOKENS, WIDTH, dtype=dtype)
    (y, mine), (expected, others) = (passes(model, x, on, autocast) for on in (True, False))
    assert y.dtype is expected.dtype
    half = torch.bfloat16 in (dtype, y.dtype)
    tolerance = 3e-2 if half else 1e-5 if dtype is torch.float32 else 1e-12
    for a, b in zip([y, *mine], [expected, *others], strict=True):
        assert a.dtype is b.dtype
        assert float((a - b).norm()) <= tolerance * float(b.norm())
    use_engine(model, True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        return names(model(x))


def outputs_agree(model: nn.Module, mode: Any) -> None:
    """With the engine and without, in a gradient mode."""
    x = torch.randn(BATCH, TOKENS, WIDTH)
    found = []
    for on in (True, False):
        use_engine(model, on)
        with mode():
            found.append(model(x))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("way", ["float32", "bfloat16", "autocast"])
@pytest.mark.parametrize("heads", SPELLINGS)
def test_attention(heads: Heads, way: str, causal: bool) -> None:
    dtype = torch.bfloat16 if way == "bfloat16" else torch.float32
    found = compared(attends(heads, is_causal=causal), dtype, way == "autocast")
    assert "_AttentionBackward" in found


@pytest.mark.parametrize(
    "more",
    [
        {"attn_mask": torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()},
        {"attn_mask": torch.zeros(TOKENS, TOKENS), "scale": 0.3},
        {"enable_gqa": True},
    ],
)
def test_attention_of_other_kinds_is_torchs(more: dict[str, Any]) -> None:
    assert "_AttentionBackward" not in compared(attends(as_timm, **more), torch.float32)


def test_attention_in_float64_and_with_dropout_is_torchs() -> None:
    assert "_AttentionBackward" not in compared(attends(as_timm), torch.float64)
    model = rewire.sparsify(Model(attends(as_timm, dropout_p=0.5)), 0.4)
    assert "_AttentionBackward" not in names(model(torch.randn(BATCH, TOKENS, WIDTH)))


def test_attention_over_many_tokens_is_torchs() -> None:
    def heads(y: Tensor) -> Any:
        return y.unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4).unbind()

    model = rewire.sparsify(Model(attends(heads)), 0.4)
    for tokens in (4 * SIZE, 4 * SIZE + 1):
        found = names(model(torch.randn(2, tokens, WIDTH)))
        assert ("_AttentionBackward" in found) is (tokens == 4 * SIZE)


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("causal", [False, True])
def test_attend_is_what_torch_computes(causal: bool, scale: float | None) -> None:
    """Also of queries and keys of other numbers, and values of another size; with second derivatives."""
    torch.manual_seed(0)
    shapes = (2, 3, 5, 4), (2, 3, 7, 4), (2, 3, 7, 6)
    given = [torch.randn(shape, requires_grad=True) for shape in shapes]
    found = []
    for function in (
        lambda q, k, v: attention.attend(q, k, v, causal, scale),
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale),
    ):
        with sdpa_kernel(SDPBackend.MATH):
            y = function(*given)
            plain = torch.autograd.grad(y.sin().sum(), given, retain_graph=True)
            grads = torch.autograd.grad(y.sin().sum(), given, create_graph=True)
            second = torch.autograd.grad(sum(g.square().sum() for g in grads), given)
        found.append([y, *plain, *grads, *second])
    for mine, other in zip(*found, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_attention_lies_in_memory_as_torchs(mode: Any) -> None:
    """Heads of a token side by side: ``view`` joins them without a copy."""

    def use(y: Tensor) -> Tensor:
        mixed = F.scaled_dot_product_attention(*as_timm(y))
        return mixed.transpose(1, 2).view(BATCH, TOKENS, WIDTH)

    model = rewire.sparsify(Model(use), 0.4)
    outputs_agree(model, mode)


def test_tokens_to_come_change_nothing() -> None:
    """Whatever is in them; and with one key nothing depends on queries."""
    q, k, v = (torch.randn(1, 2, 6, 4) for _ in range(3))
    expected = attention.attend(q, k, v, True, None)
    for odd in (3e38, torch.inf, -torch.inf, torch.nan):
        changed = k.clone()
        changed[:, :, -1] = odd
        y = attention.attend(q, changed, v, True, None)
        assert torch.equal(y[:, :, :-1], expected[:, :, :-1])
    q, k, v = (torch.randn(2, 2, n, 4, dtype=torch.bfloat16) for n in (5, 1, 1))
    q.requires_grad_()
    attention.attend(q, k, v + 10, False, None).float().square().sum().backward()
    assert q.grad is not None
    assert not q.grad.any()


def test_the_default_type_is_of_no_account() -> None:
    model = rewire.sparsify(Model(attends(as_timm, is_causal=True)), 0.4)
    x = torch.randn(BATCH, TOKENS, WIDTH)
    expected = model(x)
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(model(x), expected)
    finally:
        torch.set_default_dtype(torch.float32)


def test_heads_have_gradients() -> None:
    """Whoever holds queries sees their gradient, also if asked for it after the attention."""
    grads = []
    for on in (True, False):
        held: list[Tensor] = []

        def use(y: Tensor, held: list[Tensor] = held) -> Tensor:
            q, k, v = as_timm(y)
            q.retain_grad()
            mixed = F.scaled_dot_product_attention(q, k, v)
            v.retain_grad()
            held += [q, v]
            return mixed.transpose(1, 2).flatten(2)

        torch.manual_seed(0)
        model = rewire.sparsify(Model(use), 0.4)
        use_engine(model, on)
        model(torch.randn(BATCH, TOKENS, WIDTH)).sum().backward()
        grads.append([t.grad for t in held])
    for mine, other in zip(*grads, strict=True):
        torch.testing.assert_close(mine, other)


def _crossed(a: Any, b: Any) -> Tensor:
    mixed: Tensor = a[0] * b[1]
    return mixed


def _in_place(y: Tensor) -> Tensor:
    turned = y.permute(1, 0, 2)
    turned.mul_(2)
    return y + turned.permute(1, 0, 2)


OTHERS: dict[str, Callable[[Tensor], Any]] = {
    "element by element": lambda y: F.gelu(by_unflatten(y)[1]).flatten(1),
    "gated": lambda y: F.silu(y.chunk(3, -1)[0]) * y.chunk(3, -1)[2],
    "sums of views": lambda y: sum(y.split([WIDTH, WIDTH, WIDTH], -1)),
    "parts of other sizes": lambda y: y.split([WIDTH, 2 * WIDTH], 2)[0],
    "layer behind": lambda y: y.permute(1, 0, 2)[..., :WIDTH],
    "class token": lambda y: y.unbind(1)[0][:, :WIDTH],
    "view of a view": lambda y: y.transpose(0, 1).transpose(0, 1).unflatten(-1, (3, -1))[:, :, 1],
    "in place": _in_place,
    "cat": lambda y: torch.cat(by_index(y), -1).flatten(1),
    "rotated": lambda y: torch.stack(y.unflatten(-1, (-1, 2)).unbind(-1)[::-1], -1).flatten(-2),
    "matrix product": lambda y: (y @ y.transpose(-2, -1)).flatten(1),
    "the same parts again": lambda y: (
        y.split([8, 16], 2)[0].sin() * y.split([8, 16], 2)[0] + y.unbind(1)[0][:, None, :8]
    ),
    "calls that cross": lambda y: _crossed(y.unbind(1), y.unbind(1)),
    "one token": lambda y: y.permute(1, 0, 2)[-1],
    "wrong, caught": lambda y: y * len(_caught(y)),
}


def _caught(y: Tensor) -> str:
    for wrong in (
        lambda: y.unflatten(2, (5, -1)),
        lambda: y.permute(0, 1, 1),
        lambda: y.transpose(0, 3),
        lambda: y.unbind(4),
        lambda: y.split([1, 2], 2),
    ):
        with pytest.raises((RuntimeError, IndexError)):
            wrong()
    return "ok"


@pytest.mark.parametrize("name", OTHERS)
def test_views_that_leave(name: str) -> None:
    compared(OTHERS[name], torch.float64)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode: Any) -> None:
    model = rewire.sparsify(Model(attends(by_unflatten)), 0.4)
    outputs_agree(model, mode)


def test_views_that_are_returned_are_ordinary() -> None:
    model = rewire.sparsify(Model(lambda y: y), 0.4)
    kept: list[Tensor] = []
    model.use = lambda y: kept.extend(by_unflatten(y)) or y.mean()
    rewire.use_engine(model, True)
    model(torch.randn(BATCH, TOKENS, WIDTH))
    assert [type(t) for t in kept] == [Tensor] * 3
    assert kept[0]._base is kept[1]._base is kept[2]._base is not None
    assert kept[0].shape == (BATCH, HEADS, TOKENS, SIZE)
    assert kept[0].stride() == (TOKENS * 3 * WIDTH, SIZE, 3 * WIDTH, 1)


def test_attention_is_explained() -> None:
    model = rewire.sparsify(Model(attends(by_unflatten)), 0.4)
    found = rewire.explain(model, torch.randn(BATCH, TOKENS, WIDTH))
    assert [stop.reason for stop in found.stops] == [
        "attention is computed by itself (F.scaled_dot_product_attention)"
    ]
    assert found.recorded == 2
