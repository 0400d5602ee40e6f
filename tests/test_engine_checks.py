"""What the native executor refuses: in steps, in plans and in runs, before anything is written."""

from __future__ import annotations

import ast
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import rewire
from plans import Program, lay
from products import Case, dense_gradients, make
from rewire import ops
from rewire.ops import Convolution, native

pytestmark = pytest.mark.skipif(not ops.instruction_sets(), reason="no compiled kernels")

BIG = 2**62


def refused(message: str) -> Any:
    return pytest.raises(ValueError, match=f"^{re.escape(message)}$")


@pytest.fixture
def program() -> Program:
    return Program(torch.float64)


def n() -> Any:
    return native.module()


# Steps by themselves


def sizes(**changes: Any) -> Any:
    of: dict[str, Any] = {"batch": 8, "in_channels": 3, "height": 5, "width": 5}
    of |= {"out_channels": 4, "out_height": 5, "out_width": 5}
    of |= {"kh": 3, "kw": 3, "sh": 1, "sw": 1, "ph": 1, "pw": 1, "dh": 1, "dw": 1} | changes
    return n().Geometry(**of)


def topology(**changes: int) -> Any:
    of = {"indptr": 0, "indices": 1, "slots": 2, "outputs": 3, "order": 4}
    return n().TopologyOperands(**of | changes)


def forward(**changes: Any) -> Any:
    of: dict[str, Any] = {"geometry": sizes(), "topology": topology(), "values": 5, "x": 6, "y": 7}
    return n().ConvForward(**of | changes)


def backward(**changes: Any) -> Any:
    of: dict[str, Any] = {"geometry": sizes(), "topology": topology(), "values": 5, "x": 6}
    return n().ConvBackward(**of | {"dy": 7, "dx": 8, "dvalues": 9} | changes)


def norm(**changes: Any) -> Any:
    of: dict[str, Any] = {"mean": 10, "variance": 11, "training": True, "eps": 1e-5}
    return n().NormOperands(**of | changes)


GEOMETRIES: list[tuple[dict[str, Any], str]] = [
    ({"batch": 0}, "the input has a size of 0, sizes must be at least 1"),
    ({"batch": -8}, "the input has a size of -8, sizes must be at least 1"),
    ({"in_channels": -3}, "the input has a size of -3, sizes must be at least 1"),
    ({"out_channels": 0}, "the output has a size of 0, sizes must be at least 1"),
    ({"kh": 0}, "the kernel has a size of 0, sizes must be at least 1"),
    ({"sw": -1}, "the kernel has a size of -1, sizes must be at least 1"),
    ({"ph": -1}, "padding must not be negative"),
    ({"batch": BIG}, "the input is too large for any memory"),
    ({"in_channels": 2**31}, "a layer has at most 2^31 - 1 input and output units"),
    ({"out_channels": 2**31}, "a layer has at most 2^31 - 1 input and output units"),
    (
        {"out_height": 6},
        "the size of the output does not follow from input, kernel, stride, padding and dilation",
    ),
    (  # smaller than the kernel
        {"height": 1, "kh": 4, "sh": 2, "out_height": 1},
        "the size of the output does not follow from input, kernel, stride, padding and dilation",
    ),
    ({"panel": 3, "in_panels": True}, "the batch must be a multiple of the panel"),
    ({"panel": 0, "out_panels": True}, "the batch must be a multiple of the panel"),
    ({"panel": -4, "out_panels": True}, "the batch must be a multiple of the panel"),
]


@pytest.mark.parametrize(("changes", "problem"), GEOMETRIES)
def test_sizes_of_layers(changes: dict[str, Any], problem: str) -> None:
    with refused(f"ConvForward: {problem}"):
        forward(geometry=sizes(**changes))
    with refused(f"ConvBackward: {problem}"):
        backward(geometry=sizes(**changes))


