"""Loops of Accelerate: which steps count, and runs that are stopped and resumed."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rewire

accelerate = pytest.importorskip("accelerate")

from rewire.integrations.accelerate import prepare  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


class Run:
    """A script of a user's."""

    def __init__(self, accumulate: int = 1) -> None:
        self.accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(12, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 3))
        model = rewire.sparsify(net, 0.6)
        x, y = torch.randn(128, 12), torch.randint(3, (128,))
        data = torch.utils.data.TensorDataset(x, y)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(
            model,
            torch.optim.AdamW(model.parameters(), 0.01),
            torch.utils.data.DataLoader(data, batch_size=8),
        )
        rewirer = rewire.GSE(self.model, self.optimizer, every=3, until=100)
        self.rewirer = prepare(self.accelerator, rewirer)

    def train(self, first: int, last: int) -> "Run":
        for i, (x, y) in enumerate(self.loader):
            if first <= i < last:
                with self.accelerator.accumulate(self.model):
                    loss = nn.functional.cross_entropy(self.model(x), y)
                    self.accelerator.backward(loss)
                    self.optimizer.step()
                    self.rewirer.step()
                    self.optimizer.zero_grad()
        return self


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_stopped_run_resumes_bit_for_bit(tmp_path: Path, accumulate: int) -> None:
    whole = Run(accumulate).train(0, 16)
    assert whole.rewirer.rewirer.t == 16 // accumulate
    first = Run(accumulate).train(0, 10)
    first.accelerator.save_state(str(tmp_path))
    second = Run(accumulate)
    second.accelerator.load_state(str(tmp_path))
    assert second.rewirer.rewirer.t == 10 // accumulate
    second.train(10, 16)
    assert list(second.rewirer.rewirer.history) == list(whole.rewirer.rewirer.history)
    mine, other = second.model.state_dict(), whole.model.state_dict()
    for name in other:
        assert torch.equal(mine[name], other[name]), name


def test_steps_that_are_skipped_do_not_count() -> None:
    run = Run()
    for skipped, t in ((False, 1), (True, 1), (False, 2)):
        run.optimizer._is_overflow = skipped  # as it is where a scaler has found infinities
        run.rewirer.step()
        assert run.rewirer.rewirer.t == t


def test_what_cannot_be_resumed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator: Any = accelerate.Accelerator(cpu=True)
    model = rewire.sparsify(nn.Linear(4, 4), density=1, weights="keep", storage="masked")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    gradual = rewire.Gradual(model, optimizer, sparsity=0.5, every=2, until=4)
    with pytest.raises(ValueError, match='storage="masked"'):
        prepare(accelerator, gradual)
    monkeypatch.setattr(accelerate.Accelerator, "num_processes", 2)
    with pytest.raises(ValueError, match=r"rewire\.distributed\.Parallel"):
        prepare(accelerator, gradual)
