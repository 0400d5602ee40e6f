"""sparsify and densify: budgets, equality with dense, the meta device, bad arguments."""

import copy
import io
import math
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import rewire
from rewire import SparseConv2d, SparseLayer, SparseLinear, models


def small(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(30, 40), nn.ReLU(), nn.Linear(40, 20), nn.Linear(20, 5))


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


def sparse_layers(model: nn.Module) -> dict[str, SparseLayer]:
    return {name: m for name, m in model.named_modules() if isinstance(m, SparseLayer)}


def counts(model: nn.Module) -> list[int]:
    return [layer.values.numel() for layer in sparse_layers(model).values()]


def same(a: nn.Module, b: nn.Module) -> bool:
    ours, theirs = a.state_dict(), b.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)


def unchanged(model: nn.Module, **arguments: Any) -> pytest.ExceptionInfo[Exception]:
    """The error of sparsify, which must leave model and generator as they were."""
    before = [(name, module) for name, module in model.named_modules()]
    tensors = {name: id(tensor) for name, tensor in model.state_dict(keep_vars=True).items()}
    generator = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises((ValueError, TypeError)) as error:
            rewire.sparsify(model, **arguments)
    assert [(name, module) for name, module in model.named_modules()] == before
    after = {name: id(tensor) for name, tensor in model.state_dict(keep_vars=True).items()}
    assert after == tensors
    assert torch.equal(torch.get_rng_state(), generator)
    return error


# Budgets ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "weights", "sparsity", "clipped"),
    [
        ("resnet56", 848_944, 0.95, []),
        ("vgg16", 1_252_528, 0.90, ["features.0", "classifier.7"]),
        ("vit", 4_224_000, 0.95, ["head"]),
    ],
)
def test_the_models_of_the_paper_meet_their_sparsity(
    name: str, weights: int, sparsity: float, clipped: list[str]
) -> None:
    model = rewire.sparsify(on_meta(lambda: models.build(name)), sparsity)
    layers = sparse_layers(model)
    assert sum(layer.n_in * layer.n_out for layer in layers.values()) == weights
    dense = [key for key, layer in layers.items() if layer.density == 1]
    assert dense == clipped
    target = (1 - sparsity) * weights
    if clipped:  # the authors do not share the excess out
        assert 0.95 * target < sum(counts(model)) < target
    else:  # every layer is rounded up
        assert target <= sum(counts(model)) < target + len(layers)


@pytest.mark.parametrize("assignment", ["erdos-renyi", "uniform", "erk"])
@pytest.mark.parametrize("total", [11, 1234, 50_000])
def test_a_number_of_connections_is_met_exactly(assignment: str, total: int) -> None:
    model = rewire.sparsify(models.vgg11(width=0.5), connections=total, assignment=assignment)
    assert sum(counts(model)) == total


def test_the_other_ways_to_say_how_many() -> None:
    assert counts(rewire.sparsify(small(), density=0.1, assignment="uniform")) == [120, 80, 10]
    assert counts(rewire.sparsify(small(), epsilon=2.0)) == [140, 120, 50]
    assert counts(rewire.sparsify(small(), sparsity=0.0)) == [1200, 800, 100]


def test_densities_by_name_first_match_wins_and_the_others_stay_dense() -> None:
    model = rewire.sparsify(small(), density={"2": 0.051, "[02]": 0.5})
    assert counts(model) == [600, 41]
    assert type(model[3]) is nn.Linear


def test_a_full_layer_is_a_sparse_layer_with_every_connection() -> None:
    layer = rewire.sparsify(nn.Sequential(nn.Linear(4, 3)), density=1.0)[0]
    assert isinstance(layer, SparseLinear)
    assert layer.density == 1


# The layers ---------------------------------------------------------------------------------------


