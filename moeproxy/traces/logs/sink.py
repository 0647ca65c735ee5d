"""Where readers of containers put what they find: rows by run, skipped lines with the reason, findings, notes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from moeproxy.traces.logs.rows import RowStore

SHOWN = 5  # lines of each reason that are named
MAX_FINDINGS = 50
MAX_RUNS = 1000


@dataclass(frozen=True)
class Finding:
    """Something in a log that is no metric but says how the run went.

    Args:
        kind: "traceback", "error", "out of memory", "killed", "signal", "progress" or "unreadable".
        line: line number.
        text: the line, shortened.
        file: the file, when several belong to the run.
    """

    kind: str
    line: int
    text: str
    file: str = ""

    def __str__(self) -> str:
        return f"{self.kind} on line {self.line}: {self.text}" if self.line else f"{self.kind}: {self.text}"


@dataclass
class Skipped:
    """Lines that were left out for one reason: how many, and the first of them."""

    reason: str
    count: int = 0
    lines: list[int] = field(default_factory=list)

    def __str__(self) -> str:
        more = ", ..." if self.count > len(self.lines) else ""
        plural = "s" if self.count > 1 else ""
        return f"{self.count} line{plural} ({', '.join(map(str, self.lines))}{more}): {self.reason}"


@dataclass
class Run:
    """What one run of a file gave so far."""

    name: str
    store: RowStore = field(default_factory=RowStore)


@dataclass
class Sink:
    """Collects what the reader of one file finds."""

    runs: dict[str, Run] = field(default_factory=dict)
    skipped: dict[str, Skipped] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    progress: Finding | None = None
    container: str = ""
    hints: set[str] = field(default_factory=set)
    versions: dict[str, str] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    lines: int = 0
    open_end: bool = False

    @property
    def n_rows(self) -> int:
        """Rows of all runs so far."""
        return sum(len(run.store) for run in self.runs.values())

    def row(self, cells: dict[str, Any], line: int, origin: str = "", run: str = "") -> None:
        """Take one row."""
        found = self.runs.get(run)
        if found is None:
            if len(self.runs) >= MAX_RUNS:
                self.skip(line, f"more than {MAX_RUNS} runs in one file")
                return
            found = self.runs[run] = Run(run)
        found.store.add(cells, line, origin)

    def skip(self, line: int, reason: str) -> None:
        """Say that a line is left out, and why."""
        skipped = self.skipped.setdefault(reason, Skipped(reason))
        skipped.count += 1
        if len(skipped.lines) < SHOWN:
            skipped.lines.append(line)

    def find(self, kind: str, line: int, text: str) -> None:
        """Take something that says how the run went. Of progress only the last is kept."""
        finding = Finding(kind, line, text.strip()[:200])
        if kind == "progress":
            self.progress = finding
        elif len(self.findings) < MAX_FINDINGS:
            self.findings.append(finding)

    def note(self, text: str) -> None:
        """Say something a reader of the result must know, once."""
        if text not in self.notes:
            self.notes.append(text)
