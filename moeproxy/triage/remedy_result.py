"""Remedy: what was tried against a failure on one model, what it did, and what is kept.

The rule by which a trial is accepted is declared here (`judge`). It needs recorded traces only; `triage.remedy` makes
them.
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from moeproxy.errors import ComparisonError
from moeproxy.files import atomic_file
from moeproxy.traces.trace import Trace
from moeproxy.triage.severity import Healthy, Severity, severity

Kind = Literal["mitigation", "repair"]
KINDS: tuple[Kind, ...] = ("mitigation", "repair")
FORMAT, VERSION = "moeproxy.remedy", 1

LEAST_CHANGE = 0.1
"""Share of the severity by which it must change at least: two runs that are equally ill differ by more than healthy
ones do."""


@dataclass(frozen=True)
class Trial:
    """One remedy, tried.

    Args:
        remedy: its id.
        kind: "mitigation" or "repair".
        before: severity without it.
        after: severity with it; None when the run did not end.
        margin: severity that healthy runs reach; a change must be larger (see `judge`).
        accepted: whether it is kept.
        harmful: whether it made things worse by as much.
        exact: whether the run became its healthy twin bit for bit.
        words: why it was or was not accepted, for people.
    """

    remedy: str
    kind: Kind
    before: Severity
    after: Severity | None
    margin: float
    accepted: bool
    harmful: bool
    exact: bool
    words: str

    @property
    def recovered(self) -> bool:
        """Whether it was accepted and the run is as healthy runs are."""
        return self.accepted and self.after is not None and self.after.value <= self.margin

    @property
    def change(self) -> float | None:
        """Relative change of severity: -1 is recovery, above 0 is harm; None when the run did not end."""
        return None if self.after is None else self.after.value / self.before.value - 1 if self.before.value else 0.0

    @staticmethod
    def from_dict(stored: Mapping[str, Any]) -> Trial:
        """Return what `dataclasses.asdict` wrote."""
        after = stored["after"]
        parts = {"before": Severity(**stored["before"]), "after": Severity(**after) if after else None}
        return Trial(**{**stored, **parts})


def judge(remedy: str, kind: Kind, before: Trace, after: Trace, healthy: Healthy, onset: int) -> Trial:
    """Return whether a remedy is kept, from the runs without and with it.

    It is kept when severity falls by more than what healthy runs differ by and by a tenth of itself at least, and
    neither the loss of reward (by more than its own healthy margin) nor the share of steps that are not finite has
    grown. It is harmful when severity grows by as much.

    Args:
        remedy, kind: which it was.
        before: the broken run.
        after: the run with the remedy.
        healthy: what both are judged by.
        onset: step from which they are judged.

    Raises:
        ComparisonError: the runs are of different models or seeds.
    """
    ill, treated, margin = severity(before, healthy, onset), severity(after, healthy, onset), healthy.margin(onset)
    least = max(margin.value, LEAST_CHANGE * ill.value)
    better, worse = ill.value - treated.value > least, treated.value - ill.value > least
    costs_reward = treated.reward_loss > ill.reward_loss + margin.reward_loss
    less_finite = treated.not_finite > ill.not_finite
    return Trial(
        remedy,
        kind,
        ill,
        treated,
        margin.value,
        accepted=better and not costs_reward and not less_finite,
        harmful=worse,
        exact=after.equals(healthy.twin),
        words=_words(ill, treated, least, costs_reward, less_finite),
    )


def not_ended(remedy: str, kind: Kind, before: Trace, healthy: Healthy, onset: int, words: str) -> Trial:
    """Return the trial of a remedy whose run failed: it is not kept."""
    margin = healthy.margin(onset).value
    return Trial(remedy, kind, severity(before, healthy, onset), None, margin, False, False, False, f"failed: {words}")


def _words(ill: Severity, treated: Severity, least: float, costs_reward: bool, less_finite: bool) -> str:
    moved = f"severity {ill.value:.3f} to {treated.value:.3f}, where {least:.3f} is a change"
    if costs_reward:
        return f"rolled back, it costs reward: loss {ill.reward_loss:.2f} to {treated.reward_loss:.2f}; {moved}"
    if less_finite:
        return f"rolled back, more steps are not finite; {moved}"
    if ill.value - treated.value > least:
        return f"kept: {moved}"
    return f"rolled back, {'worse' if treated.value - ill.value > least else 'no better'}: {moved}"


@dataclass(frozen=True, repr=False)
class Remedy:
    """What was tried against one failure on one model.

    Args:
        model: label of the model.
        cause: fault that it was treated for: the diagnosis.
        seed: of the run.
        onset: step from which the remedies act.
        before: severity without any.
        margin: severity that healthy runs reach.
        trials: in the order in which they were made.
        not_tried: ids of candidates left, since an earlier one was kept or the time was up.
        minutes: what the trials took.
        provenance: versions, command, and fingerprint of the checkpoint.

    Example:
        >>> Remedy.load("out/remedy.json")
        Remedy(kl_explosion on cluster-16: lower_rate, severity 0.412 to 0.021 (kept); 1 tried, 2 not)
    """

    model: str
    cause: str
    seed: int
    onset: int
    before: Severity
    margin: float
    trials: tuple[Trial, ...]
    not_tried: tuple[str, ...] = ()
    minutes: float = 0.0
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ill(self) -> bool:
        """Whether there is anything to mend: a run that is as severe as healthy runs are cannot get better."""
        return self.before.value > self.margin

    def best(self, kind: Kind | None = None) -> Trial | None:
        """Return the trial that is kept: of those accepted, of one kind or of both, the least severe.

        Of equals it is the one that is the healthy twin bit for bit, else the one that was tried first.
        """
        kept = [trial for trial in self.trials if trial.accepted and kind in (None, trial.kind)]
        return min(kept, key=lambda trial: (_severity_after(trial), not trial.exact), default=None)

    def save(self, path: str | Path) -> Path:
        """Write the result to a JSON file, atomically, and return its path."""
        with atomic_file(path) as temporary:
            temporary.write_text(json.dumps(self.to_dict(), indent=1, allow_nan=False), encoding="utf-8")
        return Path(path)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values that `from_dict` reads back."""
        return {"format": FORMAT, "version": VERSION, **asdict(self)}

    @staticmethod
    def from_dict(stored: Mapping[str, Any]) -> Remedy:
        """Return what `to_dict` wrote."""
        fields = dict(stored)
        if (fields.pop("format"), fields.pop("version")) != (FORMAT, VERSION):
            raise ValueError("another format or version")
        parts = {
            "before": Severity(**fields["before"]),
            "trials": tuple(Trial.from_dict(trial) for trial in fields["trials"]),
            "not_tried": tuple(fields["not_tried"]),
        }
        return Remedy(**{**fields, **parts})

    @staticmethod
    def load(path: str | Path) -> Remedy:
        """Read what `save` wrote.

        Raises:
            ComparisonError: the file is absent, broken or of another version.
        """
        try:
            return Remedy.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ComparisonError(f"no remedy ({error!r})", where=path, expected="what Remedy.save wrote") from error

    def __repr__(self) -> str:
        kept = self.best()
        if not self.ill:
            said = f"nothing to mend, severity {self.before.value:.3f}"
        elif kept and kept.after:
            said = f"{kept.remedy}, severity {self.before.value:.3f} to {kept.after.value:.3f} (kept)"
        else:
            said = f"nothing helped, severity {self.before.value:.3f}"
        counts = f"{len(self.trials)} tried, {len(self.not_tried)} not"
        return f"Remedy({self.cause} on {self.model}: {said}; {counts})"

    def _repr_html_(self) -> str:
        head = ("remedy", "kind", "severity before", "after", "verdict")
        rows = [_cells(trial) for trial in self.trials]
        table = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
        names = "".join(f'<th scope="col">{name}</th>' for name in head)
        return f"<p><strong>{html.escape(repr(self))}</strong></p><table><tr>{names}</tr>{table}</table>"


