"""Lines: every end, every length, every encoding."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeproxy.traces.logs import lines as module
from moeproxy.traces.logs.lines import lines, text
from moeproxy.traces.logs.sink import Sink


def _lines(data: bytes) -> tuple[list[tuple[int, bytes]], Sink]:
    sink = Sink()
    return list(lines(io.BytesIO(data), sink)), sink


@pytest.mark.parametrize(
    ("data", "found", "count"),
    [
        (b"a\nb\n", [(1, b"a"), (2, b"b")], 2),
        (b"a\r\n\r\nb", [(1, b"a"), (3, b"b")], 3),
        (b"1/9\r2/9\rx\ny", [(1, b"1/9"), (1, b"2/9"), (1, b"x"), (2, b"y")], 2),
        (b"a\rb", [(1, b"a"), (1, b"b")], 1),
        (b"\xef\xbb\xbfa\n", [(1, b"a")], 1),
        ("\ufeffä\nb".encode("utf-16-le"), [(1, "ä".encode()), (2, b"b")], 2),
        ("\ufeffä\nb".encode("utf-16-be"), [(1, "ä".encode()), (2, b"b")], 2),
        (b"", [], 0),
    ],
)
def test_lines(data: bytes, found: list[tuple[int, bytes]], count: int) -> None:
    got, sink = _lines(data)
    assert got == found
    assert sink.lines == count


def test_long_lines_are_left_out_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LINE", 2 << 20)
    monkeypatch.setattr(module, "_CHUNK", 1 << 16)
    found, sink = _lines(b"a\n" + b"x" * (5 << 20) + b"\nb\n" + b"y" * (3 << 20))
    assert found == [(1, b"a"), (3, b"b")]
    assert [str(skipped) for skipped in sink.skipped.values()] == ["2 lines (2, 4): longer than 2 MiB"]


def test_a_long_line_of_short_pieces_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    # A progress bar of days: one line feed at its end, or none.
    monkeypatch.setattr(module, "MAX_LINE", 1000)
    monkeypatch.setattr(module, "_CHUNK", 64)
    pieces = [b"%d/900" % number for number in range(900)]
    found, sink = _lines(b"a\n" + b"\r".join(pieces) + b"\r\nb\n")
    assert found == [(1, b"a"), *((2, piece) for piece in pieces), (3, b"b")]
    assert (sink.lines, sink.skipped) == (3, {})


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 64])
def test_what_follows_a_long_piece_is_read(end: bytes, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LINE", 20)
    monkeypatch.setattr(module, "_CHUNK", chunk)
    found, sink = _lines(end.join([b"a", b"x" * 200, b"b", b"y" * 100]))
    feeds = end.count(b"\n")
    assert found == [(1, b"a"), (1 + 2 * feeds, b"b")]
    assert [(skipped.lines, skipped.count) for skipped in sink.skipped.values()] == [([1 + feeds, 1 + 3 * feeds], 2)]
    assert sink.lines == 1 + 3 * feeds


def test_a_long_line_costs_no_more_than_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK", 1000)
    looked = []
    sink = Sink()
    assert (
        len(list(lines(io.BytesIO(b"x" * 300_000 + b"\nb\n"), sink, ahead=lambda text: looked.append(len(text))))) == 2
    )
    assert sum(looked) == 300_003


def test_bytes_that_are_no_text() -> None:
    sink = Sink()
    assert text(b"a\xffb", 7, sink) == "a\ufffdb"
    assert "line 7" in sink.notes[0]


@given(st.lists(st.binary(max_size=8)), st.integers(1, 9), st.sampled_from([b"\n", b"\r\n", b"\r"]))
def test_chunks_do_not_matter(parts: list[bytes], chunk: int, end: bytes) -> None:
    data = end.join(parts).replace(b"\0", b" ")  # holes of NUL bytes count as spaces
    if data.startswith((b"\xff\xfe", b"\xfe\xff", b"\xef\xbb\xbf")):
        return
    whole, _ = _lines(data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_CHUNK", chunk)
        pieces, sink = _lines(data)
    assert [p for p in pieces if p[1]] == whole
    assert [line for _, line in whole] == [line for line in data.replace(b"\r", b"\n").split(b"\n") if line]
    assert sink.lines in (data.count(b"\n"), data.count(b"\n") + 1)
