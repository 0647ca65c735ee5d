"""wandb's binary files, built piece by piece."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeproxy.errors import TraceError
from moeproxy.traces import LogTrace, read
from tests.traces.logs.make import blocks, field, varint


def history(step: int, cells: dict[str, str], *, nested: bool = False) -> bytes:
    body = b""
    for key, text in cells.items():
        name = b"".join(field(2, 2, part.encode()) for part in key.split(".")) if nested else field(1, 2, key.encode())
        body += field(1, 2, name + field(16, 2, text.encode()))
    return field(1, 0, varint(7)) + field(2, 2, body + field(2, 2, field(1, 0, varint(step))))


def wandb(*records: bytes) -> bytes:
    return blocks(b":W&B\xe1\xbe\0", *records)


def output(text: str, *, raw: bool = True, error: bool = False) -> bytes:
    body = (b"" if error else field(1, 0, varint(1))) + (field(3, 2, text.encode()) if text else b"")
    return field(13 if raw else 4, 2, body)


def _read(folder: Path, data: bytes) -> LogTrace:
    (folder / "run-1.wandb").write_bytes(data)
    (log,) = read(folder / "run-1.wandb")
    return log


RUN = field(17, 2, field(8, 2, b"sunny-1"))
EXIT = field(18, 2, field(1, 0, varint(255)))


@pytest.mark.parametrize("nested", [False, True])
def test_history(tmp_path: Path, nested: bool) -> None:
    records = [
        RUN,
        history(0, {"actor/grad_norm": "0.5", "actor/lr": "1e-6"}, nested=nested),
        history(1, {"actor/grad_norm": "NaN", "h": '{"_type": "histogram"}'}, nested=nested),
        history(2, {"actor/grad_norm": "Infinity"}, nested=nested),
        EXIT,
    ]
    log = _read(tmp_path, wandb(*records))
    assert log.info.framework == "verl"
    assert log.trace.steps.index.tolist() == [0, 1, 2]
    assert log.status["grad_norm"].tolist() == ["measured", "nan", "pos inf"]
    assert log.trace.values("learning_rate")[0] == 1e-6
    assert log.original["h/_type"].tolist()[1] == "histogram"
    assert log.info.facts == {"run": "sunny-1", "exit code": 255}
    assert math.isnan(log.trace.values("grad_norm")[1])


def test_records_over_several_blocks(tmp_path: Path) -> None:
    long = history(1, {"actor/lr": "0.25", "table": '"' + "x" * 100_000 + '"'})
    log = _read(tmp_path, wandb(history(0, {"actor/lr": "0.5"}), long, history(2, {"actor/lr": "0.125"})))
    assert log.trace.values("learning_rate").tolist() == [0.5, 0.25, 0.125]


@pytest.mark.parametrize("length", range(32_735, 32_762, 3))
def test_ends_of_blocks(tmp_path: Path, length: int) -> None:
    first = history(0, {"actor/lr": "0.5", "x": '"' + "y" * (length - 60) + '"'})
    log = _read(tmp_path, wandb(first, history(1, {"actor/lr": "0.25"})))
    assert log.trace.values("learning_rate").tolist() == [0.5, 0.25]


def test_truncated_damaged_and_empty(tmp_path: Path) -> None:
    whole = wandb(history(0, {"actor/lr": "0.5"}), history(1, {"actor/lr": "0.25"}))
    log = _read(tmp_path, whole[:-4])
    assert log.trace.values("learning_rate").tolist() == [0.5]
    assert [skipped.reason for skipped in log.info.skipped] == ["cut short"]
    damaged = bytearray(whole)
    damaged[-3] ^= 1
    assert "checksum is wrong" in _read(tmp_path, bytes(damaged)).info.skipped[0].reason
    log = _read(tmp_path, wandb(RUN))
    with pytest.raises(TraceError, match="no metric"):
        log.trace  # noqa: B018 - reading it raises
    assert any("without history" in note for note in log.info.notes)


_WHOLE = wandb(history(0, {"actor/lr": "0.5"}), history(1, {"actor/lr": "0.25"}))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(7, len(_WHOLE) - 1), st.integers(0, 255)), max_size=3), st.integers(0, 90))
def test_damage_makes_no_numbers(tmp_path_factory, changes: list[tuple[int, int]], cut: int) -> None:
    data = bytearray(_WHOLE)
    for place, byte in changes:
        data[place] = byte
    log = _read(tmp_path_factory.getbasetemp(), bytes(data[: max(7, len(data) - cut)]))
    assert set(log.original.get("actor/lr", [])) <= {0.5, 0.25}


def test_console_output_gives_the_metrics_where_there_is_no_history(tmp_path: Path) -> None:
    # Pieces end anywhere; the two streams do not mix; clients of 2024 store a line's end as a piece without text.
    pieces = [
        output("(T pid=1) step:1 - actor/grad_norm:0.5"),
        output("Traceback (most recent call last):\n  File x\n", error=True),
        output(" - actor/lr:1e-6\nstep:2 - actor/grad_norm:0.25 - actor/lr:1e-6"),
        output("KeyError: 'reward'", error=True),
        output(""),
    ]
    log = _read(tmp_path, wandb(RUN, *pieces, EXIT))
    assert log.trace.values("grad_norm").tolist() == [0.5, 0.25]
    assert log.places["line"].tolist() == [2, 4]
    assert [str(finding) for finding in log.info.findings] == ["traceback on line 5: KeyError: 'reward'"]
    assert any("metrics were read from the 5 lines of console output" in note for note in log.info.notes)


def test_history_goes_before_console_output(tmp_path: Path) -> None:
    said = output("step:1 - actor/grad_norm:9.0 - actor/lr:1e-6\nKilled\n 3/9 [00:01]\n", raw=False)
    log = _read(tmp_path, wandb(history(1, {"actor/grad_norm": "0.5"}), said))
    assert log.trace.values("grad_norm").tolist() == [0.5]
    assert [finding.kind for finding in log.info.findings] == ["killed"]
    assert log.info.progress is not None
    assert log.info.progress.text == "3/9"
    assert any("3 lines of console output in this file were searched for failures only" in n for n in log.info.notes)


def test_console_output_without_metrics_says_how_the_run_died(tmp_path: Path) -> None:
    log = _read(tmp_path, wandb(RUN, output("Traceback (most recent call last):\n  File x\nKeyError: 'a'\n")))
    assert "KeyError: 'a'" in log.contents
    assert any("no metric stands in the 3 lines" in note for note in log.info.notes)


def test_the_end_of_a_record_without_its_start_is_left_out(tmp_path: Path) -> None:
    whole = wandb(history(0, {"actor/lr": "0.5", "x": '"' + "y" * 40_000 + '"'}), history(1, {"actor/lr": "0.25"}))
    damaged = bytearray(whole)
    damaged[2000] ^= 1
    log = _read(tmp_path, bytes(damaged))
    assert log.trace.values("learning_rate").tolist() == [0.25]
    reasons = [skipped.reason.split(";")[0] for skipped in log.info.skipped]
    assert reasons == ["a piece whose checksum is wrong", "the end of a record whose start is missing"]
