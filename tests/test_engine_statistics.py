"""Running statistics are updated when a batch norm is called, as far as anybody can tell."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine_models import Block, close, converted, image, loss_of, plain_step, same
from rewire.engine import execute, scope, use_engine
from rewire.engine.lazy import LazyTensor
from rewire.engine.statistics import LazyBuffer, hide


@torch.jit.script
def scripted(mean: Tensor) -> Tensor:
    return mean * 2


@torch.jit.script
def scripted_in_place(mean: Tensor) -> Tensor:
    mean.mul_(2)
    return mean + 1


class Save(torch.autograd.Function):
    """Saves running statistics unread: C++ code has the wrapper when the region runs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mean: Tensor) -> Tensor:
        ctx.save_for_backward(mean)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        (mean,) = ctx.saved_tensors
        return dy * mean.view(1, -1, 1, 1) + mean.numpy().sum(), None


def _file(module: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    return torch.load(file)


def _out(m: Any) -> Tensor:
    with torch.no_grad():
        torch.mul(m.n.running_mean, 3, out=m.n.running_var)
    return m.n.running_var + 0


def _load(m: Any) -> Tensor:
    m.n.load_state_dict({**m.m.state_dict(), "running_mean": torch.ones(3)})
    return m.n.running_mean * 2


def _assign(m: Any) -> Tensor:
    old = m.n.running_mean
    m.n.running_mean = torch.ones(3, dtype=torch.float64)
    return old + m.n.running_mean


def _replace_data(m: Any) -> Tensor:
    m.n.running_mean.data = m.n.running_mean.data * 2
    return m.n.running_mean + 1


def _convert(m: Any) -> Tensor:
    m.bare.float()
    assert m.bare.running_mean.dtype is torch.float32
    m.bare.double()
    return m.bare.running_mean + 1


def _keep_vars(m: Any) -> Any:
    kept = m.state_dict(keep_vars=True)
    return [kept["n.running_mean"] + 1, kept["m.running_var"] + 1]


def _bare(m: Any) -> Tensor:
    return torch.from_numpy(m.n.running_mean.numpy().copy())


def _number(x: float) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


USES: dict[str, Callable[[Any], Any]] = {
    "read": lambda m: m.n.running_mean + m.m.running_var,
    "number": lambda m: _number(float(m.n.running_mean.sum())),
    "item": lambda m: _number(m.n.running_mean[1].item()),
    "list": lambda m: torch.tensor(m.n.running_var.tolist(), dtype=torch.float64),
    "numpy": _bare,
    "iterate": lambda m: [t + 0 for t in m.n.running_mean],
    "held": lambda m: m.held[0] * 2,
    "stacked": lambda m: torch.stack([m.n.running_mean, m.n.running_var]),
    "buffers": lambda m: [b.clone() for b in m.buffers() if b.is_floating_point()],
    "state_dict": lambda m: [t.clone() for name, t in m.state_dict().items() if "running" in name],
    "keep_vars": _keep_vars,
    "deepcopy": lambda m: copy.deepcopy(m.n).running_mean + 0,
    "copy": lambda m: copy.copy(m.n.running_mean) + 0,
    "pickle": lambda m: pickle.loads(pickle.dumps(m.n.running_mean)) + 0,
    "torch.save": lambda m: _file(m.n)["running_var"],
    "script": lambda m: scripted(m.n.running_mean),
    "script in place": lambda m: scripted_in_place(m.n.running_mean),
    "view": lambda m: m.n.running_mean[1:] * 2,
    "data": lambda m: m.n.running_mean.data * 2,
    "in place": lambda m: m.n.running_mean.mul_(2) + 1,
    "set item": lambda m: m.n.running_mean.__setitem__(0, 5.0),
    "reset": lambda m: m.n.reset_running_stats(),
    "out": _out,
    "load": _load,
    "assign": _assign,
    "replace data": _replace_data,
    "convert": _convert,
    "share": lambda m: m.bare.share_memory() and m.bare.running_mean + 0,
    "eager": lambda m: m.n(torch.ones(4, 3, 8, 8, dtype=torch.float64)),
    "eager, evaluating": lambda m: F.batch_norm(image(), m.n.running_mean, m.n.running_var),
    "as a weight": lambda m: F.batch_norm(m.b(image()), None, None, m.n.running_mean, None, True),
    "added": lambda m: m.b(image()).mean((2, 3)) + m.n.running_mean,
}


CHANGES = ("script in place", "in place", "set item", "reset", "out", "load")
"""Torch saves the statistics, so these make its backward pass raise; the engine does not need them."""


class Held(Block):
    def __init__(self, use: Any) -> None:
        super().__init__(use)
        self.bare = nn.BatchNorm2d(3, affine=False)
        self.held: list[Any] = []
        self.places: list[Any] = []

    def forward(self, x: Tensor) -> Any:
        self.held = [self.n.running_mean]
        self.places = [
            (b, b.data_ptr(), b._version) for b in (self.n.running_mean, self.n.running_var)
        ]
        return super().forward(self.bare(self.b(x)))


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", USES)
def test_uses_in_the_middle(name: str, grad: bool) -> None:
    def use(m: Any, x: Tensor) -> Any:
        if m._forward_hooks:
            assert type(m.n.running_mean) is LazyBuffer
        found = USES[name](m)
        assert type(m.n.running_mean) is Tensor
        return found, m.c(x)

    def step(model: nn.Module, x: Tensor) -> Any:
        with torch.set_grad_enabled(grad):
            y = model(x) if name in CHANGES else plain_step(model, x)
        assert all(type(b) is Tensor for b in model.buffers())
        return y

    model = converted(Held(use))
    same(model, image(), step)


def test_the_buffer_is_what_it_was() -> None:
    """The same object, memory, version and attributes; reading its metadata runs nothing."""

    def use(m: Any, x: Tensor) -> Any:
        mean = m.n.running_mean
        assert (mean.shape, mean.dtype, mean.dim(), mean.numel()) == ((3,), torch.float64, 1, 3)
        assert (mean.requires_grad, mean.is_leaf, mean.is_contiguous()) == (False, True, True)
        assert type(mean) is LazyBuffer
        assert isinstance(x, LazyTensor)
        return m.c(x)

    model = converted(Held(use))
    model.n.running_mean.mark = "mine"
    ref = weakref.ref(model.n.running_mean)
    model(image())
    for buffer, pointer, version in model.places:
        assert type(buffer) is Tensor
        assert (buffer.data_ptr(), buffer._version) == (pointer, version)
    assert model.n.running_mean is model.places[0][0] is ref()
    assert model.n.running_mean.__dict__ == {"mark": "mine"}
    assert model.n.running_var.__dict__ == {}


def test_one_region_with_lazy_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    count = []
    run = execute.run
    monkeypatch.setattr(execute, "run", lambda *a: count.append(1) or run(*a))
    model = converted(nn.Sequential(Block(), Block()))
    for _ in range(3):
        plain_step(model, image())
    assert len(count) == 3


def test_c_code_keeps_the_statistics() -> None:
    def use(m: Any, x: Tensor) -> Any:
        y = Save.apply(x, m.n.running_mean)
        return m.c(y)

    same(converted(Block(use)), image())


def test_graphs_that_hold_the_statistics() -> None:
    """Autograd saves them where torch evaluates a batch norm; they are updated at once then."""

    def use(m: Any, x: Tensor) -> Any:
        m.n.eval()
        y = m.n(torch.sin(x))
        m.n.train()
        z = m.n(m.b(x))
        assert type(m.n.running_mean) is Tensor
        return m.c(z), y, m.n.running_mean.clone()

    same(converted(Block(use)), image())


def test_views_of_the_statistics() -> None:
    def use(m: Any, x: Tensor) -> Any:
        view = m.n.running_mean[:2]
        y = m.n(m.b(x))
        return view.clone(), y, m.c(y)

    same(converted(Block(use)), image())


def test_statistics_in_one_tensor() -> None:
    class Flat(Block):
        def __init__(self) -> None:
            super().__init__(lambda m, x: (m.c(x), m.flat.clone()))
            self.flat = torch.ones(6, dtype=torch.float64)

        def forward(self, x: Tensor) -> Any:
            self.n._buffers["running_mean"], self.n._buffers["running_var"] = self.flat.split(3)
            return super().forward(x)

    same(converted(Flat()), image())


def test_batch_norms_on_the_same_memory() -> None:
    """Two modules, two objects, one memory: updated in the order of the program."""

    def use(m: Any, x: Tensor) -> Any:
        m.m.load_state_dict(m.n.state_dict(), assign=True)
        y = m.n(m.b(x))
        z = m.m(m.b(m.b(x)))  # it leads to more, so it would be computed first
        return m.c(z), z, y, m.m.running_mean.clone(), m.n.running_mean.clone()

    same(converted(Block(use)), image())


def test_statistics_given_twice() -> None:
    def use(m: Any, x: Tensor) -> Any:
        mean = m.n.running_mean
        y = F.batch_norm(m.b(x), mean, mean, training=True)
        return m.c(y), mean.clone()

    same(converted(Block(use)), image())


def test_statistics_that_are_lazy_already() -> None:
    """As another thread may have made them just now."""

    def use(m: Any, x: Tensor) -> Any:
        if m._forward_hooks:
            assert hide(m.n.running_mean, object()) is None
        return m.c(x), m.n.running_mean + 0

    same(converted(Block(use)), image())


def test_weak_references_of_c_code() -> None:
    def step(model: nn.Module, x: Tensor) -> Any:
        refs = [torch._C._WeakTensorRef(b) for b in model.buffers()]
        y = plain_step(model, x)
        assert not any(ref.expired() for ref in refs)
        return y

    same(converted(Block(lambda m, x: (m.c(x), m.n.running_mean + 0))), image(), step)


# Exceptions


def _failing(error: type[BaseException]) -> nn.Module:
    def use(m: Any, x: Tensor) -> Any:
        y = m.c(x)
        if m.fail:
            raise error("now")
        return y

    block = Block(use)
    block.fail = False
    return nn.Sequential(converted(block))


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("after", ["read", "call", "save", "copy"])
def test_statistics_after_an_exception(error: type[BaseException], after: str) -> None:
    """As layer by layer: batch norms that were called have updated theirs."""

    def step(model: nn.Module, x: Tensor) -> Any:
        model[0].fail = True
        with pytest.raises(error, match="now"):
            model(x)
        model[0].fail = False
        other: Any = model
        if after == "save":
            other = _file(model)
        elif after == "copy":
            other = copy.deepcopy(model)
        if after in ("read", "save", "copy"):
            state = other if after == "save" else other.state_dict()
            return [t.clone() for name, t in state.items() if "running" in name]
        return plain_step(model, x)

    model = _failing(error)
    same(model, image(), step)
    assert scope._local.scope is None or error is not ValueError


def test_changes_after_an_exception() -> None:
    """What was recorded has been computed by then."""

    def step(model: nn.Module, x: Tensor) -> Any:
        model[0].fail = True
        with pytest.raises(ValueError, match="now"):
            model(x)
        model[0].fail = False
        with torch.no_grad():
            model[0].a.bias.mul_(2)
        return [b.clone() for name, b in model.named_buffers() if "running" in name]

    same(_failing(ValueError), image(), step)


def test_exceptions_run_nothing_without_statistics() -> None:
    ran: list[Any] = []

    def use(m: Any, x: Tensor) -> Any:
        ran.append(x)
        raise ValueError("now")

    model = converted(Block(use)).eval()
    with pytest.raises(ValueError, match="now"):
        model(image())
    assert type(ran[0]) is LazyTensor


def test_exceptions_of_the_region_itself() -> None:
    """No second error, and no warning, of the statistics; these are ordinary, and from before."""

    def use(m: Any, x: Tensor) -> Any:
        with torch.no_grad():
            m.a.values.mul_(2)
        return x.sin()

    model = converted(Block(use))
    before = model.n.running_mean.clone()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeError, match="changed in place"):
            model(image())
    assert type(model.n.running_mean) is Tensor
    assert torch.equal(model.n.running_mean, before)


