"""Multi-head attention whose projections are layers of their own, so that they can be sparse."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rewire.nn import tracing
from rewire.nn.weight_errors import DENSE_STATE

_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")


class SparseMultiheadAttention(nn.Module):
    """What ``nn.MultiheadAttention`` computes, with a layer for each projection.

    Its calls take the same arguments and give the same results. Nested tensors and torch's fused
    inference path, which read dense weights, are not for it.

    Args:
        embed_dim, num_heads, dropout, add_zero_attn, batch_first: as for ``nn.MultiheadAttention``.
        q_proj, k_proj, v_proj: layers from queries, keys and values to ``embed_dim`` features.
        out_proj: layer from ``embed_dim`` to ``embed_dim`` features.
        bias_k, bias_v: one more key and value, (1, 1, embed_dim), or None.
    """

    # What nn.TransformerEncoderLayer and nn.TransformerEncoder look at; None keeps them from fused paths.
    in_proj_weight = in_proj_bias = None
    _qkv_same_embed_dim = False
    bias_k: nn.Parameter | None
    bias_v: nn.Parameter | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        q_proj: nn.Module,
        k_proj: nn.Module,
        v_proj: nn.Module,
        out_proj: nn.Module,
        dropout: float = 0.0,
        bias_k: nn.Parameter | None = None,
        bias_v: nn.Parameter | None = None,
        add_zero_attn: bool = False,
        batch_first: bool = False,
    ) -> None:
        super().__init__()
        if (bias_k is None) != (bias_v is None):
            raise ValueError("give both of bias_k and bias_v, or none")
        if embed_dim % num_heads:
            raise ValueError(f"{num_heads} heads do not share {embed_dim} features evenly")
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.head_dim = embed_dim // num_heads
        self.dropout, self.add_zero_attn, self.batch_first = dropout, add_zero_attn, batch_first
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = q_proj, k_proj, v_proj, out_proj
        self.register_parameter("bias_k", bias_k)
        self.register_parameter("bias_v", bias_v)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, a: Any, b: Any, c: Any, d: Any, error_msgs: list[str]
    ) -> None:
        if any(prefix + name in state_dict for name in ("in_proj_weight", "q_proj_weight")):
            error_msgs.append(DENSE_STATE.format(prefix.rstrip(".") or type(self).__name__))
        super()._load_from_state_dict(state_dict, prefix, a, b, c, d, error_msgs)

    def reset_parameters(self) -> None:
        """Draw the additional key and value, as ``nn.MultiheadAttention`` does."""
        for bias in (self.bias_k, self.bias_v):
            if bias is not None:
                nn.init.xavier_normal_(bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention and, if they are needed, its weights; see ``nn.MultiheadAttention``."""
        if tracing.is_symbolic(query):
            given = (query, key, value, key_padding_mask, need_weights, attn_mask)
            return tracing.node(self, *given, average_attn_weights, is_causal)  # type: ignore[no-any-return]
        dims = {x.dim() for x in (query, key, value)}
        if dims not in ({2}, {3}) or query.is_nested or key.is_nested or value.is_nested:
            raise ValueError(
                "query, key and value must all be plain tensors (no nested ones) of (tokens, features) or "
                f"of batches of these, not {', '.join(str(x.dim()) for x in (query, key, value))}-D"
            )
        if is_causal and attn_mask is None:
            raise ValueError("is_causal is a hint about attn_mask: give that too")
        batched, turned = dims == {3}, dims == {3} and not self.batch_first
        q, k, v = self.q_proj(query), self.k_proj(key), self.v_proj(value)
        q, k, v = (
            x.transpose(0, 1) if turned else x if batched else x.unsqueeze(0) for x in (q, k, v)
        )  # each (batch, token, features)
        hint = is_causal and key_padding_mask is None and not need_weights  # is all that is needed
        mask = None if hint else self._merged(q, k, key_padding_mask, attn_mask)
        if self.bias_k is not None and self.bias_v is not None:
            each = (k.shape[0], -1, -1)
            k = torch.cat([k, self.bias_k.expand(each)], 1)
            v = torch.cat([v, self.bias_v.expand(each)], 1)
        q, k, v = (
            x.unflatten(2, (self.num_heads, self.head_dim)).transpose(1, 2) for x in (q, k, v)
        )  # each (batch, head, token, size)
        if self.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        mixed, weights = self._attend(q, k, v, mask, hint, need_weights)
        mixed = mixed.transpose(1, 2).flatten(2)
        mixed = mixed.transpose(0, 1) if turned else mixed if batched else mixed.squeeze(0)
        if weights is not None:
            weights = weights.mean(1) if average_attn_weights else weights
            weights = weights if batched else weights.squeeze(0)
        return self.out_proj(mixed), weights

    def _merged(
        self, q: Tensor, k: Tensor, padding: Tensor | None, mask: Tensor | None
    ) -> Tensor | None:
        """What both masks add to the scores, (batch or 1, heads or 1, target or 1, source)."""
        batch, target, source, heads = q.shape[0], q.shape[1], k.shape[1], self.num_heads
        shape: tuple[int, ...]
        if mask is not None:
            shape = (target, source) if mask.dim() == 2 else (batch * heads, target, source)
            mask = _additive("attn_mask", mask, shape, q.dtype)
            mask = mask[None, None] if mask.dim() == 2 else mask.unflatten(0, (batch, heads))
        if padding is not None:
            shape = (source,) if padding.dim() == 1 and batch == 1 else (batch, source)
            padding = _additive("key_padding_mask", padding, shape, q.dtype).view(-1, 1, 1, source)
        merged = mask if padding is None else padding if mask is None else mask + padding
        more = int(self.bias_k is not None) + int(self.add_zero_attn)
        return merged if merged is None or not more else F.pad(merged, (0, more))

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        dropout = self.dropout if self.training else 0.0
        if not need_weights:
            return F.scaled_dot_product_attention(q, k, v, bias, dropout, causal), None
        scores = (q * math.sqrt(1.0 / self.head_dim)) @ k.transpose(-2, -1)
        weights = F.softmax(scores if bias is None else scores + bias, dim=-1)
        if dropout:
            weights = F.dropout(weights, dropout)
        return weights @ v, weights

    def extra_repr(self) -> str:
        parts = [f"embed_dim={self.embed_dim}, num_heads={self.num_heads}"]
        parts += [f"dropout={self.dropout}"] if self.dropout else []
        parts += ["add_zero_attn=True"] if self.add_zero_attn else []
        parts += ["batch_first=True"] if self.batch_first else []
        return ", ".join(parts)

    @classmethod
    def from_dense(cls, module: nn.MultiheadAttention) -> SparseMultiheadAttention:
        """The same with ``nn.Linear`` projections, whose parameters share the memory of the module's."""
        size = module.embed_dim
        if module._qkv_same_embed_dim:
            weights = module.in_proj_weight.detach().split(size)
            frozen = [not module.in_proj_weight.requires_grad] * 3
        else:
            given = [module.q_proj_weight, module.k_proj_weight, module.v_proj_weight]
            weights = tuple(weight.detach() for weight in given)
            frozen = [not weight.requires_grad for weight in given]
        bias = module.in_proj_bias
        biases = (None,) * 3 if bias is None else bias.detach().split(size)
        trained = bias is not None and bias.requires_grad
        pairs = zip(weights, frozen, biases, strict=True)
        layers = [_linear(w, b, not still, trained) for w, still, b in pairs]
        new = cls(
            *(size, module.num_heads),
            q_proj=layers[0],
            k_proj=layers[1],
            v_proj=layers[2],
            out_proj=module.out_proj,
            dropout=module.dropout,
            bias_k=module.bias_k,  # type: ignore[arg-type]
            bias_v=module.bias_v,  # type: ignore[arg-type]
            add_zero_attn=module.add_zero_attn,
            batch_first=module.batch_first,
        )
        for part in (new, *layers):
            part.training = module.training
        return new

    @property
    def packable(self) -> bool:
        """Whether all projections are ``nn.Linear``."""
        return all(isinstance(getattr(self, name), nn.Linear) for name in _PROJECTIONS)

    def to_dense(self) -> nn.MultiheadAttention:
        """The ``nn.MultiheadAttention``, if all projections are ``nn.Linear``."""
        if not self.packable:
            raise ValueError("not all projections are dense; call rewire.densify")
        q, k, v, out = (cast(nn.Linear, getattr(self, name)) for name in _PROJECTIONS)
        bias = q.bias is not None
        dense: nn.MultiheadAttention = nn.MultiheadAttention(
            *(self.embed_dim, self.num_heads, self.dropout, bias, self.bias_k is not None),
            *(self.add_zero_attn, k.in_features, v.in_features, self.batch_first),
            device="meta",
        )
        packed = dense._parameters
        if dense._qkv_same_embed_dim:
            packed["in_proj_weight"] = _joined([layer.weight for layer in (q, k, v)])
        else:
            for name, layer in (("q", q), ("k", k), ("v", v)):
                packed[f"{name}_proj_weight"] = cast(nn.Parameter, layer.weight)
        if bias:
            packed["in_proj_bias"] = _joined([layer.bias for layer in (q, k, v)])
        if self.bias_k is not None:
            packed["bias_k"], packed["bias_v"] = self.bias_k, self.bias_v
        if type(out) is nn.Linear:
            dense.out_proj.__dict__.update(out.__dict__)  # keeps the class that torch has there
        else:
            dense._modules["out_proj"] = out
        dense.training = self.training
        return dense


