"""Pruning before, during and between training: scores by hand, and what is left at the end."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import rewire
from rewire import models
from rewire.methods.grasp import grasp_scores
from rewire.methods.pruning import layers_of, weights_of
from rewire.methods.snip import snip_scores
from rewire.methods.synflow import synflow_scores

Batches = list[tuple[Tensor, Tensor]]


def tiny(norm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    middle: list[nn.Module] = [nn.BatchNorm1d(4)] if norm else []
    return nn.Sequential(nn.Linear(3, 4), *middle, nn.Tanh(), nn.Linear(4, 2)).double()


def samples(count: int = 2, size: int = 5) -> Batches:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, 3, generator=generator).double(), torch.arange(size) % 2)
        for _ in range(count)
    ]


def mean_loss(model: nn.Module, weights: dict[str, Tensor], batches: Batches, t: float) -> float:
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    total = sum(
        F.cross_entropy(functional_call(model, {**weights, **buffers}, (x,)) / t, y) * len(y)
        for x, y in batches
    )
    assert isinstance(total, Tensor)
    return float(total.detach()) / sum(len(y) for _, y in batches)


def numeric_gradient(
    model: nn.Module, weights: dict[str, Tensor], batches: Batches, t: float = 1.0
) -> dict[str, Tensor]:
    step, found = 1e-5, {}
    for name, weight in weights.items():
        gradient = torch.zeros_like(weight)
        for at in range(weight.numel()):
            sides = []
            for sign in (1, -1):
                moved = weight.clone()
                moved.view(-1)[at] += sign * step
                sides.append(mean_loss(model, {**weights, name: moved}, batches, t))
            gradient.view(-1)[at] = (sides[0] - sides[1]) / (2 * step)
        found[name] = gradient
    return found


def plain(model: nn.Module) -> dict[str, Tensor]:
    return {name: w.detach() for name, w in weights_of(layers_of(model)[1]).items()}


# SNIP ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", [False, True])
def test_snip_scores_by_finite_differences(norm: bool) -> None:
    model = tiny(norm).eval()
    before = copy.deepcopy(model.state_dict())
    scores = snip_scores(model, layers_of(model)[1], samples(), F.cross_entropy)
    assert not model.training
    for key, value in model.state_dict().items():  # neither weights nor statistics are touched
        assert torch.equal(value, before[key])
    model.train()  # batch norms use the batch's statistics
    weights = plain(model)
    for name, gradient in numeric_gradient(model, weights, samples()).items():
        torch.testing.assert_close(
            scores[name], (gradient * weights[name]).abs(), atol=1e-8, rtol=1e-5
        )


def test_snip_by_hand() -> None:
    model = nn.Sequential(nn.Linear(2, 1, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[2.0, -0.5]]))
    # loss = mean(y): the gradient is the input.
    batches = [(torch.tensor([[1.0, 3.0]]), torch.zeros(1))]
    scores = snip_scores(model, layers_of(model)[1], batches, lambda y, _: y.mean())
    assert scores["0.weight"].tolist() == [[2.0, 1.5]]
    sparse = rewire.snip(model, batches, lambda y, _: y.mean(), sparsity=0.5)
    assert sparse[0].to_dense().weight.tolist() == [[2.0, 0.0]]


# GraSP -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", [False, True])
def test_grasp_scores_by_finite_differences(norm: bool) -> None:
    model = tiny(norm)
    weights, t = plain(model), 2.0
    gradient = numeric_gradient(model, weights, samples(), t)
    step = 1e-3
    sides = []
    for sign in (1, -1):
        moved = {name: w + sign * step * gradient[name] for name, w in weights.items()}
        sides.append(numeric_gradient(model, moved, samples(), t))
    scores = grasp_scores(model, layers_of(model)[1], samples(), F.cross_entropy, t)
    for name, weight in weights.items():
        product = (sides[0][name] - sides[1][name]) / (2 * step)  # Hg
        torch.testing.assert_close(scores[name], -weight * product, atol=1e-6, rtol=1e-3)


def test_grasp_removes_the_largest() -> None:
    model = tiny()
    scores = grasp_scores(model, layers_of(model)[1], samples(), F.cross_entropy)
    flat = torch.cat([score.flatten() for score in scores.values()])
    limit = flat.sort().values[9]
    rewire.grasp(model, samples(), F.cross_entropy, sparsity=0.5)
    for score, layer in zip(scores.values(), (model[0], model[2]), strict=True):
        assert torch.equal(layer.to_dense().weight != 0, score <= limit)


# SynFlow ---------------------------------------------------------------------------------------------


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 6, 3, stride=2, bias=False)
        self.fc1 = nn.Linear(6, 10, bias=False)
        self.fc2 = nn.Linear(10, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv1(x)))
        x = F.gelu(self.conv2(x)).mean((2, 3))
        return self.fc2(torch.tanh(self.fc1(x)))  # type: ignore[no-any-return]


def test_synflow_conserves_flow() -> None:
    torch.manual_seed(0)
    model = Chain()
    model(torch.randn(4, 3, 8, 8))  # statistics that are not 0 and 1
    model.norm.running_mean.zero_()  # type: ignore[union-attr]
    before = copy.deepcopy(model.state_dict())
    scores = synflow_scores(model, layers_of(model)[1], torch.randn(2, 3, 8, 8))
    assert model.training
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])
    sums = [float(score.sum()) for score in scores.values()]
    assert len(sums) == 4
    assert sums == pytest.approx([sums[0]] * 4, rel=1e-9)
    assert all(score.dtype == torch.float64 for score in scores.values())
    # And unit by unit: what comes in goes out.
    into, out = scores["fc1.weight"].sum(1), scores["fc2.weight"].sum(0)
    torch.testing.assert_close(into, out)


def test_synflow_by_hand() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU(), nn.Linear(2, 1, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0, -2.0], [3.0, 0.5]]))
        model[2].weight.copy_(torch.tensor([[-0.5, 2.0]]))
    scores = synflow_scores(model, layers_of(model)[1], torch.zeros(1, 2))
    assert scores["0.weight"].tolist() == [[0.5, 1.0], [6.0, 1.0]]
    assert scores["2.weight"].tolist() == [[1.5, 7.0]]


def test_synflow_takes_batch_norms_as_the_authors_do() -> None:
    """Magnitudes of all that a batch norm holds, and running statistics."""
    norm = nn.BatchNorm1d(2)
    model = nn.Sequential(nn.Linear(1, 2, bias=False), norm, nn.ReLU(), nn.Linear(2, 1, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[4.0], [-5.0]]))
        model[3].weight.copy_(torch.tensor([[-0.5, 2.0]]))
        for name, value in {"weight": -3.0, "bias": -1.0, "running_mean": -2.0}.items():
            getattr(norm, name).fill_(value)
        norm.running_var.fill_(4 - norm.eps)  # type: ignore[union-attr]
    scores = synflow_scores(model, layers_of(model)[1], torch.zeros(1, 1))
    # Unit 1: 3 (4 - 2) / 2 + 1 = 4 goes on, times 0.5; unit 2: 3 (5 - 2) / 2 + 1 = 5.5, times 2.
    assert scores["3.weight"].flatten().tolist() == pytest.approx([2.0, 11.0])
    assert scores["0.weight"].flatten().tolist() == pytest.approx([4 * 1.5 * 0.5, 5 * 1.5 * 2])


def test_snip_takes_batch_norms_as_the_authors_do() -> None:
    """Statistics of the batch, whatever has run before; those that are kept do not change."""
    model, x = tiny(norm=True), samples(1)
    expected = snip_scores(model, layers_of(model)[1], x, F.cross_entropy)
    norm = model[1]
    assert isinstance(norm, nn.BatchNorm1d)
    assert norm.running_mean is not None
    with torch.no_grad():
        norm.running_mean.fill_(7.0)
    model.eval()
    scores = snip_scores(model, layers_of(model)[1], x, F.cross_entropy)
    assert all(torch.equal(scores[name], expected[name]) for name in expected)
    assert float(norm.running_mean[0]) == 7.0
    assert not model.training
    pruned = rewire.snip(model, x, F.cross_entropy, sparsity=0.5)
    assert isinstance(pruned[1], nn.BatchNorm1d)  # only weights are pruned


def test_synflow_does_not_collapse_where_snip_does() -> None:
    def pruned(how: Any, **options: Any) -> list[int]:
        torch.manual_seed(0)
        model = models.build("vgg16", num_classes=10, width=0.5)
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(20, 3, 32, 32, generator=generator)
        found = how(model, [(x, torch.arange(20) % 10)], F.cross_entropy, sparsity=0.99, **options)
        return [m.count for m in found.modules() if isinstance(m, rewire.SparseLayer)]

    snip, synflow = pruned(rewire.snip), pruned(rewire.synflow)
    assert abs(sum(snip) - sum(synflow)) == 0
    assert min(snip) == 0
    assert min(synflow) > 0


# Whole models ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [rewire.snip, rewire.grasp, rewire.synflow])
@pytest.mark.parametrize("name", ["vit", "resnet20"])
def test_models_of_the_paper(how: Any, name: str) -> None:
    torch.manual_seed(0)
    size = {"image_size": 16} if name == "vit" else {}
    model = models.build(name, num_classes=4, width=0.25, **size)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    statistics = {n: b.clone() for n, b in model.named_buffers()}
    x = torch.randn(8, 3, *((16, 16) if name == "vit" else (32, 32)))
    random = torch.get_rng_state()
    options = {"rounds": 10} if how is rewire.synflow else {}
    sparse = how(model, [(x, torch.arange(8) % 4)], F.cross_entropy, sparsity=0.9, **options)
    assert torch.equal(torch.get_rng_state(), random)
    assert sparse is model
    layers = {n: m for n, m in model.named_modules() if isinstance(m, rewire.SparseLayer)}
    total = sum(m.n_in * m.n_out for m in layers.values())
    assert sum(m.count for m in layers.values()) == math.ceil(0.1 * total - 1e-6)
    if how is not rewire.snip:
        assert min(m.count for m in layers.values()) > 0
    for layer_name, layer in layers.items():
        assert isinstance(layer, rewire.SparseLinear | rewire.SparseConv2d)
        dense = layer.to_dense().weight
        assert torch.equal(dense, torch.where(dense != 0, before[f"{layer_name}.weight"], 0))
    for n, buffer in model.named_buffers():
        if n in statistics:
            assert torch.equal(buffer, statistics[n])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    first = last = 0.0
    for step in range(6):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), torch.arange(8) % 4)
        loss.backward()
        optimizer.step()
        first, last = (float(loss.detach()) if step == 0 else first), float(loss.detach())
    assert last < first


def test_query_and_key_carry_flow() -> None:
    """A softmax that lets nothing through would prune them all."""
    torch.manual_seed(0)
    model = models.build("vit", num_classes=4, width=0.25, image_size=16)
    scores = synflow_scores(model, layers_of(model)[1], torch.zeros(1, 3, 16, 16))
    third = scores["blocks.0.attention.to_qkv.weight"].chunk(3)
    assert all(float(part.sum()) > 0 for part in third)


class Attending(nn.Module):
    """torch's own transformer layer, with its packed projections."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x).mean(1))  # type: ignore[no-any-return]


