"""Plans of bfloat16: conversions, and steps that mix it with float32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from plans import Program
from rewire import ops

pytestmark = [
    pytest.mark.skipif(not ops.instruction_sets(), reason="no compiled kernels"),
    pytest.mark.usefixtures("isa"),
]

LENGTHS = [1, 15, 16, 17, 64, 100_003]


@pytest.fixture
def program() -> Program:
    return Program(torch.bfloat16)


def hard_numbers(length: int) -> Tensor:
    """Halfway cases, both zeros, subnormal numbers, infinities and NaN among others."""
    ends = torch.tensor([0.0, -0.0, 1e-40, -1e-45, 3.4e38, torch.inf, -torch.inf, torch.nan])
    whole = torch.randn(length, generator=torch.Generator().manual_seed(1)).bfloat16().float()
    half = (whole.view(torch.int32) + 0x8000).view(torch.float32)  # between two of bfloat16
    return torch.cat([ends, half, half.nextafter(torch.tensor(9.0)), whole])[:length]


@pytest.mark.parametrize("length", LENGTHS)
def test_conversions_round_to_nearest_even(program: Program, length: int) -> None:
    x = hard_numbers(length)
    narrow, wide, start = program.empty(length), program.empty(length), program.add(x)
    program.run(
        program.native.Convert(length=length, widen=False, x=start, y=narrow),
        program.native.Convert(length=length, widen=True, x=narrow, y=wide),
    )
    assert program.memory(narrow).dtype == torch.bfloat16
    torch.testing.assert_close(program.memory(narrow), x.bfloat16(), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(
        program.memory(wide), x.bfloat16().float(), rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("wide", [(False, True, False), (True, False, True), (False, False, False)])
def test_pointwise_programs_read_and_write_either(
    program: Program, wide: tuple[bool, bool, bool]
) -> None:
    """Of images in panels and a gate by channel and sample, with a sum by channel."""
    native, shape = program.native, (3, 5, 2, 7, 4)  # panels, rows, channels, columns, samples
    a, b = torch.randn(shape), torch.rand(3, 1, 2, 1, 4)
    a, b = (t if w else t.bfloat16().float() for t, w in zip((a, b), wide, strict=False))
    strides = [280, 56, 28, 4, 1]
    x, gate, y = program.add(a), program.add(b), program.empty(a.numel())
    total, totals = program.empty(2), program.empty(2)
    program.run(
        native.Pointwise(
            loops=list(shape),
            channel=2,
            reads=[
                native.Access(operand=x, strides=strides, wide=wide[0]),
                native.Access(operand=gate, strides=[8, 0, 4, 0, 1], wide=wide[1]),
            ],
            program=[
                native.Instruction(op=native.Operation.mul, out=2, a=0, b=1),
                native.Instruction(op=native.Operation.affine, out=3, a=2, p=2.0, q=1.0),
            ],
            writes=[native.SlotAccess(slot=3, operand=y, strides=strides, wide=wide[2])],
            sums=[
                native.SlotAccess(slot=2, operand=total, strides=[0, 0, 1, 0, 0], wide=True),
                native.SlotAccess(slot=2, operand=totals, strides=[0, 0, 1, 0, 0]),
            ],
        )
    )
    types = [program.memory(k).dtype == torch.float32 for k in (x, gate, y)]
    assert types == list(wide)
    right = a * b
    written = right * 2 + 1
    if not wide[2]:
        written = written.bfloat16().float()
    assert torch.equal(program.memory(y).float().view(shape), written)
    torch.testing.assert_close(program.memory(total), right.sum((0, 1, 3, 4)))
    torch.testing.assert_close(program.memory(totals), right.sum((0, 1, 3, 4)).bfloat16())


def test_wide_steps_work_on_float32(program: Program) -> None:
    """The numbers of a plan of float32, bit by bit."""
    single, found = Program(torch.float32), []
    x, weight = torch.randn(6 * 40), torch.rand(6) + 1
    for each in (program, single):
        native = each.native
        mean, variance = each.empty(6), each.empty(6)
        z, start = each.empty(240), each.add(x)
        norm = native.NormOperands(
            weight=each.add(weight),
            mean=mean,
            variance=variance,
            training=True,
            relu=True,
            eps=1e-5,
        )
        shape = {"channels": 6, "length": 40, "wide": True}
        each.run(
            native.Moments(**shape, x=start, mean=mean, variance=variance),
            native.NormForward(**shape, norm=norm, x=start, z=z),
        )
        found.append(each.memory(z))
    assert found[0].dtype == torch.float32
    assert torch.equal(*found)


def test_an_operand_has_one_type(program: Program) -> None:
    native = program.native
    x, y, z = program.add(torch.ones(8)), program.empty(8), program.empty(8)
    with pytest.raises(
        ValueError, match=r"x \(operand 1\) holds numbers elsewhere and values here"
    ):
        program.plan(
            native.Convert(length=8, widen=True, x=x, y=y), native.Copy(length=8, x=y, y=z)
        )
