"""Images in panels, which layers of a region make for each other: results are those of dense PyTorch."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rewire
from bodies import Net, assert_close, assert_same, normal
from bodies_uses import USES
from rewire import SparseConv2d, ops, use_engine
from rewire.ops import layout, native

pytestmark = pytest.mark.skipif(not ops.available(), reason="needs the compiled kernels")


def width(dtype: torch.dtype) -> int:
    return layout.panel_width(native.kernels(torch.empty(0, dtype=dtype)))


# in and out channels, height, width, kernel, stride, padding, dilation
SIZES = [
    (3, 8, 12, 12, 3, 1, 1, 1),
    (8, 8, 20, 9, 3, 1, 1, 1),
    (6, 10, 9, 11, 3, 2, 1, 1),
    (6, 10, 8, 8, (2, 3), (2, 1), (0, 1), 1),
    (5, 7, 11, 10, 3, 1, 2, 2),
    (7, 9, 6, 6, 1, 1, 0, 1),
    (40, 40, 4, 4, 3, 1, 1, 1),
    (64, 48, 2, 2, 3, 1, 1, 1),
    (30, 20, 1, 1, 1, 1, 0, 1),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_convolutions(dtype: torch.dtype, isa: str) -> None:
    """Two that follow each other: the first one's output, or the second one's input too, in panels."""
    for n_in, n_out, height, wide, kernel, *rest in SIZES:
        torch.manual_seed(0)
        first = nn.Conv2d(n_in, n_in, 1)
        model = nn.Sequential(first, nn.ReLU(), nn.Conv2d(n_in, n_out, kernel, *rest), nn.ReLU())
        model = rewire.sparsify(model.to(dtype), sparsity=0.6)
        dense = rewire.densify(copy.deepcopy(model)).double()
        x, found = normal(2 * width(dtype), n_in, height, wide), []
        for each, kind in ((model, dtype), (dense, torch.float64)):
            own = x.to(kind).requires_grad_()
            y = each(own)
            y.backward(normal(*y.shape, seed=1).to(kind))
            biases = [part.bias.grad for part in (each[0], each[2])]
            found.append([y.detach(), own.grad, *biases])
        kept, weight = model[2].connections, dense[2].weight.grad
        found[0].append(model[2].values.grad)
        flat = weight.permute(0, 2, 3, 1).flatten(1)
        found[1].append(flat[kept.outputs(), kept.inputs()][:, None])
        for ours, right in zip(*found, strict=True):
            assert_close(ours, right)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["f_relu", "residual_block", "max_pool", "global_pool"])
def test_models_at_the_width_of_the_machine(name: str, dtype: torch.dtype, isa: str) -> None:
    if dtype is torch.float64:
        assert_same(Net(USES[name]), normal(3 * width(dtype), 3, 6, 6), steps=1)
        return
    model = Net(USES[name]).float()
    apart = Net(USES[name]).float()
    use_engine(model)
    x = normal(2 * width(dtype), 3, 6, 6, dtype=dtype)
    ours, right = model(x), apart(x)
    torch.testing.assert_close(ours, right, rtol=1e-4, atol=1e-4)
    for net, out in ((model, ours), (apart, right)):
        out.square().mean().backward()
        assert net.conv.values.grad is not None
    torch.testing.assert_close(model.conv.values.grad, apart.conv.values.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "sizes",  # kernel, stride, padding, dilation; some input positions of the last two have no connection
    [(3, 1, 1, 1), (5, 1, 0, 1), (3, 2, 1, 1), (2, 1, 1, 3), (2, 2, 1, 2), (1, 2, 0, 1)],
)
@pytest.mark.parametrize("image", [(40, 33), (33, 9), (64, 5)])
def test_windows_that_slide_down(sizes: tuple[int, ...], image: tuple[int, int], isa: str) -> None:
    """Images of which a task holds only some rows at a time, in a ring where they are wide enough."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(2, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 8, *sizes), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 3, 3, padding=1), nn.ReLU()),
    )
    model = rewire.sparsify(model, sparsity=0.5).double()
    dense = rewire.densify(copy.deepcopy(model))
    found = []
    for each in (model, dense):
        x = normal(2 * width(torch.float64), 2, *image).requires_grad_()
        y = each(x)
        y.square().sum().backward()
        norms = [p.grad for m in each if isinstance(m, nn.BatchNorm2d) for p in m.parameters()]
        found.append([y.detach(), x.grad, *norms])
        found[-1] += [m.bias.grad for m in each if hasattr(m, "in_channels")]
    for ours, right in zip(*found, strict=True):
        assert_close(ours, right, 1e-9)
    for m, d in zip(model, dense, strict=True):
        if isinstance(m, SparseConv2d):
            again = SparseConv2d.from_dense(d, mask=m.to_dense().weight != 0)
            d.weight.data = d.weight.grad
            right = SparseConv2d.from_dense(d, mask=again.to_dense().weight != 0).values
            assert_close(m.values.grad, right.detach(), 1e-9)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("start", [0, 4])
