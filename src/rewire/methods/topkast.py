"""Top-KAST."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rewire import optim, sampling, wrappers
from rewire.connections import Connections
from rewire.methods.arguments import check_integer
from rewire.methods.base import Rewirer
from rewire.methods.history import LayerRewiring, Rewiring, total
from rewire.methods.layer_view import LayerView, Like, parameters
from rewire.nn.masked_layer import MaskedLayer
from rewire.ops.sampling import select


class TopKAST(Rewirer):
    r"""Top-KAST: the largest weights are used, some more are trained, and all are kept.

    In every layer the forward pass uses A, the largest weights, and the gradient is that of
    :math:`B \supset A`, the largest weights again but more of them; every ``every`` steps both are chosen
    anew. Weights outside of B rest: neither momentum nor weight decay moves them, and what comes back has
    its old value. Those that come into B start with fresh optimizer state. Right before each update the
    gradient of :math:`\frac{\lambda}{2} (\sum_A \theta^2 + \frac{1}{D} \sum_{B \setminus A} \theta^2)` is
    added to ``.grad``, D being the layer's density, less what the optimizer's weight decay adds.

    Args:
        model: has masked layers with dense weights:
            ``rewire.sparsify(model, sparsity=..., weights="dense", storage="masked")``; each keeps its
            number of active connections.
        optimizer: trains them.
        every: steps from one choice to the next.
        until: the last step that may end with one; None for no end.
        explore: up to this step every step ends with one.
        backward: size of B, as a multiple of that of A.
        penalty: the exploration penalty :math:`\lambda`; by default the optimizer's weight decay.
        seed: for the others' sake; nothing is random.

    Reference: Jayakumar et al., *Top-KAST: Top-K always sparse training*, 2020.
    """

    guided = False
    settings: ClassVar[tuple[str, ...]] = (
        *("every", "until", "scope", "seed"),
        *("backward", "penalty", "explore_until"),
    )

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        every: int = 1000,
        until: int | None = None,
        explore: int = 0,
        backward: float = 2.0,
        penalty: float | None = None,
        scope: str = "layer",
        seed: int = 0,
    ) -> None:
        if scope != "layer":
            raise ValueError('Top-KAST chooses layer by layer: leave scope at "layer"')
        if not backward >= 1:
            raise ValueError(f"backward must be at least 1: B holds A, got {backward}")
        if penalty is not None and not 0 <= penalty < float("inf"):
            raise ValueError(f"penalty must be a number of at least 0, got {penalty}")
        if check_integer("explore", explore) < 0:
            raise ValueError(f"explore must be at least 0, got {explore}")
        self.backward, self.penalty, self.explore_until = backward, penalty, explore
        super().__init__(
            *(model, optimizer),
            every=every,
            until=until,
            fraction=lambda t: 0.0,
            scope=scope,
            seed=seed,
        )
        inner = wrappers.optimizers(optimizer)[1:]
        if inner:
            raise ValueError(
                f"Top-KAST acts right before and after each update, which {type(optimizer).__name__} "
                f"leaves to {type(inner[0]).__name__}: use that one by itself"
            )
        for view in self._views:
            _check(view)
        self._resting: dict[str, Tensor] = {}
        for view in self._views:
            self._apply(view, self._plan(view))
        for register, hook in (
            (optimizer.register_step_pre_hook, self._before),
            (optimizer.register_step_post_hook, self._after),
        ):
            cast(Any, register)(optim.weak_hook(hook))

    def due(self, t: int) -> bool:
        """Every step up to ``explore``, then as :meth:`Rewirer.due`."""
        return 0 < t <= self.explore_until or super().due(t)

    def _plan(self, view: LayerView) -> _Change:
        """Choose A and B of a layer; nothing is changed yet."""
        layer = _masked(view)
        magnitudes = layer.flat(layer.weight.detach()).abs().flatten()
        reach = min(sampling.ceil(self.backward * layer.count), magnitudes.numel())
        a, b = (
            layer.shaped(select(magnitudes, count).view(layer.n_out, layer.domain.width))
            for count in (layer.count, reach)
        )
        if layer.reach is None:
            return _Change(a, b, None)
        entering = b & ~layer.reach
        state = optim.carry(
            self.optimizer,
            layer.weight,
            lambda value, fresh: torch.where(entering, torch.full_like(value, fresh), value),
        )
        return _Change(a, b, state)

    def _apply(self, view: LayerView, change: _Change) -> tuple[Connections, Connections]:
        """Make the change; returns the connections before and after."""
        layer, before = _masked(view), view.active
        if change.optimizer is not None:
            optim.put(layer.weight, change.optimizer)
        layer.mask.copy_(change.active)
        layer.reach = change.reach
        view.memory |= {"active": layer.mask, "reach": change.reach}
        return before, view.active

    @torch.no_grad()
    def _rewire(self) -> Rewiring:
        parts: dict[str, LayerRewiring] = {}
        views = [view for view in self._views if view.layer.parameter.requires_grad]
        optim.check(self.optimizer, parameters(views))
        changes = {view.name: self._plan(view) for view in views}  # may raise
        for view in self._views:
            counter = view.count()
            grown, reach = 0, 0
            if view.name in changes:
                before, after = self._apply(view, changes[view.name])
                new = ~torch.isin(after.keys(), before.keys())
                grown, reach = int(new.sum()), int(view.memory["reach"].sum())
                counter.add(sampling.rows(after.packed()))
                view.layer.parameter.grad = None
            size, count = view.layer.domain.size, view.layer.count
            rest = max(0, reach - count)
            parts[view.name] = LayerRewiring(count, grown, grown, rest, counter.total(), size)
        rewiring = total(self.t, 0.0, parts)
        self.history.append(rewiring)
        return rewiring

    @torch.no_grad()
    def _before(self) -> None:
        """Add the penalty; remember what rests."""
        self._resting.clear()
        for view in self._views:
            layer = _masked(view)
            weight, reach = layer.weight, layer.reach
            if weight.grad is None or reach is None:
                continue
            decay = float(optim.group_of(self.optimizer, weight).get("weight_decay", 0.0))
            strength = decay if self.penalty is None else self.penalty
            used, explored = strength - decay, strength / layer.density - decay
            factor = torch.where(layer.mask, used, explored).to(weight.dtype)
            weight.grad += torch.where(reach, factor * weight, weight.new_zeros(()))
            self._resting[view.name] = weight.detach().clone()

    @torch.no_grad()
    def _after(self) -> None:
        """Put back what rests."""
        for view in self._views:
            layer = _masked(view)
            if view.name in self._resting and layer.reach is not None:
                kept = self._resting[view.name]
                layer.weight.copy_(torch.where(layer.reach, layer.weight, kept))
        self._resting.clear()

    def memory_of(self, view: LayerView) -> dict[str, Like]:
        """The masks of A and B."""
        like = Like(tuple(_masked(view).mask.shape), torch.bool, always=True)
        return {"active": like, "reach": like}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As :meth:`Rewirer.load_state_dict`."""
        super().load_state_dict(state)
        for view in self._views:
            layer = _masked(view)
            layer.reach = view.memory["reach"].to(layer.mask)
            layer.mask.copy_(view.memory["active"])


class _Change(NamedTuple):
    """A and B of a layer after a rewiring, and what the optimizer keeps then."""

    active: Tensor
    reach: Tensor
    optimizer: optim.Carried | None


def _masked(view: LayerView) -> MaskedLayer:
    assert isinstance(view.layer, MaskedLayer)
    return view.layer


def _check(view: LayerView) -> None:
    how = 'make the model with rewire.sparsify(..., weights="dense", storage="masked")'
    if not isinstance(view.layer, MaskedLayer):
        raise ValueError(f"{view.name} is a sparse layer, and Top-KAST keeps dense weights: {how}")
    hidden = torch.where(view.layer.mask, 0, view.layer.weight.detach())
    if view.layer.density < 1 and not bool(hidden.any()):
        raise ValueError(f"{view.name} has no weights outside of its mask to explore: {how}")