def test_it_converts_in_place_and_keeps_what_the_layers_had() -> None:
    conv = nn.Conv2d(
        4, 6, (3, 2), stride=2, padding=(1, 0), dilation=(1, 2), padding_mode="circular"
    )
    model = nn.ModuleDict({"conv": conv, "linear": nn.Linear(7, 5, bias=False).double()})
    model["conv"].eval()
    conv.weight.requires_grad_(False)
    assert rewire.sparsify(model, 0.5) is model
    ours, linear = model["conv"], model["linear"]
    assert isinstance(ours, SparseConv2d)
    for name in ("kernel_size", "stride", "padding", "dilation", "padding_mode", "in_channels"):
        assert getattr(ours, name) == getattr(conv, name)
    assert not ours.training
    assert linear.training
    assert not ours.values.requires_grad
    assert ours.bias is not None
    assert ours.bias.requires_grad
    assert isinstance(linear, SparseLinear)
    assert linear.bias is None
    assert linear.values.dtype == torch.float64


def test_a_layer_alone_is_returned_sparse_and_dense_again() -> None:
    sparse = rewire.sparsify(nn.Linear(30, 20), connections=60)
    assert isinstance(sparse, SparseLinear)
    assert isinstance(rewire.sparsify(nn.Conv2d(3, 4, 3), 0.5), SparseConv2d)
    dense = rewire.densify(sparse)
    assert type(dense) is nn.Linear
    assert int(dense.weight.count_nonzero()) == 60


def test_fresh_values_have_the_variance_of_their_fan_in() -> None:
    layer = rewire.sparsify(nn.Linear(400, 300), 0.9)
    fan_in = layer.connections.fan_in()
    bound = (3 / fan_in).sqrt()
    share = layer.values.detach() / bound[layer.connections.outputs(), None]
    assert share.abs().max() <= 1
    assert share.var() == pytest.approx(1 / 3, rel=0.05)


def test_keep_keeps_the_largest_weights_and_the_biases() -> None:
    dense = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(32, 10))
    sparse = rewire.sparsify(copy.deepcopy(dense), 0.75, weights="keep", assignment="uniform")
    again = rewire.densify(copy.deepcopy(sparse))
    for index in (0, 2):
        weight, kept = dense[index].weight, again[index].weight
        size = math.ceil(weight.numel() / 4)
        threshold = weight.abs().flatten().topk(size).values[-1]
        assert torch.equal(kept, weight * (weight.abs() >= threshold))
        assert torch.equal(again[index].bias, dense[index].bias)


def test_keeping_everything_changes_nothing() -> None:
    model, x = small(), torch.randn(6, 30)
    expected = model(x)
    torch.testing.assert_close(rewire.sparsify(model, 0.0, weights="keep")(x), expected)


def test_a_layer_in_two_places_is_converted_once() -> None:
    shared = nn.Linear(8, 8)
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared, nn.Linear(8, 2))})
    rewire.sparsify(model, connections=24)
    assert isinstance(model["a"], SparseLinear)
    assert model["a"] is model["b"][0]
    assert sum(counts(model)) == 24
    rewire.densify(model)
    assert type(model["a"]) is nn.Linear
    assert model["a"] is model["b"][0]


def test_a_layer_in_two_places_answers_to_both_names() -> None:
    shared = nn.Linear(8, 8)
    model = nn.ModuleDict({"a": shared, "b": shared, "c": nn.Linear(8, 8)})
    rewire.sparsify(model, 0.5, keep_dense="b")
    assert list(sparse_layers(model)) == ["c"]


def test_hooks_stay_and_can_be_removed() -> None:
    model, calls = small(), []
    handle = model[0].register_forward_hook(lambda module, args, output: calls.append(module))
    rewire.sparsify(model, 0.5)
    model(torch.randn(2, 30))
    assert calls == [model[0]]
    handle.remove()
    model(torch.randn(2, 30))
    assert len(calls) == 1


def test_subclasses_that_compute_the_same_are_converted() -> None:
    class Named(nn.Linear):
        pass

    assert isinstance(rewire.sparsify(Named(4, 4), 0.5), SparseLinear)