def sequences() -> Batches:
    generator = torch.Generator().manual_seed(2)
    return [(torch.randn(4, 3, 4, generator=generator).double(), torch.arange(4) % 2)]


@pytest.mark.parametrize("how", [rewire.snip, rewire.grasp, rewire.synflow])
def test_packed_attention_is_pruned_too(how: Any) -> None:
    torch.manual_seed(0)
    model = Attending().double()
    packed = model.layer.self_attn.in_proj_weight.detach().clone()
    sparse = how(model, sequences(), F.cross_entropy, sparsity=0.5)
    attention = sparse.layer.self_attn
    for part, name in zip(packed.split(4), ("q_proj", "k_proj", "v_proj"), strict=True):
        layer = getattr(attention, name)
        assert isinstance(layer, rewire.SparseLinear)
        dense = layer.to_dense().weight
        assert torch.equal(dense, torch.where(dense != 0, part, 0))
    counts = [m.count for m in sparse.modules() if isinstance(m, rewire.SparseLayer)]
    assert len(counts) == 7
    assert sum(counts) == math.ceil(0.5 * (4 * 16 + 2 * 24 + 8))
    sparse.eval()
    with torch.no_grad():
        assert torch.isfinite(sparse(sequences()[0][0])).all()


def test_grasp_through_attention_by_finite_differences() -> None:
    torch.manual_seed(0)
    model, layers = layers_of(Attending().double())
    weights = {name: w.detach() for name, w in weights_of(layers).items()}
    scores = grasp_scores(model, layers, sequences(), F.cross_entropy, 1.0)
    gradient = numeric_gradient(model, weights, sequences())
    step = 1e-3  # along the gradient: H g is the difference of gradients
    sides = [
        numeric_gradient(
            model, {n: w + sign * step * gradient[n] for n, w in weights.items()}, sequences()
        )
        for sign in (1, -1)
    ]
    for name, weight in weights.items():
        product = (sides[0][name] - sides[1][name]) / (2 * step)
        torch.testing.assert_close(scores[name], -weight * product, rtol=1e-3, atol=1e-6)


