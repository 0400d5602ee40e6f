"""Images in panels, which our layers make for each other: everything is as in batch-last memory."""

import copy
import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rewire
from bodies import Net, NewPanels, assert_close, assert_same, normal
from bodies_uses import USES
from rewire import SparseConv2d, ops, use_engine
from rewire.nn import promises
from rewire.ops import layout, native

pytestmark = pytest.mark.skipif(not ops.available(), reason="needs the compiled kernels")


def width(dtype: torch.dtype) -> int:
    return layout.panel_width(native.kernels(torch.empty(0, dtype=dtype)))


@pytest.fixture
def promised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small outputs are promised too; panels are as wide as they are."""
    monkeypatch.setattr(promises, "_WORTHWHILE", 0)


def test_there_and_back() -> None:
    x = layout.to_batch_last(normal(12, 5, 3, 2))
    panels = layout.to_panels(x, 4)
    assert panels.shape == (3, 5, 3, 2, 4)
    assert layout.is_panels(panels)
    assert torch.equal(panels[1, 2, 0, 1], x[4:8, 2, 0, 1])
    back = layout.from_panels(panels)
    assert torch.equal(back, x)
    assert back.stride() == x.stride()


@pytest.mark.parametrize(("batch", "fits"), [(4, False), (8, True), (10, False), (0, False)])
def test_what_fills_panels(batch: int, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "panel_width", lambda kernels: 4)
    shape = layout.panel_shape((batch, 3, 5, 5), torch.empty(0))
    assert shape == ((batch // 4, 3, 5, 5, 4) if fits else None)
    assert layout.panel_shape((8, 3), torch.empty(0)) is None


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
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("inputs", [True, False])
def test_convolutions(sizes: tuple[Any, ...], dtype: torch.dtype, inputs: bool, isa: str) -> None:
    """With input and output in panels, or the output alone, against batch-last memory."""
    n_in, n_out, height, wide, kernel, *rest = sizes
    layer = SparseConv2d(
        *(n_in, n_out, kernel, *rest),
        dtype=dtype,
        sparsity=0.6,
        generator=torch.Generator().manual_seed(0),
    )
    panel = width(dtype)
    assert layer.bias is not None
    arguments = (layer.values, layer.bias, layer.topology, layer.sizes)
    data = layout.to_batch_last(normal(2 * panel, n_in, height, wide, dtype=dtype))

    def run(panels: bool) -> list[Tensor]:
        x = layout.to_panels(data, panel) if panels and inputs else data.clone()
        x.requires_grad_()
        layer.zero_grad()
        y = ops.conv2d(x, *arguments, relu=True, checked=True, panels=panels)
        assert layout.is_panels(y) == panels
        up = layout.to_batch_last(normal(*layout.image_shape(y), seed=1, dtype=dtype))
        y.backward(layout.to_panels(up, panel) if panels else up)
        assert x.grad is not None
        assert layer.values.grad is not None
        assert layer.bias.grad is not None
        back = [layout.from_panels(t) if layout.is_panels(t) else t for t in (y.detach(), x.grad)]
        return [*back, layer.values.grad, layer.bias.grad]

    for ours, right in zip(run(True), run(False), strict=True):
        assert_close(ours, right)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["f_relu", "residual_block", "max_pool", "global_pool"])
@pytest.mark.usefixtures("promised")
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
    for fused in (True, False):
        model = Net(lambda m, x: m.conv2(F.relu(m.bn(m.conv(x)))))
        (fuse if fused else unfuse)(model)
        kept: list[Tensor] = []
        for layer in (model.conv, model.conv2):
            layer.probe = lambda conv, x, dy, kept=kept: kept.extend((x, dy))
        model(normal(8, 3, 6, 6)).square().sum().backward()
        seen.append(kept)
    assert [tuple(t.shape) for t in seen[0]] == [tuple(t.shape) for t in seen[1]]
    for ours, right in zip(*seen, strict=True):
        assert_close(ours, right, 1e-9)


def block(m: Any, x: Tensor, rectify: bool = True) -> Tensor:
    total = m.bn2(m.conv2(x)) + x
    return F.relu(total) if rectify else total


RESIDUALS: dict[str, Callable[[Any, Tensor], Any]] = {
    "in a row": lambda m, x: block(m, block(m, block(m, x))),
    "not rectified": lambda m, x: block(m, block(m, x, False), False),
    "of what is not rectified": lambda m, x: block(m, F.relu(block(m, x, False))),
    "by a sum alone": lambda m, x: F.relu(m.bn2(m.conv2(x)) + block(m, x)),
    "by two sums": lambda m, x: (z := block(m, x), block(m, m.bn2(m.conv2(z)) + z) + z)[1],
    "by nobody": lambda m, x: (block(m, x), m.bn2(m.conv2(x)))[1],
    "seen": lambda m, x: (z := block(m, x), block(m, z), z * 2, z),
    "seen first": lambda m, x: (z := block(m, x), z.sigmoid(), block(m, z)),
    "pooled": lambda m, x: F.max_pool2d(block(m, block(m, x)), 2),
    "pooled in between": lambda m, x: block(m, F.max_pool2d(block(m, x), 3, 1, 1)),
    "pooled smaller": lambda m, x: block(m, F.max_pool2d(block(m, x), 2)),
    "with itself": lambda m, x: (z := block(m, x), F.relu(m.bn2(z) + z))[1],
}


@pytest.mark.parametrize("name", RESIDUALS)
@pytest.mark.usefixtures("small_panels")
def test_residual_sums(name: str) -> None:
    """Their results have a second output for the next sum, whose gradient comes by itself."""
    assert_same(Net(lambda m, x: RESIDUALS[name](m, F.relu(m.bn(m.conv(x))))))


@pytest.mark.usefixtures("small_panels")
def test_a_residual_sum_without_a_backward_pass_is_not_kept() -> None:
    model = Net(lambda m, x: block(m, block(m, F.relu(m.bn(m.conv(x))))))
    use_engine(model)
    gc.collect()
    gc.disable()
    try:
        panels = NewPanels()
        out = model(normal(8, 3, 6, 6))
        node = weakref.ref(out.grad_fn)
        assert panels.alive()
        del out
        assert node() is None
        assert not panels.alive()
    finally:
        gc.enable()


def held(body: Callable[[Any, Tensor, Any], Any]) -> tuple[Any, Any]:
    """The output of the first convolution, after the second has read it, in a fused model and apart."""
    results = []
    for fused in (True, False):
        model = Net(lambda m, x: body(m, m.conv(x), m.conv2))
        if fused:
            use_engine(model)
        results.append(model(normal(8, 3, 6, 6)))
    return results[0], results[1]


@pytest.mark.usefixtures("small_panels")
def test_gradients_of_what_a_layer_has_read() -> None:
    def hooked(m: Any, y: Tensor, conv: Any) -> list[Tensor]:
        seen: list[Tensor] = []
        out = conv(y)
        y.register_hook(seen.append)
        (out.square().sum() + y.sum()).backward()
        return seen

    ours, right = held(hooked)
    assert_close(ours[0], right[0], 1e-9)

    def kept(m: Any, y: Tensor, conv: Any) -> Tensor | None:
        y.retain_grad()
        (conv(y).square().sum() + y.sum()).backward()
        return y.grad

    ours, right = held(kept)
    assert_close(ours, right, 1e-9)


@pytest.mark.parametrize("late", ["retain_grad", "autograd.grad", "hook"])
@pytest.mark.usefixtures("small_panels")
def test_what_comes_too_late_is_refused(late: str) -> None:
    def body(m: Any, y: Tensor, conv: Any) -> Any:
        if late == "hook":
            z = block(m, F.relu(m.bn(y)))
            block(m, z)  # reads its second output, too
            return z.register_hook(lambda g: g * 2)
        out = conv(y).square().sum()
        return y.retain_grad() if late == "retain_grad" else torch.autograd.grad(out, y)

    with pytest.raises(RuntimeError, match="already read this output"):
        held(body)


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
