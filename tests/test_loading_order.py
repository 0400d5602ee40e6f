"""Every method resumes from the state dicts of the rewirer, the model and the optimizer, in this order."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import rewire
from rewire.methods.registry import METHODS
from test_registry import SPARSITY, Net, Run, batch

ORDER = ("rewirer", "model", "optimizer")
STEPS = 12
_FAST: dict[str, dict[str, Any]] = {
    "deepr": {"every": 1, "l1": 0.05},
    "dsr": {"threshold": 0.02},
    "gradual": {"sparsity": SPARSITY},
}


def rows() -> list[Any]:
    """Each method with each storage and scope, and each way to rewire, that it has."""
    found = []
    for name, method in METHODS.items():
        if method.kind != "rewirer" or method.start is None:
            continue
        scopes = ("global", "layer") if "scope" in method.options else (None,)
        for storage in ("sparse", "masked"):
            if not any(storage in one for one in method.storage):
                continue
            for scope in scopes:
                ways = (0, 1) if "growth_batches" in method.options else (None,)
                for batches in ways:
                    given = {"scope": scope, "growth_batches": batches}
                    options = {k: v for k, v in given.items() if v is not None}
                    words = [name, storage, *(f"{k}={v}" for k, v in options.items())]
                    found.append(pytest.param(name, storage, options, id=" ".join(words)))
    return found


def start(name: str, storage: str, options: dict[str, Any], seed: int = 0) -> Run:
    method = METHODS[name]
    torch.manual_seed(seed)
    target = {} if "density" in method.start else {"sparsity": SPARSITY}  # type: ignore[operator]
    how: dict[str, Any] = {"storage": storage, **(method.start or {})}
    model = rewire.sparsify(Net(), seed=seed, **target, **how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    settings = {"every": 3, "until": 9, "seed": seed, **_FAST.get(name, {}), **options}
    if name == "gradual":
        settings["storage"] = storage
    return Run(model, optimizer, method.make(model, optimizer, **settings))


def step(run: Run, at: int, *, half: str = "") -> None:
    """One step, or the half of it before or after the point at which it is saved."""
    torch.manual_seed(at)  # of dropout
    x, y = batch(at)
    if half != "second":
        run.optimizer.zero_grad()
        if getattr(run.rewirer, "waits", False):
            run.rewirer.rewire(F.cross_entropy(run.model(x), y) for _ in range(1))  # type: ignore[attr-defined]
        F.cross_entropy(run.model(x), y).backward()
        run.optimizer.step()
    if half != "first":
        run.rewirer.step()


@pytest.mark.parametrize("at", [4, 5.5, 6, 9, 11])
@pytest.mark.parametrize(("name", "storage", "options"), rows())
def test_one_order_goes_on_exactly(
    name: str, storage: str, options: dict[str, Any], at: float
) -> None:
    """Into other connections and weights: also in the middle of a step that ends with a rewiring, and of
    Gradual after its handover, into layers that are masked still."""
    first, second = start(name, storage, options), start(name, storage, options, seed=1)
    for one in range(int(at)):
        step(first, one)
    if at % 1:
        step(first, int(at), half="first")
    state = copy.deepcopy({part: getattr(first, part).state_dict() for part in ORDER})
    for part in ORDER:
        getattr(second, part).load_state_dict(state[part])
    for run in (first, second):
        if at % 1:
            step(run, int(at), half="second")
        for one in range(int(at + 0.5), STEPS):
            step(run, one)
    mine, theirs = first.model.state_dict(), second.model.state_dict()
    assert list(mine) == list(theirs)
    assert all(torch.equal(tensor, theirs[key]) for key, tensor in mine.items())
    assert list(first.rewirer.history) == list(second.rewirer.history)
    assert name == "static" or sum(r.pruned for r in first.rewirer.history) > 0


def test_what_follows_the_connections_must_be_of_as_many() -> None:
    """Of the whole model, where they move between layers; of each layer at the next rewiring."""
    first, second = (start("deepr", "sparse", {"scope": "global"}, seed=seed) for seed in (0, 1))
    for at in range(4):
        step(first, at)
    state = copy.deepcopy(first.rewirer.state_dict())
    second.rewirer.load_state_dict(state)  # but not the model's
    with pytest.raises(RuntimeError, match=r"sign is of .* others: load the states of the rewirer"):
        step(second, 4)
    sign = state["layers"]["fc1"]["state"]
    sign["sign"] = sign["sign"][:-1].clone()
    with pytest.raises(ValueError, match=r"does not fit: sign is of .* make the model as it was"):
        second.rewirer.load_state_dict(state)


def test_the_pages_load_in_that_order() -> None:
    top = Path(__file__).parents[1]
    parts = 'parts = {"rewirer": rewirer, "model": model, "optimizer": optimizer}'
    for page in ("README.md", "examples/own_loop.py"):
        assert parts in (top / page).read_text()
    for page in ("docs/methods.md", "CHANGELOG.md"):
        words = " ".join((top / page).read_text().split())
        assert "the rewirer, the model and the optimizer in this order" in words
    assert rewire.Rewirer.load_state_dict.__doc__ is not None
    assert (
        "load the model's and the optimizer's state after it"
        in rewire.Rewirer.load_state_dict.__doc__
    )
