"""The study of remedies as one table, and what it says: mitigations and repairs apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import pandas as pd

from moeproxy.triage.remedy_result import KINDS, Kind, Remedy, Trial, transfers

PROXY, ORIGINAL = "proxy", "original"


def table(
    proxies: Sequence[Remedy], originals: Sequence[Remedy] = (), families: Mapping[str, str] | None = None
) -> pd.DataFrame:
    """Return one row a trial, on proxies and then on the original; a run that is not ill has one row without a remedy.

    Args:
        proxies: results on a proxy.
        originals: results on the original of what was kept there.
        families: family of each fault.
    """
    named = families or {}
    rows = [row | {"stage": PROXY} for one in proxies for row in _rows(one)]
    rows += [row | {"stage": ORIGINAL} for one in originals for row in _rows(one)]
    for row in rows:
        row["family"] = named.get(str(row["fault"]), "")
    first = ["stage", "model", "family", "fault", "seed", "onset", "remedy", "kind", "accepted"]
    frame = pd.DataFrame(rows)
    return cast(pd.DataFrame, frame[[*first, *(name for name in frame if name not in first)]])


def _rows(found: Remedy) -> list[dict[str, Any]]:
    head = {
        "model": found.model,
        "fault": found.cause,
        "seed": found.seed,
        "onset": found.onset,
        "ill": found.ill,
        "margin": found.margin,
        "before": found.before.value,
        "reward_loss_before": found.before.reward_loss,
    }
    return [head | _trial(trial) for trial in found.trials] or [head | dict.fromkeys(_TRIAL)]


_TRIAL = ("remedy", "kind", "after", "reward_loss_after", "accepted", "recovered", "harmful", "exact", "words")


def _trial(trial: Trial) -> dict[str, Any]:
    after, loss = (trial.after.value, trial.after.reward_loss) if trial.after else (np.nan, np.nan)
    flags = (trial.accepted, trial.recovered, trial.harmful, trial.exact)
    return dict(zip(_TRIAL, (trial.remedy, trial.kind, after, loss, *flags, trial.words), strict=True))


def scores(proxies: Sequence[Remedy], originals: Sequence[Remedy] = ()) -> pd.DataFrame:
    """Return what the study says, one row for each kind of remedy and one for both.

    Runs that are not ill count in `ill` only. A run counts as `mitigated` when a remedy of the kind was kept, as
    `recovered` when it is then as healthy runs are, and as `restored` when it is then its healthy twin bit for bit, so
    that the remedy took the fault out. `change` is the median relative change of severity, 0 where nothing was kept;
    `harm_tried` the share of all trials that made things worse, `harm_kept` that of those kept. On the original
    `helps` is the share of what was kept, where the original is ill, that would be kept there too, `harms` the share
    that makes it worse.
    """
    rows = [_score(proxies, originals, kind) for kind in (*KINDS, None)]
    return pd.DataFrame(rows).set_index("kind")


def _score(proxies: Sequence[Remedy], originals: Sequence[Remedy], kind: Any) -> dict[str, Any]:
    ill = [found for found in proxies if found.ill]
    kept = [found.best(kind) for found in ill]
    trials = [trial for found in ill for trial in found.trials if kind in (None, trial.kind)]
    places = {(found.cause, found.seed, found.onset): found for found in originals}
    pairs = [(found, places.get((found.cause, found.seed, found.onset))) for found in ill]
    moved = [pair for one, other in pairs if other for pair in transfers(one, other) if kind in (None, pair.proxy.kind)]
    there = [pair.original for pair in moved if pair.original]
    accepted = [trial for trial in trials if trial.accepted]
    return {
        "kind": kind or "any",
        "runs": len(proxies),
        "ill": len(ill),
        "mitigated": _share([trial is not None for trial in kept]),
        "recovered": _share([trial is not None and trial.recovered for trial in kept]),
        "restored": _share([trial is not None and trial.exact for trial in kept]),
        "change": float(np.median([(trial.change or 0.0) if trial else 0.0 for trial in kept])) if kept else np.nan,
        "trials": len(trials),
        "harm_tried": _share([trial.harmful for trial in trials]),
        "harm_kept": _share([trial.harmful for trial in accepted]),
        "moved": len(moved),
        "not_ill_there": len(moved) - len(there),
        "helps": _share([trial.accepted for trial in there]),
        "harms": _share([trial.harmful for trial in there]),
    }


def reversals(proxies: Sequence[Remedy], kind: Kind) -> dict[str, float]:
    """Return how much of what remedies of a kind reach is the fault taken out: the run is its healthy twin bit for bit.

    Returns:
        `ill`: ill runs; `kept`: of these, those with a kept trial of the kind; `exact`: those with a kept trial that is
        the twin bit for bit; `mitigated`, `recovered`: shares of ill runs by kept trials that are not.
    """
    ill = [found for found in proxies if found.ill]
    kept = [[trial for trial in found.trials if trial.accepted and trial.kind == kind] for found in ill]
    others = [[trial for trial in mine if not trial.exact] for mine in kept]
    return {
        "ill": len(ill),
        "kept": sum(map(bool, kept)),
        "exact": sum(any(trial.exact for trial in mine) for mine in kept),
        "mitigated": _share([bool(mine) for mine in others]),
        "recovered": _share([any(trial.recovered for trial in mine) for mine in others]),
    }


def _share(flags: Sequence[bool]) -> float:
    return float(np.mean(flags)) if flags else np.nan


def words(scored: pd.DataFrame) -> str:
    """Return the scores as sentences."""
    lines = []
    for kind, row in scored.to_dict("index").items():
        lines.append(
            f"{kind}: {_percent(row['mitigated'])} of {row['ill']:.0f} ill runs mitigated (of {row['runs']:.0f}), "
            f"{_percent(row['recovered'])} as healthy runs are, {_percent(row['restored'])} bit for bit; "
            f"median change of severity {_percent(row['change'])}; harm {_percent(row['harm_kept'])} of what was kept, "
            f"{_percent(row['harm_tried'])} of {row['trials']:.0f} trials; on the original {_percent(row['helps'])} of "
            f"{row['moved'] - row['not_ill_there']:.0f} help, {_percent(row['harms'])} harm"
        )
    return "\n".join(lines)


def _percent(share: Any) -> str:
    return "–" if share is None or np.isnan(share) else f"{share:.0%}"
