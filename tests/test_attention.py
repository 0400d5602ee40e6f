"""Users' transformers: torch's attention and transformer layers, converted."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import rewire
from rewire import SparseLayer, SparseLinear, SparseMultiheadAttention

pytestmark = pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype:UserWarning")

DIM, HEADS, BATCH, TARGET, SOURCE = 8, 2, 3, 4, 5
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "out_proj"]

MODULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "batch first": {"batch_first": True},
    "no bias": {"bias": False},
    "other sizes": {"kdim": 6, "vdim": 7},
    "one other size": {"kdim": 6, "batch_first": True, "bias": False},
    "more keys": {"add_bias_kv": True},
    "zero key": {"add_zero_attn": True, "batch_first": True},
    "both": {"add_bias_kv": True, "add_zero_attn": True, "dropout": 0.5},
}
causal = torch.ones(TARGET, SOURCE, dtype=torch.bool).triu(1)
padded = torch.arange(SOURCE) >= torch.tensor([[5], [3], [1]])
per_head = torch.arange(BATCH * HEADS * TARGET * SOURCE).view(-1, TARGET, SOURCE) % 3 == 1
CALLS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "no weights": {"need_weights": False},
    "each head": {"average_attn_weights": False},
    "mask": {"attn_mask": causal},
    "causal": {"attn_mask": causal, "is_causal": True, "need_weights": False},
    "causal with weights": {"attn_mask": causal, "is_causal": True},
    "additive": {"attn_mask": torch.randn(TARGET, SOURCE, dtype=torch.float64)},
    "mask by head": {"attn_mask": per_head, "need_weights": False},
    "padding": {"key_padding_mask": padded},
    "padding, no weights": {"key_padding_mask": padded, "need_weights": False},
    "padding, causal": {
        "key_padding_mask": padded,
        "attn_mask": causal,
        "is_causal": True,
        "need_weights": False,
    },
}


def attention(**settings: Any) -> nn.MultiheadAttention:
    torch.manual_seed(1)
    module = nn.MultiheadAttention(DIM, HEADS, **settings, dtype=torch.float64)
    for parameter in module.parameters():  # torch starts biases at zero
        nn.init.normal_(parameter, std=0.5)
    return module


def kept(model: nn.Module, sparsity: float = 0.0, **more: Any) -> Any:
    return rewire.sparsify(copy.deepcopy(model), sparsity, weights="keep", **more)


def inputs(module: nn.MultiheadAttention) -> list[Tensor]:
    torch.manual_seed(2)
    sizes = ((TARGET, module.embed_dim), (SOURCE, module.kdim), (SOURCE, module.vdim))
    shapes = [(BATCH, t, f) if module.batch_first else (t, BATCH, f) for t, f in sizes]
    return [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]


def same(mine: Any, theirs: Any) -> None:
    for a, b in zip(mine, theirs, strict=True):
        assert (a is None) == (b is None)
        if b is not None:
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("settings", MODULES)
def test_attention_with_all_weights_is_torchs(settings: str, call: str) -> None:
    module = attention(**MODULES[settings]).eval()
    sparse = kept(module)
    assert isinstance(sparse, SparseMultiheadAttention)
    given = inputs(module)
    mine, theirs = sparse(*given, **CALLS[call]), module(*given, **CALLS[call])
    same(mine, theirs)
    ours = torch.autograd.grad(mine[0].square().sum(), given)
    same(ours, torch.autograd.grad(theirs[0].square().sum(), given))


@pytest.mark.parametrize("settings", MODULES)
def test_gradients_of_the_projections_are_torchs(settings: str) -> None:
    module = attention(**{**MODULES[settings], "dropout": 0.0})
    sparse = kept(module)
    for each in (module, sparse):
        each(*inputs(module))[0].square().sum().backward()
    weights = [module.q_proj_weight, module.k_proj_weight, module.v_proj_weight]
    if module.in_proj_weight is not None:
        grads = [*module.in_proj_weight.grad.split(DIM)]  # type: ignore[union-attr]
    else:
        grads = [weight.grad for weight in weights]
    grads.append(module.out_proj.weight.grad)
    same([getattr(sparse, p).values.grad for p in PROJECTIONS], [g.view(-1, 1) for g in grads])
    if module.bias_k is not None:
        same([sparse.bias_k.grad], [module.bias_k.grad])


@pytest.mark.parametrize("settings", ["plain", "batch first", "both"])
def test_one_sequence_without_a_batch(settings: str) -> None:
    module = attention(**MODULES[settings]).eval()
    given = [torch.randn(n, DIM, dtype=torch.float64) for n in (TARGET, SOURCE, SOURCE)]
    padding, by_head = padded[1], per_head[:HEADS]
    for call in ({}, {"key_padding_mask": padding}, {"attn_mask": by_head}, {"attn_mask": causal}):
        same(kept(module)(*given, **call), module(*given, **call))


def test_fewer_weights_are_torchs_with_zeros() -> None:
    module = attention(batch_first=True, dropout=0.3)
    sparse = kept(module, 0.5)
    assert all(isinstance(getattr(sparse, p), SparseLinear) for p in PROJECTIONS)
    assert sum(layer.values.numel() for layer in layers_of(sparse).values()) == 4 * DIM * DIM // 2
    dense = rewire.densify(copy.deepcopy(sparse))
    assert type(dense) is nn.MultiheadAttention
    assert int((dense.in_proj_weight == 0).sum()) == 3 * DIM * DIM // 2
    x = torch.randn(BATCH, TARGET, DIM, dtype=torch.float64)
    with torch.no_grad():  # where torch takes its fused path
        same(sparse.eval()(x, x, x), dense.eval()(x, x, x))
    for seed in range(2):  # dropout of the weights, in training, from the same random numbers
        outs = []
        for each in (sparse, dense):
            torch.manual_seed(seed)
            outs.append(each.train()(x, x, x, need_weights=True))
        same(*outs)


@pytest.mark.parametrize("settings", MODULES)
def test_densify_gives_the_module_back(settings: str) -> None:
    module = attention(**MODULES[settings]).eval()
    module.out_proj.weight.requires_grad_(False)
    back = rewire.densify(kept(module))
    assert type(back) is nn.MultiheadAttention
    assert type(back.out_proj) is type(module.out_proj)
    assert back.state_dict().keys() == module.state_dict().keys()
    for name, parameter in module.named_parameters():
        mine = back.get_parameter(name)
        assert torch.equal(mine, parameter)
        assert mine.requires_grad == parameter.requires_grad
    given = inputs(module)
    same(back(*given), module(*given))


def layers_of(model: nn.Module) -> dict[str, SparseLayer]:
    return {n: m for n, m in model.named_modules() if isinstance(m, SparseLayer)}


# Transformers -------------------------------------------------------------------------------------


def encoder(**settings: Any) -> nn.TransformerEncoder:
    torch.manual_seed(3)
    settings = {"batch_first": True, "dropout": 0.0, "dtype": torch.float64, **settings}
    layer = nn.TransformerEncoderLayer(DIM, HEADS, 16, **settings)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=not settings.get("norm_first"))


@pytest.mark.parametrize("settings", [{}, {"norm_first": True}, {"activation": "gelu"}])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("grad", [True, False])
def test_encoders_give_what_torchs_give(
    settings: dict[str, Any], training: bool, grad: bool
) -> None:
    model = encoder(**settings).train(training)
    sparse = kept(model)
    assert len(layers_of(sparse)) == 2 * 6
    x = torch.randn(BATCH, SOURCE, DIM, dtype=torch.float64)
    mask = torch.ones(SOURCE, SOURCE, dtype=torch.bool).triu(1)
    with torch.set_grad_enabled(grad):
        for call in ({}, {"mask": mask}, {"src_key_padding_mask": padded}):
            mine, theirs = sparse(x, **call), model(x, **call)
            if "src_key_padding_mask" in call:  # torch's nested tensors have zeros there
                mine, theirs = (y.masked_fill(padded[..., None], 0) for y in (mine, theirs))
            torch.testing.assert_close(mine, theirs)
            inner = kept(model).layers[0]  # called by itself
            torch.testing.assert_close(inner(x), model.layers[0](x))


def test_fused_inference_does_not_pass_by_the_sparse_layers() -> None:
    model = encoder().eval()
    sparse = kept(model, keep_dense="*.self_attn")  # and with an attention that torch could fuse
    assert type(sparse.layers[0].self_attn) is nn.MultiheadAttention
    for changed in (kept(model), sparse):
        x = torch.randn(BATCH, SOURCE, DIM, dtype=torch.float64)
        with torch.no_grad():
            changed(x, src_key_padding_mask=padded)
            before = changed(x)
            torch.testing.assert_close(before, model(x))
            changed.layers[1].linear2.values.mul_(2)
            assert not torch.allclose(changed(x), before)
            training = changed.train()(x)
            torch.testing.assert_close(changed.eval()(x), training)


def test_densify_allows_torchs_fused_path_again() -> None:
    model = encoder().eval()
    back = rewire.densify(kept(model))
    assert back.use_nested_tensor
    assert vars(back.layers[0]).keys() == vars(model.layers[0]).keys()
    assert back.layers[0].activation_relu_or_gelu == model.layers[0].activation_relu_or_gelu == 1
    x = torch.randn(BATCH, SOURCE, DIM, dtype=torch.float64)
    with torch.no_grad():
        mine, theirs = (m(x, src_key_padding_mask=padded) for m in (back, model))
    assert torch.equal(mine, theirs)


def test_a_whole_transformer_is_converted() -> None:
    torch.manual_seed(4)
    model = nn.Transformer(DIM, HEADS, 1, 2, 16, 0.0, batch_first=True, dtype=torch.float64)
    sparse = kept(model)
    assert len(layers_of(sparse)) == 6 + 2 * 10
    source = torch.randn(BATCH, SOURCE, DIM, dtype=torch.float64)
    target = torch.randn(BATCH, TARGET, DIM, dtype=torch.float64)
    mask = nn.Transformer.generate_square_subsequent_mask(TARGET, dtype=torch.float64)
    calls: list[dict[str, Any]] = [{}, {"tgt_mask": mask, "tgt_is_causal": True}]
    calls.append({"memory_key_padding_mask": padded, "tgt_mask": mask})
    for call in calls:
        torch.testing.assert_close(sparse(source, target, **call), model(source, target, **call))


class Mine(nn.Module):
    """A user's model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, DIM)
        layer = nn.TransformerEncoderLayer(DIM, HEADS, 16, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2)
        self.pool = nn.MultiheadAttention(DIM, HEADS, add_bias_kv=True, batch_first=True)
        self.head = nn.Linear(DIM, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.body(self.embedding(tokens))
        x = self.pool(x.mean(1, keepdim=True), x, x)[0]
        return self.head(x.squeeze(1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("distribution", ["uniform", "graest"])
def test_a_users_transformer_trains_and_rewires(distribution: str) -> None:
    torch.manual_seed(5)
    model = rewire.sparsify(Mine(), sparsity=0.6)
    before = sum(layer.values.numel() for layer in layers_of(model).values())
    assert {n for n in layers_of(model) if n.startswith("pool")} == {
        f"pool.{p}" for p in PROJECTIONS
    }
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    rewirer = rewire.GSE(model, optimizer, every=5, until=60, distribution=distribution)
    tokens = torch.randint(11, (64, 6))
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens), tokens[:, 0])
        loss.backward()
        optimizer.step()
        rewirer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert rewirer.history[-1].grown > 0
    assert sum(layer.values.numel() for layer in layers_of(model).values()) == before
    other = rewire.sparsify(Mine(), sparsity=0.6, seed=1)
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(other.eval()(tokens), model.eval()(tokens))


@pytest.mark.parametrize("into", ["dense", "sparse", "meta"])
def test_a_transformer_is_saved_and_loaded(into: str, tmp_path: Path) -> None:
    model = rewire.sparsify(encoder(), sparsity=0.7)
    path = tmp_path / "encoder.safetensors"
    rewire.save(model, path)
    with torch.device("meta" if into == "meta" else "cpu"):
        other: nn.Module = encoder()
    if into == "sparse":
        other = rewire.sparsify(other, sparsity=0.9, seed=7)
    loaded = rewire.load(path, other)
    assert layers_of(loaded).keys() == layers_of(model).keys()
    mine, theirs = loaded.state_dict(), model.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())
    x = torch.randn(2, 5, DIM, dtype=torch.float64)
    for part in (model, loaded):
        part.eval()
    assert torch.equal(loaded(x), model(x))


