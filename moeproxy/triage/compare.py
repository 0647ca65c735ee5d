"""Does a proxy show the same failure as the original? Same seeds, scale-free measures, controls, a verdict in
words.

How it is decided: `response` says what a response is and where thresholds come from, `agreement` holds the
measures, `verdict` the words. Everything here needs NumPy, SciPy and pandas only.

Axes: R scored seed, P pair of healthy runs, X signal, S step, W window.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from moeproxy.errors import ComparisonError
from moeproxy.files import provenance
from moeproxy.traces.signals import SIGNALS
from moeproxy.traces.trace import Trace
from moeproxy.triage.agreement import Interval, Marks, bootstrap, significant, squash
from moeproxy.triage.judge import Library, as_matrix, ceiling, judge, onsets
from moeproxy.triage.measured import Question, Responses, measure, respond, scored_pairs
from moeproxy.triage.response import Windows, columns_of, matrix
from moeproxy.triage.result import Comparison, Control, ProxyResult, Rules
from moeproxy.triage.runs import Runs
from moeproxy.triage.verdict import statements

__all__ = ["Comparison", "Control", "Interval", "ProxyResult", "Rules", "compare", "compare_all"]


def compare(
    traces: Sequence[Trace],
    fault: str,
    *,
    original: str = "original",
    calibration_seeds: Sequence[int] | None = None,
    scored_seeds: Sequence[int] | None = None,
    strength: float | None = None,
    window: int = 10,
    exclude: Sequence[str] = (),
    rules: Rules | None = None,
    bootstrap_seed: int = 0,
) -> Comparison:
    """Compare the original's and every proxy's response to one fault.

    Args:
        traces: runs of original and proxies, healthy and with this and other faults; the nearest fault is
            sought among all faults the original was run with.
        fault: id of the fault.
        original: model label of the original.
        calibration_seeds: seeds whose healthy runs set spreads and thresholds; at least two, three or more
            advised.
            Default: the original's healthy seeds that are not scored.
        scored_seeds: seeds that are judged. Default: the original's seeds with this fault that do not
            calibrate.
        strength: strength of the fault; needed when the traces hold several.
        window: steps in a window.
        exclude: signals to leave out, e.g. those that the fault changes by its definition.
        rules: what the verdict asks for.
        bootstrap_seed: seed of the bootstrap over scored seeds.

    Raises:
        ComparisonError: runs are missing, seeds overlap, or too few steps follow the onset.

    Example:
        >>> compare(load_dir("runs"), "update_freeze", calibration_seeds=[10, 11, 12], scored_seeds=[0, 1, 2])
        Comparison(update_freeze 1; cluster-16: reproduced, random-16-s0: partly)
    """
    runs = Runs.of(traces)
    chosen = _strength(runs, fault, strength)
    calibration, scored = _seeds(runs, original, fault, calibration_seeds, scored_seeds)
    onset = runs.onset(fault, chosen)
    seeds = (*calibration, *scored)
    steps_S = _steps(runs, original, seeds, onset, window)
    names, skipped = _names(_needed(runs, fault, chosen, original, seeds), steps_S, exclude)
    windows = Windows.after(onset, int(steps_S[-1]), window)
    question = Question(
        fault,
        chosen,
        onset,
        original,
        calibration,
        scored,
        names,
        steps_S,
        windows,
        rules or Rules(),
        bootstrap_seed,
    )
    return _answer(runs, question, skipped)


def compare_all(traces: Sequence[Trace], **options: Any) -> tuple[Comparison, ...]:
    """Compare every fault of the traces at every strength, with the options of `compare`."""
    runs = Runs.of(traces)
    asked = [(fault, strength) for fault in runs.faults for strength in runs.strengths(fault)]
    return tuple(compare(traces, fault, strength=strength, **options) for fault, strength in asked)


def _answer(runs: Runs, question: Question, skipped: list[tuple[str, str]]) -> Comparison:
    ours = measure(runs, question.original, question)
    proxies, without = _proxies(runs, question)
    library, left_out = _library(runs, ours, question)
    signs_XW = significant(ours.response_RXW, ours.spread.threshold, question.rules.replicate)
    marks = Marks.of(ours.response_RXW, signs_XW)
    results = tuple(judge(question, ours, theirs, library, marks) for theirs in proxies)
    results = tuple(sorted(results, key=lambda result: (-result.n_experts, result.method, result.model)))
    quiet_X = ~np.any([ours.moves_X, *(theirs.moves_X for theirs in proxies)], axis=0)
    onsets_R = onsets(ours, ours.seeds, marks, question) - question.onset
    return Comparison(
        fault=question.fault,
        strength=question.strength,
        onset=question.onset,
        original=question.original,
        calibration_seeds=question.calibration_seeds,
        scored_seeds=question.scored_seeds,
        windows=question.windows.bounds,
        signals=question.names,
        skipped=tuple(skipped + without + left_out),
        constant=tuple(np.array(question.names)[quiet_X].tolist()),
        visible=len(marks) > 0,
        significant=tuple(question.names[x] for x in marks.signals_N),
        response=as_matrix(ours.response_RXW.mean(0)),
        original_onset=bootstrap(onsets_R, question.bootstrap_seed),
        rank_ceiling=ceiling(ours, question.bootstrap_seed),
        control=ours.control,
        known_faults=tuple(library),
        proxies=results,
        statements=statements(len(marks) > 0, results, question.bootstrap_seed),
        notes=ours.notes,
        rules=question.rules,
        sources=ours.sources,
        provenance=_provenance(runs),
    )


def _proxies(runs: Runs, question: Question) -> tuple[list[Responses], list[tuple[str, str]]]:
    """Return the responses of every proxy, and the models that cannot be judged with the reason."""
    measured, without = [], []
    for model in runs.models:
        if model == question.original:
            continue
        try:
            measured.append(measure(runs, model, question))
        except ComparisonError as error:
            without.append((model, f"skipped: {error.found}"))
    return measured, without


def _library(runs: Runs, ours: Responses, question: Question) -> tuple[Library, list[tuple[str, str]]]:
    """Return the original's responses to every fault, at the asked strength or else the largest."""
    library: Library = {}
    left_out = []
    for fault in runs.faults:
        strength = question.strength if fault == question.fault else runs.strengths(fault)[-1]
        try:
            pairs = scored_pairs(runs, question.original, fault, strength, question.scored_seeds)
        except ComparisonError as error:
            left_out.append((fault, f"not among the known faults: {error.found}"))
            continue
        if (onset := runs.onset(fault, strength)) != question.onset:
            left_out.append((fault, f"not among the known faults: onset {onset}, not {question.onset}"))
            continue
        rows = squash(respond(pairs, ours.spread, question), ours.spread.threshold)
        library[fault] = dict(zip(pairs, rows, strict=True))
    return library, left_out


