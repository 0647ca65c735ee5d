"""Whatever a file holds: an answer or a clear refusal, in bounded time, and no number that was not there."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeproxy.errors import TraceError
from moeproxy.traces import read
from tests.traces.logs.make import event, events

_ROWS = [{"step": n, "loss": 0.5 + n, "grad_norm": 1.25, "learning_rate": 1e-6, "epoch": n / 8} for n in range(4)]
SAMPLES = {
    "jsonl": "".join(json.dumps(row) + "\n" for row in _ROWS).encode(),
    "state": json.dumps({"log_history": _ROWS}, indent=1).encode(),
    "console": "".join(f"  1%| | {n}/9 [0<0]\r{row}\n" for n, row in enumerate(_ROWS)).encode(),
    "verl": b"".join(b"(T pid=1) step:%d - actor/lr:np.float64(1e-06) - actor/grad_norm:1.25\n" % n for n in range(4)),
    "megatron": b"".join(b" iteration %d/ 9 | lm loss: 5.0E-01 | grad norm: 1.25 |\n" % n for n in range(4)),
    "csv": b"step,loss,grad_norm\n1,0.5,1.25\n2,,nan\n3,1.5,1.25\n",
    "wandb": b'"Step","a - loss","a - loss__MIN","a - loss__MAX"\n"0","0.5","0.5","0.5"\n"1","","",""\n',
    "events": events(event(1, {"train/loss": 0.5, "train/epoch": 0.25}), event(2, {"train/loss": 1.5})),
}
_BITS = [
    b"{",
    b"}",
    b"[",
    b'"',
    b"'",
    b"\n",
    b"\r",
    b"\0",
    b"\xff",
    b"nan",
    b"1e999",
    b"-",
    b":",
    b",",
    b"/",
    b"9" * 400,
]


def _read(folder: Path, data: bytes) -> tuple:
    file = folder / "x.log"
    file.write_bytes(data)
    try:
        return read(file)
    except TraceError:
        return ()


@pytest.mark.parametrize("name", SAMPLES)
def test_samples_are_read(tmp_path: Path, name: str) -> None:
    (log,) = _read(tmp_path, SAMPLES[name])
    assert log.has_metrics


@pytest.mark.parametrize("name", SAMPLES)
def test_mutated_logs(tmp_path: Path, name: str) -> None:
    dice = random.Random(name)
    for _ in range(40):
        data = bytearray(SAMPLES[name])
        for _ in range(dice.randint(1, 6)):
            place = dice.randrange(len(data) + 1)
            stop = place + dice.choice([0, 0, 1, 5])
            data[place:stop] = dice.choice([*_BITS, data[place : place + 9], bytes([dice.randrange(256)])])
        for log in _read(tmp_path, bytes(data)):
            assert len(log.original) == log.info.rows == len(log.places)
            log.summary()


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    _read(tmp_path_factory.getbasetemp(), data)


_CELLS = st.one_of(st.floats(), st.integers(-(2**70), 2**70), st.none(), st.booleans(), st.text(max_size=4))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.dictionaries(st.sampled_from(["actor/lr", "actor/grad_norm"]), _CELLS)))
)
def test_every_value_is_kept_and_none_is_added(tmp_path_factory: pytest.TempPathFactory, rows: list) -> None:
    rows = [{"step": step, **cells} for step, cells in rows]
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    logs = _read(tmp_path_factory.getbasetemp(), data)
    kept = {int(line): (log, row) for log in logs for row, line in log.places["line"].items()}
    assert sorted(kept) == list(range(1, len(rows) + 1))
    for line, row in enumerate(rows, 1):
        log, place = kept[line]
        for key, value in row.items():
            _same(value, log.original.at[place, key], str(log.original_status.at[place, key]))
    written = [float(v) for row in rows for v in row.values() if isinstance(v, int | float)]
    texts = [v for row in rows for v in row.values() if isinstance(v, str)]
    for log in logs:
        values = log.trace.steps.to_numpy(float, na_value=np.nan) if log.has_metrics else np.zeros(0)
        shown = {float(v) for v in np.ravel(values) if not math.isnan(v)}
        assert shown <= {*written, *filter(None.__ne__, map(_number, texts)), math.inf, -math.inf}


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _same(value: object, found: object, status: str) -> None:
    if value is None:
        assert status == "null"
    elif isinstance(value, bool):
        assert status == "bool"
        assert float(value) == found
    elif isinstance(value, float) and math.isnan(value):
        assert status == "nan"
    elif isinstance(value, int | float):
        assert status in ("measured", "pos inf", "neg inf")
        # Integers beyond float64 are kept by their digits.
        assert str(value) == found if isinstance(found, str) else float(value) == found
    else:
        assert status.endswith("text")


@pytest.mark.parametrize(
    "data",
    [
        b"{" * 3_000_000,
        b"[" * 3_000_000,
        b'{"a":' * 600_000,
        b"{'a': " * 500_000,
        b"step:1 - " * 300_000,
        b"iteration 1/2 |" + b"|" * 3_000_000,
        b"1/2 [" * 500_000,
        b"{'step': 1, 'a': " + b"9" * 3_000_000 + b"}",
        b'{"step": 1, "a": ' + b"9" * 3_000_000 + b"}\n",
        b"(" * 3_000_000,
        b"\x1b[" * 1_000_000,
        b"Step 1: {'a': 1,\n" * 20_000,
        b"a,b\n" + b'"' * 3_000_000,
        b"step 1 " * 400_000 + b"{'a': 1}",
        b"error " * 500_000,
    ],
    ids=range(15),
)
@pytest.mark.timeout(120)
def test_hostile_text_ends_in_time(tmp_path: Path, data: bytes) -> None:
    for log in _read(tmp_path, data):
        assert log.info.rows <= 20_001
