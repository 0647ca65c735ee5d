"""What is laid over a log: another run of it, a run of the lab, or a second log."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ipywidgets as widgets

from moeproxy.errors import MoeproxyError, TraceError
from moeproxy.places import data_dir
from moeproxy.traces.logtrace import LogTrace
from moeproxy.traces.pack import REGISTRY, load_bench, load_registry
from moeproxy.traces.parquet import SUFFIX
from moeproxy.traces.reading import read
from moeproxy.traces.trace import Trace
from moeproxy.view.apps.log_text import run_option
from moeproxy.view.apps.ui import Status

NOTHING, OF_LOG, OF_LAB, OF_FILE = "nothing", "log", "lab", "file"
_KINDS = [
    ("nothing", NOTHING),
    ("another run of this log", OF_LOG),
    ("a run of the lab", OF_LAB),
    ("a second log, or a trace", OF_FILE),
]
_STYLE = {"description_width": "initial"}
_NAMED = 4  # parts of the name of a run's file: model, fault, seed, key


@dataclass(frozen=True)
class LabRun:
    """A run of the lab that lies in a file: its model, what it is in words, and how it is read."""

    model: str
    words: str
    read: Callable[[], Trace]


def lab_runs(folders: Iterable[Path]) -> list[LabRun]:
    """Return the runs in folders of traces or packs, without reading them; folders that do not exist have none."""
    found: list[LabRun] = []
    for folder in folders:
        if (folder / REGISTRY).is_file():
            found += _of_pack(folder)
        elif folder.is_dir():
            found += [_of_file(path) for path in sorted(folder.rglob(f"*{SUFFIX}")) if not path.name.startswith(".")]
    return found


def shipped() -> tuple[Path, ...]:
    """Return the folders of recorded runs that come with moeproxy."""
    return (data_dir() / "bench", data_dir() / "runs")


class PairChooser:
    """Controls that choose the run to lay over another.

    Args:
        folders: of runs of the lab.
        status: told when a file cannot be read.
        on_change: called without arguments after any change.
    """

    def __init__(self, folders: Sequence[Path], status: Status, on_change: Callable[[], None]) -> None:
        self._folders, self._on_change = tuple(folders), on_change
        self._here: list[LogTrace] = []
        self._files: list[LogTrace | Trace] = []
        self._lab: list[LabRun] = []
        self._read: tuple[LabRun | None, Trace | None] = (None, None)
        self.kind = _dropdown("Lay over it", _KINDS, "260px")
        self.path = widgets.Text(description="Second log", placeholder="path", style=_STYLE)
        self.path.layout.width = "420px"
        self.open = widgets.Button(description="Open it", layout=widgets.Layout(width="auto"))
        self.model = _dropdown("Model", [], "260px")
        self.which = _dropdown("Run laid over", [], "560px")
        rows = widgets.Layout(flex_flow="row wrap", align_items="center", grid_gap="2px 20px")
        self.widget = widgets.Box([self.kind, self.path, self.open, self.model, self.which], layout=rows)
        self.kind.observe(status.guard(lambda _: self._kind_changed()), "value")
        self.model.observe(status.guard(lambda _: self._fill()), "value")
        self.which.observe(lambda _: self._on_change(), "value")
        self.open.on_click(status.guard(lambda _: self._open()))
        self._arrange()

    def others(self, logs: Sequence[LogTrace]) -> None:
        """Say which other runs the log at hand has."""
        self._here = [log for log in logs if log.has_metrics]
        if self.kind.value == OF_LOG:
            self._fill()

    def selected(self) -> LogTrace | Trace | None:
        """Return the run chosen, None for none.

        Raises:
            TraceError: its file cannot be read.
        """
        kind, index = self.kind.value, self.which.value
        if kind == NOTHING or index is None:
            return None
        if kind != OF_LAB:
            runs = self._here if kind == OF_LOG else self._files
            return runs[index] if index < len(runs) else None
        chosen = [run for run in self._lab if run.model == self.model.value][index]
        if self._read[0] is not chosen:
            self._read = (chosen, chosen.read())
        return self._read[1]

    def choose(self, model: str, words: str) -> None:
        """Lay a run of the lab over the log, as a user would.

        Args:
            model: its label.
            words: what the list says of it, or the beginning of that.

        Raises:
            MoeproxyError: there is no such run.
        """
        self.kind.value = OF_LAB
        runs = [run.words for run in self._lab if run.model == model]
        place = next((i for i, said in enumerate(runs) if said.startswith(words)), None)
        if place is None:
            known = sorted({run.model for run in self._lab}) if not runs else runs[:20]
            raise MoeproxyError(f"no run of {model!r} that is {words!r}", expected=f"one of {', '.join(known)}")
        self.model.value = model
        self.which.value = place

    def _kind_changed(self) -> None:
        if self.kind.value == OF_LAB and not self._lab:
            self._lab = lab_runs(self._folders)
            if not self._lab:
                raise MoeproxyError("no run of the lab", where=", ".join(map(str, self._folders)))
            self.model.options = list(dict.fromkeys(run.model for run in self._lab))
        self._fill()
        self._arrange()

    def _open(self) -> None:
        text = str(self.path.value).strip()
        if not text:
            raise TraceError("no path", expected="a log, or a trace written by moeproxy")
        path = Path(text).expanduser()
        if path.suffix == SUFFIX:
            self._files = [Trace.load(path)]
        else:
            found = read(path)
            self._files = [log for log in found if log.has_metrics]
            if not self._files:
                raise TraceError(f"no metric in it; it contains {found[0].contents}", where=path)
        self._fill()

    def _fill(self) -> None:
        """Offer the runs of the kind chosen; the first is taken."""
        before = self.which.value
        self.which.options = self._options()
        if self.which.options and self.which.value is None:
            self.which.value = 0
        if self.which.value == before:  # another run under the same number, of which nobody would hear
            self._on_change()

    def _options(self) -> list[tuple[str, int]]:
        if self.kind.value == OF_LOG:
            return [(run_option(number, log), number - 1) for number, log in enumerate(self._here, 1)]
        if self.kind.value == OF_LAB:
            words = [run.words for run in self._lab if run.model == self.model.value]
            return [(said, number) for number, said in enumerate(words)]
        if self.kind.value == OF_FILE:
            return [(_name(number, run), number) for number, run in enumerate(self._files)]
        return []

    def _arrange(self) -> None:
        kind = self.kind.value
        seen = {self.path: kind == OF_FILE, self.open: kind == OF_FILE, self.model: kind == OF_LAB}
        for widget, shown in (seen | {self.which: kind != NOTHING}).items():
            widget.layout.display = "" if shown else "none"


def _name(number: int, run: LogTrace | Trace) -> str:
    return str(run.provenance) if isinstance(run, Trace) else run_option(number + 1, run)


def _of_file(path: Path) -> LabRun:
    parts = path.stem.split("--")
    model, words = (parts[0], ", ".join(parts[1:3])) if len(parts) == _NAMED else ("other traces", path.stem)
    return LabRun(model, f"{words} ({path.parent.name})", lambda: Trace.load(path))


def _of_pack(folder: Path) -> list[LabRun]:
    rows = load_registry(folder).to_dict("records")
    return [LabRun(str(row["model"]), _words(row, folder), lambda row=row: _load(row, folder)) for row in rows]


def _words(row: dict[Any, Any], folder: Path) -> str:
    what = (
        f"{row['fault']} {float(row['strength']):g} from step {int(float(row['onset']))}" if row["fault"] else "healthy"
    )
    rest = "" if row["fault"] else f", learning rate {float(row['learning_rate']):g}, temperature {row['temperature']}"
    return f"{what}, seed {row['seed']}{rest} ({folder.name})"


def _load(row: dict[Any, Any], folder: Path) -> Trace:
    found = load_bench(folder, models=[row["model"]], faults=[row["fault"] or None], trajectories=False)
    for trace in found:
        run = trace.provenance
        same = run.seed == int(row["seed"]) and (not run.fault or run.strength == float(row["strength"]))
        config = run.config
        settings = all(config.get(n) == float(row[n]) for n in ("learning_rate", "temperature") if n in config)
        if same and settings:
            return trace
    raise TraceError(f"{row['key']!r} is not in its pack", where=folder / str(row["pack"]))


def _dropdown(name: str, options: list[Any], width: str) -> widgets.Dropdown:
    made = widgets.Dropdown(options=options, description=name, style=_STYLE)
    made.layout.width = width
    return made
