"""Comparison: does a proxy show the failure that the original shows? Numbers, controls, words."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from moeproxy.errors import ComparisonError
from moeproxy.files import atomic_file
from moeproxy.triage.agreement import Interval
from moeproxy.triage.jsonable import plain

FORMAT = "moeproxy.comparison"
VERSION = 1
REPRODUCED, PARTLY, NOT_REPRODUCED = "reproduced", "partly", "not reproduced"
NOT_VISIBLE = "fault not visible on the original"

Matrix = tuple[tuple[float, ...], ...]
"""Signals x windows."""


@dataclass(frozen=True)
class Rules:
    """What the verdict asks for. Fixed before any run is scored; the data only set the healthy levels.

    Args:
        alpha: share of healthy-against-healthy responses that may pass the threshold of significance.
        replicate: share of the scored seeds in which a response must repeat.
        persist: consecutive steps that a departure must last.
        direction: least share of significant signals that move the same way.
        found: least share of significant signals that are significant on the proxy too.
        null_quantile: quantile of a non-responding proxy's rank correlation that must be exceeded.
        onset_steps: largest difference of the onsets, in steps.
    """

    alpha: float = 0.01
    replicate: float = 2 / 3
    persist: int = 3
    direction: float = 0.8
    found: float = 0.5
    null_quantile: float = 0.95
    onset_steps: int = 5


@dataclass(frozen=True)
class Control:
    """What healthy runs of one model give where nothing is to be found.

    Args:
        threshold: |response| that counts as significant, in healthy spreads; from calibration seeds.
        false_response_rate: share of healthy-against-healthy entries beyond it, in pairs with a scored seed.
        n_pairs: number of those pairs.
        false_signals: signals that the rule of significance finds in healthy pairs (expected: none).
    """

    threshold: float
    false_response_rate: float
    n_pairs: int
    false_signals: int


@dataclass(frozen=True)
class ProxyResult:
    """One proxy against the original.

    Args:
        model: label of the proxy.
        method: how its experts were chosen.
        n_experts: experts kept in each layer.
        verdict: "reproduced", "partly", "not reproduced" or "fault not visible on the original".
        reason: why, with the numbers.
        seeds: scored seeds.
        direction: share of the original's significant signals that move the same way (chance 0.5).
        found: share of them that are significant, same way, on the proxy.
        rank: Spearman correlation of the two response vectors.
        rank_without_strongest: the same without the original's strongest signal.
        rank_null_high: correlation that a non-responding proxy exceeds in 1 - `Rules.null_quantile` of cases.
        rank_null_median: its median.
        onset_difference: first lasting departure, proxy minus original, in steps.
        retrieval: share of seeds whose nearest fault of the original is the right one.
        retrieved: the nearest fault, seed by seed.
        control: healthy-against-healthy control of this proxy.
        response: mean response over the seeds, signals x windows, in healthy spreads.
        sources: where its runs come from: "live", "recorded", "file".
        notes: what a reader must know, e.g. signals that were skipped.
    """

    model: str
    method: str
    n_experts: int
    verdict: str
    reason: str
    seeds: tuple[int, ...]
    direction: Interval
    found: Interval
    rank: Interval
    rank_without_strongest: float
    rank_null_high: float
    rank_null_median: float
    onset_difference: Interval
    retrieval: Interval
    retrieved: tuple[str, ...]
    control: Control
    response: Matrix
    sources: tuple[str, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """One fault on the original and on every proxy.

    Args:
        fault: id of the fault.
        strength: its strength.
        onset: step from which it acts.
        original: label of the original.
        calibration_seeds: seeds that set spreads and thresholds.
        scored_seeds: seeds that are judged.
        windows: [start, stop) of each window of steps.
        signals: signals compared.
        skipped: signals or models left out, each with the reason.
        constant: signals that do not move in any run, hence dropped.
        visible: whether the original shows the fault.
        significant: signals that move significantly on the original, strongest first.
        response: the original's mean response, signals x windows, in healthy spreads.
        original_onset: first lasting departure of the original, in steps after the onset.
        rank_ceiling: rank correlation of the original with itself between seeds: what to expect at best.
        control: healthy-against-healthy control of the original.
        known_faults: faults among which the nearest is sought; "healthy" is one more answer.
        proxies: one result a proxy, larger ones first.
        statements: what follows, in sentences.
        notes: what a reader must know about the runs.
        rules: what the verdict asked for.
        sources: where the original's runs come from.
        provenance: versions, command, time, checkpoint fingerprints.
    """

    fault: str
    strength: float
    onset: int
    original: str
    calibration_seeds: tuple[int, ...]
    scored_seeds: tuple[int, ...]
    windows: tuple[tuple[int, int], ...]
    signals: tuple[str, ...]
    skipped: tuple[tuple[str, str], ...]
    constant: tuple[str, ...]
    visible: bool
    significant: tuple[str, ...]
    response: Matrix
    original_onset: Interval
    rank_ceiling: Interval
    control: Control
    known_faults: tuple[str, ...]
    proxies: tuple[ProxyResult, ...]
    statements: tuple[str, ...]
    notes: tuple[str, ...]
    rules: Rules
    sources: tuple[str, ...]
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @property
    def chance(self) -> float:
        """Share of right answers by guessing among the known faults and "healthy"."""
        return 1 / (len(self.known_faults) + 1)

    def proxy(self, model: str) -> ProxyResult:
        """Return the result of one proxy.

        Raises:
            ComparisonError: no proxy of this label was compared.
        """
        for result in self.proxies:
            if result.model == model:
                return result
        labels = ", ".join(result.model for result in self.proxies)
        raise ComparisonError(f"no result for {model!r}", expected=f"one of {labels or 'none at all'}")

    def to_frame(self) -> pd.DataFrame:
        """Return one row a proxy: verdict, measures, intervals, controls; equal sizes stand together."""
        return pd.DataFrame([_row(self, result) for result in self.proxies])

    def save(self, path: str | Path) -> Path:
        """Write the comparison as JSON, atomically, and return its path."""
        target = Path(path)
        text = json.dumps({"format": FORMAT, "version": VERSION, **plain(asdict(self))}, indent=1, default=str)
        with atomic_file(target) as temporary:
            temporary.write_text(text, encoding="utf-8")
        return target

    @staticmethod
    def load(path: str | Path) -> Comparison:
        """Read a comparison.

        Raises:
            ComparisonError: the file is absent, cut short, no comparison, or of another version.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            kind, version = data.pop("format"), data.pop("version")
            if (kind, version) == (FORMAT, VERSION):
                return _restored(data)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ComparisonError(
                f"unreadable ({error})",
                where=path,
                expected="a file of Comparison.save",
                remedy="compare again",
            ) from error
        raise ComparisonError(
            f"format {kind!r}, version {version!r}",
            where=path,
            expected=f"{FORMAT}, version {VERSION}",
            remedy="compare again",
        )

    def __repr__(self) -> str:
        verdicts = ", ".join(f"{result.model}: {result.verdict}" for result in self.proxies)
        return f"Comparison({self.fault} {self.strength:g}; {verdicts or 'no proxies'})"

    def _repr_html_(self) -> str:
        said = "".join(f"<li>{html.escape(text)}</li>" for text in self.statements)
        table = pd.DataFrame([_short_row(self, result) for result in self.proxies]).to_html(index=False, border=0)
        return f"<p><strong>{html.escape(self.fault)}</strong></p><ul>{said}</ul>{table}"