@dataclass(frozen=True)
class Transfer:
    """What a remedy that was kept on a proxy does on the original.

    Args:
        cause: fault that it is for.
        seed: of the runs.
        proxy: the trial on the proxy.
        original: the trial on the original; None when the original is not ill there, so that nothing can help.
    """

    cause: str
    seed: int
    proxy: Trial
    original: Trial | None

    @property
    def helps(self) -> bool:
        """Whether it would be kept on the original too."""
        return self.original is not None and self.original.accepted


def transfers(proxy: Remedy, original: Remedy) -> tuple[Transfer, ...]:
    """Return what became on the original of what was kept on the proxy.

    Raises:
        ComparisonError: the two are of different failures, or something that was kept was not tried.
    """
    if (proxy.cause, proxy.seed, proxy.onset) != (original.cause, original.seed, original.onset):
        raise ComparisonError(f"{original!r}", expected=f"the same failure as {proxy!r}")
    tried = {trial.remedy: trial for trial in original.trials}
    kept = [best for kind in KINDS if (best := proxy.best(kind))]
    lacking = [trial.remedy for trial in kept if trial.remedy not in tried]
    if lacking and original.ill:
        raise ComparisonError(f"{', '.join(lacking)} was not tried on {original.model}", expected="see `try_on`")
    return tuple(Transfer(proxy.cause, proxy.seed, trial, tried.get(trial.remedy)) for trial in kept)


def _severity_after(trial: Trial) -> float:
    return trial.after.value if trial.after else float("inf")


def _cells(trial: Trial) -> Sequence[str]:
    after = f"{trial.after.value:.3f}" if trial.after else "–"
    return trial.remedy, trial.kind, f"{trial.before.value:.3f}", after, trial.words
