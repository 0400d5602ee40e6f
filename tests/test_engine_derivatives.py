"""Second derivatives of converted models: gradient penalties and Hessian-vector products are those of
dense PyTorch, whatever the forward pass does."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.functional import hvp

import rewire
from bodies import Net, assert_close, grads_of, loss_of, marks, normal, plain, tensors_in
from bodies_changes import CHANGES, ONLY_BY_TORCH, REFUSED
from bodies_images import IMAGES
from bodies_uses import USES
from rewire import SparseConv2d, SparseLinear, use_engine
from rewire.methods import RigL
from sequences import SEQUENCES, sequence
from test_engine_residuals import ALSO_READ, USED, same_as_apart

pytestmark = [
    *marks,
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True"),
]
BODIES = USES | IMAGES | CHANGES
del BODIES["to_float"]  # which is not exact


def assert_same_gradients(model: nn.Module, reference: nn.Module) -> None:
    """As exact as the largest of them allows: some are zero but for rounding."""
    ours, theirs = grads_of(model, model), grads_of(reference, model)
    largest = [float(grad.abs().max()) for grad in theirs.values() if grad is not None]
    tolerance = 1e-12 * max(1.0, *largest) if largest else 0.0
    for name, grad in theirs.items():
        mine = ours[name]
        if grad is None or mine is None:
            assert mine is None or not mine.any(), name
            assert grad is None or not grad.any(), name
        else:
            torch.testing.assert_close(mine, grad, rtol=0, atol=tolerance)


def penalty(model: nn.Module, x: Tensor, of_weights: bool) -> Tensor | None:
    """A penalty of the gradient, of input or parameters, and the loss; None if there is no gradient."""
    loss = loss_of(tensors_in(model(x)))
    if loss is None or not loss.requires_grad:
        return None
    # Weights of a dense twin that are not connected count for nothing in either.
    targets = [p for p in model.parameters() if p.dim() == 1] if of_weights else [x]
    targets = [t for t in targets if not any(t is v for v in _values(model))]
    grads = torch.autograd.grad(loss, targets, create_graph=True, allow_unused=True)
    return loss + sum(0.1 * g.square().sum() for g in grads if g is not None)


def _values(model: nn.Module) -> list[Tensor]:
    kinds = (SparseConv2d, SparseLinear)
    return [m.values for m in model.modules() if isinstance(m, kinds)]


def assert_same_penalty(model: nn.Module, x: Tensor, of_weights: bool = False) -> None:
    """All gradients of a gradient penalty of the converted model are those of its dense twin."""
    reference = plain(model)
    use_engine(model)
    inputs = [x.detach().clone().requires_grad_() for _ in range(2)]
    right = penalty(reference, inputs[1], of_weights)
    result = penalty(model, inputs[0], of_weights)
    assert (result is None) == (right is None)
    if result is None or right is None:
        return
    right.backward()
    result.backward()
    assert_close(result.detach(), right.detach(), 1e-9)
    assert inputs[0].grad is not None
    assert inputs[1].grad is not None
    assert_close(inputs[0].grad, inputs[1].grad, 1e-9)
    assert_same_gradients(model, reference)


REENTRANT = (
    *("checkpoint_of_a_block_reentrant", "checkpoint_of_a_norm_reentrant"),
    *("checkpoint_after_a_norm_reentrant", "half_checkpointed"),
)
ELSEWHERE = (*REFUSED, *ONLY_BY_TORCH, *REENTRANT)


@pytest.mark.parametrize("name", [name for name in BODIES if name not in ELSEWHERE])
def test_bodies(name: str) -> None:
    """Penalties of the input's gradient in training, of the parameters' in evaluation, and the other way
    round of a batch that fills no panels."""
    for batch, training, of_weights in ((8, True, False), (8, False, True), (5, True, True)):
        assert_same_penalty(Net(BODIES[name]).train(training), normal(batch, 3, 6, 6), of_weights)


@pytest.mark.parametrize("name", REENTRANT)
def test_reentrant_checkpoints_are_refused_as_by_torch(name: str) -> None:
    model = Net(BODIES[name])
    reference = plain(model)
    use_engine(model)
    for each in (model, reference):
        with pytest.raises(RuntimeError, match=r"checkpoint is incompatible with \.grad\(\)"):
            penalty(each, normal(8, 3, 6, 6).requires_grad_(), False)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", SEQUENCES)
def test_sequences(name: str, training: bool) -> None:
    assert_same_penalty(sequence(name).train(training), normal(8, 3, 8, 8))


def run_penalty(model: nn.Module, x: Tensor) -> None:
    result = penalty(model, x, of_weights=False)
    assert result is not None
    (1e-3 * result).backward()  # of moderate size: some gradients are zero but for rounding


@pytest.mark.parametrize("name", USED)
def test_residual_sums(name: str) -> None:
    same_as_apart(USED[name], run_penalty)


@pytest.mark.parametrize("name", [name for name in ALSO_READ if name != "checkpointed"])
def test_residual_sums_that_something_else_reads(name: str) -> None:
    same_as_apart(lambda m, x: ALSO_READ[name](m, m.block(0, x)), run_penalty)


def test_a_penalty_of_what_reads_a_residual_sum() -> None:
    """The sum has one more reader then, though its own backward pass is not recorded."""

    def run(model: Any, x: Tensor) -> None:
        loss = loss_of(tensors_in(model(x)))
        assert loss is not None
        (g,) = torch.autograd.grad(loss, model.convs[1].values, create_graph=True)
        (1e-3 * (loss + g.square().sum())).backward()

    same_as_apart(USED["in a row"], run)


def test_steps_after_a_penalty() -> None:
    def run(model: nn.Module, x: Tensor) -> None:
        run_penalty(model, x)
        loss = loss_of(tensors_in(model(x)))
        assert loss is not None
        loss.backward()
        loss_of(tensors_in(model(x))).backward()  # type: ignore[union-attr]

    same_as_apart(USED["in a row"], run)


def critic(storage: str = "sparse") -> nn.Sequential:
    """A small CNN with residual sums, pooling, batch norms and ReLUs."""
    torch.manual_seed(0)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.bn1 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
            self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
            return F.relu(y + x)

    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), Block(), nn.MaxPool2d(2)]
    model = nn.Sequential(*layers, Block(), nn.Flatten(), nn.Linear(72, 16), nn.ReLU())
    model.append(nn.Linear(16, 1)).double()
    rewire.sparsify(model, sparsity=0.6, storage=storage, weights="fresh")
    for part in model.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.weight.data, part.bias.data = normal(8, seed=1), normal(8, seed=2)
            part.running_mean, part.running_var = normal(8, seed=3), normal(8, seed=4).exp()
    return model


def wgan_gp(model: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    between = (0.3 * real + 0.7 * fake).requires_grad_()
    (g,) = torch.autograd.grad(model(between).sum(), between, create_graph=True)
    distance = model(fake).mean() - model(real).mean()
    return distance + 10 * (g.flatten(1).norm(dim=1) - 1).square().mean()


def r1(model: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    x = real.detach().requires_grad_()
    y = model(x)
    (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return F.softplus(-y).mean() + F.softplus(model(fake)).mean() + g.square().sum() / len(x)


@pytest.mark.parametrize("loss", [wgan_gp, r1])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", ["converted", "layer by layer", "densified"])
@pytest.mark.parametrize("batch", [8, 5])
def test_gradient_penalties(
    loss: Callable[..., Tensor], training: bool, kind: str, batch: int
) -> None:
    model = critic().train(training)
    reference = rewire.densify(copy.deepcopy(model))
    if kind == "layer by layer":
        use_engine(model, False)
    if kind == "densified":
        use_engine(reference, False)
    data = [normal(batch, 3, 6, 6, seed=seed) for seed in (1, 2)]
    losses = [loss(m, *data) for m in (model, reference)]
    assert_close(*(value.detach() for value in losses))
    for value in losses:
        value.backward()
    assert_same_gradients(model, reference)
    assert all(p.grad is not None and p.grad.any() for p in model[3].parameters())


@pytest.mark.parametrize("training", [True, False])
def test_hessian_vector_products(training: bool) -> None:
    model = critic().train(training)
    reference = rewire.densify(copy.deepcopy(model))
    x, v = normal(8, 3, 6, 6), normal(8, 3, 6, 6, seed=1)
    _, ours = hvp(lambda x: model(x).square().sum(), x, v)
    _, right = hvp(lambda x: reference(x).square().sum(), x, v)
    assert right.any()
    assert_close(ours, right)


def test_gradients_inside_a_forward_pass() -> None:
    """Of an energy, say, whose forces are a part of the output."""

    class Forces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.energy = critic()

        def forward(self, x: Tensor) -> list[Tensor]:
            energy = self.energy(x)
            (forces,) = torch.autograd.grad(energy.square().sum(), x, create_graph=True)
            return [energy, forces]

    model = Forces()
    use_engine(model, False)
    assert_same_penalty(model, normal(8, 3, 6, 6))


def test_dropout() -> None:
    """The noise of a recorded backward pass is that of the forward pass."""
    layers = [SparseConv2d(3, 6, 3, padding=1, sparsity=0.5), nn.Dropout(0.4), nn.Tanh()]
    model = nn.Sequential(*layers).double()
    use_engine(model)
    x = normal(8, 3, 6, 6).requires_grad_()
    y = model(x)
    noise = (torch.atanh(y) / layers[0](x)).detach().round(decimals=6)
    right = torch.tanh(noise * layers[0](x))
    found = []
    for output in (y, right):
        (g,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(g.square().sum(), [x, *model.parameters()]))
    assert 0.2 < (noise == 0).double().mean() < 0.6
    for ours, expected in zip(*found, strict=True):
        assert_close(ours, expected, 1e-5)  # as exact as the noise is known


def test_a_hook_of_what_a_layer_has_read() -> None:
    """It gets and gives a gradient with a graph."""

    def body(m: Any, x: Tensor) -> Tensor:
        y = F.relu(m.conv(x))
        out = m.bn(m.conv2(y))
        y.register_hook(lambda gradient: gradient.square())
        return out

    assert_same_penalty(Net(body), normal(8, 3, 6, 6))


def test_a_bias_that_changed() -> None:
    model = sequence("ReLUs")
    use_engine(model)
    x = normal(8, 3, 8, 8).requires_grad_()
    y = model(x).square().sum()
    with torch.no_grad():
        model[0].bias.add_(1)
    for again in (False, True):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(y, x, retain_graph=True, create_graph=again)


@pytest.mark.parametrize("kind", ["sparse", "masked"])
def test_no_second_derivatives_for_a_rewirer(kind: str) -> None:
    model = critic(kind)
    rewirer = RigL(model, torch.optim.SGD(model.parameters(), lr=0.1), every=2, until=10)
    data = normal(8, 3, 6, 6), normal(8, 3, 6, 6, seed=1)
    assert not rewirer.watches(rewirer.t + 1)
    wgan_gp(model, *data).backward()
    rewirer.step()
    assert rewirer.watches(rewirer.t + 1)
    with pytest.raises(RuntimeError, match=r"rewirer\.watches"):
        wgan_gp(model, *data)
