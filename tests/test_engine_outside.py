"""What comes out of a converted model, and what stays behind."""

import contextlib
import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import rewire
from bodies import Net, assert_close, assert_same, batch_last, marks, normal, plain, same_buffers
from bodies_uses import USES
from rewire import Connections, SparseConv2d, use_engine
from rewire.engine.lazy import LazyTensor

pytestmark = marks


def lazy_inside(model: Any) -> bool:
    """Whether the engine runs the model: its body is given lazy tensors by layers."""
    kinds: list[type] = []
    handle = model.bn.register_forward_pre_hook(lambda module, args: kinds.append(type(args[0])))
    model(normal(8, 3, 6, 6))
    handle.remove()
    assert len(kinds) == 1
    return kinds == [LazyTensor]


def outside_is_untouched() -> None:
    """No mode is left active: torch's functions are torch's again."""
    x = batch_last(normal(4, 3, 2, 2))
    y = F.batch_norm(x, None, None, training=True)
    assert type(y) is Tensor
    assert type(F.relu(y)) is Tensor


def test_results_are_ordinary_contiguous_tensors() -> None:
    model = Net(lambda m, x: {"norm": m.bn(m.conv(x)), "sum": [m.bn2(m.conv(x)) + m.conv(x)]})
    use_engine(model)
    result = model(normal(8, 3, 6, 6))
    for tensor in (result["norm"], result["sum"][0]):
        assert type(tensor) is Tensor
        assert tensor.is_contiguous()
    outside_is_untouched()


class Answer:
    """An output that no tree of tensors knows about."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


def test_an_output_inside_an_object() -> None:
    model = Net(lambda m, x: Answer(m.bn(m.conv(x))))
    reference = plain(model)
    use_engine(model)
    results = [m(normal(8, 3, 6, 6)) for m in (model, reference)]
    same_buffers(model, reference)
    for use in (lambda t: t * 2, F.relu, lambda t: t.mean(), lambda t: t + t):
        assert_close(use(results[0].value).detach(), use(results[1].value).detach())
    for m, result in zip((model, reference), results, strict=True):
        F.relu(result.value).square().sum().backward()
        assert m.bn.weight.grad is not None
    assert_close(model.bn.weight.grad, reference.bn.weight.grad, 1e-9)


def test_an_output_kept_by_the_model() -> None:
    model = Net(USES["kept_but_not_used"])
    reference = plain(model)
    use_engine(model)
    for m in (model, reference):
        m(normal(8, 3, 6, 6))
    kept = [m.seen[0] for m in (model, reference)]
    assert_close(kept[0].detach(), kept[1].detach())
    assert_close(F.relu(kept[0]).detach(), F.relu(kept[1]).detach())
    assert_close((kept[0] * 2).detach(), (kept[1] * 2).detach())


def test_facts_about_a_lazy_tensor_are_those_of_the_result() -> None:
    for training in (True, False):
        model = Net(USES["looked_at"]).train(training)
        reference = plain(model)
        use_engine(model)
        for m in (model, reference):
            m(normal(8, 3, 6, 6))
        assert model.seen == reference.seen


def in_a_thread(function: Callable[[], None]) -> None:
    """Modes are a thread's own: what a failure leaves active does not spoil the other tests."""
    errors: list[BaseException] = []

    def work() -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    worker = threading.Thread(target=work)
    worker.start()
    worker.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, GeneratorExit])
def test_an_error_in_the_forward(error: type[BaseException]) -> None:
    def failing(m: Any, x: Tensor) -> Tensor:
        y = m.bn(m.conv(x))
        if m.seen:
            raise m.seen.pop()
        return F.relu(y)

    def check() -> None:
        model = Net(failing)
        model.seen = [error("on purpose")]
        use_engine(model)
        with pytest.raises(error, match="on purpose"):
            model(normal(8, 3, 6, 6))
        outside_is_untouched()
        assert_same(model)
        outside_is_untouched()

    in_a_thread(check)


def test_an_error_before_the_forward() -> None:
    def refuse(module: Any, args: Any) -> None:
        raise ValueError("on purpose")

    def forgiving(m: Any, x: Tensor) -> Tensor:
        with pytest.raises(ValueError, match="on purpose"):
            m.inner(x)
        return F.relu(m.bn(m.conv(x)))

    def check() -> None:
        model = Net(forgiving)
        model.inner = Net(USES["f_relu"])
        model.inner.register_forward_pre_hook(refuse)
        use_engine(model.inner)
        assert_same(model)
        outside_is_untouched()

    in_a_thread(check)


