"""A region: what was recorded between two moments at which somebody wants numbers."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rewire.engine import private
from rewire.engine.graph import VIEWS, InputMeta, numbers, root
from rewire.engine.lazy import LazyTensor, Shadow, ShadowBackward, data_of, make
from rewire.engine.observe import Why
from rewire.engine.ops import EAGER, interpret, reads
from rewire.engine.parts import Run
from rewire.engine.run import Data, Probe
from rewire.engine.statistics import LazyBuffer, hide, show
from rewire.ops import native
from rewire.ops.topology import Topology

_shadow: Callable[..., LazyTensor] = super(torch.autograd.Function, Shadow).apply
_CHANGED = (
    "the {operand} of a {op}, a tensor of shape {shape}, was changed in place after the {op} was called "
    "and before it was computed: inside a converted model layers are computed when somebody wants "
    "numbers, or when the model returns. Look in the model's forward, after that call, for what changes "
    "this tensor (x += y, x.add_(y), x[0] = y, out=x, x.data = y, x.detach_(), .to(dtype) of a module) and "
    "change a copy instead, or let layers run one by one with rewire.use_engine(model, False)"
)
_OPERANDS = {
    **dict.fromkeys(("conv2d", "linear"), ("input", "values", "bias")),
    "batch_norm": ("input", "weight", "bias", "running_mean", "running_var"),
    **dict.fromkeys(("layer_norm", "group_norm"), ("input", "weight", "bias")),
    "add": ("first operand", "second operand"),
}

_CHANGED_LATER = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: a "
    "parameter or the input of a layer was changed between its forward and its backward pass"
)


class Region:
    """Nodes, the ordinary tensors that they read, and weak references to their lazy tensors.

    Attributes:
        dtype: float64, or float32 where values are of float32 and bfloat16.
        nodes: plain tuples with the fields of :class:`rewire.engine.graph.Node`.
        tensors, metas, stamps: what the region reads, what it is like, and what would tell that it was
            changed since.
        topologies, scalars, probes: what nodes refer to by an index.
        refs: the lazy tensor of each node, if it is still somebody's.
        written: the inputs that are running statistics of a training batch norm. None once it has run.
        buffers: their Python objects, which are lazy until then.
        interrupted: says whether the call that records has ended without running it.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        grad: bool,
        inference: bool,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> None:
        self.dtype, self.grad, self.inference = dtype, grad, inference
        self.kernels = native.available() and dtype in native.KERNEL_DTYPES
        self.interrupted = interrupted
        self.buffers: list[LazyBuffer] = []
        self.nodes: list[tuple[Any, ...]] = []
        self.tensors: list[Any] = []
        self.stamps: list[_Stamp] = []
        self.metas: list[InputMeta] = []
        self.topologies: list[Topology] = []
        self.probes: list[Probe | None] = []
        self.scalars: list[float | int] = []
        self.refs: list[weakref.ref[LazyTensor] | None] = []
        self.written: set[int] = set()
        self.closed = False  # nothing more is recorded
        self.done = False
        self.views = False  # whether any node is one
        self._failed: str | None = None  # not the error: its traceback holds all that was recorded
        self._inputs: dict[int, int] = {}
        self._pointers: set[int] = set()
        self._kept: list[Tensor] = []  # what was copied: the numbers of objects are theirs alone
        self._values: list[Tensor] | None = None  # of all nodes, for the shadow graph
        self._lock: Any = threading.RLock()

    # Recording

    def read(self, tensor: Tensor) -> int | None:
        """The reference to an operand; None if the region cannot read it."""
        kind, key = type(tensor), id(tensor)
        if kind is LazyTensor and tensor._region is self:  # type: ignore[attr-defined]
            return tensor._index  # type: ignore[attr-defined,no-any-return]
        known = self._inputs.get(key)
        if known is not None:
            changed = self.grad and _requires_grad(tensor) is not self.metas[known].requires_grad
            return None if changed else ~known
        if kind not in _READABLE:
            return None
        data = data_of(tensor) if kind is LazyTensor else tensor
        if numbers(data.dtype) is not self.dtype or not self.kernels:
            return None
        if not data.is_cpu or data.is_neg():
            return None
        if data.layout is not torch.strided:
            return None
        stamp, known = _stamp(tensor), len(self.tensors)
        if stamp[0] is None and self.inference:  # nothing would tell that it has been changed
            self._kept.append(tensor)
            tensor = data.clone()
            stamp = _stamp(tensor)
        grad = self.grad and _requires_grad(tensor)
        self.tensors.append(tensor)
        self.stamps.append(stamp)
        self.metas.append(InputMeta(tuple(data.shape), data.dtype, grad))
        self._pointers.add(stamp[1])
        self._inputs[key] = known
        return ~known

    def reads_any(self, *tensors: Tensor) -> bool:
        """Whether one of some tensors has the memory of an input."""
        for tensor in tensors:
            if type(tensor) is not LazyTensor and tensor.data_ptr() in self._pointers:
                return True
        return False

    def requires_grad(self, ref: int) -> bool:
        """Whether an operand did when it was recorded."""
        return bool(self.nodes[ref][4]) if ref >= 0 else self.metas[~ref].requires_grad

    def append(
        self,
        op: str,
        attrs: Any,
        operands: tuple[Tensor | None, ...],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        updated: tuple[Tensor, ...] = (),
    ) -> Any:
        """Record a node and return its lazy tensor; NotImplemented, and nothing recorded, if an operand
        is nothing that the region can read. Operands that are updated become lazy."""
        for operand in operands:
            if type(operand) is LazyTensor and operand._region not in (self, None):
                operand._region.run(Why.OTHER)
        with self._lock, private.without_functions():
            if self.closed or len(self.refs) != len(self.nodes):
                return NotImplemented  # another thread runs it, or an interrupt came in between
            refs: list[int | None] = []
            positions: list[int] = []
            wanted: list[Tensor] = []
            for position, operand in enumerate(operands):
                if operand is None:
                    refs.append(None)
                    continue
                ref = self.read(operand)
                if ref is None or (ref >= 0 and not self._may_read(op, operand, ref)):
                    return NotImplemented
                refs.append(ref)
                if self.requires_grad(ref):
                    positions.append(position)
                    wanted.append(operand)
            if updated and False in [self._hide(buffer) for buffer in updated]:
                return NotImplemented
            index = len(self.nodes)
            self.nodes.append((op, attrs, tuple(refs), shape, bool(wanted), dtype))
            lazy = _shadow(self, index, positions, *wanted) if wanted else make(self, index)
            lazy._region = self
            lazy._index = index
            self.refs.append(weakref.ref(lazy))
            if op in VIEWS:
                self.views = True
            return lazy

    def _hide(self, buffer: Any) -> bool:
        """Make running statistics lazy, if that is possible."""
        at = self._inputs.pop(id(buffer))
        self.tensors[at] = tensor = hide(buffer, self)
        if tensor is None:
            return False
        if (
            self.stamps[at][1] == 0 or self.inference
        ):  # lazy on another thread when it was read, or copied
            self.stamps[at] = _stamp(tensor)
        self.buffers.append(buffer)
        self.written.add(at)
        return True

    def _may_read(self, op: str, lazy: Tensor, index: int) -> bool:
        """Whether an operation can read a node's output: no kernel reads an alias."""
        return self.untouched(lazy, index) and (op == "alias" or self.nodes[index][0] != "alias")

    def untouched(self, lazy: Tensor, index: int) -> bool:
        """Whether a lazy tensor has the place in the graph that it was given: C++ code may have given it
        another one, as the output of an ``autograd.Function`` or by a change in place."""
        node: Any = lazy.grad_fn
        if node is None:
            return not self.nodes[index][4]
        return type(node) is ShadowBackward and node.index == index and node.region is self

    def rename(self, lazy: LazyTensor, new: LazyTensor) -> LazyTensor:
        """Let the object of ``lazy`` be ``new``, which is what a change in place makes of it."""
        old, index = lazy._index, new._index
        private.swap(lazy, new)
        lazy._index, new._index = index, old
        self.refs[index], self.refs[old] = self.refs[old], None
        return lazy

    def may_rename(self, lazy: LazyTensor) -> bool:
        """Whether nobody would notice: C++ code does not hold it, and no view shares its memory."""
        index = lazy._index
        if private.use_count(lazy) > 1:
            return False
        top = root(self.nodes, index)
        return not self.views or not any(
            i != index and root(self.nodes, i) == top and self._alive(i)
            for i in range(top, len(self.nodes))
        )

    def _alive(self, index: int) -> bool:
        ref = self.refs[index]
        return ref is not None and ref() is not None

    # Running

    def changed(self) -> str | None:
        """What to say if something that the region reads has been changed since."""
        for k, (tensor, stamp) in enumerate(zip(self.tensors, self.stamps, strict=True)):
            if tensor is None or _stamp(tensor) == stamp:
                continue
            for op, _, inputs, *_ in self.nodes:
                if ~k in inputs:
                    operand = _OPERANDS.get(op, ("input",))[inputs.index(~k)]
                    return _CHANGED.format(op=op, operand=operand, shape=self.metas[k].shape)
        return None

    def run(self, why: Any = None, held: Sequence[LazyTensor] = ()) -> None:
        """Compute all that is still somebody's, as if at the time of recording.

        Args:
            why: the occasion, for who observes: a :class:`Why`, or a torch function and its arguments.
            held: lazy tensors that C++ code holds, beside those that can be seen to be.
        """
        if self._lock._is_owned():
            raise RuntimeError(
                "a tensor was used while it was being computed on the same thread, in a signal handler or "
                "a finaliser perhaps: call rewire.use_engine(model, False)"
            )
        (_run_uncompiled if private.compiler_loaded() else _run)(self, why, held)

    def settle(self) -> bool:
        """Run for somebody who uses running statistics; False if that is not possible: a signal handler
        that has interrupted the region itself has to take them as they are."""
        if self._lock._is_owned():
            return False
        (_run_uncompiled if private.compiler_loaded() else _run)(self, Why.STATISTICS, (), True)
        return True

    def run_now(self, why: Any, held: Sequence[LazyTensor], settling: bool = False) -> None:
        """The same, in code that is not being compiled."""
        with self._lock:
            self.closed = True
            if settling and (self._failed is not None or self._forgotten()):
                return
            if self._failed is not None:
                raise RuntimeError(
                    f"the computation of this tensor has failed before: {self._failed}"
                )
            if self.done:
                return
            try:
                changed = self.changed()
                if changed is not None:
                    raise RuntimeError(changed)
                with (
                    private.without_functions(),
                    private.modes(self.grad, self.inference),
                    self._as_recorded(),
                ):
                    Run(self, held).go()
                self.done = True
            except BaseException as error:
                self._failed = str(error) or type(error).__name__
                raise
            finally:
                self._show()
            self.refs = []

    @contextmanager
    def _as_recorded(self) -> Iterator[None]:
        """With the leaves requiring gradients that did when they were recorded."""
        changed = []
        if self.grad:
            pairs = zip(self.tensors, self.metas, strict=True)
            changed = [
                t for t, m in pairs if t is not None and t.requires_grad is not m.requires_grad
            ]
        try:
            for tensor in changed:
                tensor.requires_grad_(not tensor.requires_grad)
            yield
        finally:
            for tensor in changed:
                tensor.requires_grad_(not tensor.requires_grad)

    def computed(self, run: Run, members: list[int], key: Any) -> None:
        """Some nodes have been computed, by the plan that is kept under a key, or one by one if that is
        None; for who observes."""

    def _show(self) -> None:
        """Make running statistics ordinary tensors."""
        with private.without_functions():
            for buffer in self.buffers:
                show(buffer, self)
        for at in self.written:
            self.tensors[at] = None
        self.buffers = []

    def _forgotten(self) -> bool:
        """Whether an interrupted call has left updates behind that cannot be computed any more."""
        if self.done or not self.interrupted():
            return False
        changed = self.changed()
        if changed is None:
            return False
        self._failed = changed
        self._show()
        warnings.warn(
            "the forward pass of a model was interrupted, and a parameter or its input has been changed "
            "since: it has not updated the running statistics of its batch norms",
            stacklevel=2,
        )
        return True

    def data(self, effects: bool) -> Data:
        return Data(self.topologies, self.scalars, self.probes, effects)

    # The shadow graph

    def gradients(self, index: int, positions: list[int], dy: Tensor) -> list[Tensor | None]:
        """The gradients of some operands of a node, given that of its output."""
        again = torch.is_grad_enabled()
        data = self.data(False)
        op, attrs, inputs, *_ = self.nodes[index]
        with self._lock:
            if self.changed() is not None:
                raise RuntimeError(_CHANGED_LATER)
            found = self._values
            if again:
                found = interpret(self.nodes, [_view(t) for t in self.tensors], data)
            elif found is None:
                found = self._values = interpret(self.nodes, [*map(data_of, self.tensors)], data)
        tensors = self.tensors if again else [*map(data_of, self.tensors)]
        operands = reads(inputs, found, tensors)
        wanted = []
        for position in positions:
            operand = operands[position]
            assert operand is not None
            operand = _view(operand) if again else operand.detach().requires_grad_()
            operands[position] = operand
            wanted.append(operand)
        with torch.enable_grad():
            y = EAGER[op](attrs, data, *operands)
        return list(torch.autograd.grad(y, wanted, dy, create_graph=again, allow_unused=True))


