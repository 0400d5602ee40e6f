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
from rewire.methods.site import Like, Site, parameters
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
        for site in self._sites:
            _check(site)
        self._resting: dict[str, Tensor] = {}
        for site in self._sites:
            self._apply(site, self._plan(site))
        for register, hook in (
            (optimizer.register_step_pre_hook, self._before),
            (optimizer.register_step_post_hook, self._after),
        ):
            cast(Any, register)(optim.weak_hook(hook))

    def due(self, t: int) -> bool:
        """Every step up to ``explore``, then as :meth:`Rewirer.due`."""
        return 0 < t <= self.explore_until or super().due(t)

    def _plan(self, site: Site) -> _Change:
        """Choose A and B of a layer; nothing is changed yet."""
        layer = _masked(site)
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

    def _apply(self, site: Site, change: _Change) -> tuple[Connections, Connections]:
        """Make the change; returns the connections before and after."""
        layer, before = _masked(site), site.active
        if change.optimizer is not None:
            optim.put(layer.weight, change.optimizer)
        layer.mask.copy_(change.active)
        layer.reach = change.reach
        site.memory |= {"active": layer.mask, "reach": change.reach}
        return before, site.active

    @torch.no_grad()
    def _rewire(self) -> Rewiring:
        parts: dict[str, LayerRewiring] = {}
        sites = [site for site in self._sites if site.layer.parameter.requires_grad]
        optim.check(self.optimizer, parameters(sites))
        changes = {site.name: self._plan(site) for site in sites}  # may raise
        for site in self._sites:
            counter = site.count()
            grown, reach = 0, 0
            if site.name in changes:
                before, after = self._apply(site, changes[site.name])
                new = ~torch.isin(after.keys(), before.keys())
                grown, reach = int(new.sum()), int(site.memory["reach"].sum())
                counter.add(sampling.rows(after.packed()))
                site.layer.parameter.grad = None
            size, count = site.layer.domain.size, site.layer.count
            rest = max(0, reach - count)
            parts[site.name] = LayerRewiring(count, grown, grown, rest, counter.total(), size)
        rewiring = total(self.t, 0.0, parts)
        self.history.append(rewiring)
        return rewiring

    @torch.no_grad()
    def _before(self) -> None:
        """Add the penalty; remember what rests."""
        self._resting.clear()
        for site in self._sites:
            layer = _masked(site)
            weight, reach = layer.weight, layer.reach
            if weight.grad is None or reach is None:
                continue
            decay = float(optim.group_of(self.optimizer, weight).get("weight_decay", 0.0))
            strength = decay if self.penalty is None else self.penalty
            used, explored = strength - decay, strength / layer.density - decay
            factor = torch.where(layer.mask, used, explored).to(weight.dtype)
            weight.grad += torch.where(reach, factor * weight, weight.new_zeros(()))
            self._resting[site.name] = weight.detach().clone()

    @torch.no_grad()
    def _after(self) -> None:
        """Put back what rests."""
        for site in self._sites:
            layer = _masked(site)
            if site.name in self._resting and layer.reach is not None:
                kept = self._resting[site.name]
                layer.weight.copy_(torch.where(layer.reach, layer.weight, kept))
        self._resting.clear()

    def memory_of(self, site: Site) -> dict[str, Like]:
        """The masks of A and B."""
        like = Like(tuple(_masked(site).mask.shape), torch.bool, always=True)
        return {"active": like, "reach": like}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As :meth:`Rewirer.load_state_dict`."""
        super().load_state_dict(state)
        for site in self._sites:
            layer = _masked(site)
            layer.reach = site.memory["reach"].to(layer.mask)
            layer.mask.copy_(site.memory["active"])


class _Change(NamedTuple):
    """A and B of a layer after a rewiring, and what the optimizer keeps then."""

    active: Tensor
    reach: Tensor
    optimizer: optim.Carried | None


def _masked(site: Site) -> MaskedLayer:
    assert isinstance(site.layer, MaskedLayer)
    return site.layer


def _check(site: Site) -> None:
    how = 'make the model with rewire.sparsify(..., weights="dense", storage="masked")'
    if not isinstance(site.layer, MaskedLayer):
        raise ValueError(f"{site.name} is a sparse layer, and Top-KAST keeps dense weights: {how}")
    hidden = torch.where(site.layer.mask, 0, site.layer.weight.detach())
    if site.layer.density < 1 and not bool(hidden.any()):
        raise ValueError(f"{site.name} has no weights outside of its mask to explore: {how}")
