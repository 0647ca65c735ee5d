"""The overlay: signals of original and proxy over the steps, healthy and broken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from moeproxy.errors import MoeproxyError
from moeproxy.traces.signals import signal_of
from moeproxy.traces.trace import Trace
from moeproxy.view.style import BLACK, faint, finish, model_colours

_NAMES = {
    "policy_loss": "policy loss",
    "grad_norm": "gradient norm",
    "reward_mean": "mean reward",
    "kl": "KL",
}


@dataclass(frozen=True)
class _Series:
    """One line: a model, healthy or broken, over all its seeds."""

    signal: str
    model: str
    broken: bool
    steps_S: np.ndarray
    line_S: np.ndarray
    low_S: np.ndarray
    high_S: np.ndarray
    n_lines: int
    n_runs: int
    live: bool

    @property
    def name(self) -> str:
        return f"{self.model}, {'broken' if self.broken else 'healthy'}"

    @property
    def origin(self) -> str:
        source = "live" if self.live else "recorded"
        line = source if self.n_lines == 1 else f"mean of {self.n_lines} {source}"
        return line if self.n_runs == 1 else f"{line}, band {self.n_runs} runs"

    def mean_from(self, step: int) -> float:
        after = self.line_S[(self.steps_S >= step) & np.isfinite(self.line_S)]
        return float(after.mean()) if after.size else float("nan")


def overlay(
    traces: Sequence[Trace],
    fault: str,
    *,
    signals: Sequence[str] = ("policy_loss", "grad_norm"),
    models: Sequence[str] | None = None,
    original: str = "original",
    strength: float | None = None,
) -> go.Figure:
    """Draw signals of original and proxy, healthy and with a fault, over the steps.

    A line is the live run if every line has one, else the mean of recorded ones; of several seeds only those
    that were also run broken enter the mean, so that the lines part at the onset. The band spans all runs.
    Colour tells the model, dash tells healthy (solid) from broken (dashed); the onset is a vertical line.

    Args:
        traces: runs; those of other faults and models are ignored, and so are runs of several faults at once.
        fault: id of the fault.
        signals: columns to draw, one panel each.
        models: models to draw; by default the original and the first other model.
        original: label of the original.
        strength: strength of the fault; by default the largest in the traces.

    Raises:
        MoeproxyError: no trace has the fault at that strength, or a model has no trace.
    """
    traces = [trace for trace in traces if not trace.provenance.further and not trace.provenance.remedies]
    chosen = _models(traces, models, original)
    level = _strength(traces, fault, strength)
    colours = model_colours(chosen, original)
    onset = _onset(traces, fault, level)
    figure = make_subplots(rows=len(signals), shared_xaxes=True, vertical_spacing=0.07)
    drawn = []
    for row, signal in enumerate(signals, start=1):
        panel = _panel(traces, fault, level, chosen, signal)
        for series in panel:
            _draw(figure, row, series, colours[series.model])
        _axis(figure, row, signal, panel)
        drawn += panel
    _mark_onset(figure, onset, len(signals))
    figure.update_xaxes(title_text="step", row=len(signals), col=1)
    legend = {"orientation": "h", "x": 0, "y": -0.3 / len(signals), "yanchor": "top"}
    figure.update_layout(hovermode="x unified", legend=legend)
    names = listed([_NAMES.get(signal, signal.replace("_", " ")) for signal in signals])
    title = f"{names[:1].upper()}{names[1:]}: {fault}"
    alt = _alt(drawn, fault, onset, signals)
    return finish(figure, title=title, alt=alt, table=_wide(drawn), height=150 + 250 * len(signals))


def listed(names: Sequence[str]) -> str:
    """Return "a", "a and b" or "a, b and c"."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _models(traces: Sequence[Trace], models: Sequence[str] | None, original: str) -> list[str]:
    present = list(dict.fromkeys(trace.provenance.model for trace in traces))
    if models is None:
        others = [model for model in present if model != original]
        return [model for model in (original, *others[:1]) if model in present]
    if lost := [model for model in models if model not in present]:
        raise MoeproxyError(f"no trace of the model {lost[0]!r}", expected=f"one of {present}")
    return list(models)


