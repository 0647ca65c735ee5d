"""Write the catalogue as a page: `python -m moeproxy.lab.faults.catalogue` rewrites CATALOGUE.md beside this file."""

from __future__ import annotations

from pathlib import Path

from moeproxy.files import atomic_file
from moeproxy.lab.faults import FAULTS
from moeproxy.lab.faults.fault import Fault, TellTale

PAGE = Path(__file__).with_name("CATALOGUE.md")
FAMILIES = {
    "NP": "Numeric precision",
    "FA": "Framework adaptation",
    "OI": "Operator implementation",
    "MR": "Mixture routing",
    "RF": "Reward",
    "PG": "Generation",
    "OD": "Optimisation",
    "CA": "Credit assignment",
    "TE": "Tools and environment",
}
_ABOUT = {
    "CA": "GRPO has no critic: the value of a prompt is the mean reward of its group. A value mismatch is a baseline "
    "taken from the wrong group, a delayed credit a reward that is credited to the samples of a later step.\n",
    "TE": "They need the calculator task (`environment='calculator'`) and are refused without it.\n",
}
_HEAD = """# Fault catalogue

Generated from the entries in this folder; do not edit. Every fault acts at one named seam of the real loop
(`moeproxy/lab/seams.py`), from its onset step on, with a strength s from 0 (healthy, bit for bit) to 1.
"""
_WORD = {1: "rises", -1: "falls", 0: "becomes NaN"}


def page() -> str:
    """Return the catalogue as Markdown, family by family."""
    parts = [_HEAD]
    for code, title in FAMILIES.items():
        parts.append(f"## {code}: {title}\n")
        parts += [_ABOUT[code]] if code in _ABOUT else []
        parts += [_entry(item) for item in FAULTS.values() if item.family == code]
    return "\n".join(parts)


def _entry(item: Fault) -> str:
    rows = {
        "Seam": f"`{item.seam}`",
        "What it does": item.what,
        "Tell-tales": ", ".join(map(_tale, item.tell_tales)),
        "Stands for": item.twin,
        "Discriminating check": item.check,
        "Usual remedy": item.remedy,
    }
    lines = "\n".join(f"- {name}: {text}" for name, text in rows.items())
    return f"### `{item.id}`: {item.title}\n\n{lines}\n"


def _tale(tale: TellTale) -> str:
    return f"`{tale.signal}` {_WORD[tale.direction]}"


if __name__ == "__main__":
    with atomic_file(PAGE) as written:
        written.write_text(page(), "utf-8")
