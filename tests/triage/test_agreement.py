"""The measures of agreement on arrays of known answer."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import spearmanr

from moeproxy.triage import agreement
from moeproxy.triage.agreement import Marks, bootstrap, significant


def test_bootstrap_is_seeded_and_needs_two_values() -> None:
    values = np.array([0.1, 0.5, np.nan, 0.9])
    assert bootstrap(values, 3).low == bootstrap(values, 3).low
    assert bootstrap(values, 3).mean == pytest.approx(0.5)
    assert bootstrap(values, 3).low < 0.5 < bootstrap(values, 3).high
    assert np.isnan(bootstrap(np.array([0.4]), 0).low)
    assert np.isnan(bootstrap(np.array([np.nan]), 0).mean)
    assert str(bootstrap(np.array([0.4]), 0)) == "0.40"
    assert str(bootstrap(np.array([]), 0)) == "none"


def test_significance_must_repeat_with_one_sign() -> None:
    response_RXW = np.array([[[9.0], [9.0], [9.0], [2.0]], [[9.0], [-9.0], [1.0], [2.0]], [[1.0], [1.0], [1.0], [2.0]]])
    np.testing.assert_array_equal(significant(response_RXW, 4.0, 2 / 3)[:, 0], [1, 0, 0, 0])
    np.testing.assert_array_equal(significant(-response_RXW, 4.0, 2 / 3)[:, 0], [-1, 0, 0, 0])


def test_one_seed_must_pass_twice_the_threshold() -> None:
    response_RXW = np.array([[[7.0], [9.0], [np.nan]]])
    np.testing.assert_array_equal(significant(response_RXW, 4.0, 2 / 3)[:, 0], [0, 1, 0])


def test_marks_are_sorted_by_strength() -> None:
    response_RXW = np.array([[[5.0, 6.0], [0.0, 0.0], [-20.0, -9.0]]])
    signs = np.array([[1, 1], [0, 0], [-1, -1]])
    marks = Marks.of(response_RXW, signs)
    assert marks.signals_N.tolist() == [2, 0]
    assert marks.windows_N.tolist() == [0, 1]
    assert marks.signs_N.tolist() == [-1, 1]
    proxy = np.array([[[0.0, 9.0], [0.0, 0.0], [1.0, 0.0]], [[0.0, 2.0], [0.0, 0.0], [np.nan, 0.0]]])
    np.testing.assert_allclose(agreement.direction(proxy, marks), [0.5, 1.0])
    np.testing.assert_allclose(agreement.found(proxy, marks, 4.0), [0.5, 0.0])
    none = Marks.of(response_RXW, np.zeros((3, 2), int))
    assert len(none) == 0
    assert np.isnan(agreement.direction(proxy, none)).all()


def test_rank_correlation_agrees_with_scipy() -> None:
    rng = np.random.default_rng(0)
    left, right = rng.normal(size=(2, 6, 4)).round(1)
    assert agreement.rank_correlation(left, right) == pytest.approx(spearmanr(left.ravel(), right.ravel()).statistic)
    left[0, 0], right[1, 1] = np.nan, np.nan
    keep = ~np.isnan(left) & ~np.isnan(right)
    assert agreement.rank_correlation(left, right) == pytest.approx(spearmanr(left[keep], right[keep]).statistic)
    assert np.isnan(agreement.rank_correlation(left, np.ones_like(left)))
    assert np.isnan(agreement.rank_correlation(left[:1, :2], right[:1, :2]))


def test_nearest_answers_healthy_below_the_level() -> None:
    library = {"a": np.array([[1.0, 0.0]]), "b": np.array([[0.0, 1.0]])}
    assert agreement.nearest(np.array([[0.9, 0.1]]), library, 0.5) == "a"
    assert agreement.nearest(np.array([[-0.9, 0.1]]), library, 0.5) == "healthy"
    assert agreement.cosine(np.zeros((1, 2)), library["a"]) == 0.0
    level = agreement.healthy_level(np.array([[[1.0, 1.0]], [[-1.0, -1.0]]]), library, 0.95)
    assert level == pytest.approx(np.interp(0.95, [0, 1], [-np.sqrt(0.5), np.sqrt(0.5)]))