def test_activations_that_no_near_cache_holds(stride: int, start: int, isa: str) -> None:
    """Large layers ask for the rows they read next, and write batch-last results past the caches; the
    gradient that comes in may start anywhere."""
    torch.manual_seed(0)
    convs = [nn.Conv2d(8, 8, 3, padding=1) for _ in range(3)]
    convs[1].stride = (stride, stride)
    model = nn.Sequential(*(module for conv in convs for module in (conv, nn.ReLU())))
    model = rewire.sparsify(model, sparsity=0.8).double()
    dense = rewire.densify(copy.deepcopy(model))
    image, batch = 48 * stride, 4 * width(torch.float64)
    x, found = normal(batch, 8, image, 48), []
    assert x.numel() * 8 // stride > 4 << 20
    for each in (model, dense):
        own = x.clone().requires_grad_()
        y = each(own)
        memory = torch.zeros(y.numel() + start, dtype=x.dtype)[start:]
        gradient = memory.view(*y.shape[1:], batch).movedim(-1, 0).copy_(normal(*y.shape, seed=1))
        y.backward(gradient)
        found.append([y.detach(), own.grad, *(m.bias.grad for m in each if hasattr(m, "bias"))])
    for ours, right in zip(*found, strict=True):
        assert_close(ours, right, 1e-10)
    for m, d in zip(model, dense, strict=True):
        if isinstance(m, SparseConv2d):
            mask = m.to_dense().weight != 0
            d.weight.data = d.weight.grad
            assert_close(m.values.grad, SparseConv2d.from_dense(d, mask=mask).values, 1e-10)


@pytest.mark.parametrize("uneven", [False, True])
def test_large_layers_whose_rows_are_few_or_uneven(
    uneven: bool, threads: Callable[[int], None], isa: str
) -> None:
    """Three panels on two threads are cut by channels too, and a part may have none of them."""
    threads(2)
    torch.manual_seed(0)
    panel = width(torch.float32)
    mid = 32 * 64 // panel
    model = nn.Sequential(
        nn.Conv2d(3, mid, 3, padding=1), nn.ReLU(), nn.Conv2d(mid, 8, 3, padding=1)
    )
    model.append(nn.ReLU()).append(nn.Conv2d(8, mid, 3, padding=1))
    model = rewire.sparsify(model, sparsity=0.9)
    if uneven:  # one channel has almost all of the connections
        for index in (2, 4):
            layer = model[index].to_dense()
            mask = torch.zeros_like(layer.weight, dtype=torch.bool)
            mask[:, 0] = mask[0] = True
            torch.nn.init.normal_(layer.weight, std=0.1)
            model[index] = SparseConv2d.from_dense(layer, mask=mask)
    dense = rewire.densify(copy.deepcopy(model)).double()
    x = normal(3 * panel, 3, 14, 14, dtype=torch.float32)
    ours, right = x.clone().requires_grad_(), x.double().requires_grad_()
    y, z = model(ours), dense(right)
    assert_close(y, z)
    y.sum().backward()
    z.sum().backward()
    assert_close(ours.grad, right.grad, 1e-4)


