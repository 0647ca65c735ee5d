"""The study of merging: one row a run, and what the shipped table says."""

from __future__ import annotations

import dataclasses

import numpy as np
import pandas as pd
import pytest

from moeproxy.lab.merge_study import CHOICES, training_table
from moeproxy.lab.record import CALIBRATION_SEEDS, SCORED_SEEDS
from moeproxy.places import data_dir
from moeproxy.traces.trace import RunInfo, Trace

INFO = RunInfo(model="merge-16", method="merge", n_experts=16, seed=3)


def made_up(info: RunInfo, height: float) -> Trace:
    """Reward rises by `height` in a straight line over 61 steps; one gradient is 4 times as large as the others."""
    grad_S = np.ones(61)
    grad_S[30] = 4
    columns = {
        "reward_mean": np.linspace(0, height, 61),
        "kl": np.linspace(0, 1, 61),
        "grad_norm": grad_S,
        "entropy": np.full(61, 0.5),
    }
    steps = pd.DataFrame(columns, index=pd.RangeIndex(1, 62, name="step"))
    names = ("step", "prompt", "reward", "length", "repetition_ratio", "advantage")
    return Trace(steps, pd.DataFrame({name: np.ones(1, dtype=np.int64) for name in names}), info)


def test_one_row_a_run_with_its_numbers() -> None:
    other = dataclasses.replace(INFO, model="cluster-16", method="cluster", seed=1)
    table = training_table([made_up(INFO, 0.6), made_up(other, 0.3)])
    assert table["model"].tolist() == ["cluster-16", "merge-16"]
    row = table.iloc[1]
    assert row["seed"] == 3
    # Step s of 60 has reward 0.01 s: the first five average 0.02, the last ten 0.555.
    assert row["reward_first"] == pytest.approx(0.02)
    assert row["reward_last"] == pytest.approx(0.555)
    assert row["gain"] == pytest.approx(0.535)
    assert (row["kl_max"], row["grad_peak"], row["entropy_last"]) == (1, 4, 0.5)


def test_the_shipped_table_holds_every_run_and_what_its_readme_says() -> None:
    table = pd.read_csv(data_dir() / "pruning" / "merge_training.csv")
    seeds = sorted((*SCORED_SEEDS, *CALIBRATION_SEEDS))
    assert {name: group["seed"].tolist() for name, group in table.groupby("model")} == {
        choice.label: seeds for choice in CHOICES
    }
    mean = table.groupby("model").mean(numeric_only=True)
    text = (data_dir() / "pruning" / "README.md").read_text("utf-8").replace("\n", " ")
    merged, clustered = mean.loc["merge-16"], mean.loc["cluster-16"]
    for model, words in (
        (merged, "from {:.2f} to {:.2f} with merged"),
        (clustered, "from {:.2f} to {:.2f} with clust"),
    ):
        assert words.format(model["reward_first"], model["reward_last"]) in text
    assert f"{merged['grad_peak']:.1f} times the median (clustered: {clustered['grad_peak']:.1f})" in text
    assert f"({merged['kl_last']:.2f} against {clustered['kl_last']:.2f} nats)" in text


def test_the_accuracy_table_has_merging_beside_every_other_method() -> None:
    table = pd.read_csv(data_dir() / "pruning" / "methods.csv")
    sizes = table[table["variant"] != "original"].groupby(["model", "n_keep", "variant"]).size().unstack()
    assert "merge" in sizes.columns
    assert (sizes["merge"] == sizes["cluster"]).all()
