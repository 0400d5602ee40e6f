"""What the paper prints, for a run's settings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from rewire.training import toml

TABLES = ("table1", "imagenet", "scaling", "extended", "vit-scaling")
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


def lookup(config: Mapping[str, Any], tables: tuple[str, ...] = TABLES) -> Printed | None:
    """What the paper gives for a run with these settings, in the first table that has it."""
    for table in tables:
        for one in printed(table):
            if one.fits(config):
                return one
    return None
