"""ReportInput: the results a report is written from; every part is optional."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pandas as pd

from moeproxy.traces.trace import Trace
from moeproxy.triage.remedy_result import Remedy
from moeproxy.triage.reproduction import Reproduction
from moeproxy.triage.result import Comparison
from moeproxy.triage.study_result import Study
from moeproxy.view.actions import Action
from moeproxy.view.incident import Incident

if TYPE_CHECKING:  # these rooms import torch
    from moeproxy.experts.checkpoint import Checkpoint
    from moeproxy.experts.statistics import ExpertProfile
    from moeproxy.proxy.build import Proxy
    from moeproxy.proxy.plan import KeepPlan


@dataclass(frozen=True)
class ReportInput:
    """What a report is written from. A part that is None or empty is said to be "not run".

    Args:
        title: title of the page.
        summary: what was done, in a few sentences.
        checkpoint: the original.
        profile: how it uses its experts.
        plan: what the proxy keeps.
        proxy: the proxy on disk and its reload check.
        costs: column `model` (first row the original) and any of params, nbytes, seconds_per_step, peak_mb.
        accuracy: columns method, n_experts, accuracy, and optionally low, high.
        accuracy_original: accuracy of the original.
        accuracy_chance: accuracy of guessing.
        traces: runs to overlay; live and recorded ones are told apart by their provenance.
        overlay_models: models to overlay; by default the original and the first proxy.
        overlay_signals: signals to overlay.
        comparisons: one for each fault and strength.
        study: the fidelity study over many faults.
        incidents: runs that went wrong, judged.
        actions: what the authors did and saw.
        notes: what the authors have to say, a paragraph each.
        authors: their names.
        reproductions: failures laid over the runs of a proxy.
        remedies: what was tried against a failure on a model.
        seconds: (stage, seconds) of this run.
        limits: what the numbers do not show, in sentences; general ones are added.
        provenance: versions, command, time and whatever else belongs to the run.
        brief: leave out the sections of what was not run and name it in a sentence, instead of a section that says so.
    """

    title: str = "Does the proxy show the same failure?"
    summary: tuple[str, ...] = ()
    checkpoint: Checkpoint | None = None
    profile: ExpertProfile | None = None
    plan: KeepPlan | None = None
    proxy: Proxy | None = None
    costs: pd.DataFrame | None = None
    accuracy: pd.DataFrame | None = None
    accuracy_original: float | None = None
    accuracy_chance: float | None = None
    traces: tuple[Trace, ...] = ()
    overlay_models: tuple[str, ...] | None = None
    overlay_signals: tuple[str, ...] = ("policy_loss", "grad_norm")
    comparisons: tuple[Comparison, ...] = ()
    study: Study | None = None
    incidents: tuple[Incident, ...] = ()
    actions: tuple[Action, ...] = ()
    notes: tuple[str, ...] = ()
    authors: str = ""
    reproductions: tuple[Reproduction, ...] = ()
    remedies: tuple[Remedy, ...] = ()
    seconds: tuple[tuple[str, float], ...] = ()
    limits: tuple[str, ...] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict)
    brief: bool = False