def test_an_error_that_the_outer_model_handles() -> None:
    def failing(m: Any, x: Tensor) -> Tensor:
        y = m.bn(m.conv(x))
        raise ValueError(f"on purpose, with {y.shape}")

    def forgiving(m: Any, x: Tensor) -> Tensor:
        y = m.bn(m.conv(x))
        with contextlib.suppress(ValueError):
            y = m.inner(x)
        return F.relu(y + m.conv(x))

    model = Net(forgiving)
    model.inner = Net(failing)
    for m in (model, model.inner):
        use_engine(m)
    assert_same(model)
    outside_is_untouched()


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Net(USES["residual_block"])
        self.second = Net(lambda m, x: m.bn(m.conv2(x)))
        self.bn = nn.BatchNorm2d(6).double()

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn(self.first(x))
        return F.relu(self.second(y) + y)


@pytest.mark.parametrize("inner", [True, False])
def test_converted_models_inside_a_converted_model(inner: bool) -> None:
    model = Nested()
    if inner:
        use_engine(model.first)
        use_engine(model.second)
    assert_same(model)
    outside_is_untouched()


def test_turning_the_engine_on_twice_and_off() -> None:
    model = Net(USES["residual_block"])
    untouched = set(model.state_dict())
    use_engine(model)
    use_engine(model)
    assert lazy_inside(model)
    assert set(model.state_dict()) == untouched
    assert_same(model)
    use_engine(model, False)
    assert not lazy_inside(model)


def test_no_grad_and_inference_mode() -> None:
    for training in (True, False):
        for mode in (torch.no_grad, torch.inference_mode):
            model = Net(USES["residual_block"]).train(training)
            reference = plain(model)
            use_engine(model)
            with mode():
                x = normal(8, 3, 6, 6)
                y, expected = model(x), reference(x)
                assert not y.requires_grad
                assert_close(y.clone(), expected)
            same_buffers(model, reference)


def test_a_model_in_other_threads() -> None:
    model = Net(USES["residual_block"]).eval()
    reference = plain(model)
    use_engine(model)
    inputs = [normal(8, 3, 6, 6, seed=i) for i in range(6)]
    results: dict[int, Tensor] = {}

    def work(i: int) -> None:
        for _ in range(5):
            results[i] = model(inputs[i]).detach()

    workers = [threading.Thread(target=work, args=(i,)) for i in range(len(inputs))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for i, x in enumerate(inputs):
        assert_close(results[i], reference(x).detach())
    outside_is_untouched()


def test_training_in_a_thread_does_not_touch_the_others() -> None:
    entered, leave, seen = threading.Event(), threading.Event(), []

    def waiting(m: Any, x: Tensor) -> Tensor:
        entered.set()
        assert leave.wait(30)
        return F.relu(m.bn(m.conv(x)))

    model = Net(waiting)
    use_engine(model)
    worker = threading.Thread(target=lambda: seen.append(model(normal(8, 3, 6, 6))))
    worker.start()
    assert entered.wait(30)
    outside_is_untouched()
    leave.set()
    worker.join()
    assert type(seen[0]) is Tensor


def through_pickle(model: nn.Module) -> Any:
    return pickle.loads(pickle.dumps(model))


def residual(m: Any, x: Tensor) -> Tensor:
    return USES["residual_block"](m, x)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, through_pickle])
def test_copies(duplicate: Callable[[nn.Module], Any]) -> None:
    model = Net(residual)
    use_engine(model)
    model(normal(8, 3, 6, 6))
    copied = duplicate(model)
    assert lazy_inside(copied.eval())
    x = normal(8, 3, 6, 6)
    assert torch.equal(copied(x), model.eval()(x))
    assert_same(copied.train())
    use_engine(copied, False)
    assert not lazy_inside(copied)
    assert lazy_inside(model)


def test_copying_leaves_no_shared_statistics() -> None:
    model = Net(residual)
    use_engine(model)
    copied = copy.deepcopy(model)
    before = copied.bn.running_mean.clone()
    model(normal(8, 3, 6, 6))
    assert torch.equal(copied.bn.running_mean, before)
    assert not torch.equal(model.bn.running_mean, before)


