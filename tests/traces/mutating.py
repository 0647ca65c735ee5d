"""Damage to logs, and what must hold of whatever is read from damaged ones."""

from __future__ import annotations

import math
import random
import re
from pathlib import Path

import numpy as np

from moeproxy.errors import TraceError
from moeproxy.traces import LogTrace, read
from moeproxy.traces.keys import FRAMEWORKS, GENERIC

BITS = [b"{", b"}", b"[", b'"', b"'", b"\n", b"\r", b"\0", b"\xff", b"nan", b"1e999", b"-", b":", b",", b"/"]
BITS += [b"9" * 400, b" - ", b"|", "│".encode(), "╒".encode(), b"step:", b"Step 1:", b"\x1b[", b"```", b"]" * 40]
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")


def bytewise(data: bytes, dice: random.Random) -> bytes:
    """Return the data with bits flipped, bytes put in or taken out, or cut short."""
    out = bytearray(data)
    for _ in range(dice.randint(1, 6)):
        place = dice.randrange(len(out) + 1)
        if dice.random() < 0.4 and place < len(out):
            out[place] ^= 1 << dice.randrange(8)
            continue
        stop = place + dice.choice([0, 0, 1, 5, 60])
        out[place:stop] = dice.choice([*BITS, bytes(out[place : place + 9]), bytes([dice.randrange(256)])])
    return bytes(out[: dice.randrange(len(out) + 1)]) if dice.random() < 0.2 else bytes(out)


def linewise(data: bytes, others: list[bytes], dice: random.Random) -> bytes:
    """Return the data with lines doubled, exchanged, taken out, cut, or of another log between them."""
    found = data.splitlines(keepends=True) or [b""]
    for _ in range(dice.randint(1, 5)):
        place, other = dice.randrange(len(found)), dice.randrange(len(found))
        kind = dice.randrange(5)
        if kind == 0:
            found.insert(other, found[place])
        elif kind == 1:
            found[place], found[other] = found[other], found[place]
        elif kind == 2 and len(found) > 1:
            del found[place]
        elif kind == 3:
            found[place] = found[place][: dice.randrange(len(found[place]) + 1)]
        else:
            stranger = dice.choice(others).splitlines(keepends=True) or [b""]
            found.insert(place, dice.choice(stranger))
    return b"".join(found)


def attempt(folder: Path, data: bytes) -> tuple[LogTrace, ...]:
    """Read the data as a file; a clear refusal is an answer."""
    file = folder / "x.log"
    file.write_bytes(data)
    try:
        return read(file)
    except TraceError:
        return ()


def check(logs: tuple[LogTrace, ...], text: bytes | None = None) -> None:
    """Say what holds of every log: tables agree, states say what the values are, and no number is made up.

    Args:
        logs: what was read.
        text: the log, when it is text: then every finite number of a trace stands in it.
    """
    written = None
    if text is not None and b"np.float64" not in text:
        written = {abs(float(number)) for number in _NUMBER.findall(text.decode("utf-8", "replace"))}
    for log in logs:
        assert len(log.original) == log.info.rows == len(log.places) == len(log.original_status)
        assert list(log.original.columns) == list(log.original_status.columns)
        log.summary()
        if log.has_metrics:
            _check_trace(log, written)


def _check_trace(log: LogTrace, written: set[float] | None) -> None:
    steps = log.trace.steps.index.to_numpy()
    assert np.all(np.diff(steps) > 0)
    framework = FRAMEWORKS.get(log.info.framework, GENERIC)
    divisors = {name: key.divisor for key in framework.keys for name in framework.names(key.name)}
    for name in log.trace.signals:
        values, gone = log.trace.values(name), log.trace.missing(name)
        words = log.status[name].astype(str).to_numpy()
        for value, lost, word in zip(values, gone, words, strict=True):
            if word in ("measured", "number text", "bool"):
                assert math.isfinite(value)
                assert written is None or _near(abs(value * divisors.get(log.info.keys[name], 1.0)), written)
            elif word in ("pos inf", "neg inf", "pos inf text", "neg inf text"):
                assert math.isinf(value)
            else:
                assert math.isnan(value)
                assert lost == (word not in ("nan", "nan text", "nonfinite"))


def _near(value: float, written: set[float]) -> bool:
    return (
        value in written or any(math.isclose(value, other, rel_tol=1e-12) for other in written) or value in (0.0, 1.0)
    )