LAYERS: list[tuple[Any, dict[str, Any], str]] = [
    (forward, {"x": -1}, "ConvForward: x must be an operand, got -1"),
    (forward, {"bias": -2}, "ConvForward: bias must be an operand, got -2"),
    (forward, {"values": -1}, "ConvForward: values must be an operand, got -1"),
    (forward, {"mean": 8}, "ConvForward: mean and variance are computed together"),
    (backward, {"dvalues": -1}, "ConvBackward: dvalues must be an operand, got -1"),
    (backward, {"relu_sums": -7}, "ConvBackward: relu_sums must be an operand, got -7"),
]


@pytest.mark.parametrize(("step", "changes", "problem"), LAYERS)
def test_operands_of_layers(step: Any, changes: dict[str, Any], problem: str) -> None:
    with refused(problem):
        step(**changes)


def test_a_layer_needs_its_connections_in_the_order_that_it_reads() -> None:
    only_rows = n().TopologyOperands(indptr=0, indices=1)
    forward(topology=only_rows)
    with refused("ConvBackward: slots must be an operand, got -1"):
        backward(topology=only_rows)
    with refused("ConvForward: indptr must be an operand, got -1"):
        forward(topology=n().TopologyOperands(slots=0, outputs=1, order=2))


def test_combinations_that_no_kernel_has() -> None:
    gradients = n().NormGradientOperands(weight=12, bias=13)
    before = n().InputNorm(norm=norm())
    deferred = n().DeferredGradient(y=14, factors=15)
    with refused("ConvBackward: before and dnorm belong together"):
        backward(before=before)
    with refused("ConvBackward: before and dnorm belong together"):
        backward(dnorm=gradients)
    with refused("ConvBackward: relu_sums is for layers without a batch norm before them"):
        backward(before=before, dnorm=gradients, relu_sums=16)
    with refused(
        "ConvBackward: the gradient of a batch norm whose output is part of a sum is deferred: "
        "it needs factors"
    ):
        backward(before=n().InputNorm(norm=norm(), input=16), dnorm=gradients)
    with refused("ConvBackward: dy is read through a gate or with a deferred gradient, not both"):
        backward(gate=16, deferred=deferred)
    with refused("WeightGradient: dy is read through a gate or with a deferred gradient, not both"):
        n().WeightGradient(
            geometry=sizes(), topology=topology(), x=6, dy=7, gate=8, deferred=deferred, dvalues=9
        )
    with refused(
        "LinearRows: a linear layer has images of 1 x 1, a kernel of 1 x 1, no padding and no panels"
    ):
        n().LinearRows(geometry=sizes(), topology=topology(), values=5, x=6, y=7)


def pool(*of: int, **options: Any) -> Any:
    return n().Pool(*of, **options)


OF_CHANNELS: dict[str, Any] = {"channels": 4, "length": 12, "panel_rows": 3}


def resample(down: Any, across: Any) -> Any:
    return n().Resample(images=n().Images(2, 3, 4, 4, 4), down=down, across=across, x=0, y=1)


