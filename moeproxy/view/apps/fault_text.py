"""What a fault is, as text for the panel."""

from __future__ import annotations

import html
from collections.abc import Sequence

from moeproxy.lab.faults import FAULTS
from moeproxy.lab.faults.catalogue import FAMILIES
from moeproxy.lab.faults.fault import Fault, TellTale

_PLAIN = "float:none;width:auto;margin:0;padding:0"  # JupyterLab lets the terms float
_WORD = {1: "rises", -1: "falls", 0: "becomes NaN"}


def family_options() -> list[tuple[str, str]]:
    """Return the families as (what is shown, code)."""
    present = dict.fromkeys(item.family for item in FAULTS.values())
    return [(f"{code}: {FAMILIES.get(code, code)}", code) for code in present]


def fault_options(family: str, recorded: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return the faults of a family as (what is shown, id); those without recorded runs say so."""
    return [
        (f"{item.id}: {item.title}" + ("" if item.id in recorded else " (not recorded)"), item.id)
        for item in FAULTS.values()
        if item.family == family
    ]


def fault_html(item: Fault) -> str:
    """Return a catalogue entry as a description list, escaped."""
    rows = {
        "What it does": item.what,
        "Where": f"seam {item.seam} of the loop",
        "Tell-tales": ", ".join(map(_tale, item.tell_tales)),
        "Stands for": item.twin,
        "Discriminating check": item.check,
        "Usual remedy": item.remedy,
    }
    cells = "".join(
        f"<dt style='{_PLAIN};font-weight:600'>{name}</dt><dd style='{_PLAIN}'>{html.escape(text)}</dd>"
        for name, text in rows.items()
    )
    grid = "display:grid;grid-template-columns:max-content 1fr;gap:2px 12px;margin:4px 0;line-height:1.4"
    return f"<dl aria-label='{html.escape(item.title, quote=True)}' style='{grid}'>{cells}</dl>"


def verdict_html(sentences: Sequence[str]) -> str:
    """Return the sentences of a verdict as a list that screen readers announce, escaped."""
    items = "".join(f"<li>{html.escape(text)}</li>" for text in sentences)
    style = "margin:2px 0 2px 18px;padding:0;line-height:1.4"
    return f"<div role='status' aria-live='polite'><strong>Verdict</strong><ul style='{style}'>{items}</ul></div>"


def _tale(tale: TellTale) -> str:
    return f"{tale.signal.replace('_', ' ')} {_WORD[tale.direction]}"
