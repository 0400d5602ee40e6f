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
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from rewire.nn.state import TOO_LATE, Compute, State, hooked
from rewire.ops import channels, layout, recording
from rewire.ops.norms import Moments, Norm, Owed

_make = torch.Tensor._make_wrapper_subclass
_WORTHWHILE = 1 << 15  # elements of an output


class _Link(torch.autograd.Function):
    """Takes gradients back from where a promise was used without our seeing it."""

    @staticmethod
    def forward(ctx: Any, make: Callable[[], Pending], state: State, *reads: Tensor) -> Pending:
        ctx.state = state
        return make()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        if ctx.state.replaced:
            raise RuntimeError("the output of a batch norm was changed in place after it was used")
        wanted = ctx.needs_input_grad[2:]
        reads = [t for t, needed in zip(ctx.state.reads, wanted, strict=True) if needed]
        grads = iter(
            torch.autograd.grad(
                *(ctx.state.again(), reads, dy),
                retain_graph=True,
                create_graph=torch.is_grad_enabled(),
                allow_unused=True,
            )
        )
        return None, None, *(next(grads) if needed else None for needed in wanted)


class Pending(torch.Tensor):
    """A result that is not computed yet, and may take in what is done to it first."""

    _state: State

    def settle(self) -> Tensor:
        """The result as an ordinary tensor."""
        return self._state.settle()

    def measured(self) -> tuple[Tensor, Moments | None]:
        """The result for our own layers, and its moments if they could be had on the way."""
        state = self._state
        if state.computed is not None or state.measure is None:
            return state.inner(), None
        measure = state.measure
        channels, dtype = state.shape[1], state.reads[0].dtype
        mean, variance = torch.empty(channels, dtype=dtype), torch.empty(channels, dtype=dtype)
        moments = Moments(mean, variance, state.owed)
        state.computed = state.run(lambda: measure(moments))
        state.read_inside = state.in_panels(state.computed)
        return state.computed, moments

    def _rectify(self, in_place: bool) -> Tensor:
        state = self._state
        if state.computed is not None or state.thinned is not None or (in_place and state.viewed):
            return F.relu(self.settle(), inplace=in_place)
        if state.norm is not None and not state.norm.relu and state.undisturbed():
            with torch._C.DisableTorchFunction():
                state.check()
                rectified = promise(
                    *(state.shape, state.reads, lambda _, panels: state.compute(True, panels)),
                    norm=state.norm._replace(relu=True),
                    leaves=state.leaves,
                )
            if not in_place:
                return rectified
            if isinstance(rectified, Pending):
                state.replaced = True
                self._state = rectified._state
                return rectified
        if not in_place and state.grad_mode and not torch.is_grad_enabled():
            return F.relu(self.settle())  # with what is recorded, this has nothing to do
        compute = state.compute
        result = state.run(lambda: compute(True, state.panels))
        if in_place:
            state.computed, state.compute = result, lambda _, panels: compute(True, panels)
            state.pass_on(result)
            return self
        rectified = kept(result, self) if len(state.shape) == 4 else result
        if isinstance(rectified, Pending):
            rectified._state.twin, state.twin = state.twin, None
            rectified._state.pass_on(result)
        return rectified

    def _plus(self, other: Any, in_place: bool) -> Any:
        """The promise of the sum, or NotImplemented."""
        state = self._state
        if state.add is None or state.computed is not None or not isinstance(other, Tensor):
            return NotImplemented
        if in_place and state.viewed:
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
            reads = (*state.reads, other)
            total = promise(state.shape, reads, state.add(other), leaves=state.leaves)
        if in_place and isinstance(total, Pending):  # everyone who holds this sees the sum
            state.replaced = True
            self._state = total._state
        return total if not in_place or isinstance(total, Pending) else NotImplemented

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if func in _RECTIFY and isinstance(first, Pending):
            in_place = func in _IN_PLACE or bool(args[1:] and args[1])
            return first._rectify(in_place or bool(kwargs.get("inplace")))
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _HOOKS and isinstance(first, Pending):
            state = first._state
            if state.read_behind:
                raise RuntimeError(
                    "this was read by way of what it is made of, and never computed, so no gradient will "
                    "come by here: register hooks before it is used"
                )
            if state.read_inside:
                if func is Tensor.register_hook:
                    return state.hook(*args[1:], **kwargs)
                raise RuntimeError(TOO_LATE)
        if func is torch.autograd.grad and any(
            isinstance(t, Pending) and t._state.read_inside for t in pytree.tree_leaves(args[1])
        ):
            raise RuntimeError(TOO_LATE)
        if func in _ADD and len(args) == 2 and not kwargs:
            in_place, second, result = func in _IN_PLACE, args[1], NotImplemented
            if isinstance(first, Pending):
                result = first._plus(second, in_place)
            if result is NotImplemented and isinstance(second, Pending) and not in_place:
                result = second._plus(first, False)
            if result is not NotImplemented:
                return result
        args, kwargs = pytree.tree_map_only(Pending, Pending.settle, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = pytree.tree_map_only(Pending, Pending.settle, (args, kwargs or {}))
        return func(*args, **kwargs)


def promise(
    shape: tuple[int, ...],
    reads: tuple[Tensor, ...],
    compute: Compute,
    add: Callable[[Tensor], Compute] | None = None,
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
        add: gives ``compute`` for the sum with another tensor, if that can be taken in.
        row_major: whether the result is; else it is batch-last.
        measure: gives the plain result and writes its moments.
        norm: the batch norm that this is the output of, ``reads[0]`` being its input.
        leaves: to whom a part of the gradient of ``reads[0]`` may be left.
    """
    x = reads[0]
    state = State(shape, reads, compute, add, measure, norm, leaves)
    promises = _local.running
    running, grad = promises[-1] if promises else None, state.grad_mode
    recorded = x.requires_grad or (running is not None and running.grad_mode)
    if (recorded and not grad) or hooked():  # activations are being checkpointed
        return state.ordinary(compute(False, False))
    strides = layout.contiguous_strides(shape) if row_major else layout.strides(shape)
    linked = grad and (x.requires_grad or any(tensor.requires_grad for tensor in reads))
    make = partial(_make, Pending, shape, strides=strides, dtype=x.dtype, device=x.device)
    pending: Pending = recording.apply(_Link, make, state, *reads) if linked else make()
    pending._state = state
    if running is not None:
        running.pending.append(weakref.ref(pending))
    return pending


def kinds(x: Tensor, norm: Norm) -> tuple[Compute, Callable[[Tensor], Compute]]:
    """What the batch norm of ``x`` may become: plain or rectified, alone or with a residual."""

    def rectified(rectify: bool) -> Norm:
        return norm._replace(relu=rectify or norm.relu)

    def plus(residual: Tensor) -> Compute:
        return lambda rectify, _: channels.residual_sum(x, rectified(rectify), residual)

    return lambda rectify, _: channels.batch_norm(x, rectified(rectify)), plus


def kept(result: Tensor, source: Any) -> Tensor:
    """What one of our layers has computed from ``source``, for the next one: what is in panels looks
    like a promise."""
    if not layout.is_panels(result):
        return result
    if isinstance(source, Pending) and source._state.grad_mode and not torch.is_grad_enabled():
        return layout.from_panels(result)  # perhaps to be computed again: see undisturbed()
    pending = promise(layout.image_shape(result), (result,), lambda *_: result)
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
        return state.settle()[:, :, :: steps[0], :: steps[1]]

    pending = promise(shape, reads, view)
    if isinstance(pending, Pending):
        pending._state.thinned = state, steps
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
    images = source.beside()
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
    *(getattr(Tensor, name).__get__ for name in ("is_cuda", "layout")),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.is_floating_point),
    *(Tensor.__len__, Tensor.nelement, Tensor.ndimension, torch.numel, torch.is_floating_point),
}
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


class Promises:
    """What a running ``model`` has promised."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.pending: list[weakref.ref[Pending]] = []
        self.grad_mode = torch.is_grad_enabled()

    def settle(self, changing: Tensor | None = None) -> None:
        """Compute all that is still pending, or what reads the memory of one tensor."""
        pending, self.pending = self.pending, []
        for reference in pending:
            it = reference()
            if it is None or it._state.computed is not None:
                continue
            if changing is None or any(_overlap(changing, read) for read in it._state.reads):
                it.settle()
            else:
                self.pending.append(reference)


class _Local(threading.local):
    def __init__(self) -> None:
        self.running: list[Promises] = []


_local = _Local()


def begin(model: nn.Module) -> Promises:
    """A model begins to run; it must :func:`end`."""
    promises = Promises(model)
    _local.running.append(promises)
    return promises


def end() -> None:
    """The model that began last has run."""
    _local.running.pop()
