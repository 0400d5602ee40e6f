"""Copies of a model whose connections follow its rewirings."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from torch import nn

from rewire import averaging
from rewire.methods.layer_view import LayerView
from rewire.nn import copies


class Followers:
    """Averaged models that follow one that is rewired; neither is kept alive."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._references: list[weakref.ref[nn.Module]] = []

    def add(self, averaged: nn.Module) -> None:
        """Add a copy, which gets the model's connections now."""
        model = self._model()
        if model is not None:
            averaging.bring(averaged, model)
            self._references.append(weakref.ref(averaged))

    def check(self, views: Sequence[LayerView]) -> None:
        """Raise, before a rewiring, if a copy could not follow or is averaged without following."""
        for averaged, model in self._alive():
            averaging.check(averaged, model)
        copies.check({view.name: view.layer for view in views})

    def observe(self, views: Sequence[LayerView]) -> None:
        """Note the state of the copies; call it one step before :meth:`check`."""
        copies.observe({view.name: view.layer for view in views})

    def bring(self) -> None:
        """Give all copies the model's connections."""
        for averaged, model in self._alive():
            averaging.bring(averaged, model)

    def _alive(self) -> list[tuple[nn.Module, nn.Module]]:
        model = self._model()
        found = (reference() for reference in self._references)
        return [(one, model) for one in found if one is not None and model is not None]