def _row(comparison: Comparison, result: ProxyResult) -> dict[str, object]:
    return {
        "fault": comparison.fault,
        "n_experts": result.n_experts,
        "method": result.method,
        "model": result.model,
        "verdict": result.verdict,
        **_columns("direction", result.direction),
        **_columns("found", result.found),
        **_columns("rank", result.rank),
        "rank_without_strongest": result.rank_without_strongest,
        "rank_null_high": result.rank_null_high,
        **_columns("onset_difference", result.onset_difference),
        **_columns("retrieval", result.retrieval),
        "chance": comparison.chance,
        "false_response_rate": result.control.false_response_rate,
        "seeds": len(result.seeds),
        "source": " + ".join(result.sources),
    }


def _short_row(comparison: Comparison, result: ProxyResult) -> dict[str, object]:
    """Return what fits the width of a notebook; `Comparison.to_frame` has everything."""
    right = sum(name == comparison.fault for name in result.retrieved)
    return {
        "proxy": result.model,
        "verdict": result.verdict,
        "same direction": f"{100 * result.direction.mean:.0f} %",
        "significant too": f"{100 * result.found.mean:.0f} %",
        "rank correlation": str(result.rank),
        "no response": f"{result.rank_null_high:.2f}",
        "right fault": f"{right} of {len(result.retrieved)}",
        "runs": " + ".join(result.sources),
    }


def _columns(name: str, interval: Interval) -> dict[str, float]:
    return {name: interval.mean, f"{name}_low": interval.low, f"{name}_high": interval.high}


def _restored(data: dict[str, Any]) -> Comparison:
    intervals = {name: _interval(data[name]) for name in ("original_onset", "rank_ceiling")}
    proxies = tuple(_proxy(item) for item in data["proxies"])
    provenance = data.pop("provenance")
    parts = {"control": _control(data["control"]), "rules": Rules(**data["rules"]), "proxies": proxies}
    rest: dict[str, Any] = {name: _tuples(value) for name, value in data.items()}
    rest |= intervals | parts | {"response": _floats(data["response"]), "provenance": provenance}
    return Comparison(**rest)


def _proxy(data: dict[str, Any]) -> ProxyResult:
    names = ("direction", "found", "rank", "onset_difference", "retrieval")
    intervals = {name: _interval(data[name]) for name in names}
    numbers = {name: _float(value) for name, value in data.items() if name.startswith("rank_")}
    parts = {"control": _control(data["control"]), "response": _floats(data["response"])}
    rest: dict[str, Any] = {name: _tuples(value) for name, value in data.items()}
    rest |= intervals | numbers | parts
    return ProxyResult(**rest)


def _interval(data: dict[str, Any]) -> Interval:
    return Interval(_float(data["mean"]), _float(data["low"]), _float(data["high"]), _floats(data["by_seed"]))


def _control(data: dict[str, Any]) -> Control:
    rate = _float(data["false_response_rate"])
    return Control(data["threshold"], rate, data["n_pairs"], data["false_signals"])


def _float(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _floats(values: list[Any]) -> Any:
    return tuple(_floats(item) if isinstance(item, list) else _float(item) for item in values)


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value