def test_meta_models_are_built_sparse() -> None:
    with torch.device("meta"):
        model = Mine()
    model = rewire.sparsify(model, sparsity=0.6, keep_dense="pool.v_proj")
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert type(model.pool.v_proj) is nn.Linear
    assert model.pool.bias_k.abs().max() > 0
    assert model(torch.zeros(2, 3, dtype=torch.long)).isfinite().all()


def test_projections_that_stay_dense() -> None:
    module = attention(bias=True)
    sparse = kept(module, 0.5, keep_dense=["q_proj", "out_proj"])
    assert [type(getattr(sparse, p)) for p in PROJECTIONS[1:3]] == [SparseLinear] * 2
    assert torch.equal(sparse.q_proj.weight, module.in_proj_weight[:DIM])
    assert sparse.q_proj.weight.untyped_storage().nbytes() == 8 * DIM * DIM
    back = rewire.densify(sparse)
    assert torch.equal(back.in_proj_weight[:DIM], module.in_proj_weight[:DIM])
    alone = nn.ModuleDict({"attention": module, "linear": nn.Linear(5, 5)})
    assert rewire.sparsify(alone, 0.5, keep_dense="attention")["attention"] is module


def test_hooks_and_frozen_parameters_stay() -> None:
    module = attention()
    module.in_proj_bias.requires_grad_(False)
    calls: list[str] = []
    handle = module.register_forward_hook(lambda *_: calls.append("attention"))
    sparse = rewire.sparsify(nn.ModuleDict({"a": module}), 0.5)["a"]
    assert not sparse.q_proj.bias.requires_grad
    assert sparse.q_proj.values.requires_grad
    sparse(*inputs(module))
    assert calls == ["attention"]
    handle.remove()
    sparse(*inputs(module))
    assert calls == ["attention"]


