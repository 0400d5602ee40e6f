"""What all methods share: when to rewire, what to look at, and replacing connections."""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rewire import communication, optim, sampling, wrappers
from rewire.communication import Alone
from rewire.connections import Connections
from rewire.methods import streaming, together
from rewire.methods.arguments import Fraction, check_choice, check_integer, check_schedule
from rewire.methods.change import apply, check_budget, check_lengths, part, plan, select, subset_of
from rewire.methods.following import Followers
from rewire.methods.history import History, Rewiring, total
from rewire.methods.site import Like, Probe, Site, find, parameters
from rewire.nn import copies
from rewire.ops.sampling import Stream, magnitude
from rewire.sampling import DRAWS, Batch


class Rewirer:
    r"""Base class of all methods: every so many steps some connections go and as many others come.

    A method is three small rules:

    - :meth:`explore` gives S, the inactive connections of a layer to consider, or None for all of them;
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

    Of a model that :class:`rewire.distributed.Parallel` shares among processes, all rewire alike: the
    gradient at S is averaged over them, and it is checked that all come to the same connections.

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
        callbacks: functions that are called with every :class:`Rewiring` when it is done, such as the
            loggers of :mod:`rewire.integrations.logging`; not saved.
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
        self.scope, self.seed = scope, check_integer("seed", seed)
        check_schedule(every, until, fraction)
        check_choice("scope", scope, ("global", "layer"))
        communication.refuse_wrapped(model)
        self._sites = find(model)
        for site in self._sites:
            copies.release(site.layer)
        self._model, self._followers = weakref.ref(model), Followers(model)
        self._known: Alone | None = None
        trained = [site for site in self._sites if site.layer.parameter.requires_grad]
        if not trained:
            raise ValueError("all sparse layers are frozen: call requires_grad_() on their weights")
        optim.check(optimizer, parameters(trained))
        self._probes = [Probe(self.observe, site) for site in self._sites]
        self.history = History([site.name for site in self._sites])
        self.callbacks: list[Callable[[Rewiring], object]] = []
        self._reshape_old_state()
        for one in wrappers.optimizers(optimizer):
            with suppress(AttributeError):  # wrappers (accelerate, Lookahead) may have no hooks
                hook = optim.weak_hook(self._reshape_old_state)
                one.register_load_state_dict_post_hook(hook)
        self._armed = False
        self._arm()

    # The rules ------------------------------------------------------------------------------------

    def explore(self, site: Site) -> Connections | None:
        """S, the inactive connections to consider; by default all, which takes O(n_in * n_out).

        None is all of them, too, but does not list them: their gradient is evaluated in blocks when the
        rewiring is done, and S becomes the k connections where it is largest.
        """
        return sampling.inactive(site.active)

    def growth(self, site: Site) -> Tensor:
        """A score for each connection of S; by default the magnitude of its gradient."""
        if site.gradient is None:
            raise NotImplementedError(
                f"{type(self).__name__} is not guided: it must define growth()"
            )
        return magnitude(site.gradient)

    def survival(self, site: Site) -> Tensor:
        """A score for each active connection; by default the magnitude of its weight."""
        return magnitude(site.weights)

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
            subset = sum(len(subset_of(site)) for site in group)
            spare = sum(max(0, site.layer.count - 1) for site in group)
            k = min(sampling.ceil(self.alpha(self.t) * active), subset, spare)
            select(group, "grown", [self.growth(site) for site in group], k)
            select(group, "pruned", [self.survival(site) for site in group], k)

    # The schedule ---------------------------------------------------------------------------------

    def alpha(self, t: int) -> float:
        """The share of connections to replace at step t."""
        if callable(self.fraction):
            alpha = self.fraction(t)
            try:
                if 0 <= float(alpha) < 1:
                    return float(alpha)
            except (TypeError, ValueError):
                pass  # not a number at all
            raise ValueError(f"fraction({t}) gave {alpha!r}, expected a number in [0, 1)")
        assert self.until is not None
        return self.fraction / 2 * (1 + math.cos(math.pi * min(1.0, t / self.until)))

    def due(self, t: int) -> bool:
        """Whether step t, counted from 1, ends with a rewiring."""
        return t > 0 and t % self.every == 0 and (self.until is None or t <= self.until)

    def step(self) -> Rewiring | None:
        """Count a training step and, if a rewiring is due, do it and return what has changed.

        To be called once after every ``optimizer.step()``.
        """
        _ = self._group  # raises where training alone is a mistake
        self.t += 1
        rewiring = None
        if self.due(self.t):
            try:
                self._followers.check(self._sites)
                rewiring = self._rewire()
            except Exception:
                self.t -= 1
                raise
            self._followers.bring()
        if self.due(self.t + 1):
            self._followers.observe(self._sites)
        self._arm()
        self._tell(rewiring)
        return rewiring

    def _tell(self, rewiring: Rewiring | None) -> None:
        """Call the callbacks, if there was a rewiring."""
        if rewiring is not None:
            for callback in self.callbacks:
                callback(rewiring)

    def follow(self, averaged: nn.Module) -> None:
        """Let the connections of a copy of the model follow those of the model in every rewiring.

        For ``torch.optim.swa_utils.AveragedModel`` and its like, which average parameters by their place.
        Its values follow by coordinates: those of removed connections are discarded, those of grown ones
        are zero. It has the model's connections from now on. It is not kept alive, and not saved with the
        rewirer: call this again after resuming. :class:`rewire.EMA` does not need it.

        Args:
            averaged: has a deep copy of the model in it, and leaves buffers as the model has them.
        """
        self._followers.add(averaged)

    # Looking at layers while they train -----------------------------------------------------------

    @property
    def _group(self) -> Alone:
        """The processes that share the model, found when it trains first."""
        if self._known is None:
            model = self._model()
            if model is not None:
                communication.refuse_wrapped(model)
            self._known = communication.group_of(site.layer for site in self._sites)
        return self._known

    def watches(self, t: int) -> bool:
        """Whether the backward passes of step t are to be seen; if it ends with a rewiring."""
        return self.due(t)

    def has_seen(self, site: Site) -> bool:
        """Whether a layer had a gradient that the coming rewiring can use."""
        return site.gradient is not None or site.dense is not None

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
        if site.subset is None and site.dense is None:
            site.batch = batch._replace(group=self._group)
            self._explore(site, self.t + 1)
            site.batch = None
        site.add_gradient(batch)

    def _explore(self, site: Site, t: int) -> None:
        site.stream = Stream(self.seed, DRAWS, t, site.index)
        site.quota = min(sampling.ceil(self.alpha(t) * site.layer.count), site.free)
        subset = self.explore(site)
        if subset is None and not self.guided:
            raise NotImplementedError(
                f"{type(self).__name__} is not guided: its explore() must list what may grow"
            )
        site.take(subset)

    @property
    def subsets(self) -> dict[str, Connections]:
        """S of each layer that has explored one for the next rewiring; of everything, what would grow."""
        with self._listed():
            return {site.name: site.subset for site in self._sites if site.subset is not None}

    @property
    def gradients(self) -> dict[str, Tensor]:
        """The gradient at S of each such layer, as far as it is summed up."""
        with self._listed():
            return {site.name: site.gradient for site in self._sites if site.gradient is not None}

    def _keep_best(self, sites: Sequence[Site], t: int, processes: Alone) -> None:
        """Where S is everything, let it be the connections that grow."""
        dense = [site for site in sites if site.dense is not None]
        for group in self.groups(dense) if dense else ():
            active = sum(site.layer.count for site in group)
            streaming.keep_best(group, sampling.ceil(self.alpha(t) * active), processes)

    @contextmanager
    def _listed(self) -> Iterator[None]:
        """For a while, S of everything is what would grow with the gradients so far."""
        sites = [site for site in self._sites if site.dense is not None]
        try:
            self._keep_best(sites, self.t + 1, Alone())
            yield
        finally:
            for site in sites:
                site.subset = site.gradient = site.considered = None

    # Replacing connections ------------------------------------------------------------------------

    @torch.no_grad()
    def _rewire(self) -> Rewiring | None:
        sites = [site for site in self._sites if site.layer.parameter.requires_grad]
        optim.check(self.optimizer, parameters(sites))
        if self.guided:
            self.average(sites)
            for site in sites:
                site.check_subset()
            sites = [site for site in sites if self.has_seen(site)]
            if not sites:
                raise RuntimeError(
                    f"a rewiring is due at step {self.t}, but no sparse layer had a backward pass since "
                    "the last step(): call step() once after each backward() and optimizer.step()"
                )
        else:
            for site in sites:
                self._explore(site, self.t)
        self._keep_best(sites, self.t, self._group)
        self.choose(sites)
        if self.conserves is not None:
            check_budget(sites, self.conserves)
        for site in self._sites:
            site.count()
        changes = [
            plan(site, self.optimizer) for site in sites
        ]  # may raise: nothing is changed yet
        new = (
            site.active if change is None else change.connections
            for site, change in zip(sites, changes, strict=True)
        )
        together.check_alike(
            {s.name: [c] for s, c in zip(sites, new, strict=True)}, self._group, "after", self.t
        )
        for site, change in zip(sites, changes, strict=True):
            apply(site, change)
        parts = {site.name: part(site) for site in self._sites}
        rewiring = total(self.t, self.alpha(self.t), parts)
        self.history.append(rewiring)
        for site in self._sites:
            site.clear()
        return rewiring

    def average(self, sites: Sequence[Site]) -> None:
        """Give all processes the same subsets, and the gradients there of the whole batch."""
        together.average(sites, self._group, self.t)

    # Checkpoints ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to resume exactly, also from between a backward pass and its rewiring.

        A ``fraction`` that is a function is not saved.
        """
        settings = {name: getattr(self, name) for name in self.settings}
        with self._listed():
            layers = {site.name: site.state_dict() for site in self._sites}
        return {
            "method": type(self).__name__,
            "t": self.t,
            "settings": {k: v for k, v in settings.items() if not callable(v)},
            "layers": layers,
            "history": self.history.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take :meth:`state_dict` back, with its settings; then load the model's and the optimizer's."""
        if state["method"] != type(self).__name__:
            raise ValueError(f"this is the state of a {state['method']}, not {type(self).__name__}")
        names = [site.name for site in self._sites]
        if list(state["layers"]) != names:
            raise ValueError(
                f"the state is that of a model with sparse layers {', '.join(state['layers'])}; this "
                f"one has {', '.join(names)}"
            )
        settings = self._checked_settings(state["settings"])
        t = check_integer("t", state["t"])
        if t < 0:
            raise ValueError(f"t must be a number of steps, got {t}")
        rows = self.history.checked(state["history"])
        found = [s.checked(state["layers"][s.name], self.memory_of(s)) for s in self._sites]
        check_lengths(self._sites, [one["state"] for one in found], self.conserves)
        # Nothing is changed before all of it is known to fit.
        for name, value in settings.items():
            setattr(self, name, value)
        self.t = t
        self.history.put(rows)
        for site, one in zip(self._sites, found, strict=True):
            site.put(one)
        self._reshape_old_state()
        self._arm()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"a {type(self).__name__} can be neither copied nor pickled: it holds on to the layers of its "
            "model. Save its state_dict(), and load that into a new one, made for the copy of the model "
            "and of the optimizer"
        )

    def memory_of(self, site: Site) -> Mapping[str, Like]:
        """What the tensors are like that the method keeps in ``site.memory``; saved ones are compared."""
        return {}

    def _checked_settings(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Saved settings; raises a ValueError if the method has no such ones, or of another type."""
        arguments = inspect.signature(type(self)).parameters
        optional = {name for name, one in arguments.items() if one.default is None}
        for name, value in given.items():
            if name not in self.settings:
                raise ValueError(f"{type(self).__name__} has no setting {name!r}")
            now = getattr(self, name)
            kinds = {str} if isinstance(now, str) else {int, float, type(now)} - {type(None)}
            of_kind = type(value) in kinds and value == value  # NaN is not
            if not (name in optional if value is None else of_kind):
                raise ValueError(f"{name} must be like {now!r}, got {value!r}")
        new = {name: getattr(self, name) for name in self.settings} | dict(given)
        fraction = new.get("fraction", lambda t: 0.0)  # some methods have a schedule without one
        if self._sites:  # a dense model is never rewired
            check_schedule(new.get("every", 1), new.get("until"), fraction)
        check_choice("scope", new.get("scope", "layer"), ("global", "layer"))
        check_integer("seed", new.get("seed", 0))
        return dict(given)

    def _reshape_old_state(self) -> None:
        """That of the optimizer, which may load it before there is a rewirer, or after."""
        optim.reshape_old_state(self.optimizer, parameters(self._sites).values())

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.settings)
        return f"{type(self).__name__}({settings}, t={self.t})"
