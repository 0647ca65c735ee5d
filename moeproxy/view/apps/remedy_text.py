"""Remedies and diagnoses as text for the panel of notebook 05."""

from __future__ import annotations

import html
from collections.abc import Iterable

import pandas as pd

from moeproxy.lab.faults import FAULTS, fault
from moeproxy.lab.remedies import remedy
from moeproxy.triage.detect import ALARM
from moeproxy.triage.diagnose import Diagnosis
from moeproxy.triage.jsonable import sure


def fault_option(fault_id: str, tried: int) -> str:
    """Return a fault as the list shows it, with how many remedies were tried."""
    known = FAULTS[fault_id]
    return f"{fault_id}: {known.title}" + (f" ({tried} tried)" if tried else " (nothing tried yet)")


def failure_html(fault_id: str, diagnosis: Diagnosis | None) -> str:
    """Return what the fault does and what the diagnosis says of the run, as a description list."""
    item = fault(fault_id)
    rows = {"What was injected": item.what, "Diagnosis": _told(diagnosis, fault_id), "Usual remedy": item.remedy}
    plain = "float:none;width:auto;margin:0;padding:0"  # JupyterLab lets the terms float
    cells = "".join(
        f"<dt style='{plain};font-weight:600'>{name}</dt><dd style='{plain}'>{html.escape(text)}</dd>"
        for name, text in rows.items()
    )
    grid = "display:grid;grid-template-columns:max-content 1fr;gap:2px 12px;margin:4px 0;line-height:1.4"
    return f"<dl aria-label='{html.escape(item.title, quote=True)}' style='{grid};max-width:950px'>{cells}</dl>"


def _told(diagnosis: Diagnosis | None, injected: str) -> str:
    if diagnosis is None:
        return "it is being made"
    detection = diagnosis.detection
    said = detection.sentences[0]
    if detection.verdict != ALARM or not diagnosis.causes:
        return said
    ranked = ", ".join(f"{cause.fault} {sure(cause.confidence)}" for cause in diagnosis.causes[:3])
    first = diagnosis.causes[0].fault
    right = "as injected" if first == injected else f"injected was {injected}: choose below what it is treated for"
    unknown = "unknown, nearest are " if diagnosis.unknown else ""
    return f"{said} Likely causes: {unknown}{ranked} ({right})."


def cause_options(injected: str, diagnosis: Diagnosis | None) -> list[tuple[str, str]]:
    """Return what a run can be treated for: what was injected, then what the diagnosis names, the likeliest first."""
    options = [(f"{injected} (injected)", injected)]
    causes = diagnosis.causes if diagnosis else ()
    return options + [(f"{c.fault} ({sure(c.confidence)})", c.fault) for c in causes if c.fault != injected]


def remedy_table(names: Iterable[str]) -> pd.DataFrame:
    """Return candidate remedies in the order in which they are tried, with what they do and who does it so."""
    rows = [
        {"remedy": item.id, "kind": item.kind, "what it changes": f"{item.title}. {item.what}", "source": item.source}
        for item in map(remedy, names)
    ]
    return pd.DataFrame(rows)