STEPS: list[tuple[Any, str]] = [
    (
        lambda: n().Moments(channels=4, length=12, panel_rows=5, x=0, mean=1, variance=2),
        "Moments: length must be a multiple of panel_rows",
    ),
    (
        lambda: n().Moments(channels=4, length=12, panel_rows=0, x=0, mean=1, variance=2),
        "Moments: length must be a multiple of panel_rows",
    ),
    (
        lambda: n().Moments(channels=4, length=-12, panel_rows=1, x=0, mean=1, variance=2),
        "Moments: the tensor has a size of -12, sizes must be at least 1",
    ),
    (
        lambda: n().RowSums(channels=2**40, length=2**40, x=0, sums=1),
        "RowSums: the tensor is too large for any memory",
    ),
    (
        lambda: n().Track(
            channels=4,
            momentum=-1,
            unbiased=1.0,
            mean=0,
            variance=1,
            running_mean=2,
            running_variance=3,
        ),
        "Track: momentum must be the index of a scalar, got -1",
    ),
    (
        lambda: n().NormBackward(**OF_CHANNELS, norm=norm(), x=0, dz=1, dx=2, factors=3),
        "NormBackward: with factors the gradient of x is deferred: there is no dx",
    ),
    (
        lambda: n().NormBackward(**OF_CHANNELS, norm=norm(relu=True), x=0, dz=1, factors=3),
        "NormBackward: with factors, and a ReLU or more, g has to be written: it needs dresidual",
    ),
    (
        lambda: n().NormBackward(**OF_CHANNELS, norm=norm(), x=0, dz=1),
        "NormBackward: dx must be an operand, got -1",
    ),
    (
        lambda: n().MaxPool(pool=pool(1, 4, 2, 6, 6, 3, 3, 16, 16, 2, 2, 8, 8), x=0, y=1),
        "MaxPool: the window is too large",
    ),
    (
        lambda: n().MaxPool(pool=pool(1, 4, 2, 6, 6, 3, 3, 2, 2, 2, 2, 2, 0), x=0, y=1),
        "MaxPool: padding must not be negative or more than half of the window",
    ),
    (
        lambda: n().AvgPool(pool=pool(1, 4, 2, 6, 6, 4, 3, 2, 2, 2, 2, 0, 0), x=0, y=1),
        "AvgPool: the size of the output does not follow from input, window, stride and padding",
    ),
    (
        lambda: n().AvgPool(pool=pool(1, 4, 2, 1, 6, 1, 3, 2, 2, 2, 2, 0, 0), x=0, y=1),
        "AvgPool: the size of the output does not follow from input, window, stride and padding",
    ),
    (
        lambda: n().AvgPool(pool=pool(1, 4, 2, BIG, 6, 3, 3, 2, 2, 2, 2, 0, 0), x=0, y=1),
        "AvgPool: x is too large for any memory",
    ),
    (
        lambda: n().MaxPool(pool=pool(2, 4, 2, 6, 6, 3, 3, 2, 2, 2, 2, 0, 0), x=0, y=1),
        "MaxPool: batch-last images are one panel of the whole batch",
    ),
    (
        lambda: n().MaxPoolBackward(
            pool=pool(1, 4, 2, 6, 6, 3, 3, 2, 2, 2, 2, 0, 0), norm=norm(), dy=0, which=1, dx=2
        ),
        "MaxPoolBackward: norm and dnorm belong together",
    ),
    (
        lambda: n().GlobalMean(images=n().Images(2, 3, 4, 4, 4, in_panels=False), x=0, y=1),
        "GlobalMean: batch-last images are one panel of the whole batch",
    ),
    (
        lambda: resample(n().Side([0, 1], [0], [1.0]), n().Side([0, 1], [4], [1.0])),
        "Resample: an entry is outside of the image",
    ),
    (
        lambda: resample(n().Side([0, 1], [-1], [1.0]), n().Side([0, 1], [0], [1.0])),
        "Resample: an entry is outside of the image",
    ),
    *(
        (
            lambda ptr=ptr: resample(n().Side(ptr, [0, 1], [1.0, 2.0]), n().Side([0, 0], [], [])),
            "Resample: the pointers of a side begin with 0 and do not fall",
        )
        for ptr in ([], [0], [1, 2], [0, 2, 1])
    ),
    (
        lambda: resample(n().Side([0, 1], [0], [1.0]), n().Side([0, 2], [0], [1.0])),
        "Resample: a side has as many entries and weights as its pointers say",
    ),
    (
        lambda: resample(n().Side([0, 1], [0], []), n().Side([0, 0], [], [])),
        "Resample: a side has as many entries and weights as its pointers say",
    ),
    *(
        (
            lambda groups=groups: n().GroupMoments(
                images=n().Images(2, 3, 4, 4, 4), groups=groups, eps=0.1, x=0, moments=1
            ),
            "GroupMoments: groups have the same number of channels",
        )
        for groups in (-1, 0, 2, 6)
    ),
    (
        lambda: n().Slice(
            images=n().Images(2, 3, 4, 4, 4), slicing=n().Thinning(0, 1, 0, 0), x=0, y=1
        ),
        "Slice: the slice has a size of 0, sizes must be at least 1",
    ),
    (
        lambda: n().Slice(
            images=n().Images(2, 3, 4, 4, 4), slicing=n().Thinning(1, 1, -1, 0), x=0, y=1
        ),
        "Slice: channels before and after must not be negative or beyond 2^40",
    ),
    (
        lambda: n().SliceBackward(
            images=n().Images(2, 3, 4, 4, 4), slicing=n().Thinning(1, 1, 0, BIG), dy=0, dx=1
        ),
        "SliceBackward: channels before and after must not be negative or beyond 2^40",
    ),
    (
        lambda: n().Pad(images=n().Images(2, 3, 4, 4, 4), padding=n().Padding(left=-1), x=0, y=1),
        "Pad: padding must not be negative or beyond 2^40",
    ),
    (
        lambda: n().PadBackward(
            images=n().Images(2, 3, 4, 4, 4), padding=n().Padding(top=2**63 - 1), dy=0, dx=1
        ),
        "PadBackward: padding must not be negative or beyond 2^40",
    ),
    (
        lambda: n().Relayout(
            images=n().Images(2, 3, 4, 4, 4),
            source=n().Layout.panels,
            target=n().Layout.panels,
            x=0,
            y=1,
        ),
        "Relayout: source and target are the same layout: use Copy",
    ),
    (
        lambda: n().Relayout(
            images=n().Images(1, 3, 4, 4, 4, in_panels=False),
            source=n().Layout.panels,
            target=n().Layout.contiguous,
            x=0,
            y=1,
        ),
        "Relayout: the sizes of images in panels must say so",
    ),
    (
        lambda: n().Dropout(length=3, probability=1.0, seed=0, x=0, y=1),
        "Dropout: probability must be in [0, 1)",
    ),
    (
        lambda: n().Dropout(length=3, probability=float("nan"), seed=0, x=0, y=1),
        "Dropout: probability must be in [0, 1)",
    ),
    (
        lambda: n().Dropout(length=3, probability=0.5, seed=-1, x=0, y=1),
        "Dropout: seed must be the index of a seed, got -1",
    ),
    (
        lambda: n().Copy(length=0, x=0, y=1),
        "Copy: the tensor has a size of 0, sizes must be at least 1",
    ),
    (lambda: n().Copy(length=BIG, x=0, y=1), "Copy: the tensor is too large for any memory"),
    (lambda: n().Fill(length=3, value=1.0, y=-1), "Fill: y must be an operand, got -1"),
]


