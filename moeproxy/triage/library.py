"""What every known fault looks like: fingerprints of recorded runs, and the probability that a run is like one.

Each kind (a fault at one level) is a normal distribution of fingerprints around its mean, with one covariance for all
(linear discriminant analysis, shrunk towards its diagonal: there are more features than runs of a fault). Features that
a run does not have are left out of mean and covariance, so that a log with few signals is judged by these.

Axes: N recorded run, C fault, K kind, F feature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from moeproxy.triage.arrays import known_mean
from moeproxy.triage.fingerprint import SPANS, Units

SHRINK = 0.3
"""Share of the covariance that its diagonal keeps alone."""

FLOORS = (0.1, 0.03, 0.01, 0.003)
"""Variances that may be added to every feature, the largest first; `Library.calibrated` takes one of them."""

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
        floor: variance added to every feature.
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
    floor: float = FLOORS[0]
    temperature: float = 1.0
    farthest: float = np.inf

    @cached_property
    def faults(self) -> tuple[str, ...]:
        """Ids of the known faults (C)."""
        return tuple(sorted(set(map(str, self.fault_N))))

    @cached_property
    def kinds(self) -> tuple[tuple[str, str], ...]:
        """Fault and level of each kind (K): a subtle fault is no smaller clear one, some signals do not move at all."""
        return tuple(sorted(set(zip(map(str, self.fault_N), map(str, self.level_N), strict=True))))

    @cached_property
    def mean_KF(self) -> np.ndarray:
        """Mean features of each kind; NaN where its runs do not have one."""
        place_N = self._kind_N
        return np.stack([known_mean(self.features_NF[place_N == k], axis=0) for k in range(len(self.kinds))])

    @cached_property
    def covariance_FF(self) -> np.ndarray:
        """Covariance of the features within kinds, shrunk."""
        left_NF = np.nan_to_num(self.features_NF - self.mean_KF[self._kind_N])
        free = max(len(left_NF) - len(self.kinds), 1)
        raw_FF = left_NF.T @ left_NF / free
        return (1 - SHRINK) * raw_FF + SHRINK * np.diag(np.diag(raw_FF)) + self.floor * np.eye(len(raw_FF))

    def distances(self, features_F: np.ndarray) -> np.ndarray:
        """Return the squared distance (K,) of a fingerprint to each kind, by the features that it has."""
        known_F = self._known(features_F)
        off_KF = features_F[known_F] - self.mean_KF[:, known_F]
        return ((off_KF @ self._precision(known_F)) * off_KF).sum(1)

    def nearest(self, features_F: np.ndarray) -> str:
        """Return the fault with the nearest kind."""
        return self.kinds[int(self.distances(features_F).argmin())][0]

    def per_feature(self, features_F: np.ndarray) -> float:
        """Return the distance to the nearest kind over the number of features that the run has."""
        return float(self.distances(features_F).min() / max(self._known(features_F).sum(), 1))

    def confidences(self, features_F: np.ndarray) -> np.ndarray:
        """Return the probability (C,) of each fault, given that it is one of them."""
        return self._by_fault(softmax(-self.distances(features_F) / (2 * self.temperature)))

    def kind_of(self, fault: str, features_F: np.ndarray) -> int:
        """Return the nearest kind (index into `kinds`) of a fault."""
        distance_K = self.distances(features_F)
        mine = [k for k, (name, _) in enumerate(self.kinds) if name == fault]
        return min(mine, key=lambda k: distance_K[k])

    @cached_property
    def _kind_N(self) -> np.ndarray:
        place = {kind: index for index, kind in enumerate(self.kinds)}
        return np.array([place[str(f), str(level)] for f, level in zip(self.fault_N, self.level_N, strict=True)])

    @cached_property
    def _precisions(self) -> dict[bytes, np.ndarray]:
        return {}

    def _precision(self, known_F: np.ndarray) -> np.ndarray:
        key = known_F.tobytes()  # logs of one program have the same features
        if key not in self._precisions:
            self._precisions[key] = np.linalg.inv(self.covariance_FF[np.ix_(known_F, known_F)])
        return self._precisions[key]

    def _known(self, features_F: np.ndarray) -> np.ndarray:
        return np.isfinite(features_F) & np.isfinite(self.mean_KF).all(0)

    def _by_fault(self, probability_K: np.ndarray) -> np.ndarray:
        names = [fault for fault, _ in self.kinds]
        found = dict.fromkeys(self.faults, 0.0)
        for name, value in zip(names, probability_K, strict=True):
            found[name] += float(value)
        return np.array([found[name] for name in self.faults])

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
        """Return the library with floor, temperature and farthest distance set on runs whose seed was held out.

        The floor is the one by which the right faults are likeliest, each floor at its best temperature.
        """
        found = [held for floor in FLOORS if (held := replace(self, floor=floor)._held_out()) is not None]
        if not found:
            return self
        best = min(found, key=lambda held: held.loss)
        far = float(np.quantile(best.far_N, FARTHEST))
        return replace(self, floor=best.floor, temperature=best.temperature, farthest=far)

    def _held_out(self) -> _HeldOut | None:
        """Judge every run by those with another seed; None where no fault has two seeds."""
        held, far = [], []
        for seed in sorted(set(self.seed_N)):
            rest = self.only(self.seed_N != seed)
            mine = [n for n in np.flatnonzero(self.seed_N == seed) if str(self.fault_N[n]) in rest.faults]
            if mine:
                named_K = np.array([name for name, _ in rest.kinds])
                right_NK = np.stack([named_K == str(self.fault_N[n]) for n in mine])
                held.append((np.stack([rest.distances(self.features_NF[n]) for n in mine]), right_NK))
                far += [rest.per_feature(self.features_NF[n]) for n in mine]
        if not held:
            return None
        return _HeldOut(self.floor, *_temperature(held), np.array(far))


@dataclass(frozen=True)
class _HeldOut:
    """How runs of held-out seeds are judged with one floor: mean loss at the best temperature, distances (N,)."""

    floor: float
    temperature: float
    loss: float
    far_N: np.ndarray


def softmax(score_C: np.ndarray) -> np.ndarray:
    """Return probabilities proportional to exp(score)."""
    weight_C = np.exp(score_C - score_C.max(-1, keepdims=True))
    return weight_C / weight_C.sum(-1, keepdims=True)


def _temperature(held: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[float, float]:
    """Return the temperature with the largest likelihood of the right faults, and the mean loss there.

    Args:
        held: squared distances (N, K) and which kinds are the right ones (N, K), for every held-out seed.
    """
    choices = np.geomspace(0.3, 300, 61)
    loss_C = np.array([np.concatenate([_losses(*each, one) for each in held]).mean() for one in choices])
    best = int(loss_C.argmin())
    return float(choices[best]), float(loss_C[best])


def _losses(distance_NK: np.ndarray, right_NK: np.ndarray, temperature: float) -> np.ndarray:
    chance_NK = softmax(-distance_NK / (2 * temperature))
    return -np.log(np.where(right_NK, chance_NK, 0).sum(1) + 1e-12)
