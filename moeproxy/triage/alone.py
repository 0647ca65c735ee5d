"""Judge a run without healthy ones beside it: by its own beginning, and by what healthy runs of the benchmark do.

A healthy run moves too: it learns. How far each signal of a healthy run moves away from its past, in units of the
step noise of its own beginning, was measured on the benchmark (`Priors`, made by `moeproxy.triage.learn`). What moves
further alarms.

Axes: R row, X signal, S step, T candidate onset, W window.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from moeproxy.errors import ComparisonError
from moeproxy.files import atomic_file
from moeproxy.places import data_dir
from moeproxy.triage.arrays import known_mean
from moeproxy.triage.course import JUMP, course, is_sudden
from moeproxy.triage.departure import averages, shifts
from moeproxy.triage.excursion import begin, date_edges, date_excursions, excursions, is_near, place_of
from moeproxy.triage.judged import Judged, groups, original_value, signal_name
from moeproxy.triage.own_past import SHOWN, OwnPast
from moeproxy.triage.reference import (
    ALPHA,
    OWN_NOISE,
    SIGNAL_QUANTILE,
    STRONGEST,
    Departures,
    Limit,
    exceeded_by,
    grouped,
    strongest,
)
from moeproxy.triage.slow import FROM as LONG
from moeproxy.triage.slow import Slow, begun, slow_changes

LEAST = 3.0
"""Smallest threshold of a contrast, in standard errors."""

LEARNS: Mapping[str, float] = dict.fromkeys(("kl", "kl_old", "total_loss", "loss_beside_policy"), 1.0)
"""Signals that grow as long as a policy moves away from its start, and the size (nats) up to which that is learning."""

IMPROVES = ("reward_mean", "reward_tool", "reward_plain")
"""Signals whose slow rise alone is no fault."""

STAYS = (
    *("grad_norm", "grad_norm_router", "grad_norm_experts", "grad_norm_attention", "grad_norm_embeddings"),
    *("update_norm", "entropy", "aux_loss", "logprob_diff_mean", "logprob_diff_max", "logprob_diff_k3"),
    *("prob_pearson", "router_load_entropy", "router_max_violation", "router_agreement"),
)
"""Signals that learning moves little: whatever gets far from its beginning has departed, even slowly."""

FAR = 4.0
"""How many times as far as in any healthy run of the benchmark is too far."""

BEGUN = 0.2
"""Share of what is too far from which on a signal of a long run has begun to go there."""

REACHED = "as far from its beginning as healthy runs get"
SLOWLY = "the least that counts as a slow loss"

PRIORS = "healthy.json"

Members = list[tuple[str, np.ndarray]]
"""Signals, each with the indices of its rows."""


@dataclass(frozen=True)
class Priors:
    """How far healthy runs move by themselves.

    Args:
        contrast: thresholds of each signal's rise and fall; they differ for what learning makes rise.
        other: threshold of a signal that the benchmark does not log.
        reach: how far signals that learning hardly moves get away from their beginning, on their transformed scale.
        run_threshold, single_threshold: see `moeproxy.triage.reference.Departures`.
        n_runs: healthy runs they come from.
        models: labels of these runs' models.
    """

    contrast: Mapping[str, tuple[float, float]]
    other: float
    reach: Mapping[str, float]
    run_threshold: float
    single_threshold: float
    n_runs: int
    models: tuple[str, ...]

    @staticmethod
    def of(tables: Sequence[Judged], models: Sequence[str]) -> Priors:
        """Learn from healthy runs; `models` names the model of each, and runs of one model are judged by the others'.

        Raises:
            ComparisonError: runs of fewer than two models.
        """
        if len(set(models)) < 2:
            raise ComparisonError(
                f"healthy runs of {len(set(models))} model", expected="two or more: a prior must hold for another model"
            )
        largest = [_largest(table) for table in tables]
        names = list(dict.fromkeys(name for one in largest for name in one))
        known = _thresholds(largest, names)
        strength, single = [], []
        for one, model in zip(largest, models, strict=True):
            others = [two for two, label in zip(largest, models, strict=True) if label != model]
            foreign = _thresholds(others, names)
            excess_X = np.array([np.divide(sizes, foreign[name]).max() for name, sizes in one.items()])
            strength.append(float(strongest(excess_X[:, None])[0]))
            single.append(float(excess_X.max()))
        return Priors(
            contrast=known,
            other=float(np.quantile([max(both) for both in known.values()], SIGNAL_QUANTILE)),
            reach=_largest_of([_reached(table) for table in tables]),
            run_threshold=exceeded_by(np.array(strength), ALPHA),
            single_threshold=exceeded_by(np.array(single), ALPHA),
            n_runs=len(tables),
            models=tuple(dict.fromkeys(models)),
        )

    def _far(self, table: Judged, seen: OwnPast) -> np.ndarray:
        """Return how far each row has gone (R, T), as an excess: at the limit it makes the run alarm by itself."""
        limit_R = np.array([FAR * self.reach.get(signal_name(row), np.inf) for row in table.rows])
        far_RT = np.maximum(_shift(seen, limit_R) / limit_R[:, None], _beyond(table, seen))
        return np.where(far_RT >= 1, far_RT, 0) * self._alarming

    def _limits(
        self, table: Judged, seen: OwnPast, members: Members, far_X: np.ndarray, excess_X: np.ndarray
    ) -> dict[str, Limit]:
        """Return the limits passed by signals that went farther than they changed."""
        found = {}
        for x, (name, rows_R) in enumerate(members):
            ratio = float(far_X[x] / self._alarming)
            if far_X[x] > excess_X[x]:
                size = max(_learning_limit(table, seen, int(row)) for row in rows_R) if name in LEARNS else np.inf
                learning = Limit(ratio, f"the {size:.3g} up to which it is taken for learning")
                found[name] = learning if name in LEARNS else Limit(ratio * FAR, REACHED)
        return found

    def _only_learns(self, table: Judged, seen: OwnPast, rows_R: np.ndarray, name: str) -> bool:
        """Whether a signal that any learning moves without end moved, but neither at once nor too far.

        Alone, that cannot be called a fault. Of a signal that the benchmark does not log nobody knows how far is far.
        """
        if name in self.contrast and name not in LEARNS:
            return False
        row = int(rows_R[0])
        last = known_mean(seen.left_RS[row, -SHOWN:], axis=0)
        if np.isfinite(last) and abs(original_value(table.rows[row], float(last))) > LEARNS.get(name, np.inf):
            return False
        onset = int(seen.onset_T[seen.contrast_RT[row].argmax()])
        return course(seen.residual_RS[row], onset).kind != JUMP

    def _only_improves(self, seen: OwnPast, rows_R: np.ndarray, name: str) -> bool:
        """Whether a reward rises, but not at once: that is what a run is for, at whatever step it begins."""
        row = int(rows_R[0])
        onset = int(seen.onset_T[seen.moves_DRT[0, row].argmax()])
        return name in IMPROVES and not is_sudden(seen.residual_RS[row], onset)

    @property
    def _alarming(self) -> float:
        """Excess of one signal that makes the run alarm by itself."""
        return max(STRONGEST * self.run_threshold, self.single_threshold)

    def _with_slow(
        self, slow: Sequence[Slow], seen: OwnPast, members: Members, excess_XT: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return excess and contrast (X, T) with slow changes in them: these begin where they begin, and not later.

        One that is sudden after all has its date already, and to the step.
        """
        excess_XT, contrast_XT = excess_XT.copy(), excess_XT.copy()
        for x, (_, rows_R) in enumerate(members):
            mine = [one for one in slow if one.row in rows_R]
            if mine:
                first = max(mine, key=lambda one: one.ratio)
                most = int(excess_XT[x].argmax())
                place = most if _jumps(first, seen, most) else place_of(seen.onset_T, first.start)
                size = max(first.ratio * self._alarming, float(excess_XT[x].max()))
                excess_XT[x, place] = size
                begin(contrast_XT[x], place, size)
        return excess_XT, contrast_XT

    def _date_far(self, table: Judged, seen: OwnPast, members: Members, contrast_XT: np.ndarray) -> None:
        """Date signals of long runs that went too far from where they began to go, in place."""
        if len(table.steps_S) < LONG:
            return
        past_RS = np.maximum(np.arange(len(table.steps_S)) - SHOWN + 1, 0), np.arange(len(table.steps_S)) + 1
        moved_RS = averages((seen.residual_RS * seen.noise_R[:, None]), *past_RS)
        for x, (name, rows_R) in enumerate(members):
            limit = FAR * self.reach.get(name, np.inf)
            starts = [begun(moved_RS[row] / limit, BEGUN) for row in rows_R] if np.isfinite(limit) else []
            known = [start for start in starts if start is not None]
            if known:
                place, most = place_of(seen.onset_T, min(known)), int(contrast_XT[x].argmax())
                if seen.onset_T[place] < seen.onset_T[most] - SHOWN:
                    begin(contrast_XT[x], place, float(contrast_XT[x].max()))

    def save(self, path: Path) -> Path:
        """Write the priors as JSON, atomically, and return the path."""
        with atomic_file(path) as temporary:
            temporary.write_text(json.dumps(asdict(self), indent=1, sort_keys=True) + "\n", encoding="utf-8")
        return path

    @staticmethod
    def load(path: Path | None = None) -> Priors:
        """Read priors, by default those that are shipped.

        Raises:
            ComparisonError: the file is absent or no such file.
        """
        return _load(path or data_dir() / "triage" / PRIORS)

    def departures(self, table: Judged) -> Departures:
        """Measure how far a run strays from its own past.

        Raises:
            ComparisonError: it is too short.
        """
        seen = OwnPast.of(table)
        members = groups(table.rows)
        limit_DX = np.array([self.contrast.get(name, (self.other,) * 2) for name, _ in members]).T
        moves_DXT = np.stack([grouped(moves_RT, members) for moves_RT in seen.moves_DRT])
        rise_XT, fall_XT = moves_DXT / limit_DX[:, :, None]
        improves_X1 = np.array([self._only_improves(seen, rows, name) for name, rows in members])[:, None]
        excess_XT = np.maximum(np.where(improves_X1, np.minimum(rise_XT, 1.0), rise_XT), fall_XT)
        learns_X1 = np.array([self._only_learns(table, seen, rows, name) for name, rows in members])[:, None]
        far_XT = grouped(self._far(table, seen), members)
        excess_XT = np.where(learns_X1, np.minimum(excess_XT, 1.0), excess_XT)
        limits = self._limits(table, seen, members, far_XT.max(1), excess_XT.max(1))
        excess_XT = np.maximum(excess_XT, far_XT)
        size_RT = np.maximum(seen.contrast_RT, seen.level_RT)
        found = excursions(seen.residual_RS, seen.onset_T, seen.contrast_RT, members, excess_XT)
        slow = [
            one
            for one in slow_changes(table.rows, seen.left_RS, seen.noise_R)
            if not is_near(one.start, found.get(signal_name(table.rows[one.row])))
        ]
        excess_XT, contrast_XT = self._with_slow(slow, seen, members, excess_XT)
        date_edges(seen.residual_RS, seen.onset_T, seen.contrast_RT, members, contrast_XT)
        self._date_far(table, seen, members, contrast_XT)
        date_excursions(found, seen.onset_T, members, contrast_XT)
        for one in slow:
            size_RT[one.row] = _size_of(one, seen)
        limits |= {signal_name(table.rows[one.row]): Limit(one.ratio, SLOWLY) for one in slow}
        return Departures(
            names=tuple(name for name, _ in members),
            rows=table.rows,
            steps_S=table.steps_S,
            onset_T=seen.onset_T,
            excess_XT=excess_XT,
            contrast_XT=contrast_XT,
            early_X=np.zeros(len(members)),
            size_RT=size_RT,
            change_RT=np.ones(seen.contrast_RT.shape, bool),
            trend_RS=np.broadcast_to(seen.start_R[:, None], seen.residual_RS.shape),
            residual_RS=seen.residual_RS,
            noise_R=seen.noise_R,
            spikes_RS=seen.spikes_RS,
            run_threshold=self.run_threshold,
            single_threshold=self.single_threshold,
            size_in=OWN_NOISE,
            limits=limits,
            learns=tuple(LEARNS),
        )