@pytest.mark.parametrize(("make_step", "problem"), STEPS)
def test_steps_that_make_no_sense(make_step: Any, problem: str) -> None:
    with refused(problem):
        make_step()


def test_steps_are_read_only_and_take_keywords_alone() -> None:
    copy = n().Copy(length=3, x=0, y=1)
    assert (copy.name, copy.length, copy.x, copy.y) == ("Copy", 3, 0, 1)
    assert copy.fields == ("length", "x", "y", "wide")
    assert repr(copy) == "Copy(length=3, x=0, y=1, wide=False)"
    with pytest.raises(AttributeError):
        copy.length = 4
    with pytest.raises(TypeError):
        n().Copy(3, 0, 1)
    with pytest.raises(TypeError):
        n().Copy(length=2**63, x=0, y=1)
    with pytest.raises(TypeError):
        n().Copy(length=3, x=2**31, y=1)


def test_the_stubs_are_those_of_the_extension() -> None:
    stub = Path(rewire.__file__).with_name("_native.pyi").read_text(encoding="utf-8")
    classes = {c.name: c for c in ast.parse(stub).body if isinstance(c, ast.ClassDef)}
    bound = {
        name: kind.fields
        for name, kind in vars(n()).items()
        if isinstance(kind, type) and hasattr(kind, "fields")
    }
    assert len(bound) > 35
    for name, fields in bound.items():
        methods = {f.name: f for f in classes[name].body if isinstance(f, ast.FunctionDef)}
        given = methods["__init__"].args
        assert tuple(a.arg for a in [*given.args[1:], *given.kwonlyargs]) == fields, name
        bases = [base.id for base in classes[name].bases if isinstance(base, ast.Name)]
        inherited = {"wide"} if bases == ["Step"] else set()
        assert {*methods, *inherited} == {"__init__", *fields}, name


