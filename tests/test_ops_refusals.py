"""What products over connections refuse: bad input, corrupt connections."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from products import LINEAR, Case, as_operator, conv3, make, sizes_of
from rewire import ops
from rewire.ops import Convolution, Topology, TopologyError
from rewire.ops.topology import build

# Bad input


def linear_layer() -> Case:
    return make(LINEAR, (5, 6), 4, 0.5)


def image_layer() -> Case:
    return make(conv3(), (5, 2, 4, 4), 4, 0.5)


@pytest.mark.parametrize("shape", [(), (6,), (5, 7, 6), (5, 6, 7), (5, 6, 1, 1)])
def test_linear_refuses_other_dimensions(shape: tuple[int, ...]) -> None:
    case = linear_layer()
    with pytest.raises(ValueError, match="2-D"):
        ops.linear(torch.zeros(shape), case.values, case.bias, case.topology)
    with pytest.raises((ValueError, RuntimeError, IndexError)):
        as_operator(case, torch.zeros(shape), case.values, case.bias)


@pytest.mark.parametrize("shape", [(), (2,), (5, 2), (2, 4, 4), (5, 2, 4, 4, 1)])
def test_conv2d_refuses_other_dimensions(shape: tuple[int, ...]) -> None:
    case = image_layer()
    with pytest.raises(ValueError, match="4-D"):
        ops.conv2d(torch.zeros(shape), case.values, case.bias, case.topology, case.conv)
    with pytest.raises((ValueError, RuntimeError, IndexError)):
        as_operator(case, torch.zeros(shape), case.values, case.bias)


@pytest.mark.parametrize("run", [Case.run, as_operator])
@pytest.mark.parametrize("layer", [linear_layer, image_layer])
class TestBadInput:
    def test_types_that_differ(self, layer: Callable[[], Case], run: Callable[..., Tensor]) -> None:
        case = layer()
        x, values, bias = case.x, case.values, case.bias
        with pytest.raises(ValueError, match=r"types differ.*float64"):
            run(case, x.double(), values, bias)
        with pytest.raises(ValueError, match=r"types differ.*float64"):
            run(case, x, values.double(), bias)
        with pytest.raises(ValueError, match=r"types differ.*float64"):
            run(case, x, values, bias.double())
        if run is not as_operator:  # which is what compiled code calls under autocast
            with pytest.raises(ValueError, match="types differ"):
                run(case, x.half(), values, bias)
        with pytest.raises(ValueError, match="types differ"):
            run(case, x.long(), values, bias)

    def test_values(self, layer: Callable[[], Case], run: Callable[..., Tensor]) -> None:
        case = layer()
        for values in (case.values[:-1], case.values.repeat(2), case.values[None], case.values[:0]):
            with pytest.raises(ValueError, match="values has shape"):
                run(case, case.x, values, case.bias)

    def test_bias(self, layer: Callable[[], Case], run: Callable[..., Tensor]) -> None:
        case = layer()
        for bias in (case.bias[:-1], case.bias[:0], case.bias[None], torch.zeros(())):
            with pytest.raises(ValueError, match="bias has shape"):
                run(case, case.x, case.values, bias)

    def test_units(self, layer: Callable[[], Case], run: Callable[..., Tensor]) -> None:
        case = layer()
        for x in (torch.cat([case.x] * 2, 1), case.x[:, :-1], case.x[:, :0]):
            with pytest.raises(ValueError, match=r".+"):
                run(case, x, case.values, case.bias)


@pytest.mark.parametrize("run", [Case.run, as_operator])
def test_an_image_smaller_than_the_kernel(run: Callable[..., Tensor]) -> None:
    case = make(Convolution((3, 2), padding=(0, 1), dilation=(2, 1)), (5, 2, 5, 4), 4, 0.5)
    run(case, case.x[:, :, :, :1], case.values, case.bias)
    for x in (case.x[:, :, :4], case.x[:, :, :1], case.x[:, :, :0]):
        with pytest.raises(ValueError, match="smaller than the kernel"):
            run(case, x, case.values, case.bias)


@pytest.mark.parametrize("layer", [linear_layer, image_layer])
def test_gradient_at_refuses_bad_coordinates(layer: Callable[[], Case]) -> None:
    case = layer()
    sizes = {} if case.x.dim() == 2 else {"conv": case.conv}
    n_in, n_out = case.connections.n_in, case.connections.n_out

    def at(outputs: list[int], inputs: list[int]) -> Tensor:
        where = torch.tensor(outputs, dtype=torch.int64), torch.tensor(inputs, dtype=torch.int64)
        return ops.gradient_at(case.dy, case.x, *where, **sizes)

    assert at([0, n_out - 1], [n_in - 1, 0]).shape == (2,)
    for outputs, inputs, name in [
        ([0, n_out], [0, 0], "output"),
        ([0, -1], [0, 0], "output"),
        ([0, 0], [n_in, 0], "input"),
        ([0, 0], [-1, 0], "input"),
    ]:
        with pytest.raises(ValueError, match=f"{name} coordinates"):
            at(outputs, inputs)
    with pytest.raises(ValueError, match="one length"):
        at([0, 1], [0])
    with pytest.raises(ValueError, match="1-D"):
        at([[0], [1]], [[0], [1]])  # type: ignore[list-item]


@pytest.mark.parametrize("layer", [linear_layer, image_layer])
def test_gradient_at_refuses_data_that_does_not_fit(layer: Callable[[], Case]) -> None:
    case = layer()
    sizes = {} if case.x.dim() == 2 else {"conv": case.conv}
    zero = torch.zeros(1, dtype=torch.int64)
    bad = [
        (case.dy[:-1], case.x),
        (case.dy.double(), case.x),
        (case.dy.flatten(), case.x),
        (case.dy, case.x[:, :, None] if case.x.dim() == 2 else case.x.flatten(2)),
    ]
    if case.x.dim() == 4:  # the output of another image
        bad += [(F.pad(case.dy, (0, 1)), case.x), (F.pad(case.dy, (0, 0, 0, 2)), case.x)]
        bad += [(case.dy, case.x[:, :, :-1])]
    else:
        bad += [(case.dy[:, :, None, None].expand(-1, -1, 2, 2), case.x)]
    for dy, x in bad:
        with pytest.raises((ValueError, RuntimeError, IndexError)):
            ops.gradient_at(dy, x, zero, zero, **sizes)


@pytest.mark.parametrize("layer", [linear_layer, image_layer])
def test_backward_operators_refuse_data_that_does_not_fit(layer: Callable[[], Case]) -> None:
    case = layer()
    name, sizes = ("linear", []) if case.x.dim() == 2 else ("conv2d", sizes_of(case.conv))
    operator = getattr(torch.ops.rewire, f"{name}_backward")

    def run(dy: Tensor, x: Tensor, values: Tensor) -> None:
        operator(dy, x, values, *case.topology, *sizes, [True, True, True])

    run(case.dy, case.x, case.values)
    bad = [
        (torch.cat([case.dy] * 2), case.x, case.values),
        (torch.cat([case.dy] * 2, 1), case.x, case.values),
        (case.dy, torch.cat([case.x] * 2, 1), case.values),
        (case.dy, case.x, case.values.repeat(2)),
        (case.dy.double(), case.x, case.values),
    ]
    if case.x.dim() == 4:
        bad += [(F.pad(case.dy, (0, 1)), case.x, case.values)]
    for args in bad:
        with pytest.raises((ValueError, RuntimeError)):
            run(*args)


# Corrupt connections


def int32(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def topology_2x3(taps: int = 1) -> Topology:
    """Two output units over three input units (channels): 0 <- {0, 2}, 1 <- {1, 2}."""
    return build(int32([0, 2, 4]), int32([0, 2, 1, 2]), 3 * taps, taps)


# Each replaces one tensor of the topology above; all stay inside memory if no check were made.
CORRUPTIONS: dict[str, dict[str, Any]] = {
    "not ascending": {"indices": int32([2, 0, 1, 2])},
    "twice the same": {"indices": int32([0, 0, 1, 2])},
    "negative input": {"indices": int32([-1, 2, 1, 2])},
    "input out of range": {"indices": int32([0, 3, 1, 2])},
    "input far out of range": {"indices": int32([0, 2**31 - 1, 1, 2])},
    "indptr falls": {"indptr": int32([0, 4, 2])},
    "indptr beyond the end": {"indptr": int32([0, 2, 5])},
    "indptr before the end": {"indptr": int32([0, 2, 3])},
    "indptr starts late": {"indptr": int32([1, 2, 4])},
    "indptr negative": {"indptr": int32([0, -2, 4])},
    "indptr long": {"indptr": torch.tensor([0, 2, 4])},
    "indices long": {"indices": torch.tensor([0, 2, 1, 2])},
    "indices float": {"indices": torch.tensor([0.0, 2.0, 1.0, 2.0])},
    "indptr 2-D": {"indptr": int32([[0, 2, 4]])},
    "indices 2-D": {"indices": int32([[0, 2, 1, 2]])},
    "too many indices": {"indices": int32([0, 2, 1, 2, 2])},
    "too few indices": {"indices": int32([0, 2, 1])},
    "slots of other connections": {"slots": int32([0, 2, 3, 4])},
    "slots too short": {"slots": int32([0, 1, 2])},
    "slots beyond the end": {"slots": int32([0, 1, 2, 5])},
    "slots long": {"slots": torch.tensor([0, 1, 2, 4])},
    "outputs swapped": {"outputs": int32([1, 0, 0, 1])},
    "output out of range": {"outputs": int32([0, 1, 0, 2])},
    "outputs negative": {"outputs": int32([0, 1, 0, -1])},
    "outputs too short": {"outputs": int32([0, 1, 0])},
    "order swapped": {"order": int32([0, 2, 3, 1])},
    "order out of range": {"order": int32([0, 2, 1, 4])},
    "order negative": {"order": int32([0, 2, 1, -1])},
    "order empty": {"order": int32([])},
    "order float": {"order": torch.tensor([0.0, 2.0, 1.0, 3.0])},
    "not contiguous": {"indices": int32([0, 9, 2, 9, 1, 9, 2, 9])[::2]},
}


def test_the_sound_topology_of_the_corruptions() -> None:
    assert [t.tolist() for t in topology_2x3()] == [
        *([0, 2, 4], [0, 2, 1, 2], [0, 1, 2, 4], [0, 1, 0, 1], [0, 2, 1, 3])
    ]


def calls(topology: Topology) -> list[Callable[[], Any]]:
    """Every way to run a topology of three input channels, without fear of its tensors."""
    x, image, sizes = torch.ones(4, 3), torch.ones(4, 3, 2, 2), sizes_of(Convolution())
    values = torch.ones(4)
    return [
        lambda: ops.linear(x, values, None, topology),
        lambda: ops.linear(x.clone().requires_grad_(), values, None, topology),
        lambda: torch.ops.rewire.linear(x, values, None, *topology),
        lambda: ops.conv2d(image, values, None, topology, Convolution()),
        lambda: torch.ops.rewire.conv2d(image, values, None, *topology, *sizes),
    ]


@pytest.mark.parametrize("corruption", CORRUPTIONS)
def test_corrupt_connections_are_refused(corruption: str) -> None:
    topology = topology_2x3()
    for call in calls(topology):
        call()
    # "too many" and "too few" differ from the values before the connections are looked at.
    kind = ValueError if corruption.startswith("too") else TopologyError
    for call in calls(topology._replace(**CORRUPTIONS[corruption])):
        with pytest.raises(kind):
            call()
    for call in calls(topology):
        call()


@pytest.mark.parametrize(
    "corruption", ["not ascending", "twice the same", "outputs swapped", "order swapped"]
)
def test_backward_operators_refuse_corrupt_connections(corruption: str) -> None:
    topology = topology_2x3()._replace(**CORRUPTIONS[corruption])
    x, dy, values, needs = torch.ones(4, 3), torch.ones(4, 2), torch.ones(4), [True, True, True]
    with pytest.raises(TopologyError):
        torch.ops.rewire.linear_backward(dy, x, values, *topology, needs)


@pytest.mark.parametrize("name", Topology._fields)
def test_a_checked_tensor_that_is_changed_in_place_is_checked_again(name: str) -> None:
    for index in range(len(calls(topology_2x3()))):
        topology = topology_2x3()
        call = calls(topology)[index]
        before = call()
        tensor = getattr(topology, name)
        kept = tensor.clone()
        tensor[1] = tensor[1] + 1
        with pytest.raises(TopologyError):
            call()
        tensor.copy_(kept)
        assert torch.equal(call(), before)


def test_new_tensors_at_the_address_of_checked_ones_are_checked() -> None:
    memory = np.array([0, 2, 1, 2], dtype=np.int32)
    indptr = int32([0, 2, 4])
    _, _, slots, outputs, order = build(indptr, torch.from_numpy(memory), 3)
    # The tensor that was checked is gone; another one is where it was.
    memory[:] = [2, 0, 1, 2]
    topology = Topology(indptr, torch.from_numpy(memory), slots, outputs, order)
    for call in calls(topology):
        with pytest.raises(TopologyError):
            call()


def test_connections_of_other_taps_are_refused() -> None:
    case = make(conv3(), (5, 2, 4, 4), 4, 0.5)
    as_linear = build(case.connections.indptr, case.connections.indices, 18)
    with pytest.raises(TopologyError):
        ops.conv2d(case.x, case.values, case.bias, as_linear, case.conv)


def test_build_does_not_write_to_what_it_is_given() -> None:
    indptr, indices = int32([0, 2, 4]), int32([0, 2, 1, 2])
    build(indptr, indices, 3)
    assert indptr.tolist() == [0, 2, 4]
    assert indices.tolist() == [0, 2, 1, 2]