def _jumps(one: Slow, seen: OwnPast, place: int) -> bool:
    """Whether a slow change is a jump at a candidate onset nearby."""
    onset = int(seen.onset_T[place])
    return abs(onset - one.start) <= SHOWN and course(seen.residual_RS[one.row], onset).kind == JUMP


def _size_of(one: Slow, seen: OwnPast) -> np.ndarray:
    """Return the distance (T,) of ten steps from the level before a slow change, from its start on, as `level_RT`."""
    residual_S = (seen.left_RS[one.row] - one.level) / seen.noise_R[one.row]
    size_T = np.abs(shifts(residual_S[None], seen.onset_T, ((0, SHOWN),))[0, 0, 0]) * np.sqrt(SHOWN)
    return np.where(seen.onset_T >= one.start, size_T, 0)


@lru_cache(maxsize=4)
def _load(path: Path) -> Priors:
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        contrast = {name: (float(rise), float(fall)) for name, (rise, fall) in stored["contrast"].items()}
        return Priors(**{**stored, "contrast": contrast, "models": tuple(stored["models"])})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ComparisonError(
            "no priors of healthy runs", where=path, expected="a file of moeproxy.triage.learn", remedy="make it again"
        ) from error


def _largest(table: Judged) -> dict[str, tuple[float, float]]:
    """Return the largest rise and fall of each signal in a run."""
    rise_RT, fall_RT = OwnPast.of(table).moves_DRT
    return {name: (float(rise_RT[rows].max()), float(fall_RT[rows].max())) for name, rows in groups(table.rows)}


