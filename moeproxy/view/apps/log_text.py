"""What was read from a log, as text for the panel: provenance, what was left out, what is odd."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

from moeproxy.traces.logtrace import LogTrace
from moeproxy.view.log_events import early_end

_PLAIN = "float:none;width:auto;margin:0;padding:0"  # JupyterLab lets the terms float
_MOST = 8


def run_option(number: int, log: LogTrace) -> str:
    """Return what a run is called in the list of runs."""
    what = f"{len(log.trace.steps):,} steps" if log.has_metrics else "no metric"
    return f"{number}: {log.info.name}, {log.info.framework}, {what}"


def log_html(log: LogTrace) -> str:
    """Return where a run was read from and what must be known of it, as a description list, escaped."""
    rows = {name: lines for name, lines in _rows(log).items() if lines}
    cells = "".join(
        f"<dt style='{_PLAIN};font-weight:600'>{name}</dt><dd style='{_PLAIN}'>{_lines(lines)}</dd>"
        for name, lines in rows.items()
    )
    grid = "display:grid;grid-template-columns:max-content 1fr;gap:2px 12px;margin:4px 0;line-height:1.4"
    return f"<dl aria-label='What was read' style='{grid};max-width:950px'>{cells}</dl>"


def notes_html(notes: Mapping[str, str]) -> str:
    """Return which signals two runs define differently, as a list that screen readers announce; "" without any."""
    if not notes:
        return ""
    items = "".join(
        f"<li><strong>{html.escape(name.replace('_', ' '))}</strong>: {html.escape(text)}</li>"
        for name, text in notes.items()
    )
    head = "Defined differently in the two runs, so a difference may be one of definition"
    style = "margin:2px 0 2px 18px;padding:0;line-height:1.4"
    box = "max-width:950px;border-left:3px solid currentColor;padding-left:8px"
    return f"<div role='status' aria-live='polite' style='{box}'>{head}:<ul style='{style}'>{items}</ul></div>"


def _rows(log: LogTrace) -> dict[str, Sequence[str]]:
    info = log.info
    version = f" {info.version}" if info.version else ""
    rows: dict[str, Sequence[str]] = {}
    if not log.has_metrics:
        rows["No metric"] = [f"It contains {log.contents}."]
    rows["Framework"] = [f"{info.framework}{version} ({info.container})"]
    rows["Files"] = info.files
    rows["Read"] = [f"{info.lines:,} lines, {info.rows:,} of them rows of this run"]
    if log.has_metrics:
        steps = log.trace.steps.index
        rows["Steps"] = [f"{steps[0]:,} to {steps[-1]:,}, {len(steps):,} of them, by {info.clock!r}"]
    rows["Left out"] = [str(skipped) for skipped in info.skipped]
    rows["Resumed"] = [str(resume) for resume in info.resumes]
    end = early_end(log)
    rows["Failures"] = [*(str(finding) for finding in info.findings), *([f"{end[0].upper()}{end[1:]}"] if end else [])]
    rows["To be known"] = info.notes
    return rows


def _lines(lines: Sequence[str]) -> str:
    shown = [html.escape(line) for line in lines[:_MOST]]
    if len(lines) > _MOST:
        shown.append(f"and {len(lines) - _MOST} more")
    return "<br>".join(shown)
