"""Averages of weights, against averages of dense weights under masks, over rewirings."""

import copy
import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn, update_bn
from torch.utils.data import DataLoader

import rewire
from rewire import ConnectedLayer
from rewired import Net, images

DECAY = 0.8
METHODS: dict[str, Callable[..., rewire.Rewirer]] = {
    "gse": lambda *a: rewire.GSE(*a, every=3, until=60, fraction=0.5),
    "gse layer": lambda *a: rewire.GSE(*a, every=3, until=60, fraction=0.5, scope="layer"),
    "rigl": lambda *a: rewire.RigL(*a, every=3, until=60, fraction=0.5),
    "dsr": lambda *a: rewire.DSR(*a, every=3, until=60, threshold=0.03),
    "set": lambda *a: rewire.SET(*a, every=3, until=60, fraction=0.5),
    "deepr": lambda *a: rewire.DeepR(*a, l1=0.05, temperature=0.1),
}
methods = pytest.mark.parametrize("method", METHODS)


def make(storage: str = "sparse", seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return rewire.sparsify(Net(), sparsity=0.7, seed=seed, storage=storage).double()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, t: int) -> None:
    x, y = images(t)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x.double()), y).backward()
    optimizer.step()


def layers_of(model: nn.Module) -> dict[str, ConnectedLayer]:
    return {n: m for n, m in model.named_modules() if isinstance(m, ConnectedLayer)}


def dense_of(model: nn.Module) -> dict[str, Tensor]:
    return {k: v.clone() for k, v in rewire.dense_state_dict(model).items()}


def masks_of(model: nn.Module) -> dict[str, Tensor]:
    """Of the dense weights: where connections are, whatever their values."""
    model = copy.deepcopy(model)
    for layer in layers_of(model).values():
        layer.assign(torch.ones_like(layer.gather(layer.parameter.detach())))
    ones = rewire.dense_state_dict(model)
    return {f"{name}.weight": ones[f"{name}.weight"] != 0 for name in layers_of(model)}


class Dense:
    """The definition: an average of dense weights, set to zero where no connection is."""

    def __init__(self, buffers: bool = False) -> None:
        self.average: dict[str, Tensor] = {}
        self.buffers = buffers

    def update(self, model: nn.Module) -> None:
        now = dense_of(model)
        parameters = {name for name, _ in rewire.densify(copy.deepcopy(model)).named_parameters()}
        if not self.average:
            self.average = now
            return
        for name, weight in now.items():
            averaged = weight.is_floating_point() and (self.buffers or name in parameters)
            old = self.average[name]
            self.average[name] = DECAY * old + (1 - DECAY) * weight if averaged else weight

    def rewired(self, model: nn.Module) -> None:
        for name, mask in masks_of(model).items():
            if self.average:
                self.average[name] = self.average[name] * mask

    def compare(self, module: nn.Module) -> None:
        found = dense_of(module)
        assert found.keys() == self.average.keys()
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, self.average[name], rtol=1e-12, atol=1e-14)


@methods
@pytest.mark.parametrize("buffers", [False, True])
@pytest.mark.parametrize("storage", ["sparse", "masked"])
def test_it_is_the_average_of_dense_weights(storage: str, buffers: bool, method: str) -> None:
    model = make(storage)
    optimizer = sgd(model)
    rewirer = METHODS[method](model, optimizer)
    ema, dense = rewire.EMA(model, DECAY, average_buffers=buffers), Dense(buffers)
    grown = 0
    for t in range(14):
        train(model, optimizer, t)
        rewiring = rewirer.step()
        if rewiring is not None:
            dense.rewired(model)
            grown += rewiring.grown
        ema.update()
        dense.update(model)
        dense.compare(ema.module)
        assert masks_equal(ema.module, model)
    assert grown > 10
    x, _ = images(99)
    expected = copy.deepcopy(model)
    expected.load_state_dict(ema.module.state_dict())
    torch.testing.assert_close(ema(x.double()), expected.eval()(x.double()), rtol=1e-10, atol=1e-12)