def test_what_cannot_be_pruned() -> None:
    with pytest.raises(ValueError, match="sparsity"):
        rewire.snip(tiny(), samples(), F.cross_entropy, sparsity=1.0)
    with pytest.raises(ValueError, match="batches"):
        rewire.snip(tiny(), [], F.cross_entropy, sparsity=0.5)
    with pytest.raises(ValueError, match="temperature"):
        rewire.grasp(tiny(), samples(), F.cross_entropy, sparsity=0.5, temperature=0)
    with pytest.raises(ValueError, match="batches"):
        rewire.synflow(tiny(), [], sparsity=0.5)
    with pytest.raises(ValueError, match="rounds"):
        rewire.synflow(tiny(), samples(), sparsity=0.5, rounds=0)
    model = rewire.snip(tiny(), samples(), F.cross_entropy, sparsity=0.5, keep_dense="2")
    assert isinstance(model[2], nn.Linear)
    with pytest.raises(ValueError, match="sparse already"):
        rewire.snip(model, samples(), F.cross_entropy, sparsity=0.5)


# Gradual ---------------------------------------------------------------------------------------------


def gradual_run(storage: str = "sparse", **options: Any) -> Any:
    torch.manual_seed(0)
    model = rewire.sparsify(
        nn.Sequential(nn.Linear(12, 30), nn.Tanh(), nn.Linear(30, 4)).double(),
        **{"density": 1.0, "weights": "keep", "storage": "masked"},
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    settings = {"sparsity": 0.9, "every": 5, "until": 22, "storage": storage, **options}
    return model, optimizer, rewire.Gradual(model, optimizer, **settings)


def gradual_steps(run: Any, steps: range) -> None:
    model, optimizer, rewirer = run
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(8, 12, generator=generator).double()
        optimizer.zero_grad()
        F.cross_entropy(model(x), torch.arange(8) % 4).backward()
        optimizer.step()
        rewirer.step()


def test_gradual_follows_its_schedule_and_hands_over() -> None:
    run = gradual_run()
    model, optimizer, rewirer = run
    total, counts = 12 * 30 + 30 * 4, []
    groups = [len(group["params"]) for group in optimizer.param_groups]
    for step in range(30):
        gradual_steps(run, range(step, step + 1))
        counts.append(sum(view.layer.count for view in rewirer._views))
        if step + 1 in (5, 10, 15, 20, 22):
            wanted = 0.9 * (1 - (1 - (step + 1) / 22) ** 3)
            assert counts[-1] == math.ceil((1 - wanted) * total - 1e-6)
        elif step:
            assert counts[-1] == counts[-2]
        assert isinstance(model[0], rewire.MaskedLayer if step < 21 else rewire.SparseLayer)
    assert counts[-1] == 48
    assert [r.step for r in rewirer.history] == [5, 10, 15, 20, 22]
    for r in rewirer.history:
        assert r.fraction == pytest.approx(r.turnover, abs=1 / r.active)  # rounded
    assert [len(group["params"]) for group in optimizer.param_groups] == groups
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in model.parameters()}
    assert {id(p) for p in optimizer.state} == held
    assert optimizer.state[model[0].values]["momentum_buffer"].shape == model[0].values.shape


