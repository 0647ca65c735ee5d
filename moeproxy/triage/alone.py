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
from moeproxy.triage.course import DRIFT, course
from moeproxy.triage.departure import candidates, contrast, lone_spikes, step_noise, without_spikes
from moeproxy.triage.judged import Judged, groups, signal_name
from moeproxy.triage.reference import ALPHA, SIGNAL_QUANTILE, Departures, exceeded_by, grouped, strongest

EARLIEST = 10
"""First candidate onset, in steps: the beginning says how noisy a run is."""

FEWEST_STEPS = EARLIEST + 5
LEAST = 3.0
"""Smallest threshold of a contrast, in standard errors."""

LEARNS = ("kl", "kl_old", "total_loss", "loss_beside_policy")
"""Signals that grow as long as a policy moves away from its start; the learning rate decides how fast."""

PRIORS = "healthy.json"


@dataclass(frozen=True)
class Priors:
    """How far healthy runs move by themselves.

    Args:
        contrast: threshold of each signal's contrast.
        other: threshold of a signal that the benchmark does not log.
        run_threshold, single_threshold: see `moeproxy.triage.reference.Departures`.
        n_runs: healthy runs they come from.
        models: labels of these runs' models.
    """

    contrast: Mapping[str, float]
    other: float
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
            excess_X = np.array([value / foreign[name] for name, value in one.items()])
            strength.append(float(strongest(excess_X[:, None])[0]))
            single.append(float(excess_X.max()))
        return Priors(
            contrast=known,
            other=float(np.quantile(list(known.values()), SIGNAL_QUANTILE)),
            run_threshold=exceeded_by(np.array(strength), ALPHA),
            single_threshold=exceeded_by(np.array(single), ALPHA),
            n_runs=len(tables),
            models=tuple(dict.fromkeys(models)),
        )

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
        onset_T = _onsets(table)
        residual_RS, contrast_RT, sign_RT, spikes_RS = _measured(table, onset_T)
        members = groups(table.rows)
        grouped_XT = grouped(contrast_RT, members)
        threshold_X1 = np.array([self.contrast.get(name, self.other) for name, _ in members])[:, None]
        learns_X = np.array(
            [_only_learns(name, residual_RS[rows], contrast_RT[rows], onset_T) for name, rows in members]
        )
        excess_XT = np.where(learns_X[:, None], np.minimum(grouped_XT, threshold_X1), grouped_XT) / threshold_X1
        return Departures(
            names=tuple(name for name, _ in members),
            rows=table.rows,
            steps_S=table.steps_S,
            onset_T=onset_T,
            excess_XT=excess_XT,
            contrast_XT=excess_XT,
            size_RT=contrast_RT,
            sign_RT=sign_RT,
            residual_RS=residual_RS,
            spikes_RS=spikes_RS,
            run_threshold=self.run_threshold,
            single_threshold=self.single_threshold,
            size_in="standard errors of its own noise",
        )


@lru_cache(maxsize=4)
def _load(path: Path) -> Priors:
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        return Priors(**{**stored, "models": tuple(stored["models"])})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ComparisonError(
            "no priors of healthy runs", where=path, expected="a file of moeproxy.triage.learn", remedy="make it again"
        ) from error


def _onsets(table: Judged) -> np.ndarray:
    n_steps = len(table.steps_S)
    if n_steps < FEWEST_STEPS:
        raise ComparisonError(
            f"a run of {n_steps} steps",
            expected=f"at least {FEWEST_STEPS} without healthy runs beside it",
            remedy="give healthy runs of the same settings, or a longer log",
        )
    return candidates(n_steps, EARLIEST)


def _measured(table: Judged, onset_T: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return residuals in step noise (R, S), contrasts and their signs (R, T), and lone spikes (R, S)."""
    values_RS = table.finite_RS
    early = max(EARLIEST, len(table.steps_S) // 4)
    noise_R = step_noise(values_RS[:, :early], table.floor_R)
    spikes_RS = lone_spikes(values_RS, noise_R)
    left_RS = without_spikes(values_RS, spikes_RS)
    start_R = np.nan_to_num(known_mean(left_RS[:, :EARLIEST], axis=1))
    residual_RS = (left_RS - start_R[:, None]) / noise_R[:, None]
    contrast_RT, sign_RT = contrast(residual_RS, onset_T, trend=True), _sign(residual_RS, onset_T)
    return residual_RS, contrast_RT, sign_RT, spikes_RS


def _only_learns(name: str, residual_RS: np.ndarray, contrast_RT: np.ndarray, onset_T: np.ndarray) -> bool:
    """Whether a signal that any learning moves without end has but drifted: alone, that cannot be called a fault."""
    if name not in LEARNS:
        return False
    onset = int(onset_T[contrast_RT[0].argmax()])
    return course(residual_RS[0], onset).kind == DRIFT


def _sign(residual_RS: np.ndarray, onset_T: np.ndarray) -> np.ndarray:
    filled_RS = np.nan_to_num(residual_RS)
    before_RT = np.stack([filled_RS[:, :onset].mean(1) for onset in onset_T], axis=1)
    after_RT = np.stack([filled_RS[:, onset : onset + 10].mean(1) for onset in onset_T], axis=1)
    return np.sign(after_RT - before_RT)


def _largest(table: Judged) -> dict[str, float]:
    """Return the largest contrast of each signal in a run."""
    contrast_RT = _measured(table, _onsets(table))[1]
    found: dict[str, float] = {}
    for row, value in zip(table.rows, contrast_RT.max(1), strict=True):
        found[signal_name(row)] = max(found.get(signal_name(row), 0.0), float(value))
    return found


def _thresholds(largest: Sequence[Mapping[str, float]], names: Sequence[str]) -> dict[str, float]:
    found = {}
    for name in names:
        values = [one[name] for one in largest if name in one]
        found[name] = max(float(np.quantile(values, SIGNAL_QUANTILE)), LEAST) if values else LEAST
    return found
