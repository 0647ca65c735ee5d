"""Write the key maps as a page: `python -m moeproxy.traces.keys.page` rewrites SIGNALS.md beside this file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from moeproxy.files import atomic_file
from moeproxy.traces.keys import FRAMEWORKS, GENERIC
from moeproxy.traces.signals import LOG_SIGNALS, SIGNALS, Signal

PAGE = Path(__file__).with_name("SIGNALS.md")
_HEAD = """# Signals and the keys they are read from

Generated from the key maps in this folder; do not edit. For every signal: its unit and meaning, and for every framework
the key that it is read from (of several the first that a log has) and how that framework's quantity differs from the
signal's own text: averaging, estimator, unit. Where nothing stands, it does not differ as far as the framework's source
says. Traces whose definitions differ are compared with a note (`moeproxy.traces.overlay_notes`). Signals without a row
here are logged by the lab only.
"""


def page() -> str:
    """Return the page as Markdown."""
    parts = [_HEAD]
    for signal in (*SIGNALS.values(), *LOG_SIGNALS.values()):
        rows = list(_rows(signal))
        if rows:
            unit = f", in {signal.unit}" if signal.unit else ""
            parts.append(f"## `{signal.name}`{unit}\n\n{signal.doc[0].upper()}{signal.doc[1:]}.\n")
            parts.append("| framework | key | differs |\n|---|---|---|\n" + "".join(rows))
    parts.append("## What every log of a framework hides\n\n" + "".join(_notes()))
    return "\n".join(parts)


def write(path: Path = PAGE) -> None:
    """Write the page."""
    with atomic_file(path) as temporary:
        temporary.write_text(page(), encoding="utf-8")


def _rows(signal: Signal) -> Iterator[str]:
    for framework in (*FRAMEWORKS.values(), GENERIC):
        for key in framework.keys:
            if key.signal == signal.name:
                said = [key.definition] if key.definition else []
                said += [f"divided by {key.divisor:g}"] if key.divisor != 1 else []
                name = framework.name if framework is not GENERIC else "any other"
                yield f"| {name} | `{key.name}` | {'; '.join(said)} |\n"


def _notes() -> Iterator[str]:
    for framework in FRAMEWORKS.values():
        yield from (f"- {framework.name}: {note}\n" for note in framework.notes)
        yield from (f"- {framework.name}, console: {note}\n" for note in framework.console_notes)


if __name__ == "__main__":
    write()
