"""GSE against a dense computation, however a model is run."""

import copy
import gc
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rewire
from rewire import SparseConv2d, SparseLinear, sampling
from rewired import backward, by_key, dense_gradients, keys, layers, mlp, net, rows, sgd, topology

pytestmark = pytest.mark.usefixtures("same_random_numbers")


DISTRIBUTIONS = ["uniform", "grabo", "graest"]
SCOPES = ["global", "layer"]


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("subset", [0.3, 1.0, 50.0, math.inf])
def test_gse_against_dense(distribution: str, scope: str, subset: float) -> None:
    model = net()
    optimizer = sgd(model)
    rewirer = rewire.GSE(
        *(model, optimizer),
        **{"every": 2, "until": 10, "fraction": 0.3, "subset": subset},
        **{"distribution": distribution, "scope": scope},
    )
    for step in range(8):
        optimizer.zero_grad()
        truth = dense_gradients(model, step)
        before = topology(model)
        backward(model, step)
        subsets = {name: s.keys() for name, s in rewirer.subsets.items()}
        gradients = rewirer.gradients
        optimizer.step()
        weights = {name: by_key(layer) for name, layer in layers(model).items()}
        rewiring = rewirer.step()
        after = topology(model)
        if (step + 1) % 2:
            assert rewiring is None
            assert not subsets
            assert after == before
            continue
        assert rewiring is not None
        alpha = 0.3 / 2 * (1 + math.cos(math.pi * (step + 1) / 10))
        assert rewiring.fraction == pytest.approx(alpha)
        for name, s in subsets.items():
            layer = layers(model)[name]
            total = layer.n_in * layer.n_out
            assert not set(s.tolist()) & before[name]
            free, count = total - len(before[name]), len(before[name])
            if subset < math.inf:
                assert len(s) <= min(free, math.ceil(subset * count))
            elif scope == "layer":  # of everything, what grows is listed
                assert len(s) == min(free, count - 1, sampling.ceil(alpha * count))
            expected = truth[name].flatten()[s]
            torch.testing.assert_close(gradients[name], expected, rtol=1e-3, atol=1e-6)
        groups = [list(before)] if scope == "global" else [[name] for name in before]
        for group in groups:
            count = sum(len(before[name]) for name in group)
            size = sum(len(subsets[name]) for name in group)
            spare = sum(len(before[name]) - 1 for name in group)
            k = min(sampling.ceil(alpha * count), size, spare)
            grown = [(name, key) for name in group for key in after[name] - before[name]]
            pruned = [(name, key) for name in group for key in before[name] - after[name]]
            assert len(grown) == len(pruned) == k
            # The grown are the largest of S by the gradient, the pruned the smallest but one per layer.
            score = {
                (n, key): abs(g)
                for n in group
                for key, g in zip(subsets[n].tolist(), gradients[n].tolist(), strict=True)
            }
            others = [v for key, v in score.items() if key not in set(grown)]
            if subset == math.inf:
                inactive = {(n, key) for n in group for key in range(truth[n].numel())}
                inactive -= {(n, key) for n in group for key in before[n]}
                others = [float(truth[n].flatten()[key].abs()) for n, key in inactive - set(grown)]
                others = [v * (1 - 1e-4) for v in others]  # the dense gradient is torch's
            if grown and others:
                assert min(score[key] for key in grown) >= max(others)
            best = {(n, max(weights[n], key=lambda key, n=n: abs(weights[n][key]))) for n in group}
            kept = [
                abs(weights[n][k])
                for n in group
                for k in before[n] & after[n]
                if (n, k) not in best
            ]
            if pruned and kept:
                assert max(abs(weights[n][key]) for n, key in pruned) <= min(kept)
            assert not best & set(pruned)
        for name, layer in layers(model).items():
            values = by_key(layer)
            assert all(values[key] == 0 for key in after[name] - before[name])
            assert all(values[key] == weights[name][key] for key in after[name] & before[name])
            part = rewiring.layers[name]
            assert part.active == len(after[name])
            assert part.grown == len(after[name] - before[name])
            assert part.pruned == len(before[name] - after[name])
            everything = layer.n_in * layer.n_out - len(before[name])
            assert part.subset == (everything if subset == math.inf else len(subsets[name]))


