"""All settings of a run, with the paper's recipe for what is not given."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rewire import models
from rewire.budgets import SHARES
from rewire.methods import METHODS
from rewire.methods.lottery import SPARSITIES
from rewire.methods.options import OPTIONS, check_options
from rewire.precision import FLOAT32, PRECISIONS
from rewire.training import toml
from rewire.training.schedule import MOST, Schedule

OPTIMIZERS = ("sgd", "adam", "adamw")
_CNNS = tuple(name for name in models.MODELS if name.startswith(("resnet", "vgg")))
MODELS = ("mlp", *_CNNS, "vit")  # those that take images


@dataclass(frozen=True)
class Config:
    """What a run depends on; ``config.toml`` holds exactly this.

    ``epochs``, ``drops``, ``until`` and ``warmup`` are in epochs and ``every`` in steps, all before
    ``scale`` and ``extend``. Between ``keep_dense`` and ``epochs`` are all options of methods
    (:mod:`rewire.methods.options`); what the method does not take is None.
    """

    dataset: str
    model: str
    method: str
    sparsity: float
    width: float
    assignment: str
    exact: bool
    keep_dense: tuple[str, ...]
    __annotations__.update({name: f"{option.kind} | None" for name, option in OPTIONS.items()})
    epochs: float
    drops: tuple[float, ...]
    drop_factor: float
    warmup: float
    scale: float
    extend: float
    batch_size: int
    optimizer: str
    lr: float
    momentum: float
    weight_decay: float
    label_smoothing: float
    pad: int | None
    image_size: int | None
    crop: str | None
    precision: str
    seed: int

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for a setting that makes no sense."""
        _check(self)

    if TYPE_CHECKING:

        def __getattr__(self, option: str) -> Any: ...

    def in_steps(self, epochs: float, steps_per_epoch: int) -> int:
        """A time, after ``scale`` and ``extend``."""
        exact = epochs * steps_per_epoch * self.scale * self.extend
        if exact > MOST:
            raise ValueError(f"{epochs:g} epochs are {exact:g} steps, more than {MOST:g}")
        return max(int(epochs > 0), round(exact))

    def to_toml(self) -> str:
        """The text of ``config.toml``."""
        return toml.dumps(asdict(self))

    def schedule(self, steps_per_epoch: int) -> Schedule:
        """The schedule in steps."""
        return Schedule.of(self, steps_per_epoch)

    @property
    def label(self) -> str:
        """A name for the run, another one for other settings."""
        dataset = Path(self.dataset).name or "images"
        parts = [dataset, self.model, self.method]
        if self.method != "dense":
            parts.append(f"{self.sparsity:g}")
        settings = asdict(self)
        if self.precision == FLOAT32:  # what a run is called is older than the choice
            del settings["precision"]
        else:
            parts.append(self.precision)
        digest = hashlib.sha256(toml.dumps(settings).encode()).hexdigest()[:6]
        return "-".join((*parts, f"seed{self.seed}", digest))


NAMES = tuple(field.name for field in fields(Config))
BEFORE = {"precision": FLOAT32}
"""What settings were before there was a choice: of files that do not have them."""

# Recipes ------------------------------------------------------------------------------------------

_PAPER: dict[str, Any] = {
    "model": "vgg16",
    "method": "gse",
    "sparsity": 0.95,
    "width": 1.0,
    "assignment": "erdos-renyi",
    "exact": True,
    "keep_dense": (),
    **{name: option.default for name, option in OPTIONS.items()},
    "epochs": 200.0,
    "drops": (80.0, 120.0),
    "drop_factor": 0.1,
    "warmup": 0.0,
    "scale": 1.0,
    "extend": 1.0,
    "batch_size": 128,
    "optimizer": "sgd",
    "lr": 0.1,
    "momentum": 0.9,
    "weight_decay": 1e-4,
    "label_smoothing": 0.0,
    "precision": FLOAT32,
    "seed": 0,
}
_IMAGENET: dict[str, Any] = _PAPER | {
    "model": "resnet50",
    "sparsity": 0.9,
    "until": 60.0,
    "subset": 2.0,
    "epochs": 100.0,
    "drops": (30.0, 60.0, 90.0),
    "warmup": 5.0,
    "label_smoothing": 0.1,
}
_FASHION: dict[str, Any] = _PAPER | {"model": "mlp"}
_DIGITS: dict[str, Any] = _PAPER | {
    "model": "mlp",
    "sparsity": 0.98,
    "every": 50,
    "until": 30.0,
    "epochs": 50.0,
    "drops": (20.0, 30.0),
    "batch_size": 32,
    "weight_decay": 1e-3,
    "pad": 1,
}
_RECIPES = {
    "digits": _DIGITS,
    "fashion-mnist": _FASHION,
    "cifar10": _PAPER,
    "cifar100": _PAPER,
}
_ADAM = 1e-3  # the usual learning rate of Adam
_VIT = 0.01


