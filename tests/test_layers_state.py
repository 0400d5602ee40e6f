"""State dicts and files of sparse layers, whole and damaged."""

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rewire import Connections, SparseLinear
from some_layers import Make, assert_as_dense, assert_state, both, conv, data, seeded


@both
def test_state_dict_round_trip(make: Make) -> None:
    layer, other = make(seed=0), make(seed=1)
    state = layer.state_dict()
    assert set(state) == {"values", "bias", "indptr", "indices"}
    assert set(make(bias=False).state_dict()) == {"values", "indptr", "indices"}
    assert str(other.load_state_dict(state)) == "<All keys matched successfully>"
    assert_state(other, state)
    assert torch.equal(other(data(layer)), layer(data(layer)))
    assert_as_dense(other)


@both
@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.95, 1.0])
def test_loading_a_topology_of_another_size(make: Make, sparsity: float) -> None:
    source, layer = make(seed=1, sparsity=sparsity), make()
    parameter, optimizer = layer.values, torch.optim.SGD(layer.parameters(), lr=0.1)
    layer(data(layer)).sum().backward()
    result = layer.load_state_dict(source.state_dict(), strict=True)
    assert not result.missing_keys
    assert not result.unexpected_keys
    assert layer.values is parameter
    assert optimizer.param_groups[0]["params"][0] is layer.values
    assert_state(layer, source.state_dict())
    assert torch.equal(layer(data(layer)), source(data(layer)))
    layer.zero_grad()
    assert_as_dense(layer)
    optimizer.step()


@both
def test_loading_converts_types(make: Make) -> None:
    source, layer = make(seed=1, dtype=torch.float64, sparsity=0.4), make()
    layer.load_state_dict(source.state_dict())
    assert layer.values.dtype == torch.float32
    assert torch.equal(layer.values, source.values.float())
    assert_as_dense(layer)


@both
def test_loading_with_assign(make: Make) -> None:
    for sparsity in (0.7, 0.4):
        source, layer = make(seed=1, sparsity=sparsity, dtype=torch.float64), make()
        layer.bias.requires_grad_(False)  # type: ignore[union-attr]
        state = copy.deepcopy(source.state_dict())
        layer.load_state_dict(state, assign=True)
        assert_state(layer, source.state_dict())
        assert isinstance(layer.values, nn.Parameter)
        assert layer.values.requires_grad
        assert layer.values.data_ptr() == state["values"].data_ptr()
        assert torch.equal(layer(data(source)), source(data(source)))
        layer.bias.requires_grad_(True)  # type: ignore[union-attr]
        assert_as_dense(layer)


@both
def test_a_loaded_layer_shares_no_memory_with_the_state(make: Make) -> None:
    source, layer = make(seed=1), make()
    state = source.state_dict()
    layer.load_state_dict(state)
    expected = layer(data(layer)).detach().clone()
    for name, tensor in state.items():
        assert tensor.data_ptr() != layer.state_dict()[name].data_ptr(), name
    for tensor in state.values():
        tensor.zero_()
    assert torch.equal(layer(data(layer)), expected)


def test_loading_into_a_larger_model() -> None:
    def model(seed: int, sparsity: float) -> nn.Sequential:
        return nn.Sequential(
            conv(seed, sparsity=sparsity),
            nn.BatchNorm2d(6),
            nn.Flatten(),
            SparseLinear(6 * 3 * 4, 5, sparsity=sparsity, generator=seeded(seed)),
        )

    source, target = model(0, 0.9), model(1, 0.5)
    target.load_state_dict(source.state_dict())
    x = torch.randn(4, 4, 6, 7)
    assert torch.equal(target.eval()(x), source.eval()(x))
    broken = source.state_dict()
    broken["3.indices"] = broken["3.indices"].flip(0)
    with pytest.raises(RuntimeError, match=r"3\..*output unit \d+ are corrupt"):
        target.load_state_dict(broken)


@both
@pytest.mark.parametrize("key", ["values", "indices", "indptr", "bias"])
def test_missing_keys(make: Make, key: str) -> None:
    layer = make()
    state = make(seed=1).state_dict()
    del state[key]
    with pytest.raises(RuntimeError, match=f'Missing key\\(s\\) in state_dict: "{key}"'):
        layer.load_state_dict(state)
    assert_as_dense(layer)  # it still fits together
    layer = make()
    try:
        result = layer.load_state_dict(state, strict=False)
    except RuntimeError:
        pass  # parts of a topology may be refused
    else:
        assert result.missing_keys == [key]
        assert not result.unexpected_keys
    assert_as_dense(layer)


@both
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("value", [None, [], "text", 3.0])
@pytest.mark.parametrize("key", ["values", "indices", "indptr"])
def test_what_is_no_tensor(make: Make, key: str, value: object, strict: bool) -> None:
    """As a key that is missing was it passed over once, and the layer kept connections of its own."""
    layer = make()
    state = {**make(seed=1).state_dict(), key: value}
    with pytest.raises(
        RuntimeError, match=rf"{key} must be a torch\.Tensor, got {type(value).__name__}"
    ):
        layer.load_state_dict(state, strict=strict)
    assert_as_dense(layer)


@both
def test_an_empty_state(make: Make) -> None:
    layer = make()
    before = copy.deepcopy(layer.state_dict())
    result = layer.load_state_dict({}, strict=False)
    assert result.missing_keys == ["values", "bias", "indptr", "indices"]
    assert_state(layer, before)


