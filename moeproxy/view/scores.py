"""How well verdicts like those of a report did on held-out runs whose logs hold about the same signals."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from moeproxy.errors import MoeproxyError
from moeproxy.places import data_dir
from moeproxy.triage.signal_sets import nearest_set
from moeproxy.view.report_input import ReportInput


def score_rows(result: ReportInput) -> list[Mapping[str, Any]]:
    """Return the shipped scores of clear faults for each way of judging and set of signals that a report holds."""
    try:
        rows = json.loads((data_dir() / "triage" / "scores.json").read_text(encoding="utf-8"))["as_logged"]
    except (OSError, ValueError, KeyError, MoeproxyError):
        return []
    judged = [one.diagnosis.detection for incident in result.incidents for one in incident.judgements]
    kinds = dict.fromkeys((one.mode, nearest_set(one.signals)) for one in judged)
    wanted = [{"mode": mode, "signals": signals, "model": "all", "level": "clear"} for mode, signals in kinds]
    return [row for each in wanted for row in rows if each.items() <= row.items()]


def score_sentences(result: ReportInput) -> Iterable[str]:
    """Yield these scores in words."""
    for row in score_rows(result):
        yield (
            f"Of {row['runs']} recorded runs with a clear fault, judged {row['mode']} by {row['signals']} (what this "
            f"log is nearest to), {row['recall']:.0%} alarm, and {row['false_alarms_per_1000_steps']:.2f} false alarms "
            f"come on 1,000 healthy steps; the onset is right within 2 steps in {row['onset_within_2']:.0%}. "
            f"The right cause is told first in {row['first']:.0%} of all these runs, and in {row['other_models']:.0%} "
            "by what runs of other models taught."
        )
