"""Whatever a file holds: an answer or a clear refusal, in bounded time, and no number that was not there."""

from __future__ import annotations

import bz2
import codecs
import functools
import gzip
import io
import json
import lzma
import math
import random
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeproxy.traces import LogTrace
from tests.traces.mutating import attempt, bytewise, check, linewise
from tests.traces.samples import SAMPLES, TEXTS, WITHOUT

_DOCUMENTS = ("state", "golden", "csv", "wandb csv")


@pytest.mark.parametrize("name", SAMPLES)
def test_samples_are_read(tmp_path: Path, name: str) -> None:
    logs = attempt(tmp_path, SAMPLES[name])
    assert len(logs) == (2 if name == "ranks" else 1)
    assert all(log.has_metrics == (name not in WITHOUT) for log in logs)
    check(logs, TEXTS.get(name))


@pytest.mark.parametrize("name", SAMPLES)
def test_mutated_logs(tmp_path: Path, name: str) -> None:
    dice = random.Random(name)
    for number in range(8):
        lines = name in TEXTS and number % 2
        data = linewise(SAMPLES[name], list(TEXTS.values()), dice) if lines else bytewise(SAMPLES[name], dice)
        check(attempt(tmp_path, data), data if name in TEXTS else None)


def _zipped(data: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/x.log", data)
    return out.getvalue()


def _tarred(data: bytes) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        info = tarfile.TarInfo("a/x.log")
        info.size = len(data)
        archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def _zstd(data: bytes) -> bytes:
    return pa.compress(data, codec="zstd", asbytes=True)


@functools.cache
def _plain(name: str) -> tuple[LogTrace, ...]:
    with tempfile.TemporaryDirectory() as folder:
        return attempt(Path(folder), SAMPLES[name])


def _same_traces(left: tuple[LogTrace, ...], right: tuple[LogTrace, ...]) -> None:
    assert len(left) == len(right)
    for mine, theirs in zip(left, right, strict=True):
        assert mine.has_metrics == theirs.has_metrics
        if mine.has_metrics:
            assert mine.trace.signals == theirs.trace.signals
            assert mine.status.astype(str).equals(theirs.status.astype(str))
            for name in mine.trace.signals:
                assert np.array_equal(mine.trace.values(name), theirs.trace.values(name), equal_nan=True)


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress, _zstd, _tarred, _zipped])
def test_archives_change_nothing(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    for name, data in SAMPLES.items():
        _same_traces(_plain(name), attempt(tmp_path, pack(data)))


@pytest.mark.parametrize(
    "dress",
    [
        lambda data: data.replace(b"\n", b"\r\n"),
        lambda data: codecs.BOM_UTF8 + data,
        lambda data: codecs.BOM_UTF16_LE + data.decode().encode("utf-16-le"),
        lambda data: data + b"\xff\xfe invalid \xf0\n",
    ],
    ids=["CRLF", "BOM", "UTF-16", "bytes that are no text"],
)
def test_encodings_and_line_ends_change_nothing(tmp_path: Path, dress: Callable[[bytes], bytes]) -> None:
    for name, data in TEXTS.items():
        dressed = dress(data)
        if b"\xff\xfe inv" in dressed and name in _DOCUMENTS:
            continue  # a document ends where it ends
        _same_traces(_plain(name), attempt(tmp_path, dressed))


def test_markdown_fences_change_nothing(tmp_path: Path) -> None:
    for name, data in TEXTS.items():
        if name not in _DOCUMENTS:
            fenced = b"# What happened\n\nIt went wrong:\n\n```text\n" + data + b"```\n\nDo you know why?\n"
            _same_traces(_plain(name), attempt(tmp_path, fenced))


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    check(attempt(tmp_path_factory.getbasetemp(), data))


_CELLS = st.one_of(st.floats(), st.integers(-(2**70), 2**70), st.none(), st.booleans(), st.text(max_size=4))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.dictionaries(st.sampled_from(["actor/lr", "actor/grad_norm"]), _CELLS)))
)
def test_every_value_is_kept_and_none_is_added(tmp_path_factory: pytest.TempPathFactory, rows: list) -> None:
    rows = [{"step": step, **cells} for step, cells in rows]
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    logs = attempt(tmp_path_factory.getbasetemp(), data)
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
        assert shown <= {*written, *(n for text in texts if (n := _number(text)) is not None), math.inf, -math.inf}


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
        b"step:1 - a:1" + b" " * 3_000_000 + b"x",
        b"=" * 3_000_000 + b" Step 1/2 x",
        "• a".encode() * 500_000,
        "  • Loss: 1".encode() + b" " * 2_000_000 + b"x",
        b"Timing:" * 400_000,
        b"Training Results:" + b" " * 3_000_000 + b"x",
        b"1%|a| 1/2 [0<0, a=1] " * 20_000,
        b"1%|a| 1/2 [" + b"a=1, " * 100_000 + b"]",
        "╒".encode() + b"\n" + "│ a │ 1 ".encode() * 40_000,
        b"(" + b"a " * 1_000_000 + b"pid=1) {'a': 1}",
        b"Step 1: {'a': 1,\n" + (b"'b': {" + b"1, " * 30_000 + b"}\n") * 300,
        b"verl version" * 300_000,
        b"Train step 1/2 " * 200_000,
        b"[rank0]: " * 400_000 + b"{'a': 1}",
        b"Step 1 | " + b"a 1 | " * 60_000,
    ],
    ids=range(30),
)
@pytest.mark.timeout(120)
def test_hostile_text_ends_in_time(tmp_path: Path, data: bytes) -> None:
    for log in attempt(tmp_path, data):
        assert log.info.rows <= 20_001
