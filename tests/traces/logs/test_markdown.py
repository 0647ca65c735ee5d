"""Logs in the fences of Markdown: tables, documents and objects, beside the lines that any text may hold."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from moeproxy.traces import LogTrace, read
from moeproxy.traces.logs.markdown import blocks_of

ROWS = [{"step": n, "actor/lr": n / 4, "actor/grad_norm": 1.0} for n in (1, 2)]
STATE = {"global_step": 2, "log_history": [{"step": n, "loss": n / 4, "epoch": 0.5} for n in (1, 2)]}
CSV = "step,actor/lr,actor/grad_norm\n1,0.25,1.0\n2,0.5,1.0\n"
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)
CONSOLE = "step:1 - actor/lr:0.25 - actor/grad_norm:1.0\nstep:2 - actor/lr:0.5 - actor/grad_norm:1.0\n"
PRETTY = "".join(json.dumps(row, indent=2) + "\n" for row in ROWS)


def _fenced(text: str, word: str = "", fence: str = "```", indent: str = "") -> str:
    lines = [f"{fence}{word}", *text.splitlines(), fence]
    return "".join(f"{indent}{line}\n" for line in lines)


def _read(tmp_path: Path, text: str, name: str = "x.md") -> tuple[LogTrace, ...]:
    (tmp_path / name).write_text(text)
    return read(tmp_path / name)


@pytest.mark.parametrize(
    ("text", "signal", "container", "lines"),
    [
        (CSV, "learning_rate", "CSV in Markdown", [5, 6]),
        (CSV.replace(",", "\t"), "learning_rate", "CSV in Markdown", [5, 6]),
        (LINES, "learning_rate", "JSON lines", [4, 5]),
        (CONSOLE, "learning_rate", "console log", [4, 5]),
        (PRETTY, "learning_rate", "JSON objects in Markdown", [4, 9]),
        (json.dumps(ROWS, indent=2), "learning_rate", "JSON list of rows in Markdown", [1, 2]),
        (json.dumps(ROWS), "learning_rate", "JSON list of rows in Markdown", [1, 2]),
        (json.dumps(STATE, indent=2), "total_loss", "trainer_state.json in Markdown", [1, 2]),
        (json.dumps(STATE), "total_loss", "trainer_state.json in Markdown", [1, 2]),
        (json.dumps(STATE, indent=2)[:-20], "total_loss", "trainer_state.json in Markdown", [1]),
    ],
    ids=["csv", "tsv", "lines", "console", "objects", "list", "list line", "state", "state line", "state cut"],
)
@pytest.mark.parametrize("fence", ["```", "~~~~"])
@pytest.mark.parametrize("indent", ["", "   "])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_what_stands_in_a_fence_is_read(
    tmp_path: Path, text: str, signal: str, container: str, lines: list[int], fence: str, indent: str, end: str
) -> None:
    whole = "# A run\n\n" + _fenced(text, fence=fence, indent=indent) + "\nThat was it.\n"
    (tmp_path / "x.md").write_bytes(whole.replace("\n", end).encode())
    (log,) = read(tmp_path / "x.md")
    assert log.info.name == "x"
    assert log.trace.values(signal).tolist() == [0.25, 0.5][: len(lines)]
    assert log.info.container == ("console log" if text == LINES and indent else container)
    assert log.places["line"].tolist() == lines
    assert log.info.lines == whole.count("\n")
    said = "the fenced block on line 3 is a JSON document: its lines are the entries of it"
    assert (said in log.info.notes) == (lines[0] == 1)


def test_several_blocks_are_runs_of_their_own(tmp_path: Path) -> None:
    text = "\n" + CONSOLE + _fenced(CSV, "csv") + "and\n" + _fenced(json.dumps(STATE), "json")
    text += _fenced(LINES.replace("2", "4").replace("1,", "3,"), "jsonl")
    rest, table, state = _read(tmp_path, text)
    assert [log.info.name for log in (rest, table, state)] == ["x", "x.md:4", "x.md:10"]
    assert rest.places["line"].tolist() == [2, 3, 14, 15]
    assert table.places["line"].tolist() == [6, 7]
    assert table.trace.values("learning_rate").tolist() == [0.25, 0.5]
    assert state.trace.values("total_loss").tolist() == [0.25, 0.5]
    assert rest.info.container == "console log, CSV, trainer_state.json in Markdown"


def test_several_runs_in_one_table_keep_their_names(tmp_path: Path) -> None:
    text = "Step,a - loss,a - loss__MIN,b - loss,b - loss__MIN\n1,0.5,0.5,0.25,0.25\n"
    logs = _read(tmp_path, _fenced(text) + _fenced(text))
    assert [log.info.name for log in logs] == ["a", "b", "x.md:5 a", "x.md:5 b"]
    assert [log.places["line"].tolist() for log in logs] == [[3], [3], [7], [7]]


@pytest.mark.parametrize(
    "text",
    [
        _fenced('{\n  "learning_rate": 1e-06,\n  "layers": 4\n}', "json"),
        _fenced("import a, b\nx, y = 1, 2\nz, w = 3, 4\n", "python"),
        _fenced('{"step": 1,\n "loss": [[[', "json"),
        _fenced(""),
        "```\n",
        "no fence\n",
    ],
    ids=["settings", "code", "no json", "empty", "open", "none"],
)
def test_other_blocks_are_no_runs(tmp_path: Path, text: str) -> None:
    (log,) = _read(tmp_path, text)
    assert log.info.rows == 0
    more, *others = _read(tmp_path, text + "```\n" * (text == "```\n") + CONSOLE)
    assert (more.info.rows, others) == (2, [])


def test_lines_left_out_of_a_table_are_those_of_the_file(tmp_path: Path) -> None:
    (log,) = _read(tmp_path, "\n\n" + _fenced(CSV + "3,1\n" + "4,0.5,2.0\n", "csv"))
    assert [str(skipped) for skipped in log.info.skipped] == ["1 line (7): 2 cells in a table of 3 columns"]
    assert log.places["line"].tolist() == [5, 6, 8]


def test_in_a_log_they_count_only_without_other_rows(tmp_path: Path) -> None:
    (log,) = _read(tmp_path, CONSOLE + "the model wrote:\n" + _fenced(CSV, "csv"), "train.log")
    assert (log.info.name, log.info.container, log.info.rows) == ("train", "console log", 2)
    (log,) = _read(tmp_path, "the table:\n" + _fenced(CSV, "csv"), "mail.txt")
    assert (log.info.name, log.info.container, log.info.rows) == ("mail", "CSV in Markdown", 2)


def test_other_encodings_and_archives(tmp_path: Path) -> None:
    text = "# Ü\n" + _fenced(CSV, "csv")
    (tmp_path / "x.md").write_bytes(text.encode("utf-16"))
    (log,) = read(tmp_path / "x.md")
    assert log.trace.values("learning_rate").tolist() == [0.25, 0.5]
    broken = text.replace("actor/grad_norm", "n\udcff").encode("utf-8", "surrogateescape")
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr("docs/x.md", broken)
    (log,) = read(tmp_path / "x.zip")
    assert log.original["n\ufffd"].tolist() == [1.0, 1.0]
    assert any("line 2 holds bytes that are no UTF-8" in note for note in log.info.notes)


def test_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(_fenced(CSV) for _ in range(4)) + CONSOLE
    monkeypatch.setattr("moeproxy.traces.logs.markdown.MAX_BLOCKS", 2)
    logs = _read(tmp_path, text)
    assert [log.info.name for log in logs] == ["x", "x.md:1", "x.md:6"]
    assert any("more than 2 fenced blocks" in note for note in logs[0].info.notes)
    monkeypatch.setattr("moeproxy.traces.logs.markdown.MAX_BYTES", 50)
    (log,) = _read(tmp_path, text)
    assert log.trace.values("learning_rate").tolist() == [0.25, 0.5]
    assert log.places["line"].tolist() == [21, 22]
    assert any("were not looked for" in note for note in log.info.notes)


def test_fences_end_as_in_markdown() -> None:
    text = b"a ```\n````md x\n```\n~~~\n````  \n~~~\n```\n``\n"
    found = [(block.line, block.word, text[block.start : block.end]) for block in blocks_of(text)]
    assert found == [(2, "md", b"```\n~~~\n"), (6, "", b"```\n``\n")]


@pytest.mark.timeout(20)
@pytest.mark.parametrize("piece", [b"```", b"~", b" ", b"``` ", b"```\n", b"```\n{\n", b"```\na,b\n1,2\n```\n"])
def test_many_fences_take_bounded_time(tmp_path: Path, piece: bytes) -> None:
    data = b"# x\n``` " + piece * (60_000 // len(piece))
    (tmp_path / "x.md").write_bytes(data)
    assert len(read(tmp_path / "x.md")) >= 1
