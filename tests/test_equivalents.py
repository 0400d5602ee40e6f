"""Layers that are not torch's own: equivalents, ties, converting again, and what public models do."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rewire
from rewire import SparseConv2d, SparseLayer, SparseLinear
from rewire.nn import MaskedLinear
from rewire.ops import native
from some_layers import seeded


class Conv1D(nn.Module):
    """A linear layer whose weight is (in, out), as GPT-2 of transformers has it."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(torch.empty(nx, nf)), nn.Parameter(torch.zeros(nf))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        size = (*x.size()[:-1], self.nf)
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(size)


class Falcon(nn.Linear):
    """As transformers has it."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T + self.bias


class Inherits(Falcon):
    """No forward of its own."""


class Scaled(Falcon):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Padded(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.pad(x, (1, 1, 1, 1)))


rewire.register_layer(Conv1D, transposed=True)
rewire.register_layer(Falcon)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Conv1D(20, 12), nn.ReLU(), Inherits(20, 15), Falcon(15, 6)).double()


def assert_twins(ours: nn.Module, *inputs: Tensor) -> None:
    """Outputs and gradients are those of the densified model, in both modes and after rewirings."""
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.05)
    rewirer = rewire.GSE(ours, optimizer, every=2, until=10, fraction=0.3, subset=1.0)
    for _ in range(4):
        twin = rewire.densify(copy.deepcopy(ours))
        for training in (False, True):
            results = []
            for one in (ours, twin):
                one.train(training)
                one.zero_grad()
                results.append(one(*inputs))
                results[-1].square().mean().backward()
            torch.testing.assert_close(*results)
            _assert_gradients(ours, twin)
        optimizer.step()
        rewirer.step()


def _assert_gradients(ours: nn.Module, twin: nn.Module) -> None:
    for name, layer in ours.named_modules():
        dense = twin.get_submodule(name)
        for key, parameter in layer._parameters.items():
            if parameter is None:
                continue
            other = dense._parameters["weight" if key == "values" else key]
            assert (parameter.grad is None) == (other.grad is None), (name, key)
            if other is None or parameter.grad is None:
                continue
            gradient = other.grad
            if key == "values" and isinstance(layer, SparseLayer):
                gradient = gradient.t() if isinstance(dense, Conv1D) else gradient
                flat = gradient if gradient.dim() == 2 else gradient.permute(0, 2, 3, 1).flatten(1)
                connections = layer.connections
                gradient = flat[connections.outputs(), connections.inputs()].unsqueeze(1)
            torch.testing.assert_close(parameter.grad, gradient, msg=f"{name}.{key}")


# Equivalents --------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", ["sparse", "masked"])
def test_equivalents_keep_their_weights_and_come_back(storage: str) -> None:
    before, x = model(), torch.randn(7, 12, generator=seeded(1), dtype=torch.float64)
    before[3].mine = "kept"  # type: ignore[assignment]
    before[2].weight.requires_grad_(False)
    calls: list[int] = []
    before[0].register_forward_hook(lambda *_: calls.append(1))
    state, expected = copy.deepcopy(before.state_dict()), before(x)
    converted = rewire.sparsify(copy.deepcopy(before), density=1.0, weights="keep", storage=storage)
    kind = SparseLinear if storage == "sparse" else MaskedLinear
    assert [type(layer) for layer in converted] == [kind, nn.ReLU, kind, kind]
    assert not converted[2].parameter.requires_grad  # type: ignore[union-attr]
    torch.testing.assert_close(converted(x), expected)
    again = rewire.densify(copy.deepcopy(converted))
    assert [type(layer) for layer in again] == [Conv1D, nn.ReLU, Inherits, Falcon]
    assert (again[0].nf, again[0].nx, again[3].mine) == (20, 12, "kept")
    assert {k: v.shape for k, v in again.state_dict().items()} == {
        k: v.shape for k, v in state.items()
    }
    assert all(torch.equal(again.state_dict()[k], v) for k, v in state.items())
    assert not again[2].weight.requires_grad
    assert not again.training ^ before.training
    torch.testing.assert_close(again(x), expected)
    assert len(calls) == 1  # hooks of a copy are the copy's


def test_the_largest_weights_of_a_transposed_layer_are_kept() -> None:
    layer = Conv1D(8, 30)
    sparse = rewire.sparsify(copy.deepcopy(layer), 0.75, weights="keep")
    assert isinstance(sparse, SparseLinear)
    assert sparse.weight.shape == (30, 8)
    kept = sparse.weight.to_dense().detach()
    threshold = layer.weight.abs().flatten().sort(descending=True).values[59]
    assert torch.equal(kept, torch.where(layer.weight.abs() >= threshold, layer.weight, 0))
    x = torch.randn(3, 30, generator=seeded(2))
    torch.testing.assert_close(torch.addmm(sparse.bias, x, sparse.weight), sparse(x))


def test_equivalents_train_as_their_twins() -> None:
    x = torch.randn(7, 12, generator=seeded(1), dtype=torch.float64)
    assert_twins(rewire.sparsify(model(), 0.6, weights="keep"), x)


def test_equivalents_are_saved_loaded_and_pruned(tmp_path: Path) -> None:
    x = torch.randn(7, 12, generator=seeded(1), dtype=torch.float64)
    converted = rewire.sparsify(model(), 0.6, weights="keep")
    rewire.save(converted, tmp_path / "model.safetensors")
    assert torch.equal(rewire.load(tmp_path / "model.safetensors", model())(x), converted(x))
    assert rewire.dense_state_dict(converted)["0.weight"].shape == (12, 20)
    found = rewire.snip(
        model(), [(x, torch.zeros(7, dtype=torch.long))], F.cross_entropy, sparsity=0.5
    )
    assert isinstance(found[0], SparseLinear)
    assert isinstance(rewire.densify(found)[0], Conv1D)


def test_on_the_meta_device() -> None:
    with torch.device("meta"):
        layers = nn.Sequential(Conv1D(1_000_000, 1_000_000), Falcon(1_000_000, 100))
    converted = rewire.sparsify(layers, connections=5000)
    assert sum(layer.count for layer in converted) == 5000  # type: ignore[misc,operator]
    assert converted[0].weight.shape == (1_000_000, 1_000_000)


def test_classes_of_libraries_are_known_by_name() -> None:
    names = {
        "__module__": "timm.layers.linear",
        "__qualname__": "Linear",
        "forward": Falcon.forward,
    }
    known = type("Linear", (nn.Linear,), names)
    other = type("Linear", (nn.Linear,), {**names, "__module__": "timm.layers.other"})
    model = nn.Sequential(known(4, 4), other(4, 4))
    with pytest.warns(
        UserWarning, match=r"timm\.layers\.other\.Linear has a forward of its own: 1 "
    ):
        rewire.sparsify(model, 0.5)
    assert isinstance(model[0], SparseLinear)


def test_a_forward_that_differs_stays_dense() -> None:
    class Patched(Conv1D):
        def forward(self, x: Tensor) -> Tensor:
            return -super().forward(x)

    model = nn.ModuleList([Scaled(9, 9), Padded(2, 2, 3), Patched(9, 9), nn.Linear(9, 9)])
    with pytest.warns(UserWarning, match="3 layers stay dense") as caught:
        rewire.sparsify(model, 0.5)
    assert [type(m) for m in model] == [Scaled, Padded, Patched, SparseLinear]
    for reason in ("Scaled has a forward", "Padded has a forward", "no sparse Patched"):
        assert reason in str(caught[0].message)


def test_what_cannot_be_registered() -> None:
    with pytest.raises(TypeError, match="expected a class of modules"):
        rewire.register_layer(nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="transposed=True"):
        rewire.register_layer(nn.Bilinear)


# Ties ---------------------------------------------------------------------------------------------


class Language(nn.Module):
    """An embedding, a block, and a head with the embedding's weight."""

    def __init__(self, transposed: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 12)
        self.fc = Conv1D(24, 12) if transposed else nn.Linear(12, 24)
        self.proj = Falcon(24, 12)
        self.head = nn.Linear(12, 30, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        return self.head(x + self.proj(F.gelu(self.fc(x))))  # type: ignore[no-any-return]


def test_a_tied_head_is_named_and_stays_tied() -> None:
    torch.manual_seed(0)
    language = Language().double()
    with pytest.warns(UserWarning, match="tied weights: embedding.weight = head.weight"):
        rewire.sparsify(language, 0.5)
    assert language.head.weight is language.embedding.weight
    assert_twins(language, torch.randint(30, (2, 5), generator=seeded(1)))
    assert language.head.weight is language.embedding.weight
    dense = rewire.densify(language)
    assert dense.head.weight is dense.embedding.weight


def test_transposed_layers_that_are_tied_stay_dense() -> None:
    layers = nn.ModuleList([Conv1D(6, 6), Conv1D(6, 6), Conv1D(6, 6), nn.Linear(6, 6)])
    layers[1].weight = layers[0].weight
    layers[3].bias = layers[2].bias
    with pytest.raises(
        ValueError, match=r"no layer to convert:\n  tied weights: 0\.weight = 1\.weight"
    ):
        rewire.sparsify(layers, 0.5)
    assert layers[1].weight is layers[0].weight
    assert [type(layer) for layer in layers] == [Conv1D] * 3 + [nn.Linear]


def test_tying_a_converted_layer_raises() -> None:
    language = Language()
    language.head = nn.Linear(12, 30)
    rewire.sparsify(language, 0.5)
    with pytest.raises(AttributeError, match=r"cannot be assigned.*to tie it.*keep_dense"):
        language.head.weight = language.embedding.weight


# Converting again ---------------------------------------------------------------------------------


def test_a_new_head_alone_is_converted() -> None:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(20, 40), nn.ReLU(), nn.Linear(40, 10))
    rewire.sparsify(body, 0.9)
    first, values = body[0], body[0].values.detach().clone()  # type: ignore[operator,union-attr]
    body[2] = nn.Linear(40, 25)
    again = rewire.sparsify(body, 0.8)
    assert again is body
    assert body[0] is first
    assert torch.equal(first.values, values)  # type: ignore[arg-type]
    assert body[2].count == 200  # type: ignore[union-attr]  # of 1000
    x = torch.randn(64, 20, generator=seeded(1))
    assert rewire.explain(body, x).recorded == (2 if native.available() else 0)
    assert_twins(body.double(), x.double())


