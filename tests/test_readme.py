"""The README's own code runs as it is written there."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rewire

README = (Path(__file__).parents[1] / "README.md").read_text()
LOOP, CHECKPOINT = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
SAVE, LOAD = CHECKPOINT.split("\n\n")


class MyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.conv = nn.Conv2d(3, 16, 3)
        self.norm = nn.BatchNorm2d(16)
        self.out = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(self.conv(x)).relu().mean((2, 3)))  # type: ignore[no-any-return]


def batches(*numbers: int) -> list[tuple[Tensor, Tensor]]:
    def batch(number: int) -> tuple[Tensor, Tensor]:
        random = torch.Generator().manual_seed(number)
        x = torch.randn(8, 3, 8, 8, generator=random)
        return x, torch.randint(10, (8,), generator=random)

    return [batch(number) for number in numbers]


def space(*numbers: int) -> dict[str, Any]:
    """What the README leaves to its reader."""
    return {"MyModel": MyModel, "loss_fn": nn.CrossEntropyLoss(), "loader": batches(*numbers)}


def test_the_loop_trains_saves_loads_and_exports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names = space(0, 1, 2)
    exec(LOOP, names)
    assert "conv" in capsys.readouterr().out  # the summary
    assert names["rewirer"].t == 3
    model = names["model"]
    assert isinstance(model.conv, rewire.SparseConv2d)
    state = torch.load("dense.pt", weights_only=True)
    plain = MyModel()
    plain.load_state_dict(state)
    x = batches(9)[0][0]
    torch.testing.assert_close(plain.eval()(x), model.eval()(x))


def test_a_stopped_loop_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    training = LOOP[: LOOP.index("\n\nrewire.save")]
    assert "every=1000, until=46_800" in training
    start = training.replace("every=1000, until=46_800", "every=2, until=20")  # to see some
    loop = start[start.index("for x, y in loader") :]

    whole = space(0, 1, 2, 3, 4, 5, 6)
    exec(start, whole)
    first = space(0, 1, 2)
    exec(start, first)
    exec(SAVE, first)
    second = space()
    exec(start, second)
    second["parts"] = {name: second[name] for name in first["parts"]}
    exec(LOAD, second)
    second["loader"] = batches(3, 4, 5, 6)
    exec(loop, second)

    assert len(second["rewirer"].history) == 3
    mine, other = second["model"].state_dict(), whole["model"].state_dict()
    assert mine.keys() == other.keys()
    for name, tensor in mine.items():
        assert torch.equal(tensor, other[name]), name
