"""Files that are one JSON value."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moeproxy.errors import TraceError
from moeproxy.traces.logs import documents
from moeproxy.traces.logs.cells import Status
from tests.traces.logs.make import sink_of


def _file(tmp_path: Path, text: str) -> Path:
    (tmp_path / "x.json").write_text(text)
    return tmp_path / "x.json"


@pytest.mark.parametrize("indent", [None, 2])
def test_trainer_state(tmp_path: Path, indent: int | None) -> None:
    history = [{"step": 10, "loss": float("nan")}, {"step": 20, "loss": 0.5}, "broken"]
    sink = sink_of(_file(tmp_path, json.dumps({"global_step": 20, "log_history": history}, indent=indent)))
    rows = sink.runs[""].store.finish()
    assert rows.columns["step"].values.tolist() == [10, 20]
    assert [Status(state) for state in rows.columns["loss"].status] == [Status.NAN, Status.MEASURED]
    assert sink.container == "trainer_state.json"
    assert sink.facts == {"global_step": 20}
    assert [str(skipped) for skipped in sink.skipped.values()] == ["1 line (3): an entry that is no object"]


def test_golden_values_write_nan_for_nothing(tmp_path: Path) -> None:
    golden = {
        "lm loss": {"start_step": 1, "end_step": 2, "values": {"2": 7.5, "1": "nan"}},
        "num-zeros": {"start_step": 1, "end_step": 2, "values": {"1": 3, "x": 1}},
    }
    sink = sink_of(_file(tmp_path, json.dumps(golden)))
    rows = sink.runs[""].store.finish()
    assert rows.columns["step"].values.tolist() == [1, 2]
    assert [Status(state) for state in rows.columns["lm loss"].status] == [Status.MISSING, Status.MEASURED]
    assert rows.columns["lm loss"].texts == {0: "nan"}
    assert sink.container == "Megatron golden values"
    assert [skipped.reason for skipped in sink.skipped.values()] == ["a step that is no number in 'num-zeros'"]


def test_lists_of_rows_and_tables_of_columns(tmp_path: Path) -> None:
    rows = sink_of(_file(tmp_path, '[{"_step": 1, "loss": 2},\n {"_step": 3, "loss": null}]')).runs[""].store.finish()
    assert rows.columns["_step"].values.tolist() == [1, 3]
    rows = sink_of(_file(tmp_path, '{"step": [1, 2], "loss": [0.5, 0.25]}')).runs[""].store.finish()
    assert rows.columns["loss"].values.tolist() == [0.5, 0.25]
    sink = sink_of(_file(tmp_path, '{\n "model_type": "qwen3_moe",\n "n": 3}'))
    assert not sink.runs
    assert "no list of rows" in sink.notes[0]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("[" * 200_000 + "]" * 200_000, "nested too deeply"),
        ('{"log_history": [\n{"step": 1', "no JSON"),
        ('[{"step": 1', "no JSON"),
    ],
)
def test_hostile_documents(tmp_path: Path, text: str, error: str) -> None:
    with pytest.raises(TraceError, match=error):
        sink_of(_file(tmp_path, text))


def test_size_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "MAX_BYTES", 10)
    with pytest.raises(TraceError, match="JSON of more than"):
        sink_of(_file(tmp_path, '[{"step": 1}]'))


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("state", [True, False])
def test_the_whole_entries_of_a_document_cut_short_are_read(tmp_path: Path, indent: int | None, state: bool) -> None:
    entries = [{"step": n, "loss": n / 7} for n in range(1, 101)]
    text = json.dumps({"lists": [1, [2]], "log_history": entries} if state else entries, indent=indent)
    for place in range(len(text) // 3, len(text), 97):
        sink = sink_of(_file(tmp_path, text[:place]))
        rows = sink.runs[""].store.finish()
        steps = rows.columns["step"].values.tolist()
        assert steps == list(range(1, len(steps) + 1))
        assert rows.columns["loss"].values.tolist() == [n / 7 for n in steps]
        assert len(steps) >= text[:place].count("}") - 1
        assert "cut short" in sink.skipped


def test_an_integer_of_endless_digits_costs_its_own_cell_only(tmp_path: Path) -> None:
    text = f'[{{"step": 1, "loss": {"9" * 9000}}}, {{"step": 2, "loss": 0.5}}]'
    sink = sink_of(_file(tmp_path, text))
    column = sink.runs[""].store.finish().columns["loss"]
    assert [Status(state) for state in column.status] == [Status.TEXT, Status.MEASURED]
    assert "an integer of more than 4300 digits" in sink.skipped


def test_json_lines_whose_first_is_very_long_are_no_document(tmp_path: Path) -> None:
    sink = sink_of(_file(tmp_path, f'{{"step": 1, "loss": {"9" * 200_000}}}\n{{"step": 2, "loss": 0.5}}\n'))
    assert sink.container == "JSON lines"
    assert sink.runs[""].store.finish().columns["step"].values.tolist() == [2]
