"""A log that grows, is cut, is replaced, and whose last line is not finished."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from moeproxy.errors import TraceError
from moeproxy.traces import LogFollower, read
from moeproxy.traces.following import check_followable
from moeproxy.traces.logs import lines
from tests.traces.logs.make import event, events, tarred, zipped, zstd


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


@pytest.mark.parametrize("further", [0, 1, 30], ids=["as long", "longer", "much longer"])
@pytest.mark.parametrize("first", [2, 40])
def test_a_file_written_anew_between_two_looks_is_no_grown_one(tmp_path: Path, first: int, further: int) -> None:
    file = tmp_path / "train.log"
    file.write_text("".join(_line(n, 0.5) for n in range(10, 10 + first)))
    inode = file.stat().st_ino
    with LogFollower(file) as follower:
        assert follower.poll() == first
        file.write_text("".join(_line(n, 0.25) for n in range(10, 10 + first + further)))  # as open(file, "w") does
        assert file.stat().st_ino == inode
        assert follower.poll() == first + further
        before, log = follower.logs()  # both begin at step 10: two runs
        assert before.trace.values("grad_norm").tolist() == [0.5] * first
        assert log.trace.values("grad_norm").tolist() == [0.25] * (first + further)
        assert sum("replaced or cut" in note for note in log.info.notes) == 1
        assert follower.poll() == 0  # and it is not taken for new at the next look
        with file.open("a") as stream:
            stream.write(_line(99, 0.125))
        assert follower.poll() == 1


def test_a_file_that_only_grows_is_never_taken_for_a_new_one(tmp_path: Path) -> None:
    file = tmp_path / "train.log"
    with LogFollower(file) as follower:
        for n in range(40):
            with file.open("a") as stream:
                stream.write(_line(n, 0.5) + "x" * (n * 7 % 300) + "\n" + "half a line"[: n % 12])
            assert follower.poll() == 1
        assert not any("replaced" in note for note in follower.logs()[0].info.notes)


def _sqlite(path: Path) -> bytes:
    with closing(sqlite3.connect(path)) as base:
        base.execute("CREATE TABLE metrics (a)")
        base.commit()
    return path.read_bytes()


LINE = _line(1, 0.5).encode()
OTHERS: dict[str, Callable[[Path], bytes]] = {
    "gzip": lambda _: gzip.compress(LINE),
    "bzip2": lambda _: bz2.compress(LINE),
    "xz": lambda _: lzma.compress(LINE),
    "zstd": lambda _: zstd(LINE),
    "zip": lambda _: zipped({"x.log": LINE}),
    "tar": lambda _: tarred({"x.log": LINE}),
    "SQLite": lambda folder: _sqlite(folder / "base.db"),
    "event file": lambda _: events(event(1, {"a": 0.5})),
    "wandb": lambda _: b":W&B\xce\xbe\0",
    "Parquet": lambda _: b"PAR1\1\2",
    "UTF-16": lambda _: LINE.decode().encode("utf-16"),
    "binary data": lambda _: LINE + bytes(range(256)) * 4 + LINE,
    "CSV": lambda _: b"step,loss\n1,0.5\n2,0.25\n",
}


@pytest.mark.parametrize("kind", OTHERS)
def test_what_does_not_grow_line_by_line_is_refused(tmp_path: Path, kind: str) -> None:
    file, data = tmp_path / "train.log", OTHERS[kind](tmp_path)
    with LogFollower(file) as follower:
        assert follower.poll() == 0
        file.write_bytes(data)
        for _ in range(2):  # it does not pass for read after the first look
            with pytest.raises(TraceError, match=rf"{kind}.* cannot be followed.*moeproxy\.traces\.read"):
                follower.poll()
        with pytest.raises(TraceError, match="cannot be followed"):
            check_followable(file)
        os.rename(file, tmp_path / "old")
        file.write_bytes(LINE)
        assert follower.poll() == 1  # another file has taken its name
        assert _norms(follower) == [0.5]


def test_a_table_that_grows_is_refused_when_it_shows_itself(tmp_path: Path) -> None:
    file = tmp_path / "metrics.log"
    file.write_text("step,loss\n")
    with LogFollower(file) as follower:
        assert follower.poll() == 0  # nothing but a line of text so far
        with file.open("a") as stream:
            stream.write("1,0.5\n2,0.25\n")
        with pytest.raises(TraceError, match="a CSV table cannot be followed"):
            follower.poll()


def test_a_log_that_begins_with_its_settings_is_followed(tmp_path: Path) -> None:
    file = tmp_path / "train.log"
    file.write_text(json.dumps({"trainer": {"nodes": 1}, "steps": [1, 2]}, indent=2) + "\n")
    with LogFollower(file) as follower:
        assert follower.poll() == 0
        for n in (1, 2):
            with file.open("a") as stream:
                stream.write(_line(n, n / 2))
            assert follower.poll() == 1
        assert _norms(follower) == [0.5, 1.0]


def _bullets(step: int, loss: float) -> tuple[str, str]:
    heading = f"========= Step {step}/9 =========\nTraining Results:\n"
    return heading, f"  • Loss: {loss}\n  • Avg Reward: {loss / 10}\n"


def test_a_record_that_a_rotation_parts_is_whole(tmp_path: Path) -> None:
    file = tmp_path / "train.log"
    heading, values = _bullets(5, 0.5)
    file.write_text(heading)
    with LogFollower(file, framework="nemo-rl") as follower:
        follower.poll()
        os.rename(file, tmp_path / "train.log.1")
        file.write_text(values)
        assert follower.poll() == 2
        (log,) = follower.logs()
        assert log.trace.steps.index.tolist() == [5]


def test_what_was_begun_before_lost_lines_does_not_go_on(tmp_path: Path) -> None:
    file = tmp_path / "train.log"
    file.write_text("".join(_bullets(5, 0.5)) + "x" * 200 + "\n")
    with LogFollower(file, framework="nemo-rl") as follower:
        follower.poll()
        # Truncated; what was written until now, the heading of step 8 among it, is gone.
        file.write_text(_bullets(8, 0.8)[1])
        follower.poll()
        (log,) = follower.logs()
        assert log.trace.values("total_loss").tolist() == [0.5]
