"""Averages of weights over training, whose connections follow those of the model."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from rewire.connections import Connections
from rewire.conversion import replace
from rewire.engine import use_engine
from rewire.nn import copies
from rewire.nn.layer import ConnectedLayer
from rewire.nn.masked_layer import MaskedLayer
from rewire.nn.sparse import SparseLayer
from rewire.ops import sampling, topology


class EMA(nn.Module):
    r"""An exponential moving average of a model's weights, for evaluation.

    .. math:: \bar w \leftarrow d \, \bar w + (1 - d) \, w

    It holds what an average of dense weights would hold at the present connections, if that had been set
    to zero wherever a connection was removed: a connection's average begins at zero when it is grown, and
    is discarded when it goes. That is noticed in :meth:`update`, by itself. The first update copies the
    weights, as ``torch.optim.swa_utils.AveragedModel`` does.

    It is a module: call it like the model, save its ``state_dict()`` with that of the model, and load
    both in any order, to resume exactly. ``ema.module`` is a model of the same class as the given one, in
    evaluation mode and without gradients, for :func:`rewire.save` or
    ``model.load_state_dict(ema.module.state_dict())``.

    Args:
        model: the model that trains, sparse, masked or dense. It is not kept alive.
        decay: d; or a function of the number of updates so far, such as ``lambda n: n / (n + 1)`` for an
            equal average of all (SWA), or ``lambda n: min(0.999, (1 + n) / (10 + n))``.
        average_buffers: average floating-point buffers (the statistics of batch norms) too; by default
            they are copied from the model in every update. Others are always copied.

    Attributes:
        module: the averaged model.
        updates: how many updates there were.

    Example:
        >>> import rewire
        >>> layers = nn.Linear(20, 50), nn.ReLU(), nn.Linear(50, 3)
        >>> model = rewire.sparsify(nn.Sequential(*layers), sparsity=0.9)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> rewirer = rewire.GSE(model, optimizer, every=2, until=100)
        >>> ema = rewire.EMA(model, decay=0.99)
        >>> for _ in range(4):
        ...     optimizer.zero_grad()
        ...     model(torch.randn(8, 20)).square().mean().backward()
        ...     optimizer.step()
        ...     _ = rewirer.step()
        ...     ema.update()
        >>> ema(torch.randn(8, 20)).shape
        torch.Size([8, 3])
    """

    module: nn.Module
    updates: Tensor

    def __init__(
        self,
        model: nn.Module,
        decay: float | Callable[[int], float] = 0.999,
        *,
        average_buffers: bool = False,
    ) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
        if not callable(decay):
            _check_decay(decay, "decay")
        self.decay, self.average_buffers = decay, average_buffers
        self.module = copy.deepcopy(model).requires_grad_(False).eval()
        for layer in self.module.modules():
            copies.release(layer)
        device = next((p.device for p in model.parameters()), None)
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64, device=device))
        self._model = weakref.ref(model)
        self._seen: dict[str, Connections] = {}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the averaged model."""
        return self.module(*args, **kwargs)

    @torch.no_grad()
    def update(self) -> None:
        """Update the average with the model's weights; call it after ``rewirer.step()``."""
        model = self._model()
        if model is None:
            raise RuntimeError("the model that this is an average of does not exist any more")
        n = int(self.updates)
        decay = 0.0
        if n:
            decay = self.decay(n) if callable(self.decay) else self.decay
            _check_decay(decay, f"decay({n})")
        self._follow(model)
        fixed = _connections_of(self.module)
        decays = {"parameters": decay, "buffers": decay if self.average_buffers else 0.0}
        for kind, factor in decays.items():
            mine, theirs = (
                {n: t for n, t in getattr(root, f"named_{kind}")() if n not in fixed}
                for root in (self.module, model)
            )
            if mine.keys() != theirs.keys():
                other = ", ".join(sorted(mine.keys() ^ theirs.keys()))
                raise RuntimeError(
                    f"the model has other {kind} than when its EMA was made: {other}"
                )
            for name, tensor in mine.items():
                _average(tensor, theirs[name], factor)
        self.updates += 1

    def _follow(self, model: nn.Module) -> None:
        """Bring the averaged model to the present connections if they are not those of the last time."""
        layers = {n: m for n, m in model.named_modules() if isinstance(m, ConnectedLayer)}
        if layers.keys() != self._seen.keys() or not all(
            layer.has(self._seen[name]) for name, layer in layers.items()
        ):
            bring(self.module, model)
            self._seen = {name: layer.connections for name, layer in layers.items()}

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load a state dict; the average gets the connections saved in it."""
        self._seen = {}
        return super().load_state_dict(*args, **kwargs)


def check(averaged: nn.Module, model: nn.Module) -> list[tuple[ConnectedLayer, ConnectedLayer]]:
    """The sparse and masked layers of an averaged model, each with the model's, by their order.

    Raises:
        ValueError: if they do not fit each other, or the average would not leave connections alone.
    """
    if not isinstance(averaged, nn.Module):
        raise TypeError(f"expected an nn.Module to follow, got {type(averaged).__name__}")
    mine, theirs = (
        [m for m in root.modules() if isinstance(m, ConnectedLayer)] for root in (averaged, model)
    )
    sizes = [[(m.domain, m.taps) for m in layers] for layers in (mine, theirs)]
    if sizes[0] != sizes[1] or {*map(id, mine)} & {*map(id, theirs)}:
        raise ValueError(
            f"{type(averaged).__name__} with {len(mine)} sparse layers is no copy of "
            f"{type(model).__name__} with {len(theirs)}: give a model that was made "
            "by copy.deepcopy, as AveragedModel does"
        )
    if isinstance(averaged, AveragedModel) and averaged.use_buffers:
        raise ValueError(
            "AveragedModel with use_buffers=True would average the connections themselves: make it with "
            "use_buffers=False, or use rewire.EMA(model, average_buffers=True)"
        )
    for layer in mine:
        if isinstance(layer, SparseLayer):
            try:
                topology.ensure(layer.topology, layer.n_in, layer.image_taps)
            except topology.TopologyError as error:
                raise ValueError(
                    f"{type(averaged).__name__} has averaged the connections themselves, not only values: "
                    f"use rewire.EMA ({error})"
                ) from error
    return list(zip(mine, theirs, strict=True))


@torch.no_grad()
def bring(averaged: nn.Module, model: nn.Module) -> None:
    """Give the layers of a copy the model's connections; values follow by coordinates, those of connections
    that it does not have are zero."""
    handed_over: dict[nn.Module, ConnectedLayer] = {}
    for mine, layer in check(averaged, model):
        copies.release(mine)
        if (
            isinstance(mine, MaskedLayer)
            and isinstance(layer, MaskedLayer)
            and layer.reach is not None
        ):
            mine.mask.copy_(layer.mask)  # weights outside of it live on
            if mine.reach is not None:
                mine.reach.copy_(layer.reach)
            continue
        old, new = mine.connections, layer.connections
        if type(mine) is not type(layer):
            sparse = copy.deepcopy(layer).requires_grad_(mine.parameter.requires_grad)
            sparse.train(mine.training)
            sparse.bias = mine.bias
            sparse.to(mine.parameter.device, mine.parameter.dtype)
            copies.release(sparse)
            handed_over[mine] = sparse
        elif _equal(old, new):
            continue
        values = sampling.follow(mine.gather(mine.parameter.detach()), _places(old, new))
        own = layer.domain.of(new.indptr.clone(), new.indices.clone())
        handed_over.get(mine, mine).set_connections(own, values)
    if handed_over:
        replace(averaged, handed_over)
        inner = getattr(averaged, "module", averaged)
        use_engine(inner if isinstance(inner, nn.Module) else averaged)


def _equal(a: Connections, b: Connections) -> bool:
    pairs = ((a.indptr, b.indptr), (a.indices, b.indices))
    return all(torch.equal(one, other.to(one.device)) for one, other in pairs)


def _places(old: Connections, new: Connections) -> Tensor:
    """Where each new connection stands among the old ones, -1 where it does not; int32."""
    have, want = old.keys(), new.keys().to(old.indptr.device)
    if not have.numel():
        return torch.full_like(want, -1, dtype=torch.int32)
    place = torch.searchsorted(have, want).clamp_(max=have.numel() - 1)
    return torch.where(have[place] == want, place, -1).int()


def _connections_of(model: nn.Module) -> set[str]:
    """The names of buffers that are connections."""
    return {
        f"{name}.{buffer}".lstrip(".")
        for name, layer in model.named_modules()
        if isinstance(layer, ConnectedLayer)
        for buffer in layer._buffers
    }


def _average(mine: Tensor, other: Tensor, decay: float) -> None:
    if decay and (mine.is_floating_point() or mine.is_complex()):
        mine.lerp_(other.detach().to(mine), 1 - decay)
    else:
        mine.copy_(other)


def _check_decay(decay: Any, name: str) -> None:
    if not isinstance(decay, int | float) or not 0 <= decay <= 1:
        raise ValueError(f"{name} must be a number in [0, 1], got {decay!r}")