def test_what_was_kept_dense_is_kept_by_saying_so_again() -> None:
    body = nn.Sequential(nn.Linear(20, 40), nn.Linear(40, 10), nn.Linear(10, 10))
    rewire.sparsify(body, 0.9, keep_dense="2")
    body[1] = nn.Linear(40, 10)
    rewire.sparsify(body, connections=77, keep_dense="2")
    assert [type(layer) for layer in body] == [SparseLinear, SparseLinear, nn.Linear]
    assert body[1].count == 77  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"leaves out all that it has\n  sparse already.*: 0, 1$"):
        rewire.sparsify(body, 0.5, keep_dense="2")


def test_storages_are_not_mixed() -> None:
    body = rewire.sparsify(nn.Sequential(nn.Linear(9, 9), nn.ReLU()), 0.5, storage="masked")
    body[1] = nn.Linear(9, 9)
    with pytest.raises(ValueError, match='pass storage="masked"'):
        rewire.sparsify(body, 0.5)
    rewire.sparsify(body, 0.5, storage="masked")
    assert isinstance(body[1], MaskedLinear)


def test_why_nothing_is_converted() -> None:
    for empty, why in (
        (nn.Sequential(nn.ReLU()), "it needs an nn.Linear or nn.Conv2d"),
        (nn.Sequential(Scaled(3, 3)), "Scaled has a forward of its own: 0"),
    ):
        with pytest.raises(ValueError, match=f"no layer to convert:\\s+.*{why}"):
            rewire.sparsify(empty, 0.5)
    with pytest.raises(ValueError, match="keep_dense= or density= leaves out all that it has"):
        rewire.sparsify(nn.Linear(3, 3), 0.5, keep_dense="*")


# What public models do with weights ---------------------------------------------------------------


class Patches(nn.Module):
    """CLIP, DeiT, DINOv2, SigLIP, ViT, XCiT: the type and device of a convolution's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 12, 4, 4)
        self.mixed = nn.Conv2d(12, 12, 3)
        self.position = nn.Parameter(torch.randn(1, 4, 12))
        self.dense = nn.Linear(12, 5)

    def forward(self, image: Tensor) -> Tensor:
        weight = self.embed.weight
        x = self.embed(image.to(dtype=weight.dtype, device=weight.device))
        x = F.conv2d(
            F.pad(x, (1, 1, 1, 1)), self.mixed.weight, self.mixed.bias
        )  # with padding of its own
        x = x.flatten(2).transpose(1, 2) + self.position
        if isinstance(self.dense.weight, torch.Tensor) and x.dtype != self.dense.weight.dtype:  # T5
            x = x.to(self.dense.weight.dtype)
        return self.dense(x)  # type: ignore[no-any-return]


class Attention(nn.Module):
    """BEiT, EVA, Swin v2: a product with a bias that is put together in each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(12, 36, bias=False)
        self.q_bias, self.v_bias = nn.Parameter(torch.randn(12)), nn.Parameter(torch.randn(12))
        self.register_buffer("k_bias", torch.zeros(12), persistent=False)
        self.proj = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        bias = torch.cat((self.q_bias, self.k_bias, self.v_bias))  # type: ignore[arg-type]
        qkv = F.linear(x, weight=self.qkv.weight, bias=bias)
        q, k, v = qkv.reshape(*x.shape[:-1], 3, 2, 6).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.proj(mixed)  # type: ignore[no-any-return]