def test_a_step_lists_what_it_needs() -> None:
    listed = [
        (need.role, need.operand, need.kind.name, need.reads, need.writes, need.elements)
        for need in forward(bias=8, mean=9, variance=12, norm=norm(weight=13)).needs()
    ]
    assert listed == [
        ("indptr", 0, "indices", True, False, 5),
        ("indices", 1, "indices", True, False, -1),
        ("values", 5, "numbers", True, False, -1),
        ("bias", 8, "numbers", True, False, 4),
        ("x", 6, "values", True, False, 600),
        ("norm.weight", 13, "numbers", True, False, 3),
        ("norm.mean", 10, "numbers", True, False, 3),
        ("norm.variance", 11, "numbers", True, False, 3),
        ("y", 7, "values", False, True, 800),
        ("mean", 9, "numbers", False, True, 4),
        ("variance", 12, "numbers", False, True, 4),
    ]


# Plans


def external(count: int) -> list[Any]:
    return [n().External() for _ in range(count)]


def test_operands_that_are_not_there() -> None:
    with refused("step 1 (Copy): y (operand 2) does not exist: there are 2"):
        n().f32.Plan([n().Copy(length=3, x=0, y=1), n().Copy(length=3, x=0, y=2)], external(2))
    with refused("step 0 is None"):
        n().f32.Plan([None], external(2))


def test_an_operand_is_of_one_kind() -> None:
    with refused("step 1 (Copy): x (operand 1) holds bytes elsewhere and values here"):
        n().f32.Plan(
            [
                n().MaxPool(pool=pool(1, 4, 2, 6, 6, 3, 3, 2, 2, 2, 2, 0, 0), x=0, y=2, which=1),
                n().Copy(length=3, x=1, y=2),
            ],
            external(3),
        )


@pytest.mark.parametrize(
    ("offset", "size", "problem"),
    [
        (32, 64, "(64 bytes at offset 32) is not aligned to 64 bytes"),
        (64, 65, "(65 bytes at offset 64) is not inside the arena of 128 bytes"),
        (192, 0, "(0 bytes at offset 192) is not inside the arena of 128 bytes"),
        (-64, 64, "(64 bytes at offset -64) is not inside the arena of 128 bytes"),
        (64, -1, "(-1 bytes at offset 64) is not inside the arena of 128 bytes"),
        (64, 2**63 - 1, f"({2**63 - 1} bytes at offset 64) is not inside the arena of 128 bytes"),
        (
            2**63 - 64,
            128,
            f"(128 bytes at offset {2**63 - 64}) is not inside the arena of 128 bytes",
        ),
    ],
)
def test_parts_of_the_arena(offset: int, size: int, problem: str) -> None:
    with refused(f"operand 0 {problem}"):
        n().f32.Plan([], [n().Arena(offset, size)], 128)


def test_a_part_of_the_arena_is_large_enough_for_every_step() -> None:
    operands = [n().External(), n().Arena(0, 64)]
    copy = n().Copy(length=16, x=0, y=1)
    n().f32.Plan([copy], operands, 64)
    with refused("step 0 (Copy): y (operand 1) has 64 bytes in the arena, needs 128"):
        n().f64.Plan([copy], operands, 64)
    with refused("the arena has -1 bytes"):
        n().f64.Plan([], [], -1)