def test_gradual_goes_on_as_if_there_were_no_handover() -> None:
    sparse, masked = gradual_run(), gradual_run("masked")
    for run in (sparse, masked):
        gradual_steps(run, range(40))
    for at in (0, 2):
        a, b = sparse[0][at], masked[0][at]
        assert a.connections.keys().tolist() == b.connections.keys().tolist()
        torch.testing.assert_close(a.gather(a.values), b.gather(b.weight))
        torch.testing.assert_close(a.bias, b.bias)


@pytest.mark.parametrize("at", [7, 22, 26])
def test_gradual_resumes(at: int) -> None:
    first, second = gradual_run(), gradual_run()
    gradual_steps(first, range(at))
    state = copy.deepcopy([part.state_dict() for part in first])
    for part, saved in ((second[2], state[2]), (second[0], state[0]), (second[1], state[1])):
        part.load_state_dict(saved)
    for run in (first, second):
        gradual_steps(run, range(at, 30))
    for a, b in zip(first[0].parameters(), second[0].parameters(), strict=True):
        assert torch.equal(a, b)


def test_gradual_refuses() -> None:
    layer = rewire.sparsify(nn.Linear(9, 9), density=1.0, storage="masked")
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="sparsity"):
        rewire.Gradual(layer, optimizer, sparsity=1.0, until=2000)
    with pytest.raises(ValueError, match="begin"):
        rewire.Gradual(layer, optimizer, sparsity=0.9, until=2000, begin=3000)
    rewirer = rewire.Gradual(layer, optimizer, sparsity=0.9, every=1, until=1)
    with pytest.raises(ValueError, match=r"nn\.Sequential"):
        rewirer.step()


