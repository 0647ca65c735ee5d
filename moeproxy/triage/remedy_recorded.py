"""The study of remedies as it is kept: results, tables, a page, and the runs that were made for it.

A folder (`data/remedy` is the one that comes with moeproxy) holds

- `study.json`: a `Remedy` for every failure that was treated, on the proxy and on the original;
- `runs/<model>.parquet`: the treated runs, one pack a model, without single responses. The broken runs and their
  healthy twins are those of `data/bench`;
- `remedies.csv`, `scores.csv`, `REMEDIES.md`: the same as tables and as a page.

Reading needs no torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import pandas as pd

from moeproxy.errors import ComparisonError
from moeproxy.files import atomic_file
from moeproxy.places import data_dir
from moeproxy.traces.pack import load_pack, save_pack
from moeproxy.traces.trace import Trace
from moeproxy.triage.catalogue import load_catalogue
from moeproxy.triage.remedy_page import page
from moeproxy.triage.remedy_result import Remedy
from moeproxy.triage.remedy_table import scores, table

STUDY, TABLE, SCORES, PAGE, RUNS = "study.json", "remedies.csv", "scores.csv", "REMEDIES.md", "runs"
_FORMAT, _VERSION = "moeproxy.remedy-study", 1

Run = tuple[str, str, int, str]
"""What tells a treated run from others: model, fault, seed, remedy."""


def shipped() -> Path:
    """Return the folder of the study that comes with moeproxy."""
    return data_dir() / "remedy"


@dataclass(frozen=True, repr=False)
class RemedyStudy:
    """Results of a study of remedies, and the treated runs where they are kept.

    Args:
        proxies: what was tried on a proxy.
        originals: what was kept there, tried on the original.
        folder: where the treated runs lie; None without any.

    Example:
        >>> study = RemedyStudy.load()
        >>> study.found("cluster-16", "kl_explosion").best("mitigation").remedy
        'lower_rate'
    """

    proxies: tuple[Remedy, ...]
    originals: tuple[Remedy, ...]
    folder: Path | None = field(default=None, compare=False)

    @staticmethod
    def load(folder: str | Path | None = None) -> RemedyStudy:
        """Read what `save` wrote, by default what comes with moeproxy; runs are read when they are first asked for.

        Raises:
            ComparisonError: there is no such study, or it is broken.
        """
        place = Path(folder) if folder is not None else shipped()
        try:
            stored = json.loads((place / STUDY).read_text(encoding="utf-8"))
            if (stored["format"], stored["version"]) != (_FORMAT, _VERSION):
                raise ValueError("another format or version")
            proxies, originals = (
                tuple(Remedy.from_dict(one) for one in stored[name]) for name in ("proxies", "originals")
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ComparisonError(
                f"no study of remedies ({error!r})",
                where=place / STUDY,
                expected="what python -m moeproxy.triage.remedy_study wrote",
            ) from error
        return RemedyStudy(proxies, originals, place)

    def save(self, folder: str | Path, runs: Iterable[Trace] = ()) -> Path:
        """Write results, tables, page and the treated runs; return the folder.

        Args:
            folder: files of an earlier study in it are replaced.
            runs: the treated runs; their single responses are left out.

        Raises:
            ComparisonError: a run has not exactly one remedy.
        """
        place = Path(folder)
        packs: dict[str, list[Trace]] = {}
        for trace in sorted(runs, key=_name):
            info = replace(trace.provenance, source="recorded")
            packs.setdefault(info.model, []).append(Trace(trace.steps, None, info))
        for model, traces in packs.items():
            save_pack(traces, place / RUNS / f"{model}.parquet")
        stored = {"format": _FORMAT, "version": _VERSION}
        stored |= {name: [one.to_dict() for one in getattr(self, name)] for name in ("proxies", "originals")}
        _write(place / STUDY, json.dumps(stored, indent=1, allow_nan=False) + "\n")
        families = {fault: entry.family for fault, entry in load_catalogue().items()}
        tables = ((TABLE, table(self.proxies, self.originals, families)), (SCORES, self.scores.reset_index()))
        for name, frame in tables:
            _write(place / name, frame.to_csv(index=False, float_format="%.4f"))
        _write(place / PAGE, page(self.proxies, self.originals, families))
        return place

    @property
    def scores(self) -> pd.DataFrame:
        """What the study says, see `remedy_table.scores`."""
        return scores(self.proxies, self.originals)

    @property
    def faults(self) -> tuple[str, ...]:
        """Faults that were treated, in the order of the results."""
        return tuple(dict.fromkeys(one.cause for one in self.proxies))

    @property
    def models(self) -> tuple[str, ...]:
        """Labels of the models, the proxy first."""
        return tuple(dict.fromkeys(one.model for one in (*self.proxies, *self.originals)))

    def found(self, model: str, fault: str, seed: int | None = None) -> Remedy | None:
        """Return what was tried on a model against a fault, of the first seed if none is given; None for nothing."""
        every = (*self.proxies, *self.originals)
        fitting = (one for one in every if (one.model, one.cause) == (model, fault) and seed in (None, one.seed))
        return next(fitting, None)

    def treated(self, model: str, fault: str, seed: int, remedy: str) -> Trace | None:
        """Return a treated run, None where it was not made or is not kept."""
        return self._runs.get((model, fault, seed, remedy))

    @cached_property
    def _runs(self) -> Mapping[Run, Trace]:
        files = sorted((self.folder / RUNS).glob("*.parquet")) if self.folder else []
        return {_name(trace): trace for file in files for trace in load_pack(file)}

    def __repr__(self) -> str:
        return f"RemedyStudy({len(self.proxies)} failures treated on a proxy, {len(self.originals)} on the original)"


def _name(trace: Trace) -> Run:
    run = trace.provenance
    if len(run.remedies) != 1 or run.fault is None:
        raise ComparisonError(f"{run}: {len(run.remedies)} remedies", expected="a broken run with one")
    return (run.model, run.fault, run.seed, run.remedies[0][0])


def _write(path: Path, text: str) -> None:
    with atomic_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