def test_any_number_of_threads(threads: Callable[[int], None]) -> None:
    model = rewire.sparsify(rewire.models.vgg11(), sparsity=0.9)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    x, seen = normal(64, 3, 32, 32, dtype=torch.float32), []
    for count in (1, 2, 3):
        threads(count)
        model.zero_grad()
        out = model(x)
        out.logsumexp(1).sum().backward()
        seen.append([out.detach(), *(p.grad for p in model.parameters())])
    for others in seen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(seen[0], others, strict=True))


@pytest.mark.usefixtures("small_panels")
def test_a_probe_sees_ordinary_images() -> None:
    """A rewiring takes its gradients from the input and output gradient of a layer."""
    seen: list[list[Tensor]] = []
    for engine in (True, False):
        model = Net(lambda m, x: m.conv2(F.relu(m.bn(m.conv(x)))))
        use_engine(model, engine)
        kept: list[Tensor] = []
        for layer in (model.conv, model.conv2):
            layer.probe = lambda conv, x, dy, kept=kept: kept.extend((x.clone(), dy.clone()))
        model(normal(8, 3, 6, 6)).square().sum().backward()
        seen.append(kept)
    assert [tuple(t.shape) for t in seen[0]] == [tuple(t.shape) for t in seen[1]]
    for ours, right in zip(*seen, strict=True):
        assert_close(ours, right, 1e-9)


@pytest.mark.usefixtures("small_panels")
def test_five_dimensions_that_are_none_of_ours() -> None:
    """The output of a linear layer may look like panels."""

    class Volumes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = rewire.SparseLinear(4, 4, sparsity=0.5)
            self.second = rewire.SparseLinear(4, 4, sparsity=0.5)
            self.bn = nn.BatchNorm3d(8)
            self.double()

        def forward(self, x: Tensor) -> Tensor:
            y = self.second(F.relu(self.first(x)))
            return F.relu(self.bn(y) + y) + y

    model = Volumes()
    assert_same(model, normal(8, 8, 3, 2, 4))


def block_of(m: Any, end: str, x: Tensor) -> Tensor:
    y = m.conv2(F.relu(m.bn(x)))
    ends = {
        "convolution": lambda: y,
        "batch norm": lambda: m.bn2(y),
        "rectified": lambda: F.relu(m.bn2(y)),
        "residual": lambda: F.relu(m.bn2(y) + x),
        "pooled": lambda: F.max_pool2d(F.relu(m.bn2(y)), 2),
    }
    return ends[end]()


@pytest.mark.parametrize("end", ["convolution", "batch norm", "rectified", "residual", "pooled"])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.usefixtures("small_panels")
def test_checkpointed_blocks(end: str, reentrant: bool) -> None:
    """Whatever a block ends in, its gradients arrive."""
    results = []
    for checkpointed in (True, False):
        model = Net(
            lambda m, x, checkpointed=checkpointed: (
                checkpoint(partial(block_of, m, end), m.conv(x), use_reentrant=reentrant)
                if checkpointed
                else block_of(m, end, m.conv(x))
            )
        )
        for bn in (model.bn, model.bn2):
            bn.track_running_stats = False  # a checkpointed block runs twice
            bn.running_mean = bn.running_var = None
        use_engine(model)
        out = model(normal(8, 3, 6, 6).requires_grad_())
        out.square().sum().backward()
        results.append([out.detach(), *(p.grad for p in model.parameters())])
    for ours, right in zip(*results, strict=True):
        assert (ours is None) == (right is None)
        if ours is not None and right is not None:
            assert_close(ours, right, 1e-9)


@pytest.mark.parametrize("panels", [True, False])
@pytest.mark.usefixtures("small_panels")
def test_what_is_not_recorded_has_no_gradient(
    panels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not panels:
        monkeypatch.setattr(layout, "panel_width", lambda kernels: 1 << 20)

    def body(m: Any, x: Tensor) -> Tensor:
        y = m.bn(m.conv(x))
        with torch.no_grad():
            mask = F.relu(y)
        return y * mask

    assert_same(Net(body))
