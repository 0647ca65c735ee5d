"""Trace: round trips, NaN against missing, bad files."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from moeproxy.errors import TraceError
from moeproxy.places import data_dir
from moeproxy.traces import SIGNALS, RunInfo, Trace, layer_of, load_dir, read, signal_of

RUN = RunInfo(
    model="cluster-16",
    method="cluster",
    n_experts=16,
    seed=3,
    fault="update_freeze",
    strength=0.5,
    onset=20,
    config={"lr": 2e-4, "layers": [0, 1]},
    versions={"trl": "1.16.0"},
    checkpoint_fingerprint="ab12",
    wall_seconds=12.5,
    source="recorded",
)


def make_trace(n_steps: int = 6, seed: int = 0) -> Trace:
    rng = np.random.default_rng(seed)
    steps = pd.DataFrame(
        {
            "policy_loss": rng.normal(size=n_steps),
            "grad_norm": rng.random(n_steps),
            "router_load_entropy/0": rng.random(n_steps),
        },
        index=range(1, n_steps + 1),
    )
    # Step 2 has no trajectories at all.
    step = np.repeat([s for s in steps.index if s != 2], 4)
    trajectories = pd.DataFrame(
        {
            "step": step,
            "prompt": np.arange(len(step)) // 2,
            "reward": rng.random(len(step)),
            "length": rng.integers(1, 9, len(step)),
            "repetition_ratio": rng.random(len(step)),
            "advantage": rng.normal(size=len(step)),
        }
    )
    return Trace(steps, trajectories, RUN)


def test_round_trip_is_exact(tmp_path: Path) -> None:
    trace = make_trace()
    again = Trace.load(trace.save(tmp_path / "sub" / "a.parquet"))
    assert again.equals(trace, ignore=())
    assert again.provenance == RUN
    pd.testing.assert_frame_equal(again.steps, trace.steps)
    assert trace.trajectories is not None
    assert again.trajectories is not None
    pd.testing.assert_frame_equal(again.trajectories, trace.trajectories)
    assert [path.name for path in (tmp_path / "sub").iterdir()] == ["a.parquet"]


def test_nan_inf_and_missing_stay_distinct(tmp_path: Path) -> None:
    steps = pd.DataFrame(
        {
            "kl": pd.Series([1.0, np.nan, None, np.inf], dtype=object),
            "entropy": [np.nan, 1.0, 2.0, 3.0],
            "reward_std": pd.array([1.0, pd.NA, 2.0, 3.0], dtype="Float64"),
        }
    )
    trace = Trace(steps, None, RUN)
    for each in (trace, Trace.load(trace.save(tmp_path / "a.parquet"))):
        np.testing.assert_array_equal(each.missing("kl"), [False, False, True, False])
        np.testing.assert_array_equal(each.values("kl"), [1.0, np.nan, np.nan, np.inf])
        assert not each.missing("entropy").any()
        assert np.isnan(each.values("entropy")[0])
        np.testing.assert_array_equal(each.missing("reward_std"), [False, True, False, False])
        assert each.trajectories is None
    other = Trace(steps.assign(kl=pd.Series([1.0, None, np.nan, np.inf], dtype=object)), None, RUN)
    assert not trace.equals(other)


def test_input_is_not_changed() -> None:
    steps = pd.DataFrame({"kl": [1, 2]})
    trace = Trace(steps, None, RUN)
    trace.steps.loc[0, "kl"] = 9.0
    assert steps["kl"].tolist() == [1, 2]
    assert steps.index.name is None


@pytest.mark.parametrize("keep", [0, 1, 100, -1])
def test_cut_file_is_refused(tmp_path: Path, keep: int) -> None:
    path = make_trace().save(tmp_path / "a.parquet")
    data = path.read_bytes()
    path.write_bytes(data[:keep] if keep >= 0 else data[: len(data) // 2])
    with pytest.raises(TraceError, match=r"a\.parquet.*cut short.*What to do"):
        Trace.load(path)


def test_wrong_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no such file"):
        Trace.load(tmp_path / "none.parquet")
    plain = tmp_path / "plain.parquet"
    pq.write_table(pa.table({"step": [1]}), plain)
    with pytest.raises(TraceError, match=r"plain\.parquet.*no moeproxy trace"):
        Trace.load(plain)
    newer = tmp_path / "newer.parquet"
    header = b'{"format": "moeproxy.trace", "version": 99, "run": {}}'
    pq.write_table(pa.table({"step": [1]}, metadata={b"moeproxy": header}), newer)
    with pytest.raises(TraceError, match="version 99"):
        Trace.load(newer)
    with pytest.raises(TraceError, match="no such directory"):
        load_dir(tmp_path / "nowhere")


def test_load_dir_sorts_and_skips_unfinished(tmp_path: Path) -> None:
    make_trace(seed=1).save(tmp_path / "b.parquet")
    make_trace(seed=0).save(tmp_path / "a" / "x.parquet")
    (tmp_path / ".b-1.parquet").write_bytes(b"half")
    assert [trace.equals(make_trace(seed=seed)) for seed, trace in enumerate(load_dir(tmp_path))] == [
        True,
        True,
    ]


def test_faults_beside_the_first_are_kept_and_shown(tmp_path: Path) -> None:
    several = replace(RUN, further=(("kl_sign", 1.0, 4), ("reward_spike", 0.25, 7)))
    trace = Trace(make_trace().steps, None, several)
    assert Trace.load(trace.save(tmp_path / "a.parquet")).provenance == several
    assert several.faults == (("update_freeze", 0.5, 20), ("kl_sign", 1.0, 4), ("reward_spike", 0.25, 7))
    assert "update_freeze 0.5 from step 20 and kl_sign 1 from step 4 and reward_spike 0.25" in repr(trace)
    assert (RunInfo("a", "a", 1, 0).faults, RUN.faults) == ((), (("update_freeze", 0.5, 20),))
    assert "further" not in RUN.to_dict()


def test_the_header_of_a_recorded_file_is_written_again_as_it_was(tmp_path: Path) -> None:
    (recorded,) = (data_dir() / "runs").glob("original--update_freeze-1-at20--s0--*.parquet")
    again = Trace.load(recorded).save(tmp_path / "again.parquet")
    assert pq.read_schema(again).metadata[b"moeproxy"] == pq.read_schema(recorded).metadata[b"moeproxy"]


def test_a_header_whose_faults_cannot_be_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    run = '{"model": "a", "method": "a", "n_experts": 1, "seed": 0, "further": [["kl_sign", 1.0]]}'
    header = b'{"format": "moeproxy.trace", "version": 1, "run": ' + run.encode() + b"}"
    pq.write_table(pa.table({"step": [1]}, metadata={b"moeproxy": header}), file)
    with pytest.raises(TraceError, match="unusable contents"):
        Trace.load(file)


def test_equals_ignores_clock_and_sees_one_bit() -> None:
    trace = make_trace()
    slow = Trace(trace.steps.assign(seconds_per_step=1.0), trace.trajectories, replace(RUN, source="live"))
    assert trace.equals(slow)
    assert not trace.equals(slow, ignore=())
    nudged = trace.steps.assign(grad_norm=np.nextafter(trace.steps["grad_norm"], 2))
    assert not trace.equals(Trace(nudged, trace.trajectories, RUN))
    assert not trace.equals(Trace(trace.steps, None, RUN))


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (pd.DataFrame({"grad_nrm": [1.0]}), "nearest is 'grad_norm'"),
        (pd.DataFrame({"router_load_entropy": [1.0]}), "router_load_entropy/<layer>"),
        (pd.DataFrame({"kl/3": [1.0]}), "without a layer"),
        (pd.DataFrame({"kl": ["a"]}), "no number"),
        (pd.DataFrame({"kl": [1.0, 2.0]}, index=[2, 1]), "increasing integers"),
        (pd.DataFrame({"kl": [1.0, 2.0]}, index=[0.5, 1.0]), "increasing integers"),
    ],
)
def test_bad_steps_are_refused(steps: pd.DataFrame, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        Trace(steps, None, RUN)


def test_bad_trajectories_are_refused(tmp_path: Path) -> None:
    trace = make_trace()
    assert trace.trajectories is not None
    with pytest.raises(TraceError, match="lack reward"):
        Trace(trace.steps, trace.trajectories.drop(columns="reward"), RUN)
    stray = Trace(trace.steps, trace.trajectories.assign(step=99), RUN)
    with pytest.raises(TraceError, match="step 99"):
        stray.save(tmp_path / "a.parquet")
    assert not list(tmp_path.iterdir())


def test_signal_table() -> None:
    assert len(SIGNALS) == len(set(SIGNALS)) > 24
    assert signal_of("router_max_violation/12") is SIGNALS["router_max_violation"]
    assert layer_of("router_max_violation/12") == 12
    assert layer_of("kl") is None
    assert not SIGNALS["seconds_per_step"].compared
    assert repr(make_trace()).count("\n") == 0
    assert "cluster-16" in make_trace()._repr_html_()


def test_imports_no_torch() -> None:
    code = "import sys, moeproxy.traces; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_full_disk_is_a_clear_error_and_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_trace().save(tmp_path / "run.parquet")
    before = target.read_bytes()

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pq, "write_table", full)
    with pytest.raises(TraceError, match=r"run\.parquet.*No space left.*free some space"):
        make_trace(seed=1).save(target)
    assert target.read_bytes() == before
    assert list(tmp_path.iterdir()) == [target]


def test_a_run_from_a_log_is_not_called_healthy(tmp_path: Path) -> None:
    """Also after it was saved and loaded; a run of the lab says what was injected, one of a registry what that says."""
    log = tmp_path / "mine.jsonl"
    log.write_text("".join(f'{{"step": {step}, "grad_norm": 1.{step}}}\n' for step in range(1, 5)))
    trace = read(log)[0].trace
    assert str(trace.provenance) == "mine, read from a log"
    trace.save(tmp_path / "mine.parquet")
    for one in (trace, Trace.load(tmp_path / "mine.parquet")):
        assert one.provenance.unknown
        assert "healthy" not in repr(one) + one._repr_html_()
    for told in (
        RunInfo("m", "original", 8, 0, source="recorded"),
        RunInfo("m", "original", 8, 0, source="file", config={"registry": {}}),
    ):
        assert not told.unknown
        assert "healthy" in str(told)
    assert not RunInfo("m", "original", 8, 0, fault="x", source="file", config={"log": {}}).unknown
