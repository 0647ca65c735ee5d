"""CSV files and wandb's exports."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moeproxy.traces.logs.cells import Status
from moeproxy.traces.logs.tables import delimiter_of, wandb_columns
from tests.traces.logs.make import sink_of


@pytest.mark.parametrize(
    ("text", "sign"),
    [
        ("step,loss\n1,0.5\n", ","),
        ("step;loss\n1;0.5\n2;\n", ";"),
        ("step\tloss\n1\t0.5\n", "\t"),
        ('"Step","a - loss"\n"0","1.5"\n', ","),
        ("step\n1\n", None),
        ("1,2\n3,4\n", None),
        ("a, b\nc, d\n", None),
        ("2025-01-01, INFO started\nloading, please wait\n", None),
        ("step,loss\n", None),
    ],
)
def test_delimiter(text: str, sign: str | None) -> None:
    assert delimiter_of(text) == sign


def test_states_of_cells(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_bytes(
        b"\xef\xbb\xbfstep,loss,note,loss\r\n1,0.5,ok,9\r\n2,,ok,9\r\n3,nan,ok,9\r\n4,-inf,ok,9\r\n5,1\r\n"
        b'6,"7",x,9\r\n\r\n7,8,"two\r\nlines",9\r\n'
    )
    sink = sink_of(file)
    rows = sink.runs[""].store.finish()
    loss = rows.columns["loss"]
    assert [Status(state) for state in loss.status] == [
        Status.MEASURED,
        Status.EMPTY,
        Status.NAN,
        Status.NEG_INF,
        Status.MEASURED,
        Status.MEASURED,
    ]
    assert np.array_equal(loss.values, [0.5, np.nan, np.nan, -np.inf, 7, 8], equal_nan=True)
    assert rows.columns["note"].texts[5] == "two\nlines"
    assert list(rows.columns) == ["step", "loss", "note"]
    assert [str(skipped) for skipped in sink.skipped.values()] == ["1 line (6): 2 cells in a table of 4 columns"]
    assert sink.notes == ["columns loss stand twice; the first of each is taken"]


def test_wandb_export_has_several_runs(tmp_path: Path) -> None:
    file = tmp_path / "wandb_export.csv"
    head = ["Step"] + [f"{run} - loss{end}" for run in ("a", "b - 2") for end in ("", "__MIN", "__MAX")]
    lines = [head, ["0", "1.5", "1.25", "2", "3", "3", "3"], ["1", "", "", "", "NaN", "NaN", "NaN"]]
    file.write_text("".join(",".join(f'"{cell}"' for cell in line) + "\n" for line in lines))
    sink = sink_of(file)
    assert list(sink.runs) == ["a", "b - 2"]
    first, second = (run.store.finish() for run in sink.runs.values())
    assert list(first.columns) == ["Step", "loss", "loss__MIN", "loss__MAX"]
    assert [float(column.values[0]) for column in first.columns.values()] == [0, 1.5, 1.25, 2]
    assert (len(first), len(second)) == (1, 2)
    assert Status(second.columns["loss"].status[1]) == Status.NAN
    assert sink.container == "wandb CSV export"


def test_a_name_with_a_dash_is_no_wandb_export() -> None:
    assert wandb_columns(["step", "train - loss"]) == {}