# Top-KAST --------------------------------------------------------------------------------------------


def kast(**options: Any) -> Any:
    torch.manual_seed(0)
    model = rewire.sparsify(
        nn.Sequential(nn.Conv2d(2, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 16, 5)),
        **{"sparsity": 0.8, "weights": "dense", "storage": "masked"},
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-2)
    return model, optimizer, rewire.TopKAST(model, optimizer, **{"every": 3, **options})


def kast_backward(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    F.cross_entropy(model(torch.randn(5, 2, 6, 6, generator=generator)), torch.arange(5)).backward()


def test_top_kast_uses_the_largest_and_keeps_the_rest() -> None:
    model, optimizer, rewirer = kast()
    layers = [m for m in model if isinstance(m, rewire.MaskedLayer)]
    sizes = [layer.count for layer in layers]
    hidden: list[dict[int, float]] = [{} for _ in layers]
    returned = 0
    for step in range(60):
        optimizer.zero_grad()
        resting = [layer.weight.detach().clone() for layer in layers]
        kast_backward(model, step)
        for layer in layers:
            assert layer.reach is not None
            assert layer.weight.grad is not None
            assert not layer.weight.grad[~layer.reach].any()
            explored = layer.reach & ~layer.mask
            assert layer.weight.grad[explored].any()
        optimizer.step()
        for layer, old in zip(layers, resting, strict=True):
            assert layer.reach is not None
            assert torch.equal(layer.weight[~layer.reach], old[~layer.reach])
            assert not torch.equal(layer.weight[layer.reach], old[layer.reach])
        before = [layer.weight.detach().clone() for layer in layers]
        active = [layer.mask.clone() for layer in layers]
        rewiring = rewirer.step()
        assert (rewiring is not None) == (step % 3 == 2)
        for i, layer in enumerate(layers):
            assert torch.equal(layer.weight, before[i])  # a choice changes no weight
            assert layer.count == sizes[i]
            assert layer.reach is not None
            if rewiring is None:
                assert torch.equal(layer.mask, active[i])
                continue
            magnitudes = layer.weight.detach().abs()
            for mask, count in ((layer.mask, sizes[i]), (layer.reach, 2 * sizes[i])):
                assert int(mask.sum()) == count
                assert magnitudes[mask].min() >= magnitudes[~mask].max()
            assert torch.equal(layer.effective != 0, layer.mask)
            for key in (active[i] & ~layer.mask).flatten().nonzero().flatten().tolist():
                hidden[i][key] = float(before[i].flatten()[key])
            for key in (layer.mask & ~active[i]).flatten().nonzero().flatten().tolist():
                returned += key in hidden[i]
                assert float(layer.effective.detach().flatten()[key]) != 0
    assert returned > 0
    assert rewirer.history[-1].active == sum(sizes)


def test_top_kast_forward_is_that_of_the_top_alone() -> None:
    model, _, _ = kast()
    dense = nn.Conv2d(2, 6, 3)
    layer = model[0]
    with torch.no_grad():
        keep = (
            layer.weight.abs()
            >= layer.weight.abs().flatten().sort(descending=True).values[layer.count - 1]
        )
        dense.weight.copy_(layer.weight * keep)
        dense.bias.copy_(layer.bias)
    x = torch.randn(2, 2, 6, 6)
    torch.testing.assert_close(layer(x), dense(x))


def test_top_kast_restores_dense_values() -> None:
    """What rests keeps its value to the bit, through momentum and decay, and has it when it comes back."""
    dense = nn.Linear(4, 1, bias=False)
    with torch.no_grad():
        dense.weight.copy_(torch.tensor([[4.0, -3.0, 2.5, -1.3]]))
    model = rewire.sparsify(
        nn.Sequential(dense), density=0.25, weights="dense", storage="masked", assignment="uniform"
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    rewirer = rewire.TopKAST(model, optimizer, every=4)
    layer = model[0]
    assert isinstance(layer, rewire.MaskedLinear)
    x = torch.ones(1, 4)
    assert layer(x).item() == 4.0
    for _ in range(8):
        optimizer.zero_grad()
        model(x).square().sum().backward()  # pulls what is used towards zero
        optimizer.step()
        rewirer.step()
        assert layer.weight[0, 3].item() == torch.tensor(-1.3).item()
    with torch.no_grad():
        layer.weight[0, :3] = 0.1
    optimizer.param_groups[0]["lr"] = 1e-3  # they stay about there
    for _ in range(4):
        optimizer.zero_grad()
        (0 * model(x)).sum().backward()
        optimizer.step()
        rewirer.step()
    assert layer.mask.tolist() == [[False, False, False, True]]
    assert layer(x).item() == torch.tensor(-1.3).item()


def test_top_kast_penalty() -> None:
    model, optimizer, rewirer = kast(penalty=0.5)
    layer = model[3]
    kast_backward(model, 0)
    gradient, weight = layer.weight.grad.clone(), layer.weight.detach().clone()
    optimizer.step()
    factor = torch.where(layer.mask, 0.5, 0.5 / layer.density) * layer.reach
    expected = torch.where(layer.reach, weight - 0.1 * (gradient + factor * weight), weight)
    torch.testing.assert_close(layer.weight.detach(), expected)
    del rewirer


def test_top_kast_starts_fresh_where_it_comes_to() -> None:
    model, optimizer, rewirer = kast()
    layer = model[3]
    for step in range(2):
        optimizer.zero_grad()
        kast_backward(model, step)
        optimizer.step()
        rewirer.step()
    before = layer.reach.clone()
    with torch.no_grad():
        layer.weight[~before] *= 100  # they come in at the next choice
    kast_backward(model, 2)
    optimizer.step()
    rewirer.step()
    entered = layer.reach & ~before
    assert entered.any()
    assert not optimizer.state[layer.weight]["momentum_buffer"][entered].any()


@pytest.mark.parametrize("at", [2, 3, 4])
def test_top_kast_resumes(at: int) -> None:
    def go(run: Any, steps: range) -> None:
        for step in steps:
            run[1].zero_grad()
            kast_backward(run[0], step)
            run[1].step()
            run[2].step()

    first, second = kast(), kast()
    go(first, range(at))
    go(second, range(7, 11))
    state = copy.deepcopy([part.state_dict() for part in first])
    for part, saved in zip(second, state, strict=True):
        part.load_state_dict(saved)
    for run in (first, second):
        go(run, range(at, 12))
    for a, b in zip(first[0].parameters(), second[0].parameters(), strict=True):
        assert torch.equal(a, b)
    assert list(first[2].history) == list(second[2].history)


def test_top_kast_refuses() -> None:
    for storage in ("sparse", "masked"):
        model = rewire.sparsify(nn.Sequential(nn.Linear(9, 9)), sparsity=0.5, storage=storage)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ValueError, match='weights="dense"'):
            rewire.TopKAST(model, optimizer)
    for options, message in (
        ({"backward": 0.5}, "backward"),
        ({"penalty": -1.0}, "penalty"),
        ({"scope": "global"}, "layer by layer"),
    ):
        with pytest.raises(ValueError, match=message):
            kast(**options)


# Lottery ---------------------------------------------------------------------------------------------


def lottery_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 30), nn.BatchNorm1d(30), nn.Tanh(), nn.Linear(30, 4))


