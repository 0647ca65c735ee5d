"""Training from a notebook cell: what the bar says, and what is not trained twice."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from moeproxy.errors import LabError
from moeproxy.lab.settings import GRPOSettings, RunSpec
from moeproxy.view.apps import training
from moeproxy.view.apps.training import StepBar, train


def test_bar_counts_calls_from_many_threads() -> None:
    bar = StepBar(400, "training")
    threads = [threading.Thread(target=lambda: [bar() for _ in range(50)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10.0)
    assert bar.done == 400
    bar.finish("all trained")
    assert (bar.bar.value, bar.bar.description, bar.status.text) == (1.0, "100 %", "all trained")


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[StepBar]:
    """The bars that were made; `display` needs a front end."""
    made: list[StepBar] = []

    class Noted(StepBar):
        def __init__(self, total: int, text: str) -> None:
            super().__init__(total, text)
            made.append(self)

    monkeypatch.setattr(training, "StepBar", Noted)
    monkeypatch.setattr(training, "display", lambda _: None)
    monkeypatch.setattr(training, "result_path", lambda spec, out: out / str(spec.seed))
    return made


def _specs(path: Path) -> list[RunSpec]:
    return [RunSpec(path, seed=seed, settings=GRPOSettings(steps=3)) for seed in range(4)]


def test_only_missing_runs_are_counted(shown: list[StepBar], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "1").touch()
    asked: list[int] = []

    def fake(specs: Sequence[RunSpec], _: Path, *, workers: int | None, progress: Callable[..., None]) -> list[str]:
        asked.append(len(specs))
        progress(specs[0], 1, 3)
        return []

    monkeypatch.setattr(training, "sweep", fake)
    assert train(_specs(tmp_path), tmp_path) == ()
    assert asked == [4], "the sweep itself finds what was trained before"
    assert shown[0].total == 9
    assert shown[0].status.text == "3 runs trained; 1 were trained before"


def test_a_failed_run_is_told_beside_the_bar(
    shown: list[StepBar], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fake(*_: object, **__: object) -> None:
        raise LabError("1 of 4 runs failed")

    monkeypatch.setattr(training, "sweep", fake)
    with pytest.raises(LabError, match="1 of 4"):
        train(_specs(tmp_path), tmp_path)
    assert shown[0].status.is_error