def test_checkpointing_a_model() -> None:
    for reentrant in (True, False):
        model = Net(USES["residual_block"])
        use_engine(model)
        outer = Net(
            lambda m, x, reentrant=reentrant: checkpoint(m.inner, x, use_reentrant=reentrant)
        )
        outer.inner = model
        assert_same(outer)
        reference = plain(model)
        inputs = [normal(8, 3, 6, 6).requires_grad_() for _ in range(2)]
        for m, x in zip((model, reference), inputs, strict=True):
            checkpoint(m, x, use_reentrant=reentrant).square().sum().backward()
        assert inputs[0].grad is not None
        assert inputs[1].grad is not None
        assert_close(inputs[0].grad, inputs[1].grad, 1e-9)
        outside_is_untouched()


def _shrink(layer: SparseConv2d) -> None:
    layer.set_connections(Connections.random(27, 6, 2), torch.ones(2))


@pytest.mark.parametrize(
    "change",
    [
        _shrink,
        lambda conv: setattr(conv.values, "data", torch.ones(1, dtype=torch.float64)),
        lambda conv: setattr(conv.bias, "data", torch.ones(1, dtype=torch.float64)),
        lambda conv: conv.half(),
    ],
    ids=["connections", "values", "bias", "type"],
)
def test_a_layer_that_changes_before_its_output_is_used(change: Callable[[Any], Any]) -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        y = m.conv(x)
        change(m.conv)
        return F.relu(m.bn(y))

    model = Net(body)
    use_engine(model)
    with pytest.raises(RuntimeError, match="was changed in place"):
        model(normal(8, 3, 6, 6))


def test_going_back_twice() -> None:
    model = Net(USES["residual_block"])
    use_engine(model)
    x = normal(8, 3, 6, 6).requires_grad_()
    loss = model(x).square().sum()
    first = torch.autograd.grad(loss, [x, *model.parameters()], retain_graph=True)
    second = torch.autograd.grad(loss, [x, *model.parameters()])
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["residual_block", "max_pool", "global_pool", "pad"])
def test_a_traced_model(name: str) -> None:
    model = Net(USES[name]).eval()
    reference = plain(model)
    use_engine(model)
    traced = make_fx(model)(normal(8, 3, 6, 6))
    x = normal(8, 3, 6, 6, seed=1)
    assert_close(traced(x).detach(), reference(x).detach())  # not what was seen while tracing


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo looks at it
def test_a_compiled_model() -> None:
    model = Net(USES["residual_block"])
    reference = plain(model)
    use_engine(model)
    torch.compiler.reset()
    try:
        compiled = torch.compile(model, backend="aot_eager")
    except RuntimeError as error:
        pytest.skip(f"torch.compile is unavailable: {error}")
    for step in range(2):
        x = normal(8, 3, 6, 6, seed=step)
        y, expected = compiled(x), reference(x)
        assert_close(y.detach(), expected.detach(), 1e-9)
        for m, result in ((model, y), (reference, expected)):
            m.zero_grad()
            result.square().sum().backward()
        assert_close(model.bn.weight.grad, reference.bn.weight.grad, 1e-9)  # type: ignore[arg-type]
        same_buffers(model, reference)
    assert_same(model)


def test_a_model_with_a_compiled_part() -> None:
    part = nn.Sequential(Net(lambda m, x: F.relu(m.conv(x))), nn.ReLU())
    model = nn.Sequential(part, nn.BatchNorm2d(6, dtype=torch.float64), nn.ReLU())
    reference = plain(model)
    torch.compiler.reset()
    try:
        model[0] = torch.compile(part, backend="aot_eager")
    except RuntimeError as error:
        pytest.skip(f"torch.compile is unavailable: {error}")
    use_engine(model)
    x = normal(8, 3, 6, 6)
    y, expected = model(x), reference(x)
    assert_close(y.detach(), expected.detach(), 1e-9)
    for result in (y, expected):
        result.square().sum().backward()
    assert_close(model[1].weight.grad, reference[1].weight.grad, 1e-9)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("recorded", [True, False])
def test_numbers_that_memory_has_with_the_other_sign(batch: int, recorded: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(batch, 8, dtype=torch.complex64).conj().imag
    assert x.is_neg()
    model = rewire.sparsify(
        nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2)), sparsity=0.5
    )
    image = torch.randn(batch, 2, 4, 4, dtype=torch.complex64).conj().imag
    conv = rewire.sparsify(nn.Sequential(nn.Conv2d(2, 3, 3)), sparsity=0.5)
    with torch.set_grad_enabled(recorded):
        torch.testing.assert_close(model(x), rewire.densify(copy.deepcopy(model))(x))
        torch.testing.assert_close(model[0](x), model[0].to_dense()(x))
        torch.testing.assert_close(conv(image), rewire.densify(copy.deepcopy(conv))(image))
