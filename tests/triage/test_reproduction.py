"""What is said of a reproduction: which candidate ranks first, and which one matches best where that is another."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from moeproxy.triage.reproduction import Candidate, Reproduction

NONE = math.nan
LIMIT = "95 % of its runs with faults that are no candidates stay below"


def candidate(fault: str, match: float, n_recorded: int = 2) -> Candidate:
    return Candidate(fault, fault.upper(), 0.5, match, 1.0, n_recorded, 0, (), (), 0.0)


def result(background: float, *matches: float) -> Reproduction:
    named = zip("abc", matches, strict=False)
    ran = tuple(candidate(name, match, 0 if math.isnan(match) else 2) for name, match in named)
    return Reproduction("small", 15, ran, background, 0.0)


@pytest.mark.parametrize(
    ("background", "matches", "said"),
    [
        (NONE, (0.9, 0.4), "small matches best with a (0.90); of other faults too few are known."),
        (
            *(NONE, (0.9, 0.96)),
            "a ranks first overall (match 0.90 with small); b matches best (0.96); of other faults too few are known.",
        ),
        (
            *(NONE, (NONE, 0.7, 0.2)),
            "a ranks first, but small has no run with it that can be compared; b matches best (0.70); "
            "of other faults too few are known.",
        ),
        (
            *(0.5, (NONE, 0.7)),
            f"a ranks first, but small has no run with it that can be compared; b matches best (0.70; {LIMIT} 0.50).",
        ),
        (0.5, (0.9, 0.4), f"small shows the failure when a is injected (match 0.90; {LIMIT} 0.50)."),
        (
            *(0.5, (0.9, NONE, 0.96)),
            f"small shows the failure when a is injected (match 0.90; {LIMIT} 0.50); c matches best (0.96).",
        ),
        (0.5, (0.4, 0.3), f"small does not show the failure by a (match 0.40; {LIMIT} 0.50)."),
        (
            *(0.5, (0.4, 0.6)),
            f"small does not show the failure by a (match 0.40; {LIMIT} 0.50); b matches best (0.60).",
        ),
        (0.5, (0.9, 0.9), f"small shows the failure when a is injected (match 0.90; {LIMIT} 0.50)."),
        (0.5, (NONE, NONE), "small has no run with any candidate."),
    ],
)
def test_the_first_sentence_is_true_of_all_candidates(background: float, matches: tuple[float, ...], said: str) -> None:
    assert result(background, *matches).sentences[0] == said


def test_runs_that_share_no_signal_are_not_passed_over() -> None:
    found = Reproduction("small", 15, (candidate("a", NONE),), 0.5, 0.0)
    assert found.sentences[0] == "small has no run with any candidate that can be compared."
    assert "no signal to match with 2 recorded runs" in found.sentences[1]
    assert not found.reproduced


def test_the_best_match_is_found_wherever_it_ranks() -> None:
    best = result(0.5, NONE, 0.4, 0.6).best
    assert best is not None
    assert best.fault == "c"
    assert result(0.5, NONE).best is None


def test_an_unknown_failure_stays_unknown_whatever_the_proxy_shows(tmp_path: Path) -> None:
    found = replace(result(0.5, 0.9, 0.4), unknown="Unknown: it is like no recorded fault.")
    first, second, *_ = found.sentences
    assert first.startswith("Unknown: it is like no recorded fault. Among the nearest: small shows the failure")
    assert "confidence" not in second
    assert "though the trace is like none of them" in second
    assert Reproduction.load(found.save(tmp_path / "a.json")).sentences == found.sentences


def test_the_level_is_said_to_be_that_of_the_best_of_as_many() -> None:
    found = replace(result(0.5, 0.9, 0.4), choices=5)
    assert (
        "the best of 5 runs with faults that are no candidates stays below 0.50 in 95 % of draws" in found.sentences[0]
    )