class Own(nn.MultiheadAttention):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, x, x)[0]


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (Own(DIM, HEADS), "Own has a forward of its own"),
        (
            parametrizations.orthogonal(nn.MultiheadAttention(DIM, HEADS), "in_proj_weight"),
            "computed",
        ),
    ],
)
def test_attentions_that_cannot_be_taken_apart_stay_dense(module: nn.Module, reason: str) -> None:
    model = nn.ModuleDict({"attention": module, "linear": nn.Linear(9, 9)})
    with pytest.warns(UserWarning, match=rf"1 layer .*\n.*{reason}.*: attention \("):
        rewire.sparsify(model, 0.5)
    assert model["attention"] is module
    assert list(layers_of(model)) == ["linear"]


def test_tied_attentions_stay_dense() -> None:
    model = nn.ModuleDict({"a": attention(), "b": attention(), "linear": nn.Linear(9, 9)})
    model["b"].in_proj_weight = model["a"].in_proj_weight
    with pytest.warns(
        UserWarning,
        match=r"2 layers .*\n  tied weights: a.in_proj_weight = b.in_proj_weight \(81 %",
    ):
        rewire.sparsify(model, 0.5)
    assert model["b"].in_proj_weight is model["a"].in_proj_weight
    shared = attention()
    twice = rewire.sparsify(nn.ModuleDict({"a": shared, "b": shared}), 0.5)
    assert twice["a"] is twice["b"]
    assert isinstance(twice["a"], SparseMultiheadAttention)


