"""How well judgements of broken and healthy runs do: recall, F1, false alarms, onsets. pandas only."""

from __future__ import annotations

from typing import Any


def detection_scores(table: Any, level: str) -> dict[str, float]:
    """Return recall, precision, F1, false alarms per 1,000 healthy steps and onset errors for one level.

    Args:
        table: one row a judgement: fault, level, onset, n_steps, usual, alarm, found_onset (NaN where none is stated).
        level: of the broken runs; healthy runs at other settings than the reference's are left out.
    """
    broken = table[table["level"] == level]
    healthy = table[(table["fault"] == "") & table["usual"]]
    hits, false = int(broken["alarm"].sum()), int(healthy["alarm"].sum())
    error = (broken["found_onset"] - broken["onset"])[broken["alarm"]].abs().dropna()
    return {
        "runs": len(broken),
        "healthy_runs": len(healthy),
        "recall": hits / max(len(broken), 1),
        "f1": 2 * hits / max(hits + false + len(broken), 1),
        "false_alarms_per_1000_steps": 1000 * false / max(int(healthy["n_steps"].sum()), 1),
        "onset_within_2": float((error <= 2).mean()) if len(error) else float("nan"),
        "onset_median_error": float(error.median()) if len(error) else float("nan"),
        "f1_flag_everything": 2 * len(broken) / max(2 * len(broken) + len(healthy), 1),
    }