def recipe(given: Mapping[str, Any]) -> dict[str, Any]:
    """The default settings for this data set, model, method and optimizer."""
    defaults = _RECIPES.get(given.get("dataset", "digits"), _IMAGENET) | {"dataset": "digits"}
    chosen = {**defaults, **given}
    if chosen["optimizer"] in ("adam", "adamw"):
        defaults["lr"] = _ADAM
    elif chosen["model"] == "vit":
        defaults["lr"] = _VIT
    method = METHODS.get(chosen["method"])
    if method is not None:
        own = {name: option.differs for name, option in OPTIONS.items()}
        defaults |= {
            name: its[chosen["method"]] for name, its in own.items() if chosen["method"] in its
        }
        if "rounds" in method.options and isinstance(chosen["sparsity"], float):
            below = [s for s in SPARSITIES if s < chosen["sparsity"]]
            defaults["rounds"] = (*below, chosen["sparsity"])
        defaults |= {name: None for name in OPTIONS if name not in method.options}
    return defaults


def resolve(given: Mapping[str, Any]) -> Config:
    """The whole config: the given settings, and defaults for the others.

    Raises:
        ValueError: if something is given that does not exist, fit or make sense.

    Example:
        >>> config = resolve({"dataset": "cifar10", "model": "vit", "method": "set"})
        >>> config.lr, config.epochs, config.every, config.subset
        (0.01, 200.0, 1000, None)
    """
    given = {name: value for name, value in given.items() if value is not None}
    for name in given:
        if name not in NAMES:
            close = get_close_matches(name, NAMES, 1)
            hint = f"did you mean {close[0]}?" if close else f"there are: {', '.join(NAMES)}"
            raise ValueError(f"there is no setting {name!r}; {hint}")
    merged = recipe(given) | given
    _choice("method", merged["method"], tuple(METHODS))
    for name in given:
        if name in OPTIONS and name not in METHODS[merged["method"]].options:
            users = ", ".join(n for n, m in METHODS.items() if name in m.options)
            raise ValueError(f"{merged['method']} has no {name}, leave it out; it is for {users}")
    return Config(**{field.name: _typed(field, merged.get(field.name)) for field in fields(Config)})


def read_run(path: Path) -> dict[str, Any]:
    """The settings of a run that was begun, maybe before there were all of today's options."""
    found = toml.read(path)
    method = METHODS.get(found.get("method", ""))
    missing = [name for name in (method.options if method else ()) if name not in found]
    old = {name: OPTIONS[name].before for name in missing if OPTIONS[name].before is not None}
    return BEFORE | found | old


def read(path: Path, method: str | None = None) -> dict[str, Any]:
    """The settings in a TOML file, some or all; for another ``method``, without what it does not take."""
    found = toml.read(path)
    if method not in METHODS or method == found.get("method"):
        return found
    return {k: v for k, v in found.items() if k not in OPTIONS or k in METHODS[method].options}


def differences(ours: Config, theirs: Config | Mapping[str, Any]) -> str:
    """Which settings differ, in words; empty if none does. Of a mapping, those count that it has."""
    a = asdict(ours)
    b = asdict(theirs) if isinstance(theirs, Config) else theirs
    b = {name: tuple(v) if isinstance(v, list) else v for name, v in b.items()}  # from JSON
    return ", ".join(
        f"{name} {_word(b[name])} there, {_word(a[name])} here"
        for name in a
        if name in b and a[name] != b[name]
    )