def masks_equal(a: nn.Module, b: nn.Module) -> bool:
    one, other = masks_of(a), masks_of(b)
    return all(torch.equal(one[name], other[name]) for name in one)


@methods
@pytest.mark.parametrize(
    "options",
    [
        {"avg_fn": get_ema_avg_fn(DECAY)},
        {"multi_avg_fn": get_ema_multi_avg_fn(DECAY)},
    ],
)
def test_torchs_averaged_model_follows_a_rewirer(options: Any, method: str) -> None:
    model = make()
    optimizer = sgd(model)
    rewirer = METHODS[method](model, optimizer)
    averaged, dense = AveragedModel(model, **options), Dense()
    rewirer.follow(averaged)
    for t in range(14):
        train(model, optimizer, t)
        if t % 2 == 0:  # not at every rewiring
            averaged.update_parameters(model)
            dense.update(model)
        if rewirer.step() is not None:
            dense.rewired(model)
        dense.compare(averaged.module) if t % 2 == 0 else None
    assert len(rewirer.history) > 3


def test_averages_at_connections_that_come_and_go() -> None:
    layer = rewire.SparseLinear(3, 2, False, connections=1, dtype=torch.float64)

    def put(*weights: tuple[int, float]) -> None:
        keys = torch.tensor([key for key, _ in weights])
        values = torch.tensor([w for _, w in weights], dtype=torch.float64)
        layer.set_connections(rewire.Connections.from_keys(keys, 3, 2), values)

    put((1, 8.0), (4, 2.0))
    ema = rewire.EMA(layer, 0.5)
    ema.update()
    assert weights_of(ema.module) == {1: 8.0, 4: 2.0}
    put((1, 4.0), (5, 0.0))  # 4 goes, 5 comes
    ema.update()
    assert weights_of(ema.module) == {1: 6.0, 5: 0.0}
    put((0, 0.0), (4, 1.0), (5, 2.0))  # 4 is back, without its past
    ema.update()
    assert weights_of(ema.module) == {0: 0.0, 4: 0.5, 5: 1.0}
    put((5, 3.0))
    ema.update()
    assert weights_of(ema.module) == {5: 2.0}


def weights_of(layer: Any) -> dict[int, float]:
    keys = layer.connections.keys().tolist()
    return dict(zip(keys, layer.values.flatten().tolist(), strict=True))


def test_equal_averages_by_a_function() -> None:
    layer = nn.Linear(2, 1, bias=False).double()
    ema = rewire.EMA(layer, lambda n: n / (n + 1))
    for value in (1.0, 2.0, 6.0):
        nn.init.constant_(layer.weight, value)
        ema.update()
    assert ema.module.weight.tolist() == [[3.0, 3.0]]
    assert int(ema.updates) == 3


@methods
def test_it_resumes_to_the_bit(method: str) -> None:
    def start() -> tuple[Any, ...]:
        model = make()
        optimizer = sgd(model)
        return model, optimizer, METHODS[method](model, optimizer), rewire.EMA(model, DECAY)

    def go(parts: tuple[Any, ...], steps: range) -> None:
        model, optimizer, rewirer, ema = parts
        for t in steps:
            train(model, optimizer, t)
            rewirer.step()
            ema.update()

    whole, first = start(), start()
    go(whole, range(13))
    go(first, range(7))
    saved = copy.deepcopy([part.state_dict() for part in first])
    for order in ((0, 1, 2, 3), (3, 2, 1, 0)):
        again = start()
        for i in order:
            again[i].load_state_dict(copy.deepcopy(saved[i]))
        go(again, range(7, 13))
        for one, other in ((whole[0], again[0]), (whole[3], again[3])):
            a, b = one.state_dict(), other.state_dict()
            assert a.keys() == b.keys()
            assert all(torch.equal(a[key], b[key]) for key in a)
    assert int(whole[3].updates) == 13