def _strength(traces: Sequence[Trace], fault: str, strength: float | None) -> float:
    known = sorted({trace.provenance.strength for trace in traces if trace.provenance.fault == fault})
    if not known or (strength is not None and strength not in known):
        faults = sorted({trace.provenance.fault for trace in traces if trace.provenance.fault})
        at = "" if strength is None else f" at strength {strength:g}"
        raise MoeproxyError(f"no trace of the fault {fault!r}{at}", expected=f"a fault of {faults}")
    return known[-1] if strength is None else strength


def _onset(traces: Sequence[Trace], fault: str, strength: float) -> int | None:
    runs = [trace.provenance for trace in traces]
    onsets = [run.onset for run in runs if run.fault == fault and run.strength == strength]
    return next((onset for onset in onsets if onset is not None), None)


def _panel(traces: Sequence[Trace], fault: str, strength: float, models: list[str], signal: str) -> list[_Series]:
    logged = [trace for trace in traces if signal in trace.signals]
    groups: dict[tuple[str, bool], list[Trace]] = {}
    for model in models:
        healthy = [trace for trace in logged if _is(trace, model, None, 0.0)]
        broken = [trace for trace in logged if _is(trace, model, fault, strength)]
        groups |= {(model, False): healthy, (model, True): broken}
    # A live line beside a mean of recorded ones would part before the onset for no reason but that.
    live = all(any(_live(trace) for trace in runs) for runs in groups.values() if runs)
    keys = [key for key, runs in groups.items() if runs]
    return [_series(groups[key], _lines(groups, key, live), key, signal, live) for key in keys]


def _lines(groups: dict[tuple[str, bool], list[Trace]], key: tuple[str, bool], live: bool) -> list[Trace]:
    """Return the runs whose mean is drawn: live or recorded, of the seeds that were also run broken."""
    of_source = {key: [t for t in runs if _live(t) == live] for key, runs in groups.items()}
    seeds = {trace.provenance.seed for trace in of_source[key[0], True]}
    paired = [trace for trace in of_source[key] if trace.provenance.seed in seeds]
    return paired or of_source[key] or groups[key]


def _live(trace: Trace) -> bool:
    return trace.provenance.source == "live"


def _is(trace: Trace, model: str, fault: str | None, strength: float) -> bool:
    run = trace.provenance
    return run.model == model and run.fault == fault and (fault is None or run.strength == strength)


def _series(runs: list[Trace], lines: list[Trace], key: tuple[str, bool], signal: str, live: bool) -> _Series:
    steps_S = np.unique(np.concatenate([trace.steps.index.to_numpy() for trace in runs]))
    values_RS = np.ma.masked_invalid([_on(trace, signal, steps_S) for trace in runs])
    lines_RS = np.ma.masked_invalid([_on(trace, signal, steps_S) for trace in lines])
    line, low, high = (part.filled(np.nan) for part in (lines_RS.mean(0), values_RS.min(0), values_RS.max(0)))
    return _Series(signal, *key, steps_S, line, low, high, len(lines), len(runs), live)


def _on(trace: Trace, signal: str, steps_S: np.ndarray) -> np.ndarray:
    values_S = np.full(len(steps_S), np.nan)
    values_S[np.searchsorted(steps_S, trace.steps.index.to_numpy())] = trace.values(signal)
    return values_S


def _draw(figure: go.Figure, row: int, series: _Series, colour: str) -> None:
    if series.n_runs > 1:
        figure.add_trace(_band(series, colour), row=row, col=1)
    line = go.Scatter(
        x=series.steps_S,
        y=series.line_S,
        mode="lines",
        line={"color": colour, "width": 2.2, "dash": "dash" if series.broken else "solid"},
        name=f"{series.name} ({series.origin})",
        legendgroup=series.name,
        showlegend=row == 1,
        hovertemplate=f"{series.name}: %{{y:.4g}}<extra></extra>",
    )
    figure.add_trace(line, row=row, col=1)
    gone, seen = np.flatnonzero(~np.isfinite(series.line_S)), np.flatnonzero(np.isfinite(series.line_S))
    if gone.size and seen.size and gone[-1] > seen[-1]:
        figure.add_trace(_end(series, int(seen[-1]), colour), row=row, col=1)