# Randomness ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", ["fresh", "keep"])
def test_the_same_seed_gives_the_same_model_whatever_the_global_state(weights: str) -> None:
    one, two = small(), small()
    state = torch.get_rng_state()
    rewire.sparsify(one, 0.8, weights=weights, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(123)
    rewire.sparsify(two, 0.8, weights=weights, seed=3)
    assert same(one, two)


def test_another_seed_gives_another_model() -> None:
    one, two = (rewire.sparsify(small(), 0.8, seed=seed) for seed in (0, 1))
    assert not any(torch.equal(one[i].indices, two[i].indices) for i in (0, 2, 3))


def test_a_layer_does_not_depend_on_the_others_and_layers_differ() -> None:
    model = nn.Sequential(nn.Linear(50, 40), nn.Linear(50, 40))
    rewire.sparsify(model, density=0.1)
    alone = nn.Sequential(nn.Identity(), nn.Linear(50, 40))
    rewire.sparsify(alone, connections=len(model[1].values))
    assert same(model[1], alone[1])
    assert not torch.equal(model[0].indices, model[1].indices)


# Layers that stay dense ---------------------------------------------------------------------------


class Odd(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def _tied() -> nn.Module:
    model = nn.ModuleDict({"embedding": nn.Embedding(9, 4), "layer": nn.Linear(4, 9)})
    model["layer"].weight = model["embedding"].weight
    return model


def _patched() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.forward = lambda x: x  # type: ignore[method-assign]
    return nn.ModuleDict({"layer": layer})


def _holding(layer: nn.Module) -> nn.Module:
    return nn.ModuleDict({"layer": layer})


DENSE: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "depthwise": (lambda: _holding(nn.Conv2d(4, 8, 3, groups=4)), "depthwise"),
    "tied": (_tied, "tied weights"),
    "parametrized": (lambda: _holding(parametrizations.weight_norm(nn.Linear(4, 4))), "computed"),
    "pruned": (
        lambda: _holding(prune.random_unstructured(nn.Linear(4, 4), "weight", 3)),
        "computed",
    ),
    "lazy": (lambda: _holding(nn.LazyLinear(4)), "run one batch"),
    "forward": (lambda: _holding(Odd(4, 4)), "Odd has a forward"),
    "namesake": (  # as timm's
        lambda: _holding(type("Linear", (Odd,), {})(4, 4)),
        f"{__name__}.Linear has a forward",
    ),
    "patched": (_patched, "forward of its own"),
    "complex": (lambda: _holding(nn.Linear(4, 4, dtype=torch.complex64)), "real numbers"),
    "transposed 3d": (lambda: _holding(nn.ConvTranspose3d(4, 4, 3)), "no sparse ConvTranspose3d"),
    "lstm": (lambda: _holding(nn.LSTM(4, 4)), "no sparse LSTM"),
}


@pytest.fixture(params=DENSE)
def dense_only(request: pytest.FixtureRequest) -> tuple[nn.Module, str]:
    build, reason = DENSE[request.param]
    return build(), reason


def test_what_cannot_be_converted_stays_dense_and_is_named(
    dense_only: tuple[nn.Module, str],
) -> None:
    inner, reason = dense_only
    model = nn.ModuleDict({"inner": inner, "fine": nn.Linear(9, 9)})
    layer = model["inner"]["layer"]
    with pytest.warns(UserWarning, match=r"1 layer stays dense.*\n.*inner\.layer") as caught:
        rewire.sparsify(model, 0.5)
    assert len(caught) == 1
    assert reason in str(caught[0].message)
    assert caught[0].filename == __file__
    assert model["inner"]["layer"] is layer
    assert list(sparse_layers(model)) == ["fine"]


def test_nothing_to_convert_is_an_error_that_says_why(dense_only: tuple[nn.Module, str]) -> None:
    model, reason = dense_only
    assert reason in str(unchanged(model, sparsity=0.5).value)


def test_one_warning_groups_them_by_reason_the_largest_first() -> None:
    odd = [Odd(10, 10, bias=False) for _ in range(5)]
    model = nn.Sequential(nn.Linear(10, 10), *odd, nn.Conv2d(4, 4, 10, groups=4), Odd(10, 2))
    with pytest.warns(UserWarning, match="stay dense") as caught:
        rewire.sparsify(model, 0.5)
    (warning,) = caught
    assert str(warning.message) == (  # 500 and 22, 404, and 110 that are sparse
        "7 layers stay dense, with 89 % of the model's parameters (keep_dense= silences this):\n"
        "  Odd has a forward of its own: 1, 2, 3 and 3 more (50 % of all parameters)\n"
        "  a depthwise convolution is hardly faster when it is sparse "
        '(skip="none" converts it): 6 (39 % of all parameters)'
    )


class Conv1D(nn.Module):
    """A linear layer that is not torch's, its weight (in, out): what GPT-2 of transformers has."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(torch.randn(n_in, n_out)),
            nn.Parameter(torch.zeros(1)),
        )


class Experts(nn.Module):
    """The matrices of many experts in one parameter: what Mixtral has."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.randn(2, n_out, n_in)) for _ in range(2))


class Positions(nn.Module):
    def __init__(self, tokens: int, features: int) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 1, features))
        self.positions = nn.Parameter(torch.zeros(1, tokens, features))


