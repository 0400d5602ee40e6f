"""What a promise knows: how its result is computed, from what, who has read it, and where it is."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from rewire.ops import channels, differentiable, layout
from rewire.ops.norms import Moments, Norm, Owed, Relay, relay_of

Result = Tensor | tuple[Tensor, Tensor]  # maybe with a twin, for a second reader
Compute = Callable[[bool, bool], Result]  # rectify, whether panels are welcome -> result
Again = Callable[[Sequence[Tensor]], Result]  # other tensors in place of those it reads -> result
R = TypeVar("R")
TOO_LATE = (
    "a layer has already read this output, in memory of its own: register hooks and call retain_grad() "
    "before the next layer is called, or see rewire.nn.fusion.unfuse"
)


def hooked() -> bool:
    """Whether something wants to see what autograd saves, to compute it again later."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def version(tensor: Tensor) -> int:
    """What changes with the tensor's elements."""
    return -1 if tensor.is_inference() else tensor._version


def _versions(tensors: tuple[Tensor, ...]) -> list[tuple[int, int]]:
    """What changes with the tensors' elements, and with their memory (``.data =``, ``.half()``)."""
    try:
        return [(tensor._version, tensor.data_ptr()) for tensor in tensors]
    except RuntimeError:  # made in inference mode: they have none
        return [(version(tensor), tensor.data_ptr()) for tensor in tensors]