def test_indices_are_external() -> None:
    operands = external(8)
    operands[1] = n().Arena(0, 1024)
    with refused("step 0 (ConvForward): indices (operand 1) holds indices, which must be external"):
        n().f32.Plan([forward()], operands, 1024)


def test_nothing_is_written_where_it_is_read() -> None:
    with refused("step 0 (Copy): y (operand 0) is written where x (operand 0) is"):
        n().f32.Plan([n().Copy(length=4, x=0, y=0)], external(1))
    with refused("step 0 (ConvForward): y (operand 6) is written where x (operand 6) is"):
        n().f32.Plan([forward(y=6)], external(7))
    with refused("step 0 (ConvForward): mean (operand 8) is written where variance (operand 8) is"):
        n().f32.Plan([forward(mean=8, variance=8)], external(9))
    noise = n().Dropout(length=32, probability=0.5, seed=0, x=0, y=1)
    same = [n().Arena(0, 128), n().Arena(0, 128)]
    n().f32.Plan([noise], same, 256)
    with refused("step 0 (Dropout): y (operand 1) is written where x (operand 0) is"):
        n().f32.Plan([noise], [n().Arena(0, 128), n().Arena(64, 128)], 256)
    with refused("step 0 (Copy): y (operand 1) is written where x (operand 0) is"):
        n().f32.Plan([n().Copy(length=32, x=0, y=1)], same, 256)
    n().f32.Plan([noise], [n().Arena(0, 128), n().Arena(128, 128)], 256)


# Runs


class Layer:
    """A convolution forward and backward, with all that a run of it takes."""

    def __init__(self, program: Program, case: Case | None = None) -> None:
        self.program = program
        self.case = case or make(
            Convolution((3, 3), padding=(1, 1)), (8, 3, 5, 5), 4, 0.5, program.dtype
        )
        case = self.case
        self.topology = program.topology(case)
        self.values = program.add(case.values)
        self.x, self.dy = program.add(lay(case.x, 0)), program.add(lay(case.dy, 0))
        self.y, self.dx = program.empty(800), program.empty(600)
        self.dvalues = program.empty(len(case.connections))
        shared = {"geometry": sizes(), "topology": self.topology, "values": self.values}
        self.steps = [
            n().ConvForward(**shared, x=self.x, y=self.y),
            n().ConvBackward(**shared, x=self.x, dy=self.dy, dx=self.dx, dvalues=self.dvalues),
        ]
        self.addresses, self.elements = program.addresses(), program.elements()
        self.inputs: dict[str, Any] = {}

    def run(self, first: int = 0, last: int = 2) -> None:
        self.program.plan(*self.steps).run(
            first, last, self.addresses, self.elements, **self.inputs
        )

    def refuses(self, problem: str, first: int = 0, last: int = 2) -> None:
        """A run raises, and writes nothing."""
        before = [room.clone() for room in self.program.rooms]
        with refused(problem):
            self.run(first, last)
        for room, old in zip(self.program.rooms, before, strict=True):
            assert torch.equal(room.nan_to_num(5), old.nan_to_num(5))


@pytest.fixture
def layer(program: Program) -> Layer:
    return Layer(program)


def test_a_run_with_all_it_needs(layer: Layer) -> None:
    layer.run()
    assert not layer.program[layer.y].isnan().any()
    assert not layer.program[layer.dx].isnan().any()
    assert not layer.program[layer.dvalues].isnan().any()


@pytest.mark.parametrize(("first", "last"), [(-1, 1), (1, 0), (0, 3), (3, 3)])
def test_steps_that_are_not_there(layer: Layer, first: int, last: int) -> None:
    layer.refuses(f"steps {first} to {last} of a plan with 2 steps", first, last)


