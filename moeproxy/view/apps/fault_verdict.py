"""The verdict of the fault panel: does the proxy show the same failure, beside its controls?

`moeproxy.triage.compare` asks for one onset. Where the seeds' onsets differ, every group of seeds with one onset is
compared by itself, on its own steps, and the table has a row for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import pandas as pd

from moeproxy.errors import ComparisonError
from moeproxy.traces.trace import Trace
from moeproxy.triage.compare import Comparison, compare
from moeproxy.triage.result import ProxyResult
from moeproxy.view.apps.fault_runs import Asked

BY_DEFINITION: Mapping[str, tuple[str, ...]] = {"update_freeze": ("update_norm",)}
"""Signals that a fault sets directly: they would count as agreement on any model."""


@dataclass(frozen=True)
class Verdict:
    """What the runs say, for one fault, strength and set of seeds.

    Args:
        sentences: the answer.
        rows: a row for each proxy and group of seeds, those that are drawn first, then the controls.
        comparisons: one for each onset.
        missing: why there is none for some seeds.
    """

    sentences: tuple[str, ...]
    rows: pd.DataFrame = field(default_factory=pd.DataFrame)
    comparisons: tuple[Comparison, ...] = ()
    missing: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The answer in one piece."""
        return " ".join(self.sentences)


def judge(
    asked: Asked,
    healthy: Sequence[Trace],
    broken: Sequence[Trace],
    others: Callable[[int, tuple[int, ...]], Iterable[Trace]] = lambda onset, seeds: (),
) -> Verdict:
    """Compare all proxies with the original.

    Args:
        asked: fault, strength, and the onset of every seed.
        healthy: finished healthy runs of all models at equal settings.
        broken: finished runs of all models with the fault; those of other strengths, seeds, onsets are passed over.
        others: returns the original's runs with other faults that act from an onset, for some seeds: the nearest
            fault is sought among them.
    """
    comparisons, missing = [], []
    for onset, seeds in asked.by_onset.items():
        mine = [trace for trace in broken if _asked_for(trace, asked, onset, seeds)]
        if lacks := [label for label in asked.models if not any(t.provenance.model == label for t in mine)]:
            which = f"{' or '.join(lacks)} with {asked.fault} from step {onset}"
            missing.append(f"{_seeds(seeds)}: no finished run of {which}")
        if asked.models[0] in lacks:
            continue
        traces = [*healthy, *mine, *others(onset, seeds)]
        try:
            comparisons.append(_compare(asked, traces, seeds))
        except ComparisonError as error:
            missing.append(f"{_seeds(seeds)}: {error.found}; expected {error.expected or 'something else'}")
    rows = [_row(asked, one, result) for one in comparisons for result in _in_order(asked, one)]
    told = (*_sentences(asked, comparisons), *(f"No verdict for {reason}." for reason in missing))
    return Verdict(told, pd.DataFrame(rows), tuple(comparisons), tuple(missing))


def _compare(asked: Asked, traces: Sequence[Trace], seeds: tuple[int, ...]) -> Comparison:
    return compare(
        traces,
        asked.fault,
        strength=asked.strength,
        scored_seeds=seeds,
        exclude=BY_DEFINITION.get(asked.fault, ()),
    )


def _asked_for(trace: Trace, asked: Asked, onset: int, seeds: tuple[int, ...]) -> bool:
    run = trace.provenance
    return (run.fault, run.strength, run.onset) == (asked.fault, asked.strength, onset) and run.seed in seeds


def _in_order(asked: Asked, comparison: Comparison) -> list[ProxyResult]:
    drawn = [result for label in asked.models for result in comparison.proxies if result.model == label]
    return [*drawn, *(result for result in comparison.proxies if result not in drawn)]


def _sentences(asked: Asked, comparisons: Sequence[Comparison]) -> list[str]:
    """Return the answer for every proxy that is drawn, and what the healthy control gave."""
    if not comparisons:
        return []
    if not any(one.visible for one in comparisons):
        return ["The original does not move beyond what its healthy runs differ by: there is nothing to reproduce."]
    told = []
    for label in asked.models[1:]:
        results = [(one, result) for one in comparisons for result in one.proxies if result.model == label]
        told += [_told(one, result, len(results) > 1) for one, result in results]
    told += _controls(asked, comparisons)
    rates = [one.control.false_response_rate for one in comparisons]
    told.append(f"Healthy against healthy, {max(rates):.1%} of the original's responses pass the threshold.")
    return told


def _told(comparison: Comparison, result: ProxyResult, several: bool) -> str:
    where = f" ({_seeds(comparison.scored_seeds)})" if several else ""
    return f"{result.model}{where}: {result.verdict}; {result.reason.rstrip('.')}."


def _controls(asked: Asked, comparisons: Sequence[Comparison]) -> list[str]:
    """Return what is said of all proxies of the sizes drawn, the uninformed ones among them."""
    sizes = {result.n_experts for one in comparisons for result in one.proxies if result.model in asked.models}
    starts = tuple(f"At {size} experts" for size in sizes)
    return list(dict.fromkeys(text for one in comparisons for text in one.statements if text.startswith(starts)))


def _row(asked: Asked, comparison: Comparison, result: ProxyResult) -> dict[str, str]:
    right = sum(name == asked.fault for name in result.retrieved)
    known = len(comparison.known_faults)
    return {
        "proxy": result.model,
        "role": "proxy" if result.method == "cluster" else "control",
        "seeds": ", ".join(map(str, result.seeds)),
        "verdict": result.verdict,
        "same way": _percent(result.direction.mean),
        "also significant": _percent(result.found.mean),
        "rank correlation": f"{result.rank} (none: {result.rank_null_high:.2f})",
        "right fault": f"{right} of {len(result.retrieved)}, among {known}",
        "false responses": f"{result.control.false_response_rate:.1%}",
        "onset": str(comparison.onset),
        "runs": " + ".join(result.sources),
    }


def _seeds(seeds: Sequence[int]) -> str:
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"


def _percent(share: float) -> str:
    return "–" if share != share else f"{share:.0%}"
