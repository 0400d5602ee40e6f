"""A small decoder-only transformer for language modelling."""

import torch
from torch import Tensor, nn

from rewire.models._arguments import check_counts, check_dropout
from rewire.models.transformer import Block


class GPT(nn.Module):
    """Token and position embeddings, causal transformer blocks, an untied linear head."""

    def __init__(
        self, vocabulary: int, context: int, width: int, depth: int, heads: int, dropout: float
    ) -> None:
        super().__init__()
        self.context = context
        self.token_embedding = nn.Embedding(vocabulary, width)
        self.position_embedding = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        head_size = width // heads
        self.blocks = nn.Sequential(
            *(
                Block(width, heads, head_size, 4 * width, bias=True, causal=True, dropout=dropout)
                for _ in range(depth)
            )
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (batch, time, vocabulary) of what follows each of the tokens (batch, time)."""
        time = tokens.shape[1]
        if time > self.context:
            raise ValueError(
                f"the model sees at most {self.context} tokens, got {time}: "
                "shorten the input or build the model with a larger context"
            )
        places = torch.arange(time, device=tokens.device)
        x = self.dropout(self.token_embedding(tokens) + self.position_embedding(places))
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def gpt(
    vocabulary: int = 65,
    context: int = 128,
    width: int = 384,
    depth: int = 6,
    heads: int = 6,
    dropout: float = 0.0,
) -> GPT:
    """A small GPT: pre-norm blocks, learned positions, GELU perceptrons of ``4*width``.

    Args:
        vocabulary: number of different tokens.
        context: the longest sequence it can be given.
        width: size of a token, a multiple of ``heads`` (not a multiplier, unlike other models).
        depth: number of blocks.
        heads: number of attention heads.
        dropout: of the embeddings, the attention weights and what each block adds.

    Example:
        >>> tokens = torch.zeros(2, 16, dtype=torch.int64)
        >>> gpt(depth=1)(tokens).shape
        torch.Size([2, 16, 65])
    """
    check_counts(vocabulary=vocabulary, context=context, width=width, depth=depth, heads=heads)
    check_dropout(dropout)
    if width % heads:
        raise ValueError(f"width must be a multiple of heads, got {width} and {heads}")
    return GPT(vocabulary, context, width, depth, heads, dropout)