def test_an_average_of_other_connections_can_be_loaded() -> None:
    model = make()
    optimizer = sgd(model)
    rewirer = rewire.SET(model, optimizer, every=1, until=60)
    ema, dense = rewire.EMA(model, DECAY), Dense()
    ema.update()
    dense.update(model)
    old = copy.deepcopy(ema.state_dict())
    train(model, optimizer, 0)
    rewirer.step()
    ema.update()
    ema.load_state_dict(old)
    dense.compare(ema.module)
    dense.rewired(model)
    ema.update()
    dense.update(model)
    dense.compare(ema.module)


def test_averages_have_memory_of_their_own() -> None:
    model = make()
    rewirer = rewire.SET(model, sgd(model), every=1, until=60)
    ema, followed = rewire.EMA(model, DECAY), copy.deepcopy(model)
    rewirer.follow(followed)
    rewirer.step()
    ema.update()
    addresses = [
        {t.data_ptr() for t in [*m.parameters(), *m.buffers()]}
        for m in (model, ema.module, followed)
    ]
    assert [len(a & b) for a in addresses for b in addresses if a is not b] == [0] * 6


def test_gradual_hands_averages_over() -> None:
    for follows in (False, True):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = rewire.sparsify(Net(), density=1, weights="keep", storage="masked").double()
        optimizer = sgd(model)
        rewirer = rewire.Gradual(model, optimizer, sparsity=0.6, every=2, until=6)
        ema, dense = rewire.EMA(model, DECAY), Dense()
        averaged = AveragedModel(model, avg_fn=get_ema_avg_fn(DECAY))
        if follows:
            rewirer.follow(averaged)
        for t in range(10):
            train(model, optimizer, t)
            if rewirer.step() is not None:
                dense.rewired(model)
            ema.update()
            dense.update(model)
            dense.compare(ema.module)
            if follows:
                averaged.update_parameters(model)
                dense.compare(averaged.module)
        assert rewirer.handed_over
        assert all(isinstance(m, rewire.SparseLayer) for m in layers_of(ema.module).values())


def test_topkast_keeps_averages_of_all_weights() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = rewire.sparsify(Net(), sparsity=0.7, weights="dense", storage="masked").double()
    optimizer = sgd(model)
    rewirer = rewire.TopKAST(model, optimizer, every=2)
    ema = rewire.EMA(model, DECAY)
    expected: dict[str, Tensor] = {}
    for t in range(8):
        train(model, optimizer, t)
        rewirer.step()
        ema.update()
        for name, p in model.named_parameters():
            old = expected.get(name, p.detach())
            expected[name] = DECAY * old + (1 - DECAY) * p.detach()
        for name, p in ema.module.named_parameters():
            torch.testing.assert_close(p, expected[name], rtol=1e-12, atol=1e-14)
        assert masks_equal(ema.module, model)


def test_files_and_batch_norms(tmp_path: Any) -> None:
    model = make().float()
    optimizer = sgd(model)
    rewirer = METHODS["gse"](model, optimizer)
    ema = rewire.EMA(model, DECAY)
    for t in range(7):
        x, y = images(t)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        rewirer.step()
        ema.update()
    assert not any(p.requires_grad for p in ema.parameters())
    assert not ema.module.training
    update_bn([images(t)[0] for t in range(3)], ema)
    rewire.save(ema.module, tmp_path / "ema.safetensors")
    loaded = rewire.load(tmp_path / "ema.safetensors", Net()).eval()
    x, _ = images(50)
    torch.testing.assert_close(loaded(x), ema.eval()(x))
    torch.testing.assert_close(copy.deepcopy(ema)(x), ema(x))


