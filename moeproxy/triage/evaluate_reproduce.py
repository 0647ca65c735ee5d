"""Whether reproducing a failure on a proxy tells more than its trace alone, on recorded runs.

The trace alone: the library of all models but the one that is tested, without runs of the same seed. Reproduced: the
same candidates, ranked again by how they match recorded runs of one proxy with other seeds.

Axes: N run.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moeproxy.triage.aligned import Aligned, aligned
from moeproxy.triage.detect import ALARM, BESIDE, judge
from moeproxy.triage.diagnose import likeliest
from moeproxy.triage.learn import Fits, Run, references
from moeproxy.triage.library import Library
from moeproxy.triage.reproduce import score


def reproduction_scores(runs: Sequence[Run], library: Library) -> list[dict[str, object]]:
    """Return top-1 and top-3 shares of the trace alone and after reproduction, by tested model, proxy and level.

    Args:
        runs: recorded runs.
        library: fingerprints of their broken ones, in the same order (`learn_beside(runs)`).
    """
    broken = [run for run in runs if not run.info.healthy]
    courses = _courses(runs, broken)
    alone_N = _by_trace(broken, library)
    models = list(dict.fromkeys(run.info.model for run in broken))
    rows: list[dict[str, object]] = []
    for tested in models:
        for proxy in models:
            for level in ("clear", "subtle"):
                places = [n for n, run in enumerate(broken) if (run.info.model, run.level) == (tested, level)]
                if places and proxy != tested:
                    ranked = [_ranked(place, proxy, broken, courses, alone_N[place]) for place in places]
                    rows.append(
                        {"tested": tested, "proxy": proxy, "level": level, "runs": len(places), **_shares(ranked)}
                    )
    return rows


def _courses(runs: Sequence[Run], broken: Sequence[Run]) -> list[Aligned]:
    fitted = {model: Fits([run.table for run in members]) for model, members in references(runs).items()}
    courses = []
    for run in broken:
        found = fitted[run.info.model].departures(run.table)
        seen = judge(run.table, found, BESIDE, 0)
        onset = seen.onset if seen.verdict == ALARM else run.info.onset
        courses.append(aligned(run.table, found, int(onset or 0)))
    return courses


def _by_trace(broken: Sequence[Run], library: Library) -> list[list[tuple[str, float]]]:
    """Return the candidates of every run (N), by other models and other seeds."""
    mine = [(run.info.model, run.info.seed) for run in broken]
    others = {
        (model, seed): library.only((library.model_N != model) & (library.seed_N != seed)).calibrated()
        for model, seed in set(mine)
    }
    return [likeliest(others[key], features_F) for key, features_F in zip(mine, library.features_NF, strict=True)]


def _ranked(
    place: int, proxy: str, broken: Sequence[Run], courses: Sequence[Aligned], alone: Sequence[tuple[str, float]]
) -> tuple[str, list[str], list[str]]:
    """Return the right fault of a run, the candidates by its trace alone, and those after reproduction."""
    mine = broken[place].info
    matches: dict[tuple[str, float], list[float]] = {}
    for other, run in zip(courses, broken, strict=True):
        if run.info.model == proxy and run.info.seed != mine.seed:
            key = (str(run.info.fault), run.info.strength)
            matches.setdefault(key, []).append(courses[place].match(other))
    best: dict[str, float] = {}
    for (fault, _), found in matches.items():
        best[fault] = max(best.get(fault, -1.0), float(np.nanmean(found)))
    again = sorted(alone, key=lambda one: -score(one[1], best.get(one[0], float("nan"))))
    return str(mine.fault), [name for name, _ in alone], [name for name, _ in again]


def _shares(ranked: Sequence[tuple[str, list[str], list[str]]]) -> dict[str, float]:
    def share(which: int, first: int) -> float:
        return float(np.mean([one[0] in one[which][:first] for one in ranked]))

    return {
        "alone_top1": share(1, 1),
        "alone_top3": share(1, 3),
        "reproduced_top1": share(2, 1),
        "reproduced_top3": share(2, 3),
    }
