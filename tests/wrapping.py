"""Optimizers around optimizers, as public implementations write them."""

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer


class SAM(Optimizer):
    """Sharpness-aware minimisation: its base optimizer shares its param groups.

    Remembers the weights (``old_p``), or what was added to them (``e_w``).
    """

    def __init__(
        self, params: Any, base: type[Optimizer], remembers: str = "old_p", **options: Any
    ):
        super().__init__(params, {"rho": 0.05, **options})
        self.remembers = remembers
        self.base_optimizer = base(self.param_groups, **options)  # type: ignore[call-arg]
        self.param_groups = self.base_optimizer.param_groups

    def trained(self) -> list[Tensor]:
        return [p for g in self.param_groups for p in g["params"] if p.grad is not None]

    @torch.no_grad()
    def first_step(self) -> None:
        norm = torch.stack([p.grad.norm() for p in self.trained()]).norm()  # type: ignore[union-attr]
        for p in self.trained():
            e_w = 0.05 * p.grad / norm  # type: ignore[operator]
            self.state[p][self.remembers] = p.data.clone() if self.remembers == "old_p" else e_w
            p.add_(e_w)
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for p in self.trained():
            if self.remembers == "old_p":
                p.data = self.state[p]["old_p"]
            else:
                p.sub_(self.state[p]["e_w"])
        self.base_optimizer.step()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.first_step()
        with torch.enable_grad():
            closure()
        self.second_step()


class Lookahead(Optimizer):
    """As timm has it: without the constructor of its base class; slow weights in the inner state."""

    def __init__(self, base: Optimizer, k: int = 2) -> None:
        self._optimizer_step_pre_hooks: Any = {}
        self._optimizer_step_post_hooks: Any = {}
        self._base_optimizer, self.k, self.t = base, k, 0
        self.param_groups, self.defaults = base.param_groups, base.defaults
        self.state = defaultdict(dict)

    def slow(self, p: Tensor) -> Tensor:
        slow: Tensor = self._base_optimizer.state[p].setdefault("slow", p.detach().clone())
        return slow

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self._base_optimizer.step()
        self.t += 1
        for p in (p for g in self.param_groups for p in g["params"]):
            if self.t % self.k == 0:
                slow = self.slow(p)
                slow.add_(p - slow, alpha=0.5)
                p.copy_(slow)


class ListedLookahead(Lookahead):
    """As in the first public implementations: slow weights in lists, by param group."""

    def __init__(self, base: Optimizer) -> None:
        super().__init__(base)
        self.slow_weights = [[p.detach().clone() for p in g["params"]] for g in base.param_groups]

    def slow(self, p: Tensor) -> Tensor:
        pairs = zip(self.param_groups, self.slow_weights, strict=True)
        return next(s for g, ws in pairs for q, s in zip(g["params"], ws, strict=True) if q is p)


class MappedLookahead(Lookahead):
    """Slow weights in a dictionary of its own."""

    def __init__(self, base: Optimizer) -> None:
        super().__init__(base)
        self.slow_weights = {p: p.detach().clone() for g in base.param_groups for p in g["params"]}

    def slow(self, p: Tensor) -> Tensor:
        return self.slow_weights[p]


class ScheduleFree(Optimizer):
    """SGD without a schedule: the weights are a mixture of z, which is in the state, and its average."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            c = 1 / (group["k"] + 1)
            for p in (p for p in group["params"] if p.grad is not None):
                z = self.state[p].setdefault("z", p.detach().clone())
                p.lerp_(z, c).add_(p.grad, alpha=0.1 * (0.9 * (1 - c) - 1))
                z.sub_(p.grad, alpha=0.1)
            group["k"] += 1


class Delegate(Optimizer):
    """As accelerate has it: state, groups and defaults are those of the optimizer inside."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer_step_pre_hooks: Any = {}
        self._optimizer_step_post_hooks: Any = {}
        self.optimizer = optimizer
        self.outer = self  # a cycle

    state = property(lambda self: self.optimizer.state)  # type: ignore[assignment]
    param_groups = property(lambda self: self.optimizer.param_groups)  # type: ignore[assignment]
    defaults = property(lambda self: self.optimizer.defaults)  # type: ignore[assignment]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step()


class Several(Optimizer):
    """One optimizer for each parameter, in a list."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.parts = [Adam([p], lr=0.01) for p in self.param_groups[0]["params"]]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()


def momentum(params: Any) -> Optimizer:
    return SGD(params, lr=0.1, momentum=0.9)


WRAPPERS: dict[str, Any] = {
    "sam": lambda p: SAM(p, SGD, lr=0.1, momentum=0.9),
    "sam e_w adam": lambda p: SAM(p, Adam, "e_w", lr=0.01),
    "lookahead": lambda p: Lookahead(momentum(p)),
    "listed lookahead": lambda p: ListedLookahead(momentum(p)),
    "mapped lookahead": lambda p: MappedLookahead(momentum(p)),
    "lookahead in a delegate": lambda p: Delegate(ListedLookahead(Adam(p, lr=0.01))),
    "adamw in a delegate": lambda p: Delegate(AdamW(p, lr=0.01, weight_decay=0.1)),
    "schedule-free": ScheduleFree,
    "several": Several,
}
