"""Points and marks that fit on a screen: nothing that stands out is lost."""

from __future__ import annotations

import numpy as np
import pytest

from moeproxy.view.sampling import MAX_POINTS, extremes, marked


def _noise(n: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=n)


def test_few_points_are_all_kept() -> None:
    steps = np.arange(7) * 3
    assert extremes(steps, _noise(7)).tolist() == list(range(7))
    assert extremes(np.zeros(0, np.int64), np.zeros(0)).tolist() == []


@pytest.mark.parametrize("place", [1, 31_337, 99_998])
@pytest.mark.parametrize("height", [50.0, -50.0])
def test_one_spike_among_many_points_is_kept(place: int, height: float) -> None:
    values = _noise(100_000)
    values[place] = height
    chosen = extremes(np.arange(100_000), values, 200)
    assert place in chosen
    assert len(chosen) <= 202
    assert np.all(np.diff(chosen) > 0)
    assert {0, 99_999} <= set(chosen.tolist()), "the line reaches from end to end"


def test_every_column_of_pixels_keeps_its_own_extremes() -> None:
    values = _noise(10_000)
    chosen = set(extremes(np.arange(10_000), values, 200).tolist())
    for part in np.arange(10_000).reshape(100, 100):
        assert part[np.argmax(values[part])] in chosen
        assert part[np.argmin(values[part])] in chosen


def test_columns_are_as_wide_as_on_the_screen_where_steps_are_uneven() -> None:
    steps = np.concatenate([np.arange(50_000), [1_000_000, 1_000_001, 1_000_002, 2_000_000]])
    values = np.concatenate([_noise(50_000), [5.0, 9.0, 6.0, 7.0]])
    chosen = extremes(steps, values, 200)
    assert len(chosen) <= 202
    assert 50_001 in chosen


def test_steps_that_repeat_are_no_obstacle() -> None:
    steps = np.repeat(np.arange(100), 100)
    chosen = extremes(steps, _noise(10_000), 50)
    assert 0 < len(chosen) <= 52


def test_default_size_is_bounded_for_a_million_points() -> None:
    assert len(extremes(np.arange(1_000_000), _noise(1_000_000))) <= MAX_POINTS + 2


def test_marks_are_single_places_while_they_are_few() -> None:
    marks = marked(np.array([3, 5, 8, 13]), 4, 8)
    assert marks.first_M.tolist() == marks.last_M.tolist() == [5, 8]
    assert marks.count_M.tolist() == [1, 1]


def test_many_places_are_counted_in_few_marks() -> None:
    places = np.concatenate([np.arange(1000), [5000]])
    marks = marked(places, 0, 9999, 100)
    assert marks.count_M.sum() == 1001
    assert len(marks.first_M) == 11
    assert (marks.first_M[0], marks.last_M[0], marks.count_M[0]) == (0, 99, 100)
    assert (marks.first_M[-1], marks.last_M[-1], marks.count_M[-1]) == (5000, 5000, 1)


def test_places_at_both_ends_are_marked() -> None:
    marks = marked(np.arange(1000), 0, 999, 10)
    assert (marks.first_M[0], marks.last_M[-1]) == (0, 999)
    assert marks.count_M.sum() == 1000
    assert marked(np.zeros(0, np.int64), 0, 1).count_M.size == 0
