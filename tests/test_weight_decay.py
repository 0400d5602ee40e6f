"""Weight decay: the usual rules find sparse weights. And optimizers that treat matrices differently."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rewire

Groups = list[dict[str, Any]]
DECAY = 0.1


class Net(nn.Module):
    """All that a rule may meet."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 6, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(6)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.layer_norm = nn.LayerNorm(6)
        self.fc = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv(x))).flatten(2).transpose(1, 2)
        x = self.layer_norm(x + self.attention(x, x, x)[0])
        return self.fc(x.mean(1))  # type: ignore[no-any-return]


def timm_rule(model: nn.Module) -> Groups:
    """``timm.optim.param_groups_weight_decay``."""
    decay, no_decay = [], []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            small = parameter.ndim <= 1 or name.endswith(".bias")
            (no_decay if small else decay).append(parameter)
    return [{"params": no_decay, "weight_decay": 0.0}, {"params": decay, "weight_decay": DECAY}]


def nano_rule(model: nn.Module) -> Groups:
    """``configure_optimizers`` of nanoGPT."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": DECAY},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def mini_rule(model: nn.Module, for_sparse: bool = True) -> Groups:
    """``configure_optimizers`` of minGPT, with the two lines of docs/methods.md or without."""
    decay, no_decay = set(), set()
    whitelist = (nn.Linear, nn.Conv2d, nn.MultiheadAttention)
    blacklist = (nn.LayerNorm, nn.Embedding, nn.BatchNorm2d)
    for mn, m in model.named_modules():
        for pn, _ in m.named_parameters():
            fpn = f"{mn}.{pn}" if mn else pn
            if pn.endswith("bias"):
                no_decay.add(fpn)
            elif pn.endswith("weight") and isinstance(m, whitelist):
                decay.add(fpn)
            elif pn.endswith("weight") and isinstance(m, blacklist):
                no_decay.add(fpn)
            elif for_sparse and pn.endswith("values") and isinstance(m, rewire.SparseLayer):
                decay.add(fpn)
    found = dict(model.named_parameters())
    assert not decay & no_decay
    missing = found.keys() - (decay | no_decay)
    assert not missing, f"parameters {missing} were not separated into either set"
    return [
        {"params": [found[name] for name in sorted(decay)], "weight_decay": DECAY},
        {"params": [found[name] for name in sorted(no_decay)], "weight_decay": 0.0},
    ]


def real_timm_rule(model: nn.Module) -> Groups:
    optim = pytest.importorskip("timm.optim")
    groups: Groups = optim.param_groups_weight_decay(model, DECAY)
    return groups


RULES: dict[str, Callable[[nn.Module], Groups]] = {
    "timm": timm_rule,
    "nanoGPT": nano_rule,
    "minGPT": mini_rule,
    "timm itself": real_timm_rule,
}


def sparse() -> nn.Module:
    torch.manual_seed(0)
    return rewire.sparsify(Net().double(), sparsity=0.5, seed=0)


def names(model: nn.Module, groups: Groups, decay: float) -> set[str]:
    held = {id(p) for group in groups if group["weight_decay"] == decay for p in group["params"]}
    return {name for name, parameter in model.named_parameters() if id(parameter) in held}


@pytest.mark.parametrize("rule", RULES)
def test_values_are_decayed_and_biases_and_norms_are_not(rule: str) -> None:
    model = sparse()
    groups = RULES[rule](model)
    values = {name for name, _ in model.named_parameters() if name.endswith("values")}
    assert len(values) == 6
    assert names(model, groups, DECAY) == values
    assert names(model, groups, 0.0) == {name for name, _ in model.named_parameters()} - values


def test_mingpt_says_so_where_its_rule_does_not_know_sparse_layers() -> None:
    with pytest.raises(AssertionError, match=r"fc\.values.*were not separated"):
        mini_rule(sparse(), for_sparse=False)


@pytest.mark.parametrize("mode", [{"foreach": True}, {"foreach": False}, {"fused": True}], ids=str)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD])
@pytest.mark.parametrize("rule", ["timm", "nanoGPT"])
def test_a_step_is_that_of_the_dense_twin(rule: str, kind: Any, mode: dict[str, bool]) -> None:
    model = sparse()
    dense = rewire.densify(copy.deepcopy(model))
    masks = {p: p.detach() != 0 for p in dense.parameters() if p.dim() > 1}
    start = {name: value.detach().clone() for name, value in model.named_parameters()}
    optimizers = [kind(RULES[rule](m), lr=0.01, **mode) for m in (model, dense)]
    for step in range(3):
        x = torch.randn(4, 2, 5, 5, dtype=torch.float64)
        for m, optimizer in zip((model, dense), optimizers, strict=True):
            optimizer.zero_grad()
            F.cross_entropy(m(x), torch.arange(4)).backward()
            if m is dense:
                for weight, mask in masks.items():
                    assert weight.grad is not None
                    weight.grad *= mask
            optimizer.step()
        found = dict(rewire.densify(copy.deepcopy(model)).named_parameters())
        for name, weight in dense.named_parameters():
            torch.testing.assert_close(found[name], weight, rtol=1e-9, atol=1e-12)
        if (
            step == 0 and kind is torch.optim.AdamW
        ):  # its decay can be told from the gradient's part
            values = dict(model.named_parameters())["fc.values"]
            moved = values.detach() - start["fc.values"] * (1 - 0.01 * DECAY)
            torch.testing.assert_close(moved.abs(), torch.full_like(moved, 0.01), rtol=1e-4, atol=0)


# Optimizers that treat matrices in a way of their own -----------------------------------------------


@pytest.mark.parametrize("foreach", [True, False])
def test_adafactor_is_the_same_for_a_column_as_for_a_vector(foreach: bool) -> None:
    """Its factors say all there is to say: a row is an element, and the one column their mean."""
    torch.manual_seed(0)
    start = torch.randn(50, dtype=torch.float64)
    vector, column = nn.Parameter(start.clone()), nn.Parameter(start[:, None].clone())
    optimizers = [
        torch.optim.Adafactor([p], lr=0.1, weight_decay=0.1, foreach=foreach)
        for p in (vector, column)
    ]
    for _ in range(5):
        vector.grad = torch.randn(50, dtype=torch.float64)
        column.grad = vector.grad[:, None].clone()
        for optimizer in optimizers:
            optimizer.step()
        torch.testing.assert_close(column[:, 0], vector, rtol=1e-12, atol=0)
    state = optimizers[1].state[column]
    assert {key: tuple(value.shape) for key, value in state.items()} == {
        "step": (),
        "row_var": (50, 1),
        "col_var": (1, 1),
    }
    torch.testing.assert_close(state["col_var"], state["row_var"].mean(0, keepdim=True))


class Factored(torch.optim.Optimizer):
    """Adafactor as transformers and timm have it: means without the dimension that they go over."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state, square = self.state[p], p.grad.square() + 1e-30
                if p.dim() < 2:
                    variance = state.setdefault("exp_avg_sq", torch.zeros_like(p)).lerp_(
                        square, 0.1
                    )
                else:
                    rows = state.setdefault("exp_avg_sq_row", p.new_zeros(p.shape[:1]))
                    cols = state.setdefault("exp_avg_sq_col", p.new_zeros(p.shape[1:]))
                    rows.lerp_(square.mean(1), 0.1)
                    cols.lerp_(square.mean(0), 0.1)
                    variance = (rows / rows.mean())[:, None] * cols
                p -= group["lr"] * p.grad * variance.rsqrt()