def test_every_external_operand_has_an_address_and_elements(layer: Layer) -> None:
    given = layer.addresses
    layer.addresses = given[:-1]
    layer.refuses("got 10 addresses and 11 numbers of elements, the plan has 11 external operands")
    layer.addresses, layer.elements = given, [*layer.elements, 3]
    layer.refuses("got 11 addresses and 12 numbers of elements, the plan has 11 external operands")


def test_tensors_that_are_too_small(layer: Layer) -> None:
    layer.elements[layer.dx] = 599  # of the last step: the first one does not run either
    layer.refuses(f"step 1 (ConvBackward): dx (operand {layer.dx}) has 599 elements, needs 600")
    layer.elements[layer.dx] = -1
    layer.refuses(f"step 1 (ConvBackward): dx (operand {layer.dx}) has -1 elements")
    layer.run(0, 1)  # which does not need it


def test_tensors_without_an_address(layer: Layer) -> None:
    layer.addresses[layer.dy] = 0
    layer.refuses(f"step 1 (ConvBackward): dy (operand {layer.dy}) has no address")
    layer.run(0, 1)
    layer.addresses[layer.dy] = layer.program[layer.dy].data_ptr() + 4
    layer.refuses(f"step 1 (ConvBackward): dy (operand {layer.dy}) is not aligned to its elements")


def test_connections_that_do_not_belong_together(layer: Layer) -> None:
    count, indptr = len(layer.case.connections), layer.topology.indptr
    for operand, role in ((layer.values, "values"), (layer.topology.indices, "indices")):
        for wrong in (count - 1, count + 1):
            layer.elements[operand] = wrong
            layer.refuses(
                f"step 0 (ConvForward): {role} (operand {operand}) has {wrong} elements, but "
                f"indptr counts {count} connections"
            )
        layer.elements[operand] = count
    for operand, role in (
        (layer.dvalues, "dvalues"),
        (layer.topology.outputs, "outputs"),
        (layer.topology.order, "order"),
    ):
        layer.elements[operand] = count - 1
        layer.refuses(
            f"step 1 (ConvBackward): {role} (operand {operand}) has {count - 1} elements, but "
            f"slots counts {count} connections"
        )
        layer.elements[operand] = count
    layer.elements[indptr] = 6
    layer.refuses(f"step 0 (ConvForward): indptr (operand {indptr}) has 6 elements, expected 5")
    layer.elements[indptr] = 4
    layer.refuses(f"step 0 (ConvForward): indptr (operand {indptr}) has 4 elements, needs 5")
    layer.elements[indptr] = 5
    slots = layer.topology.slots
    layer.elements[slots] = 29
    layer.refuses(f"step 1 (ConvBackward): slots (operand {slots}) has 29 elements, expected 28")
    layer.elements[slots] = 28
    for k, wrong, problem in (
        (0, 1, f"must rise from 0, but goes from 1 to {count}"),
        (-1, -3, "must rise from 0, but goes from 0 to -3"),
    ):
        right = int(layer.program[indptr][k])
        layer.program[indptr][k] = wrong
        layer.refuses(f"step 0 (ConvForward): indptr (operand {indptr}) {problem}")
        layer.program[indptr][k] = right
    layer.run()


def test_scalars_and_seeds(program: Program) -> None:
    a, b = program.add(torch.randn(4)), program.add(torch.randn(4))
    c, d = program.add(torch.randn(4)), program.add(torch.randn(4))
    track = n().Track(
        channels=4,
        momentum=1,
        unbiased=1.0,
        mean=a,
        variance=b,
        running_mean=c,
        running_variance=d,
    )
    dropout = n().Dropout(length=4, probability=0.5, seed=0, x=a, y=b)
    before = program[c].clone()
    program.scalars = [0.1]
    with refused("step 0 (Track) needs 2 scalars and 0 seeds, got 1 and 0"):
        program.run(track, dropout)
    program.scalars = [0.1, 0.2]
    with refused("step 1 (Dropout) needs 0 scalars and 1 seeds, got 2 and 0"):
        program.run(track, dropout)
    assert torch.equal(program[c], before)
    program.seeds = [2**64 - 1]
    program.run(track, dropout)
    program.seeds = [-1]
    with pytest.raises(TypeError):
        program.run(track, dropout)