def train_ticket(ticket: rewire.Ticket) -> float:
    optimizer = torch.optim.SGD(ticket.model.parameters(), lr=0.1, momentum=0.9)
    loss = torch.zeros(())
    for step in range(5):
        generator = torch.Generator().manual_seed(step)
        optimizer.zero_grad()
        loss = F.cross_entropy(
            ticket.model(torch.randn(8, 12, generator=generator)), torch.arange(8) % 4
        )
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def weights_and_masks(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    weights, masks = {}, {}
    for name in ("0", "3"):
        layer = model.get_submodule(name)
        if isinstance(layer, rewire.SparseLinear):
            twin = rewire.MaskedLinear.from_sparse(layer)
            weights[name], masks[name] = twin.weight.detach(), twin.mask
        else:
            weights[name] = layer.weight.detach().clone()  # type: ignore[union-attr, operator]
            masks[name] = torch.ones_like(weights[name], dtype=torch.bool)
    return weights, masks


def test_lottery_prunes_and_rewinds() -> None:
    initial = lottery_model()
    lottery = rewire.Lottery(initial, sparsities=(0, 0.5, 0.75, 0.9))
    total, trained = 12 * 30 + 30 * 4, None
    start, _ = weights_and_masks(initial)
    seen = []
    for ticket in lottery:
        seen.append(ticket.sparsity)
        weights, masks = weights_and_masks(ticket.model)
        assert sum(int(m.sum()) for m in masks.values()) == round((1 - ticket.sparsity) * total)
        for name, mask in masks.items():
            assert torch.equal(weights[name], torch.where(mask, start[name], 0))
        if trained is not None:
            flat = torch.cat(
                [torch.where(trained[1][n], trained[0][n].abs(), -1).flatten() for n in masks]
            )
            kept = torch.cat([mask.flatten() for mask in masks.values()])
            assert flat[kept].min() >= flat[~kept].max()
        norm = ticket.model.get_submodule("1")
        assert torch.equal(norm.running_mean, torch.zeros(30))  # type: ignore[arg-type]
        assert (ticket.round == 0) == isinstance(ticket.model.get_submodule("0"), nn.Linear)
        train_ticket(ticket)
        trained = weights_and_masks(ticket.model)
    assert seen == [0, 0.5, 0.75, 0.9]
    assert lottery.done
    assert torch.equal(initial[0].weight, start["0"])  # type: ignore[index]


def test_lottery_resumes(tmp_path: Path) -> None:
    sparsities = (0, 0.5, 0.75, 0.9)
    whole = rewire.Lottery(lottery_model(), sparsities=sparsities).run(train_ticket)

    class Stop(Exception):
        pass

    trained = []

    def some(ticket: rewire.Ticket) -> float:
        if len(trained) == 2:
            raise Stop
        trained.append(ticket.sparsity)
        return train_ticket(ticket)

    first = rewire.Lottery(lottery_model(), sparsities=sparsities, directory=tmp_path)
    with pytest.raises(Stop):
        first.run(some)
    second = rewire.Lottery(lottery_model(), sparsities=sparsities)
    second.load_state_dict(first.state_dict())
    third = rewire.Lottery(
        nn.Sequential(*lottery_model()), sparsities=sparsities, directory=tmp_path
    )
    for lottery in (second, third):
        assert lottery.ticket.sparsity == 0.75
        assert lottery.run(train_ticket) == whole
    assert rewire.Lottery(lottery_model(), sparsities=sparsities, directory=tmp_path).done
    assert [path.name for path in tmp_path.iterdir()] == ["lottery.pt"]
    with pytest.raises(ValueError, match="rounds at"):
        rewire.Lottery(lottery_model(), directory=tmp_path)


def test_lottery_refuses() -> None:
    for sparsities in ((), (0.5,), (0, 0.9, 0.5), (0, 1.0)):
        with pytest.raises(ValueError, match="sparsities"):
            rewire.Lottery(lottery_model(), sparsities=sparsities)
