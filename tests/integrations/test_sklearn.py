"""Estimators: scikit-learn's own checks, and what they do not look at."""

import pickle
from typing import Any

import numpy as np
import pytest
import torch

import rewire

pytest.importorskip("sklearn")

from sklearn.datasets import load_wine, make_regression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from rewire.integrations.sklearn import SparseMLPClassifier, SparseMLPRegressor


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@parametrize_with_checks([SparseMLPClassifier(), SparseMLPRegressor()])
def test_checks_of_scikit_learn(estimator: Any, check: Any) -> None:
    check(estimator)


def test_it_is_sparse_from_beginning_to_end() -> None:
    x, y = load_wine(return_X_y=True)
    model = SparseMLPClassifier(sparsity=0.9, max_iter=8, rewirings=5, random_state=0).fit(x, y)
    assert model.score(x, y) > 0.9
    assert all(isinstance(layer, rewire.SparseLinear) for layer in model.model_[::2])
    assert rewire.summary(model.model_).connections == pytest.approx(0.1 * 256 * 16, rel=0.01)
    assert len(model.history_) == 5
    assert len({r.active for r in model.history_}) == 1
    assert all(r.grown > 0 for r in model.history_[:4])
    again = SparseMLPClassifier(sparsity=0.9, max_iter=8, rewirings=5, random_state=0).fit(x, y)
    np.testing.assert_array_equal(again.predict_proba(x), model.predict_proba(x))
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(model)).predict(x), model.predict(x))


def test_importances_are_strengths_of_inputs() -> None:
    x, y = make_regression(300, 20, n_informative=1, shuffle=False, random_state=0)
    model = SparseMLPRegressor(max_iter=20, random_state=0).fit(x, y)
    found = model.feature_importances_
    assert found.sum() == pytest.approx(1)
    assert found.argmax() == 0
    layer = model.model_[0]
    dense = layer.to_dense().weight.detach().abs().sum(0).double()
    np.testing.assert_allclose(found, (dense / dense.sum()).numpy(), rtol=1e-6)


def test_no_rewirings() -> None:
    x, y = load_wine(return_X_y=True)
    model = SparseMLPClassifier(rewirings=0, max_iter=2, random_state=0).fit(x, y)
    assert model.history_ == []


def test_several_targets_and_types() -> None:
    x, y = make_regression(80, 6, n_targets=3, random_state=0)
    model = SparseMLPRegressor((32,), sparsity=0.5, max_iter=5, random_state=0)
    assert model.fit(x, y).predict(x).shape == (80, 3)
    assert model.model_[0].values.dtype == torch.float64
    model.fit(x.astype(np.float32), y)
    assert model.model_[0].values.dtype == torch.float32
    assert model.predict(x).shape == (80, 3)


def test_in_a_pipeline_and_a_grid() -> None:
    x, y = load_wine(return_X_y=True)
    pipeline = make_pipeline(MinMaxScaler(), SparseMLPClassifier(max_iter=3, random_state=0))
    grid = GridSearchCV(pipeline, {"sparsemlpclassifier__sparsity": [0.5, 0.95]}, cv=2).fit(x, y)
    assert grid.best_score_ > 0.8


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hidden_layer_sizes": (0,)}, "hidden_layer_sizes must be positive integers"),
        ({"max_iter": 0}, "max_iter must be an integer of at least 1, got 0"),
        ({"batch_size": 2.5}, "batch_size must be an integer"),
        ({"learning_rate": -1.0}, "learning_rate must be a number of at least 0"),
        ({"sparsity": 1.5}, "sparsity must be at least 0"),
    ],
)
def test_bad_parameters_are_named(settings: dict[str, Any], message: str) -> None:
    x, y = load_wine(return_X_y=True)
    with pytest.raises(ValueError, match=message):
        SparseMLPClassifier(**settings).fit(x, y)