class StateSpace(nn.Module):
    """Mamba: the weight on the left; RWKV: layers that are scaled in place in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(12, 4)
        self.step = nn.Linear(4, 12)
        self.out = nn.Linear(12, 12, bias=False)
        self.scaled = False

    def forward(self, x: Tensor) -> Tensor:
        if self.scaled != (not self.training):
            with torch.no_grad():
                if hasattr(self.out.weight, "quant_state"):
                    raise AssertionError
                (self.out.weight.mul_ if self.training else self.out.weight.div_)(4)
            self.scaled = not self.training
        steps = self.step.weight @ self.project(x).transpose(1, 2)
        y = F.softplus(steps + self.step.bias[:, None]).transpose(1, 2) * x
        return self.out(y) * (1 if self.training else 4)  # type: ignore[no-any-return]


PUBLIC: dict[str, tuple[type[nn.Module], tuple[int, ...]]] = {
    "patches": (Patches, (3, 3, 8, 8)),
    "attention": (Attention, (3, 5, 12)),
    "state space": (StateSpace, (3, 5, 12)),
}


@pytest.mark.parametrize("engine", [True, False])
@pytest.mark.parametrize("name", PUBLIC)
def test_public_models_equal_their_twins(name: str, engine: bool) -> None:
    kind, shape = PUBLIC[name]
    torch.manual_seed(0)
    public = kind().double()
    dense = copy.deepcopy(public)
    rewire.sparsify(public, density=0.5, weights="keep", engine=engine)
    assert any(isinstance(layer, SparseLinear | SparseConv2d) for layer in public.modules())
    x = torch.randn(shape, generator=seeded(1), dtype=torch.float64)
    assert public(x).shape == dense(x).shape
    assert_twins(public, x)


def test_a_scaled_layer_is_what_it_was() -> None:
    torch.manual_seed(0)
    public = rewire.sparsify(StateSpace(), 0.5)
    before: Tensor = public.out.values.detach().clone()
    x = torch.randn(3, 5, 12, generator=seeded(1))
    expected = public(x)
    public.eval()
    torch.testing.assert_close(public(x), expected)
    assert torch.equal(public.out.values, before / 4)
    public.train()
    assert torch.equal(public(x), expected)


def test_experts_are_named_by_parameter() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = (nn.Parameter(torch.randn(4, 8, 8)) for _ in range(2))
            self.router = nn.Linear(8, 4)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rewire.sparsify(nn.ModuleDict({"moe": Experts()}), 0.5)
    text = "no sparse Experts, whose up, down hold matrices in 3-D parameters (experts): moe (93 %"
    (warning,) = caught
    assert text in str(warning.message)