def test_the_arena_of_a_run() -> None:
    x, room = torch.randn(16), torch.zeros(64 + 256, dtype=torch.uint8)
    start = room.data_ptr() + -room.data_ptr() % 64
    plan = n().f32.Plan([n().Copy(length=16, x=0, y=1)], [n().External(), n().Arena(64, 64)], 128)

    def run(**inputs: Any) -> None:
        plan.run(0, 1, [x.data_ptr()], [16], **inputs)

    with refused("the arena has 0 bytes, the plan needs 128"):
        run()
    with refused("the arena has 0 bytes, the plan needs 128"):
        run(arena=0, arena_bytes=128)
    with refused("the arena has 127 bytes, the plan needs 128"):
        run(arena=start, arena_bytes=127)
    with refused("the arena has -1 bytes, the plan needs 128"):
        run(arena=start, arena_bytes=-1)
    with refused("the arena is not aligned to 64 bytes"):
        run(arena=start + 32, arena_bytes=128)
    with refused("threads is 0, expected at least 1"):
        run(arena=start, arena_bytes=128, threads=0)
    assert not room.any()
    run(arena=start, arena_bytes=128)
    offset = start - room.data_ptr() + 64
    assert torch.equal(room[offset : offset + 64].view(torch.float32), x)
    assert not room[:offset].any()
    assert not room[offset + 64 :].any()


def test_values_in_the_arena_are_enough_for_the_connections(program: Program) -> None:
    layer = Layer(program)
    count = len(layer.case.connections)
    steps = [
        layer.steps[0],
        n().ConvBackward(
            geometry=sizes(),
            topology=layer.topology,
            values=layer.values,
            x=layer.x,
            dy=layer.dy,
            dx=layer.dx,
            dvalues=layer.dvalues + 1,
        ),
        n().Copy(length=count, x=layer.dvalues + 1, y=layer.dvalues),
    ]
    room = torch.zeros(2048 + 64, dtype=torch.uint8)
    arena = room.data_ptr() + -room.data_ptr() % 64
    operands = external(layer.dvalues + 1)
    plan = program.kernels.Plan(steps, [*operands, n().Arena(0, 8 * count)], 2048)
    plan.run(0, 3, layer.addresses, layer.elements, arena, 2048)
    right = dense_gradients(layer.case)[1][1]
    assert torch.allclose(program[layer.dvalues], right, rtol=1e-12, atol=1e-12)
    plan = program.kernels.Plan(steps[:2], [*operands, n().Arena(0, 8 * count - 8)], 2048)
    with refused(
        f"step 1 (ConvBackward): dvalues (operand {layer.dvalues + 1}) has {count - 1} elements, "
        f"but slots counts {count} connections"
    ):
        plan.run(0, 2, layer.addresses, layer.elements, arena, 2048)


def test_a_plan_outlives_its_steps_and_runs_on_several_threads(program: Program) -> None:
    layer = Layer(program)
    plan = program.plan(*layer.steps)
    layer.steps.clear()
    plan.run(0, 2, layer.addresses, layer.elements)
    expected = program[layer.dvalues].clone()
    others = [Layer(Program(program.dtype)) for _ in range(4)]
    errors: list[BaseException] = []

    def work(other: Layer) -> None:
        try:
            for _ in range(20):
                plan.run(0, 2, other.addresses, other.elements, threads=2)
        except BaseException as error:
            errors.append(error)

    workers = [threading.Thread(target=work, args=(other,)) for other in others]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not errors
    for other in others:
        assert torch.equal(other.program[other.dvalues], expected)