def test_weight_matrices_of_unknown_modules_are_mentioned() -> None:
    blocks = [nn.ModuleDict({"attn": Conv1D(10, 30), "moe": Experts(10, 10)}) for _ in range(10)]
    model = nn.ModuleDict({"h": nn.ModuleList(blocks), "head": nn.Linear(10, 10, bias=False)})
    with pytest.warns(UserWarning, match="stay dense") as caught:
        rewire.sparsify(model, 0.5)
    (warning,) = caught
    assert str(warning.message) == (
        "20 layers stay dense, with 99 % of the model's parameters (keep_dense= silences this):\n"
        "  there is no sparse Experts, whose up, down hold matrices in 3-D parameters (experts): "
        "h.0.moe, h.1.moe, h.2.moe and 7 more (56 % of all parameters)\n"
        "  there is no sparse Conv1D: h.0.attn, h.1.attn, h.2.attn and 7 more (42 % of all parameters)"
    )


def test_a_model_of_unknown_modules_alone_is_an_error_that_says_so() -> None:
    model = nn.ModuleDict({f"c{i}": Conv1D(5, 5) for i in range(9)})
    error = unchanged(model, sparsity=0.5)
    assert "there is no sparse Conv1D: c0, c1, c2 and 6 more (100 %" in str(error.value)


@pytest.mark.parametrize(
    "dense",
    [
        nn.Embedding(900, 10),
        nn.EmbeddingBag(900, 10),
        nn.LayerNorm((30, 10)),
        Positions(300, 10),
        Conv1D(5, 20),  # 101 of 10,201 parameters are 0.99 %
    ],
    ids=["embedding", "bag", "norm", "positions", "small"],
)
def test_what_nobody_expects_to_be_sparse_is_not_mentioned(dense: nn.Module) -> None:
    model = nn.ModuleDict({"dense": dense, "linear": nn.Linear(100, 101, bias=False)})
    rewire.sparsify(model, 0.5)
    assert model["dense"] is dense
    assert "dense" in {row.name for row in rewire.summary(model, show=False).layers}


def test_keep_dense_and_densities_silence_it_for_unknown_modules_too() -> None:
    build = lambda: nn.ModuleDict({"a": Conv1D(9, 9), "b": Experts(9, 9), "c": nn.Linear(9, 9)})  # noqa: E731
    rewire.sparsify(build(), 0.5, keep_dense=["a", "b*"])
    rewire.sparsify(build(), density={"c": 0.5})
    with pytest.warns(UserWarning, match=r"1 layer stays dense.*\n.*Conv1D: a \("):
        rewire.sparsify(build(), density={"a": 0.5, "c": 0.5})


def test_an_error_about_a_name_lists_some_layers() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(30)))
    error = unchanged(model, sparsity=0.5, keep_dense="x")
    assert str(error.value).endswith("17, 18, 19 and 10 more")


def test_keep_dense_takes_names_globs_and_containers_and_silences_the_warning() -> None:
    model = nn.ModuleDict({"head": nn.Sequential(Odd(5, 5), nn.Linear(5, 5)), "body": small()})
    rewire.sparsify(model, 0.5, keep_dense=["head", "*.[23]"])
    assert list(sparse_layers(model)) == ["body.0"]
    model = rewire.sparsify(small(), 0.5, keep_dense="3")
    assert list(sparse_layers(model)) == ["0", "2"]