def test_an_error_leaves_the_model_as_it_was() -> None:
    model = nn.ModuleDict({"a": attention()})
    inside = dict(model.named_modules())
    with pytest.raises(ValueError, match="matches no layer"):
        rewire.sparsify(model, 0.5, keep_dense="b")
    assert dict(model.named_modules()) == inside


def test_summary_shows_the_projections() -> None:
    model = rewire.sparsify(Mine(), sparsity=0.6)
    found = rewire.summary(model, show=False)
    rows = {row.name: row for row in found.layers}
    assert {f"pool.{p}" for p in PROJECTIONS} <= rows.keys()
    assert "pool" not in rows
    assert rows["body.layers.0.self_attn.q_proj"].shape == (DIM, DIM)
    assert found.dense_parameters == sum(p.numel() for p in Mine().parameters())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"attn_mask": torch.zeros(1, SOURCE)}, r"attn_mask has shape \(1, 5\), expected \(4, 5\)"),
        (
            {"key_padding_mask": padded[:2]},
            r"key_padding_mask has shape \(2, 5\), expected \(3, 5\)",
        ),
        ({"attn_mask": causal.int()}, "attn_mask must be boolean or real numbers"),
        ({"is_causal": True}, "hint about attn_mask"),
    ],
)
def test_masks_are_checked(call: dict[str, Any], message: str) -> None:
    module = attention()
    with pytest.raises(ValueError, match=message):
        kept(module)(*inputs(module), **call)


def test_nested_tensors_are_refused() -> None:
    sparse = kept(attention(batch_first=True))
    x = torch.nested.nested_tensor([torch.zeros(2, DIM), torch.zeros(3, DIM)]).double()
    with pytest.raises(ValueError, match="no nested"):
        sparse(x, x, x)
