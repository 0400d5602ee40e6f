"""Results that are not computed yet, and may take in what is done to them first.

A batch norm or a sparse layer in a model that runs (see :mod:`rewire.nn.fusion`) answers with a
:class:`Pending` result, a promise that is computed when it is first used: if that use adds a tensor or
rectifies, it happens in the same pass over memory. Sparse layers also measure what a batch norm wants to
know. A sparse convolution or a maximum pooling that is given the promise of a batch norm does the
normalisation itself, where it reads.

What our own layers make for each other is in panels where the batch fills them (see
:mod:`rewire.ops.layout`); who else uses such a result gets an ordinary tensor.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from rewire.nn.histories import Changed, Link, Read
from rewire.nn.state import TOO_LATE, Again, Compute, State, hooked, version
from rewire.ops import channels, layout, recording
from rewire.ops.norms import Moments, Norm, Owed

_make = torch.Tensor._make_wrapper_subclass
_WORTHWHILE = 1 << 15  # elements of an output


class Pending(torch.Tensor):
    """A result that is not computed yet, and may take in what is done to it first."""

    _kept: State

    @property
    def _state(self) -> State:
        state = self._kept
        return self._reread() if state.stale and torch.is_grad_enabled() else state

    def _reread(self) -> State:
        """Be an ordinary tensor from now on: what reads it returns its gradient by way of the promise."""
        old = self._kept
        value = old.result
        assert value is not None
        with torch._C.DisableTorchFunction():
            state = _ordinary(recording.apply(Read, self, value))
        state.through, state.altered = True, old.altered
        state.late = old.late or old.read_behind or old.read_inside or old.owed.readers > 0
        self._kept = state
        return state

    def _become(self, new: Tensor) -> Pending:
        """Changed in place: this is ``new`` from now on, for readers that we do not see as well."""
        with torch._C.DisableTorchFunction():
            if torch.is_grad_enabled() and (new.requires_grad or self.requires_grad):
                recording.apply(Changed, self, new)
            self._kept = new._kept if isinstance(new, Pending) else _ordinary(new)
        return self

    def settle(self) -> Tensor:
        """The result as an ordinary tensor."""
        return self._state.settle()

    def leave(self) -> Tensor:
        """The same for who has called the model: with its history, if it was made where one is recorded."""
        if self._kept.grad_mode == torch.is_grad_enabled():
            return self.settle()
        with torch.set_grad_enabled(self._kept.grad_mode):
            return self.settle()

    def _seen(self) -> Tensor:
        return self._kept.seen()

    def measured(self) -> tuple[Tensor, Moments | None]:
        """The result for our own layers, and its moments if they could be had on the way."""
        state = self._state
        if state.computed is not None or state.measure is None or not state.in_its_mode():
            return state.inner(), None
        measure = state.measure
        channels, dtype = state.shape[1], state.reads[0].dtype
        mean, variance = torch.empty(channels, dtype=dtype), torch.empty(channels, dtype=dtype)
        moments = Moments(mean, variance, state.owed)
        state.computed = state.run(lambda: measure(moments))
        state.read_inside = state.in_panels(state.computed)
        return state.computed, moments

    def _rectify(self, in_place: bool) -> Any:
        """The result or the promise of it, or NotImplemented."""
        state = self._state
        if state.computed is not None or state.thinned is not None or (in_place and state.viewed):
            return NotImplemented
        if hooked() or not state.in_its_mode():
            return NotImplemented
        state.read_behind = state.read_behind or not in_place
        if state.norm is not None and not state.norm.relu and state.undisturbed():
            with torch._C.DisableTorchFunction():
                state.check()
                rectified = normed(state.shape, state.reads, state.norm._replace(relu=True))
            return self._become(rectified) if in_place else rectified
        result = state.run(lambda: state.compute(True, state.panels))
        rectified = kept(result, self) if len(state.shape) == 4 else result
        if isinstance(rectified, Pending):
            rectified._state.twin, state.twin = state.twin, None
            rectified._state.pass_on(result)
        return self._become(rectified) if in_place else rectified

    def _plus(self, other: Any, in_place: bool) -> Any:
        """The promise of the sum, or NotImplemented."""
        state = self._state
        norm = state.norm
        if norm is None or norm.relu or state.computed is not None or not isinstance(other, Tensor):
            return NotImplemented
        if in_place and state.viewed:
            return NotImplemented
        if hooked() or not state.in_its_mode():
            return NotImplemented
        with torch._C.DisableTorchFunction():
            if other.shape != state.shape or other.dtype != state.reads[0].dtype:
                return NotImplemented
            images = len(state.shape) == 4
            if isinstance(other, Pending):
                other = other._state.beside() if images else other.settle()
            if not (images and layout.is_panels(other)) and not (
                other.is_cpu and layout.prefers_batch_last(other)
            ):
                return NotImplemented
            state.check()
            total = normed(state.shape, state.reads, norm, other)
        state.read_behind = state.read_behind or not in_place
        return self._become(total) if in_place else total

    def _point(self) -> Tensor:
        """The tensor that all gradients of this come by, for hooks; refused if there is none."""
        state = self._state
        if state.read_behind:
            raise RuntimeError(
                "this was read by way of what it is made of, and never computed, so no gradient will "
                "come by here: register hooks before it is used"
            )
        if state.read_inside or state.late:
            raise RuntimeError(TOO_LATE)
        if state.through:
            return self
        result = state.settle()
        self._watch(result)
        return result

    def _hook(self, *args: Any, **kwargs: Any) -> Any:
        """``register_hook`` where our layers have read this."""
        state = self._state
        handle = state.hook(*args, **kwargs)
        self._watch(state.materialise())
        return handle

    def _watch(self, result: Tensor) -> None:
        """Let who reads this from now on return its gradient by way of the result."""
        state = self._kept
        if state.follows:
            return
        state.watched = True
        if torch.is_grad_enabled():
            state.follows = True
            with torch._C.DisableTorchFunction():
                if result.requires_grad:
                    recording.apply(Changed, self, result)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if func in _RECTIFY and isinstance(first, Pending):
            in_place = func in _IN_PLACE or bool(args[1:] and args[1])
            result = first._rectify(in_place or bool(kwargs.get("inplace")))
            if result is not NotImplemented:
                return result
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _HOOKS and isinstance(first, Pending):
            state = first._state
            if func is Tensor.register_hook and state.read_inside and not state.read_behind:
                return first._hook(*args[1:], **kwargs)
            point = first._point()
            with torch._C.DisableTorchFunctionSubclass():
                return func(point, *args[1:], **kwargs)
        if func in _HISTORY and isinstance(first, Pending) and not first._kept.has_history():
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func is torch.autograd.grad and len(args) > 1:
            args = (
                pytree.tree_map_only(Pending, Pending.settle, args[0]),
                pytree.tree_map_only(Pending, Pending._point, args[1]),
                *args[2:],
            )
            kwargs = pytree.tree_map_only(Pending, Pending.settle, kwargs)
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _ADD and len(args) == 2 and not kwargs:
            in_place, second, result = func in _IN_PLACE, args[1], NotImplemented
            if isinstance(first, Pending):
                result = first._plus(second, in_place)
            if result is NotImplemented and isinstance(second, Pending) and not in_place:
                result = second._plus(first, False)
            if result is not NotImplemented:
                return result
        plain, others = pytree.tree_map_only(Pending, Pending.settle, (args, kwargs))
        result = func(*plain, **others)
        if isinstance(first, Pending) and first._kept.changed():
            first._follow()
            return first if result is plain[0] else result
        return result

    def _follow(self) -> None:
        """Take the history of the result, which was changed in place."""
        state = self._kept
        result = state.result
        assert result is not None
        state.version, state.altered = version(result), True
        if state.grad_mode and not torch.is_grad_enabled():
            # Its history is the promise's: either as it was, or that of the autograd function that runs.
            state.stale = True
            return
        state.through, state.follows = False, True
        with torch._C.DisableTorchFunction():
            if torch.is_grad_enabled() and (result.requires_grad or self.requires_grad):
                recording.apply(Changed, self, result)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        plain, others = pytree.tree_map_only(Pending, Pending._seen, (args, kwargs))
        result = func(*plain, **others)
        if func._schema.is_mutable:  # autograd has given the promise a new history
            for i, argument in enumerate(func._schema.arguments):
                changed = args[i] if i < len(args) else kwargs.get(argument.name)
                if argument.is_write and isinstance(changed, Pending):
                    changed._kept.altered, changed._kept.stale = True, changed._kept.grad_mode
        return result


def _ordinary(tensor: Tensor) -> State:
    """The state of a promise that has been kept."""
    state = State(tuple(tensor.shape), (tensor,), lambda *_: tensor, lambda given: given[0])
    state.computed = state.result = tensor
    state.version = version(tensor)
    return state


def promise(
    shape: tuple[int, ...],
    reads: tuple[Tensor, ...],
    compute: Compute,
    again: Again,
    row_major: bool = False,
    measure: Callable[[Moments], Tensor] | None = None,
    norm: Norm | None = None,
    leaves: Owed | None = None,
) -> Tensor:
    """The promise of a tensor, or the tensor itself where a promise would be noticed.

    Args:
        shape: of the result.
        reads: the tensors that it is computed from, the input first.
        compute: gives the result, plain or rectified; in panels only where they are welcome and fit, or
            where it reads them.
        again: gives the plain result of other tensors in place of ``reads``, with the whole gradient of
            each.
        row_major: whether the result is; else it is batch-last.
        measure: gives the plain result and writes its moments.
        norm: the batch norm that this is the output of, ``reads[0]`` being its input.
        leaves: to whom a part of the gradient of ``reads[0]`` may be left.
    """
    x = reads[0]
    state = State(shape, reads, compute, again, measure, norm, leaves)
    promises = _local.running
    running, grad = promises[-1] if promises else None, state.grad_mode
    recorded = x.requires_grad or (running is not None and running.grad_mode)
    if (recorded and not grad) or hooked():  # activations are being checkpointed
        return state.ordinary(compute(False, False))
    strides = layout.contiguous_strides(shape) if row_major else layout.strides(shape)
    linked = grad and (x.requires_grad or any(tensor.requires_grad for tensor in reads))
    make = partial(_make, Pending, shape, strides=strides, dtype=x.dtype, device=x.device)
    pending: Pending = recording.apply(Link, make, state, *reads) if linked else make()
    pending._kept = state
    if running is not None:
        running.pending.append(weakref.ref(pending))
    return pending


def normed(
    shape: tuple[int, ...], reads: tuple[Tensor, ...], norm: Norm, residual: Tensor | None = None
) -> Tensor:
    """The promise of the batch norm of ``reads[0]``, the other reads being what it has of parameters and
    statistics; or of its sum with a residual."""
    x = reads[0]
    if not norm.training and _local.running:
        _local.running[-1].tracked_read = True

    def rectified(rectify: bool) -> Norm:
        return norm._replace(relu=rectify or norm.relu)

    if residual is None:
        return promise(
            *(shape, reads, lambda rectify, _: channels.batch_norm(x, rectified(rectify))),
            lambda given: channels.batch_norm(given[0], norm.over(given[1:])),
            norm=norm,
            leaves=norm.owed,
        )
    return promise(
        *(shape, (*reads, residual)),
        lambda rectify, _: channels.residual_sum(x, rectified(rectify), residual),
        lambda given: channels.batch_norm(given[0], norm.over(given[1:]), given[-1]),
        leaves=norm.owed,
    )


def kept(result: Tensor, source: Any) -> Tensor:
    """What one of our layers has computed from ``source``, for the next one: what is in panels looks
    like a promise."""
    if not layout.is_panels(result):
        return result
    if isinstance(source, Pending) and source._state.grad_mode and not torch.is_grad_enabled():
        return layout.from_panels(result)  # perhaps to be computed again: see undisturbed()
    pending = promise(
        layout.image_shape(result), (result,), lambda *_: result, lambda given: given[0]
    )
    if isinstance(pending, Pending):
        pending._state.computed = result
    return pending


def thinned(image: Pending, steps: tuple[int, int]) -> Tensor:
    """The promise of ``image[:, :, ::a, ::b]``: a view of the ordinary tensor, unless what is done to it
    can be done in panels."""
    state = image._state
    shape = (
        *state.shape[:2],
        *(-(-size // step) for size, step in zip(state.shape[2:], steps, strict=True)),
    )
    reads = state.reads if state.computed is None else (state.computed,)

    def view(rectify: bool, _: bool) -> Tensor:
        assert not rectify
        return image.settle()[:, :, :: steps[0], :: steps[1]]

    def again(given: Sequence[Tensor]) -> Tensor:
        if image._kept.altered:
            raise RuntimeError(
                "rows and columns of a layer's output were read, and that output was changed in place: "
                "change a copy instead"
            )
        whole = state.ordinary(given[0] if state.reads is not reads else state.again_of(given))
        return whole[:, :, :: steps[0], :: steps[1]]

    pending = promise(shape, reads, view, again, leaves=state.leaves)
    if isinstance(pending, Pending):
        pending._state.thinned = image, steps
        state.viewed = True
    return pending


def unthinned(x: Any) -> tuple[Tensor, tuple[int, int]] | None:
    """The images in panels whose rows and columns ``x`` promises, and every which of them, if nobody has
    asked for either as an ordinary tensor."""
    state = x._state if isinstance(x, Pending) else None
    if state is None or state.thinned is None or state.computed is not None:
        return None
    source, steps = state.thinned
    if not state.undisturbed():
        return None
    state.check()
    images = source._state.beside()
    state.read_behind = layout.is_panels(images)
    return (images, steps) if state.read_behind else None


def running() -> bool:
    """Whether a converted model runs, and no part of it is being compiled now."""
    return bool(_local.running) and not torch.compiler.is_compiling()


def answers(module: nn.Module) -> bool:
    """Whether a module is the model that runs: its output leaves the model."""
    return _local.running[-1].model is module


def worthwhile(shape: tuple[int, ...], x: Tensor, values: Tensor) -> bool:
    """Whether a layer should promise its output: a model runs, and a pass over memory costs more
    than the promise."""
    return running() and pays(shape, x, values)


def pays(shape: tuple[int, ...], x: Tensor, values: Tensor) -> bool:
    """The same where a model is known to run."""
    return math.prod(shape) >= _WORTHWHILE and x.dtype == values.dtype and type(x) is Tensor


_METADATA = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "is_cpu")),
    *(getattr(Tensor, name).__get__ for name in ("is_cuda", "layout", "requires_grad", "is_leaf")),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.is_floating_point),
    *(Tensor.__len__, Tensor.nelement, Tensor.ndimension, torch.numel, torch.is_floating_point),
}
_HISTORY = {getattr(Tensor, name).__get__ for name in ("grad_fn", "grad", "retains_grad")}
_HOOKS = {Tensor.register_hook, Tensor.retain_grad}
_RECTIFY = {F.relu, F.relu_, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_}
_ADD = {torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__}
_IN_PLACE = {F.relu_, torch.relu_, Tensor.relu_, Tensor.add_, Tensor.__iadd__}


def settled(x: Any) -> Any:
    """``x`` as an ordinary tensor, computed now if it was pending."""
    return x.settle() if isinstance(x, Pending) else x


def inner(x: Any) -> Any:
    """``x`` as our own layers take it, computed now if it was pending; maybe in panels."""
    return x._state.inner() if isinstance(x, Pending) else x


def normalized(x: Any) -> tuple[tuple[Tensor, ...], Norm] | None:
    """What is behind the promise of a batch norm: the tensors that it reads, its input first."""
    if not isinstance(x, Pending):
        return None
    state = x._state
    if state.computed is not None or state.norm is None or not state.undisturbed():
        return None
    state.check()
    state.read_behind = True
    return state.reads, state.norm


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors may share memory."""
    with torch._C.DisableTorchFunction():
        try:
            return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
        except (NotImplementedError, RuntimeError):  # no memory of its own
            return True


