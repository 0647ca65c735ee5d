"""What came of reproducing a failure on a proxy: candidates ranked by how well the proxy's response matches.

Reading needs NumPy only; `triage.reproduce` makes it.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moeproxy.errors import ComparisonError
from moeproxy.files import atomic_file
from moeproxy.triage.jsonable import number, plain, sure

FORMAT, VERSION = "moeproxy.reproduction", 1


@dataclass(frozen=True)
class Candidate:
    """A fault that was reproduced on the proxy, or was to be.

    Args:
        fault, title: of the catalogue.
        confidence: of the trace alone.
        match: mean cosine, over the proxy's runs with this fault, of its response and that of the failing run; NaN
            without such a run.
        strength: strength of the fault whose runs match best.
        n_recorded, n_live: runs of that strength, recorded and made now.
        agree, differ: signals that move alike on both, and those that do not, the strongest first.
        score: what candidates are ranked by.
    """

    fault: str
    title: str
    confidence: float
    match: float
    strength: float
    n_recorded: int
    n_live: int
    agree: tuple[str, ...]
    differ: tuple[str, ...]
    score: float

    @property
    def sentence(self) -> str:
        """The candidate in words."""
        return self.told()

    def told(self, unknown: bool = False) -> str:
        """Return the candidate in words; of an unknown failure no confidence is given, only what it is nearest to."""
        sureness = f"confidence {sure(self.confidence)} from the trace alone"
        if unknown:
            sureness = f"{sure(self.confidence)} among known faults, though the trace is like none of them"
        told = f"{self.fault} ({self.title}): {sureness}"
        if not (self.n_recorded or self.n_live):
            return f"{told}; not reproduced, the proxy has no run with it"
        runs = " and ".join(
            f"{n} {kind} run{'' if n == 1 else 's'}"
            for n, kind in ((self.n_recorded, "recorded"), (self.n_live, "new"))
            if n
        )
        match = "no signal to match" if math.isnan(self.match) else f"match {self.match:.2f}"
        words = [f"{told}; {match} with {runs} of the proxy at strength {self.strength:g}"]
        words += [f"alike: {', '.join(self.agree)}"] if self.agree else []
        words += [f"unlike: {', '.join(self.differ)}"] if self.differ else []
        return "; ".join(words)


@dataclass(frozen=True)
class Reproduction:
    """A failure laid over the proxy's responses to the faults that may have caused it.

    Args:
        model: label of the proxy.
        onset: step from which the failing run departs.
        candidates: ranked.
        background: match that, in 95 % of draws, the best of `choices` of the proxy's runs with other faults stays
            below; NaN where fewer than 20 are known.
        minutes: spent on new runs.
        left: candidates for which no time was left.
        notes: what a reader must know.
        choices: candidates with a match, of which one is the best.
        unknown: why the trace alone is like no recorded fault, in a sentence; "" where it is like one.
    """

    model: str
    onset: int
    candidates: tuple[Candidate, ...]
    background: float
    minutes: float
    left: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    choices: int = 1
    unknown: str = ""

    @property
    def best(self) -> Candidate | None:
        """The candidate whose runs match best, wherever it ranks; None where no match is known."""
        return max((one for one in self.candidates if not math.isnan(one.match)), key=lambda c: c.match, default=None)

    @property
    def reproduced(self) -> bool:
        """Whether the first candidate matches better than the proxy's other faults do."""
        return bool(self.candidates) and self.candidates[0].match > self.background

    @property
    def sentences(self) -> tuple[str, ...]:
        """The result in plain words."""
        unknown = bool(self.unknown)
        told = (f"{place}. {one.told(unknown)}." for place, one in enumerate(self.candidates, start=1))
        left = (f"No time was left for {', '.join(self.left)}.",) if self.left else ()
        first = f"{self.unknown} Among the nearest: {self._verdict}" if unknown else self._verdict
        return (first, *told, *left, *self.notes)

    @property
    def _verdict(self) -> str:
        """What came of the candidate that ranks first, and which one matches best where that is another."""
        best = self.best
        if best is None:
            known = any(one.n_recorded or one.n_live for one in self.candidates)
            return f"{self.model} has no run with any candidate{' that can be compared' if known else ''}."
        first, unknown = self.candidates[0], math.isnan(self.background)
        few = "; of other faults too few are known" if unknown else ""
        if best is first and unknown:
            return f"{self.model} matches best with {first.fault} ({first.match:.2f}){few}."
        limit = self._limit(math.isnan(first.match))
        other = "" if best is first else f"; {best.fault} matches best ({best.match:.2f}{limit})"
        return f"{self._of_first(first)}{other}{few}."

    def _of_first(self, first: Candidate) -> str:
        if math.isnan(first.match):
            return f"{first.fault} ranks first, but {self.model} has no run with it that can be compared"
        if math.isnan(self.background):
            return f"{first.fault} ranks first overall (match {first.match:.2f} with {self.model})"
        if self.reproduced:
            said = f"{self.model} shows the failure when {first.fault} is injected"
        else:
            said = f"{self.model} does not show the failure by {first.fault}"
        return f"{said} (match {first.match:.2f}{self._limit()})"

    def _limit(self, wanted: bool = True) -> str:
        if not wanted or math.isnan(self.background):
            return ""
        return f"; {self.level}"

    @property
    def level(self) -> str:
        """The background in words."""
        if self.choices < 2:
            return f"95 % of its runs with faults that are no candidates stay below {self.background:.2f}"
        best = f"the best of {self.choices} runs with faults that are no candidates"
        return f"{best} stays below {self.background:.2f} in 95 % of draws"

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        return plain({"format": FORMAT, "version": VERSION, **asdict(self), "sentences": self.sentences})

    def save(self, path: str | Path) -> Path:
        """Write the result as JSON, atomically, and return the path."""
        with atomic_file(Path(path)) as temporary:
            temporary.write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")
        return Path(path)

    @staticmethod
    def load(path: str | Path) -> Reproduction:
        """Read what `save` wrote.

        Raises:
            ComparisonError: the file is absent or no such result.
        """
        try:
            stored = json.loads(Path(path).read_text(encoding="utf-8"))
            if (stored.pop("format"), stored.pop("version")) != (FORMAT, VERSION):
                raise ValueError("another format")
            stored.pop("sentences")
            candidates = tuple(_candidate(one) for one in stored.pop("candidates"))
            numbers = {name: number(stored.pop(name)) for name in ("background", "minutes")}
            lists = {name: tuple(stored.pop(name)) for name in ("left", "notes")}
            return Reproduction(candidates=candidates, **numbers, **lists, **stored)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ComparisonError("no reproduction", where=path, expected="a file of Reproduction.save") from error

    def __repr__(self) -> str:
        named = ", ".join(f"{one.fault} {one.match:.2f}" for one in self.candidates[:3])
        return f"Reproduction({self.model}, onset {self.onset}: {named}; others below {self.background:.2f})"

    def _repr_html_(self) -> str:
        first, *rest = (html.escape(sentence) for sentence in self.sentences)
        return f"<p><b>{first}</b></p><ul>{''.join(f'<li>{line}</li>' for line in rest)}</ul>"


def _candidate(stored: Mapping[str, Any]) -> Candidate:
    lists = {name: tuple(stored[name]) for name in ("agree", "differ")}
    numbers = {name: number(stored[name]) for name in ("confidence", "match", "strength", "score")}
    return Candidate(**{**stored, **lists, **numbers})
