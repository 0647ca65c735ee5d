"""The growing trace: exact, readable at every moment, and after a crash at any byte."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moeproxy.errors import TraceError
from moeproxy.traces import RunInfo, load_partial, partial_path
from moeproxy.traces.partial import Follower, PartialTrace, assembled

INFO = RunInfo("original", "original", 32, 4, fault="kl_sign", strength=1.0, onset=2, further=(("nan", 0.5, 3),))
ROWS = [
    {"policy_loss": 0.1 + 0.2, "kl": math.nan, "grad_norm": 1e-300},
    {"policy_loss": -0.0, "kl": math.inf, "grad_norm": 1 / 3},
    {"policy_loss": np.float32(0.1), "kl": -math.inf, "grad_norm": np.float64(2 / 3)},
]
RESPONSES = [
    {
        "prompt": [0, 0],
        "reward": [step / 3, math.nan],
        "length": [3, 4],
        "repetition_ratio": [0, 1],
        "advantage": [1, -1],
    }
    for step in range(3)
]


def _write(path: Path, n: int = 3) -> Path:
    writer = PartialTrace(path, INFO)
    for step in range(n):
        writer.add(step + 1, ROWS[step], RESPONSES[step])
    writer.close()
    return path


def test_what_was_added_is_read_bit_for_bit(tmp_path: Path) -> None:
    trace = load_partial(_write(tmp_path / "new" / "a.partial"))
    assert trace.equals(assembled((1, 2, 3), ROWS, RESPONSES, INFO), ignore=())
    assert trace.provenance == INFO
    assert trace.values("policy_loss").tolist() == [0.1 + 0.2, 0.0, float(np.float32(0.1))]
    assert np.signbit(trace.values("policy_loss")[1])
    assert not trace.missing("kl").any()


def test_a_file_cut_at_any_byte_gives_the_steps_that_were_finished(tmp_path: Path) -> None:
    whole = _write(tmp_path / "a.partial", n=2).read_bytes()
    full = load_partial(tmp_path / "a.partial")
    lost = tmp_path / "cut.partial"
    for length in range(len(whole) + 1):
        lost.write_bytes(whole[:length])
        finished = whole[:length].count(b"\n") - 1
        if finished < 1:
            with pytest.raises(TraceError, match="no growing trace"):
                load_partial(lost)
        else:
            assert load_partial(lost).steps.equals(full.steps[:finished])


def test_a_new_run_starts_the_file_anew(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.partial")
    writer = PartialTrace(path, replace(INFO, seed=5))
    assert len(load_partial(path).steps) == 3  # what an earlier attempt left stays until there is something better
    writer.add(1, ROWS[0], RESPONSES[0])
    assert (len(load_partial(path).steps), load_partial(path).provenance.seed) == (1, 5)
    writer.close()


def test_a_follower_sees_each_step_once(tmp_path: Path) -> None:
    path = tmp_path / "a.partial"
    follower, writer = Follower(path), PartialTrace(path, INFO)
    assert follower.new() == []
    writer.add(1, ROWS[1], RESPONSES[1])
    assert follower.new() == [(1, ROWS[1])]
    assert follower.new() == []
    writer.add(2, ROWS[1], RESPONSES[1])
    writer.close()
    with open(path, "ab") as stream:
        stream.write(b'{"step": 3')
    assert [step for step, _ in follower.new()] == [2]
    assert follower.new() == []


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.partial"
    with pytest.raises(TraceError, match=r"a\.partial.*No such file"):
        load_partial(path)
    for text in (
        "",
        "[1, 2]\n[3]\n",
        "{}\n{}\n",
        '{"format": "moeproxy.partial", "version": 2}\n{"step": 1}\n',
        "no\nno\n",
    ):
        path.write_text(text)
        with pytest.raises(TraceError, match="no growing trace"):
            load_partial(path)
    path.write_text('{"format": "moeproxy.partial", "version": 1, "run": {}}\n{"step": 1}\n')
    with pytest.raises(TraceError, match="unusable contents"):
        load_partial(path)


def test_the_file_lies_beside_the_result() -> None:
    assert partial_path(Path("out/a--kl_sign-0.5-at3--s0--ab.parquet")) == Path(
        "out/a--kl_sign-0.5-at3--s0--ab.partial"
    )
