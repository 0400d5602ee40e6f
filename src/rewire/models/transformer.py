"""The pre-norm transformer block that the ViT and the GPT share.

Vaswani et al. Attention Is All You Need. NeurIPS 2017.
"""

import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Multi-head self-attention with one fused projection for queries, keys and values."""

    def __init__(
        self, dim: int, heads: int, head_size: int, *, bias: bool, causal: bool, dropout: float
    ) -> None:
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.dropout = dropout
        self.to_qkv = nn.Linear(dim, 3 * heads * head_size, bias=bias)
        self.to_out = nn.Linear(heads * head_size, dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.to_qkv(x).unflatten(2, (3, self.heads, -1))  # (batch, token, 3, head, size)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind()  # each (batch, head, token, size)
        mixed = F.scaled_dot_product_attention(
            query,
            key,
            value,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=self.causal,
        )
        out: Tensor = self.to_out(mixed.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    """Attention and a GELU perceptron, each normalised first and added to its input.

    Args:
        dim: size of a token.
        heads: number of attention heads.
        head_size: size of one head; ``heads*head_size`` need not be ``dim``.
        mlp_dim: hidden size of the perceptron.
        bias: whether the attention's projections have biases.
        causal: whether a token sees only itself and what came before.
        dropout: of the attention weights and of what either half adds.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        head_size: int,
        mlp_dim: int,
        *,
        bias: bool,
        causal: bool,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attention = Attention(dim, heads, head_size, bias=bias, causal=causal, dropout=dropout)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, mlp_dim), nn.GELU(), nn.Linear(mlp_dim, dim))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        x = x + self.dropout(self.mlp(self.norm2(x)))
        return x