def test_a_mapping_does_not_warn_about_layers_it_does_not_name() -> None:
    rewire.sparsify(nn.Sequential(nn.Linear(5, 5), Odd(5, 5)), density={"0": 0.5})


# Equality with dense ------------------------------------------------------------------------------


class Plain(nn.Module):
    """A user's own model, with functions in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 12, 3, padding="same", bias=False)
        self.norm = nn.BatchNorm2d(12)
        self.second = nn.Conv2d(12, 12, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(12)
        self.down = nn.Conv2d(12, 24, 3, stride=2)
        self.head = nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(x)))
        x = F.relu(self.norm2(self.second(x)) + x, inplace=True)
        x = self.down(F.pad(x, (1, 1, 1, 1)))
        x = x * torch.sigmoid(x) + 0.5
        x = F.max_pool2d(x, 2)
        x = F.adaptive_avg_pool2d(x, 1).flatten(1)
        out: Tensor = self.head(x)
        return out


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "plain": (Plain, lambda: torch.randn(4, 3, 12, 12)),
    "resnet20": (models.resnet20, lambda: torch.randn(3, 3, 32, 32)),
    "vgg11": (lambda: models.vgg11(width=0.5), lambda: torch.randn(4, 3, 32, 32)),
    "vit": (lambda: models.vit(width=0.25), lambda: torch.randn(2, 3, 32, 32)),
    "gpt": (
        lambda: models.gpt(width=48, depth=2, heads=2, context=16),
        lambda: torch.randint(65, (2, 16)),
    ),
}


def in_double(model: nn.Module, x: Tensor) -> tuple[nn.Module, Tensor]:
    return model.double(), x.double() if x.is_floating_point() else x


@pytest.mark.parametrize("name", MODELS)
def test_a_model_computes_and_learns_what_its_dense_form_does(name: str) -> None:
    torch.manual_seed(0)
    build, inputs = MODELS[name]
    sparse, x = in_double(build(), inputs())
    rewire.sparsify(sparse, 0.9)
    dense = rewire.densify(copy.deepcopy(sparse))
    assert not sparse_layers(dense)
    assert not dense._forward_hooks
    for module in (*sparse.modules(), *dense.modules()):
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    for model in (sparse, dense):
        model(x).square().mean().backward()  # moves running statistics
    torch.testing.assert_close(sparse(x), dense(x))
    buffers = dict(sparse.named_buffers())
    for key, buffer in dense.named_buffers():
        torch.testing.assert_close(buffers[key], buffer)
    for key, module in dense.named_modules():
        ours = sparse.get_submodule(key)
        if isinstance(ours, SparseLayer) and isinstance(module, nn.Linear | nn.Conv2d):
            gradient = module.weight.grad
            assert gradient is not None
            if gradient.dim() == 4:
                gradient = gradient.permute(0, 2, 3, 1)
            a = ours.connections
            expected = gradient.flatten(1)[a.outputs(), a.inputs()]
            torch.testing.assert_close(ours.values.grad, expected[:, None], rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(sparse.eval()(x), dense.eval()(x))


@pytest.mark.parametrize("training", [True, False])
def test_activation_checkpointing_gives_the_same_gradients(training: bool) -> None:
    class Checkpointed(Plain):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = checkpoint(super().forward, x, use_reentrant=False)
            return out

    torch.manual_seed(0)
    model = rewire.sparsify(Checkpointed().double().train(training), 0.5)
    plain = copy.deepcopy(model)
    plain.__class__ = Plain
    x = torch.randn(4, 3, 12, 12, dtype=torch.float64)
    for each in (model, plain):
        each(x).square().sum().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-6, atol=1e-9)


def test_densify_keeps_mode_and_frozen_layers_and_is_idempotent() -> None:
    model = rewire.sparsify(small(), 0.5)
    model[0].values.requires_grad_(False)
    model[2].eval()
    rewire.densify(model)
    assert not model[0].weight.requires_grad
    assert model[0].bias.requires_grad
    assert not model[2].training
    before = list(model)
    assert list(rewire.densify(model)) == before


def test_densify_finds_models_that_were_converted_as_parts() -> None:
    model = nn.Sequential(Plain(), nn.Linear(5, 5))
    rewire.sparsify(model[0], 0.5)
    rewire.densify(model)
    assert not model[0]._forward_hooks


def test_a_densified_model_can_be_converted_again() -> None:
    model = rewire.sparsify(Plain(), 0.5)
    first = counts(model)
    rewire.sparsify(rewire.densify(model), 0.5)
    assert counts(model) == first
    assert model._forward_hooks


# On the meta device -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_a_model_on_meta_becomes_real(name: str) -> None:
    build, inputs = MODELS[name]
    one = rewire.sparsify(on_meta(build), 0.9, seed=5)
    torch.manual_seed(123)
    state = torch.get_rng_state()
    two = rewire.sparsify(on_meta(build), 0.9, seed=5)
    assert torch.equal(torch.get_rng_state(), state)
    assert {tensor.device.type for tensor in one.state_dict().values()} == {"cpu"}
    assert same(one, two)
    model, x = in_double(one, inputs())
    out = model(x)
    assert bool(out.isfinite().all())
    norms = [m for m in one.modules() if isinstance(m, nn.BatchNorm2d | nn.LayerNorm)]
    assert all(bool((norm.weight == 1).all()) for norm in norms)


def test_it_works_inside_the_meta_context_and_draws_the_same() -> None:
    with torch.device("meta"):
        one = rewire.sparsify(nn.Sequential(nn.Linear(30, 20), nn.LayerNorm(20)), 0.9)
    two = rewire.sparsify(nn.Sequential(nn.Linear(30, 20), nn.LayerNorm(20)), 0.9)
    assert same(one, two)


def test_a_huge_layer_on_meta_is_created_sparse() -> None:
    layer = rewire.sparsify(on_meta(lambda: nn.Linear(300_000, 200_000)), connections=500_000)
    assert layer.values.numel() == 500_000
    layer(torch.randn(2, 300_000)).sum().backward()


def test_tied_weights_on_meta_stay_tied() -> None:
    model = on_meta(lambda: nn.ModuleDict({"tied": _tied(), "linear": nn.Linear(5, 5)}))
    with pytest.warns(UserWarning, match=r"tied\.embedding\.weight = tied\.layer\.weight"):
        rewire.sparsify(model, 0.5)
    embedding, layer = model["tied"]["embedding"], model["tied"]["layer"]
    assert layer.weight is embedding.weight
    assert not layer.weight.is_meta
    assert layer.weight.abs().max() > 0.6  # an embedding's normal, not a linear layer's uniform


def test_attention_on_meta_is_created_as_torch_does() -> None:
    build = lambda: nn.ModuleDict({"a": nn.MultiheadAttention(8, 2), "b": nn.Linear(5, 5)})  # noqa: E731
    model = rewire.sparsify(on_meta(build), 0.5, keep_dense="a")
    assert bool((model["a"].out_proj.bias == 0).all())
    assert model["a"].in_proj_weight.abs().max() > 0


class Token(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.token = nn.Parameter(torch.zeros(4))


def test_what_meta_cannot_create_is_an_error_that_names_it() -> None:
    model = nn.ModuleDict({"inner": on_meta(Token)})
    assert "inner (Token)" in str(unchanged(model, sparsity=0.5).value)


def test_weights_on_meta_cannot_be_kept() -> None:
    error = unchanged(on_meta(small), sparsity=0.5, weights="keep")
    assert "meta" in str(error.value)


@pytest.mark.slow
def test_a_million_by_a_million_fits_in_two_gigabytes() -> None:
    code = """
