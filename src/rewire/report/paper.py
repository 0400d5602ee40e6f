"""What the paper prints, for a run's settings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from rewire.training import config as configs
from rewire.training import toml

TABLES = ("table1", "imagenet", "scaling", "extended", "vit-scaling")
IDENTITY = ("dataset", "model", "method", "sparsity", "width", "extend")
"""What says which number of the paper a run is to be compared with; all else must be the recipe's."""
_UNSEEN = ("seed", "scale", "storage", "rounds")  # what the recipe leaves open
_SETTINGS = ("sparsity", "width", "extend")  # what a block of the file may have a list of
_NAMES = {
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "imagenet": "ImageNet",
    "fashion-mnist": "Fashion-MNIST",
    "digits": "digits",
    "gse": "GSE",
    "set": "SET",
    "rigl": "RigL",
    "snip": "SNIP",
    "grasp": "GraSP",
    "synflow": "SynFlow",
    "snfs": "SNFS",
    "dsr": "DSR",
    "deepr": "DeepR",
    "topkast": "Top-KAST",
    "grabo": "GraBo",
    "graest": "GraEst",
    "erdos-renyi": "Erdos-Renyi",
    "erk": "ERK",
    "vit": "ViT",
    "mlp": "MLP",
}


def spelled(name: str) -> str:
    """A method, model, data set or distribution as the paper spells it.

    >>> spelled("resnet56"), spelled("topkast"), spelled("static")
    ('ResNet-56', 'Top-KAST', 'Static')
    """
    for prefix, full in (("resnet", "ResNet-"), ("vgg", "VGG-")):
        if name.startswith(prefix) and name[len(prefix) :].isdigit():
            return full + name[len(prefix) :]
    return _NAMES.get(name) or (name.capitalize() if name.isalpha() else name)


@dataclass(frozen=True)
class Printed:
    """A number of the paper, and which settings it is of.

    Attributes:
        settings: what a run must be set to; what it does not have does not matter.
        accuracy, deviation: in percent; the deviation is nan where the paper gives none.
        source: the table that it comes from.
    """

    settings: Mapping[str, Any]
    accuracy: float
    deviation: float
    source: str

    def fits(self, config: Mapping[str, Any]) -> bool:
        """Whether a run has these settings."""
        return all(config.get(k) in (None, value) for k, value in self.settings.items())


@cache
def _file() -> dict[str, Any]:
    return toml.read(Path(__file__).with_name("paper.toml"))


def about(table: str) -> Mapping[str, Any]:
    """A table of the file as it is: ``source``, ``title`` and more."""
    found: dict[str, Any] = _file()[table]
    return found


@cache
def printed(table: str) -> tuple[Printed, ...]:
    """All accuracies of a table."""
    content, found = about(table), []
    for block in content["blocks"]:
        (over,) = (name for name in _SETTINGS if name in block)
        for method, values in block.items():
            if method in ("settings", "deviations", over):
                continue
            deviations = block.get("deviations", {}).get(method, math.nan)
            fixed = {**content["fixed"], **block["settings"]}
            if method != "any":
                fixed["method"] = method
            if not isinstance(values, list):  # of the dense model, whatever the setting
                found.append(Printed(fixed, values, deviations, content["source"]))
                continue
            if not isinstance(deviations, list):
                deviations = [deviations] * len(values)
            for setting, value, deviation in zip(block[over], values, deviations, strict=True):
                settings = {**fixed, over: setting}
                found.append(Printed(settings, value, deviation, content["source"]))
    return tuple(found)


@cache
def _recipe(settings: tuple[tuple[str, Any], ...]) -> Mapping[str, Any]:
    try:
        return asdict(configs.resolve(dict(settings)))
    except (ValueError, TypeError):  # no run of today's
        return {}


def recipe(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings that the paper's number for a run is of; empty if there is none of its kind."""
    identity = {name: config[name] for name in IDENTITY if config.get(name) is not None}
    return _recipe(tuple(identity.items()))


def differences(config: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a run in which it differs from what the paper trained, with the paper's values.

    Those that a run, maybe of an older version, does not have are not compared.
    """
    ours, theirs = dict(config), recipe(config)
    left_out = {*IDENTITY, *_UNSEEN}
    return {
        name: value
        for name, value in theirs.items()
        if name not in left_out and name in ours and _plain(ours[name]) != _plain(value)
    }


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def contradictions(config: Mapping[str, Any]) -> list[str]:
    """Where the paper's tables contradict each other about a run."""
    notes = _file()["contradictions"]
    return [
        note["text"]
        for note in notes
        if all(config.get(name) == value for name, value in note["settings"].items())
    ]


def nearest(config: Mapping[str, Any], tables: tuple[str, ...] = TABLES) -> Printed | None:
    """What the paper gives for a run of this kind, in the first table that has it, whatever else is set.

    Where that has no deviation, it is that of another table with the same accuracy.
    """
    found = [one for table in tables for one in printed(table) if one.fits(config)]
    if not found:
        return None
    same = (one.deviation for one in found if one.accuracy == found[0].accuracy)
    return replace(found[0], deviation=next(filter(math.isfinite, same), math.nan))


def lookup(config: Mapping[str, Any], tables: tuple[str, ...] = TABLES) -> Printed | None:
    """What the paper gives for a run of just these settings: like is compared with like."""
    return None if differences(config) else nearest(config, tables)
