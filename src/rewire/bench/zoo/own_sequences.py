"""Our own definitions of common transformers and of the MLP-Mixer, for machines without their libraries.

Each computes what timm's or transformers' model of that name does; parameters are in the same order.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rewire.bench.zoo.public import CLASSES, VOCABULARY

_PATCH = 16
_WIDTH, _LAYERS, _HEADS, _CONTEXT = 384, 4, 6, 128  # of the language models


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, dropout: float = 0.0
) -> Tensor:
    """Attention of heads (batch, head, token, feature), as (batch, token, features)."""
    y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=causal)
    return y.transpose(1, 2).flatten(2)


def _mlp(width: int, inner: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))


class _ViTBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm2, self.mlp = nn.LayerNorm(width, eps=1e-6), _mlp(width, 4 * width)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.proj(attention(*qkv.unbind(0)))
        y: Tensor = x + self.mlp(self.norm2(x))
        return y


class ViT(nn.Module):
    """ViT-Ti/16."""

    def __init__(self, size: int, width: int = 192, heads: int = 3, depth: int = 12) -> None:
        super().__init__()
        self.class_token = nn.Parameter(1e-6 * torch.randn(1, 1, width))
        tokens = (size // _PATCH) ** 2 + 1
        self.positions = nn.Parameter(0.02 * torch.randn(1, tokens, width))
        self.patches = nn.Conv2d(3, width, _PATCH, _PATCH)
        self.blocks = nn.Sequential(*(_ViTBlock(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width, eps=1e-6), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(len(x), -1, -1), x], 1) + self.positions
        y: Tensor = self.head(self.norm(self.blocks(x))[:, 0])
        return y


class _MixerBlock(nn.Module):
    def __init__(self, width: int, tokens: int) -> None:
        super().__init__()
        self.norm1, self.over_tokens = nn.LayerNorm(width, eps=1e-6), _mlp(tokens, width // 2)
        self.norm2, self.over_channels = nn.LayerNorm(width, eps=1e-6), _mlp(width, 4 * width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.over_tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        y: Tensor = x + self.over_channels(self.norm2(x))
        return y


class Mixer(nn.Module):
    """Mixer-S/16."""

    def __init__(self, size: int, width: int = 512, depth: int = 8) -> None:
        super().__init__()
        tokens = (size // _PATCH) ** 2
        self.patches = nn.Conv2d(3, width, _PATCH, _PATCH)
        self.blocks = nn.Sequential(*(_MixerBlock(width, tokens) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width, eps=1e-6), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.patches(x).flatten(2).transpose(1, 2))
        y: Tensor = self.head(self.norm(x).mean(1))
        return y


def _heads(x: Tensor) -> Tensor:
    found: Tensor = x.unflatten(2, (_HEADS, -1)).transpose(1, 2)
    return found


class _BertLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.proj = (nn.Linear(_WIDTH, _WIDTH) for _ in range(4))
        self.norm1 = nn.LayerNorm(_WIDTH, eps=1e-12)
        self.mlp = _mlp(_WIDTH, 4 * _WIDTH)
        self.norm2 = nn.LayerNorm(_WIDTH, eps=1e-12)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (_heads(layer(x)) for layer in (self.query, self.key, self.value))
        y = attention(q, k, v, dropout=self.dropout.p if self.training else 0.0)
        x = self.norm1(self.dropout(self.proj(y)) + x)
        z: Tensor = self.norm2(self.dropout(self.mlp(x)) + x)
        return z


class Bert(nn.Module):
    """BERT with a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = (
            nn.Embedding(VOCABULARY, _WIDTH),
            nn.Embedding(_CONTEXT, _WIDTH),
        )
        self.types = nn.Embedding(2, _WIDTH)
        self.norm, self.dropout = nn.LayerNorm(_WIDTH, eps=1e-12), nn.Dropout(0.1)
        self.layers = nn.Sequential(*(_BertLayer() for _ in range(_LAYERS)))
        self.pooler, self.head = nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, 2)
        for part in (self.words, self.positions, self.types):
            nn.init.normal_(part.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1])
        x = self.words(tokens) + self.types(torch.zeros_like(tokens)) + self.positions(places)
        x = self.layers(self.dropout(self.norm(x)))
        y: Tensor = self.head(self.dropout(torch.tanh(self.pooler(x[:, 0]))))
        return y


class _RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(_WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))


def _rotated(x: Tensor) -> Tensor:
    """Rotary position embedding of heads."""
    half = x.shape[-1] // 2
    frequencies = 10_000.0 ** -(torch.arange(half, dtype=torch.float32) / half)
    angles = torch.outer(torch.arange(x.shape[-2], dtype=torch.float32), frequencies)
    cosine, sine = (
        torch.cat([wave, wave], -1).to(x.dtype) for wave in (angles.cos(), angles.sin())
    )
    return x * cosine + torch.cat([-x[..., half:], x[..., :half]], -1) * sine


class _LlamaLayer(nn.Module):
    def __init__(self, inner: int) -> None:
        super().__init__()
        self.query, self.key, self.value, self.proj = (
            nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(4)
        )
        self.gate, self.up = (nn.Linear(_WIDTH, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, _WIDTH, bias=False)
        self.norm1, self.norm2 = _RMSNorm(), _RMSNorm()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k = _rotated(_heads(self.query(y))), _rotated(_heads(self.key(y)))
        x = x + self.proj(attention(q, k, _heads(self.value(y)), causal=True))
        y = self.norm2(x)
        x = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return x


class Llama(nn.Module):
    """Llama: predicts the next token."""

    def __init__(self, inner: int = 1024) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, _WIDTH)
        self.layers = nn.Sequential(*(_LlamaLayer(inner) for _ in range(_LAYERS)))
        self.norm, self.head = _RMSNorm(), nn.Linear(_WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        y: Tensor = self.head(self.norm(self.layers(self.words(tokens))))
        return y