def _band(series: _Series, colour: str) -> go.Scatter:
    steps = np.concatenate([series.steps_S, series.steps_S[::-1]])
    outline = np.concatenate([series.high_S, series.low_S[::-1]])
    inside = np.isfinite(outline)
    return go.Scatter(
        x=steps[inside],
        y=outline[inside],
        fill="toself",
        fillcolor=faint(colour),
        mode="lines",
        line={"width": 0},
        hoverinfo="skip",
        showlegend=False,
        legendgroup=series.name,
    )


def _end(series: _Series, at: int, colour: str) -> go.Scatter:
    """Return a cross where a line ends because its values are no longer finite."""
    return go.Scatter(
        x=[series.steps_S[at]],
        y=[series.line_S[at]],
        mode="markers+text",
        text=["no finite value after this"],
        textposition="middle right",
        marker={"symbol": "x", "size": 11, "color": colour},
        showlegend=False,
        hoverinfo="skip",
    )


def _axis(figure: go.Figure, row: int, signal: str, panel: list[_Series]) -> None:
    figure.update_yaxes(title_text=_NAMES.get(signal, signal.replace("_", " ")), row=row, col=1)
    values = np.concatenate([series.line_S for series in panel] + [s.low_S for s in panel]) if panel else np.empty(0)
    values = values[np.isfinite(values)]
    if signal_of(signal).scale == "log" and values.size and values.min() > 0:
        ticks = _log_ticks(float(values.min()), float(max(s.high_S[np.isfinite(s.high_S)].max() for s in panel)))
        text = [f"{tick:g}" for tick in ticks]
        figure.update_yaxes(type="log", tickvals=ticks, ticktext=text, row=row, col=1)


def _log_ticks(low: float, high: float) -> list[float]:
    """Return 1, 2, 5 times powers of ten, or powers of ten alone over more than three decades."""
    powers = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    digits = (1, 2, 5) if len(powers) <= 4 else (1,)
    return [float(f"{digit}e{power}") for power in powers for digit in digits]


def _mark_onset(figure: go.Figure, onset: int | None, n_rows: int) -> None:
    if onset is None:
        return
    for row in range(1, n_rows + 1):
        line = {"color": BLACK, "width": 1, "dash": "dot"}
        figure.add_vline(x=onset, line=line, row=row, col=1)  # pyright: ignore[reportArgumentType]
    figure.add_annotation(
        x=onset, y=1, xref="x", yref="paper", yanchor="bottom", text=f"onset, step {onset}", showarrow=False
    )


def _wide(drawn: list[_Series]) -> pd.DataFrame:
    columns = [pd.Series(s.line_S, index=s.steps_S, name=f"{s.signal}: {s.name}") for s in drawn]
    if not columns:
        return pd.DataFrame({"step": []})
    rounded = [column.map(lambda value: float(f"{value:.4g}")) for column in columns]
    return pd.concat(rounded, axis=1).rename_axis("step").reset_index()


def _alt(drawn: list[_Series], fault: str, onset: int | None, signals: Sequence[str]) -> str:
    if not drawn:
        return f"No run logged {', '.join(signals)}."
    parts = []
    for signal in dict.fromkeys(series.signal for series in drawn):
        means = [f"{s.name} {s.mean_from(onset or 0):.3g}" for s in drawn if s.signal == signal]
        parts.append(f"{_NAMES.get(signal, signal)} of {'; '.join(means)}")
    when = "" if onset is None else f" acting from step {onset}"
    return f"Runs with the fault {fault}{when}, and healthy ones. Means after the onset: {'. '.join(parts)}."