class Vectors(torch.optim.Optimizer):
    """The same without factors."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                variance = self.state[p].setdefault("exp_avg_sq", torch.zeros_like(p))
                variance.lerp_(p.grad.square() + 1e-30, 0.1)
                p -= group["lr"] * p.grad * variance.rsqrt()


def mlp() -> nn.Module:
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 4)).double()
    return rewire.sparsify(dense, sparsity=0.6, seed=0)


def trained(kind: Any, steps: int = 7) -> nn.Module:
    model = mlp()
    optimizer = kind(model.parameters(), lr=0.01)
    # Of all connections: what is drawn may depend on the last bit of a gradient.
    rewirer = rewire.GSE(model, optimizer, every=2, until=8, fraction=0.5, subset=math.inf)
    grown = 0
    for i in range(steps):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(i)
        x = torch.randn(5, 12, generator=generator, dtype=torch.float64)
        model(x).square().mean().backward()
        optimizer.step()
        rewiring = rewirer.step()
        grown += rewiring.grown if rewiring else 0
    assert grown > 0
    return model


def test_factors_of_other_libraries_follow_a_rewiring() -> None:
    """Exactly as if the second moment were not factored."""
    found, expected = trained(Factored).state_dict(), trained(Vectors).state_dict()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("count", [1, 2, 20])
def test_factors_are_not_taken_for_old_state(count: int) -> None:
    layer = rewire.SparseLinear(4, 6, connections=count)
    optimizer = Factored(layer.parameters(), lr=0.1)
    layer(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    shapes = {key: value.shape for key, value in optimizer.state[layer.values].items()}
    rewire.Static(layer, optimizer)
    assert shapes == {"exp_avg_sq_row": (count,), "exp_avg_sq_col": (1,)}
    now = {key: value.shape for key, value in optimizer.state[layer.values].items()}
    assert now == shapes


def test_adafactor_of_other_libraries_goes_on() -> None:
    transformers = pytest.importorskip("transformers")

    def adafactor(parameters: Any, lr: float) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = transformers.Adafactor(
            parameters, lr=lr, scale_parameter=False, relative_step=False
        )
        return made

    model = trained(adafactor)
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_means_over_rows_of_masked_weights_are_refused_before_anything_changes() -> None:
    model = rewire.sparsify(nn.Sequential(nn.Linear(12, 16)), sparsity=0.5, storage="masked")
    optimizer = torch.optim.Adafactor(model.parameters(), lr=0.1)
    rewirer = rewire.SET(model, optimizer, every=1, until=8)
    model(torch.randn(3, 12)).sum().backward()
    optimizer.step()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="'row_var' of shape"):
        rewirer.step()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_muon_is_refused_by_rewirers() -> None:
    model = nn.Sequential(rewire.SparseLinear(4, 6, sparsity=0.5, bias=False))
    optimizer = torch.optim.Muon(model.parameters())
    with pytest.raises(ValueError, match="Muon cannot train sparse layers that are rewired"):
        rewire.SET(model, optimizer, until=1000)
