"""What stays dense in a converted model, and why, in a few lines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from rewire.trained import is_norm

_EXAMPLES = 3  # names for each reason
_NOTICEABLE = 0.01  # share of the parameters from which layers of an unknown kind are mentioned


class Leftover(NamedTuple):
    """A layer that stays dense though nobody asked for it.

    Attributes:
        name: of the layer, or of the parameters that are tied.
        reason: in the same words for all layers that have it.
        parameters: what it holds.
    """

    name: str
    reason: str
    parameters: tuple[Tensor, ...]


def leftover(module: nn.Module, name: str, reason: str) -> Leftover:
    """What is left of a layer with everything inside."""
    return Leftover(name or "the layer", reason, tuple(module.parameters()))


def holds_matrix(module: nn.Module) -> bool:
    """Whether a module of an unknown kind holds a weight matrix, or a stack of them.

    Embeddings, whose weights are looked up and not multiplied with, and norms do not count, nor do
    parameters that are broadcast over the batch, such as position embeddings
    of shape (1, tokens, features).
    """
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) or is_norm(module):
        return False
    return any(
        parameter is not None
        and not is_lazy(parameter)
        and parameter.is_floating_point()
        and parameter.dim() > 1
        and parameter.shape[0] > 1
        for parameter in module._parameters.values()
    )


def unknown_kind(module: nn.Module, name: str) -> Leftover:
    """What is left of a module of an unknown kind; its stacks of matrices are named."""
    parameters = {key: p for key, p in module._parameters.items() if p is not None}
    stacks = [
        key for key, p in parameters.items() if not is_lazy(p) and p.dim() == 3 and min(p.shape) > 1
    ]
    reason = f"there is no sparse {type(module).__name__}"
    if stacks:
        reason += (
            f", whose {shortened(stacks, _EXAMPLES)} hold matrices in 3-D parameters (experts)"
        )
    return Leftover(name, reason, (*parameters.values(),))


def noticeable(found: Sequence[Leftover], whole: Iterable[Tensor]) -> list[Leftover]:
    """Those whose reason concerns a share of the parameters that is worth a word."""
    total = _count(whole)
    shares = {
        reason: _count(p for one in group for p in one.parameters) / max(1, total)
        for reason, group in _groups(found)
    }
    return [one for one in found if shares[one.reason] >= _NOTICEABLE]


def reasons(found: Sequence[Leftover], whole: Iterable[Tensor]) -> str:
    """A line for each reason, with a few names and the share of the parameters, the largest first."""
    total = _count(whole)
    lines = []
    for reason, group in _groups(found):
        count = _count(p for one in group for p in one.parameters)
        names = shortened([*dict.fromkeys(one.name for one in group)], _EXAMPLES)
        lines.append((count, f"{reason}: {names} ({_percent(count, total)} of all parameters)"))
    lines.sort(key=lambda line: -line[0])
    return "\n".join(f"  {text}" for _, text in lines)


def described(found: Sequence[Leftover], whole: Iterable[Tensor]) -> str:
    """The text of a warning."""
    whole = list(whole)
    share = _percent(_count(p for one in found for p in one.parameters), _count(whole))
    layers = "1 layer stays" if len(found) == 1 else f"{len(found)} layers stay"
    return (
        f"{layers} dense, with {share} of the model's parameters (keep_dense= silences this):\n"
        f"{reasons(found, whole)}"
    )


def shortened(names: Sequence[str], most: int) -> str:
    """The first names, and how many more there are.

    >>> shortened(["a", "b", "c", "d"], 2)
    'a, b and 2 more'
    """
    if len(names) <= most:
        return ", ".join(names)
    return f"{', '.join(names[:most])} and {len(names) - most:,} more"


def _groups(found: Iterable[Leftover]) -> list[tuple[str, list[Leftover]]]:
    groups: dict[str, list[Leftover]] = {}
    for one in found:
        groups.setdefault(one.reason, []).append(one)
    return list(groups.items())


def _count(parameters: Iterable[Tensor]) -> int:
    """Elements, of shared parameters once; the size of lazy ones is not known."""
    once = {id(p): p for p in parameters}
    return sum(p.numel() for p in once.values() if not is_lazy(p))


def _percent(count: int, total: int) -> str:
    percent = 100 * count / max(1, total)
    return f"{percent:.0f} %" if percent >= 1 or count == 0 else "under 1 %"