def test_wrong_arguments() -> None:
    model = make()
    with pytest.raises(ValueError, match=r"decay must be a number in \[0, 1\], got 1.5"):
        rewire.EMA(model, 1.5)
    with pytest.raises(TypeError, match=r"model must be an nn.Module, got str"):
        rewire.EMA("model")  # type: ignore[arg-type]
    ema = rewire.EMA(model, lambda n: -1.0)
    ema.update()
    with pytest.raises(ValueError, match=r"decay\(1\) must be a number in \[0, 1\], got -1.0"):
        ema.update()
    gone = rewire.EMA(make())
    gc.collect()
    with pytest.raises(RuntimeError, match="does not exist any more"):
        gone.update()
    rewirer = METHODS["gse"](model, sgd(model))
    with pytest.raises(ValueError, match="is no copy of"):
        rewirer.follow(rewire.sparsify(nn.Sequential(nn.Linear(4, 4)), sparsity=0.5))
    with pytest.raises(ValueError, match="is no copy of"):
        rewirer.follow(model)
    with pytest.raises(ValueError, match="use_buffers=True would average the connections"):
        rewirer.follow(AveragedModel(model, use_buffers=True))
    with pytest.raises(TypeError, match=r"expected an nn.Module"):
        rewirer.follow(3)  # type: ignore[arg-type]


# Averages that do not follow ---------------------------------------------------------------------