@both
def test_unexpected_keys(make: Make) -> None:
    layer = make()
    state = {**make(seed=1).state_dict(), "weight": torch.zeros(3)}
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "weight"'):
        layer.load_state_dict(state)
    assert layer.load_state_dict(state, strict=False).unexpected_keys == ["weight"]
    # The derived order is no part of it.
    assert layer.load_state_dict({**state, "slots": layer.slots}, strict=False).unexpected_keys == [
        *("weight", "slots")
    ]


def int32(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def tiny(bias: bool) -> SparseLinear:
    """Unit 0 <- {0, 3}, unit 1 <- nothing, unit 2 <- {1, 2, 3}."""
    c = Connections(4, 3, int32([0, 2, 2, 5]), int32([0, 3, 1, 2, 3]))
    return SparseLinear(4, 3, bias=bias, connections=c, generator=seeded(0))


# What a damaged file may hold instead, and words of the error.
CORRUPT: dict[str, tuple[dict[str, Tensor], str]] = {
    "not ascending": ({"indices": int32([3, 0, 1, 2, 3])}, "output unit 0"),
    "twice": ({"indices": int32([0, 3, 1, 2, 2])}, "output unit 2"),
    "out of range": ({"indices": int32([0, 4, 1, 2, 3])}, "output unit 0"),
    "negative": ({"indices": int32([0, 3, -1, 2, 3])}, "output unit 2"),
    "huge": ({"indices": int32([0, 3, 1, 2, 2**31 - 1])}, "output unit 2"),
    "indptr falls": ({"indptr": int32([0, 2, 1, 5])}, "output unit 1"),
    "indptr starts late": ({"indptr": int32([1, 2, 2, 5])}, "output unit 0"),
    "indptr negative": ({"indptr": int32([0, -3, 2, 5])}, "output unit 0"),
    "indptr past the end": ({"indptr": int32([0, 2, 2, 6])}, "output unit 2"),
    "indptr before the end": ({"indptr": int32([0, 2, 2, 4])}, "output unit 2"),
    "units missing": ({"indptr": int32([0, 2, 5])}, "indptr has 3 elements"),
    "units too many": ({"indptr": int32([0, 2, 2, 4, 5])}, "indptr has 5 elements"),
    "indices too short": ({"indices": int32([0, 3, 1, 2])}, "output unit 2"),
    "indices too long": ({"indices": int32([0, 3, 0, 1, 2, 3])}, "output unit 2"),
    "no indices": ({"indices": int32([])}, "output unit 0"),
    "values too short": ({"values": torch.zeros(4)}, "values has shape"),
    "values too long": ({"values": torch.zeros(6)}, "values has shape"),
    "values of two columns": ({"values": torch.zeros(5, 2)}, "values has shape"),
    "values in a row": ({"values": torch.zeros(1, 5)}, "values has shape"),
    "values 3-D": ({"values": torch.zeros(5, 1, 1)}, "values has shape"),
    "values 0-D": ({"values": torch.zeros(())}, "values has shape"),
    "indptr int64": ({"indptr": torch.tensor([0, 2, 2, 5])}, "int32"),
    "indices int64": ({"indices": torch.tensor([0, 3, 1, 2, 3])}, "int32"),
    "indices float": ({"indices": torch.tensor([0.0, 3, 1, 2, 3])}, "int32"),
    "indices 2-D": ({"indices": int32([[0, 3, 1, 2, 3]])}, "1-D"),
    "indptr 0-D": ({"indptr": int32(0)}, "1-D"),
    "of another layer": (
        {"indptr": int32([0, 1, 2]), "indices": int32([0, 9]), "values": torch.zeros(2)},
        "indptr has 3 elements",
    ),
}


@pytest.mark.parametrize("assign", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", CORRUPT)
def test_corrupt_states_are_refused(name: str, bias: bool, assign: bool) -> None:
    layer = tiny(bias)
    x = torch.randn(5, 4, generator=seeded(0))
    before, expected = copy.deepcopy(layer.state_dict()), layer(x)
    corrupt, words = CORRUPT[name]
    for strict in (True, False):
        with pytest.raises(RuntimeError, match=words):
            layer.load_state_dict({**before, **corrupt}, strict=strict, assign=assign)
        assert_state(layer, before)
        assert torch.equal(layer(x), expected)
    assert_as_dense(layer, x)


def test_a_bias_of_another_size_leaves_a_working_layer() -> None:
    layer = tiny(bias=True)
    state = {**SparseLinear(4, 3, sparsity=0.2).state_dict(), "bias": torch.zeros(7)}
    with pytest.raises(RuntimeError, match="size mismatch for bias"):
        layer.load_state_dict(state)
    assert_as_dense(layer, torch.randn(5, 4))


@both
def test_files(make: Make) -> None:
    layer = make()
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    other = make(seed=1, sparsity=0.2)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert_state(other, layer.state_dict())
    assert torch.equal(other(data(layer)), layer(data(layer)))


@pytest.mark.parametrize("count", [1, 12])
def test_connections_that_change_before_the_backward_pass(count: int) -> None:
    layer = SparseLinear(4, 3, connections=6)
    x = torch.ones(2, 4, requires_grad=True)
    loss = layer(x).sum()
    layer.set_connections(Connections.random(4, 3, count), torch.ones(count))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