def _reached(table: Judged) -> dict[str, float]:
    """Return how far each signal that learning does not move gets away from its beginning, transformed."""
    seen = OwnPast.of(table)
    shift_RT = _shift(seen, np.full(len(table.rows), np.inf))
    return {name: float(shift_RT[rows].max()) for name, rows in groups(table.rows) if name in STAYS}


def _beyond(table: Judged, seen: OwnPast) -> np.ndarray:
    """Return the size (R, T) of what learning moves over the size up to which that is learning, 0 below and of others.

    A run that begins with a large value may go FAR times as far. Lone spikes count as in every other statistic: not.
    """
    level_RT = shifts(seen.left_RS, seen.onset_T, ((0, SHOWN),))[0, 0]
    found_RT = np.zeros(level_RT.shape)
    for index, row in enumerate(table.rows):
        if signal_name(row) in LEARNS:
            limit = _learning_limit(table, seen, index)
            size_T = np.array([abs(original_value(row, float(value))) for value in level_RT[index]])
            found_RT[index] = np.where(size_T > limit, size_T / limit, 0)
    return found_RT


def _learning_limit(table: Judged, seen: OwnPast, row: int) -> float:
    """Return the size up to which a signal that learning moves without end is taken to do so."""
    name = table.rows[row]
    return max(LEARNS[signal_name(name)], FAR * abs(original_value(name, float(seen.start_R[row]))))


def _shift(seen: OwnPast, limit_R: np.ndarray) -> np.ndarray:
    """Return how far the mean over ten steps from each candidate on lies from the beginning (R, T), transformed.

    Single values count no more than twice the limit: a gradient norm of zero, where all answers of a step were alike,
    is far off on a logarithmic scale.
    """
    most_R1 = 2 * limit_R[:, None]
    left_RS = np.clip(seen.residual_RS * seen.noise_R[:, None], -most_R1, most_R1)
    return np.abs(shifts(left_RS, seen.onset_T, ((0, SHOWN),))[0, 0])


def _thresholds(
    largest: Sequence[Mapping[str, tuple[float, float]]], names: Sequence[str]
) -> dict[str, tuple[float, float]]:
    found = {}
    for name in names:
        sizes_N2 = np.array([one[name] for one in largest if name in one]).reshape(-1, 2)
        rise, fall = np.quantile(sizes_N2, SIGNAL_QUANTILE, axis=0) if len(sizes_N2) else (LEAST, LEAST)
        # Only of a reward it is known which way learning goes: answers get longer in one run and shorter in another.
        rise, fall = (rise, fall) if name in IMPROVES else (max(rise, fall),) * 2
        found[name] = max(float(rise), LEAST), max(float(fall), LEAST)
    return found


def _largest_of(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for one in found for name in one)
    return {name: max(one.get(name, 0.0) for one in found) for name in names}