class Copied:
    """A tensor, and a copy of it where torch would make a view: a change of either is one of both."""

    def __init__(self, source: Tensor, copy: Tensor) -> None:
        self.source, self.copy = weakref.ref(source), weakref.ref(copy)

    def follow(self, changed: Any) -> bool:
        """Make up for a change; False once one of them is gone."""
        source, copy = self.source(), self.copy()
        if source is None or copy is None:
            return False
        if isinstance(changed, Pending):
            changed = changed._kept.result
        if isinstance(changed, Tensor):
            with torch._C.DisableTorchFunction():
                if _overlap(changed, copy):
                    source.copy_(copy.view(source.shape))
                elif _overlap(changed, source):
                    copy.copy_(source.reshape(copy.shape))
        return True


def copied(source: Tensor, copy: Tensor) -> Tensor:
    """The copy of a tensor that stands for a view of it while the model runs."""
    if _local.running:
        _local.running[-1].copied.append(Copied(source, copy))
    return copy


class Promises:
    """What a running ``model`` has promised."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.pending: list[weakref.ref[Pending]] = []
        self.grad_mode = torch.is_grad_enabled()
        self.copied: list[Copied] = []
        self.tracked_read = False  # whether a promise reads what a batch norm has tracked

    def settle(self, changing: Tensor | None = None) -> None:
        """Compute all that is still pending, or what reads the memory of one tensor."""
        pending, self.pending = self.pending, []
        for reference in pending:
            it = reference()
            if it is None or it._state.computed is not None:
                continue
            if changing is None or any(_overlap(changing, read) for read in it._state.reads):
                it._state.materialise()
            else:
                self.pending.append(reference)


class _Local(threading.local):
    def __init__(self) -> None:
        self.running: list[Promises] = []


_local = _Local()


def before_tracking(statistics: Sequence[Tensor]) -> None:
    """Compute what reads the running statistics of a batch norm that are about to change."""
    promises = _local.running[-1] if _local.running else None
    if promises is not None and promises.tracked_read:
        for tensor in statistics:
            promises.settle(tensor)


def begin(model: nn.Module) -> Promises:
    """A model begins to run; it must :func:`end`."""
    promises = Promises(model)
    _local.running.append(promises)
    return promises


def end() -> None:
    """The model that began last has run."""
    _local.running.pop()
