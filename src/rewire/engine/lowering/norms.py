"""Lowering of batch norms and the sums behind them."""

from __future__ import annotations

from rewire.engine import rules
from rewire.engine.graph import Node, Ref
from rewire.engine.lowering.base import Lowering, Norm, StoredNorm, attrs_of, length
from rewire.engine.plan import Buffer
from rewire.engine.rules import ResidualSum


def norm_gradients(low: Lowering, norm: Norm) -> dict[str, Buffer | None]:
    """Where a step writes the gradients of a batch norm's parameters and, if a product completes the
    gradient of its input, the factors for that."""
    _, weight, bias, *_ = low.nodes[norm.node].inputs
    deferred = rules.defer_norm_gradient(low.uses, norm.node)
    return {
        "weight": low.parameter_gradient(weight),
        "bias": low.parameter_gradient(bias),
        "factors": low.vector(3, norm.source.shape[1]) if deferred else None,
    }


def pass_norm(low: Lowering, norm: Norm, gradient: Buffer, dnorm: dict[str, Buffer | None]) -> None:
    """Hand the gradient of a batch norm's input on, complete or deferred."""
    source, factors = low.nodes[norm.node].inputs[0], dnorm["factors"]
    if factors is None:
        low.contribute(source, gradient)
    else:
        assert source is not None
        low.deferred[source] = gradient, factors


def batch_norm(low: Lowering, index: int, node: Node) -> None:
    source, weight, bias, running_mean, running_variance = node.inputs
    assert source is not None
    x, attrs = low.value(source), attrs_of(node)
    mean, variance = low.parameter(running_mean), low.parameter(running_variance)
    if attrs.training:
        running = mean, variance
        mean, variance = _moments(low, source, x, index)
        if attrs.track:
            count = length(x) // x.shape[1]
            low.emit(
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
            low.updated(running_mean)
            low.updated(running_variance)
    assert mean is not None
    assert variance is not None
    affine = low.parameter(weight), low.parameter(bias)
    norm = Norm(index, x, *affine, mean, variance, attrs.training, attrs.eps)
    reader, relu = low.uses.sole_reader(index), rules.relu_after(low.uses, index)
    if low.uses.is_op(reader, "add"):
        total = rules.residual_sum(low.uses, reader)  # type: ignore[arg-type]
        if total is not None and total.norm == index:
            low.norms[index] = norm
            return
    end = index if relu is None else relu
    low.done.add(end)
    low.norms[end] = norm._replace(relu=relu is not None)
    low.unstored[end] = lambda: store_norm(low, low.norms.pop(end), end, None)
    in_reader = rules.norm_in_reader(low.uses, index)
    wide = node.dtype is not low.dtype  # a program takes norms of the plan's own type
    if not in_reader and (wide or rules.pointwise_reader(low.uses, end) is None):
        low.value(end)


def _moments(low: Lowering, source: int, x: Buffer, node: int) -> tuple[Buffer, Buffer]:
    """Mean and variance by channel of a value, measured once."""
    if source not in low.moments:
        mean, variance = low.moments[source] = low.vector(x.shape[1]), low.vector(x.shape[1])
        low.emit("Moments", node, **low.channels(x), x=x, out_mean=mean, out_variance=variance)
    return low.moments[source]


def store_norm(low: Lowering, norm: Norm, tail: int, residual: Ref) -> None:
    """Compute a batch norm, the residual sum it is in, and their ReLU."""
    beside = None if residual is None else low.value(residual)
    z = low.stored[tail] = low.like(norm.source)
    low.emit(
        *(
            "NormForward",
            norm.node,
            "residual" if beside else None,
            "ReLU" if norm.relu else None,
        ),
        **low.channels(z),
        norm=norm.operands(),
        x=norm.source,
        residual=beside,
        out_z=z,
    )
    if low.uses.requires_grad(tail):
        reader = rules.residual_gradient_in_reader(low.uses, ResidualSum(norm.node, residual, tail))
        low.stored_norms[tail] = StoredNorm(norm, z, residual, tail, reader)
        low.backwards.append(lambda: _norm_backward(low, tail))


def _norm_backward(low: Lowering, tail: int) -> None:
    stored = low.stored_norms.pop(tail, None)
    parts = low.gradients.pop(tail, [])
    if stored is None or not parts:  # a convolution has computed it, or nothing depends on it
        return
    norm, z, residual, *_ = stored
    more = None
    whole = [part for part in parts if part.window is None]
    if norm.relu and whole and len(parts) > 1:  # the kernel adds two gradients where it masks them
        more = whole[-1]
        parts.remove(more)
    dz, dnorm = low.add_up(parts, norm.node), norm_gradients(low, norm)
    passed, dx = dz, None if dnorm["factors"] else low.like(dz)
    if norm.relu and (dx is None or low.uses.requires_grad(residual)):
        passed = low.like(dz)
    low.emit(
        "NormBackward",
        norm.node,
        **low.channels(dz),
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
    low.contribute(residual, passed)
    pass_norm(low, norm, passed if dx is None else dx, dnorm)
