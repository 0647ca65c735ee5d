"""Snapshots: going on from one is the run itself, bit for bit; what could not be is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moeproxy.errors import LabError
from moeproxy.lab.identity import model_hash
from moeproxy.lab.run import run
from moeproxy.lab.settings import Application, GRPOSettings, Injection, RunSpec, Snapshots
from moeproxy.lab.snapshot import Snapshot, check_snapshots, newest, snapshot_path, undisturbed
from moeproxy.places import data_dir
from moeproxy.traces.partial import load_partial
from moeproxy.traces.trace import Trace

TOOLS = GRPOSettings(steps=5, prompts=4, samples=4, tasks=64, environment="calculator", max_new_tokens=8)
MODEL = data_dir() / "models" / "qwen3-moe-tools"
HEALTHY = RunSpec(MODEL, seed=3, settings=TOOLS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Snapshots after steps 1 and 3, and the trace of the run that left them."""
    place = tmp_path_factory.mktemp("snapshots")
    run(replace(HEALTHY, snapshots=Snapshots(place, (1, 3)))).save(place / "trace.parquet")
    return place


@pytest.fixture(scope="module")
def whole() -> Trace:
    return run(HEALTHY)


def test_keeping_snapshots_changes_nothing(folder: Path, whole: Trace) -> None:
    assert Trace.load(folder / "trace.parquet").equals(whole)
    assert len(list(folder.glob("*.pt"))) == 2


def test_going_on_is_the_uninterrupted_run_bit_for_bit(folder: Path, whole: Trace, tmp_path: Path) -> None:
    partial, seen = tmp_path / "a.partial", []
    resumed = run(
        replace(HEALTHY, snapshots=Snapshots(folder)), partial=partial, progress=lambda step, *_: seen.append(step)
    )
    assert seen == [4, 5]
    assert resumed.equals(whole)
    assert load_partial(partial).equals(resumed)


def test_a_broken_run_goes_on_from_a_healthy_one_of_its_seed(folder: Path, whole: Trace) -> None:
    """The fault has a memory, the remedy acts later than the fault."""
    spec = replace(HEALTHY, injection=Injection("delayed_credit", 1.0, 3), remedies=(Application("tis", 4),))
    there = replace(spec, snapshots=Snapshots(folder))
    assert newest(there, model_hash(MODEL)) == snapshot_path(there, model_hash(MODEL), 1)
    resumed = run(there)
    assert resumed.equals(run(spec))
    assert not resumed.equals(whole)
    assert resumed.provenance.remedies == (("tis", 4),)
    assert Trace(whole.steps[:2], None, whole.provenance).equals(Trace(resumed.steps[:2], None, whole.provenance))


def test_only_a_state_that_the_run_passes_through_is_taken(folder: Path) -> None:
    hashed, kept = model_hash(MODEL), Snapshots(folder)
    for spec, step in (
        (HEALTHY, 3),
        (replace(HEALTHY, settings=replace(TOOLS, steps=9)), 3),  # how long it runs does not matter
        (replace(HEALTHY, settings=replace(TOOLS, steps=3)), 1),  # a run that ends there has nothing to go on with
        (replace(HEALTHY, remedies=(Application("tis", 3),)), 1),
        (replace(HEALTHY, injection=Injection("kl_sign", 0.0, 2)), 3),  # strength 0 is healthy
        (replace(HEALTHY, injection=Injection("kl_sign", 1.0, 1)), None),
        (replace(HEALTHY, seed=4), None),
        (replace(HEALTHY, settings=replace(TOOLS, learning_rate=1e-4)), None),
    ):
        there = replace(spec, snapshots=kept)
        expected = None if step is None else snapshot_path(there, hashed, step)
        assert newest(there, hashed) == expected
    assert newest(HEALTHY, hashed) is None
    assert undisturbed(HEALTHY) == 5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"settings": replace(TOOLS, steps=17)}, "more than once"),
        ({"injection": Injection("kl_sign", 1.0, 3), "snapshots": Snapshots(Path("x"), (3,))}, "after step 3"),
        ({"snapshots": Snapshots(Path("x"), (6,))}, "after step 6"),
    ],
)
def test_what_could_not_go_on_bit_for_bit_is_refused(changes: dict, message: str) -> None:
    spec = replace(HEALTHY, **{"snapshots": Snapshots(Path("x")), **changes})
    with pytest.raises(LabError, match=message):
        check_snapshots(spec, n_tasks=64, n_processes=1)
    with pytest.raises(LabError, match="one process"):
        check_snapshots(spec, n_tasks=6400, n_processes=2)


def test_a_broken_file_is_no_snapshot(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    path.write_bytes(next(folder.glob("*.pt")).read_bytes()[:-100])
    with pytest.raises(LabError, match="remove the file"):
        Snapshot.load(path)
    with pytest.raises(LabError, match="no readable snapshot"):
        Snapshot.load(tmp_path / "none.pt")


def test_a_snapshot_comes_back_as_it_was(folder: Path, tmp_path: Path) -> None:
    first = Snapshot.load(next(folder.glob("*after00003.pt")))
    again = Snapshot.load(first.save(tmp_path / "b.pt"))
    assert (again.step, again.passage, again.record) == (3, first.passage, first.record)
    assert all(np.array_equal(first.weights[name], again.weights[name]) for name in first.weights)
