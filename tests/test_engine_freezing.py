"""What requires gradients is what did when a layer was called."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine_models import converted, image, loss_of, same


class Adversaries(nn.Module):
    """Both halves of a GAN step in one forward pass: the critic is frozen while it judges the generator."""

    def __init__(self, frozen_first: bool, norm: bool) -> None:
        super().__init__()
        self.frozen_first = frozen_first
        self.generator = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 3, 1))
        between = nn.BatchNorm2d(4) if norm else nn.Identity()
        self.critic = nn.Sequential(nn.Conv2d(3, 4, 3), between, nn.ReLU(), nn.Conv2d(4, 1, 3))

    def judge(self, x: Tensor, frozen: bool) -> Any:
        self.critic.requires_grad_(not frozen)
        y = self.critic(self.generator(x) if frozen else x)
        self.critic.requires_grad_(True)
        return y

    def forward(self, x: Tensor) -> Any:
        return [self.judge(x, frozen) for frozen in (self.frozen_first, not self.frozen_first)]


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("frozen_first", [False, True])
def test_parameters_that_are_frozen_for_one_of_two_calls(frozen_first: bool, norm: bool) -> None:
    same(converted(Adversaries(frozen_first, norm)), image())


class Changing(nn.Module):
    """Freezes, or unfreezes, what a recorded layer reads."""

    def __init__(self, name: str, now: bool, layers: int) -> None:
        super().__init__()
        self.name, self.now = name, now
        self.parts = nn.ModuleList(nn.Conv2d(3, 3, 3, padding=1) for _ in range(layers))

    def forward(self, x: Tensor) -> Any:
        y = x
        for part in self.parts:
            y = F.relu(part(y))
        for name, parameter in self.named_parameters():
            if self.name in name:
                parameter.requires_grad_(self.now)
        return y


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("now", [False, True])
@pytest.mark.parametrize("name", ["parts.0", "bias", ""])
def test_parameters_that_change_before_their_layer_is_computed(
    name: str, now: bool, layers: int
) -> None:
    def step(model: nn.Module, x: Tensor) -> Any:
        for parameter_name, parameter in model.named_parameters():
            if name in parameter_name:
                parameter.requires_grad_(not now)
        y = model(x)
        flags = [float(t.requires_grad) for t in (y, *model.parameters())]
        model.requires_grad_(True)
        loss_of(y).backward()
        return [y, torch.tensor(flags)]

    same(converted(Changing(name, now, layers)), image(), step)


def test_an_input_that_requires_gradients_only_after_it_was_read() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            early = F.relu(self.a(x))
            return early + F.relu(self.b(x.requires_grad_()))

    same(converted(Model()), torch.randn(4, 3, dtype=torch.float64), grad=False)


def test_an_input_that_is_detached_in_place_before_it_is_read() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.a = nn.Parameter(torch.ones(3)), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = x * self.scale
            y = F.relu(self.a(x))
            x.detach_()
            return y

    model = converted(Model())
    with pytest.raises(RuntimeError, match=r"the input of a linear.*x\.detach_\(\)"):
        model(torch.randn(4, 3, dtype=torch.float64))


@pytest.mark.parametrize("batch", [1, 4])
def test_the_output_of_a_frozen_layer_is_held_and_read_by_another(batch: int) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 3, 3), nn.Conv2d(3, 3, 3)
            self.a.requires_grad_(False)

        def forward(self, x: Tensor) -> Any:
            y = self.a(x)
            return y, F.relu(self.b(y))

    same(converted(Model()), image(batch), grad=False)
