"""What a rewiring leaves alone: values, optimizer state, groups and schedules."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import rewire
from rewire import SparseLinear
from rewirings import (
    LONG,
    batch_of,
    default_loss,
    layers_of,
    mlp,
    scopes,
    seeded,
    state_by_key,
    values_of,
)

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "SGD momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-2}),
    "SGD dampening": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3}),
    "SGD Nesterov": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "Adam": (torch.optim.Adam, {"lr": 0.01, "weight_decay": 1e-2}),
    "Adam amsgrad": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01}),
    "AdamW amsgrad": (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.01}),
    "RAdam": (torch.optim.RAdam, {"lr": 0.01}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01}),
    "RMSprop centered": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.01}),
    "Adagrad start": (torch.optim.Adagrad, {"lr": 0.01, "initial_accumulator_value": 0.7}),
    "Adadelta": (torch.optim.Adadelta, {}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.01}),
    "ASGD": (torch.optim.ASGD, {"lr": 0.01, "t0": 1.0}),
    "Rprop": (torch.optim.Rprop, {"lr": 0.013}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.01}),
}
FUSED = {"SGD", "Adam", "AdamW", "Adagrad"}
VARIANTS = [
    pytest.param(kind, options | variant, id=f"{name} {' '.join(variant)}".strip())
    for name, (kind, options) in OPTIMIZERS.items()
    for variant in ({}, {"foreach": False}, {"foreach": True}, {"fused": True})
    if variant != {"fused": True} or name.split()[0] in FUSED
]


def fresh_state(name: str, options: dict[str, Any]) -> float:
    """What an optimizer starts a parameter's state with."""
    start = {"step_size": options["lr"]} if "lr" in options else {}  # of Rprop
    start["sum"] = options.get("initial_accumulator_value", 0.0)  # of Adagrad
    return start.get(name, 0.0)


@scopes
@pytest.mark.parametrize(("kind", "options"), VARIANTS)
def test_survivors_keep_values_and_optimizer_state(
    kind: Any, options: dict[str, Any], scope: str
) -> None:
    model = mlp(dtype=torch.float32)
    optimizer = kind(model.parameters(), **options)
    rewirer = rewire.GSE(model, optimizer, every=3, until=LONG, fraction=0.3, scope=scope)
    parameters = list(model.parameters())
    for step in range(7):
        optimizer.zero_grad()
        default_loss(model, batch_of(model, step)).backward()
        optimizer.step()
        values = values_of(model)
        states = [state_by_key(optimizer, layer) for layer in layers_of(model)]
        biases = [layer.bias.detach().clone() for layer in layers_of(model)]  # type: ignore[union-attr]
        bias_states = [copy.deepcopy(optimizer.state[layer.bias]) for layer in layers_of(model)]  # type: ignore[index]
        result = rewirer.step()
        assert (result is not None) == (step % 3 == 2)
        changed = 0
        for i, (layer, now) in enumerate(zip(layers_of(model), values_of(model), strict=True)):
            grown, kept = now.keys() - values[i].keys(), now.keys() & values[i].keys()
            changed += len(grown)
            assert all(now[key] == values[i][key] for key in kept)
            assert all(now[key] == 0.0 for key in grown)
            state = state_by_key(optimizer, layer)
            assert state.keys() == states[i].keys()
            for name, value in state.items():
                old = states[i][name]
                if isinstance(value, dict):
                    assert value.keys() == now.keys()
                    assert all(value[key] == old[key] for key in kept)
                    fresh = torch.tensor(fresh_state(name, options)).item()
                    assert all(value[key] == fresh for key in grown)
                elif name == "col_var":  # of Adafactor: of a single column
                    rows = torch.tensor(list(state["row_var"].values()))
                    torch.testing.assert_close(value, rows.mean().view(1, 1))
                else:
                    assert torch.equal(torch.as_tensor(value), torch.as_tensor(old))
            assert torch.equal(layer.bias.detach(), biases[i])  # type: ignore[union-attr]
            bias_state = optimizer.state[layer.bias]  # type: ignore[index]
            for name, value in bias_states[i].items():
                assert torch.equal(torch.as_tensor(bias_state[name]), torch.as_tensor(value))
        assert (changed > 0) == (result is not None)
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert [id(p) for p in held] == [id(p) for p in parameters]
    assert [id(p) for p in model.parameters()] == [id(p) for p in parameters]
    assert {id(p) for p in optimizer.state} <= {id(p) for p in parameters}
    assert all(bool(p.isfinite().all()) for p in parameters)


