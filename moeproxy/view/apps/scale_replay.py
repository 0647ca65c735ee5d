"""A panel that runs a few real ranks once and then any of them again, alone: the level "replay" of `emulate`."""

from __future__ import annotations

import threading
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import ipywidgets as widgets
import pandas as pd

from moeproxy.errors import ScaleError
from moeproxy.scale.emulate import emulate, record
from moeproxy.scale.emulation import Emulation, gib
from moeproxy.scale.program import GRPOProgram
from moeproxy.scale.recording import Recording
from moeproxy.scale.timing import FEWEST, SHARE, StepTime, recorded_time, span
from moeproxy.view.apps.tables import LiveTable
from moeproxy.view.apps.ui import Job, Report, Status

SMALL: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
"""A Qwen3 MoE small enough to train in two processes of one machine within seconds."""
WORLD, EP, STEPS = 2, 2, 10
_TIMED = FEWEST + 2
"""Steps with which seconds are a range: the first makes the optimizer's state, the last is metered."""


class _Reporting(threading.Event):
    """Never set: emulations look at it several times a second, and `report` raises once the user cancels."""

    def __init__(self, report: Report, words: str) -> None:
        super().__init__()
        self._report, self._words = report, words

    def is_set(self) -> bool:
        self._report(0.5, self._words)
        return False


class ReplayPanel:
    """A button that records a run of real ranks, if none was given, and runs the chosen rank again without the others.

    Args:
        recording: what `record` made, or its directory; by default a small run is recorded first: `WORLD` processes,
            `STEPS` steps, some ten seconds, kept as long as the panel.

    Raises:
        ScaleError: the directory holds no recording.

    Example:
        >>> panel = ReplayPanel("my-recording")
        >>> panel.job.start(); panel.settle(); panel.table.frame
    """

    def __init__(self, recording: Recording | str | Path | None = None) -> None:
        given = recording if isinstance(recording, Recording | None) else Recording.open(recording)
        self.recording: Recording | None = given
        self._folder = TemporaryDirectory()
        self.alone: dict[int, Emulation] = {}
        world = given.world if given else WORLD
        self.status, self.table = Status("Not recorded yet." if given is None else "Ready."), LiveTable(260)
        self.rank = widgets.Dropdown(options=list(range(world)), description="Rank to run alone")
        self.rank.style = {"description_width": "initial"}  # pyright: ignore[reportAttributeAccessIssue]
        self.rank.layout.width = "max-content"
        label = "Run this rank alone" if given else "Record two ranks, run one alone"
        self.job = Job(self._work, label, cancel="Cancel replay", status=self.status, on_done=self._show)
        wrapping = widgets.Layout(flex_flow="row wrap", align_items="center", grid_gap="2px 12px")
        controls = widgets.Box([self.rank, self.job.widget], layout=wrapping)
        self.widget = widgets.VBox([controls, self.status.widget, self.table.widget])

    def settle(self, timeout_s: float = 300.0) -> bool:
        """Wait until nothing is running; return whether the last job was done."""
        return self.job.join(timeout_s) == "done"

    def found(self, rank: int) -> Emulation:
        """Return the rank's own run.

        Raises:
            ScaleError: it was not run yet.
        """
        if rank not in self.alone:
            raise ScaleError(f"rank {rank} was not run alone yet", remedy="press the button, and see the status line")
        return self.alone[rank]

    def _work(self, report: Report) -> tuple[int, Recording]:
        rank = int(self.rank.value)  # pyright: ignore[reportArgumentType]
        made = self.recording = self.recording or self._record(report)
        stop = _Reporting(report, f"Running rank {rank} of {made.world} alone.")
        self.alone[rank] = emulate(made.program, made.world, made.ep, rank, level="replay", recording=made, cancel=stop)
        return rank, made

    def _record(self, report: Report) -> Recording:
        stop = _Reporting(report, f"Running {WORLD} ranks for {STEPS} steps.")
        program = GRPOProgram(SMALL, sequences=2, prompt=32, completion=96, learning_rate=1e-3)
        return record(program, WORLD, EP, Path(self._folder.name) / "run", steps=STEPS, cancel=stop)

    def _show(self, done: tuple[int, Recording]) -> None:
        rank, made = done
        self.table.show(replayed_table(made, self.alone), f"Ranks of {made.world} run alone, {made.steps} steps")
        self.status.say(f"Rank {rank} ran alone.")

    def _repr_mimebundle_(self, **options: Any) -> Any:
        return self.widget._repr_mimebundle_(**options)


def replayed_table(recording: Recording, alone: dict[int, Emulation]) -> pd.DataFrame:
    """Return the ranks that were run alone beside their own real run: equal or not, memory, seconds as ranges.

    Args:
        recording: of the real run.
        alone: replayed ranks.
    """
    return pd.DataFrame([_row(recording, alone[rank]) for rank in sorted(alone)])


def _row(recording: Recording, alone: Emulation) -> dict[str, object]:
    rank = alone.rank
    row: dict[str, object] = {
        "rank": rank,
        "losses": _equal((alone.losses, alone.logprobs), (recording.losses[rank], recording.logprobs[rank])),
        "weights": _equal(alone.weights, recording.weights[rank]),
        "peak": gib(alone.peak_bytes),
        "arises in": f"{alone.peak_phase}, {alone.peak_module or 'outside any module'}",
    }
    if recording.steps < _TIMED:
        return row | {"seconds": f"need {_TIMED} steps or more, since the first and the last do not count"}
    return row | _times(recorded_time(recording, alone))


def _equal(found: object, real: object) -> str:
    return "bitwise equal" if found == real else "DIFFERENT"


def _times(time: StepTime) -> dict[str, object]:
    return {
        f"computing, s ({SHARE:.0%})": span(time.compute, 2),
        f"communication, s ({SHARE:.0%})": span(time.communication, 2),
        "together, s": span(time.total, 2),
        "real steps, s": span(time.measured, 2) if time.measured else "",
        "machine": time.machine,
    }
