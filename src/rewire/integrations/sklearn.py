"""Sparse perceptrons for scikit-learn: pipelines, grid search, cross-validation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.utils import check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, validate_data
except ImportError as error:
    raise ImportError(
        "rewire.integrations.sklearn needs scikit-learn: pip install 'rewire[sklearn]'"
    ) from error

from rewire.methods import GSE, Rewirer, Static
from rewire.nn.linear import SparseLinear
from rewire.sparsify import sparsify


class SparseMLP(BaseEstimator):  # type: ignore[misc]
    """A perceptron of sparse layers: what classifier and regressor share.

    Inputs are standardised with mean and deviation of the training data. Training is by AdamW, with a
    learning rate that falls to zero on a cosine, and by guided stochastic exploration in the first three
    quarters.

    Args:
        hidden_layer_sizes: units of the hidden layers, with ReLU.
        sparsity: fraction of the weights that is missing from beginning to end, in [0, 1).
        rewirings: how often connections move.
        max_iter: epochs.
        batch_size: samples of a step; at most all.
        learning_rate: at the beginning.
        weight_decay: of AdamW.
        random_state: an integer makes ``fit`` repeatable.

    Attributes:
        model_: the trained ``nn.Sequential`` of sparse layers, on standardised inputs.
        history_: what each rewiring has done.
        n_iter_: epochs.
        n_features_in_: inputs.
        feature_names_in_: their names, if they had any.
    """

    def __init__(
        self,
        hidden_layer_sizes: Sequence[int] = (256,),
        *,
        sparsity: float = 0.8,
        rewirings: int = 20,
        max_iter: int = 100,
        batch_size: int = 32,
        learning_rate: float = 0.01,
        weight_decay: float = 1e-4,
        random_state: Any = None,
    ) -> None:
        self.hidden_layer_sizes, self.sparsity = hidden_layer_sizes, sparsity
        self.rewirings, self.max_iter, self.batch_size = rewirings, max_iter, batch_size
        self.learning_rate, self.weight_decay = learning_rate, weight_decay
        self.random_state = random_state

    model_: nn.Sequential

    @property
    def _first(self) -> SparseLinear:
        layer = self.model_[0]
        assert isinstance(layer, SparseLinear)
        return layer

    @property
    def feature_importances_(self) -> Any:
        """The strength of each input: its absolute weights in the first layer, as shares of all. It says
        where the network looks, with the noise of its initial weights; for statements about the data take
        ``sklearn.inspection.permutation_importance``."""
        check_is_fitted(self)
        layer = self._first
        strength = torch.zeros(layer.n_in, dtype=torch.float64)
        weights = layer.values.detach().flatten().abs().double()
        strength.index_add_(0, layer.connections.inputs(), weights)
        return (strength / strength.sum().clamp(min=1e-300)).numpy()

    def _fit(self, x: Any, targets: Tensor, outputs: int, loss: Callable[..., Tensor]) -> None:
        self._check_parameters()
        seed = int(check_random_state(self.random_state).randint(2**31))
        self._mean, deviation = x.mean(0), x.std(0)
        self._scale = np.where(deviation > 0, deviation, 1.0)
        inputs = self._standardised(x)
        sizes = [inputs.shape[1], *self.hidden_layer_sizes]
        model = nn.Sequential()
        with torch.random.fork_rng(devices=[]):
            for before, after in pairwise(sizes):
                model.extend([nn.Linear(before, after), nn.ReLU()])
            model.append(nn.Linear(sizes[-1], outputs))
            model = sparsify(model.to(inputs.dtype), self.sparsity, weights="fresh", seed=seed)
        self._train(model, inputs, targets, loss, seed)
        self.model_, self.n_iter_ = model.eval(), self.max_iter

    def _train(
        self,
        model: nn.Module,
        inputs: Tensor,
        targets: Tensor,
        loss: Callable[..., Tensor],
        seed: int,
    ) -> None:
        samples, random = len(inputs), torch.Generator().manual_seed(seed)
        size = min(self.batch_size, samples)
        steps = self.max_iter * math.ceil(samples / size)
        optimizer = torch.optim.AdamW(
            model.parameters(), self.learning_rate, weight_decay=self.weight_decay
        )
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        until = max(1, steps * 3 // 4)
        every = max(1, until // max(1, self.rewirings))
        rewirer: Rewirer = Static(model, optimizer)
        if self.rewirings:
            rewirer = GSE(model, optimizer, every=every, until=until, seed=seed)
        for _ in range(self.max_iter):
            for rows in torch.randperm(samples, generator=random).split(size):
                optimizer.zero_grad()
                loss(model(inputs[rows]), targets[rows]).backward()
                optimizer.step()
                rewirer.step()
                schedule.step()
        self.history_ = list(rewirer.history)

    def _check_parameters(self) -> None:
        sizes = self.hidden_layer_sizes
        whole = {"max_iter": 1, "batch_size": 1, "rewirings": 0}
        numbers = {"learning_rate": self.learning_rate, "weight_decay": self.weight_decay}
        if not isinstance(sizes, Sequence) or not all(
            isinstance(size, Integral) and size > 0 for size in sizes
        ):
            raise ValueError(f"hidden_layer_sizes must be positive integers, got {sizes!r}")
        for name, least in whole.items():
            value = getattr(self, name)
            if not isinstance(value, Integral) or value < least:
                raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
        for name, number in numbers.items():
            if not isinstance(number, Real) or not 0 <= number < math.inf:
                raise ValueError(f"{name} must be a number of at least 0, got {number!r}")

    def _standardised(self, x: Any) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray((x - self._mean) / self._scale, dtype=x.dtype))

    def _outputs(self, x: Any) -> Tensor:
        check_is_fitted(self)
        x = validate_data(self, x, dtype=_TYPES, reset=False)
        with torch.inference_mode():
            found: Tensor = self.model_(self._standardised(x).to(self._first.values.dtype))
        return found.clone()


_TYPES = (np.float64, np.float32)


class SparseMLPClassifier(ClassifierMixin, SparseMLP):  # type: ignore[misc]
    """A classifier; its arguments and attributes are those of :class:`SparseMLP`.

    Attributes:
        classes_: as ``y`` had them.

    Example:
        >>> from sklearn.datasets import load_wine
        >>> X, y = load_wine(return_X_y=True)
        >>> model = SparseMLPClassifier(sparsity=0.9, max_iter=20, random_state=0).fit(X, y)
        >>> model.score(X, y) > 0.95
        True
        >>> model.feature_importances_.shape
        (13,)
    """

    def fit(self, X: Any, y: Any) -> SparseMLPClassifier:
        """Train on samples (n, features) and their classes."""
        X, y = validate_data(self, X, y, dtype=_TYPES)
        check_classification_targets(y)
        self.classes_, codes = np.unique(y, return_inverse=True)
        targets = torch.from_numpy(codes.astype(np.int64))
        self._fit(X, targets, len(self.classes_), nn.functional.cross_entropy)
        return self

    def predict_proba(self, X: Any) -> Any:
        """The probability of each of ``classes_``."""
        return self._outputs(X).softmax(1).numpy()

    def predict(self, X: Any) -> Any:
        """The most probable class."""
        found = self._outputs(X).argmax(1).numpy()  # raises before fit
        return self.classes_[found]


class SparseMLPRegressor(RegressorMixin, SparseMLP):  # type: ignore[misc]
    """A regressor, of one target or several; its arguments and attributes are those of :class:`SparseMLP`.

    Targets are standardised while it trains.
    """

    def fit(self, X: Any, y: Any) -> SparseMLPRegressor:
        """Train on samples (n, features) and their targets, (n,) or (n, targets)."""
        X, y = validate_data(self, X, y, dtype=_TYPES, multi_output=True, y_numeric=True)
        self._vector = y.ndim == 1
        rows = np.asarray(y, dtype=X.dtype).reshape(len(y), -1)
        self._target_mean, deviation = rows.mean(0), rows.std(0)
        self._target_scale = np.where(deviation > 0, deviation, 1.0)
        targets = torch.from_numpy(
            ((rows - self._target_mean) / self._target_scale).astype(X.dtype)
        )
        self._fit(X, targets, rows.shape[1], nn.functional.mse_loss)
        return self

    def predict(self, X: Any) -> Any:
        """The targets, as ``fit`` had them."""
        found = self._outputs(X).numpy() * self._target_scale + self._target_mean
        return found[:, 0] if self._vector else found

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags
