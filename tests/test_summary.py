"""The table of a model: its rows, its memory, its text."""

import copy

import pytest
import torch
from torch import nn

import rewire
from rewire import models


def a_model() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, (3, 2)), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(40, 10)
    )


def stored(module: nn.Module) -> int:
    tensors = [*module.parameters(), *module.buffers()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def test_rows_say_what_the_layers_hold() -> None:
    dense = a_model()
    model = rewire.sparsify(copy.deepcopy(dense), connections=100, keep_dense=["3"])
    conv, linear = rewire.summary(model, show=False).layers
    assert (conv.name, conv.kind, conv.shape) == ("0", "SparseConv2d", (8, 3, 3, 2))
    assert (conv.sparse, conv.connections, conv.weights) == (True, 100, 144)
    assert conv.density == pytest.approx(100 / 144)
    assert conv.memory == stored(model[0])
    assert conv.dense_memory == stored(dense[0])
    assert (linear.name, linear.kind, linear.shape) == ("3", "Linear", (10, 40))
    assert (linear.sparse, linear.connections, linear.density) == (False, 400, 1)
    assert linear.memory == linear.dense_memory == stored(dense[3])


@pytest.mark.parametrize("name", ["resnet20", "vgg11", "vit", "gpt"])
def test_totals_are_those_of_the_model(name: str) -> None:
    with torch.device("meta"):
        dense = models.build(name)
        model = models.build(name)
    found = rewire.summary(rewire.sparsify(model, 0.95), show=False)
    assert found.parameters == sum(p.numel() for p in model.parameters())
    assert found.dense_parameters == sum(p.numel() for p in dense.parameters())
    assert found.memory == stored(model)
    assert found.dense_memory == stored(dense)
    assert sum(row.memory for row in found.layers) + found.other_memory == found.memory
    sparse = [row for row in found.layers if row.sparse]
    assert found.connections == sum(row.connections for row in sparse)
    assert found.density == found.connections / sum(row.weights for row in sparse)


def test_it_prints_an_aligned_table_once(capsys: pytest.CaptureFixture[str]) -> None:
    model = rewire.sparsify(a_model().double(), connections=100)
    found = rewire.summary(model)
    printed = capsys.readouterr().out
    assert printed == f"{found}\n"
    header, rule, *rows, rule_again, total, parameters = printed.splitlines()
    assert rule == rule_again == "-" * len(header)
    assert {len(row) for row in (*rows, total)} == {len(header)}
    assert [row.split()[0] for row in rows] == ["0", "3", "all"]
    assert rows[0].split()[1:3] == ["SparseConv2d", "8x3x3x2"]
    assert total.split()[:4] == ["total", "100", "18.4", "%"]
    assert parameters == "parameters: 134 against 578 dense"
    assert printed.isascii()


def test_it_is_one_line_in_a_terminal_and_silent_on_demand(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = rewire.summary(rewire.sparsify(a_model(), 0.5, keep_dense="3"), show=False)
    assert capsys.readouterr().out == ""
    assert repr(found).startswith("Summary(1 sparse of 2 layers, 72 connections, density 50 %, ")
    assert "\n" not in repr(found)


def test_a_dense_model_and_a_layer_alone_have_tables_too() -> None:
    dense = rewire.summary(a_model(), show=False)
    assert (dense.connections, dense.density) == (0, 1)
    assert dense.memory == dense.dense_memory
    assert "dense" in str(dense).splitlines()[-2]
    alone = rewire.summary(rewire.sparsify(nn.Linear(6, 6), 0.5), show=False)
    assert "(model)" in str(alone)
    assert not rewire.summary(nn.ReLU(), show=False).layers


def test_shared_layers_and_tied_weights_count_once() -> None:
    layer, embedding, head = nn.Linear(5, 5), nn.Embedding(7, 5), nn.Linear(5, 7, bias=False)
    head.weight = embedding.weight
    model = nn.ModuleDict({"a": layer, "b": layer, "c": embedding, "d": head})
    model["norm"] = nn.LayerNorm(5)
    found = rewire.summary(model, show=False)
    assert [row.name for row in found.layers] == ["a", "c", "d"]
    assert found.parameters == 30 + 35 + 10
    assert found.memory == 4 * found.parameters
    assert found.other_memory == 40


def test_lazy_layers_are_passed_over() -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 4))
    assert [row.name for row in rewire.summary(model, show=False).layers] == ["1"]


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(TypeError, match=r"nn\.Module"):
        rewire.summary("model")  # type: ignore[arg-type]