class ByState(nn.Module):
    """As timm's ModelEmaV3 does it, by the place in the state dict."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = copy.deepcopy(model).eval()

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        pairs = zip(self.module.state_dict().values(), model.state_dict().values(), strict=True)
        for mine, other in pairs:
            mine.lerp_(other, 0.2) if mine.is_floating_point() else mine.copy_(other)


AVERAGES: dict[str, Callable[[nn.Module], Any]] = {
    "torch": lambda m: AveragedModel(m, avg_fn=get_ema_avg_fn(DECAY)),
    "torch swa": AveragedModel,
    "torch buffers": lambda m: AveragedModel(m, avg_fn=get_ema_avg_fn(0.999), use_buffers=True),
    "timm's rule": ByState,
}


@pytest.mark.parametrize("name", AVERAGES)
@pytest.mark.parametrize("scope", ["layer", "global"])
def test_averages_by_place_are_refused_before_anything_changes(name: str, scope: str) -> None:
    model = make()
    optimizer = sgd(model)
    rewirer = rewire.GSE(model, optimizer, every=2, until=60, scope=scope)
    averaged = AVERAGES[name](model)
    train(model, optimizer, 0)
    rewirer.step()
    averaged.update_parameters(model)
    train(model, optimizer, 1)
    before = copy.deepcopy(model.state_dict())
    state = copy.deepcopy(optimizer.state_dict()["state"])
    with pytest.raises(
        RuntimeError, match=r"by place.*average with rewire\.EMA, or call rewirer\.follow"
    ):
        rewirer.step()
    assert rewirer.t == 1
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    now = optimizer.state_dict()["state"]
    assert all(
        torch.equal(now[i]["momentum_buffer"], s["momentum_buffer"]) for i, s in state.items()
    )
    kept = copy.deepcopy(averaged)  # as it says
    del averaged
    gc.collect()
    assert rewirer.step() is not None
    assert kept is not None


def test_the_rule_of_timm_follows() -> None:
    model = make()
    optimizer = sgd(model)
    rewirer = METHODS["gse"](model, optimizer)
    averaged, dense = ByState(model), Dense(buffers=True)
    rewirer.follow(averaged)
    dense.update(model)
    for t in range(8):
        train(model, optimizer, t)
        if rewirer.step() is not None:
            dense.rewired(model)
        averaged.update_parameters(model)
        dense.update(model)
        dense.compare(averaged.module)


def test_averaged_connections_are_found_before_anything_changes() -> None:
    model = make()
    optimizer = sgd(model)
    rewirer = rewire.GSE(model, optimizer, every=1, until=60)
    averaged = ByState(model)
    rewirer.follow(averaged)
    train(model, optimizer, 0)
    averaged.module.fc1.indices.sub_(1)  # as rounding would
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="has averaged the connections themselves"):
        rewirer.step()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("data", [False, True])
def test_averages_by_hand_are_warned_of_once(data: bool) -> None:
    model = make()
    optimizer = sgd(model)
    rewirer = rewire.SET(model, optimizer, every=5, until=60, scope="layer")
    teacher = copy.deepcopy(model)

    @torch.no_grad()
    def average() -> None:
        for mine, other in zip(teacher.parameters(), model.parameters(), strict=True):
            (mine.data if data else mine).lerp_(other.data, 0.1)

    for t in range(4):
        train(model, optimizer, t)
        average()
        assert rewirer.step() is None
    train(model, optimizer, 4)
    average()
    with pytest.warns(UserWarning, match="keep changing.*rewirer.follow") as caught:
        rewirer.step()
    assert len(caught) == len(layers_of(model))
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rewirer.step()


def test_snapshots_trained_copies_and_followers_are_left_alone() -> None:
    model = make()
    optimizer = sgd(model)
    rewirer = rewire.SET(model, optimizer, every=1, until=60)
    snapshot, best, trained, own, followed, pruned = (copy.deepcopy(model) for _ in range(6))
    with torch.no_grad():
        pruned.fc1.values.mul_(pruned.fc1.values.abs() > 0.1)  # once
    ema = rewire.EMA(model)
    rewirer.follow(followed)
    optimizers = {id(m): sgd(m) for m in (trained, own)}
    other = rewire.SET(own, optimizers[id(own)], every=2, until=60)
    before = copy.deepcopy(snapshot.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for t in range(5):
            train(model, optimizer, t)
            best.load_state_dict(model.state_dict())
            train(trained, optimizers[id(trained)], t)
            train(own, optimizers[id(own)], t)
            optimizers[id(own)].zero_grad()
            other.step()
            with torch.no_grad():
                for p in followed.parameters():
                    p.mul_(0.9)
            rewirer.step()
            ema.update()
    assert all(torch.equal(v, before[k]) for k, v in snapshot.state_dict().items())
    assert masks_equal(followed, model)
    assert not masks_equal(trained, model)


# The real ones, where they are installed ---------------------------------------------------------


def test_timms_average() -> None:
    timm = pytest.importorskip("timm.utils")
    model = make()
    optimizer = sgd(model)
    rewirer = METHODS["gse"](model, optimizer)
    averaged, dense = timm.ModelEmaV3(model, decay=DECAY), Dense(buffers=True)
    rewirer.follow(averaged)
    dense.update(model)
    for t in range(8):
        train(model, optimizer, t)
        if rewirer.step() is not None:
            dense.rewired(model)
        averaged.update(model)
        dense.update(model)
        dense.compare(averaged.module)
    careless = timm.ModelEmaV3(model, decay=DECAY)
    careless.update(model)
    train(model, optimizer, 9)
    with pytest.raises(RuntimeError, match="is averaged with it by place"):
        rewirer.step()


@pytest.mark.parametrize("follows", [True, False])
def test_lightnings_callback(follows: bool, tmp_path: Any) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    from lightning.pytorch.callbacks import EMAWeightAveraging

    dense = Dense()

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = make()

        def on_fit_start(self) -> None:
            if follows:
                self.rewirer.follow(callback._average_model)

        def configure_optimizers(self) -> Any:
            optimizer = sgd(self)
            self.rewirer = METHODS["gse"](self, optimizer)
            return optimizer

        def training_step(self, batch: Any, t: int) -> Tensor:
            return nn.functional.cross_entropy(self.net(batch[0].double()), batch[1])

        def on_train_batch_end(self, *args: Any) -> None:  # after those of callbacks
            dense.update(self.net)
            if self.rewirer.step() is not None:
                dense.rewired(self.net)

        def validation_step(self, batch: Any, t: int) -> None:
            dense.compare(self.net)  # which holds the average meanwhile

    callback = EMAWeightAveraging(decay=DECAY, use_buffers=False)
    trainer = lightning.Trainer(
        max_epochs=2,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        accelerator="cpu",
        default_root_dir=tmp_path,
    )
    module, batches = Module(), DataLoader([images(t) for t in range(6)], batch_size=None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if not follows:
            with pytest.raises(RuntimeError, match="is averaged with it by place"):
                trainer.fit(module, batches, batches)
            return
        trainer.fit(module, batches, batches)
    dense.compare(module.net)
    assert len(module.rewirer.history) == 4
