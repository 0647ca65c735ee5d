"""The section of the report that says whether the proxies show the same failure, with every control."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd

from moeproxy.triage.agreement import Interval
from moeproxy.triage.result import (
    NOT_REPRODUCED,
    NOT_VISIBLE,
    PARTLY,
    REPRODUCED,
    Comparison,
    ProxyResult,
    Rules,
)
from moeproxy.view import figures
from moeproxy.view.document import Block, Figure, Heading, Points, Table, Text

SIGNS = {REPRODUCED: "●", PARTLY: "◐", NOT_REPRODUCED: "○", NOT_VISIBLE: "–"}
"""Signs beside the verdicts: a table can be read at a glance, without colour."""

_SAID = {**{verdict: verdict for verdict in SIGNS}, PARTLY: "partly reproduced"}

_HOW = (
    "A response is the difference of a broken and a healthy run of the same seed, in units of the spread "
    "between healthy seeds of the same model. A fault counts as reproduced when the proxy's significant "
    "signals move the same way, its responses rank like the original's beyond what a proxy without any "
    "response would give, it departs at about the same step, and the nearest of the original's faults is "
    "the right one. In the tables: “same direction” and “significant too” are shares of the original's significant "
    "signals; “no-response level” is the correlation that 95% of proxies without any response stay below; “onset "
    "shift” is given in steps, seed by seed; “right fault” is the share of seeds whose response is nearest to the "
    "original's response to the same fault; “false responses” is the share of healthy-against-healthy responses that "
    "count as significant."
)


def verdict_lead(comparisons: Sequence[Comparison]) -> Iterable[str]:
    """Yield one sentence a fault: which proxies reproduce it."""
    if not comparisons:
        yield "Not run: no fault was compared, so there is no verdict."
    for comparison in comparisons:
        if not comparison.visible:
            yield f"{name(comparison)}: not visible on the original, so no proxy can be judged by it."
            continue
        groups = {v: [p.model for p in comparison.proxies if p.verdict == v] for v in SIGNS}
        told = "; ".join(f"{_SAID[verdict]} by {', '.join(models)}" for verdict, models in groups.items() if models)
        yield f"{name(comparison)}: {told or 'no proxy was compared'}."


def verdict_blocks(comparisons: Sequence[Comparison]) -> Iterable[Block]:
    """Yield the blocks of the verdict section."""
    if not comparisons:
        yield Text("Not run: no fault was compared.", note=True)
        return
    yield Text(_HOW)
    if any(comparison.proxies for comparison in comparisons):
        caption = "How well each proxy's responses rank like the original's, with controls."
        yield Figure(caption, figures.agreement(comparisons))
    for comparison in comparisons:
        yield from _one(comparison)


def name(comparison: Comparison) -> str:
    """Return the fault, with its strength when that is not full."""
    full = comparison.strength == 1
    return comparison.fault if full else f"{comparison.fault} at strength {comparison.strength:g}"


def _one(comparison: Comparison) -> Iterable[Block]:
    yield Heading(f"{name(comparison)}, acting from step {comparison.onset}")
    if not comparison.proxies:
        yield Text("Not run: no proxy was compared.", note=True)
    else:
        caption = f"{name(comparison)}: verdict on every proxy, equal sizes together"
        yield Table(caption, pd.DataFrame([_row(comparison, proxy) for proxy in comparison.proxies]))
        yield Points(comparison.statements)
        reasons = [{"proxy": p.model, "verdict": _signed(p), "why": p.reason} for p in comparison.proxies]
        yield Table("Why, proxy by proxy", pd.DataFrame(reasons), folded=True)
    caption = "Response of each signal in each window after the onset; the original and at most five proxies."
    yield Figure(caption, figures.response_heatmap(comparison))
    facts = _facts(comparison)
    frame = pd.DataFrame({"what": list(facts), "value": [str(value) for value in facts.values()]})
    yield Table(f"How {name(comparison)} was judged", frame, folded=True)


def _row(comparison: Comparison, proxy: ProxyResult) -> dict[str, object]:
    return {
        "proxy": proxy.model,
        "experts": proxy.n_experts,
        "verdict": _signed(proxy),
        "same direction": _share(proxy.direction),
        "significant too": _share(proxy.found),
        "rank correlation": str(proxy.rank),
        "no-response level": round(proxy.rank_null_high, 2),
        "onset shift": _steps(proxy.onset_difference),
        f"right fault (chance {comparison.chance:.0%})": _share(proxy.retrieval),
        "false responses": f"{proxy.control.false_response_rate:.1%}",
        "runs": " + ".join(proxy.sources),
    }


def _facts(comparison: Comparison) -> dict[str, object]:
    control = comparison.control
    false = f"{control.false_response_rate:.1%} in {control.n_pairs} healthy pairs"
    notes = [f"{p.model}: {note}" for p in comparison.proxies for note in p.notes]
    left_out = [f"{what}: {reason}" for what, reason in comparison.skipped]
    return {
        "seeds that calibrate": ", ".join(map(str, comparison.calibration_seeds)),
        "seeds that are scored": ", ".join(map(str, comparison.scored_seeds)),
        "windows of steps": ", ".join(f"{start}–{stop - 1}" for start, stop in comparison.windows),
        "significant on the original, strongest first": ", ".join(comparison.significant) or "none",
        "threshold on the original, healthy spreads": round(control.threshold, 2),
        "false responses of the original": false,
        "signals found in healthy pairs (expected none)": control.false_signals,
        "first lasting departure of the original, steps after onset": str(comparison.original_onset),
        "rank correlation of the original with itself, between seeds": str(comparison.rank_ceiling),
        "faults the nearest was sought among": ", ".join((*comparison.known_faults, "healthy")),
        "asked for": _asked(comparison.rules),
        "constant in all runs, dropped": ", ".join(comparison.constant) or "none",
        "left out": "; ".join(left_out) or "none",
        "notes": "; ".join((*comparison.notes, *notes)) or "none",
    }


def _asked(rules: Rules) -> str:
    return (
        f"at least {rules.direction:.0%} same direction and {rules.found:.0%} significant on the proxy, rank "
        f"correlation above the {rules.null_quantile:.0%} quantile without response, onset within "
        f"{rules.onset_steps} steps and nearest fault right in {rules.replicate:.0%} of the seeds"
    )


def _signed(proxy: ProxyResult) -> str:
    return f"{SIGNS[proxy.verdict]} {proxy.verdict}"


def _share(interval: Interval) -> str:
    return "–" if np.isnan(interval.mean) else f"{interval.mean:.0%}"


def _steps(interval: Interval) -> str:
    # A minus zero would read like a direction.
    return ", ".join("none" if np.isnan(value) else f"{value:+.0f}" if value else "0" for value in interval.by_seed)
