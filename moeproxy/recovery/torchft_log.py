"""Events from the log of a torchft job: quorums and commits, as torchft exports them through OpenTelemetry.

torchft 0.2 (`TORCHFT_USE_OTEL=true`) writes a JSON record for every quorum (`torchft_quorums`) and every vote on a step
(`torchft_commits`). They say when steps ended, not when they began: a step's begin is taken to be the vote before it,
and after a change of members the median undisturbed step before its own end, but not before the new quorum. The job
ends with the last record of any kind: one that stands still after its last commit has not ended with it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from moeproxy.errors import RecoveryError
from moeproxy.recovery import events as ev
from moeproxy.recovery.events import Event, in_order

LEFT, JOINED = "a member left", "a member joined"
"""Kinds of outages in such a log. A member that joins while nobody has left is a spare that arrives: no outage."""


@dataclass(frozen=True)
class _Record:
    t: float
    replica: str
    step: int
    quorum: int
    commit: bool | None  # None: a quorum


def torchft_events(*paths: str | Path) -> list[Event]:
    """Return the events of a torchft job.

    Args:
        paths: logs of its replicas, each a text file with OpenTelemetry's records among other output.

    Raises:
        RecoveryError: a file cannot be read, a record in one has no time or no whole number as its step or
            quorum, or there are fewer than two committed steps in all.

    Example:
        >>> ettr(torchft_events("replica-0.log", "replica-1.log")).ratio
    """
    records = sorted((record for path in paths for record in _records(Path(path))), key=lambda record: record.t)
    ends = _ends(records)
    if len(ends) < 2:
        raise RecoveryError(
            "fewer than two committed steps",
            where=", ".join(map(str, paths)),
            expected="the console output of torchft under TORCHFT_USE_OTEL=true",
        )
    changes = _changes(records, ends[0][0])
    usual = _usual(ends, changes)
    replicas = {record.replica.partition(":")[0] for record in records}
    trainers = max(1, len(replicas))
    found = [Event(records[0].t, ev.JOB, "job", ev.JOB_START, None, {"trainers": trainers, "rollouts": 0})]
    begin = min(records[0].t, ends[0][0])
    for end, step in ends:
        found += _step(begin, end, step, changes, usual)
        begin = end
    found.append(Event(records[-1].t, ev.JOB, "job", ev.JOB_END, None, {"outcome": "log ends"}))
    return in_order(found)


def _step(begin: float, end: float, step: int, changes: Mapping[float, str], usual: float) -> Iterator[Event]:
    """Yield the events of one step, and of the outage before it where the members changed."""

    def event(t: float, name: str, **info: Any) -> Event:
        return Event(t, ev.TRAINER, "replicas", name, step, info)

    within = sorted(t for t in changes if begin < t <= end)
    # A step that took no longer than others had its members only with the new quorum, where the log tells of it before
    # the vote.
    formed = within[0] if within and within[0] < end else begin
    start = max(formed, end - usual) if within else begin
    if within:
        noticed = min(within[0], start)
        kind = LEFT if LEFT in [changes[t] for t in within] else JOINED
        yield event(begin, ev.FAULT, kind=kind)
        yield event(noticed, ev.DETECT, kind=kind)
        yield event(start, ev.READY)
    yield event(start, ev.STEP_BEGIN)
    yield event(end, ev.STEP_COMMIT)


def _ends(records: Sequence[_Record]) -> list[tuple[float, int]]:
    """Return (time, step from 1) of every step's first positive vote, in order."""
    found: dict[int, float] = {}
    for record in records:
        if record.commit:
            found.setdefault(record.step + 1, record.t)
    return sorted((t, step) for step, t in found.items())


def _changes(records: Sequence[_Record], after: float) -> dict[float, str]:
    """Return when a new quorum was first seen after the job had begun to commit, and what was new about it.

    Left out is one that only adds members while none has left before. One without a visible change counts: the log of
    whoever left may be missing.
    """
    first: dict[int, float] = {}
    members: dict[int, set[str]] = {}
    for record in records:
        first.setdefault(record.quorum, record.t)
        members.setdefault(record.quorum, set()).add(record.replica)
    found, missed = {}, False
    for before, quorum in pairwise(sorted(first, key=lambda quorum: first[quorum])):
        left = bool(members[before] - members[quorum])
        missed = missed or left
        arrival = not missed and members[quorum] > members[before]
        if first[quorum] > after and not arrival:
            found[first[quorum]] = LEFT if left else JOINED
    return found


def _usual(ends: Sequence[tuple[float, int]], changes: Iterable[float]) -> float:
    between, changes = list(pairwise(ends)), list(changes)
    calm = [b[0] - a[0] for a, b in between if not any(a[0] < t <= b[0] for t in changes)]
    return median(calm or [b[0] - a[0] for a, b in between])


def _records(path: Path) -> Iterator[_Record]:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise RecoveryError(f"no log ({error.strerror})", where=path) from error
    for place, stored in _objects(text):
        attributes = stored.get("attributes")
        if isinstance(attributes, dict) and {"replica_id", "quorum_id", "step"} <= attributes.keys():
            where = f"{path}, line {text.count(chr(10), 0, place) + 1}"
            commit = attributes.get("commit_result")
            yield _Record(
                _time(stored, where),
                str(attributes["replica_id"]),
                _whole(attributes, "step", where),
                _whole(attributes, "quorum_id", where),
                None if commit is None else bool(commit),
            )


def _objects(text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield every JSON object and where it begins; what stands between them is other output, or was cut short."""
    decoder, place = json.JSONDecoder(), 0
    while (place := text.find("{", place)) >= 0:
        try:
            value, end = decoder.raw_decode(text, place)
        except ValueError:
            place += 1
            continue
        if isinstance(value, dict):
            yield place, value
        place = end


def _time(stored: dict[str, Any], where: str) -> float:
    try:
        return datetime.fromisoformat(str(stored["timestamp"]).replace("Z", "+00:00")).timestamp()
    except (KeyError, ValueError, OverflowError) as error:
        raise RecoveryError("a record without a time", where=where, expected="timestamp in ISO 8601") from error


def _whole(attributes: Mapping[str, Any], name: str, where: str) -> int:
    value = attributes[name]
    if not isinstance(value, int) or isinstance(value, bool):
        raise RecoveryError(f"a record whose {name} is {value!r}", where=where, expected="a whole number")
    return value
