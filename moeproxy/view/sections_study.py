"""The section of the report on the fidelity study: many faults, several models, controls side by side."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pandas as pd

from moeproxy.triage.study_frames import where
from moeproxy.triage.study_page import HEADS, main_proxy, unfound
from moeproxy.triage.study_result import Study
from moeproxy.view import figures_study as figures
from moeproxy.view.document import Block, Figure, Heading, Points, Section, Table, Text


def study_lead(study: Study | None) -> Iterable[str]:
    """Yield one sentence: how many faults the main proxy shows recognisably."""
    model = None if study is None else main_proxy(study)
    if study is None or model is None:
        return
    level = study.levels[0]
    (ours, *_), (middle, low, high) = (study.value(m, level, "top1") for m in (study.protocol.original, model))
    yield (
        f"Over {study.cells['fault'].nunique()} faults (level “{level}”), {model} points to the right one in "
        f"{middle:.0%} of the runs ({low:.0%} to {high:.0%}); the original, by its own other seeds, in {ours:.0%}; "
        f"chance is {study.chance(level):.0%}."
    )


def study_sections(study: Study | None) -> Iterable[Section]:
    """Return the section of the study; none without one, since the main job does not make it."""
    return () if study is None else (Section("Many faults: do the proxies respond alike?", tuple(_blocks(study))),)


def _blocks(study: Study) -> Iterable[Block]:
    yield Points(study.protocol.words())
    for level in study.levels:
        yield from _level(study, level)
    yield Table("Healthy runs judged like a fault", _false(study))
    left_out = pd.DataFrame(list(study.skipped), columns=pd.Index(["what", "why"]))
    if len(left_out):
        yield Table("Left out of the study", left_out, folded=True)
    facts = {"protocol": study.protocol.hash, **{k: v for k, v in study.provenance.items() if k.endswith("hash")}}
    yield Text(f"Hashes: {', '.join(f'{name} {value}' for name, value in facts.items())}.")


def _level(study: Study, level: str) -> Iterable[Block]:
    yield Heading(f"Faults at the level “{level}”")
    yield Figure("How often the right fault is found, with controls.", figures.retrieval(study, level))
    caption = "Measures, mean and 95% interval over faults and seeds"
    yield Table(caption, where(study.summary(), level=level).drop(columns="level").rename(columns=HEADS))
    gaps = study.differences
    if len(gaps) and level in set(gaps["level"]):
        yield Table("Proxy minus control", _gaps(where(gaps, level=level)), folded=True)
    yield Figure("What fidelity costs.", figures.cost_fidelity(study, level))
    model = main_proxy(study)
    if model is None or where(study.cells, model=model, level=level).empty:
        return
    yield Figure("Which fault each is taken for.", figures.confusion(study, model, level))
    missed = unfound(study, model, level)
    if len(missed):
        yield Table(f"Not found in every seed by {model}, and why", missed, folded=True)
    shown = _best(study, model, level)
    yield Figure("One fault, signal by signal.", figures.study_responses(study, shown, level))


def _best(study: Study, model: str, level: str) -> str:
    """Return the fault with the most significant signals on the original, of those that the proxy finds."""
    at = where(study.faults, model=model, level=level)
    return str(at.sort_values(["top1", "signals", "fault"], ascending=[False, False, True]).iloc[0]["fault"])


def _gaps(gaps: Any) -> pd.DataFrame:
    shown = ["proxy", "control", "measure", "mean", "low", "high", "better", "worse", "equal", "p_sign"]
    return gaps[shown].round(3).rename(columns={"p_sign": "p of sign test"})


def _false(study: Study) -> pd.DataFrame:
    at = study.false
    return pd.DataFrame(
        {
            "model": at["model"],
            "calibration runs": at["calibration_runs"],
            "pairs called a response": [f"{value:.1%}" for value in at["false_responses"]],
            "signal-windows beyond threshold": [f"{value:.1%}" for value in at["false_entries"]],
            "at other settings": [f"{value:.1%}" for value in at["other_settings"]],
        }
    ).replace("nan%", "–")