def _word(value: Any) -> str:
    return "none" if value is None else str(value)


# Checks -------------------------------------------------------------------------------------------


def _typed(field: Any, value: Any) -> Any:
    """The value as the field has it: whole numbers where floats belong are fine, and lists for tuples."""
    kind = field.type
    if value is None and "None" in kind:
        return None
    wrong = ValueError(f"{field.name} must be {_KINDS[kind]}, got {value!r}")
    if kind.startswith("tuple"):
        inner: type = str if "str" in kind else float
        if not isinstance(value, list | tuple):
            raise wrong
        if not all(isinstance(v, inner | int) and not isinstance(v, bool) for v in value):
            raise wrong
        return tuple(_float(v, wrong) if inner is float else inner(v) for v in value)
    wanted: type = {"s": str, "f": float, "i": int, "b": bool}[kind[0]]
    if wanted is float and type(value) is int:
        value = _float(value, wrong)
    if type(value) is not wanted:
        raise wrong
    return value


def _float(value: float, wrong: ValueError) -> float:
    try:
        return float(value)
    except OverflowError:  # TOML's whole numbers have no end
        raise wrong from None


_KINDS = {
    "bool": "true or false",
    "str": "a word",
    "str | None": "a word",
    "float": "a number",
    "float | None": "a number",
    "int": "a whole number",
    "int | None": "a whole number",
    "bool | None": "true or false",
    "tuple[str, ...]": "a list of words",
    "tuple[float, ...]": "a list of numbers",
    "tuple[float, ...] | None": "a list of numbers",
}


def _choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"there is no {name} {value!r}; choose one of {', '.join(choices)}")


_WIDEST = 100_000  # times the channels of a model; sizes of dense layers are below 2**63
_LARGEST = 37  # of single precision, a power of ten


def _check(c: Config) -> None:
    _choice("model", c.model, MODELS)
    _choice("method", c.method, tuple(METHODS))
    _choice("assignment", c.assignment, tuple(SHARES))
    _choice("optimizer", c.optimizer, OPTIMIZERS)
    _choice("precision", c.precision, PRECISIONS)
    check_options(asdict(c))
    if c.crop is not None:
        _choice("crop", c.crop, ("area", "plain"))
    for name in ("width", "epochs", "scale", "extend", "lr", "drop_factor"):
        if not 0 < getattr(c, name) < math.inf:
            raise ValueError(f"{name} must be a number above 0, got {getattr(c, name)}")
    for name in ("momentum", "weight_decay", "warmup"):
        if not 0 <= getattr(c, name) < math.inf:
            raise ValueError(f"{name} must be a number of at least 0, got {getattr(c, name)}")
    for name in ("momentum", "label_smoothing", "sparsity"):
        if not 0 <= getattr(c, name) < 1:
            raise ValueError(
                f"{name} must be at least 0 and below 1, got {getattr(c, name)}"
                + (" (0.95 is 95 %)" if name == "sparsity" else "")
            )
    for name in ("batch_size", "image_size"):
        value = getattr(c, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    for name in ("seed", "pad"):
        value = getattr(c, name)
        if value is not None and value < 0:
            raise ValueError(f"{name} must be at least 0, got {value}")
    if c.width > _WIDEST:
        raise ValueError(f"width must be at most {_WIDEST}, got {c.width}")
    highest = math.log10(c.lr) + len(c.drops) * max(0.0, math.log10(c.drop_factor))
    if max(highest, math.log10(c.weight_decay or 1)) > _LARGEST:
        raise ValueError(
            f"single precision has no numbers above 1e{_LARGEST}: lower lr ({c.lr}), drop_factor "
            f"({c.drop_factor}) or weight_decay ({c.weight_decay})"
        )
    if any(not 0 < drop < math.inf for drop in c.drops) or list(c.drops) != sorted(c.drops):
        raise ValueError(f"drops must be epochs above 0 in order, got {list(c.drops)}")
