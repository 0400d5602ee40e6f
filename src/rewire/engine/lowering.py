"""Turning a graph into a plan: which kernel computes what, from which buffers, forward and backward.

One method for each operation. It emits the forward steps and leaves a function that emits the backward
ones; these run in reverse order. What can be fused they ask :mod:`rewire.engine.rules`: a node that
another one's kernel computes has no step of its own.

Within a region images of a batch that fills panels lie in panels, all else is batch-last. What comes in
and goes out is contiguous.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from rewire.engine import rules
from rewire.engine.graph import Graph, Node, Ref
from rewire.engine.plan import Buffer, Layout, Plan, Role, Step, place
from rewire.engine.rules import ResidualSum, Uses

_INDEX_VECTORS = ("indptr", "indices", "slots", "outputs", "order")


class Norm(NamedTuple):
    """A batch norm as kernels take it, and the value it reads."""

    node: int
    source: Buffer
    weight: Buffer | None
    bias: Buffer | None
    mean: Buffer
    variance: Buffer
    training: bool
    eps: float
    relu: bool = False

    def operands(self) -> dict[str, Any]:
        return {
            name: value for name, value in self._asdict().items() if name not in ("node", "source")
        }


class StoredNorm(NamedTuple):
    """A batch norm, plus a residual or not, whose output is in memory."""

    norm: Norm
    output: Buffer
    residual: Ref
    tail: int
    reader: int | None  # the convolution that computes its gradient


def lower(graph: Graph, panel: int) -> Plan:
    """The plan of a graph; ``panel`` is how many samples the kernels work on at once."""
    return _Lowering(graph, panel).plan()


class _Lowering:
    def __init__(self, graph: Graph, panel: int) -> None:
        self.graph, self.nodes, self.uses, self.panel = graph, graph.nodes, Uses(graph), panel
        self.element = graph.inputs[0].dtype.itemsize
        self.steps: dict[Role, list[Step]] = {Role.SAVED: [], Role.SCRATCH: []}
        self.role = Role.SAVED  # of new buffers: which pass is being lowered
        self.done: set[int] = set()  # nodes that another one's kernel computes
        self.rows: set[int] = set()  # linear layers between contiguous tensors
        self.stored: dict[int, Buffer] = {}  # values in memory, in the region's layout
        self.norms: dict[int, Norm] = {}  # batch norms (and their ReLU) that are not in memory
        self.moments: dict[int, tuple[Buffer, Buffer]] = {}
        self.backwards: list[Callable[[], None]] = []
        self.gradients: dict[int, list[Buffer]] = {}  # what readers have contributed so far
        self.deferred: dict[int, tuple[Buffer, Buffer]] = {}  # of a product's output, with factors
        self.masked: dict[int, Buffer] = {}  # of a product's output, past its ReLU
        self.stored_norms: dict[int, StoredNorm] = {}  # whose gradient is yet to be computed
        self.probes: dict[int, list[tuple[int, Buffer, Buffer]]] = {}

    def plan(self) -> Plan:
        for index, node in enumerate(self.nodes):
            if index not in self.done:
                getattr(self, "_" + node.op)(index, node)
        for j, ref in enumerate(self.graph.outputs):
            if (y := self.value(ref)).role is not Role.OUTPUT:
                self.relayout(y, Layout.CONTIGUOUS, ref, self.outside(Role.OUTPUT, j, ref))
        if any(self.nodes[ref].requires_grad for ref in self.graph.outputs):
            self._differentiate()
        forward, backward = self.steps[Role.SAVED], self.steps[Role.SCRATCH]
        kept = {b for step in backward for b in step.buffers() if b.role is Role.SAVED}
        saved = place(forward, Role.SAVED, kept)
        total = saved + place(backward, Role.SCRATCH, set(), start=saved)
        return Plan(forward, backward, saved, total, self.probes)

    def _differentiate(self) -> None:
        self.role = Role.SCRATCH
        for j, ref in enumerate(self.graph.outputs):
            if ref not in self.rows:
                dy = self.outside(Role.OUTPUT_GRAD, j, ref)
                self.contribute(ref, self.relayout(dy, self.layout(dy.shape), ref))
        for backward in reversed(self.backwards):
            backward()
        for ref in [ref for ref in self.gradients if ref < 0]:
            self._input_gradient(ref, self.gradients.pop(ref))

    # Buffers and steps

    def layout(self, shape: tuple[int, ...]) -> Layout:
        """Where a value of this shape lies between the steps of a region."""
        fills = len(shape) == 4 and shape[0] % self.panel == 0 and shape[0] > self.panel
        return Layout.PANELS if fills else Layout.BATCH_LAST

    def new(self, shape: tuple[int, ...], layout: Layout | None = None, element: int = 0) -> Buffer:
        return Buffer(
            shape, layout or self.layout(shape), self.role, element=element or self.element
        )

    def vector(self, *shape: int) -> Buffer:
        return self.new(shape, Layout.FLAT)

    def outside(
        self, role: Role, number: int, ref: int, layout: Layout = Layout.CONTIGUOUS
    ) -> Buffer:
        """Memory of a tensor that torch holds, of the shape of a value."""
        return Buffer(self.uses.shape(ref), layout, role, number, self.element)

    def emit(self, name: str, node: int, *fused: str | None, **arguments: Any) -> None:
        """Add a step; the names of what it writes start with ``out_``."""
        labels = tuple(label for label in fused if label)
        self.steps[self.role].append(Step(name, node, labels, arguments))

    def relayout(self, x: Buffer, layout: Layout, node: int, to: Buffer | None = None) -> Buffer:
        """The same numbers in another layout."""
        if x.layout is layout and to is None:
            return x
        if to is None and x.shape[0] == 1:  # of one sample, the same memory
            return x.seen_as(x.shape, layout)
        y = self.new(x.shape, layout) if to is None else to
        images = self._images(x if y.layout is not Layout.PANELS else y)
        self.emit("Relayout", node, images=images, source=x.layout, target=layout, x=x, out_y=y)
        return y

    def result(self, index: int) -> Buffer:
        """Where a step writes the value of a node: of one sample, in the memory of an output, unless there
        is a backward pass, which may read the value."""
        shape, outputs = self.nodes[index].shape, self.graph.outputs
        backward = any(node.requires_grad for node in self.nodes)
        if shape[0] == 1 and index in outputs and not backward:
            return self.outside(Role.OUTPUT, outputs.index(index), index, Layout.BATCH_LAST)
        return self.new(shape)

    def value(self, ref: int) -> Buffer:
        """A value in memory, in the region's layout: computed or moved now if it is not there."""
        if ref not in self.stored:
            if ref >= 0:
                self._store_norm(self.norms.pop(ref), ref, None)
            else:
                x = self.outside(Role.INPUT, ~ref, ref)
                self.stored[ref] = self.relayout(x, self.layout(x.shape), ref)
        return self.stored[ref]

    def parameter(self, ref: Ref) -> Buffer | None:
        return None if ref is None else self.outside(Role.INPUT, ~ref, ref, Layout.FLAT)

    def connections(self, node: Node) -> dict[str, Buffer]:
        """The index vectors of a layer."""
        first = len(_INDEX_VECTORS) * _attrs(node).topology
        return {
            name: Buffer((), Layout.FLAT, Role.INDEX, first + part, 4)
            for part, name in enumerate(_INDEX_VECTORS)
        }

    # Gradients

    def contribute(self, ref: Ref, gradient: Buffer | None) -> None:
        """One reader's part of the gradient of a value."""
        if ref is not None and gradient is not None and self.uses.requires_grad(ref):
            self.gradients.setdefault(ref, []).append(gradient)

    def gradient(self, ref: int) -> Buffer | None:
        """The gradient of a value, all of whose readers have contributed; None if nothing depends on it."""
        parts = self.gradients.pop(ref, [])
        return self.add_up(parts, ref) if parts else None

    def add_up(self, parts: list[Buffer], node: int) -> Buffer:
        total, *rest = parts
        for part in rest:
            y = self.new(total.shape, total.layout)
            self.emit("Add", node, length=_length(y), relu=False, a=total, b=part, out_y=y)
            total = y
        return total

    def parameter_gradient(self, ref: Ref) -> Buffer | None:
        """Where a step writes the gradient of a parameter: in its own memory if it is the only reader."""
        if ref is None or not self.uses.requires_grad(ref):
            return None
        if len(self.uses.readers(ref)) == 1:
            return self.outside(Role.INPUT_GRAD, ~ref, ref, Layout.FLAT)
        part = self.vector(*self.uses.shape(ref))
        self.contribute(ref, part)
        return part

    def _input_gradient(self, ref: int, parts: list[Buffer]) -> None:
        """The gradient of a tensor that several steps, or a step in another layout, have contributed to."""
        flat = parts[0].layout is Layout.FLAT
        layout = Layout.FLAT if flat else Layout.CONTIGUOUS
        out = self.outside(Role.INPUT_GRAD, ~ref, ref, layout)
        total = self.add_up(parts, ref)
        if flat:
            self.emit("Copy", ref, length=_length(out), x=total, out_y=out)
        else:
            self.relayout(total, layout, ref, out)

    def norm_gradients(self, norm: Norm) -> dict[str, Buffer | None]:
        """Where a step writes the gradients of a batch norm's parameters and, if a product completes the
        gradient of its input, the factors for that."""
        _, weight, bias, *_ = self.nodes[norm.node].inputs
        deferred = rules.defer_norm_gradient(self.uses, norm.node)
        return {
            "weight": self.parameter_gradient(weight),
            "bias": self.parameter_gradient(bias),
            "factors": self.vector(3, norm.source.shape[1]) if deferred else None,
        }

    def pass_norm(self, norm: Norm, gradient: Buffer, dnorm: dict[str, Buffer | None]) -> None:
        """Hand the gradient of a batch norm's input on, complete or deferred."""
        source, factors = self.nodes[norm.node].inputs[0], dnorm["factors"]
        if factors is None:
            self.contribute(source, gradient)
        else:
            assert source is not None
            self.deferred[source] = gradient, factors

    def relu_gradient(self, dz: Buffer, z: Buffer, node: int) -> Buffer:
        dy = self.new(dz.shape)
        self.emit("ReluBackward", node, length=_length(dz), dz=dz, z=z, out_dy=dy)
        return dy

    # Products

    def _linear(self, index: int, node: Node) -> None:
        if node.shape[0] == 1 or not rules.rows_product(self.uses, index):
            self._conv2d(index, node)
            return
        source, values, bias = node.inputs
        assert source is not None
        x = self.outside(Role.INPUT, ~source, source)
        y = self.outside(Role.OUTPUT, self.graph.outputs.index(index), index)
        layer, weights = self._layer(node, x, y), self.parameter(values)
        offset = self.parameter(bias)
        self.emit("LinearRows", index, **layer, values=weights, bias=offset, x=x, out_y=y)
        self.stored[index] = y
        self.rows.add(index)
        if node.requires_grad:
            self.backwards.append(lambda: self._linear_rows_backward(index, layer, x))

    def _linear_rows_backward(self, index: int, layer: dict[str, Any], x: Buffer) -> None:
        node, (source, values, bias) = self.nodes[index], self.nodes[index].inputs
        assert source is not None
        dy = self.outside(Role.OUTPUT_GRAD, self.graph.outputs.index(index), index)
        dx, alone = None, len(self.uses.readers(source)) == 1
        if self.uses.requires_grad(source):
            dx = self.new(x.shape, Layout.CONTIGUOUS)
            if alone:
                dx = self.outside(Role.INPUT_GRAD, ~source, source)
        if _attrs(node).probe:
            self._show(index, x, dy)
        weights, dbias = self.parameter(values), self.parameter_gradient(bias)
        if self.uses.requires_grad(values):
            self.emit(
                "LinearRowsBackward",
                index,
                **layer,
                values=weights,
                x=x,
                dy=dy,
                out_dx=dx,
                out_dvalues=self.parameter_gradient(values),
                out_dbias=dbias,
            )
        else:
            if dx is not None:
                self.emit(
                    "LinearRowsInputGradient", index, **layer, values=weights, dy=dy, out_dx=dx
                )
            if dbias is not None:
                turned = self.relayout(dy, Layout.BATCH_LAST, index)
                self.emit("RowSums", index, **self._channels(turned), x=turned, out_sums=dbias)
        if dx is not None and not alone:
            self.contribute(source, self.relayout(dx, self.layout(dx.shape), index))

    def _conv2d(self, index: int, node: Node) -> None:
        source, values, bias = node.inputs
        assert source is not None
        norm = self.norms.pop(source, None)  # done on the way in
        x = self.value(source) if norm is None else norm.source
        relu = rules.relu_after(self.uses, index)
        y = self.result(index if relu is None else relu)
        mean = variance = None
        if rules.moments_in_product(self.uses, index):
            mean, variance = self.moments[index] = self.vector(y.shape[1]), self.vector(y.shape[1])
        self.emit(
            "ConvForward",
            index,
            _name(norm),
            "ReLU" if relu is not None else None,
            "moments" if mean else None,
            **self._layer(node, x, y),
            values=self.parameter(values),
            bias=self.parameter(bias),
            x=x,
            norm=norm and norm.operands(),
            relu=relu is not None,
            out_y=y,
            out_mean=mean,
            out_variance=variance,
        )
        self._store(index, relu, y)
        if node.requires_grad:
            self.backwards.append(lambda: self._conv2d_backward(index, x, y, norm, relu))

    def _store(self, index: int, relu: int | None, y: Buffer) -> None:
        """The output of a node is in memory, that of its ReLU if its kernel does that, too."""
        self.stored[index if relu is None else relu] = y
        if relu is not None:
            self.done.add(relu)

    def _conv2d_backward(
        self, index: int, x: Buffer, y: Buffer, norm: Norm | None, relu: int | None
    ) -> None:
        node, (source, values, bias) = self.nodes[index], self.nodes[index].inputs
        assert source is not None
        needs_x, needs_values = map(self.uses.requires_grad, (source, values))
        probe = _attrs(node).probe
        gate: Buffer | None = None
        rest: dict[str, Buffer] | None = None
        masked = self.masked.pop(index, None)  # the next product has applied the ReLU's mask
        if index in self.deferred:
            dy, factors = self.deferred.pop(index)
            rest = {"y": y, "factors": factors}
        elif masked is not None:
            dy = masked
        elif (found := self.gradient(index if relu is None else relu)) is not None:
            dy, gate = found, None if relu is None else y
        else:
            return
        if probe or not needs_values:
            dy, gate, rest = self._complete(dy, gate, rest, index), None, None
        if probe:
            self._show(index, x, dy)
        dbias = None if masked is not None else self.parameter_gradient(bias)
        layer, weights = self._layer(node, x, y), self.parameter(values)
        if not needs_values:
            self._without_weights(index, layer, weights, x, dy, dbias)
            return
        read: dict[str, Any] = {"x": x, "dy": dy, "gate": gate, "deferred": rest}
        written: dict[str, Any] = {
            "out_dvalues": self.parameter_gradient(values),
            "out_dbias": dbias,
        }
        labels: list[str | None] = [
            "batch norm gradient" if rest else None,
            "ReLU mask" if gate else None,
        ]
        if not needs_x:
            self.emit("WeightGradient", index, *labels, **layer, **read, **written)
            return
        dx = self.new(x.shape)
        before: dict[str, Any] | None = None
        dnorm: dict[str, Buffer | None] | None = None
        sums: Buffer | None = None
        stored = self.stored_norms.get(source)
        previous = self._masked_product(source, index)
        if norm is not None:
            dnorm = self.norm_gradients(norm)
            before = {"norm": norm.operands(), "input": None, "more": None}
            self.pass_norm(norm, dx, dnorm)
            labels.append("gradient of the batch norm before")
        elif stored is not None and stored.reader == index:
            del self.stored_norms[source]
            more, dnorm = self.gradient(source), self.norm_gradients(stored.norm)
            before = {"norm": stored.norm.operands(), "input": stored.norm.source, "more": more}
            self.contribute(stored.residual, dx)
            self.pass_norm(stored.norm, dx, dnorm)
            labels.append("gradient of the residual sum before")
        elif previous is not None:
            sums = self.parameter_gradient(self.nodes[previous].inputs[2]) or self.vector(
                x.shape[1]
            )
            self.masked[previous] = dx
            labels.append("ReLU mask and bias gradient of the product before")
        else:
            self.contribute(source, dx)
        self.emit(
            "ConvBackward",
            index,
            *labels,
            **layer,
            values=weights,
            **read,
            before=before,
            out_dx=dx,
            **written,
            out_dnorm=dnorm,
            out_relu_sums=sums,
        )

    def _without_weights(
        self, index: int, layer: Any, weights: Any, x: Buffer, dy: Buffer, dbias: Buffer | None
    ) -> None:
        """The backward pass of a product whose weights are frozen."""
        if dbias is not None:
            self.emit("RowSums", index, **self._channels(dy), x=dy, out_sums=dbias)
        source = self.nodes[index].inputs[0]
        if self.uses.requires_grad(source):
            dx = self.new(x.shape)
            self.emit("InputGradient", index, **layer, values=weights, dy=dy, out_dx=dx)
            self.contribute(source, dx)

    def _masked_product(self, source: int, reader: int) -> int | None:
        """The product before whose ReLU's mask ``reader`` applies in its backward pass."""
        previous = self.nodes[source].inputs[0] if self.uses.is_op(source, "relu") else None
        if previous is None or not self.uses.is_op(previous, *rules.PRODUCTS):
            return None
        return previous if rules.relu_gradient_in_reader(self.uses, previous) == reader else None

    def _complete(
        self, dy: Buffer, gate: Buffer | None, rest: dict[str, Buffer] | None, node: int
    ) -> Buffer:
        """The gradient of a product's output, with nothing left to do to it."""
        if gate is not None:
            return self.relu_gradient(dy, gate, node)
        if rest is None:
            return dy
        dx = self.new(dy.shape)
        sizes = self._channels(dy)
        self.emit(
            "ResolveDeferred", node, **sizes, g=dy, x=rest["y"], factors=rest["factors"], out_dx=dx
        )
        return dx

    def _show(self, index: int, *buffers: Buffer) -> None:
        """Show a rewirer the input and the output gradient of a layer, batch-last."""
        first = 2 * sum(map(len, self.probes.values()))
        exports = []
        for k, buffer in enumerate(buffers):
            y = Buffer(buffer.shape, Layout.BATCH_LAST, Role.EXPORT, first + k, self.element)
            if buffer.layout is y.layout:
                self.emit("Copy", index, length=_length(y), x=buffer, out_y=y)
            else:
                self.relayout(buffer, y.layout, index, y)
            exports.append(y)
        self.probes.setdefault(len(self.steps[self.role]), []).append((index, *exports))  # type: ignore[arg-type]

    # Batch norms and sums

    def _batch_norm(self, index: int, node: Node) -> None:
        source, weight, bias, running_mean, running_variance = node.inputs
        assert source is not None
        x, attrs = self.value(source), _attrs(node)
        mean, variance = self.parameter(running_mean), self.parameter(running_variance)
        if attrs.training:
            running = mean, variance
            mean, variance = self._moments(source, x, index)
            if attrs.track:
                count = _length(x) // x.shape[1]
                self.emit(
                    "Track",
                    index,
                    channels=x.shape[1],
                    momentum=attrs.momentum,
                    unbiased=count / (count - 1),
                    mean=mean,
                    variance=variance,
                    out_running_mean=running[0],
                    out_running_variance=running[1],
                )
        assert mean is not None
        assert variance is not None
        affine = self.parameter(weight), self.parameter(bias)
        norm = Norm(index, x, *affine, mean, variance, attrs.training, attrs.eps)
        reader, relu = self.uses.sole_reader(index), rules.relu_after(self.uses, index)
        if self.uses.is_op(reader, "add"):
            total = rules.residual_sum(self.uses, reader)  # type: ignore[arg-type]
            if total is not None and total.norm == index:
                self.norms[index] = norm
                return
        end = index if relu is None else relu
        self.done.add(end)
        self.norms[end] = norm._replace(relu=relu is not None)
        if not rules.norm_in_reader(self.uses, index):
            self.value(end)

    def _moments(self, source: int, x: Buffer, node: int) -> tuple[Buffer, Buffer]:
        """Mean and variance by channel of a value, measured once."""
        if source not in self.moments:
            mean, variance = self.moments[source] = self.vector(x.shape[1]), self.vector(x.shape[1])
            self.emit(
                "Moments", node, **self._channels(x), x=x, out_mean=mean, out_variance=variance
            )
        return self.moments[source]

    def _store_norm(self, norm: Norm, tail: int, residual: Ref) -> None:
        """Compute a batch norm, the residual sum it is in, and their ReLU."""
        beside = None if residual is None else self.value(residual)
        z = self.stored[tail] = self.new(norm.source.shape)
        self.emit(
            *(
                "NormForward",
                norm.node,
                "residual" if beside else None,
                "ReLU" if norm.relu else None,
            ),
            **self._channels(z),
            norm=norm.operands(),
            x=norm.source,
            residual=beside,
            out_z=z,
        )
        if self.uses.requires_grad(tail):
            reader = rules.residual_gradient_in_reader(
                self.uses, ResidualSum(norm.node, residual, tail)
            )
            self.stored_norms[tail] = StoredNorm(norm, z, residual, tail, reader)
            self.backwards.append(lambda: self._norm_backward(tail))

    def _norm_backward(self, tail: int) -> None:
        stored = self.stored_norms.pop(tail, None)
        parts = self.gradients.pop(tail, [])
        if stored is None or not parts:  # a convolution has computed it, or nothing depends on it
            return
        norm, z, residual, *_ = stored
        more = None
        if norm.relu and len(parts) > 1:  # the kernel adds two gradients where it applies a mask
            more = parts.pop()
        dz, dnorm = self.add_up(parts, norm.node), self.norm_gradients(norm)
        passed, dx = dz, None if dnorm["factors"] else self.new(dz.shape)
        if norm.relu and (dx is None or self.uses.requires_grad(residual)):
            passed = self.new(dz.shape)
        self.emit(
            "NormBackward",
            norm.node,
            **self._channels(dz),
            norm=norm.operands(),
            x=norm.source,
            z=z if residual is not None and norm.relu else None,
            dz=dz,
            more=more,
            out_dx=dx,
            out_dresidual=None if passed is dz else passed,
            out_dweight=dnorm["weight"],
            out_dbias=dnorm["bias"],
            out_factors=dnorm["factors"],
        )
        self.contribute(residual, passed)
        self.pass_norm(norm, passed if dx is None else dx, dnorm)

    def _add(self, index: int, node: Node) -> None:
        total, relu = rules.residual_sum(self.uses, index), rules.relu_after(self.uses, index)
        if relu is not None:
            self.done.add(relu)
        if total is not None and total.norm in self.norms:
            norm = self.norms.pop(total.norm)._replace(relu=relu is not None)
            self._store_norm(norm, total.tail, total.residual)
            return
        a, b = (self.value(ref) for ref in node.inputs if ref is not None)
        z, label = self.new(node.shape), "ReLU" if relu is not None else None
        self.emit("Add", index, label, length=_length(z), relu=relu is not None, a=a, b=b, out_y=z)
        self._store(index, relu, z)

        def backward() -> None:
            dz = self.gradient(index if relu is None else relu)
            if dz is not None and relu is not None:
                dz = self.relu_gradient(dz, z, index)
            for ref in node.inputs:
                self.contribute(ref, dz)

        self.backwards.append(backward)

    # Operations on one value

    def unary(
        self,
        name: str,
        index: int,
        end: int,
        x: Buffer,
        y: Buffer,
        *labels: str | None,
        **sizes: Any,
    ) -> None:
        """``y`` from ``x`` by a kernel of this name; its gradient needs nothing else."""
        value = {"value": sizes.pop("value")} if "value" in sizes else {}
        self.emit(name, index, *labels, **sizes, **value, x=x, out_y=y)
        self.stored[end] = y

        def backward() -> None:
            dy = self.gradient(end)
            if dy is not None:
                dx = self.new(x.shape)
                self.emit(name + "Backward", index, *labels, **sizes, dy=dy, out_dx=dx)
                self.contribute(self.nodes[index].inputs[0], dx)

        self.backwards.append(backward)

    def _relu(self, index: int, node: Node) -> None:
        y = self.stored[index] = self.new(node.shape)
        self.emit("Relu", index, length=_length(y), x=self.source(node), out_y=y)

        def backward() -> None:
            dy = self.gradient(index)
            if dy is not None:
                self.contribute(node.inputs[0], self.relu_gradient(dy, y, index))

        self.backwards.append(backward)

    def _max_pool2d(self, index: int, node: Node) -> None:
        source = node.inputs[0]
        assert source is not None
        norm = self.norms.pop(source, None)  # done on the way in
        x = self.value(source) if norm is None else norm.source
        y, pool, operands = self.new(node.shape), self._pool(node, x), norm and norm.operands()
        which = self.new(node.shape, Layout.FLAT, element=1) if node.requires_grad else None
        self.emit(
            "MaxPool", index, _name(norm), pool=pool, norm=operands, x=x, out_y=y, out_which=which
        )
        self.stored[index] = y

        def backward() -> None:
            dy = self.gradient(index)
            if dy is None:
                return
            dx, dnorm = self.new(x.shape), norm and self.norm_gradients(norm)
            self.emit(
                "MaxPoolBackward",
                index,
                norm and "gradient of the batch norm before",
                pool=pool,
                norm=operands,
                x=norm and x,
                dy=dy,
                which=which,
                out_dx=dx,
                out_dnorm=dnorm,
            )
            if norm is None or dnorm is None:
                self.contribute(source, dx)
            else:
                self.pass_norm(norm, dx, dnorm)

        self.backwards.append(backward)

    def _avg_pool2d(self, index: int, node: Node) -> None:
        x = self.source(node)
        pool = self._pool(node, x, _attrs(node).count_include_pad)
        self.unary("AvgPool", index, index, x, self.new(node.shape), pool=pool)

    def _mean(self, index: int, node: Node) -> None:
        x = self.source(node)
        means = self.new(x.shape[:2])
        self.emit("GlobalMean", index, images=self._images(x), x=x, out_y=means)
        self.stored[index] = self._reshaped(means, node.shape, index)

        def backward() -> None:
            dy = self.gradient(index)
            if dy is not None:
                dx, dy = self.new(x.shape), self._reshaped(dy, means.shape, index)
                self.emit("GlobalMeanBackward", index, images=self._images(x), dy=dy, out_dx=dx)
                self.contribute(node.inputs[0], dx)

        self.backwards.append(backward)

    def _slice(self, index: int, node: Node) -> None:
        x, attrs, pad = self.source(node), _attrs(node), rules.pad_after_slice(self.uses, index)
        around, value, end = (0, 0), 0.0, index
        if pad is not None:
            around, value, end = (
                _attrs(self.nodes[pad]).amounts[2:4],
                _attrs(self.nodes[pad]).value,
                pad,
            )
            self.done.add(pad)
        y, label = self.new(self.nodes[end].shape), None if pad is None else "pad"
        sizes = {
            "images": self._images(x),
            "slicing": (attrs.down, attrs.across, *around),
            "value": value,
        }
        self.unary("Slice", index, end, x, y, label, **sizes)

    def _pad(self, index: int, node: Node) -> None:
        x, y, attrs = self.source(node), self.new(node.shape), _attrs(node)
        sizes = {"images": self._images(x), "padding": attrs.amounts[2:], "value": attrs.value}
        self.unary("Pad", index, index, x, y, **sizes)

    def _dropout(self, index: int, node: Node) -> None:
        x, attrs = self.source(node), _attrs(node)
        sizes = {"length": _length(x), "probability": attrs.p, "seed": attrs.seed}

        def drop(given: Buffer) -> Buffer:
            """The noise of an element depends on its place in batch-last memory."""
            y = self.new(node.shape, Layout.BATCH_LAST)
            given = self.relayout(given, Layout.BATCH_LAST, index)
            self.emit("Dropout", index, **sizes, x=given, out_y=y)
            return self.relayout(y, self.layout(node.shape), index)

        def backward() -> None:
            dy = self.gradient(index)
            if dy is not None:
                self.contribute(node.inputs[0], drop(dy))

        self.stored[index] = drop(x)
        self.backwards.append(backward)

    def _view(self, index: int, node: Node) -> None:
        x = self.source(node)
        self.stored[index] = self._reshaped(x, node.shape, index)

        def backward() -> None:
            dy = self.gradient(index)
            if dy is not None:
                self.contribute(node.inputs[0], self._reshaped(dy, x.shape, index))

        self.backwards.append(backward)

    def _reshaped(self, x: Buffer, shape: tuple[int, ...], node: int) -> Buffer:
        """A value as another shape: of the same batch, that is the same batch-last memory."""
        same = Layout.BATCH_LAST if shape[0] == x.shape[0] else Layout.CONTIGUOUS
        return self.relayout(self.relayout(x, same, node).seen_as(shape), self.layout(shape), node)

    def source(self, node: Node) -> Buffer:
        (ref,) = node.inputs
        assert ref is not None
        return self.value(ref)

    # Sizes

    def _layer(self, node: Node, x: Buffer, y: Buffer) -> dict[str, Any]:
        """The sizes and connections of a product."""
        batch, n_in, *size = x.shape
        _, n_out, *out = y.shape
        attrs = _attrs(node)
        kernel = (1, 1, 1, 1, 0, 0, 1, 1)
        if node.op == "conv2d":
            kernel = (*attrs.kernel, *attrs.stride, *attrs.padding, *attrs.dilation)
        panels = (x.layout is Layout.PANELS, y.layout is Layout.PANELS)
        sizes = (batch, n_in, *(size or (1, 1)), n_out, *(out or (1, 1)), *kernel)
        geometry = (*sizes, self.panel if any(panels) else 0, *panels)
        return {"geometry": geometry, "topology": self.connections(node)}

    def _channels(self, x: Buffer) -> dict[str, Any]:
        """How channels lie in memory: in so many runs each."""
        rows = x.shape[0] // self.panel * x.shape[2] if x.layout is Layout.PANELS else 1
        return {"channels": x.shape[1], "length": _length(x) // x.shape[1], "panel_rows": rows}

    def _images(self, x: Buffer) -> tuple[int, ...]:
        """The sizes of images; batch-last, they are one panel."""
        batch, channels, *size = (
            x.shape if len(x.shape) == 4 else (x.shape[0], _length(x) // x.shape[0])
        )
        panels = x.layout is Layout.PANELS
        split = (batch // self.panel, self.panel) if panels else (1, batch)
        return (split[0], channels, *(size or (1, 1)), split[1], panels)

    def _pool(self, node: Node, x: Buffer, count_padding: bool = True) -> tuple[int, ...]:
        attrs, (batch, *image) = _attrs(node), x.shape
        panels = x.layout is Layout.PANELS
        split = (batch // self.panel, self.panel) if panels else (1, batch)
        sizes = (*attrs.kernel, *attrs.stride, *attrs.padding)
        return (*split, *image, *node.shape[2:], *sizes, count_padding, panels)


def _name(norm: Norm | None) -> str | None:
    return None if norm is None else "batch norm + ReLU" if norm.relu else "batch norm"


def _attrs(node: Node) -> Any:
    return node.attrs


def _length(buffer: Buffer) -> int:
    return math.prod(buffer.shape)
