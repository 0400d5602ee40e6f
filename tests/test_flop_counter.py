"""What ``torch.utils.flop_counter`` counts: for sparse layers as for dense ones, times their density."""

import copy
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import rewire
from bodies import normal, plain
from products import LINEAR, make
from rewire import SparseConv2d, SparseLinear, flops, ops
from rewire.nn.layer import ConnectedLayer
from rewire.ops import Convolution

LAYERS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "linear": (SparseLinear(12, 8, sparsity=0.75), (5, 12)),
    "without bias": (SparseLinear(12, 8, bias=False, sparsity=0.75), (5, 12)),
    "sequences": (SparseLinear(12, 8, sparsity=0.75), (5, 3, 12)),
    "convolution": (SparseConv2d(4, 6, 3, 2, 1, sparsity=0.75), (5, 4, 9, 7)),
    "dilated": (SparseConv2d(4, 6, (3, 1), padding="same", dilation=2, sparsity=0.5), (5, 4, 9, 7)),
}


def counted(model: nn.Module, x: Tensor, backward: bool) -> FlopCounterMode:
    with FlopCounterMode(display=False) as counter:
        y = model(x)
        if backward:
            y.sum().backward()
    return counter


@pytest.mark.parametrize("gradients", ["none", "weights", "input", "both"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer(name: str, gradients: str) -> None:
    layer, shape = LAYERS[name]
    layer = copy.deepcopy(layer).requires_grad_(gradients in ("weights", "both"))
    assert isinstance(layer, ConnectedLayer)
    x = normal(*shape, dtype=torch.float32).requires_grad_(gradients in ("input", "both"))
    ours, dense = (
        counted(model, x, gradients != "none").get_total_flops()
        for model in (layer, layer.to_dense().requires_grad_(layer.values.requires_grad))  # type: ignore[operator, union-attr]
    )
    assert dense > 0
    assert ours == dense * layer.count // (layer.n_in * layer.n_out)
    assert ours * (layer.n_in * layer.n_out) == dense * layer.count  # no remainder


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("batch", [3, 128])
def test_a_converted_model(batch: int, backward: bool) -> None:
    layers = [nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)]
    model = nn.Sequential(*layers, nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 5))
    rewire.sparsify(model, sparsity=0.75, keep_dense="7")
    x = normal(batch, 4, 8, 8, dtype=torch.float32)
    ours, right = (counted(m, x, backward).get_flop_counts() for m in (model, plain(model)))
    expected = 0
    for name, layer in model.named_children():
        found, dense = (sum(c.get(f"Sequential.{name}", {}).values()) for c in (ours, right))
        if isinstance(layer, ConnectedLayer):
            assert dense > 0
            assert found * (layer.n_in * layer.n_out) == dense * layer.count
        else:
            assert found == dense
        expected += found
    assert sum(ours["Global"].values()) == expected
    if not backward:
        assert expected == batch * flops.count(model, (4, 8, 8)).sparse


def test_operators() -> None:
    for conv, shape in ((LINEAR, (4, 6)), (Convolution((3, 3), padding=(1, 1)), (4, 3, 5, 5))):
        case = make(conv, shape, 5, 0.5)
        connections, positions = case.values.numel(), case.dy[0, 0].numel()
        outputs, inputs = case.connections.outputs()[:3], case.connections.inputs()[:3]
        with FlopCounterMode(display=False) as counter:
            ops.gradient_at(case.dy, case.x, outputs, inputs, conv)
        assert counter.get_total_flops() == 2 * 3 * 4 * positions
        with FlopCounterMode(display=False) as counter:
            case.run(case.x, case.values, None)
        assert counter.get_total_flops() == 2 * connections * 4 * positions


PROGRAM = """
{}
layer = rewire.SparseLinear(8, 8, sparsity=0.5)
with FlopCounterMode(display=False) as counter:
    layer(torch.zeros(2, 8))
print(counter.get_total_flops())
"""
COUNTER = "from torch.utils.flop_counter import FlopCounterMode"


@pytest.mark.parametrize("first", ["import rewire", COUNTER])
def test_whatever_is_imported_first(first: str) -> None:
    (second,) = {"import rewire", COUNTER} - {first}
    program = PROGRAM.format(f"import torch\n{first}\n{second}")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == f"{2 * 32 * 2}\n", done.stderr
