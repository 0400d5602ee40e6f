"""Sparse layers to and from dense layers and CSR tensors, and layers whose connections change."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from rewire import Connections, SparseConv2d, SparseLinear
from rewire.ops import TopologyError
from some_layers import Layer, Make, assert_as_dense, assert_state, both, data, linear, seeded

csr = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")

# Dense and CSR


@both
def test_to_dense_is_the_same_layer(make: Make) -> None:
    layer = make(dtype=torch.float64)
    dense = layer.to_dense()
    assert type(dense) is (nn.Linear if make is linear else nn.Conv2d)
    assert dense.weight.dtype == torch.float64
    assert int((dense.weight != 0).sum()) == layer.values.numel()
    assert isinstance(dense.weight, nn.Parameter)
    assert dense.weight.is_leaf
    assert dense.weight.requires_grad
    assert make(bias=False).to_dense().bias is None
    # Our numbering of input units, by hand.
    c = layer.connections
    for o, i, value in zip(
        c.outputs().tolist(), c.inputs().tolist(), layer.values[:, 0], strict=True
    ):
        place = (o, i) if make is linear else (o, i % 4, i // 4 // 2, i // 4 % 2)
        assert torch.equal(dense.weight[place], value)
    with torch.no_grad():
        dense.weight.zero_()
    assert bool(layer.values.all())  # a copy


@both
def test_from_dense_with_a_mask(make: Make) -> None:
    dense = make(sparsity=0.0).to_dense()
    mask = torch.rand(dense.weight.shape, generator=seeded(3)) < 0.3
    mask[2] = False
    masked = copy.deepcopy(dense)
    with torch.no_grad():
        masked.weight.mul_(mask)
    for form in (mask, mask.int(), mask.double() * -3):
        layer = type(make()).from_dense(dense, form)  # type: ignore[arg-type]
        assert layer.values.numel() == int(mask.sum())
        assert torch.equal(layer.to_dense().weight, masked.weight)
        assert layer.bias is not None
        assert torch.equal(layer.bias, dense.bias)
        torch.testing.assert_close(layer(data(layer)), masked(data(layer)), rtol=1e-5, atol=1e-5)
        assert_as_dense(layer)
    assert layer.values.requires_grad
    assert layer.bias.requires_grad


@both
def test_from_dense_keeps_the_largest(make: Make) -> None:
    dense = make(sparsity=0.0).to_dense()
    total = dense.weight.numel()
    order = dense.weight.detach().abs().flatten().sort(descending=True).values
    for options, count in [
        ({"connections": 7}, 7),
        ({"connections": 0}, 0),
        ({"connections": total}, total),
        ({"sparsity": 0.75}, total // 4),
        ({"sparsity": 0.0}, total),
        ({"sparsity": 1.0}, 0),
    ]:
        layer = type(make()).from_dense(dense, **options)  # type: ignore[arg-type]
        assert layer.values.numel() == count
        kept = layer.to_dense().weight
        threshold = float(order[count - 1]) if count else float("inf")
        expected = torch.where(dense.weight.abs() >= threshold, dense.weight, 0.0)
        assert torch.equal(kept, expected)


@both
def test_from_dense_takes_the_first_of_equal_weights(make: Make) -> None:
    dense = make(sparsity=0.0).to_dense()
    with torch.no_grad():
        dense.weight.fill_(1.0)
        dense.weight.flatten()[::2] = -1.0
        dense.weight.flatten()[-1] = 2.0
    layer = type(make()).from_dense(dense, connections=6)  # type: ignore[arg-type]
    kept = layer.to_dense().weight.detach().flatten().nonzero().flatten()
    assert kept.tolist() == [0, 1, 2, 3, 4, dense.weight.numel() - 1]


@both
def test_from_dense_and_the_constructor_count_alike(make: Make) -> None:
    dense = make(sparsity=0.0).to_dense()
    for hundredths in range(101):
        sparsity = hundredths / 100
        converted = type(make()).from_dense(dense, sparsity=sparsity)  # type: ignore[arg-type]
        assert converted.values.numel() == make(sparsity=sparsity).values.numel(), sparsity


@both
def test_from_dense_refuses_bad_choices(make: Make) -> None:
    dense: Any = make(sparsity=0.0).to_dense()
    convert = type(make()).from_dense
    mask = torch.ones_like(dense.weight)
    for options in ({}, {"mask": mask, "sparsity": 0.5}, {"sparsity": 0.5, "connections": 3}):
        with pytest.raises(ValueError, match="one of mask=, sparsity= or connections="):
            convert(dense, **options)
    with pytest.raises(ValueError, match="mask has shape"):
        convert(dense, mask[:-1])
    with pytest.raises(ValueError, match="mask has shape"):
        convert(dense, mask.flatten())
    for count in (-1, dense.weight.numel() + 1):
        with pytest.raises(ValueError, match=f"{count}"):
            convert(dense, connections=count)
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        convert(dense, sparsity=1.5)


def test_from_dense_keeps_groups() -> None:
    dense = nn.Conv2d(4, 6, 3, groups=2)
    layer = SparseConv2d.from_dense(dense, sparsity=0.5)
    assert (layer.groups, layer.count, layer.density) == (2, 54, 0.5)
    kept = layer.to_dense().weight
    assert torch.equal(kept, torch.where(kept != 0, dense.weight, 0))


@pytest.mark.parametrize(
    "options",
    [
        {"stride": 2, "padding": (1, 2), "dilation": (2, 1)},
        {"padding": "same", "padding_mode": "circular"},
        {"padding": 2, "padding_mode": "reflect", "bias": False},
        {"dtype": torch.float64},
    ],
)
def test_from_dense_keeps_the_sizes_of_a_convolution(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    dense = nn.Conv2d(3, 5, (3, 2), **options)
    layer = SparseConv2d.from_dense(dense, sparsity=0.0)
    x = torch.randn(4, 3, 8, 9, dtype=dense.weight.dtype)
    torch.testing.assert_close(layer(x), dense(x), rtol=1e-5, atol=1e-5)
    back = layer.to_dense()
    assert torch.equal(back.weight, dense.weight)
    assert repr(back) == repr(dense)


@csr
@both
def test_sparse_csr_and_back(make: Make) -> None:
    layer = make(dtype=torch.float64)
    sparse = layer.to_sparse_csr()
    assert sparse.layout == torch.sparse_csr
    assert sparse.shape == (layer.n_out, layer.n_in)
    # Out x in, the columns of a convolution as in weight.flatten(1).
    assert torch.equal(sparse.to_dense(), layer.to_dense().weight.detach().flatten(1))
    for row in range(layer.n_out):
        begin, end = sparse.crow_indices()[row : row + 2].tolist()
        assert bool((sparse.col_indices()[begin:end].diff() > 0).all())
    assert not sparse.requires_grad
    if isinstance(layer, SparseLinear):
        back: Layer = SparseLinear.from_sparse_csr(sparse, layer.bias)
    else:
        back = SparseConv2d.from_sparse_csr(
            sparse, layer.bias, kernel_size=(3, 2), stride=2, padding=1
        )
    for name, tensor in layer.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor), name
    assert torch.equal(back(data(layer)), layer(data(layer)))
    assert isinstance(back.values, nn.Parameter)
    with torch.no_grad():
        layer.values.add_(1)
    assert torch.equal(back.to_sparse_csr().values(), sparse.values())  # copies, both


@csr
@both
def test_sparse_csr_without_bias_or_connections(make: Make) -> None:
    layer = make(sparsity=1.0, bias=False)
    sparse = layer.to_sparse_csr()
    assert sparse._nnz() == 0
    if isinstance(layer, SparseLinear):
        back: Layer = SparseLinear.from_sparse_csr(sparse)
    else:
        back = SparseConv2d.from_sparse_csr(sparse, kernel_size=(3, 2))
    assert back.bias is None
    assert back.values.shape == (0, 1)


@csr
def test_from_sparse_csr_in_any_order_and_type() -> None:
    crow, col = torch.tensor([0, 2, 3]), torch.tensor([2, 0, 1])
    for index in (torch.int64, torch.int32):
        sparse = torch.sparse_csr_tensor(
            crow.to(index),
            col.to(index),
            torch.tensor([3.0, 1.0, 0.0]),
            size=(2, 3),
            check_invariants=False,
        )
        layer = SparseLinear.from_sparse_csr(sparse)
        assert layer.connections.keys().tolist() == [0, 2, 4]
        assert layer.values.tolist() == [[1.0], [3.0], [0.0]]  # a stored zero is a connection
        torch.testing.assert_close(
            layer(torch.tensor([[1.0, 2.0, 3.0]])), torch.tensor([[10.0, 0]])
        )


@csr
def test_from_sparse_csr_refuses_what_is_none() -> None:
    twice = torch.sparse_csr_tensor(
        torch.tensor([0, 2, 3]),
        torch.tensor([1, 1, 0]),
        torch.ones(3),
        size=(2, 3),
        check_invariants=False,
    )
    with pytest.raises(ValueError, match="twice"):
        SparseLinear.from_sparse_csr(twice)
    outside = torch.sparse_csr_tensor(
        torch.tensor([0, 1, 1]),
        torch.tensor([3]),
        torch.ones(1),
        size=(2, 3),
        check_invariants=False,
    )
    with pytest.raises(ValueError, match=r".+"):  # column 3 of row 0 is not column 0 of row 1
        SparseLinear.from_sparse_csr(outside)
    with pytest.raises(ValueError, match="CSR"):
        SparseLinear.from_sparse_csr(torch.ones(2, 3))
    with pytest.raises(ValueError, match="CSR"):
        SparseLinear.from_sparse_csr(torch.ones(2, 3).to_sparse_coo())
    with pytest.raises(ValueError, match="no multiple"):
        SparseConv2d.from_sparse_csr(torch.ones(2, 7).to_sparse_csr(), kernel_size=2)


# Changing the connections


@both
@pytest.mark.parametrize("shape", [(-1,), (-1, 1)])
def test_set_connections(make: Make, shape: tuple[int, ...]) -> None:
    layer = make()
    parameter = layer.values
    layer(data(layer)).sum().backward()
    new = Connections.random(layer.n_in, layer.n_out, 11, seeded(9))
    layer.set_connections(new, torch.arange(11.0).view(shape))
    assert layer.values is parameter
    assert layer.values.grad is None
    assert layer.values.dtype == torch.float32
    assert layer.values.tolist() == [[i] for i in range(11)]
    assert torch.equal(layer.connections.keys(), new.keys())
    assert_as_dense(layer)


@both
@pytest.mark.parametrize("how", ["set_connections", "load_state_dict"])
def test_the_number_of_connections_changes_while_an_earlier_graph_is_alive(
    make: Make, how: str
) -> None:
    layer = make()
    loss = layer(data(layer)).sum()  # as in a loop that still holds the loss of its last step
    loss.backward()
    new = Connections.random(layer.n_in, layer.n_out, 11, seeded(9))
    other = copy.deepcopy(layer)
    other.set_connections(new, torch.ones(11))
    if how == "set_connections":
        layer.set_connections(new, torch.ones(11))
    else:
        layer.load_state_dict(other.state_dict())
    layer(data(layer)).sum().backward()
    other.zero_grad()
    other(data(layer)).sum().backward()
    assert layer.values.grad is not None
    assert torch.equal(layer.values.grad, other.values.grad)
    assert torch.isfinite(loss)


@both
def test_set_connections_refuses_what_does_not_fit(make: Make) -> None:
    layer = make()
    before, expected = copy.deepcopy(layer.state_dict()), layer(data(layer))
    new = Connections.random(layer.n_in, layer.n_out, 11, seeded(9))
    for values in (torch.zeros(10), torch.zeros(10, 1), torch.zeros(1, 11), torch.zeros(())):
        with pytest.raises(ValueError, match="values has shape"):
            layer.set_connections(new, values)
    for sizes in ((layer.n_in + 1, layer.n_out), (layer.n_in, layer.n_out - 1)):
        with pytest.raises(ValueError, match="do not fit"):
            layer.set_connections(Connections.random(*sizes, 11), torch.zeros(11))
    assert_state(layer, before)
    assert torch.equal(layer(data(layer)), expected)


@both
def test_buffers_that_are_written_to_are_checked(make: Make) -> None:
    layer = make()
    expected = layer(data(layer))
    kept = layer.indices.clone()
    layer.indices[0] = 10**6
    with pytest.raises(TopologyError):
        layer(data(layer))
    layer.indices.copy_(kept)
    assert torch.equal(layer(data(layer)), expected)