def _strength(runs: Runs, fault: str, strength: float | None) -> float:
    known = runs.strengths(fault)
    if not known:
        raise ComparisonError(f"no run with the fault {fault!r}", expected=f"one of {list(runs.faults)}")
    if strength is None and len(known) > 1:
        raise ComparisonError(
            f"{fault!r} was run at the strengths {list(known)}",
            expected="one of them",
            remedy="say strength=...",
        )
    if strength is not None and strength not in known:
        raise ComparisonError(f"{fault!r} was not run at strength {strength}", expected=f"one of {list(known)}")
    return next(iter(known)) if strength is None else strength


def _seeds(
    runs: Runs, original: str, fault: str, calibration: Sequence[int] | None, scored: Sequence[int] | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return calibration and scored seeds; what is not said is taken from the original's runs."""
    if scored is None:
        scored = [seed for seed in runs.seeds(original, fault) if seed not in set(calibration or ())]
    if calibration is None:
        calibration = [seed for seed in runs.seeds(original, None) if seed not in set(scored)]
    if both := sorted(set(calibration) & set(scored)):
        raise ComparisonError(
            f"seeds {both} both calibrate and are scored",
            expected="disjoint seeds",
            remedy="thresholds must come from runs that are not scored",
        )
    if len(set(calibration)) < 2 or not scored:
        raise ComparisonError(
            f"calibration seeds {list(calibration)}, scored seeds {list(scored)}",
            expected="at least two that calibrate and one that is scored",
            remedy=f"run {original!r} healthy with more seeds",
        )
    return tuple(dict.fromkeys(calibration)), tuple(dict.fromkeys(scored))


def _needed(runs: Runs, fault: str, strength: float, original: str, seeds: Sequence[int]) -> list[Trace]:
    """Return the original's runs that every compared signal must be logged in."""
    healthy = [runs.healthy(original, seed) for seed in seeds]
    pairs = [runs.pair(original, fault, strength, seed) for seed in seeds]
    faulty = [pair.faulty for pair in pairs if pair is not None]
    return [trace for trace in [*healthy, *faulty] if trace is not None]


def _steps(runs: Runs, original: str, seeds: Sequence[int], onset: int, window: int) -> np.ndarray:
    """Return the steps after the onset that all healthy runs of the original share."""
    healthy = [trace for seed in seeds if (trace := runs.healthy(original, seed)) is not None]
    if not healthy:
        raise ComparisonError(
            f"no healthy run of {original!r} with a seed of {list(seeds)}",
            expected="healthy runs to compare with",
            remedy="run them",
        )
    shared = set.intersection(*(set(trace.steps.index) for trace in healthy))
    steps_S = np.array(sorted(step for step in shared if step >= onset), dtype=np.int64)
    if len(steps_S) < window:
        raise ComparisonError(
            f"{len(steps_S)} steps after the onset at {onset}",
            expected=f"at least {window}",
            remedy="run longer, or compare with a smaller window",
        )
    return steps_S


def _names(
    traces: Sequence[Trace], steps_S: np.ndarray, exclude: Sequence[str]
) -> tuple[tuple[str, ...], list[tuple[str, str]]]:
    """Return the signals to compare, and those left out with the reason."""
    reasons = {name: _reason(name, traces, steps_S, exclude) for name, signal in SIGNALS.items() if signal.compared}
    names = tuple(name for name, reason in reasons.items() if not reason)
    if not names:
        raise ComparisonError("no signal is logged in all runs of the original", expected="at least one")
    return names, [(name, reason) for name, reason in reasons.items() if reason]


def _reason(name: str, traces: Sequence[Trace], steps_S: np.ndarray, exclude: Sequence[str]) -> str:
    if name in exclude:
        return "left out on request"
    if lost := [str(trace.provenance) for trace in traces if not columns_of(trace, name)]:
        return f"skipped: needs {name} (not logged in {lost[0]}{' and others' if len(lost) > 1 else ''})"
    broken = [trace for trace in traces if trace.provenance.healthy and np.isinf(matrix(trace, (name,), steps_S)).any()]
    return f"skipped: not finite in a healthy run ({broken[0].provenance})" if broken else ""


def _provenance(runs: Runs) -> dict[str, Any]:
    prints = {key[0]: trace.provenance.checkpoint_fingerprint for key, trace in runs.table.items()}
    return provenance(checkpoint_fingerprints=prints, n_traces=len(runs.table))
