"""The Lightning callback: what it counts, and runs that are stopped and resumed."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rewire

pl = pytest.importorskip("lightning.pytorch")

from rewire.integrations.lightning import RewireCallback  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # Lightning's advice, and what it imports
]


def data() -> torch.utils.data.DataLoader[Any]:
    random = torch.Generator().manual_seed(0)
    x, y = torch.randn(64, 12, generator=random), torch.randint(3, (64,), generator=random)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=8)


def same() -> torch.utils.data.DataLoader[Any]:
    x, y = next(iter(data()))
    dataset = torch.utils.data.TensorDataset(x.repeat(8, 1), y.repeat(8))
    return torch.utils.data.DataLoader(dataset, batch_size=8)


class Module(pl.LightningModule):  # type: ignore[misc,name-defined]
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        layers = [nn.Linear(12, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 3)]
        self.net = rewire.sparsify(nn.Sequential(*layers), 0.6)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 0.01)


def trainer(folder: Path, epochs: int, *callbacks: Any, **settings: Any) -> Any:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return pl.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        callbacks=list(callbacks),
        default_root_dir=folder,
        **{"enable_checkpointing": False, **quiet, **settings},
    )


def gse(**settings: Any) -> RewireCallback:
    return RewireCallback(rewire.GSE, **{"every": 3, "until": 100, **settings})


def own_loop(steps: int, accumulate: int = 1, batches: Any = None) -> nn.Module:
    """The same training without Lightning."""
    module = Module()
    optimizer = module.configure_optimizers()
    rewirer = rewire.GSE(module, optimizer, every=3, until=100)
    done = 0
    while True:
        for i, batch in enumerate(batches or data()):
            (module.training_step(batch, 0) / accumulate).backward()
            if (i + 1) % accumulate == 0:
                optimizer.step()
                rewirer.step()
                optimizer.zero_grad()
                done += 1
            if done == steps:
                return module


def assert_same(a: nn.Module, b: nn.Module) -> None:
    mine, other = a.state_dict(), b.state_dict()
    assert mine.keys() == other.keys()
    for name in mine:
        assert torch.equal(mine[name], other[name]), name


@pytest.mark.parametrize("accumulate", [1, 2])
def test_it_trains_what_a_loop_of_ones_own_trains(tmp_path: Path, accumulate: int) -> None:
    callback, module, seen = gse(logs=[lambda r: seen.append(r.step)]), Module(), []
    trainer(tmp_path, 2, callback, accumulate_grad_batches=accumulate).fit(module, data())
    assert callback.rewirer is not None
    assert callback.rewirer.t == 16 // accumulate
    assert seen == [s for s in (3, 6, 9, 12, 15) if s <= 16 // accumulate]
    assert_same(module, own_loop(16 // accumulate, accumulate))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_stopped_run_resumes_bit_for_bit(tmp_path: Path, accumulate: int) -> None:
    callback, whole = gse(), Module()
    settings = {"accumulate_grad_batches": accumulate}
    trainer(tmp_path, 4, callback, **settings).fit(whole, data())
    first = trainer(tmp_path, 2, gse(), **settings)
    first.fit(Module(), data())
    first.save_checkpoint(tmp_path / "stopped.ckpt")
    again, module = gse(), Module()
    path = str(tmp_path / "stopped.ckpt")
    trainer(tmp_path, 4, again, **settings).fit(module, data(), ckpt_path=path)
    assert again.rewirer is not None
    assert callback.rewirer is not None
    assert again.rewirer.t == 32 // accumulate
    assert list(again.rewirer.history) == list(callback.rewirer.history)
    assert_same(module, whole)


def test_a_run_that_is_stopped_within_an_epoch(tmp_path: Path) -> None:
    """Lightning does not go on at the same batch then, whatever the model is: all batches are the same."""
    first = trainer(tmp_path, 6, gse(), max_steps=11)
    first.fit(Module(), same())
    first.save_checkpoint(tmp_path / "stopped.ckpt")
    again, module = gse(), Module()
    run = trainer(tmp_path, 6, again)
    run.fit(module, same(), ckpt_path=str(tmp_path / "stopped.ckpt"))
    assert again.rewirer is not None
    assert again.rewirer.t == run.global_step > 40
    assert_same(module, own_loop(run.global_step, batches=same()))


def test_a_second_fit_begins_anew_and_a_test_loads_nothing(tmp_path: Path) -> None:
    callback, module = gse(), Module()
    one = trainer(tmp_path, 1, callback)
    one.fit(module, data())
    one.save_checkpoint(tmp_path / "one.ckpt")
    trainer(tmp_path, 1, callback).fit(module, data())
    assert callback.rewirer is not None
    assert callback.rewirer.t == 8
    optimizer = callback.rewirer.optimizer
    optimizer.step()  # after the run: no step of a rewiring
    assert callback.rewirer.t == 8


class Halves(Module):
    """Two parts with an optimizer each, stepped by hand, the second every other time."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.other = rewire.sparsify(nn.Linear(12, 3), 0.5)

    def training_step(self, batch: list[Tensor], index: int) -> None:
        for number, (net, optimizer) in enumerate(
            zip((self.net, self.other), self.optimizers(), strict=True)
        ):
            if index % (number + 1) == 0:
                optimizer.zero_grad()
                self.manual_backward(nn.functional.cross_entropy(net(batch[0]), batch[1]))
                optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), 0.1) for part in (self.net, self.other)]


def test_parts_with_optimizers_of_their_own(tmp_path: Path) -> None:
    first, second = gse(part="net"), RewireCallback(rewire.SET, part="other", every=2, until=50)
    run = trainer(tmp_path, 1, first, second)
    run.fit(Halves(), data())
    assert first.rewirer is not None
    assert second.rewirer is not None
    assert (first.rewirer.t, second.rewirer.t) == (8, 4)
    run.save_checkpoint(tmp_path / "halves.ckpt")
    third, fourth = gse(part="net"), RewireCallback(rewire.SET, part="other", every=2, until=50)
    trainer(tmp_path, 2, third, fourth).fit(
        Halves(), data(), ckpt_path=str(tmp_path / "halves.ckpt")
    )
    assert third.rewirer is not None
    assert fourth.rewirer is not None
    assert (third.rewirer.t, fourth.rewirer.t) == (16, 8)
    with pytest.raises(ValueError, match=r"2 hold some of them each.*part="):
        trainer(tmp_path, 1, gse()).fit(Halves(), data())


class Dense(Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = rewire.densify(self.net)


def test_mistakes_are_errors_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"Dense has no sparse layers.*rewire\.sparsify"):
        trainer(tmp_path, 1, gse()).fit(Dense(), data())
    model = Module()
    model.net = rewire.sparsify(rewire.densify(model.net), 0.5, weights="keep", storage="masked")
    callback = RewireCallback(rewire.Gradual, sparsity=0.6, every=2, until=8)
    with pytest.raises(ValueError, match='storage="masked"'):
        trainer(tmp_path, 1, callback).fit(model, data())


def test_several_processes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pl.Trainer, "world_size", 2)
    with pytest.raises(ValueError, match=r"devices=1.*rewire\.distributed\.Parallel"):
        trainer(tmp_path, 1, gse()).fit(Module(), data())
