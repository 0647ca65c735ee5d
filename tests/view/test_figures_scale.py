"""The figure of scale: known bars, courses, peaks and words."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from moeproxy.scale.emulation import CATEGORIES
from moeproxy.view import figures
from moeproxy.view.figures_scale import COURSES, Bar, Course, ScaleView, courses_title, positions, values
from tests.scale.made import GIB, made_emulation


def view_of(**changes: Any) -> ScaleView:
    bars = [
        Bar(
            "original, rank 3 (hottest)", {"parameters": 10.0 * GIB, "activations": 70.0 * GIB}, False, "original", True
        ),
        Bar("proxy-4, rank 3 (hottest)", {"parameters": 5.0 * GIB, "activations": 20.0 * GIB}, True, "proxy", True),
    ]
    courses = [Course("original, rank 3 (hottest)", "original", True, made_emulation())]
    fields: dict[str, Any] = {"bars": bars, "courses": courses, "device": "H100", "room_gib": 80.0, "depth": "2 layers"}
    return ScaleView(**(fields | changes))


def test_bars_are_the_bytes_by_category() -> None:
    drawn = values(view_of())
    assert drawn[CATEGORIES.index("parameters")]["x"] == [10.0, 5.0]
    assert drawn[CATEGORIES.index("activations")]["x"] == [70.0, 20.0]
    assert drawn[CATEGORIES.index("optimizer")]["x"] == [0.0, 0.0]


def test_the_course_stands_in_its_phases_and_its_peak_is_marked() -> None:
    found = positions(made_emulation())
    assert found.tolist() == pytest.approx([0.0, 0.5, 1.25, 1.75, 3.5, 4.5])
    course, *others = values(view_of())[len(CATEGORIES) : -1]
    assert course["y"].tolist() == [1, 2, 6, 3, 5, 1]
    assert [len(other["x"]) for other in others] == [0] * (COURSES - 1)
    peaks = values(view_of())[-1]
    assert (peaks["x"], peaks["y"]) == ([1.25], [6.0])
    assert "model.layers.1.mlp" in peaks["text"][0]


def test_repeated_phases_share_their_place() -> None:
    phases = ("before", "forward", "backward", "forward", "backward")
    found = positions(made_emulation(phases=phases, phase_P=np.array([1, 2, 3, 4, 4, 4])))
    assert found.tolist() == pytest.approx([1.25, 3.125, 1.75, 3.375, 3.625, 3.875])


def test_words_say_what_fits_and_where_the_peak_arises() -> None:
    view = view_of()
    figure = figures.scale(view)
    words = figures.describe(figure)
    assert "original, rank 3 (hottest) does not fit into 90 % of the 80 GiB of H100" in words
    assert "peaks at 6.00 GiB in: forward, model.layers.1.mlp." in words
    assert [bar.label for bar in view.too_large] == ["original, rank 3 (hottest)"]
    table = figures.data_table(figure)
    assert table["peak, GiB"].tolist() == [80.0, 25.0]
    assert table["how"].tolist() == ["planner's sum", "emulated"]
    small = view_of(bars=view.bars[1:])
    assert "all of them fit" in small.describe()


def test_how_much_hotter_the_hottest_rank_is() -> None:
    view = view_of()
    assert view.hotter == {}, "the chosen rank is the hottest"
    cold = Bar("original, rank 0", {"parameters": 32.0 * GIB}, False, "original", False)
    half = Course("original, rank 0", "original", False, made_emulation(peak_bytes=4 * GIB))
    both = view_of(bars=[cold, *view.bars], courses=[half, *view.courses])
    assert both.hotter == {"whole depth": 2.5, "2 layers": 1.5}
    assert "over the chosen one: 2.50 times in whole depth, 1.50 times in 2 layers." in both.describe()
    stale = view_of(bars=[cold, *view.bars], courses=[half, *view.courses], stale=True)
    assert stale.hotter == {"whole depth": 2.5}


def test_earlier_settings_are_said_to_be_so() -> None:
    stale = view_of(stale=True)
    assert "EARLIER SETTINGS" in courses_title(stale)
    assert "peaks at" not in stale.describe()
    assert courses_title(view_of(courses=[])) == "Memory over the step: not emulated yet"
    assert len(figures.scale(view_of(courses=[])).data) == len(figures.scale(stale).data)
