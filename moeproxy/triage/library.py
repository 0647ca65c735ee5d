"""What every known fault looks like: fingerprints of recorded runs, and the probability that a run is like one.

Each fault is a normal distribution of fingerprints around its mean, with one covariance for all (linear discriminant
analysis, shrunk towards its diagonal: there are more features than runs of a fault). Features that a run does not have
are left out of mean and covariance, so that a log with few signals is judged by these.

Axes: N recorded run, C fault, F feature.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from moeproxy.triage.fingerprint import SPANS, Units

SHRINK, FLOOR = 0.3, 0.3
"""Share of the covariance that its diagonal keeps alone, and the variance added to every feature."""

FARTHEST = 0.97
"""Share of runs of known faults that lie closer to their fault than what is called unknown."""


@dataclass(frozen=True)
class Library:
    """Fingerprints of known faults for one way of judging.

    Args:
        mode: "beside healthy runs" or "alone".
        signals: names (X) that give the features.
        units: of the fingerprints.
        fault_N, model_N, level_N, seed_N: what each recorded run was.
        features_NF: their fingerprints' features.
        temperature: by which squared distances are divided so that confidences are right.
        farthest: distance per feature beyond which a run is like no known fault.
    """

    mode: str
    signals: tuple[str, ...]
    units: Units
    fault_N: np.ndarray
    model_N: np.ndarray
    level_N: np.ndarray
    seed_N: np.ndarray
    features_NF: np.ndarray
    temperature: float = 1.0
    farthest: float = np.inf

    @cached_property
    def faults(self) -> tuple[str, ...]:
        """Ids of the known faults (C)."""
        return tuple(sorted(set(map(str, self.fault_N))))

    @cached_property
    def mean_CF(self) -> np.ndarray:
        """Mean features of each fault; NaN where its runs do not have one."""
        return np.stack([_mean(self.features_NF[self.fault_N == fault]) for fault in self.faults])

    @cached_property
    def covariance_FF(self) -> np.ndarray:
        """Covariance of the features within faults, shrunk."""
        place_N = np.searchsorted(self.faults, self.fault_N)
        left_NF = np.nan_to_num(self.features_NF - self.mean_CF[place_N])
        free = max(len(left_NF) - len(self.faults), 1)
        raw_FF = left_NF.T @ left_NF / free
        return (1 - SHRINK) * raw_FF + SHRINK * np.diag(np.diag(raw_FF)) + FLOOR * np.eye(len(raw_FF))

    def distances(self, features_F: np.ndarray) -> np.ndarray:
        """Return the squared distance (C,) of a fingerprint to each fault, by the features that it has."""
        known_F = np.isfinite(features_F) & np.isfinite(self.mean_CF).all(0)
        precision_FF = np.linalg.inv(self.covariance_FF[np.ix_(known_F, known_F)])
        off_CF = features_F[known_F] - self.mean_CF[:, known_F]
        return np.einsum("cf,fg,cg->c", off_CF, precision_FF, off_CF)

    def per_feature(self, features_F: np.ndarray) -> float:
        """Return the distance to the nearest fault over the number of features that the run has."""
        known_F = np.isfinite(features_F) & np.isfinite(self.mean_CF).all(0)
        return float(self.distances(features_F).min() / max(known_F.sum(), 1))

    def confidences(self, features_F: np.ndarray) -> np.ndarray:
        """Return the probability (C,) of each fault, given that it is one of them."""
        return softmax(-self.distances(features_F) / (2 * self.temperature))

    def only(self, keep_N: np.ndarray) -> Library:
        """Return the library of some of its runs."""
        return replace(
            self,
            fault_N=self.fault_N[keep_N],
            model_N=self.model_N[keep_N],
            level_N=self.level_N[keep_N],
            seed_N=self.seed_N[keep_N],
            features_NF=self.features_NF[keep_N],
        )

    def place(self, signal: str, window: int) -> int:
        """Return the feature of a signal in a window."""
        return self.signals.index(signal) * len(SPANS) + window

    def calibrated(self) -> Library:
        """Return the library with temperature and farthest distance set on runs whose seed was held out."""
        held = [(self.only(self.seed_N != seed), self.seed_N == seed) for seed in sorted(set(self.seed_N))]
        if len(held) < 2:
            return self
        distance_NC, right_N, far_N = [], [], []
        for rest, here_N in held:
            for features_F, fault in zip(self.features_NF[here_N], self.fault_N[here_N], strict=True):
                if fault in rest.faults:
                    distance_NC.append(rest.distances(features_F))
                    right_N.append(rest.faults.index(str(fault)))
                    far_N.append(rest.per_feature(features_F))
        if not right_N or len({len(row) for row in distance_NC}) > 1:
            return self
        return replace(
            self,
            temperature=_temperature(np.array(distance_NC), np.array(right_N)),
            farthest=float(np.quantile(far_N, FARTHEST)),
        )


def softmax(score_C: np.ndarray) -> np.ndarray:
    """Return probabilities proportional to exp(score)."""
    weight_C = np.exp(score_C - score_C.max(-1, keepdims=True))
    return weight_C / weight_C.sum(-1, keepdims=True)


def _temperature(distance_NC: np.ndarray, right_N: np.ndarray) -> float:
    """Return the temperature with the largest likelihood of the right faults."""
    choices = np.geomspace(0.3, 300, 61)
    rows = np.arange(len(right_N))
    losses = [-np.log(softmax(-distance_NC / (2 * one))[rows, right_N] + 1e-12).mean() for one in choices]
    return float(choices[int(np.argmin(losses))])


def _mean(features_NF: np.ndarray) -> np.ndarray:
    known_NF = np.isfinite(features_NF)
    count_F = known_NF.sum(0)
    total_F = np.where(known_NF, features_NF, 0).sum(0)
    return np.where(count_F > 0, total_F / np.maximum(count_F, 1), np.nan)
