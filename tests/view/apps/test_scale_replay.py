"""The replay panel: a run recorded once, ranks run alone, seen equal or different; cancelled; refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import moeproxy.view.apps.scale_replay as replay
from moeproxy.errors import ScaleError
from moeproxy.scale import GRPOProgram, Recording
from moeproxy.scale.recording import write_index, write_log
from tests.scale.conftest import TINY
from tests.scale.made import made_emulation


def made_recording(folder: Path) -> Recording:
    torch = pytest.importorskip("torch")
    from moeproxy.scale.backends import Event

    runs: dict[str, Any] = {
        "losses": [[0.5, 0.25, 0.125, 0.1, 0.0], [1.0, 2.0, 3.0, 4.0, 5.0]],
        "logprobs": [[-1.0] * 5, [-2.0] * 5],
        "weights": ["abc", "def"],
        "seconds": [[9.0, 1.0, 1.5, 1.0, 1.0]] * 2,
    }
    program = GRPOProgram(TINY, prompt=8, completion=8).to_dict()
    write_index(folder, program=program, world=2, ep=1, steps=5, provenance={"machine": "a box"}, **runs)
    events = [Event("allreduce", seconds, [torch.zeros(1)]) for seconds in (4.0, 0.25, 0.25, 0.25, 0.25)]
    for rank in (0, 1):
        write_log(folder / f"rank-{rank}.safetensors", {"0,1#1": events})
    return Recording.open(folder)


def alone(rank: int, recording: Recording, **changes: Any) -> Any:
    told = {"losses": recording.losses[rank], "logprobs": recording.logprobs[rank], "weights": recording.weights[rank]}
    place = {"level": "replay", "world": 2, "ep": 1, "rank": rank, "seconds": (7.0, 0.75, 0.75, 0.75)}
    return made_emulation(**{**told, **place, **changes})


def test_what_differs_is_said_and_seconds_are_ranges(tmp_path: Path) -> None:
    recording = made_recording(tmp_path)
    other = {"weights": "other", "losses": (1.0, 2.0, 4.0, 4.0, 5.0), "differs": ("losses", "weights")}
    found = {0: alone(0, recording), 1: alone(1, recording, **other)}
    table = replay.replayed_table(recording, found)
    assert table["losses"].tolist() == ["bitwise equal", "DIFFERENT"]
    assert table["weights"].tolist() == ["bitwise equal", "DIFFERENT"]
    assert table["peak"].tolist() == ["6.00 GiB"] * 2
    assert table["computing, s (95%)"].tolist() == ["0.75 to 0.75"] * 2
    assert table["communication, s (95%)"][0] == "0.25 to 0.25"
    assert table["together, s"][0] == "0.75 to 1"
    assert table["real steps, s"][0] == "1 to 1.5"
    assert table["machine"][0] == "a box"
    short = replay.replayed_table(replace(recording, steps=4), found)
    assert short["weights"].tolist() == ["bitwise equal", "DIFFERENT"]
    assert "need 5 steps" in short["seconds"][0]


def test_a_given_recording_is_not_recorded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recording = made_recording(tmp_path)
    monkeypatch.setattr(replay, "emulate", lambda *given, **_: alone(given[3], recording))
    monkeypatch.setattr(replay, "record", lambda *_, **__: pytest.fail("recorded again"))
    panel = replay.ReplayPanel(tmp_path)
    with pytest.raises(ScaleError, match="rank 1 was not run alone yet"):
        panel.found(1)
    panel.rank.value = 1
    panel.job.start_button.click()
    assert panel.settle()
    assert panel.found(1).weights == "def"
    assert panel.table.frame["rank"].tolist() == [1]
    assert "Rank 1 ran alone" in panel.status.text


def test_it_can_be_cancelled_and_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recording = made_recording(tmp_path)

    def waits(*_: Any, cancel: Any, **__: Any) -> None:
        while not cancel.is_set():
            pass

    monkeypatch.setattr(replay, "emulate", waits)
    panel = replay.ReplayPanel(recording)
    panel.job.start_button.click()
    panel.job.cancel_button.click()
    assert panel.job.join(30) == "cancelled"
    assert panel.alone == {}
    monkeypatch.setattr(replay, "emulate", lambda *given, **_: alone(given[3], recording))
    panel.job.start_button.click()
    assert panel.settle()
    broken = replace(recording, path=tmp_path / "gone")
    monkeypatch.undo()
    panel = replay.ReplayPanel(broken)
    panel.job.start_button.click()
    assert not panel.settle()
    assert panel.status.is_error
    assert "record the run again" in panel.status.text


def test_a_folder_without_a_recording_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ScaleError, match="no recording can be read"):
        replay.ReplayPanel(tmp_path)


@pytest.mark.slow
def test_two_ranks_are_recorded_and_one_runs_alone() -> None:
    panel = replay.ReplayPanel()
    panel.job.start_button.click()
    assert panel.settle(), panel.status.text
    row = panel.table.frame.iloc[0]
    assert (row["losses"], row["weights"]) == ("bitwise equal", "bitwise equal")
    assert len(set(panel.found(0).logprobs)) == replay.STEPS, "the weights moved"
