"""Packs keep every run as it was; the registry finds it again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from moeproxy.errors import TraceError
from moeproxy.traces.pack import REGISTRY, load_bench, load_infos, load_pack, load_registry, save_pack
from moeproxy.traces.trace import RunInfo, Trace

COLUMNS = ["model", "fault", "family", "level", "key", "pack"]


def trace(seed: int, *, model: str = "original", fault: str | None = None, extra: bool = False) -> Trace:
    draw = np.random.default_rng(seed)
    steps = pd.DataFrame(
        {"reward_mean": draw.random(4), "kl": [0.1, np.nan, np.inf, 0.2]}, index=pd.RangeIndex(1, 5, name="step")
    )
    if extra:
        steps["grad_norm"] = pd.Series([1.0, None, 2.0, 3.0], index=steps.index, dtype=object)
    rows = pd.DataFrame(
        {
            "step": np.repeat([1, 2, 3, 4], 2),
            "prompt": [0, 1] * 4,
            "reward": draw.random(8),
            "length": range(8),
            "repetition_ratio": 0.0,
            "advantage": draw.standard_normal(8),
            **({"tool_calls": 1, "tool_error": 0, "truncated": 1} if extra else {}),
        }
    )
    info = RunInfo(model, "cluster", 16, seed, fault, 1.0 if fault else 0.0, 2 if fault else None, {"steps": 4})
    return Trace(steps, rows if seed % 2 else None, info)


def bench(folder: Path) -> list[Trace]:
    made = [trace(1), trace(2), trace(3, fault="kl_sign"), trace(5, model="cluster-16")]
    rows = []
    for index, run in enumerate(made):
        info = run.provenance
        pack = f"{info.model}/{'OD' if info.fault else 'healthy'}.parquet"
        rows.append([info.model, info.fault or "", "", "", str(index), pack])
    for pack in {row[-1] for row in rows}:
        save_pack([t for t, row in zip(made, rows, strict=True) if row[-1] == pack], folder / pack)
    pd.DataFrame(rows, columns=COLUMNS).to_csv(folder / REGISTRY, index=False)
    return made


def test_runs_of_different_signals_come_back_bit_for_bit(tmp_path: Path) -> None:
    made = [trace(1), trace(2), trace(3, extra=True), trace(4, fault="kl_sign")]
    read = load_pack(save_pack(made, tmp_path / "p.parquet"))
    for ours, theirs in zip(made, read, strict=True):
        assert ours.equals(theirs, ignore=())
        assert ours.provenance == theirs.provenance
    bare = load_pack(tmp_path / "p.parquet", trajectories=False)
    assert [run.trajectories for run in bare] == [None] * 4
    assert load_infos(tmp_path / "p.parquet") == tuple(trace.provenance for trace in made)
    some = load_pack(tmp_path / "p.parquet", keep=lambda info: info.seed in (2, 4))
    assert [ours.equals(theirs, ignore=()) for ours, theirs in zip(made[1::2], some, strict=True)] == [True, True]
    assert load_pack(tmp_path / "p.parquet", keep=lambda info: False) == ()
    assert all(one.steps.equals(other.steps) for one, other in zip(bare, read, strict=True))
    assert read[2].missing("grad_norm").tolist() == [False, True, False, False]
    assert read[2].trajectories is not None
    assert "truncated" in read[2].trajectories


def test_a_pack_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="at least one"):
        save_pack([], tmp_path / "p.parquet")
    assert not list(tmp_path.iterdir())


def test_other_files_are_no_packs(tmp_path: Path) -> None:
    trace(1).save(tmp_path / "one.parquet")
    (tmp_path / "cut.parquet").write_bytes(b"PAR1")
    for name, words in (("one", "no pack of traces"), ("cut", "cut short"), ("absent", "no such file")):
        with pytest.raises(TraceError, match=words):
            load_pack(tmp_path / f"{name}.parquet")


def test_the_registry_selects(tmp_path: Path) -> None:
    made = bench(tmp_path)
    assert len(load_bench(tmp_path)) == len(made)
    assert [t.provenance.seed for t in load_bench(tmp_path, models=["cluster-16"])] == [5]
    assert [t.provenance.seed for t in load_bench(tmp_path, faults=["kl_sign"])] == [3]
    assert {t.provenance.seed for t in load_bench(tmp_path, models=["original"], faults=[None])} == {1, 2}
    assert {t.provenance.source for t in load_bench(tmp_path)} == {"recorded"}
    assert load_registry(tmp_path)["fault"].tolist() == ["", "", "kl_sign", ""]


def test_what_was_not_recorded_is_named(tmp_path: Path) -> None:
    bench(tmp_path)
    with pytest.raises(TraceError, match="cluster-16, original"):
        load_bench(tmp_path, models=["typo"])
    with pytest.raises(TraceError, match="healthy, kl_sign"):
        load_bench(tmp_path, faults=["typo"])
    with pytest.raises(TraceError, match="registry"):
        load_bench(tmp_path / "absent")
