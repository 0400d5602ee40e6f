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
from rewire.methods.layer_view import LayerView, Like, Probe, find, parameters
from rewire.nn import copies
from rewire.ops.sampling import Stream, magnitude
from rewire.sampling import DRAWS, Batch


class Rewirer:
    r"""Base class of all methods: every so many steps it prunes some connections and grows as many others.

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
        self._views = find(model)
        for view in self._views:
            copies.release(view.layer)
        self._model, self._followers = weakref.ref(model), Followers(model)
        self._known: Alone | None = None
        trained = [view for view in self._views if view.layer.parameter.requires_grad]
        if not trained:
            raise ValueError("all sparse layers are frozen: call requires_grad_() on their weights")
        optim.check(optimizer, parameters(trained))
        self._probes = [Probe(self.observe, view) for view in self._views]
        self.history = History([view.name for view in self._views])
        self.callbacks: list[Callable[[Rewiring], object]] = []
        self._reshape_old_state()
        for one in wrappers.optimizers(optimizer):
            with suppress(AttributeError):  # wrappers (accelerate, Lookahead) may have no hooks
                hook = optim.weak_hook(self._reshape_old_state)
                one.register_load_state_dict_post_hook(hook)
        self._armed = False
        self._arm()

    # The rules ------------------------------------------------------------------------------------

    def explore(self, view: LayerView) -> Connections | None:
        """S, the inactive connections to consider; by default all, which takes O(n_in * n_out).

        None is all of them, too, but does not list them: their gradient is evaluated in blocks when the
        rewiring is done, and S becomes the k connections where it is largest.
        """
        return sampling.inactive(view.active)

    def growth(self, view: LayerView) -> Tensor:
        """A score for each connection of S; by default the magnitude of its gradient."""
        if view.gradient is None:
            raise NotImplementedError(
                f"{type(self).__name__} is not guided: it must define growth()"
            )
        return magnitude(view.gradient)

    def survival(self, view: LayerView) -> Tensor:
        """A score for each active connection; by default the magnitude of its weight."""
        return magnitude(view.weights)

    @property
    def conserves(self) -> str | None:
        """What keeps its number of connections: the model ("global"), each layer ("layer"), or None."""
        return self.scope

    def groups(self, views: Sequence[LayerView]) -> list[Sequence[LayerView]]:
        """The layers that are compared with each other."""
        return [views] if self.scope == "global" else [[view] for view in views]

    def choose(self, views: Sequence[LayerView]) -> None:
        """Set the masks ``pruned`` and ``grown`` of the layers that take part in a rewiring."""
        for group in self.groups(views):
            active = sum(view.layer.count for view in group)
            subset = sum(len(subset_of(view)) for view in group)
            spare = sum(max(0, view.layer.count - 1) for view in group)
            k = min(sampling.ceil(self.alpha(self.t) * active), subset, spare)
            select(group, "grown", [self.growth(view) for view in group], k)
            select(group, "pruned", [self.survival(view) for view in group], k)

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
                self._followers.check(self._views)
                rewiring = self._rewire()
            except Exception:
                self.t -= 1
                raise
            self._followers.bring()
        if self.due(self.t + 1):
            self._followers.observe(self._views)
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
            self._known = communication.group_of(view.layer for view in self._views)
        return self._known

    def watches(self, t: int) -> bool:
        """Whether the backward passes of step t are observed; by default those before a rewiring."""
        return self.due(t)

    def has_seen(self, view: LayerView) -> bool:
        """Whether a layer had a gradient that the coming rewiring can use."""
        return view.gradient is not None or view.dense is not None

    def _arm(self) -> None:
        """Put the probes into the layers if the next step is to be seen, else take them out."""
        wanted = self.guided and self.watches(self.t + 1)
        if wanted == self._armed:
            return
        for view, probe in zip(self._views, self._probes, strict=True):
            present = view.layer.probe
            if wanted and isinstance(present, Probe) and present is not probe and present.alive:
                raise RuntimeError(f"{view.name} is being rewired by another rewirer already")
            if wanted or present is probe:
                view.layer.probe = probe if wanted else None
        self._armed = wanted

    def observe(self, view: LayerView, batch: Batch) -> None:
        """Process what a probe saw in a backward pass: draw S in the first, add the gradient at S."""
        if view.subset is None and view.dense is None:
            view.batch = batch._replace(group=self._group)
            self._explore(view, self.t + 1)
            view.batch = None
        view.add_gradient(batch)

    def _explore(self, view: LayerView, t: int) -> None:
        view.stream = Stream(self.seed, DRAWS, t, view.index)
        view.quota = min(sampling.ceil(self.alpha(t) * view.layer.count), view.free)
        subset = self.explore(view)
        if subset is None and not self.guided:
            raise NotImplementedError(
                f"{type(self).__name__} is not guided: its explore() must list what may grow"
            )
        view.take(subset)

    @property
    def subsets(self) -> dict[str, Connections]:
        """The subset S of each layer for the next rewiring; where S is everything, what would grow."""
        with self._listed():
            return {view.name: view.subset for view in self._views if view.subset is not None}

    @property
    def gradients(self) -> dict[str, Tensor]:
        """The gradient at S of each layer that has one, summed up so far."""
        with self._listed():
            return {view.name: view.gradient for view in self._views if view.gradient is not None}

    def _keep_best(self, views: Sequence[LayerView], t: int, processes: Alone) -> None:
        """Where S is everything, let it be the connections that grow."""
        dense = [view for view in views if view.dense is not None]
        for group in self.groups(dense) if dense else ():
            active = sum(view.layer.count for view in group)
            streaming.keep_best(group, sampling.ceil(self.alpha(t) * active), processes)

    @contextmanager
    def _listed(self) -> Iterator[None]:
        """For a while, S of everything is what would grow with the gradients so far."""
        views = [view for view in self._views if view.dense is not None]
        try:
            self._keep_best(views, self.t + 1, Alone())
            yield
        finally:
            for view in views:
                view.subset = view.gradient = view.considered = None

    # Replacing connections ------------------------------------------------------------------------

    @torch.no_grad()
    def _rewire(self) -> Rewiring | None:
        views = [view for view in self._views if view.layer.parameter.requires_grad]
        optim.check(self.optimizer, parameters(views))
        if self.guided:
            self.average(views)
            for view in views:
                view.check_subset()
            views = [view for view in views if self.has_seen(view)]
            if not views:
                raise RuntimeError(
                    f"a rewiring is due at step {self.t}, but no sparse layer had a backward pass since "
                    "the last step(): call step() once after each backward() and optimizer.step()"
                )
        else:
            for view in views:
                self._explore(view, self.t)
        self._keep_best(views, self.t, self._group)
        self.choose(views)
        if self.conserves is not None:
            check_budget(views, self.conserves)
        for view in self._views:
            view.count()
        changes = [
            plan(view, self.optimizer) for view in views
        ]  # may raise: nothing is changed yet
        new = (
            view.active if change is None else change.connections
            for view, change in zip(views, changes, strict=True)
        )
        together.check_alike(
            {s.name: [c] for s, c in zip(views, new, strict=True)}, self._group, "after", self.t
        )
        for view, change in zip(views, changes, strict=True):
            apply(view, change)
        parts = {view.name: part(view) for view in self._views}
        rewiring = total(self.t, self.alpha(self.t), parts)
        self.history.append(rewiring)
        for view in self._views:
            view.clear()
        return rewiring

    def average(self, views: Sequence[LayerView]) -> None:
        """Give all processes the same subsets, and the gradients there of the whole batch."""
        together.average(views, self._group, self.t)

    # Checkpoints ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to resume exactly, also from between a backward pass and its rewiring.

        A ``fraction`` that is a function is not saved.
        """
        settings = {name: getattr(self, name) for name in self.settings}
        with self._listed():
            layers = {view.name: view.state_dict() for view in self._views}
        return {
            "method": type(self).__name__,
            "t": self.t,
            "settings": {k: v for k, v in settings.items() if not callable(v)},
            "layers": layers,
            "history": self.history.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore state and settings; load the model's and the optimizer's state after it."""
        if state["method"] != type(self).__name__:
            raise ValueError(f"this is the state of a {state['method']}, not {type(self).__name__}")
        names = [view.name for view in self._views]
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
        found = [s.checked(state["layers"][s.name], self.memory_of(s)) for s in self._views]
        check_lengths(self._views, [one["state"] for one in found], self.conserves)
        # Nothing is changed before all of it is known to fit.
        for name, value in settings.items():
            setattr(self, name, value)
        self.t = t
        self.history.put(rows)
        for view, one in zip(self._views, found, strict=True):
            view.put(one)
        self._reshape_old_state()
        self._arm()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"a {type(self).__name__} can be neither copied nor pickled: it holds on to the layers of its "
            "model. Save its state_dict(), and load that into a new one, made for the copy of the model "
            "and of the optimizer"
        )

    def memory_of(self, view: LayerView) -> Mapping[str, Like]:
        """Shape and dtype of the tensors in ``view.memory``, which loaded ones must have."""
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
        if self._views:  # a dense model is never rewired
            check_schedule(new.get("every", 1), new.get("until"), fraction)
        check_choice("scope", new.get("scope", "layer"), ("global", "layer"))
        check_integer("seed", new.get("seed", 0))
        return dict(given)

    def _reshape_old_state(self) -> None:
        """That of the optimizer, which may load it before there is a rewirer, or after."""
        optim.reshape_old_state(self.optimizer, parameters(self._views).values())

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.settings)
        return f"{type(self).__name__}({settings}, t={self.t})"
