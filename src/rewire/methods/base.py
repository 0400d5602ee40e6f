"""What all methods share: when to rewire, what to look at, and replacing connections."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rewire import optim, sampling
from rewire.connections import Connections
from rewire.methods.history import History, LayerRewiring, Rewiring, total
from rewire.methods.site import Probe, Site
from rewire.nn.layer import ConnectedLayer
from rewire.ops import sampling as ops
from rewire.ops.sampling import Stream
from rewire.sampling import DRAWS, Batch

Fraction = float | Callable[[int], float]


class Rewirer:
    r"""Base class of all methods: every so many steps some connections go and as many others come.

    A method is three small rules:

    - :meth:`explore` gives S, the inactive connections of a layer to consider;
    - :meth:`growth` scores S: the highest are grown, with weight zero;
    - :meth:`survival` scores the active connections A: the lowest are pruned, but never the best of a
      layer, so that no layer is left without connections.

    ``k = min(ceil(alpha_t * |A|), |S|)`` connections are replaced, over the whole model or layer by
    layer; of equal scores the first are taken. For another plan override :meth:`choose`.

    It is used like a learning-rate scheduler: call :meth:`step` after every ``optimizer.step()``. Where
    the class attribute ``guided`` is true, S is explored in the backward pass of the step at whose end
    the rewiring is due, and the gradient at S is evaluated there. All backward passes between two calls
    of :meth:`step` count, summed as in ``.grad``: accumulate gradients as you like.

    A rewiring leaves a layer's ``values`` (or ``weight``, under a mask) the same Parameter object,
    carries the optimizer's state along, and sets its ``grad`` to None, because the gradient was that of
    other connections. Frozen layers (``requires_grad`` is False) and, in guided methods, layers that had
    no gradient in that step take no part in it. A layer that is used several times in a forward pass is
    one layer.

    Args:
        model: has sparse or masked layers, from :func:`rewire.sparsify` or made by hand.
        optimizer: trains them.
        every: steps from one rewiring to the next (the paper's T).
        until: the last step that may end with a rewiring (T_end).
        fraction: share of the connections to replace: a number in (0, 1), which is cosine-annealed to
            zero at ``until``, or a function of the step.
        scope: compare connections over the whole model (``"global"``) or layer by layer (``"layer"``).
        seed: all randomness comes from this, the step and the layer.

    Attributes:
        t: completed steps.
        history: what every rewiring has done, see :class:`rewire.methods.history.History`.
    """

    guided: ClassVar[bool] = True
    settings: ClassVar[tuple[str, ...]] = ("every", "until", "fraction", "scope", "seed")

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        every: int = 1000,
        until: int | None = None,
        fraction: Fraction = 0.2,
        scope: str = "global",
        seed: int = 0,
    ) -> None:
        self.optimizer, self.t = optimizer, 0
        self.every, self.until, self.fraction = every, until, fraction
        self.scope, self.seed = scope, operator.index(seed)
        _check_schedule(every, until, fraction)
        check_choice("scope", scope, ("global", "layer"))
        self._sites = _find(model)
        if not self._sites:
            raise ValueError(
                "the model has no sparse layers: call rewire.sparsify(model, ...) first"
            )
        trained = [site for site in self._sites if site.layer.parameter.requires_grad]
        if not trained:
            raise ValueError("all sparse layers are frozen: call requires_grad_() on their weights")
        optim.check(optimizer, _parameters(trained))
        self._probes = [Probe(self.observe, site) for site in self._sites]
        self.history = History([site.name for site in self._sites])
        self._armed = False
        self._arm()

    # The rules ------------------------------------------------------------------------------------

    def explore(self, site: Site) -> Connections:
        """S, the inactive connections to consider; by default all, which takes O(n_in * n_out)."""
        return sampling.inactive(site.active)

    def growth(self, site: Site) -> Tensor:
        """A score for each connection of S; by default the magnitude of its gradient."""
        if site.gradient is None:
            raise NotImplementedError(
                f"{type(self).__name__} is not guided: it must define growth()"
            )
        return site.gradient.abs()

    def survival(self, site: Site) -> Tensor:
        """A score for each active connection; by default the magnitude of its weight."""
        return site.weights.abs()

    @property
    def conserves(self) -> str | None:
        """Whose number of connections stays: the model's ("global"), each layer's ("layer"), or None."""
        return self.scope

    def groups(self, sites: Sequence[Site]) -> list[Sequence[Site]]:
        """The layers that are compared with each other."""
        return [sites] if self.scope == "global" else [[site] for site in sites]

    def choose(self, sites: Sequence[Site]) -> None:
        """Set the masks ``pruned`` and ``grown`` of the layers that take part in a rewiring."""
        for group in self.groups(sites):
            active = sum(site.layer.count for site in group)
            subset = sum(len(_subset(site)) for site in group)
            spare = sum(max(0, site.layer.count - 1) for site in group)
            k = min(sampling.ceil(self.alpha(self.t) * active), subset, spare)
            select(group, "grown", [self.growth(site) for site in group], k)
            select(group, "pruned", [keep_best(self.survival(site)) for site in group], k)

    # The schedule ---------------------------------------------------------------------------------

    def alpha(self, t: int) -> float:
        """The share of connections to replace at step t."""
        if callable(self.fraction):
            alpha = float(self.fraction(t))
            if not 0 <= alpha < 1:
                raise ValueError(f"fraction({t}) gave {alpha}, expected a number in [0, 1)")
            return alpha
        assert self.until is not None
        return self.fraction / 2 * (1 + math.cos(math.pi * min(1.0, t / self.until)))

    def due(self, t: int) -> bool:
        """Whether step t, counted from 1, ends with a rewiring."""
        return t > 0 and t % self.every == 0 and (self.until is None or t <= self.until)

    def step(self) -> Rewiring | None:
        """Count a training step and, if a rewiring is due, do it and return what has changed.

        To be called once after every ``optimizer.step()``.
        """
        self.t += 1
        rewiring = None
        if self.due(self.t):
            try:
                rewiring = self._rewire()
            except Exception:
                self.t -= 1
                raise
        self._arm()
        return rewiring

    # Looking at layers while they train -----------------------------------------------------------

    def watches(self, t: int) -> bool:
        """Whether the backward passes of step t are to be seen; if it ends with a rewiring."""
        return self.due(t)

    def has_seen(self, site: Site) -> bool:
        """Whether a layer had a gradient that the coming rewiring can use."""
        return site.gradient is not None

    def _arm(self) -> None:
        """Put the probes into the layers if the next step is to be seen, else take them out."""
        wanted = self.guided and self.watches(self.t + 1)
        if wanted == self._armed:
            return
        for site, probe in zip(self._sites, self._probes, strict=True):
            present = site.layer.probe
            if wanted and isinstance(present, Probe) and present is not probe and present.alive:
                raise RuntimeError(f"{site.name} is being rewired by another rewirer already")
            if wanted or present is probe:
                site.layer.probe = probe if wanted else None
        self._armed = wanted

    def observe(self, site: Site, batch: Batch) -> None:
        """Take what a probe has seen in a backward pass: draw S in the first, add the gradient at S."""
        if site.subset is None:
            site.batch = batch
            self._explore(site, self.t + 1)
            site.batch = None
        site.add_gradient(batch)

    def _explore(self, site: Site, t: int) -> None:
        site.stream = Stream(self.seed, DRAWS, t, site.index)
        site.quota = min(sampling.ceil(self.alpha(t) * site.layer.count), site.free)
        site.subset = self.explore(site)

    @property
    def subsets(self) -> dict[str, Connections]:
        """S of each layer that has explored one for the next rewiring."""
        return {site.name: site.subset for site in self._sites if site.subset is not None}

    @property
    def gradients(self) -> dict[str, Tensor]:
        """The gradient at S of each such layer, as far as it is summed up."""
        return {site.name: site.gradient for site in self._sites if site.gradient is not None}

    # Replacing connections ------------------------------------------------------------------------

    @torch.no_grad()
    def _rewire(self) -> Rewiring:
        sites = [site for site in self._sites if site.layer.parameter.requires_grad]
        optim.check(self.optimizer, _parameters(sites))
        if self.guided:
            sites = [site for site in sites if self.has_seen(site)]
            if not sites:
                raise RuntimeError(
                    f"a rewiring is due at step {self.t}, but no sparse layer had a backward pass since "
                    "the last step(): call step() once after each backward() and optimizer.step()"
                )
        if not self.guided:
            for site in sites:
                self._explore(site, self.t)
        self.choose(sites)
        if self.conserves is not None:
            _check_budget(sites, self.conserves)
        for site in self._sites:
            site.count()
        changes = [
            _plan(site, self.optimizer) for site in sites
        ]  # may raise: nothing is changed yet
        for site, change in zip(sites, changes, strict=True):
            _apply(site, change, self.optimizer)
        parts = {site.name: _part(site) for site in self._sites}
        rewiring = total(self.t, self.alpha(self.t), parts)
        self.history.append(rewiring)
        for site in self._sites:
            site.clear()
        return rewiring

    # Checkpoints ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on exactly, also from between a backward pass and its rewiring.

        A ``fraction`` that is a function is not saved.
        """
        settings = {name: getattr(self, name) for name in self.settings}
        return {
            "method": type(self).__name__,
            "t": self.t,
            "settings": {k: v for k, v in settings.items() if not callable(v)},
            "layers": {site.name: site.state_dict() for site in self._sites},
            "history": self.history.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take :meth:`state_dict` back, with its settings, after the model's and the optimizer's."""
        if state["method"] != type(self).__name__:
            raise ValueError(f"this is the state of a {state['method']}, not {type(self).__name__}")
        names = [site.name for site in self._sites]
        if list(state["layers"]) != names:
            raise ValueError(
                f"the state is that of a model with sparse layers {', '.join(state['layers'])}; this "
                f"one has {', '.join(names)}"
            )
        for name, value in state["settings"].items():
            setattr(self, name, value)
        self.t = state["t"]
        self.history.load_state_dict(state["history"])
        for site in self._sites:
            site.load_state_dict(state["layers"][site.name])
        self._arm()

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.settings)
        return f"{type(self).__name__}({settings}, t={self.t})"


# Choosing -----------------------------------------------------------------------------------------


def select(sites: Sequence[Site], what: str, scores: Sequence[Tensor], k: int) -> None:
    """Mark, over these layers together, the k highest scores as ``"grown"`` or the k lowest as
    ``"pruned"``."""
    sizes = [len(_subset(s)) if what == "grown" else s.layer.count for s in sites]
    for site, score, size in zip(sites, scores, sizes, strict=True):
        if score.numel() != size:
            rule = "growth" if what == "grown" else "survival"
            raise ValueError(
                f"{rule}() gave {score.numel()} scores for {size} connections of {site.name}"
            )
    flat = torch.cat([score.detach().cpu().flatten() for score in scores])
    chosen = ops.select(flat, k, largest=what == "grown")
    for site, mask in zip(sites, chosen.split(sizes), strict=True):
        setattr(site, what, mask)


def keep_best(scores: Tensor) -> Tensor:
    """The scores with the best one out of reach."""
    scores = torch.nan_to_num(scores, -math.inf, math.inf, -math.inf)
    if scores.numel():
        scores[scores.argmax()] = math.inf
    return scores


def _subset(site: Site) -> Connections:
    assert site.subset is not None
    return site.subset


def _check_budget(sites: Sequence[Site], scope: str) -> None:
    for group in [sites] if scope == "global" else [[site] for site in sites]:
        counts = []
        for what in ("grown", "pruned"):
            masks = [getattr(site, what) for site in group]
            if any(mask is None for mask in masks):
                raise RuntimeError(f"choose() has not set {what!r} of every layer")
            counts.append(sum(int(mask.sum()) for mask in masks))
        if counts[0] != counts[1]:
            names = ", ".join(site.name for site in group)
            raise RuntimeError(
                f"choose() grows {counts[0]} and prunes {counts[1]} connections of {names}: the number "
                "of connections must stay"
            )


class _Change(NamedTuple):
    connections: Connections
    values: Tensor
    optimizer: dict[str, Any]
    state: dict[str, Tensor]


def _plan(site: Site, optimizer: Optimizer) -> _Change | None:
    layer, subset = site.layer, _subset(site)
    assert site.pruned is not None
    assert site.grown is not None
    if not (bool(site.pruned.any()) or bool(site.grown.any())):
        return None
    pruned, grown = site.pruned.cpu(), site.grown.cpu()
    rows, source = ops.replace(
        sampling.rows(site.active), pruned, sampling.rows(subset), grown, layer.n_in
    )
    connections = Connections(layer.n_in, layer.n_out, *rows)

    def follow(state: Tensor, fresh: float) -> Tensor:
        values = optim.follow(layer.gather(state), source, fresh)
        return layer.scatter(connections, values, fresh)

    return _Change(
        connections,
        optim.follow(site.weights, source),
        optim.carry(optimizer, layer.parameter, follow),
        {key: optim.follow(tensor, source) for key, tensor in site.state.items()},
    )


def _apply(site: Site, change: _Change | None, optimizer: Optimizer) -> None:
    if change is not None:
        site.layer.set_connections(change.connections, change.values)
        optim.put(optimizer, site.layer.parameter, change.optimizer)
        site.state = change.state
        site.count().add(sampling.rows(_subset(site)), site.grown)


def _part(site: Site) -> LayerRewiring:
    def size(mask: Tensor | None) -> int:
        return 0 if mask is None else int(mask.sum())

    return LayerRewiring(
        active=site.layer.count,
        grown=size(site.grown),
        pruned=size(site.pruned),
        subset=_considered(site),
        ever=site.count().total(),
        possible=site.layer.n_in * site.layer.n_out,
    )


def _considered(site: Site) -> int:
    if site.considered is not None:
        return site.considered
    return 0 if site.subset is None else len(site.subset)


# Arguments ----------------------------------------------------------------------------------------


def _find(model: nn.Module) -> list[Site]:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    found = [(n, m) for n, m in model.named_modules() if isinstance(m, ConnectedLayer)]
    owners: dict[int, str] = {}
    for name, layer in found:
        other = owners.setdefault(id(layer.parameter), name)
        if other != name:
            raise ValueError(
                f"{other} and {name} share one parameter, but not their connections; use the same layer "
                "in both places instead"
            )
    return [Site(name, layer, index) for index, (name, layer) in enumerate(found)]


def _parameters(sites: Sequence[Site]) -> dict[str, nn.Parameter]:
    return {f"{site.name}.{site.layer.holds}".lstrip("."): site.layer.parameter for site in sites}


def _check_schedule(every: int, until: int | None, fraction: Fraction) -> None:
    if operator.index(every) < 1:
        raise ValueError(f"every must be at least 1 step, got {every}")
    if until is None and not callable(fraction):
        raise ValueError(
            "until is missing: say at which step the fraction has come down to zero, or give a function "
            "of the step as fraction"
        )
    if until is not None and operator.index(until) < every:
        raise ValueError(
            f"until is {until}, before the first rewiring at {every}: raise until, or lower every"
        )
    if not callable(fraction) and not 0 < fraction < 1:
        raise ValueError(f"fraction must be in (0, 1), or a function of the step, got {fraction}")


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Raise a ValueError unless ``value`` is one of the choices."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
