"""From numbers to words: the verdict on one proxy, and what baselines of equal size add to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import binomtest

from moeproxy.triage.agreement import Interval, bootstrap
from moeproxy.triage.result import (
    NOT_REPRODUCED,
    NOT_VISIBLE,
    PARTLY,
    REPRODUCED,
    ProxyResult,
    Rules,
)

UNINFORMED = ("random", "first")
"""Methods that look at nothing the experts do: the level that any proxy of this size reaches."""


@dataclass(frozen=True)
class Check:
    """One requirement of the verdict: whether it holds, and the numbers in words."""

    name: str
    holds: bool
    text: str


def checks(
    direction: Interval,
    found: Interval,
    rank: Interval,
    null_high: float,
    ceiling: Interval,
    without_strongest: float,
    onset: Interval,
    retrieval: Interval,
    retrieved: Sequence[str],
    rules: Rules,
) -> tuple[Check, ...]:
    """Return the four requirements of a reproduced fault."""
    moved = direction.mean >= rules.direction and found.mean >= rules.found
    same, clearly = _percent(direction.mean), _percent(found.mean)
    direction_text = f"{same} of the original's significant signals move the same way, {clearly} significantly"
    best = "" if np.isnan(ceiling.mean) else f", the original with itself reaches {ceiling.mean:.2f}"
    rest = "" if np.isnan(without_strongest) else f", {without_strongest:.2f} without the strongest signal"
    rank_text = f"rank correlation {rank}{rest} (a proxy without response stays below {null_high:.2f}{best})"
    right = retrieval.mean >= rules.replicate - 1e-9
    return (
        Check("direction", bool(moved), direction_text),
        Check("rank", bool(rank.mean > null_high), rank_text),
        _onset_check(onset, rules),
        Check("retrieval", bool(right), _retrieval_text(retrieval, retrieved)),
    )


def judge(visible: bool, requirements: Sequence[Check], n_seeds: int) -> tuple[str, str]:
    """Return verdict and reason."""
    if not visible:
        return NOT_VISIBLE, "no signal of the original moves beyond what healthy runs differ by"
    failed = [check for check in requirements if not check.holds]
    held = {check.name for check in requirements if check.holds}
    caution = " One seed only: an indication, not a result." if n_seeds == 1 else ""
    if not failed:
        return REPRODUCED, f"all four checks hold: {_join(requirements)}.{caution}"
    verdict = PARTLY if len(held) >= 2 and held & {"direction", "rank"} else NOT_REPRODUCED
    kept = [check for check in requirements if check.holds]
    rest = f" Holds: {_join(kept)}." if kept else ""
    return verdict, f"fails: {_join(failed)}.{rest}{caution}"


def statements(visible: bool, proxies: Sequence[ProxyResult], bootstrap_seed: int) -> tuple[str, ...]:
    """Return what the proxies of each size, baselines included, say together."""
    if not visible:
        return ("The original does not move beyond what healthy runs differ by: no proxy can be judged.",)
    sizes = sorted({result.n_experts for result in proxies}, reverse=True)
    groups = {size: [result for result in proxies if result.n_experts == size] for size in sizes}
    return tuple(text for size, group in groups.items() for text in _of_size(size, group, bootstrap_seed))


def _of_size(size: int, group: list[ProxyResult], seed: int) -> list[str]:
    told = [f"At {size} experts: {'; '.join(_method_verdicts(group))}."]
    uninformed = [result for result in group if result.method in UNINFORMED]
    informed = [result for result in group if result.method not in UNINFORMED]
    if not uninformed:
        return [
            *told,
            f"At {size} experts no random or first-K proxy was run: nothing is said about the choice.",
        ]
    told += _uninformed_text(size, informed, uninformed)
    return told + [_difference(result, uninformed, seed) for result in informed]


def _uninformed_text(size: int, informed: list[ProxyResult], uninformed: list[ProxyResult]) -> list[str]:
    well = [result for result in uninformed if result.verdict == REPRODUCED]
    chosen_well = any(result.verdict == REPRODUCED for result in informed)
    if well:
        count = f"{len(well)} of {len(uninformed)} uninformed proxies"
        how = "reproduce it as well" if chosen_well else "reproduce it, while no informed proxy does"
        return [
            f"At {size} experts {_kinds(well)} {how} ({count}): this fault does not show that the choice of "
            "experts matters."
        ]
    if chosen_well:
        return [f"At {size} experts no uninformed proxy reproduces it fully, an informed one does."]
    return []


def _difference(result: ProxyResult, uninformed: list[ProxyResult], seed: int) -> str:
    """Say whether a proxy's rank correlation exceeds the uninformed ones', seed by seed."""
    ours = dict(zip(result.seeds, result.rank.by_seed, strict=True))
    theirs = [dict(zip(other.seeds, other.rank.by_seed, strict=True)) for other in uninformed]
    shared = [s for s in result.seeds if any(s in other for other in theirs)]
    gaps = [ours[s] - float(np.mean([other[s] for other in theirs if s in other])) for s in shared]
    gap = bootstrap(np.array(gaps), seed)
    higher = sum(value > 0 for value in gaps)
    # A bootstrap of three seeds excludes zero as soon as they agree in sign; a sign test does not fool
    # itself.
    p = float(binomtest(higher, len(gaps)).pvalue)
    shown = ("higher" if higher > len(gaps) / 2 else "lower") if p <= 0.05 else "no difference shown"
    return (
        f"Rank correlation of {result.model} minus the uninformed proxies' mean: {gap}, higher in "
        f"{higher} of {len(gaps)} seeds (sign test p = {p:.2g}): {shown}."
    )


def _method_verdicts(group: list[ProxyResult]) -> list[str]:
    methods = dict.fromkeys(result.method for result in group)
    return [f"{method} {_count([r.verdict for r in group if r.method == method])}" for method in methods]


def _count(verdicts: list[str]) -> str:
    if len(verdicts) == 1:
        return verdicts[0]
    each = dict.fromkeys(verdicts)
    return ", ".join(f"{verdict} in {verdicts.count(verdict)} of {len(verdicts)}" for verdict in each)


def _kinds(results: list[ProxyResult]) -> str:
    names = {"random": "random proxies", "first": "first-K proxies"}
    return " and ".join(names[method] for method in dict.fromkeys(result.method for result in results))


def _onset_check(onset: Interval, rules: Rules) -> Check:
    seen = np.array(onset.by_seed)
    near = np.abs(seen) <= rules.onset_steps  # NaN, no departure, is not near
    if np.isnan(onset.mean):
        return Check("onset", False, "no lasting departure to compare")
    text = f"departs {_later(onset)} ({int(near.sum())} of {len(seen)} seeds within {rules.onset_steps} steps)"
    return Check("onset", bool(near.mean() >= rules.replicate - 1e-9), text)


def _later(onset: Interval) -> str:
    middle = float(np.nanmedian(onset.by_seed))  # one late seed must not hide the others
    if middle == 0:
        return "at the same step"
    steps = f"{abs(middle):g} step{'' if abs(middle) == 1 else 's'}"
    return f"{steps} {'later' if middle > 0 else 'earlier'} (median)"


def _retrieval_text(retrieval: Interval, retrieved: Sequence[str]) -> str:
    right = int(np.nansum(retrieval.by_seed))
    wrong = sorted({fault for fault, hit in zip(retrieved, retrieval.by_seed, strict=True) if not hit})
    instead = f", instead: {', '.join(wrong)}" if wrong else ""
    return f"nearest fault right in {right} of {len(retrieved)} seeds{instead}"


def _percent(share: float) -> str:
    return "none" if np.isnan(share) else f"{share:.0%}"


def _join(requirements: Sequence[Check]) -> str:
    return "; ".join(check.text for check in requirements)
