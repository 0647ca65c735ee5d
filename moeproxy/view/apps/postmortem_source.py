"""What a postmortem is about: a log with the logs of good runs, or a recorded run of the lab with its healthy ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import ipywidgets as widgets
import pandas as pd

from moeproxy.errors import MoeproxyError
from moeproxy.places import data_dir
from moeproxy.traces.pack import REGISTRY, load_bench, load_registry
from moeproxy.traces.trace import Trace
from moeproxy.view.apps.log_source import LogSource
from moeproxy.view.apps.ui import Status
from moeproxy.view.incident import Incident, incident, open_incidents

LOG, RECORDED = "a log", "a recorded run"
LEARNED = (
    "This is a recorded run of the lab, one of those that the diagnosis has learned from: of a new run it would be "
    "less sure."
)
_STYLE = {"description_width": "initial"}


class IncidentSource:
    """Controls that choose a run; `open` judges it.

    Args:
        log: in the field at first.
        out: folder of uploaded files.
        status: told when a choice fails.
        bench: folder of recorded runs; without a registry there, only logs are offered.
    """

    def __init__(self, log: Path, out: Path, status: Status, bench: Path | None = None) -> None:
        self._bench = bench or data_dir() / "bench"
        self._rows = _failures(self._bench)
        self.log = LogSource(log, data_dir() / "logs", out / "uploads", status, lambda: None)
        kinds = [LOG, RECORDED] if len(self._rows) else [LOG]
        self.kind = _dropdown("Write up", kinds, "260px")
        self.model = _dropdown("Model", list(dict.fromkeys(self._rows["model"])), "240px")
        # With its options from the start: a list that opens empty shows, and sends back, that nothing is chosen.
        self.run = _dropdown("Recorded run", self._runs(), "440px")
        self.healthy = widgets.Textarea(description="Healthy runs", rows=3, style=_STYLE)
        self.healthy.placeholder = "logs of six good runs or more, one a line; none: judged by its own beginning"
        self.healthy.layout.width = "700px"
        self.beside = widgets.Checkbox(value=True, description="judge it beside the model's healthy runs", indent=False)
        self.kind.observe(status.guard(lambda _: self._arrange()), "value")
        self.model.observe(status.guard(lambda _: self._fill()), "value")
        rows = widgets.Layout(flex_flow="row wrap", align_items="center", grid_gap="2px 20px")
        self._of_log = widgets.VBox(
            [widgets.Box([self.log.text, self.log.example, self.log.upload], layout=rows), self.healthy]
        )
        self._of_lab = widgets.Box([self.model, self.run, self.beside], layout=rows)
        self.widget = widgets.VBox([self.kind, self._of_log, self._of_lab])
        self._arrange()

    def open(self) -> tuple[Incident, ...]:
        """Judge what is chosen.

        Raises:
            MoeproxyError: it cannot be read, or there are too few healthy runs.
        """
        if self.kind.value == LOG:
            return open_incidents(self.log.path, [Path(line).expanduser() for line in lines_of(self.healthy.value)])
        return (self._recorded(),)

    def choose(self, model: str, words: str) -> None:
        """Choose a recorded run, as a user would.

        Args:
            model: its label.
            words: what the list says of it, or the beginning of that.

        Raises:
            MoeproxyError: there is no such run.
        """
        self.kind.value = RECORDED
        if model not in self.model.options:
            raise MoeproxyError(f"no recorded run of {model!r}", expected=f"one of {', '.join(self.model.options)}")
        self.model.value = model
        found = next((value for said, value in self.run.options if said.startswith(words)), None)
        if found is None:
            raise MoeproxyError(f"no recorded run {words!r} of {model}", expected="one of the list")
        self.run.value = found

    def _recorded(self) -> Incident:
        if self.run.value is None:
            raise MoeproxyError("no recorded run is chosen", expected="one of the list")
        row = self._rows.loc[self.run.value]
        broken = load_bench(self._bench, models=[row["model"]], faults=[row["fault"]])
        run = next(trace for trace in broken if _is(trace, row))
        good: list[Trace] = []
        if self.beside.value:
            healthy = load_bench(self._bench, models=[row["model"]], faults=[None])
            good = [trace for trace in healthy if trace.provenance.config == run.provenance.config]
        name = f"{row['model']}, {_words(row)}"
        facts = {"run": f"{row['key']}, pack {row['pack']}", "folder": str(self._bench)}
        return replace(incident(run, good, name=name, facts=facts), notes=(LEARNED,))

    def _fill(self) -> None:
        self.run.options = self._runs()

    def _runs(self) -> list[tuple[str, Any]]:
        rows = self._rows[self._rows["model"] == self.model.value]
        return [(_words(row), index) for index, row in rows.iterrows()]

    def _arrange(self) -> None:
        of_log = self.kind.value == LOG
        self._of_log.layout.display = "" if of_log else "none"
        self._of_lab.layout.display = "none" if of_log else ""


def lines_of(text: str) -> list[str]:
    """Return the lines of a field that hold something."""
    return [line.strip() for line in text.splitlines() if line.strip()]


def _failures(bench: Path) -> pd.DataFrame:
    if not (bench / REGISTRY).is_file():
        return pd.DataFrame({"model": []})
    registry = load_registry(bench)
    return registry.loc[registry["fault"] != "", :]


def _words(row: Any) -> str:
    return f"{row['fault']} {float(row['strength']):g} from step {int(float(row['onset']))}, seed {row['seed']}"


def _is(trace: Trace, row: Any) -> bool:
    run = trace.provenance
    same = (run.fault, run.strength, run.seed) == (row["fault"], float(row["strength"]), int(row["seed"]))
    return same and run.onset == int(float(row["onset"]))


def _dropdown(name: str, options: list[Any], width: str) -> widgets.Dropdown:
    made = widgets.Dropdown(options=options, description=name, style=_STYLE)
    made.layout.width = width
    return made
