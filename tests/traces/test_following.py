"""A log that grows, is cut, is replaced, and whose last line is not finished."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from moeproxy.errors import TraceError
from moeproxy.traces import LogFollower, read
from moeproxy.traces.logs import lines


def _line(step: int, value: float) -> str:
    return f"(T pid=1) step:{step} - actor/grad_norm:{value} - actor/lr:1e-6\n"


def _norms(follower: LogFollower) -> list[float]:
    (log,) = follower.logs()
    return log.trace.values("grad_norm").tolist()


def test_only_whole_lines_are_taken(tmp_path: Path) -> None:
    file = tmp_path / "train.log"
    follower = LogFollower(file)
    assert follower.poll() == 0
    (log,) = follower.logs()
    assert not log.has_metrics
    text = _line(1, 0.5) + _line(2, 0.25)
    cut = len(text) - 20
    file.write_text(text[:cut])
    assert follower.poll() == 1
    assert follower.poll() == 0
    assert _norms(follower) == [0.5]
    with file.open("a") as stream:
        stream.write(text[cut:])
    assert follower.poll() == 1
    assert _norms(follower) == [0.5, 0.25]
    (log,) = follower.logs()
    assert log.places["line"].tolist() == [1, 2]
    assert (log.info.name, log.info.lines) == ("train", 2)


@pytest.mark.parametrize("size", [1, 7, 50, 1000])
def test_pieces_give_what_the_whole_gives(tmp_path: Path, size: int) -> None:
    text = "".join(
        f"  1%| | {n}/9 [0<0]\r" + _line(n, n / 4) + f'{{"step": {n}, "actor/kl_loss": 0.5}}\n' for n in range(9)
    )
    whole = tmp_path / "whole.log"
    whole.write_text(text)
    (expected,) = read(whole)
    file, follower = tmp_path / "grows.log", LogFollower(tmp_path / "grows.log")
    for place in range(0, len(text), size):
        with file.open("a") as stream:
            stream.write(text[place : place + size])
        follower.poll()
    (log,) = follower.logs()
    assert log.trace.equals(expected.trace)
    assert log.places["line"].tolist() == expected.places["line"].tolist()


def test_replaced_and_cut_files(tmp_path: Path) -> None:
    file = tmp_path / "train.log"
    file.write_text(_line(1, 0.5) + _line(2, 0.25))
    follower = LogFollower(file)
    assert follower.poll() == 2
    os.rename(file, tmp_path / "train.log.1")
    assert follower.poll() == 0
    file.write_text(_line(3, 0.75) + _line(4, 0.5) + _line(5, 0.5))
    assert follower.poll() == 3
    file.write_text(_line(6, 0.125))
    assert follower.poll() == 1
    assert _norms(follower) == [0.5, 0.25, 0.75, 0.5, 0.5, 0.125]
    (log,) = follower.logs()
    assert any("replaced or cut" in note for note in log.info.notes)


def test_a_line_without_end_does_not_stop_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("moeproxy.traces.following", "moeproxy.traces.logs.lines"):
        monkeypatch.setattr(f"{module}.MAX_LINE", 1000)
    assert lines.MAX_LINE == 1000
    file = tmp_path / "x.log"
    file.write_text(_line(1, 0.5) + "x" * 5000)
    follower = LogFollower(file)
    follower.poll()
    follower.poll()
    with file.open("a") as stream:
        stream.write("\n" + _line(2, 0.25))
    assert follower.poll() == 1
    assert _norms(follower) == [0.5, 0.25]
    (log,) = follower.logs()
    assert "longer than" in log.info.skipped[0].reason


def test_mapping_and_errors(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text('{"it": 3, "mine": 0.5}\n')
    follower = LogFollower(file, mapping={"mine": "policy_loss"}, step="it")
    assert follower.poll() == 1
    (log,) = follower.logs()
    assert log.trace.values("policy_loss").tolist() == [0.5]
    with pytest.raises(TraceError, match="cannot be read"):
        LogFollower(tmp_path).poll()


def test_rows_written_just_before_a_rotation_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "train.log"
    file.write_text(_line(1, 0.5))
    with LogFollower(file) as follower:
        assert follower.poll() == 1
        with file.open("a") as stream:
            stream.write(_line(2, 0.25) + _line(3, 0.75).rstrip("\n"))  # the last line has no end and never will
        os.rename(file, tmp_path / "train.log.1")
        file.write_text(_line(4, 0.125))
        assert follower.poll() == 3
        assert _norms(follower) == [0.5, 0.25, 0.75, 0.125]


def test_a_deleted_file_is_read_to_its_end(tmp_path: Path) -> None:
    file = tmp_path / "train.log"
    file.write_text(_line(1, 0.5))
    with LogFollower(file) as follower:
        follower.poll()
        with file.open("a") as stream:
            stream.write(_line(2, 0.25))
        file.unlink()
        assert follower.poll() == 1
        assert follower.poll() == 0


def test_after_closing_it_goes_on_where_it_stopped(tmp_path: Path) -> None:
    file = tmp_path / "train.log"
    file.write_text(_line(1, 0.5))
    follower = LogFollower(file)
    follower.poll()
    follower.close()
    with file.open("a") as stream:
        stream.write(_line(2, 0.25))
    assert follower.poll() == 1
    follower.close()
    assert _norms(follower) == [0.5, 0.25]


def test_carriage_returns_end_lines(tmp_path: Path) -> None:
    file = tmp_path / "x.log"
    file.write_bytes(b"{'loss': 0.5, 'grad_norm': 1.0, 'learning_rate': 1e-5, 'epoch': 0.1}\r 1/9 [0<0]\r")
    with LogFollower(file) as follower:
        assert follower.poll() == 1
        with file.open("ab") as stream:
            stream.write(b"{'loss': 0.25, 'grad_norm': 1.0, 'learning_rate': 1e-5, 'epoch': 0.2}\r")
        assert follower.poll() == 1
        (log,) = follower.logs()
        (whole,) = read(file)
        assert log.trace.equals(whole.trace)
        assert log.trace.values("total_loss").tolist() == [0.5, 0.25]
