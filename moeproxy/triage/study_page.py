"""The page of a study for readers: question, protocol in words, tables, what is not found and why, limits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from moeproxy.triage.study_frames import rows, where
from moeproxy.triage.study_measures import NONE
from moeproxy.triage.study_protocol import HISTORY
from moeproxy.triage.study_result import Study

_SHOWN = (
    "top1",
    "top3",
    "detected",
    "top1_forced",
    "top1_consequences",
    "direction",
    "rank",
    "rank_other",
    "onset_difference",
)
HEADS = {
    "top1": "top-1",
    "top3": "top-3",
    "reciprocal_rank": "reciprocal rank",
    "top1_forced": "top-1, none not allowed",
    "top1_consequences": "top-1, consequences only",
    "rank": "rank correlation",
    "rank_other": "with other faults",
    "onset_difference": "onset shift, steps",
}
"""What measures are called in tables, where their name does not do."""


def page(study: Study) -> str:
    """Return the page as Markdown; every number comes from the study."""
    parts = [
        "# Do the proxies show the original's failures?",
        _question(study),
        "## Protocol",
        _points(study.protocol.words()),
        f"Declared in `moeproxy/triage/study_protocol.py`, hash `{study.protocol.hash}`. {HISTORY}",
        *(text for level in study.levels for text in _level(study, level)),
        "## Healthy runs called a response",
        _false(study),
        *_proxies(study),
        "## Limits",
        _points(_limits(study)),
        "## Left out",
        _points([f"{what}: {why}" for what, why in study.skipped] or ["nothing"]),
    ]
    return "\n\n".join(parts) + "\n"


def main_proxy(study: Study) -> str | None:
    """Return the largest proxy chosen by the method under test."""
    named = where(study.cells, method=study.protocol.method).sort_values("n_experts", ascending=False)
    return None if named.empty else str(named.iloc[0]["model"])


def unfound(study: Study, model: str, level: str) -> pd.DataFrame:
    """Return the faults that a model does not find in every seed, with the answers and the likely reason.

    The reason is the first that holds: the fault changes nothing on this model; it is not visible on the original
    (its other seeds share no significant signal); the run does not differ from healthy; the original's own runs are
    confused too; the responses look alike (the cosine with the wrong fault is larger).
    """
    ours = _by_name(study, level)
    missed = [row for row in rows(where(study.faults, model=model, level=level)) if row["top1"] < 1]
    told = [_reason(row, ours[row["fault"]], study, level) for row in missed]
    return pd.DataFrame(told, columns=pd.Index(["fault", "found", "answers", "why", "signals in common"]))


def common_signals(study: Study, level: str, one: str, other: str, count: int = 3) -> tuple[str, ...]:
    """Return the signals that move the same way on the original under two faults, those most alike first."""
    at = where(study.responses, model=study.protocol.original, level=level)
    left, right = (where(at, fault=fault).set_index(["signal", "window"])["mean"] for fault in (one, other))
    alike: Any = np.arcsinh(left) * np.arcsinh(right)
    alike = alike.groupby("signal").max().sort_values(ascending=False)
    return tuple(str(name) for name in alike.index[:count] if alike[name] > 1)


def _question(study: Study) -> str:
    faults, proxies = study.cells["fault"].nunique(), [m for m in study.labels if m != study.protocol.original]
    return (
        f"{faults} faults were injected into GRPO runs of the original and of {len(proxies)} smaller models "
        f"({', '.join(proxies)}), at {len(study.levels)} strengths ({', '.join(study.levels)}), with seeds "
        f"{', '.join(map(str, sorted(study.cells['seed'].unique())))}. Does a proxy respond as the original does, "
        "closely enough to tell which fault it is, and do proxies chosen otherwise, or any small model, do as well?"
    )


def _level(study: Study, level: str) -> Iterable[str]:
    yield f"## Faults at the level “{level}”"
    yield (
        f"Mean and 95 % interval (bootstrap over faults and seeds). Chance of top-1: {study.chance(level):.3f}. The "
        f"row “{study.protocol.original}” is the ceiling: the original found among its other seeds."
    )
    yield _table(_models(study, level))
    yield _states(study, level)
    gaps = study.differences
    if not gaps.empty and level in set(gaps["level"]):
        yield "Proxy minus control on the seeds that both have (better, worse: number of faults; p: sign test):"
        yield _table(_gaps(where(gaps, level=level)))
    yield "By family of faults, top-1:"
    yield _table(_families(study, level))


def _models(study: Study, level: str) -> pd.DataFrame:
    table = []
    for model in dict.fromkeys(where(study.models, level=level)["model"]):
        told = {HEADS.get(name, name): _interval(study.value(model, level, name)) for name in _SHOWN}
        table.append({"model": model, **told})
    return pd.DataFrame(table)


def _states(study: Study, level: str) -> str:
    odd = [row for row in rows(where(study.models, level=level, measure="top1")) if row["no_effect"] + row["crashed"]]
    told = [
        f"{r['model']}: {r['no_effect']} runs without any effect, {r['crashed']} crashed, of {r['runs']}" for r in odd
    ]
    return f"Runs that count as misses: {'; '.join(told) or 'none'}."


def _gaps(gaps: pd.DataFrame) -> pd.DataFrame:
    by = {(row["proxy"], row["control"], row["measure"]): row for row in rows(gaps)}
    table = []
    for proxy, control in dict.fromkeys(key[:2] for key in by):
        told: dict[str, object] = {"proxy": proxy, "control": control}
        for name in ("top1", "top1_forced", "rank"):
            one = by[proxy, control, name]
            told[f"{HEADS[name]} difference"] = _interval((one["mean"], one["low"], one["high"]))
            told[f"{HEADS[name]}: better, worse, p"] = f"{one['better']}, {one['worse']}, {one['p_sign']:.2g}"
        table.append(told)
    return pd.DataFrame(table)


def _families(study: Study, level: str) -> pd.DataFrame:
    found = rows(where(study.families, level=level))
    counts = {row["family"]: row["faults"] for row in found}
    table = []
    for model in dict.fromkeys(row["model"] for row in found):
        by = {row["family"]: _number(row["top1"]) for row in found if row["model"] == model}
        table.append({"model": model, **{f"{name} ({count})": by.get(name, "–") for name, count in counts.items()}})
    return pd.DataFrame(table)


def _false(study: Study) -> str:
    table = [
        {
            "model": row["model"],
            "calibration runs": row["calibration_runs"],
            "pairs called a response": _interval((row["false_responses"], row["low"], row["high"]), percent=True),
            "signal-windows beyond threshold": _percent(row["false_entries"]),
            "healthy at other settings called a response": _percent(row["other_settings"]),
        }
        for row in rows(study.false)
    ]
    return _table(pd.DataFrame(table))


def _proxies(study: Study) -> Iterable[str]:
    model = main_proxy(study)
    if model is None:
        return
    for level in study.levels:
        if where(study.faults, model=model, level=level).empty:
            continue
        yield f"## {model}, fault by fault, level “{level}”"
        yield _table(_by_fault(study, model, level))
        yield _confused(study, model, level)
        missed = unfound(study, model, level)
        yield f"### Not found in every seed by {model}, level “{level}”, and why"
        yield _table(missed) if len(missed) else "Every fault is found in every seed."


def _confused(study: Study, model: str, level: str, count: int = 8) -> str:
    """Say which faults are most often taken for which others, by this model and by the original."""
    told = []
    for label in dict.fromkeys((model, study.protocol.original)):
        wrong = [row for row in rows(where(study.cells, model=label, level=level)) if row["top1"] == 0]
        pairs = Counter((row["fault"], row["nearest"]) for row in wrong).most_common(count)
        named = ", ".join(f"{fault} for {taken} ({n})" for (fault, taken), n in pairs)
        told.append(f"Taken for another by {label}, number of runs: {named or 'none'}.")
    return "\n\n".join(told)


def _by_name(study: Study, level: str) -> dict[str, dict[str, Any]]:
    return {row["fault"]: row for row in rows(where(study.faults, model=study.protocol.original, level=level))}


def _by_fault(study: Study, model: str, level: str) -> pd.DataFrame:
    ours = _by_name(study, level)
    at = where(study.faults, model=model, level=level).sort_values(["family", "fault"])
    table = [
        {
            "family": row["family"],
            "fault": row["fault"],
            "top-1": _number(row["top1"]),
            "top-1 of the original": _number(ours[row["fault"]]["top1"]),
            "answers by seed": row["answers"],
            "direction": _number(row["direction"]),
            "rank correlation": _number(row["rank"]),
            "onset shift": _number(row["onset_difference"]),
            "significant signals": _number(row["signals"]),
        }
        for row in rows(at)
    ]
    return pd.DataFrame(table)


def _reason(row: dict[str, Any], ours: dict[str, Any], study: Study, level: str) -> tuple[str, str, str, str, str]:
    fault, answers = str(row["fault"]), str(row["answers"])
    wrong = [name for name in dict.fromkeys(answers.split(", ")) if name not in (fault, NONE)]
    shared = common_signals(study, level, fault, wrong[0]) if wrong else ()
    return (fault, _number(row["top1"]), answers, _why(row, ours, wrong), ", ".join(shared) or "–")


def _why(row: dict[str, Any], ours: dict[str, Any], wrong: Sequence[str]) -> str:
    if row["status"] == "no effect":
        return "it changes nothing on this model"
    if ours["signals"] == 0:
        return "not visible on the original: no signal moves in all of its other seeds"
    if row["detected"] < 0.5:
        return "the runs do not differ from healthy"
    if not wrong:
        return "some seeds do not differ from healthy"
    if ours["top1"] < 1:
        return "looks alike on the original too: its own runs are confused"
    return "looks alike on the proxy only"


def _limits(study: Study) -> Iterable[str]:
    seeds = study.cells["seed"].nunique()
    yield f"{seeds} scored seeds: intervals over seeds are coarse, most of their width comes from the faults."
    yield (
        "A testbed of tiny models on arithmetic and a calculator. It says how the method behaves, not how faithful a "
        "proxy of a large model is."
    )
    yield (
        "The faults are those of the catalogue, injected cleanly at a known step, one at a time; retrieval chooses "
        "among them and says nothing of faults outside of it."
    )
    yield (
        "Controls have fewer calibration runs, hence wider thresholds and more answers “none”; “none not allowed” does "
        "not depend on that."
    )
    yield (
        "Pairs of one seed are equal up to the onset, healthy pairs of different seeds are not: false responses are "
        "measured on the harder comparison, so thresholds are wide and subtle faults are missed rather than invented."
    )
    yield "Signals that a fault writes into move on any model; “consequences only” shows what is left without them."


def _interval(value: tuple[float, float, float], percent: bool = False) -> str:
    shown = _percent if percent else _number
    middle, low, high = value
    if np.isnan(middle):
        return "–"
    return shown(middle) + ("" if np.isnan(low) else f" [{shown(low)}, {shown(high)}]")


def _number(value: float) -> str:
    return "–" if pd.isna(value) else f"{value:.2f}"


def _percent(value: float) -> str:
    return "–" if pd.isna(value) else f"{value:.1%}"


def _points(sentences: Iterable[str]) -> str:
    return "\n".join(f"- {sentence}" for sentence in sentences)


def _table(frame: pd.DataFrame) -> str:
    lines = [[str(name) for name in frame.columns], ["---"] * len(frame.columns)]
    lines += [[str(value).replace("|", "\\|") for value in row] for row in frame.astype(object).to_numpy().tolist()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