def test_a_subset_as_small_as_the_fraction_grows_the_sample_itself() -> None:
    model = net(sparsity=0.9)
    optimizer = sgd(model)
    rewirer = rewire.GSE(model, optimizer, every=1, until=1, fraction=lambda t: 0.2, subset=0.2)
    backward(model, 0)
    sample = {name: keys(s) for name, s in rewirer.subsets.items()}
    before = topology(model)
    optimizer.step()
    rewirer.step()
    assert {name: topology(model)[name] - before[name] for name in before} == sample


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_micro_batches_count_as_one_batch(distribution: str) -> None:
    """S is drawn in the first and the gradient is the whole batch's, as in ``.grad``."""

    def grown(parts: int) -> tuple[dict[str, Tensor], dict[str, set[int]]]:
        model = mlp()
        rewirer = rewire.GSE(model, sgd(model), every=1, until=4, distribution=distribution)
        x, y = rows(0, 6)
        for a, b in zip(x.chunk(parts), y.chunk(parts), strict=True):
            (F.cross_entropy(model(a), b, reduction="sum") / 6).backward()
        return rewirer.gradients, {name: keys(s) for name, s in rewirer.subsets.items()}

    whole, s = grown(1)
    parts, s3 = grown(3)
    if distribution == "uniform":
        assert s == s3
        for name in whole:
            torch.testing.assert_close(whole[name], parts[name])
    # With GraBo and GraEst S comes from the first part; the gradient at it is the whole one's.
    dense = rewire.densify(mlp())
    x, y = rows(0, 6)
    F.cross_entropy(dense(x), y).backward()
    for name, gradient in parts.items():
        full = dense.get_submodule(name).weight.grad
        assert isinstance(full, Tensor)
        torch.testing.assert_close(gradient, full.flatten()[sorted(s3[name])], rtol=1e-3, atol=1e-6)


def test_a_layer_used_twice_is_one_layer() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(10, 10)
            self.again = self.fc

        def forward(self, x: Tensor) -> Tensor:
            return self.again(torch.tanh(self.fc(x)))  # type: ignore[no-any-return]

    model = rewire.sparsify(Twice(), sparsity=0.7)
    rewirer = rewire.GSE(model, sgd(model), every=1, until=9, subset=math.inf)
    x = torch.randn(4, 10)
    dense = rewire.densify(copy.deepcopy(model))
    dense(x).square().sum().backward()
    model(x).square().sum().backward()
    (s,), (gradient,) = rewirer.subsets.values(), rewirer.gradients.values()
    torch.testing.assert_close(
        gradient, dense.fc.weight.grad.flatten()[s.keys()], rtol=1e-3, atol=1e-5
    )
    rewiring = rewirer.step()
    assert rewiring is not None
    assert list(rewiring.layers) == ["fc"]


@pytest.mark.parametrize("engine", [True, False])
def test_gradients_are_those_behind_a_relu(engine: bool) -> None:
    model = net()
    rewire.use_engine(model, engine)
    rewirer = rewire.GSE(model, sgd(model), every=1, until=9, subset=math.inf)
    truth = dense_gradients(model, 0)
    backward(model, 0)
    for name, gradient in rewirer.gradients.items():
        expected = truth[name].flatten()[rewirer.subsets[name].keys()]
        torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-6)


def test_sequences_and_single_samples_are_seen() -> None:
    layer = SparseLinear(8, 6, sparsity=0.5)
    conv = SparseConv2d(2, 3, 3, padding_mode="circular", padding=1, sparsity=0.5)
    for module, x in (
        (layer, torch.randn(2, 5, 8)),
        (layer, torch.randn(8)),
        (conv, torch.randn(2, 6, 6)),
        (conv, torch.randn(4, 2, 6, 6)),
    ):
        rewirer = rewire.GSE(module, sgd(module), every=1, until=9, subset=math.inf)
        dense = module.to_dense()
        dense(x).square().sum().backward()
        module(x).square().sum().backward()
        weight = dense.weight.grad
        assert isinstance(weight, Tensor)
        flat = weight.permute(0, 2, 3, 1).flatten(1) if weight.dim() == 4 else weight
        expected = flat.flatten()[rewirer.subsets[""].keys()]
        torch.testing.assert_close(rewirer.gradients[""], expected, rtol=1e-3, atol=1e-4)
        del rewirer
        gc.collect()


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_activations(reentrant: bool) -> None:
    def gradients(checkpointed: bool) -> dict[str, Tensor]:
        model = mlp()
        rewirer = rewire.GSE(model, sgd(model), every=1, until=9)
        x = rows(0)[0].requires_grad_()
        y = checkpoint(model, x, use_reentrant=reentrant) if checkpointed else model(x)
        y.square().sum().backward()
        return rewirer.gradients

    for a, b in zip(gradients(True).values(), gradients(False).values(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch looks at it where a graph breaks
def test_compiled_models_are_rewired_alike() -> None:
    def trained(compiled: bool) -> tuple[dict[str, set[int]], int]:
        model = mlp()
        optimizer = sgd(model)
        rewirer = rewire.GSE(model, optimizer, every=2, until=8)
        call = torch.compile(model, backend="aot_eager") if compiled else model
        for step in range(6):
            optimizer.zero_grad()
            x, y = rows(step)
            F.cross_entropy(call(x), y).backward()
            optimizer.step()
            rewirer.step()
        return topology(model), len(rewirer.history)

    torch._dynamo.reset()
    assert trained(True) == trained(False)


def test_tracing_an_armed_model_is_refused() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    model = mlp()
    rewirer = rewire.GSE(model, sgd(model), every=1, until=9)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        x = mode.from_tensor(torch.randn(3, 12))
        with pytest.raises(RuntimeError, match="rewiring is due"):
            model(x)
    del rewirer
