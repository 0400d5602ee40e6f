"""Programs in which converted models once differed from their dense twins, or refused to run."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rewire
from bodies import assert_close, grads_of, loss_of, normal, same_buffers, tensors_in
from rewire import ops

pytestmark = [
    pytest.mark.skipif(not ops.available(), reason="needs the compiled kernels"),
    pytest.mark.usefixtures("small_panels"),
]
Body = Callable[[Any, Tensor], Any]


class Net(nn.Module):
    """A convolution, a batch norm and a linear layer; what is done with them is the body."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.bn, self.fc = nn.BatchNorm2d(4), nn.Linear(4, 4)
        nn.init.normal_(self.bn.weight)
        nn.init.normal_(self.bn.bias)
        self.body = body

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


def as_its_twin(body: Body, x: Tensor, *, training: bool = True) -> None:
    """Outputs, gradients and buffers of a converted model are those of its densified copy."""
    torch.manual_seed(0)
    model = rewire.sparsify(Net(body).double(), sparsity=0.4, weights="fresh").train(training)
    twin = rewire.densify(copy.deepcopy(model))
    inputs = [x.detach().clone().requires_grad_(x.requires_grad) for _ in range(2)]
    found, expected = (tensors_in(m(i * 1)) for m, i in zip((model, twin), inputs, strict=True))
    for mine, right in zip(found, expected, strict=True):
        assert mine.requires_grad == right.requires_grad
        assert_close(mine.detach(), right.detach())
    same_buffers(model, twin)
    loss, right_loss = loss_of(found), loss_of(expected)
    if loss is None or right_loss is None:
        assert loss is right_loss
        return
    loss.backward()
    right_loss.backward()
    for (name, right_grad), mine_grad in zip(
        grads_of(twin, model).items(), grads_of(model, model).values(), strict=True
    ):
        assert (mine_grad is None) == (right_grad is None), name
        if mine_grad is not None and right_grad is not None:
            assert_close(mine_grad, right_grad, 1e-9)
    if x.requires_grad:
        assert inputs[0].grad is not None
        assert inputs[1].grad is not None
        assert_close(inputs[0].grad, inputs[1].grad, 1e-9)


@pytest.fixture
def x() -> Tensor:
    return normal(8, 4, 6, 6).requires_grad_()


def test_a_batch_norm_that_torch_ran_before(x: Tensor) -> None:
    # Autograd has saved the running statistics there, and torch's batch norm never changes their version.
    as_its_twin(lambda m, x: F.relu(m.bn(m.conv(m.bn(x)))), x)


def test_a_batch_norm_in_evaluation_then_in_training(x: Tensor) -> None:
    def body(m: Any, x: Tensor) -> list[Tensor]:
        first = m.bn.eval()(m.conv(x).detach())
        second = m.bn.train()(m.conv(x))
        return [first, second]

    as_its_twin(body, x.detach())


@pytest.mark.parametrize("training", [True, False])
def test_gradients_enabled_in_inference_mode(x: Tensor, training: bool) -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            return F.max_pool2d(F.relu(m.bn(m.conv(F.relu(m.bn(m.conv(x)) + x)))), 2)

    with torch.inference_mode():
        as_its_twin(body, x.detach(), training=training)


def clamped(m: Any, x: Tensor) -> Tensor:
    y = m.conv(x)
    y.view(-1).clamp_(min=0)
    return m.conv(y)


def doubled_in_part(m: Any, x: Tensor) -> Tensor:
    y = m.bn(m.conv(x))
    y.view(-1)[10:].mul_(2)
    return y


def of_a_changed_output(m: Any, x: Tensor) -> Tensor:
    y = m.conv(x)
    view = y.view(-1)
    y.mul_(2)
    return view * 1


def of_a_linear_layer(m: Any, x: Tensor) -> Tensor:
    y = m.fc(x.mean((2, 3)))
    y.view(-1).mul_(2)
    return y


def of_another_function(m: Any, x: Tensor) -> Tensor:
    y = m.conv(x) * 2
    y.view(-1).mul_(2)
    return y


def with_a_reader_before(m: Any, x: Tensor) -> list[Tensor]:
    y = m.conv(x) * 2
    z = m.bn(y)
    return [z, y.view(-1) * 1]


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize(
    "body",
    [
        clamped,
        doubled_in_part,
        of_a_changed_output,
        of_a_linear_layer,
        of_another_function,
        with_a_reader_before,
    ],
    ids=lambda body: body.__name__,
)
def test_a_view_shares_memory(body: Body, recorded: bool, x: Tensor) -> None:
    with torch.set_grad_enabled(recorded):
        as_its_twin(body, x if recorded else x.detach())


def test_a_view_in_inference_mode(x: Tensor) -> None:
    with torch.inference_mode():
        as_its_twin(clamped, x.detach())


