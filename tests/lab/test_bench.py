"""The benchmark's grid is what its page says, and its runs come back from the packs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from moeproxy.errors import LabError
from moeproxy.lab import bench, bench_record
from moeproxy.lab.faults import FAULTS
from moeproxy.lab.identity import DENSE
from moeproxy.lab.jobs import Failure
from moeproxy.places import data_dir
from moeproxy.traces.pack import load_bench, load_registry
from moeproxy.traces.trace import RunInfo, Trace

MAIN = ("original", "cluster-16", "cluster-8")
CONTROLS = ("random-16", "first-16", "frequency-16", "reap-16", "merge-16", DENSE)


@pytest.fixture
def models() -> list[bench.Model]:
    main = [bench.Model(Path(name), name, name.partition("-")[0]) for name in MAIN]
    return main + [bench.Model(Path(name), name, name.partition("-")[0], control=True) for name in CONTROLS]


def test_the_grid_has_what_the_benchmark_promises(models: list[bench.Model]) -> None:
    specs = bench.grid(models)
    assert len({repr(spec) for spec in specs}) == len(specs)
    assert len(FAULTS) == 36
    for label in MAIN:
        mine = [spec for spec in specs if spec.label == label]
        assert sum(spec.injection is None for spec in mine) >= 60
        faulty = Counter((s.injection.fault, s.injection.strength == 1.0) for s in mine if s.injection)
        assert set(faulty) == {(fault, clear) for fault in FAULTS for clear in (True, False)}
        assert set(faulty.values()) == {3}
    for label in CONTROLS:
        strengths = {s.injection.strength for s in specs if s.label == label and s.injection}
        assert strengths == {1.0}
    assert all(spec.settings.steps == 60 for spec in specs)


def test_onsets_are_random_and_the_same_on_every_model(models: list[bench.Model]) -> None:
    onsets = {}
    for spec in bench.grid(models):
        if spec.injection:
            place = (spec.injection.fault, spec.injection.strength, spec.seed)
            assert onsets.setdefault(place, spec.injection.onset) == spec.injection.onset
    assert min(onsets.values()) == 10
    assert max(onsets.values()) == 30
    assert len(set(onsets.values())) > 15


def test_scored_seeds_never_calibrate() -> None:
    assert not set(bench.SEEDS) & {*bench.CALIBRATION, *bench.CONTROL_CALIBRATION, *bench.VARIED}
    assert set(bench.CONTROL_SEEDS) <= set(bench.SEEDS)
    assert set(bench.CONTROL_CALIBRATION) <= set(bench.CALIBRATION)


def test_a_dense_control_gets_no_fault_of_experts(models: list[bench.Model]) -> None:
    dense = [s.injection.fault for s in bench.grid(models) if s.label == DENSE and s.injection]
    assert {fault for fault in FAULTS if FAULTS[fault].needs_experts}.isdisjoint(dense)
    assert len(set(dense)) == sum(not fault.needs_experts for fault in FAULTS.values())


def test_one_model_can_be_recorded_alone(models: list[bench.Model]) -> None:
    assert {spec.label for spec in bench_record.chosen(models, ["cluster-8"])} == {"cluster-8"}
    with pytest.raises(LabError, match="cluster-8"):
        bench_record.chosen(models, ["typo"])


def test_packing_writes_the_registry_of_what_was_recorded(tmp_path: Path) -> None:
    steps = pd.DataFrame({"reward_mean": [0.5, 0.25]})
    config = {"learning_rate": 1e-4, "temperature": 1.0}
    runs = {
        "original--healthy--s0--aa": RunInfo("original", "original", 32, 0, config=config),
        "original--kl_sign-1-at2--s0--bb": RunInfo("original", "original", 32, 0, "kl_sign", 1.0, 2, config),
        "cluster-8--kl_sign-0.5-at2--s1--cc": RunInfo("cluster-8", "cluster", 8, 1, "kl_sign", 0.5, 2, config),
    }
    for name, info in runs.items():
        Trace(steps, None, info).save(tmp_path / "runs" / f"{name}.parquet")
    out = tmp_path / "bench"
    bench_record.pack(tmp_path / "runs", out)
    table = load_registry(out).set_index("key")
    assert table.loc["aa", ["fault", "family", "level", "pack"]].tolist() == ["", "", "", "original/healthy.parquet"]
    assert table.loc["bb", ["fault", "family", "level"]].tolist() == ["kl_sign", FAULTS["kl_sign"].family, "clear"]
    assert table.loc["cc", "level"] == "subtle"
    assert {(t.provenance.model, t.provenance.fault) for t in load_bench(out)} == {
        (info.model, info.fault) for info in runs.values()
    }
    again = tmp_path / "again"
    (again / "x").mkdir(parents=True)
    Trace.load(tmp_path / "runs" / "original--healthy--s0--aa.parquet").save(
        again / "original--healthy--s0--aa.parquet"
    )
    assert bench_record.unpack(out, again) == 2
    assert bench_record.unpack(out, again) == 0
    for name in runs:
        one, other = (Trace.load(folder / f"{name}.parquet") for folder in (tmp_path / "runs", again))
        assert one.equals(other, ignore=())
        assert one.provenance == other.provenance
    spec = bench.Model(data_dir() / "models" / "qwen3-moe-tools", "original", "original").spec(
        1, bench.injection_of("nan_poison", "subtle", 1)
    )
    Failure(spec, "out of memory", -9).save(tmp_path / "runs" / "original--nan_poison-0.1-at2--s1--dd.failed.json")
    assert bench_record.pack(tmp_path / "runs", out)["key"].tolist() == ["cc", "bb", "aa", "dd"]
    assert "dd" not in set(load_registry(out)["key"])
    lost = load_registry(out, failed=True).set_index("key").loc["dd"]
    assert lost[["fault", "level", "seed", "n_experts", "pack"]].tolist() == ["nan_poison", "subtle", 1, 32, ""]
    assert lost["failed"] == "killed by SIGKILL: out of memory"
    assert len(load_bench(out)) == 3
    with pytest.raises(LabError, match="no recorded runs"):
        bench_record.pack(tmp_path / "absent", out)


WITHOUT_EFFECT = {("dense", "rollout_logp_precision")}
"""Its attention scale, one over the root of a head of 16, is a power of two: no mantissa bit can be lost."""


@pytest.mark.slow
def test_no_shipped_run_is_mislabelled() -> None:
    """Every run is what the registry says, and equal to its healthy twin up to the onset, bit for bit."""
    folder = data_dir() / "bench"
    registry = load_registry(folder)
    traces = load_bench(folder, trajectories=False)
    assert len(traces) == len(registry)
    told = sorted(
        zip(registry["model"], registry["fault"], registry["strength"].astype(float), registry["seed"], strict=True)
    )
    runs = [trace.provenance for trace in traces]
    assert sorted((run.model, run.fault or "", run.strength, run.seed) for run in runs) == told
    usual = bench.SETTINGS.to_dict()
    healthy = {
        (t.provenance.model, t.provenance.seed): t
        for t in traces
        if t.provenance.healthy and t.provenance.config == usual
    }
    for trace in traces:
        run = trace.provenance
        if run.fault is None:
            continue
        level = "clear" if run.strength == 1 else "subtle"
        injection = bench.injection_of(run.fault, level, run.seed)
        assert (injection.strength, injection.onset) == (run.strength, run.onset)
        twin, before = healthy[run.model, run.seed], trace.steps.index < injection.onset
        for name in set(twin.signals) - {"seconds_per_step"}:
            assert np.array_equal(trace.values(name)[before], twin.values(name)[before]), (run, name)
        assert not trace.equals(twin) or (run.model, run.fault) in WITHOUT_EFFECT, run
