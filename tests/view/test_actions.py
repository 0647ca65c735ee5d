"""Actions: what a row must say, their order, and CSV files of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from moeproxy.errors import MoeproxyError
from moeproxy.view.actions import Action, action_of, in_order, read_actions


def test_actions_are_in_the_order_of_time_when_each_has_one() -> None:
    late = Action("restored", step=10, time="2026-11-30 03:40", kind="restored")
    early = Action("stopped", step=35, time="2026-11-30T03:10+00:00", kind="stopped")
    assert in_order((late, early)) == (early, late)
    untimed = Action("seen", step=1)
    assert in_order((late, early, untimed)) == (late, early, untimed), "as they were given"


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"text": "", "step": "3"}, "without words"),
        ({"text": "x", "step": "3.5"}, "at step '3.5'"),
        ({"text": "x", "step": "-1"}, "at step '-1'"),
        ({"text": "x", "step": "٣"}, "at step"),
        ({"text": "x", "time": "yesterday"}, "at the time 'yesterday'"),
        ({"text": "x", "kind": "undone"}, "of the kind 'undone'"),
        ({"text": "x", "step": str(2**60)}, "at step 1152921504606846976"),
    ],
)
def test_a_row_that_is_no_action_is_refused(row: dict[str, str | None], words: str) -> None:
    with pytest.raises(MoeproxyError, match=words):
        action_of(row)


def test_rows_are_read_and_empty_ones_skipped(tmp_path: Path) -> None:
    path = tmp_path / "actions.csv"
    path.write_text('text, step,kind\n"stopped, at last",35,stopped\n,,\nlooked,,\n', encoding="utf-8-sig")
    assert read_actions(path) == (Action("stopped, at last", step=35, kind="stopped"), Action("looked"))
    assert action_of({"text": " ", "kind": "noted"}) is None


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"step,time\n1,\n", "the columns are step, time"),
        (b"text,what\nx,y\n", "the columns are text, what"),
        (b"", "the columns are nothing"),
        (b"step,text\n1,a,b\n", "line 2 has more cells"),
        (b"step,text\n1,a\nx,b\n", r"line 3: an action at step 'x'"),
        (b"text\n\xff\n", "cannot be read"),
    ],
)
def test_a_bad_file_is_named_with_its_line(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(MoeproxyError, match=words) as raised:
        read_actions(tmp_path / "a.csv")
    assert "a.csv" in str(raised.value)


def test_an_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(MoeproxyError, match="cannot be read"):
        read_actions(tmp_path / "none.csv")