import resource, torch, rewire
with torch.device("meta"):
    layer = torch.nn.Linear(1_000_000, 1_000_000)
layer = rewire.sparsify(layer, connections=10_000_000)
layer(torch.randn(16, 1_000_000)).sum().backward()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert int(result.stdout) * 1024 < 2e9


# Always sparse ------------------------------------------------------------------------------------


class NoDense(TorchDispatchMode):
    """Fails on any result of at least so many elements."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit, self.seen = limit, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and not leaf.is_meta:
                assert leaf.numel() < self.limit, f"{func} made a tensor of {tuple(leaf.shape)}"
                self.seen = max(self.seen, leaf.numel())
        return result


@pytest.mark.parametrize("density", [0.05, 0.3])
@pytest.mark.parametrize(
    ("build", "shape"),
    [
        (lambda: nn.Sequential(nn.Linear(60, 70), nn.ReLU(), nn.Linear(70, 60)), (3, 60)),
        (
            lambda: nn.Sequential(
                nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 32, 3)
            ),
            (2, 32, 3, 3),
        ),
    ],
)
def test_no_tensor_is_as_large_as_a_dense_weight(
    build: Callable[[], nn.Module], shape: tuple[int, ...], density: float
) -> None:
    dense, real, file = on_meta(build), build(), io.BytesIO()
    limit = min(p.numel() for p in dense.parameters() if p.dim() > 1)
    x = torch.randn(shape)
    with NoDense(limit) as mode:
        rewire.sparsify(real, density=density, assignment="uniform")
        model = rewire.sparsify(dense, density=density, assignment="uniform")
        out = model(x)
        out.square().mean().backward()
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9).step()
        torch.save(model.state_dict(), file)
        file.seek(0)
        other = rewire.sparsify(on_meta(build), density=density / 2, assignment="uniform", seed=1)
        other.load_state_dict(torch.load(file, weights_only=True))
    assert mode.seen >= density * limit  # it did look
    assert same(model, other)
    torch.testing.assert_close(other(x), model(x))


def test_the_guard_sees_dense_weights() -> None:
    model = rewire.sparsify(small(), 0.9)
    with NoDense(800), pytest.raises(AssertionError, match="made a tensor"):
        rewire.densify(model)


# Bad arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "got none"),
        ({"sparsity": 0.5, "density": 0.5}, "sparsity and density"),
        ({"sparsity": 0.5, "connections": 100}, "sparsity and connections"),
        ({"sparsity": 1.0}, "sparsity must be"),
        ({"sparsity": -0.1}, "sparsity must be"),
        ({"sparsity": 95}, "sparsity must be"),
        ({"sparsity": math.nan}, "sparsity must be"),
        ({"sparsity": "0.9"}, ""),
        ({"density": 0.0}, "density must be"),
        ({"density": {"0": 1.5}}, "density must be"),
        ({"density": {"0": math.nan}}, "density must be"),
        ({"density": {"0": 0.5, "nope": 0.5}}, "'nope', which matches no layer.*0, 2, 3"),
        ({"density": {}}, "no layer to convert"),
        ({"epsilon": 0.0}, "epsilon must be"),
        ({"epsilon": 2.0, "assignment": "erk"}, "epsilon belongs"),
        ({"connections": 2}, "from 3"),
        ({"connections": 2101}, "to 2100"),
        ({"connections": 100.0}, "integer"),
        ({"sparsity": 0.5, "assignment": "er"}, "no assignment 'er'"),
        ({"density": {"*": 0.5}, "assignment": "er"}, "no assignment 'er'"),
        ({"sparsity": 0.5, "weights": "largest"}, "no weights 'largest'"),
        ({"sparsity": 0.5, "keep_dense": ["7"]}, "'7', which matches no layer.*0, 2, 3"),
        ({"sparsity": 0.5, "keep_dense": "1"}, "'1', which matches no layer"),
        ({"sparsity": 0.5, "keep_dense": [3]}, ""),
        ({"sparsity": 0.5, "keep_dense": "*"}, "no layer to convert"),
        ({"sparsity": 0.5, "seed": 0.5}, "integer"),
    ],
)
def test_bad_arguments_change_nothing(arguments: dict[str, Any], message: str) -> None:
    assert unchanged(small(), **arguments).match(f"(?s){message}")


def test_a_model_that_is_sparse_already_is_refused() -> None:
    model = rewire.sparsify(small(), 0.5)
    error = str(unchanged(model, sparsity=0.5).value)
    assert error == (
        "the model has no layer to convert:\n  sparse already (rewire.densify makes them dense): 0, 2, 3"
    )
    assert "densify" in str(unchanged(model[0], sparsity=0.5).value)


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(TypeError, match=r"nn\.Module"):
        rewire.sparsify([nn.Linear(2, 2)], 0.5)  # type: ignore[type-var]
