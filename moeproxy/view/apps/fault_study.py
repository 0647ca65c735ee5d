"""The verdict of the fault panel on runs that the fidelity study has scored: read, not computed again.

The study judges every recorded run by the original's runs of other seeds, aligned by onset, among all faults of the
catalogue and by a declared protocol; two seconds of reading replace minutes of computing. It applies where the reader
asks for what was recorded; a strength or onset of one's own is compared by itself (`fault_verdict.judge`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from moeproxy.triage.study_frames import rows, where
from moeproxy.triage.study_measures import NONE
from moeproxy.triage.study_result import Study
from moeproxy.triage.study_runs import ABSENT, SCORED
from moeproxy.view.apps.fault_runs import Asked
from moeproxy.view.apps.fault_verdict import Verdict

INFORMED = ("cluster", "frequency", "gate", "reap")
"""Ways of choosing experts that look at how the model uses them."""


def study_verdict(study: Study, asked: Asked, level: str) -> Verdict | None:
    """Return what the study says of the seeds and models that it scored, or None where it scored none of the proxies.

    Args:
        study: the study of the recorded runs.
        asked: fault, onset of every seed, models that are drawn.
        level: the study's name of the strength, "" where it has none.
    """
    ours = _recorded(where(study.cells, fault=asked.fault, level=level, model=study.protocol.original))
    onsets = dict(zip(ours["seed"], ours["onset"], strict=True))
    seeds = [seed for seed in asked.seeds if onsets.get(seed) == asked.onsets[seed]]
    cells = where(study.cells, fault=asked.fault, level=level, seed=seeds)
    labels = [*asked.models, *(label for label in study.labels if label not in asked.models)]
    parts = {label: _recorded(where(cells, model=label)) for label in labels}
    parts = {label: part for label, part in parts.items() if len(part)}
    known = tuple(label for label in asked.models if label in parts)
    if len(known) < 2 or known[0] != asked.models[0]:
        return None
    table = pd.DataFrame([_row(study, label, part, level) for label, part in parts.items()])
    scored = replace(asked, onsets={seed: asked.onsets[seed] for seed in seeds}, models=known)
    lacks = [
        *(f"seed {seed}: no recorded run from step {asked.onsets[seed]}" for seed in asked.seeds if seed not in seeds),
        *(f"{label}: not recorded at this strength" for label in asked.models if label not in parts),
    ]
    told = (*_sentences(study, scored, parts, level), *(f"No verdict for {reason}." for reason in lacks))
    return Verdict(told, table, missing=tuple(lacks))


def _recorded(cells: Any) -> Any:
    return cells[cells["status"] != ABSENT]


def _sentences(study: Study, asked: Asked, parts: Mapping[str, Any], level: str) -> list[str]:
    """Return the answer for every proxy drawn, beside ceiling, controls, and where the numbers are from."""
    original, *proxies = asked.models
    ours = parts[original]
    if not ours["detected"].any():
        return [
            "The original does not move beyond what its healthy runs differ by: there is nothing to reproduce.",
            _origin(study),
        ]
    told = [_told(study, label, parts[label], level) for label in proxies]
    if len(asked.seeds) == 1:
        told.append("One seed only: an indication, not a result.")
    told.append(
        f"The ceiling: judged by its own other seeds, the original's run is nearest to this fault in {_seeds(ours)}."
    )
    told += _controls(study, parts, proxies)
    told += [_false(study, label) for label in proxies]
    return [*told, _origin(study)]


def _told(study: Study, label: str, part: Any, level: str) -> str:
    if not (part["status"] == SCORED).any():
        return f"{label} cannot show it: {' and '.join(sorted(set(part['status'])))} (counts as missed)."
    known = round(1 / study.chance(level))
    facts = [f"among {known} faults of the original this one is nearest in {_seeds(part)}{_instead(part)}"]
    if part["direction"].notna().any():
        same, found = _percent(part["direction"]), _percent(part["found"])
        facts.append(f"{same} of the signals that move on the original move the same way, {found} significantly")
    else:
        facts.append("on the original nothing moves for sure but what the fault sets by its definition, on any model")
    facts.append(f"rank correlation {_number(part['rank'])}, {_number(part['rank_other'])} with the other faults")
    if part["detected"].any():
        facts.append(_shift(part["onset_difference"]))
    return f"{label} {_answer(part)}: {'; '.join(facts)}."


def _answer(part: Any) -> str:
    right = part["top1"] == 1
    if right.all():
        return "shows the same failure"
    if right.any():
        return "shows the same failure in some seeds"
    if part["detected"].any():
        return "moves, but looks more like another fault"
    return "does not respond"


def _instead(part: Any) -> str:
    wrong = part.loc[part["top1"] != 1, "nearest"].value_counts()
    told = [f"{'no response' if name == NONE else name} in {count}" for name, count in wrong.items()]
    return f" (instead {', '.join(told)})" if told else ""


def _controls(study: Study, parts: Mapping[str, Any], proxies: Sequence[str]) -> list[str]:
    """Return what controls of the same size do: they say whether the choice of experts matters for this fault."""
    told = []
    for size in dict.fromkeys(_first(parts[label], "n_experts") for label in proxies if label != "dense"):
        alike = {name: part for name, part in parts.items() if _first(part, "n_experts") == size}
        plain = [name for name, part in alike.items() if _first(part, "method") not in (*INFORMED, "original", "dense")]
        if not plain:
            told.append(f"At {size} experts no uninformed control was run: nothing is said about the choice.")
            continue
        told.append(
            f"Controls at {size} experts: " + "; ".join(f"{name} {_seeds(alike[name])}" for name in plain) + "."
        )
    if "dense" in parts:
        told.append(f"The unrelated dense model: {_seeds(parts['dense'])}.")
    return told


def _false(study: Study, label: str) -> str:
    rate = where(study.false, model=label)["false_responses"]
    return f"Healthy against healthy, {rate.iloc[0]:.1%} of {label}'s pairs of runs are called a response."


def _origin(study: Study) -> str:
    mark = str(study.provenance.get("protocol_hash", ""))
    return f"From the fidelity study of the recorded runs (data/bench/FIDELITY.md, protocol {mark[:8]})."


def _row(study: Study, label: str, part: Any, level: str) -> dict[str, str]:
    false = where(study.false, model=label)["false_responses"]
    return {
        "proxy": label,
        "role": _role(study, label, part),
        "seeds": ", ".join(str(row["seed"]) for row in rows(part)),
        f"right fault, of {round(1 / study.chance(level))}": _right(part),
        "nearest": ", ".join(dict.fromkeys(part["nearest"])),
        "same way": _percent(part["direction"]),
        "also significant": _percent(part["found"]),
        "rank correlation": _number(part["rank"]),
        "with other faults": _number(part["rank_other"]),
        "onset shift": "–" if np.isnan(_mean(part["onset_difference"])) else f"{_mean(part['onset_difference']):+.1f}",
        "false responses": f"{false.iloc[0]:.1%}" if len(false) else "–",
    }


def _role(study: Study, label: str, part: Any) -> str:
    if label == study.protocol.original:
        return "ceiling"
    return "proxy" if _first(part, "method") == "cluster" else "control"


def _right(part: Any) -> str:
    """Runs without any effect and crashed ones count as misses, as in the study."""
    return f"{int((part['top1'] == 1).sum())} of {len(part)}"


def _seeds(part: Any) -> str:
    return f"{_right(part)} {'seed' if len(part) == 1 else 'seeds'}"


def _first(part: Any, name: str) -> Any:
    return part[name].iloc[0]


def _mean(column: Any) -> float:
    return float(column.mean()) if column.notna().any() else float("nan")


def _percent(column: Any) -> str:
    value = _mean(column)
    return "–" if np.isnan(value) else f"{value:.0%}"


def _number(column: Any) -> str:
    value = _mean(column)
    return "–" if np.isnan(value) else f"{value:.2f}"


def _shift(column: Any) -> str:
    value = _mean(column)
    if np.isnan(value):
        return "no lasting departure to compare onsets by"
    if abs(value) < 0.5:
        return "departs at the same step"
    return f"departs {abs(value):.1f} steps {'later' if value > 0 else 'earlier'} (mean)"