def _run(region: Region, why: Any, held: Sequence[LazyTensor], settling: bool = False) -> None:
    region.run_now(why, held, settling)


_run_uncompiled: Callable[..., None] = private.uncompiled(_run)


def _view(tensor: Any) -> Any:
    """The same numbers with a place in the graph of their own, which leads to the tensor's."""
    if tensor is None:
        return None
    with private.without_functions(), torch.enable_grad():
        return tensor.view_as(tensor)


def _requires_grad(tensor: Tensor) -> bool:
    if type(tensor) is LazyTensor:
        with private.without_functions():
            return tensor.requires_grad
    return tensor.requires_grad


_Stamp = tuple[int | None, int, bool]


def _fast_stamp(tensor: Tensor) -> _Stamp:
    try:
        return tensor._version, tensor.data_ptr(), tensor.is_leaf
    except RuntimeError:  # made in inference mode: it has no version
        return None, tensor.data_ptr(), tensor.is_leaf


def _stamp(tensor: Tensor) -> _Stamp:
    """What changes with a tensor's elements, with its memory (``.data =``, ``.half()``), and with its place
    in the graph (``.detach_()``)."""
    if type(tensor) is LazyTensor:
        with private.without_functions():
            version, _, leaf = _fast_stamp(tensor)
            return version, data_of(tensor).data_ptr(), leaf
    return _fast_stamp(tensor)


_READABLE = (Tensor, torch.nn.Parameter, LazyTensor)
