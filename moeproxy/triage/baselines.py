"""What usual methods reach on the same runs: isolation forest, local outlier factor, z-score; kNN, SVM, boosting.

Only `moeproxy.triage.evaluate` uses them; they need scikit-learn.

Axes: N run, R row, S step, F feature.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from moeproxy.triage.arrays import finite
from moeproxy.triage.learn import Run, references
from moeproxy.triage.library import Library
from moeproxy.triage.reference import ALPHA, exceeded_by

EARLY, WINDOW = 10, 10

EVERY = "all"
"""Label of rows that score the runs of every model together."""


def baseline_detectors(runs: Sequence[Run], levels: Sequence[str]) -> list[dict[str, object]]:
    """Return recall, F1 and false alarms of usual detectors, beside the healthy runs of each model.

    Every detector gets the same signals, and a threshold set on healthy runs that it was not fitted to (five folds),
    in the same way as ours.
    """
    rows = []
    for name, score in _DETECTORS.items():
        judged = [(run, alarm) for part in _by_model(runs) for run, alarm in _judged(part, score)]
        healthy = [alarm for run, alarm in judged if run.info.healthy]
        n_steps = sum(len(run.table.steps_S) for run, _ in judged if run.info.healthy)
        for level in levels:
            broken = [alarm for run, alarm in judged if run.level == level]
            hits, false = sum(broken), sum(healthy)
            rows.append(
                {
                    "mode": "beside healthy runs",
                    "method": name,
                    "model": "all",
                    "level": level,
                    "runs": len(broken),
                    "healthy_runs": len(healthy),
                    "recall": hits / max(len(broken), 1),
                    "f1": 2 * hits / max(hits + false + len(broken), 1),
                    "false_alarms_per_1000_steps": 1000 * false / max(n_steps, 1),
                }
            )
    return rows


def baseline_classes(library: Library, level: str, macro_f1: Callable) -> list[dict[str, object]]:
    """Return macro-F1 of usual classifiers on the same fingerprints, seeds held out."""
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.neighbors import KNeighborsClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import Normalizer, StandardScaler
    from sklearn.svm import SVC

    classes = {
        "kNN (cosine)": lambda: make_pipeline(Normalizer(), KNeighborsClassifier(1)),
        "SVM (linear)": lambda: make_pipeline(StandardScaler(), SVC(kernel="linear", C=1.0)),
        "gradient boosting": lambda: HistGradientBoostingClassifier(max_iter=60, max_depth=3, random_state=0),
    }
    at, features_NF = library.level_N == level, np.nan_to_num(library.features_NF)
    named = {name: np.full(len(at), "", object) for name in classes}
    for seed in np.unique(library.seed_N[at]):
        train_N, here_N = library.seed_N != seed, at & (library.seed_N == seed)
        for name, make in classes.items():
            model = make().fit(features_NF[train_N], library.fault_N[train_N].astype(str))
            named[name][here_N] = model.predict(features_NF[here_N])
    rows = []
    for tested in (EVERY, *dict.fromkeys(map(str, library.model_N))):
        test_N = at if tested == EVERY else at & (library.model_N == tested)
        right = library.fault_N[test_N]
        for name, told_N in named.items():
            score = {"accuracy": float(np.mean(told_N[test_N] == right)), "macro_f1": macro_f1(right, told_N[test_N])}
            rows.append({"method": name, "tested": tested, "trained": "all models", "level": level, **score})
    return rows


def _by_model(runs: Sequence[Run]) -> list[list[Run]]:
    usual = references(runs)
    parts = []
    for model, members in usual.items():
        settings = members[0].info.config
        parts.append([run for run in runs if run.info.model == model and run.info.config == settings])
    return parts


def _judged(runs: Sequence[Run], score: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> list[tuple[Run, bool]]:
    """Return whether each run alarms; a healthy run is judged by a fit without its fold."""
    rows, steps_S = tuple(dict.fromkeys(row for run in runs for row in run.table.rows)), runs[0].table.steps_S
    table = np.stack([_features(run.table.at(rows, steps_S)) for run in runs])
    healthy_N = np.array([run.info.healthy for run in runs])
    fold_N = np.array([run.info.seed % 5 if run.info.healthy else -1 for run in runs])
    value_N = np.full(len(runs), np.nan)
    for fold in range(5):
        here_N, rest_N = healthy_N & (fold_N == fold), healthy_N & (fold_N != fold)
        if here_N.any():
            value_N[here_N] = score(table[rest_N], table[here_N])
    value_N[~healthy_N] = score(table[healthy_N], table[~healthy_N])
    alarms = []
    for place, run in enumerate(runs):
        others_N = healthy_N.copy()
        others_N[place] = False
        alarms.append((run, bool(value_N[place] > exceeded_by(value_N[others_N], ALPHA, least=0.0))))
    return alarms


def _features(values_RS: np.ndarray) -> np.ndarray:
    """Return window statistics (F,): means of the thirds of each row, its largest jump, its share of broken values."""
    known_RS = np.nan_to_num(finite(values_RS))
    thirds = [part.mean(1) for part in np.array_split(known_RS, 3, axis=1)]
    return np.concatenate([*thirds, np.abs(np.diff(known_RS, axis=1)).max(1), np.isinf(values_RS).mean(1)])


def _scaled(fit_NF: np.ndarray, test_NF: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    centre_F, spread_F = np.median(fit_NF, axis=0), fit_NF.std(0) + 1e-6
    return (fit_NF - centre_F) / spread_F, np.clip((test_NF - centre_F) / spread_F, -1e6, 1e6)


def _z_score(fit_NF: np.ndarray, test_NF: np.ndarray) -> np.ndarray:
    return np.abs(_scaled(fit_NF, test_NF)[1]).max(1)


def _isolation(fit_NF: np.ndarray, test_NF: np.ndarray) -> np.ndarray:
    from sklearn.ensemble import IsolationForest

    fit_NF, test_NF = _scaled(fit_NF, test_NF)
    return -IsolationForest(n_estimators=200, random_state=0).fit(fit_NF).score_samples(test_NF)


def _local_outlier(fit_NF: np.ndarray, test_NF: np.ndarray) -> np.ndarray:
    from sklearn.neighbors import LocalOutlierFactor

    fit_NF, test_NF = _scaled(fit_NF, test_NF)
    neighbours = min(10, len(fit_NF) - 1)
    return -LocalOutlierFactor(n_neighbors=neighbours, novelty=True).fit(fit_NF).score_samples(test_NF)


_DETECTORS = {
    "largest z-score": _z_score,
    "isolation forest": _isolation,
    "local outlier factor": _local_outlier,
}