def test_changes_after_an_interrupt() -> None:
    """The update cannot be computed any more: said once, and the model goes on."""
    model = _failing(KeyboardInterrupt)
    before = model[0].m.running_mean.clone()
    model[0].fail = True
    with pytest.raises(KeyboardInterrupt, match="now"):
        model(image())
    model[0].fail = False
    with torch.no_grad():
        model[0].c.values.mul_(2)
    use_engine(model)
    with pytest.warns(UserWarning, match="has not updated the running statistics"):
        state = model.state_dict()
    assert torch.equal(state["0.m.running_mean"], before)
    same(model, image())


def test_an_interrupted_model_may_be_forgotten() -> None:
    model = _failing(KeyboardInterrupt)
    model[0].fail = True
    x = image()
    with pytest.raises(KeyboardInterrupt, match="now"):
        model(x)
    refs = [weakref.ref(model), weakref.ref(x)]
    converted(Block())(image())  # the interrupted call is noticed
    del model, x
    gc.collect()
    assert [ref() for ref in refs] == [None, None]


class Interrupted(Exception):
    pass


@pytest.mark.filterwarnings("ignore:module forward hook with ``always_call=True``")
@pytest.mark.parametrize("point", ["hide", "show", "run"])
def test_interrupts_of_the_engine(point: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the worst places: what is left are ordinary tensors, once they are used."""
    from rewire.engine import private

    model = converted(Block(lambda m, x: m.c(x)))
    twin = copy.deepcopy(model)
    calls = []

    def interrupted(function: Any, at: int) -> Any:
        def call(*args: Any) -> Any:
            calls.append(1)
            if len(calls) == at:
                if point == "hide":  # its class is changed, its memory not yet
                    args[0].__class__ = LazyBuffer
                elif point == "show":  # the other way round
                    torch._C._swap_tensor_impl(*args)
                raise Interrupted
            return function(*args)

        return call

    with monkeypatch.context() as patch:
        if point == "hide":
            patch.setattr(private, "swap", interrupted(private.swap, 3))
        elif point == "show":
            patch.setattr(private, "unswap", interrupted(private.unswap, 3))
        else:
            patch.setattr(execute, "run", interrupted(execute.run, 1))
        with pytest.raises(Interrupted):
            model(image())
    buffers = [(name, b) for name, b in model.named_buffers() if "running" in name]
    for name, buffer in buffers:
        assert buffer.shape == twin.get_buffer(name).shape
        buffer.copy_(twin.get_buffer(name))
        assert type(buffer) is Tensor
        assert buffer.__dict__ == {}
    close(model(image()), twin(image()))
    for name, buffer in buffers:
        close(buffer, twin.get_buffer(name))


@pytest.mark.parametrize("where", ["recording", "running"])
def test_signal_handlers_that_save(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that interrupts the engine itself gets the statistics as they are, and does not wait for ever."""
    from rewire.engine import region

    model = converted(Block(lambda m, x: m.c(x)))
    twin = copy.deepcopy(model)
    before = {name: b.clone() for name, b in model.named_buffers() if "running" in name}
    saved: list[Any] = []

    def handle() -> None:
        if not saved and type(model.m.running_mean) is LazyBuffer:
            saved.append({name: t.clone() for name, t in model.state_dict().items()})

    target, name = (region, "make") if where == "recording" else (execute, "run")
    function = getattr(region if where == "recording" else execute, name)
    with torch.no_grad():
        monkeypatch.setattr(target, name, lambda *a: (handle(), function(*a))[1])
        y = model(image())
        close(y, twin(image()))
    for key, value in before.items():
        assert torch.equal(saved[0][key], value)
    for key in before:
        close(model.get_buffer(key), twin.get_buffer(key))


def test_lazy_tensors_of_a_region_that_is_running(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Tensor] = []
    run = execute.run
    monkeypatch.setattr(execute, "run", lambda *a: (kept[0] + 1, run(*a))[1])
    model = converted(Block(lambda m, x: kept.append(x) or m.c(x)))
    with pytest.raises(RuntimeError, match="used while it was being computed on the same thread"):
        model(image())


# Threads


@pytest.fixture
def switching() -> Iterator[None]:
    """Threads take turns as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("switching")
def test_threads_that_train_one_model() -> None:
    """Each update reaches the statistics once: those of equal batches do not depend on the order."""
    model = converted(nn.Sequential(Block(lambda m, x: m.c(x)[:, :3]), Block()))
    twin = copy.deepcopy(model)
    use_engine(twin, False)
    x = image()
    count, workers = 10, 3
    errors: list[BaseException] = []
    turn = threading.Lock()

    def work() -> None:
        try:
            for _ in range(count):
                y = model(x)
                with turn:  # gradients are accumulated by one at a time
                    loss_of(y).backward()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert errors == []
    for _ in range(count * workers):
        loss_of(twin(x)).backward()
    for one, two in zip(model.parameters(), twin.parameters(), strict=True):
        close(one.grad, two.grad)
    for name, buffer in model.named_buffers():
        if "running" in name:
            assert type(buffer) is Tensor
            close(buffer, twin.get_buffer(name))


@pytest.mark.usefixtures("switching")
def test_a_thread_that_watches_the_statistics() -> None:
    """It sees those from before or after a step, and waits for a step that has begun."""
    model = converted(Block(lambda m, x: m.c(x)))
    twin = copy.deepcopy(model)
    found: list[Tensor] = []
    stop = threading.Event()
    x = image()

    def watch() -> None:
        while not stop.is_set():
            found.append(model.n.running_mean.clone())

    thread = threading.Thread(target=watch)
    thread.start()
    for _ in range(30):
        model(x)
    stop.set()
    thread.join()
    expected = [twin.n.running_mean.clone()]
    for _ in range(30):
        twin(x)
        expected.append(twin.n.running_mean.clone())
    close(model.n.running_mean, expected[-1])
    for mean in found:
        assert min(float((mean - e).abs().max()) for e in expected) < 1e-12


def test_gradients_in_evaluation_mode_after_a_call_in_training_mode() -> None:
    # PyTorch does not notice that the statistics have changed since, and takes the new ones.
    model = converted(Block(lambda m, x: m.c(F.relu(x)))).eval()
    x = image()
    expected = torch.autograd.grad(loss_of(model(x)), list(model.parameters()))
    y = model(x)
    model.train()
    model(5 * x + 1)
    for grad, right in zip(
        torch.autograd.grad(loss_of(y), list(model.parameters())), expected, strict=True
    ):
        close(grad, right)