class State:
    """What a promise knows: how to compute the result, from what, and the result once it is there:
    as it was computed, maybe in panels, and as an ordinary tensor."""

    computed: Tensor | None = None
    twin: Tensor | None = None  # of what was computed
    result: Tensor | None = None
    version = 0  # of the result, as far as we know of changes
    stale = False  # whether the result has not the history of the promise, which is to be read then
    through = False  # whether all gradients come by way of the promise
    follows = False  # whether the promise has the history of the result
    altered = False  # whether the result was changed in place
    watched = False  # whether who wants to see the gradient looks at the result
    late = False  # whether a part of the gradient goes another way
    read_behind = (
        False  # by who makes the result on its own: normalises, rectifies, adds, takes rows
    )
    read_inside = False  # by a layer of ours, in panels
    twin_read = False  # so that a part of the gradient goes another way
    relay: Relay | None = None  # of the residual sum that was computed
    thinned: tuple[Any, tuple[int, int]] | None = (
        None  # every which row and column of which promise this is
    )
    viewed = False  # by such a promise

    def __init__(
        self,
        shape: tuple[int, ...],
        reads: tuple[Tensor, ...],
        compute: Compute,
        again: Again,
        measure: Callable[[Moments], Tensor] | None = None,
        norm: Norm | None = None,
        leaves: Owed | None = None,
    ) -> None:
        self.shape, self.reads, self.compute, self.again_of = shape, reads, compute, again
        self.measure, self.norm, self.leaves = measure, norm, leaves
        self.versions = _versions(reads)
        self.grad_mode = torch.is_grad_enabled()
        self.owed = Owed()  # to who reads what was computed

    @property
    def panels(self) -> bool:
        """Whether the batch fills panels."""
        return layout.panel_shape(self.shape, self.reads[0]) is not None

    def run(self, compute: Callable[[], Result]) -> Tensor:
        """Compute as if at the time of the promise."""
        self.check()
        result = self._then(compute)
        if isinstance(result, tuple):
            result, self.twin = result
        return result

    def _then(self, compute: Callable[[], R]) -> R:
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if hooks is not None:  # set for what comes later
            torch._C._autograd._pop_saved_tensors_default_hooks()
        try:
            with torch._C.DisableTorchFunction():
                if torch.is_grad_enabled() == self.grad_mode:
                    return compute()
                with torch.set_grad_enabled(self.grad_mode):
                    return compute()
        finally:
            if hooks is not None:
                torch._C._autograd._push_saved_tensors_default_hooks(*hooks)

    def undisturbed(self) -> bool:
        """Whether autograd records now, as it did at the time of the promise. Where it does not, this
        may be a checkpointed block, whose output must be an ordinary tensor."""
        return self.grad_mode and torch.is_grad_enabled() and not hooked()

    def check(self) -> None:
        if self.versions != _versions(self.reads):
            raise RuntimeError(
                "the input or a parameter of a layer was changed in place before the layer's output "
                "was used; change a copy instead"
            )

    def settle(self) -> Tensor:
        """The plain result, as an ordinary tensor."""
        return self._read(self.materialise()) if self.in_its_mode() else self.seen()

    def materialise(self) -> Tensor:
        """The same for no reader."""
        if self.result is None:
            computed = self.computed
            if computed is None:
                computed = self.computed = self.run(lambda: self.compute(False, False))
            self.result = self._then(lambda: self.ordinary(computed))
            self.version = version(self.result)
        return self.result

    def in_its_mode(self) -> bool:
        """Whether what is recorded where this is read leads to the result: where autograd recorded at the
        time of the promise and does not now, an autograd function may be running, whose gradient comes by
        way of the promise."""
        return not self.grad_mode or torch.is_grad_enabled()

    def has_history(self) -> bool:
        """Whether the result says where it comes from, and not the promise alone."""
        return self.in_its_mode() and not (self.stale or self.through)

    def seen(self) -> Tensor:
        """The result for who does not record how it is computed, as an ordinary tensor."""
        if self.result is None:
            self.check()
            with torch.no_grad(), torch._C.DisableTorchFunction():
                if self.computed is None:
                    self.computed = self.result = self.ordinary(self.compute(False, False))
                else:
                    self.result = self.ordinary(self.computed)
            self.version, self.stale = version(self.result), self.grad_mode
        elif self.changed():
            raise RuntimeError(
                "a view of a layer's output was changed in place, and then a function read that output "
                "whose gradient cannot be had then: change a copy instead"
            )
        return self.result

    def changed(self) -> bool:
        """Whether the result was changed in place since we have last looked."""
        return self.result is not None and version(self.result) != self.version

    def in_panels(self, computed: Tensor) -> bool:
        """Whether this is images in panels, and not something of five dimensions."""
        return len(self.shape) == 4 and layout.is_panels(computed)

    def ordinary(self, result: Result) -> Tensor:
        """A result as an ordinary tensor."""
        computed = result[0] if isinstance(result, tuple) else result
        return channels.from_panels(computed) if self.in_panels(computed) else computed

    def inner(self) -> Tensor:
        """The plain result for our own layers, in panels if the batch fills them and nobody else has
        seen it: what is done to the ordinary tensor then, hooks included, is done to what they read."""
        if not self.in_its_mode():
            return self.seen()
        if self.result is not None:
            return self._read(self.result)
        if self.computed is None:
            self.computed = self.run(lambda: self.compute(False, self.panels))
        self.read_inside = self.read_inside or self.in_panels(self.computed)
        return self._read(self.computed)

    def beside(self) -> Tensor:
        """The same for a residual sum, which reads a twin if there is one."""
        computed, twin = self.inner(), self.twin
        if twin is None or computed is not self.computed:
            return computed
        self.twin, self.twin_read = None, True
        self.owed.readers -= 1  # the twin's reader is none of this
        if self.relay is not None:
            self.relay.twin_read = True
        return twin

    def pass_on(self, computed: Tensor) -> None:
        """If a residual sum was computed: tell it who reads it, which is counted here."""
        self.relay = relay_of(computed)
        if self.relay is not None:
            self.relay.reads = self.owed

    def hook(self, function: Callable[[Tensor], Tensor | None]) -> Any:
        """Call a hook with the gradient of what our layers have read."""
        if self.twin_read:
            raise RuntimeError(TOO_LATE)
        computed, self.twin = self.computed, None  # the next sum's gradient comes by here, too
        assert computed is not None
        panel = computed.shape[-1]

        def call(gradient: Tensor) -> Tensor | None:
            if torch.is_grad_enabled():  # a backward pass that is recorded
                changed = function(differentiable.images(gradient))
                return None if changed is None else differentiable.panels(changed, panel)
            changed = function(layout.from_panels(gradient))
            return None if changed is None else layout.to_panels(changed, panel)

        self._read(computed)
        return computed.register_hook(call)

    def _read(self, result: Tensor) -> Tensor:
        self.owed.readers += 1
        return result

    def announce(self, link: weakref.ref[Any]) -> None:
        """Say that an autograd function, while it lives, may return gradients of what this reads."""
        if self.leaves is not None:
            self.leaves.links.append(link)
        for relay in filter(None, map(relay_of, self.reads)):
            relay.links.append(link)

    def again(self, given: Sequence[Tensor]) -> Tensor:
        """The plain result of other tensors in place of those this reads, as an ordinary tensor."""
        self.check()
        return self._then(lambda: self.ordinary(self.again_of(given)))
