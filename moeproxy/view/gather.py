"""Any set of results, as objects or as files, to what a report is written from."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moeproxy.errors import MoeproxyError
from moeproxy.files import provenance
from moeproxy.traces.trace import Trace
from moeproxy.triage import reproduction, result
from moeproxy.triage.remedy_result import Remedy
from moeproxy.triage.reproduction import Reproduction
from moeproxy.triage.result import Comparison
from moeproxy.triage.study_result import Study
from moeproxy.view.actions import Action
from moeproxy.view.incident import Incident, open_incidents
from moeproxy.view.report_input import ReportInput

Result = Incident | Action | Reproduction | Remedy | Comparison | Study | Trace

_JSON = {
    reproduction.FORMAT: Reproduction.load,
    "moeproxy.remedy": Remedy.load,
    result.FORMAT: Comparison.load,
}
_FIELDS = {
    Incident: "incidents",
    Action: "actions",
    Reproduction: "reproductions",
    Remedy: "remedies",
    Comparison: "comparisons",
    Trace: "traces",
}


@dataclass(frozen=True)
class Words:
    """What the authors of a postmortem write themselves.

    Args:
        title: of the page; by default it names the runs.
        authors: their names.
        notes: paragraphs.
        actions: what they did and saw.
    """

    title: str = ""
    authors: str = ""
    notes: tuple[str, ...] = ()
    actions: tuple[Action, ...] = field(default=())


def gather(results: Iterable[Result], words: Words | None = None) -> ReportInput:
    """Sort results by what they are; a report of them has a section for each kind that is there.

    Args:
        results: incidents, reproductions, remedies, comparisons, at most one study, traces, actions, in any order.
        words: what the authors write.

    Raises:
        MoeproxyError: something is no such result, there are two studies, or nothing is given.

    Example:
        >>> write_document(compose(gather([*open_incidents("train.log"), Remedy.load("remedy.json")])), "postmortem")
    """
    said = words or Words()
    found: dict[str, list[Any]] = {name: [] for name in _FIELDS.values()}
    studies = []
    for one in results:
        if isinstance(one, Study):
            studies.append(one)
        elif type(one) in _FIELDS:
            found[_FIELDS[type(one)]].append(one)
        else:
            kinds = ", ".join(kind.__name__ for kind in (*_FIELDS, Study))
            raise MoeproxyError(f"a {type(one).__name__} among the results", expected=f"one of {kinds}")
    if len(studies) > 1:
        raise MoeproxyError(f"{len(studies)} studies", expected="at most one")
    if not studies and not any(found.values()):
        raise MoeproxyError("no result to report", expected="at least one")
    found["actions"] += said.actions
    parts: dict[str, Any] = {name: tuple(values) for name, values in found.items()}
    return ReportInput(
        title=said.title.strip() or _title(found["incidents"]),
        notes=said.notes,
        authors=said.authors.strip(),
        study=studies[0] if studies else None,
        provenance=provenance(),
        brief=True,
        **parts,
    )


def postmortem(
    log: str | Path,
    healthy: Sequence[str | Path] = (),
    *,
    words: Words | None = None,
    results: Sequence[str | Path] = (),
    **reading: Any,
) -> ReportInput:
    """Judge the runs of a log and gather what belongs to them.

    Args:
        log: a log of any framework, or a trace written here.
        healthy: logs of good runs of the same model and settings, six runs or more in all.
        words: what the authors write.
        results: files of reproductions, remedies, comparisons, a study, traces.
        reading: mapping, step, framework as for `moeproxy.traces.read`.

    Raises:
        MoeproxyError: a log or a result cannot be read, or there are too few healthy runs.
    """
    more = load_results(results)
    return gather([*open_incidents(log, healthy, **reading), *more], words)


def load_results(paths: Iterable[str | Path]) -> tuple[Result, ...]:
    """Read what `save` of a reproduction, a remedy, a comparison, a study or a trace wrote.

    Raises:
        MoeproxyError: a file is none of them.
    """
    return tuple(_load(Path(path)) for path in paths)


def _load(path: Path) -> Result:
    if path.suffix == ".parquet":
        try:
            return Study.load(path)
        except MoeproxyError:
            return Trace.load(path)
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        kind = stored.get("format") if isinstance(stored, dict) else None
    except (OSError, ValueError) as error:
        raise MoeproxyError(
            f"no result ({error})", where=path, expected="a file that save() of a result wrote"
        ) from error
    if kind not in _JSON:
        raise MoeproxyError(f"a file of the format {kind!r}", where=path, expected=f"one of {', '.join(_JSON)}")
    return _JSON[kind](path)


def _title(incidents: Sequence[Incident]) -> str:
    if not incidents:
        return "Report"
    names = ", ".join(one.name for one in incidents[:3])
    return f"Postmortem: {names}{' and others' if len(incidents) > 3 else ''}"