def _additive(name: str, mask: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if tuple(mask.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(mask.shape)}, expected {shape}")
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)
    if not mask.is_floating_point():
        raise ValueError(f"{name} must be boolean or real numbers, got {mask.dtype}")
    return mask


def _joined(parts: list[Tensor]) -> nn.Parameter:
    return nn.Parameter(torch.cat([p.detach() for p in parts]), any(p.requires_grad for p in parts))


def _linear(weight: Tensor, bias: Tensor | None, trained: bool, bias_trained: bool) -> nn.Linear:
    n_out, n_in = weight.shape
    layer = nn.Linear(n_in, n_out, bias is not None, device="meta")
    layer.weight = nn.Parameter(weight, trained)
    if bias is not None:
        layer.bias = nn.Parameter(bias, bias_trained)
    return layer


def attention_obstacle(module: nn.MultiheadAttention) -> str | None:
    """Why the projections of an attention cannot be taken apart, or None if they can."""
    if type(module).forward is not nn.MultiheadAttention.forward or "forward" in vars(module):
        return f"{type(module).__name__} has a forward of its own"
    names = {"in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias"}
    own = set(module._parameters) <= {*names, "bias_k", "bias_v"} and not module._buffers
    if not own or set(module._modules) != {"out_proj"}:
        return "its weight is computed (parametrization, weight norm, pruning), remove that first"
    out = module.out_proj
    if type(out).forward is not nn.Linear.forward or "forward" in vars(out):
        return f"its out_proj, a {type(out).__name__}, has a forward of its own"
    return None


# torch's fused inference paths read dense weights past the layers' forward ------------------------

_KEPT = "_fused_path"  # where the setting is kept that we change
_SETTING: dict[type[nn.Module], tuple[str, Any]] = {
    nn.TransformerEncoderLayer: ("activation_relu_or_gelu", 0),
    nn.TransformerEncoder: ("use_nested_tensor", False),
}


def block_fused_path(module: nn.Module) -> None:
    """Let a transformer encoder call its layers, always."""
    for kind, (name, off) in _SETTING.items():
        if isinstance(module, kind) and hasattr(module, name) and not hasattr(module, _KEPT):
            setattr(module, _KEPT, getattr(module, name))
            setattr(module, name, off)


def allow_fused_path(module: nn.Module) -> None:
    """Take :func:`block_fused_path` back."""
    for kind, (name, _) in _SETTING.items():
        if isinstance(module, kind) and hasattr(module, _KEPT):
            setattr(module, name, getattr(module, _KEPT))
            delattr(module, _KEPT)
