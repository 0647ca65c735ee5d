"""The sections of the report: which blocks are made of which results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from moeproxy.view import figures
from moeproxy.view.document import Block, Document, Figure, Points, Section, Table, Text, records
from moeproxy.view.figures_models import MEASURES
from moeproxy.view.figures_overlay import listed
from moeproxy.view.report_input import ReportInput
from moeproxy.view.sections_incident import (
    incident_data,
    incident_facts,
    incident_lead,
    incident_limits,
    incident_sections,
)
from moeproxy.view.sections_outcome import outcome_data, outcome_lead, outcome_limits, outcome_sections
from moeproxy.view.sections_study import study_lead, study_sections
from moeproxy.view.sections_verdict import verdict_blocks, verdict_lead

_LIMITS = (
    "Intervals come from a bootstrap over few seeds and are coarse; read them as orders of magnitude.",
    "Thresholds come from healthy runs that are not scored; few of them leave the thresholds uncertain, "
    "which is why the share of false responses stands beside every verdict.",
)


def compose(result: ReportInput) -> Document:
    """Return the whole report."""
    general = {
        "What was done": (_done(result), bool(result.summary or result.seconds)),
        "Model and cost": (_model(result), result.checkpoint is not None or result.costs is not None),
        "Experts and what is kept": (_experts(result), result.profile is not None or result.plan is not None),
        "Accuracy by way of choosing": (_accuracy(result), result.accuracy is not None),
        "Runs: loss and gradient norm": (_runs(result), any(t.provenance.fault for t in result.traces)),
        "Verdict and controls": (verdict_blocks(result.comparisons), bool(result.comparisons)),
    }
    shown = [Section(title, tuple(blocks)) for title, (blocks, given) in general.items() if given or not result.brief]
    absent = [title for title, (_, given) in general.items() if not given] if result.brief else []
    usual = () if result.brief and not result.comparisons else _LIMITS
    limits = (*result.limits, *incident_limits(result), *outcome_limits(result), *usual)
    last = [Section("Limits", (Points(limits),))] if limits else []
    last.append(Section("Provenance", tuple(_provenance(result, absent))))
    sections = (*incident_sections(result), *outcome_sections(result), *shown, *study_sections(result.study), *last)
    verdict = () if result.brief and not result.comparisons else verdict_lead(result.comparisons)
    lead = (*incident_lead(result), *outcome_lead(result), *verdict, *study_lead(result.study))
    return Document(result.title, lead, sections, _data(result))


def _done(result: ReportInput) -> Iterable[Block]:
    yield from (Text(sentence) for sentence in result.summary)
    live, recorded = (_labels(result, kind) for kind in ("live", "recorded"))
    yield Text(f"Live in this run: {live or 'nothing'}. Recorded earlier and shipped: {recorded or 'nothing'}.")
    if result.seconds:
        frame = pd.DataFrame(list(result.seconds), columns=pd.Index(["stage", "seconds"]))
        yield Table("Time of each stage of this run", frame.round(1))


def _labels(result: ReportInput, source: str) -> str:
    runs = [trace.provenance for trace in result.traces if trace.provenance.source == source]
    models = dict.fromkeys(run.model for run in runs)
    told = [f"{model} ({sum(run.model == model for run in runs)} runs)" for model in models]
    return ", ".join(told)


def _model(result: ReportInput) -> Iterable[Block]:
    if result.checkpoint is None:
        yield _not_run("no checkpoint was opened")
    else:
        yield Table("The original", _facts(_checkpoint_facts(result.checkpoint)))
    if result.proxy is not None:
        check = result.proxy.check
        said = "not checked" if check is None else f"checked by reload: {check.verdict}"
        plan = result.proxy.plan
        yield Text(f"The proxy keeps {plan.n_keep} experts a layer, chosen by {plan.method}; {said}.")
    if result.costs is None:
        yield _not_run("cost was not measured")
    else:
        yield Table("Cost of original and proxies", _named(result.costs))
        yield Figure("What original and proxies cost.", figures.cost_bars(result.costs))


def _named(costs: pd.DataFrame) -> pd.DataFrame:
    shown = costs.assign(nbytes=costs["nbytes"] / 1e6) if "nbytes" in costs else costs
    names = {column: MEASURES.get(str(column), str(column).replace("_", " ")) for column in shown.columns}
    return shown.rename(columns=names)


def _checkpoint_facts(checkpoint: Any) -> dict[str, object]:
    return {
        "family": checkpoint.family.model_type,
        "layers (with experts)": f"{checkpoint.n_layers} ({len(checkpoint.moe_layers)})",
        "experts a layer, of which used by a token": f"{checkpoint.n_experts}, {checkpoint.top_k}",
        "parameters": f"{checkpoint.n_params:,}",
        "weights": f"{checkpoint.nbytes / 1e6:,.1f} MB",
        "fingerprint": checkpoint.fingerprint,
    }


def _experts(result: ReportInput) -> Iterable[Block]:
    if result.profile is None:
        yield _not_run("the experts were not profiled")
    else:
        yield Figure("How much each expert is used.", figures.expert_load(result.profile))
    if result.plan is None:
        yield _not_run("no experts were chosen")
        return
    yield Figure("What the proxy keeps.", figures.keep_map(result.plan, result.profile))
    if result.profile is not None:
        from moeproxy.proxy.similarity import distances

        layer = min(result.plan.keep)
        fused_EE = distances(result.profile, layer).fuse(result.plan.weights or (1, 1, 1))[0]
        caption = "How alike the experts of one layer are (three views fused)."
        yield Figure(caption, figures.similarity_heatmap(fused_EE, result.plan, layer))


def _accuracy(result: ReportInput) -> Iterable[Block]:
    if result.accuracy is None:
        yield _not_run("accuracy after pruning was not measured")
        return
    levels = {"original": result.accuracy_original, "chance": result.accuracy_chance}
    caption = "Accuracy left, by way of choosing and number of experts kept."
    yield Figure(caption, figures.method_comparison(result.accuracy, **levels))


def _runs(result: ReportInput) -> Iterable[Block]:
    faults = sorted({trace.provenance.fault for trace in result.traces if trace.provenance.fault})
    if not faults:
        yield _not_run("there is no run with a fault")
    for fault in faults:
        models = _overlaid(result, fault)
        drawn = figures.overlay(result.traces, fault, signals=result.overlay_signals, models=models)
        yield Figure(_overlay_caption(result, fault, models), drawn)


def _overlay_caption(result: ReportInput, fault: str, models: Sequence[str]) -> str:
    """Say whose lines an overlay has: of which models, healthy or not, from which runs."""
    runs = [t.provenance for t in result.traces if not t.provenance.further and not t.provenance.remedies]
    drawn = [run for run in runs if run.model in models and run.fault in (None, fault)]
    healthy = {run.model for run in drawn if run.healthy}
    lone = [model for model in models if model not in healthy]
    how = f"with {fault}" if len(lone) == len(models) else f"healthy and with {fault}"
    without = f" ({listed(lone)} without a healthy run)" if healthy and lone else ""
    said = f"{listed(models)}, {how}{without}; from {listed(sorted({run.source for run in drawn}))} runs."
    return said[:1].upper() + said[1:]


def _overlaid(result: ReportInput, fault: str) -> list[str]:
    with_fault = dict.fromkeys(t.provenance.model for t in result.traces if t.provenance.fault == fault)
    if result.overlay_models is not None:
        return [model for model in result.overlay_models if model in with_fault] or list(with_fault)[:2]
    original = result.comparisons[0].original if result.comparisons else "original"
    return [m for m in (original, *[m for m in with_fault if m != original][:1]) if m in with_fault]


def _provenance(result: ReportInput, absent: Sequence[str]) -> Iterable[Block]:
    yield from incident_facts(result.incidents)
    facts = _flat(result.provenance)
    if facts:
        yield Table("This run", _facts(facts))
    else:
        yield _not_run("the caller gave no provenance")
    if result.traces:
        yield Table("Every run used", _runs_table(result), folded=True)
    if absent:
        yield Text(f"Not part of this report: {', '.join(title.lower() for title in absent)}.", note=True)


def _runs_table(result: ReportInput) -> pd.DataFrame:
    runs = [trace.provenance for trace in result.traces]
    rows = [
        {
            "model": run.model,
            "fault": run.fault or ("unknown" if run.unknown else "healthy"),
            "strength": run.strength,
            "onset": run.onset,
            "seed": str(run.seed),
            "runs": run.source,
            "seconds": round(run.wall_seconds, 1),
            "checkpoint": run.checkpoint_fingerprint[:12],
        }
        for run in runs
    ]
    return pd.DataFrame(rows)


def _data(result: ReportInput) -> dict[str, Any]:
    frames = [comparison.to_frame() for comparison in result.comparisons]
    return {
        "verdicts": [row for frame in frames for row in records(frame)],
        "study": [] if result.study is None else records(result.study.models),
        "costs": [] if result.costs is None else records(result.costs),
        "accuracy": [] if result.accuracy is None else records(result.accuracy),
        **incident_data(result),
        **outcome_data(result),
        "provenance": dict(result.provenance),
    }


def _facts(facts: Mapping[str, object]) -> pd.DataFrame:
    return pd.DataFrame({"what": list(facts), "value": [str(value) for value in facts.values()]})


def _flat(data: Mapping[str, Any], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in data.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}: ")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _not_run(why: str) -> Text:
    return Text(f"Not run: {why}.", note=True)
