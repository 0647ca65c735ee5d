"""Results of known content for the tests of postmortems."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

from moeproxy.places import data_dir
from moeproxy.triage.remedy_result import Remedy, Trial
from moeproxy.triage.reproduction import Candidate, Reproduction
from moeproxy.triage.severity import Severity
from moeproxy.view.actions import Action
from moeproxy.view.gather import Words, gather
from moeproxy.view.incident import Incident, incident, open_incidents
from moeproxy.view.report_input import ReportInput
from tests.triage.synthetic import FAULTS, run

ACTIONS = (
    Action("job ended", step=35, time="2026-11-30 03:10", kind="stopped"),
    Action("restored step 10", step=11, time="2026-11-30 03:40", kind="restored"),
    Action("loss scale lowered", step=11, time="2026-11-30 03:41", kind="changed"),
    Action("the pager rang", time="2026-11-30 03:02"),
)


def shipped(name: str) -> Path:
    """Return the path of a shipped log."""
    return data_dir() / "logs" / name


@cache
def resumed() -> Incident:
    """Return the run whose first attempt overflows at step 15 and whose second, from step 11 on, is healthy."""
    (found,) = open_incidents(shipped("verl_console.log"))
    return found


@cache
def poisoned() -> Incident:
    """Return the run whose quantities are NaN from step 15 on."""
    (found,) = open_incidents(shipped("trainer_state.json"))
    return found


@cache
def beside() -> Incident:
    """Return a run with a fault from step 20 on, judged beside eight healthy ones."""
    healthy = [run("original", seed, n_experts=32) for seed in range(100, 108)]
    broken = run("original", 0, n_experts=32, fault="quiet_update", effect=FAULTS["quiet_update"])
    return incident(broken, healthy, name="quiet & <odd>")


def severity(value: float) -> Severity:
    """Return a severity whose three parts are alike."""
    return Severity(value, value, value, {"updates": value})


def remedy() -> Remedy:
    """Return three trials: one kept, one without effect, one harmful; and one that did not end."""
    ill = severity(0.41)
    trials = (
        Trial("lower_rate", "mitigation", ill, severity(0.39), 0.011, False, False, False, "rolled back, no better"),
        Trial("skip_step", "mitigation", ill, severity(0.56), 0.011, False, True, False, "rolled back, worse"),
        Trial("lower_scale", "repair", ill, severity(0.004), 0.011, True, False, True, "kept"),
        Trial("restore", "repair", ill, None, 0.011, False, False, False, "failed: no snapshot"),
    )
    return Remedy("cluster-16", "gradient_overflow", 0, 15, ill, 0.011, trials, ("icepop",), 3.25)


def reproduction() -> Reproduction:
    """Return a failure that the proxy reproduces by the first of three candidates; of the last it has no run."""
    first = Candidate("gradient_overflow", "Gradient overflow", 0.87, 0.93, 1.0, 3, 0, ("grad_norm",), ("kl",), 1.1)
    second = Candidate("nan_poison", "NaN", 0.09, -0.21, 0.6, 2, 1, (), ("grad_norm",), 0.1)
    third = Candidate("kl_sign", "Sign of the KL", 0.04, math.nan, 1.0, 0, 0, (), (), 0.0)
    return Reproduction("cluster-16", 15, (first, second, third), 0.55, 0.0)


@cache
def everything() -> ReportInput:
    """Return a postmortem of the resumed run with a reproduction, a remedy, actions and notes."""
    words = Words("Overflow", "A. Author", ("We looked.\nThen we slept.", "It is over."), ACTIONS)
    return gather([resumed(), reproduction(), remedy()], words)
