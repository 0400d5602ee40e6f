"""Layers too wide for any cache: the kernels then read units where they are, a whole batch at once."""

from __future__ import annotations

import pytest
import torch

import rewire
from rewire.ops import layout

WIDTH, NARROW, CONNECTIONS = (
    80_000,
    60,
    4_000,
)  # 80,000 units x 32 x 4 bytes are more than is packed


@pytest.mark.parametrize("shape", [(WIDTH, NARROW), (NARROW, WIDTH)])
@pytest.mark.parametrize("batch", [1, 33, 131])
def test_products_are_those_of_sparse_matrices(shape: tuple[int, int], batch: int) -> None:
    torch.manual_seed(0)
    layer = rewire.nn.SparseLinear(*shape, connections=CONNECTIONS, dtype=torch.float64)
    x = torch.randn(batch, shape[0], dtype=torch.float64)
    g = torch.randn(batch, shape[1], dtype=torch.float64)
    ours = x.clone().requires_grad_()
    y = layer(ours)
    y.backward(g)
    outputs, inputs = layer.connections.outputs(), layer.connections.inputs()
    weight = torch.sparse_coo_tensor(
        torch.stack([outputs, inputs]),
        layer.values.detach().flatten(),
        shape[::-1],
        check_invariants=True,
    )
    assert layer.bias is not None
    torch.testing.assert_close(y, (weight @ x.T).T + layer.bias)
    torch.testing.assert_close(ours.grad, (weight.T @ g.T).T)
    torch.testing.assert_close(layer.values.grad[:, 0], (g[:, outputs] * x[:, inputs]).sum(0))
    torch.testing.assert_close(layer.bias.grad, g.sum(0))


def test_results_do_not_depend_on_threads() -> None:
    torch.manual_seed(0)
    layer = rewire.nn.SparseLinear(WIDTH, WIDTH, connections=5 * WIDTH)
    x = layout.to_batch_last(torch.randn(70, WIDTH))
    g = layout.to_batch_last(torch.randn(70, WIDTH))
    results, threads = [], torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            given = x.clone().requires_grad_()
            y = layer(given)
            results.append((y, *torch.autograd.grad(y, (given, layer.values, layer.bias), g)))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))
