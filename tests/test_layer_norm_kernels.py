"""Layer norm kernels and transpositions against plain PyTorch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from plans import Program, close
from rewire import ops

pytestmark = [
    pytest.mark.skipif(not ops.instruction_sets(), reason="no compiled kernels"),
    pytest.mark.usefixtures("isa"),
]

EPS = 1e-3


@pytest.fixture(params=[torch.float32, torch.float64, torch.bfloat16], ids=["f32", "f64", "bf16"])
def program(request: pytest.FixtureRequest) -> Program:
    return Program(request.param)


def normal(*shape: int, seed: int = 0) -> Tensor:
    """In double precision, of what bfloat16 can hold."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16().double()


def expected(x: Tensor, weight: Tensor | None, bias: Tensor | None, centered: bool) -> Tensor:
    """Of (panels, channels, columns)."""
    last = x.transpose(1, 2)
    if centered:
        y = F.layer_norm(last, last.shape[-1:], weight, bias, EPS)
    else:
        y = F.rms_norm(last, last.shape[-1:], weight, EPS)
    return y.transpose(1, 2)


SHAPES = [(1, 5, 1), (3, 7, 64), (2, 1, 3), (1, 33, 200), (9, 12, 64), (2, 4, 67)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize("wide", [(False, False), (True, False), (True, True)])
def test_layer_norm(
    program: Program,
    shape: tuple[int, int, int],
    affine: bool,
    centered: bool,
    wide: tuple[bool, bool],
) -> None:
    if program.dtype != torch.bfloat16 and any(wide):
        pytest.skip("there is one type of numbers")
    panels, channels, columns = shape
    x = (3 * normal(*shape) + 2).requires_grad_()
    weight = normal(channels, seed=1).requires_grad_() if affine else None
    bias = normal(channels, seed=2).requires_grad_() if affine and centered else None
    y, dy = expected(x, weight, bias, centered), normal(*shape, seed=3)
    y.backward(dy)
    p, n = program, program.native
    sizes = {"panels": panels, "channels": channels, "columns": columns}
    norm = {**sizes, "eps": EPS, "centered": centered, "wide_x": wide[0], "wide_y": wide[1]}
    ids = {"x": p.add(x)}
    if weight is not None:
        ids["weight"] = p.add(weight)
    moments = {"scale": p.empty(panels, columns)}
    if centered:
        moments["mean"] = p.empty(panels, columns)
    offset = {} if bias is None else {"bias": p.add(bias)}
    out, dx = p.empty(*shape), p.empty(*shape)
    grads = {} if weight is None else {"dweight": p.empty(channels)}
    if bias is not None:
        grads["dbias"] = p.empty(channels)
    p.run(n.LayerNormForward(**norm, **ids, **offset, **moments, y=out))
    p.run(n.LayerNormBackward(**norm, **ids, **moments, dy=p.add(dy), dx=dx, **grads))
    close(p[out].reshape(shape), y)
    close(p[dx].reshape(shape), x.grad)  # type: ignore[arg-type]
    for name, operand in grads.items():
        parameter = weight if name == "dweight" else bias
        assert parameter is not None
        assert parameter.grad is not None
        close(p[operand], parameter.grad, factor=4)
    variance = x.detach().transpose(1, 2)
    square = variance.var(-1, correction=0) if centered else variance.square().mean(-1)
    close(p[moments["scale"]].reshape(panels, columns), (square + EPS).rsqrt())


def test_float32_is_not_made_from_bfloat16(program: Program) -> None:
    sizes = {"panels": 1, "channels": 2, "columns": 3}
    with pytest.raises(ValueError, match="y is wide only if x is"):
        program.native.LayerNormForward(**sizes, x=0, y=1, wide_y=True)


def test_without_parts_that_nobody_wants(program: Program) -> None:
    p, n = program, program.native
    x, dy = normal(2, 6, 20), normal(2, 6, 20, seed=1)
    sizes = {"panels": 2, "channels": 6, "columns": 20, "eps": EPS}
    y, mean, scale, dweight = p.empty(2, 6, 20), p.empty(40), p.empty(40), p.empty(6)
    given = p.add(x)
    p.run(n.LayerNormForward(**sizes, x=given, y=y))
    close(p[y].reshape(x.shape), expected(x, None, None, True))
    p.run(n.LayerNormForward(**sizes, x=given, y=y, mean=mean, scale=scale))
    p.run(
        n.LayerNormBackward(**sizes, x=given, dy=p.add(dy), mean=mean, scale=scale, dweight=dweight)
    )
    normed = (x - x.mean(1, keepdim=True)) / (x.var(1, correction=0, keepdim=True) + EPS).sqrt()
    close(p[dweight], (dy * normed).sum((0, 2)), factor=4)


def test_results_do_not_depend_on_threads(program: Program) -> None:
    p, n, found = program, program.native, []
    sizes = {"panels": 40, "channels": 16, "columns": 64}
    x, dy = p.add(normal(40, 16, 64)), p.add(normal(40, 16, 64, seed=1))
    for threads in (1, 2, 3):
        y, dx = p.empty(40, 16, 64), p.empty(40, 16, 64)
        mean, scale, dweight, dbias = p.empty(2560), p.empty(2560), p.empty(16), p.empty(16)
        p.run(n.LayerNormForward(**sizes, x=x, y=y, mean=mean, scale=scale), threads=threads)
        grads = {"dx": dx, "dweight": dweight, "dbias": dbias}
        step = n.LayerNormBackward(**sizes, x=x, dy=dy, mean=mean, scale=scale, **grads)
        p.run(step, threads=threads)
        found.append([p[k].clone() for k in (y, dx, dweight, dbias)])
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


def test_a_norm_that_is_centered_needs_means(program: Program) -> None:
    with pytest.raises(ValueError, match="a norm that is centered needs the means"):
        program.native.LayerNormBackward(panels=1, channels=2, columns=3, x=0, dy=1, scale=2, dx=3)


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 5, 7), (2, 64, 16), (2, 70, 33), (4, 3, 130)])
def test_transposes(program: Program, shape: tuple[int, int, int]) -> None:
    p, x = program, normal(*shape)
    y, (matrices, rows, columns) = p.empty(*shape), shape
    sizes = {"matrices": matrices, "rows": rows, "columns": columns}
    p.run(p.native.TransposeEach(**sizes, x=p.add(x), y=y))
    assert torch.equal(p[y].reshape(matrices, columns, rows).double(), x.transpose(1, 2))
