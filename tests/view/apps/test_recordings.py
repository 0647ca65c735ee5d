"""Recorded runs are found by folder, read once, and told apart by settings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from moeproxy.errors import MoeproxyError
from moeproxy.lab.faults import FAULTS
from moeproxy.lab.record import Choice
from moeproxy.lab.settings import GRPOSettings
from moeproxy.places import data_dir
from moeproxy.traces.pack import REGISTRY, save_pack
from moeproxy.view.apps.recordings import HEALTHY, Recordings, is_complete
from tests.view.apps.made_runs import CALIBRATION, SETTINGS, all_runs, model_path, recordings, run


def test_the_shipped_files_are_known_by_their_names() -> None:
    known = Recordings.open(data_dir() / "runs")
    assert set(known.faults()) == {"rollout_logp_precision", "update_freeze"}
    assert known.strengths("rollout_logp_precision") == (0.75, 1.0)
    assert known.onsets("update_freeze", 1.0) == {0: 20, 1: 20, 2: 20}
    assert known.onsets("update_freeze", 0.3) == {}
    assert known.settings == GRPOSettings()
    assert known.original.name == "qwen3-moe-tiny"
    assert {model.label for model in known.models} >= {"original", "cluster-16", "cluster-8", "random-16"}
    assert next(m for m in known.models if m.label == "cluster-8").n_experts == 8
    healthy = known.recorded(None, 0.0, "original")
    assert sorted(trace.provenance.seed for trace in healthy) == [0, 1, 2, 100, 101, 102, 103]
    assert {trace.provenance.source for trace in healthy} == {"recorded"}
    subtle = known.recorded("update_freeze", 0.5, "cluster-16")
    assert sorted(trace.provenance.seed for trace in subtle) == [0, 1, 2]
    assert known.recorded("update_freeze", 0.5, "cluster-8") == (), "recorded on the main proxy only"


def test_healthy_runs_at_other_settings_are_not_twins() -> None:
    known = recordings()
    assert known.settings == SETTINGS
    assert sorted(t.provenance.seed for t in known.recorded(None, 0.0, "original")) == [0, 1, *CALIBRATION]
    assert 200 in {trace.provenance.seed for trace in known.traces("original", HEALTHY)}


def test_the_default_loader_prefers_a_complete_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models").symlink_to(data_dir() / "models")
    (tmp_path / "runs").symlink_to(data_dir() / "runs")
    monkeypatch.setenv("MOEPROXY_DATA", str(tmp_path))
    assert Recordings.open().where == tmp_path / "runs"
    monkeypatch.setattr("moeproxy.view.apps.recordings.FAULTS", ("kl_sign", "update_freeze"))  # all that were made
    monkeypatch.setattr("moeproxy.view.apps.recordings.PROXIES", (Choice("cluster", 16),))
    _bench(tmp_path / "bench")
    known = Recordings.open()
    assert known.where == tmp_path / "bench"
    assert known.onsets("kl_sign", 1.0) == {0: 12, 1: 20}
    assert known.strengths("kl_sign") == (1.0,)
    assert known.faults() == ("kl_sign", "update_freeze")
    broken = known.recorded("kl_sign", 1.0, "cluster-16")
    assert [trace.provenance.seed for trace in broken] == [0, 1]
    assert broken[0].equals(run("cluster-16", 0, "kl_sign", onset=12))
    assert next(m for m in known.models if m.label == "random-16").method == "random"
    seeds = [trace.provenance.seed for trace in known.traces("original", HEALTHY)]
    assert seeds == [0, 1, *CALIBRATION], "the run at another learning rate is not even built"
    assert known.original == tmp_path / "models" / model_path().name


def _bench(folder: Path) -> None:
    """Write the made runs as the benchmark is written: packs and a registry."""
    rows = []
    for trace in all_runs():
        info = trace.provenance
        pack = f"{info.model}/{info.fault or 'healthy'}.parquet"
        names = ("model", "method", "n_experts", "strength", "seed")
        row = {name: getattr(info, name) for name in names} | {"pack": pack, "level": "", "family": "", "key": "0"}
        rows.append(row | {"fault": info.fault or "", "onset": info.onset if info.fault else "", "trace": trace})
    table = pd.DataFrame(rows)
    for pack, group in table.groupby("pack"):
        save_pack(list(group["trace"]), folder / str(pack))
    table.drop(columns="trace").sort_values("fault").to_csv(folder / REGISTRY, index=False)


def test_a_group_of_runs_is_read_once() -> None:
    known, read = recordings(), []
    inner = known._read

    def counted(model: str, fault: str) -> list:
        read.append((model, fault))
        return inner(model, fault)

    known._read = counted
    for _ in range(3):
        known.recorded("kl_sign", 1.0, "cluster-16")
    assert read == [("cluster-16", "kl_sign")]


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    with pytest.raises(MoeproxyError, match="no recorded runs"):
        Recordings.open(tmp_path)
    with pytest.raises(MoeproxyError, match="no recorded healthy run of the original"):
        recordings([run("cluster-16")])
    strange = run()
    strange = type(strange)(strange.steps, None, replace(strange.provenance, checkpoint_fingerprint="other"))
    with pytest.raises(MoeproxyError, match="no shipped model has the fingerprint"):
        _ = recordings([strange]).original


def test_a_benchmark_still_being_recorded_is_no_default(tmp_path: Path) -> None:
    def registry(*models: tuple[str, str, int]) -> None:
        rows = [(label, method, fault) for label, method, n in models for fault in ["", *list(FAULTS)[:n]]]
        pd.DataFrame(rows, columns=["model", "method", "fault"]).to_csv(tmp_path / REGISTRY, index=False)

    assert not is_complete(tmp_path)
    whole = len(FAULTS)
    registry(("original", "original", whole), ("cluster-16", "cluster", whole))
    assert not is_complete(tmp_path)
    registry(("original", "original", whole), ("cluster-16", "cluster", whole), ("random-16", "random", whole - 1))
    assert not is_complete(tmp_path)
    registry(("original", "original", whole), ("cluster-16", "cluster", whole), ("random-16", "random", 0))
    assert not is_complete(tmp_path), "only healthy runs of the control are there"
    some = [("original", "original", whole), ("cluster-16", "cluster", whole), ("random-16", "random", whole)]
    registry(*some)
    assert not is_complete(tmp_path), "the smaller proxy is missing"
    registry(*some, ("cluster-8", "cluster", whole), ("dense", "dense", 20))
    assert is_complete(tmp_path)