@pytest.mark.parametrize("size", [8, 3])
def test_an_output_changed_in_place_after_it_was_read(size: int, x: Tensor) -> None:
    def body(m: Any, x: Tensor) -> list[Tensor]:
        y = m.conv(x)
        first = m.bn(y)
        y.zero_()
        return [y, first]

    with torch.no_grad():
        as_its_twin(body, x.detach()[:size])


def test_an_ordinary_tensor_changed_in_place_after_it_was_read(x: Tensor) -> None:
    """``zero_`` wants numbers, so ``first`` has been computed where a layer reads it."""

    def body(m: Any, x: Tensor) -> list[Tensor]:
        y = m.conv(x)
        first = m.bn(y)
        y.zero_()
        second = m.conv(first)
        first.add_(1)
        return [y, first, second]

    model = rewire.sparsify(Net(body).double(), sparsity=0.4, weights="fresh")
    with torch.no_grad():
        with pytest.raises(RuntimeError, match="was changed in place"):
            model(x)
        rewire.use_engine(model, False)
        assert len(model(x)) == 3


# Uses of an output, by which it need not be computed itself.
USES: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "rectified": lambda m, y, x: F.relu(y),
    "rectified for a layer": lambda m, y, x: m.conv(F.relu(y)),
    "added": lambda m, y, x: y + m.conv(x),
    "added from the left": lambda m, y, x: m.conv(x) + y,
    "rectified and multiplied": lambda m, y, x: F.relu(y) * y,
}


@pytest.mark.parametrize("use", USES)
def test_hooks_that_come_after_the_use(use: str, x: Tensor) -> None:
    """They see the whole gradient, and may change it."""

    def body(m: Any, x: Tensor) -> Any:
        y = m.bn(m.conv(x))
        z = USES[use](m, y, x)
        y.register_hook(lambda gradient: 3 * gradient)
        return z

    as_its_twin(body, x)


@pytest.mark.parametrize("use", USES)
def test_gradients_kept_after_the_use(use: str, x: Tensor) -> None:
    kept: list[Tensor] = []

    def body(m: Any, x: Tensor) -> Any:
        y = m.bn(m.conv(x))
        z = USES[use](m, y, x)
        y.retain_grad()
        kept.append(y)
        return z

    as_its_twin(body, x)
    ours, right = (y.grad for y in kept)
    assert ours is not None
    assert right is not None
    assert_close(ours, right, 1e-9)


def test_a_hook_of_a_layer_after_its_relu_was_used(x: Tensor) -> None:
    def body(m: Any, x: Tensor) -> Any:
        y = m.conv(x)
        z = m.conv(F.relu(y))
        y.register_hook(lambda g: 3 * g)
        return z

    as_its_twin(body, x)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's own, of its input
@pytest.mark.parametrize("in_place", [True, False], ids=["compile()", "torch.compile"])
def test_a_compiled_part_that_reads_the_output_of_another_one(in_place: bool, x: Tensor) -> None:
    torch.manual_seed(0)
    parts = [Net(lambda m, x: F.relu(m.bn(m.conv(x)))) for _ in range(3)]
    model = rewire.sparsify(nn.Sequential(*parts).double(), sparsity=0.4, weights="fresh")
    twin = rewire.densify(copy.deepcopy(model))
    torch.compiler.reset()
    try:
        if in_place:
            model[1].compile(backend="aot_eager")
        else:
            model[1] = torch.compile(model[1], backend="aot_eager")
    except RuntimeError as error:
        pytest.skip(f"torch.compile is unavailable: {error}")
    like = x.detach().clone().requires_grad_()
    y, right = model(x), twin(like)
    assert_close(y.detach(), right.detach())
    for output in (y, right):
        output.square().sum().backward()
    assert x.grad is not None
    assert like.grad is not None
    assert_close(x.grad, like.grad, 1e-9)
    same_buffers(model[2], twin[2])


def test_gradients_enabled_in_part_of_a_model_that_records_none(x: Tensor) -> None:
    def body(m: Any, x: Tensor) -> list[Tensor]:
        with torch.enable_grad():
            y = F.relu(m.bn(m.conv(x)))
            z = m.conv(y)
        return [y, torch.relu(y), z, z + 1]

    torch.manual_seed(0)
    model = rewire.sparsify(Net(body).double(), sparsity=0.4, weights="fresh")
    twin = rewire.densify(copy.deepcopy(model))
    inputs = [x.detach().clone().requires_grad_() for _ in range(2)]
    with torch.no_grad():
        found, expected = model(inputs[0]), twin(inputs[1])
    for mine, right in zip(found, expected, strict=True):
        assert mine.requires_grad == right.requires_grad
        assert_close(mine.detach(), right.detach())
    for outputs in (found, expected):
        (outputs[0].square().sum() + outputs[2].exp().sum()).backward()
    assert inputs[0].grad is not None
    assert inputs[1].grad is not None
    assert_close(inputs[0].grad, inputs[1].grad, 1e-9)
    assert_close(model.bn.weight.grad, twin.bn.weight.grad, 1e-9)