def test_state_of_an_unknown_shape_raises_and_nothing_is_changed() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    rewirer = rewire.GSE(model, optimizer, every=1, until=LONG)
    default_loss(model, batch_of(model)).backward()
    optimizer.step()
    optimizer.state[model[4].values]["odd"] = torch.zeros(3, 7)
    before = values_of(model)
    with pytest.raises((ValueError, RuntimeError, TypeError), match="odd"):
        rewirer.step()
    assert values_of(model) == before
    assert all(
        optimizer.state[layer.values]["momentum_buffer"].shape == layer.values.shape
        for layer in layers_of(model)
    )


def test_a_layer_with_one_connection_keeps_the_scalars_of_its_state() -> None:
    """Where the length of the values and of a scalar cannot be told apart by counting."""
    model = nn.Sequential(
        SparseLinear(12, 9, connections=30, generator=seeded(0)),
        nn.Tanh(),
        SparseLinear(9, 5, connections=1, generator=seeded(1)),
    )
    for name in ("Adam", "NAdam", "ASGD", "Adafactor"):
        kind, options = OPTIMIZERS[name]
        twin = copy.deepcopy(model)
        optimizer = kind(twin.parameters(), **options)
        rewirer = rewire.GSE(twin, optimizer, every=2, until=LONG, fraction=0.5)
        for step in range(8):
            optimizer.zero_grad()
            default_loss(twin, batch_of(twin, step)).backward()
            optimizer.step()
            rewirer.step()
        for layer in layers_of(twin):
            assert float(optimizer.state[layer.values]["step"]) == 8


def grouped(model: nn.Module) -> list[dict[str, Any]]:
    weights = [layer.values for layer in layers_of(model)]
    biases = [layer.bias for layer in layers_of(model)]
    return [
        {"params": biases, "weight_decay": 0.0},
        {"params": weights[:1], "lr": 0.05},
        {"params": weights[1:], "momentum": 0.5},
    ]


def test_several_groups_and_lr_schedulers_are_unaffected() -> None:
    def train(rewired: bool) -> tuple[list[Any], list[Any]]:
        model = mlp()
        optimizer = torch.optim.SGD(grouped(model), lr=0.1, momentum=0.9, weight_decay=1e-2)
        scheduler = torch.optim.lr_scheduler.SequentialLR(
            optimizer,
            [
                torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=4),
                torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
            ],
            milestones=[4],
        )
        rewirer = rewire.GSE(model, optimizer, every=2, until=LONG) if rewired else None
        seen = []
        for step in range(9):
            optimizer.zero_grad()
            default_loss(model, batch_of(model, step)).backward()
            optimizer.step()
            if rewirer is not None:
                rewirer.step()
            scheduler.step()
            seen.append(
                [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
            )
        names = {id(p): name for name, p in model.named_parameters()}
        return seen, [[names[id(p)] for p in g["params"]] for g in optimizer.param_groups]

    assert train(True) == train(False)


def test_groups_and_default_arguments_together_train() -> None:
    """Weight decay and momentum of each group act on what survives, as without groups."""
    model, twin = mlp(), mlp()
    optimizers = (
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        torch.optim.SGD([{"params": [p]} for p in twin.parameters()], lr=0.1, momentum=0.9),
    )
    for each, optimizer in zip((model, twin), optimizers, strict=True):
        rewirer = rewire.GSE(each, optimizer, every=2, until=LONG)
        for step in range(6):
            optimizer.zero_grad()
            default_loss(each, batch_of(each, step)).backward()
            optimizer.step()
            rewirer.step()
    assert values_of(model) == values_of(twin)
