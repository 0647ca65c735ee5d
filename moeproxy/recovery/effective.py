"""Effective training time ratio (ETTR): how much of a job's wall clock went into training that was kept.

As RobustRL defines it (arXiv 2512.22492): time in which roles do effective work, over wall clock; while T trainers
restart and R rollouts run on beside them, that time counts R / (R + T). As in Meta's account (arXiv 2410.21680), only
steps that were kept count: what a restart does again, and a step that a fault cut short, are lost.

The clock runs from the first step's begin to the job's end. Setting a job up is reported beside it: it happens once,
and would decide the ratio of a run of seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path

from moeproxy.errors import RecoveryError
from moeproxy.recovery.events import Event, in_order, read_events
from moeproxy.recovery.saved import save_json, saved_json
from moeproxy.recovery.timeline import LOST, PRODUCTIVE, Outage, Span, attempts, outages, spans

_FORMAT = "moeproxy.ettr"


@dataclass(frozen=True)
class Ettr:
    """The effective training time of one job.

    Args:
        wall: seconds from the first step's begin to the end.
        setup: seconds from the job's start to the first step's begin.
        productive: seconds in steps that were kept.
        credit: seconds credited for rollouts that worked on while a trainer was away.
        lost: seconds by cause: detect, restart, reconnect, recompute, checkpoint, idle; with `productive` they add up
            to `wall`.
        by_member: share of `wall` in which each member was up.
        steps: steps kept.
        repeated: steps that were done again.
        outages: every outage of a member, in order.
        spans: the job's time line, (begin, end, what), seconds from the first step's begin.
    """

    wall: float
    setup: float
    productive: float
    credit: float
    lost: dict[str, float]
    by_member: dict[str, float]
    steps: int
    repeated: int
    outages: tuple[Outage, ...] = ()
    spans: tuple[Span, ...] = field(default=(), repr=False)

    @property
    def ratio(self) -> float:
        """Effective training time over wall clock, in [0, 1]."""
        return (self.productive + self.credit) / self.wall

    @property
    def ratio_strict(self) -> float:
        """The same without credit for rollouts that work on while a trainer is away."""
        return self.productive / self.wall

    def __repr__(self) -> str:
        lost = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.lost.items() if seconds > 0.05)
        credit = f" (+{self.credit:.1f} s credit)" if self.credit else ""
        return (
            f"Ettr({self.ratio:.3f}: {self.productive:.1f} s{credit} of {self.wall:.1f} s, {self.steps} steps, "
            f"{len(self.outages)} outages{f', lost: {lost} s' if lost else ''})"
        )

    def _repr_html_(self) -> str:
        rows = "".join(f"<tr><td>{escape(name)}</td><td>{value:.2f} s</td></tr>" for name, value in self.lost.items())
        return f"<p>{escape(repr(self)[5:-1])}</p><table>{rows}</table>"

    def save(self, path: str | Path) -> Path:
        """Write the result to a JSON file, atomically, and return its path."""
        return save_json(path, _FORMAT, asdict(self))

    @staticmethod
    def load(path: str | Path) -> Ettr:
        """Read what `save` wrote.

        Raises:
            RecoveryError: the file is something else.
        """
        with saved_json(path, _FORMAT, "effective training time") as stored:
            away = tuple(Outage(**item) for item in stored.pop("outages"))
            line = tuple(Span(**item) for item in stored.pop("spans"))
            return Ettr(**stored, outages=away, spans=line)


def ettr(events: str | Path | Sequence[Event]) -> Ettr:
    """Compute the effective training time of a job from its events.

    Args:
        events: the job's folder, a file of events, or events (`torchft_events` makes them from torchft's logs).

    Raises:
        RecoveryError: the events hold no finished step, or no time passes in them.

    Example:
        >>> ettr("run-a").ratio
    """
    found = read_events(events) if isinstance(events, (str, Path)) else in_order(events)
    tried = attempts(found)
    if not any(item.kept for item in tried):
        raise RecoveryError(
            "no step was finished",
            where=str(events) if isinstance(events, (str, Path)) else "events",
            expected="step_begin and step_commit of a trainer",
        )
    away = outages(found)
    begin, end = min(item.begin for item in tried), found[-1].t
    if not end > begin:
        raise RecoveryError(
            "no time passes between the first step's begin and the last event",
            where=str(events) if isinstance(events, (str, Path)) else "events",
            expected="times of a clock, in seconds",
        )
    line = spans(found, tried, away, begin, end)
    seconds: dict[str, float] = dict.fromkeys([PRODUCTIVE, *LOST], 0.0)
    for span in line:
        seconds[span.what] += span.end - span.begin
    return Ettr(
        wall=end - begin,
        setup=begin - found[0].t,
        productive=seconds.pop(PRODUCTIVE),
        credit=sum(span.credit * (span.end - span.begin) for span in line),
        lost=seconds,
        by_member=_up(found, away, begin, end),
        steps=len({item.step for item in tried if item.kept}),
        repeated=len({item.step for item in tried if item.done and not item.kept}),
        outages=tuple(away),
        spans=tuple(Span(s.begin - begin, s.end - begin, s.what, s.credit) for s in line),
    )


def _up(events: Sequence[Event], away: Sequence[Outage], begin: float, end: float) -> dict[str, float]:
    """Return for each member the share of the job in which it was not out."""
    members = dict.fromkeys(event.member for event in events if event.role in ("trainer", "rollout", "manager"))
    lost = dict.fromkeys(members, 0.0)
    for item in away:
        for member in lost if item.whole_task else [item.member]:
            if member in lost:
                lost[member] += max(0.0, min(item.end, end) - max(item.fault, begin))
    return {member: max(0.0, 1 - seconds / (end - begin)) for member, seconds in lost.items()}
