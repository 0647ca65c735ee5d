"""The sections of a postmortem that say what was tried: the failure reproduced on a proxy, and remedies."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import pandas as pd

from moeproxy.triage.jsonable import plain
from moeproxy.triage.remedy_result import Remedy
from moeproxy.triage.reproduction import Reproduction
from moeproxy.view.document import Block, Figure, Section, Table, Text
from moeproxy.view.figures_outcome import match_figure, outcome, severity_figure
from moeproxy.view.report_input import ReportInput
from moeproxy.view.style import counted

_MATCH = (
    "Match is the cosine of two responses, the failing run's and the proxy's to an injected fault: 1 is the same "
    "direction, 0 none in common."
)
_SEVERITY = (
    "Severity is 0 for a run as healthy ones are and 1 for one that is as bad as can be: the mean of three shares, of "
    "reward lost, of departure by groups of signals, and of steps that are not finite. A remedy is kept when severity "
    "falls by more than healthy runs differ by and by a tenth at least, and neither reward nor finite steps are lost."
)


def outcome_lead(result: ReportInput) -> Iterable[str]:
    """Yield what the proxy showed and what helped, a sentence each."""
    yield from (one.sentences[0] for one in result.reproductions if one.candidates)
    yield from (_told(one) for one in result.remedies)


def outcome_sections(result: ReportInput) -> Iterable[Section]:
    """Yield a section for what was reproduced and one for the remedies; none where nothing was."""
    if result.reproductions:
        blocks = [block for one in result.reproductions for block in _reproduction(one)]
        yield Section("Reproduced on the proxy", tuple(blocks))
    if result.remedies:
        yield Section("Remedies tried", tuple(block for one in result.remedies for block in _remedy(one)))


def outcome_limits(result: ReportInput) -> Iterable[str]:
    """Yield what a reproduction and a remedy on a model do not show."""
    if result.reproductions:
        yield "A match says that the proxy responds as the failing run does; another cause may have the same response."
    for model in dict.fromkeys(one.model for one in result.remedies):
        yield f"Remedies were tried on {model} with an injected fault; what helps there need not help the run itself."


def outcome_data(result: ReportInput) -> dict[str, Any]:
    """Return the results as JSON values."""
    found = {
        "reproductions": [one.to_dict() for one in result.reproductions],
        "remedies": [plain({**asdict(one), "ill": one.ill}) for one in result.remedies],
    }
    return {name: value for name, value in found.items() if value}


def _told(one: Remedy) -> str:
    where = f"{one.cause} on {one.model}"
    if not one.ill:
        return f"{where} needs no remedy: severity {one.before.value:.3f}, healthy runs reach {one.margin:.3f}."
    best = one.best()
    counts = f"{counted(len(one.trials), 'remedy').replace('remedys', 'remedies')} tried"
    if best is None or best.after is None:
        return f"Nothing that was tried helps against {where}: severity stays at {one.before.value:.3f} ({counts})."
    healthy = ", as healthy runs are" if best.recovered else ""
    return (
        f"{best.remedy} helps against {where}: severity falls from {best.before.value:.3f} to "
        f"{best.after.value:.3f}{healthy} ({counts})."
    )


def _reproduction(one: Reproduction) -> Iterable[Block]:
    if not one.candidates:
        yield Text(f"Not run: {one.model} had no candidate.", note=True)
        return
    yield Text(one.sentences[0])
    yield Figure(f"Match of the failing run with {one.model}, by injected fault.", match_figure(one), open=True)
    onset = f"The failing run departs from step {one.onset}."
    spent = f" New runs took {one.minutes:.1f} minutes." if one.minutes else ""
    yield Text(f"{_MATCH} {onset}{spent}")
    rest = one.sentences[1 + len(one.candidates) :]
    yield from (Text(sentence, note=True) for sentence in rest)


def _remedy(one: Remedy) -> Iterable[Block]:
    yield Text(_told(one))
    if any(trial.after is not None for trial in one.trials):
        caption = f"Severity before and after each remedy, from step {one.onset} on, seed {one.seed}."
        yield Figure(caption, severity_figure(one), open=True)
    if one.trials:
        words = [{"remedy": t.remedy, "outcome": outcome(t), "why": t.words} for t in one.trials]
        yield Table(f"Why each was kept or rolled back ({one.cause} on {one.model})", pd.DataFrame(words), folded=True)
    if one.not_tried:
        yield Text(f"Not tried: {', '.join(one.not_tried)}.")
    yield Text(_SEVERITY)
