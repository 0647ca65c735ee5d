"""Which runs a question about a fault is answered with: live ones where there are any, else recorded ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from moeproxy.traces.trace import Trace


@dataclass(frozen=True)
class Asked:
    """What the reader wants to see.

    Args:
        fault: id in the catalogue.
        strength: in (0, 1].
        onsets: first step at which the fault acts, by seed.
        models: labels, the original first.
        steps: length of live runs.
        live: whether live runs come before recorded ones; otherwise they are left out.
    """

    fault: str
    strength: float
    onsets: Mapping[int, int]
    models: tuple[str, ...]
    steps: int
    live: bool = True

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds, ascending."""
        return tuple(sorted(self.onsets))

    @property
    def aligned(self) -> bool:
        """Whether the runs must be laid over each other by their onsets, since these differ."""
        return len(set(self.onsets.values())) > 1

    @property
    def by_onset(self) -> dict[int, tuple[int, ...]]:
        """Seeds that share an onset."""
        groups = {onset: tuple(s for s in self.seeds if self.onsets[s] == onset) for onset in self.onsets.values()}
        return dict(sorted(groups.items()))


@dataclass(frozen=True)
class ModelRuns:
    """The runs of one model that are drawn.

    Args:
        label: of the model.
        broken: runs with the fault, by seed.
        healthy: their twins, by seed.
        band: all healthy runs at the same settings.
        n_growing: how many of the broken and healthy runs are still being trained, or were cut short.
    """

    label: str
    broken: Mapping[int, Trace] = field(default_factory=dict)
    healthy: Mapping[int, Trace] = field(default_factory=dict)
    band: Sequence[Trace] = ()
    n_growing: int = 0

    @property
    def source(self) -> str:
        """Where the broken runs come from, in a word or two."""
        return " and ".join(sorted({trace.provenance.source for trace in self.broken.values()})) or "none"


def gather(
    asked: Asked, label: str, recorded: Iterable[Trace], finished: Iterable[Trace], growing: Iterable[Trace]
) -> ModelRuns:
    """Choose the runs of one model.

    Args:
        asked: the question.
        label: of the model.
        recorded, finished, growing: runs at hand; others than those asked for are passed over.
    """
    cut = list(growing) if asked.live else []
    whole = [*recorded, *(finished if asked.live else [])]
    own = [trace for trace in [*cut, *whole] if trace.provenance.model == label]
    # Of one run a later one is taken; a beginning replaces what was recorded, but not what is finished.
    order = sorted(own, key=lambda trace: (trace.provenance.source == "live", not _among(trace, cut)))
    broken = {trace.provenance.seed: trace for trace in order if _is_asked(trace, asked)}
    healthy = {trace.provenance.seed: trace for trace in order if trace.provenance.healthy}
    twins = {seed: healthy[seed] for seed in asked.seeds if seed in healthy}
    n_growing = sum(_among(trace, cut) for trace in (*broken.values(), *twins.values()))
    band = {trace.provenance.seed: trace for trace in order if trace.provenance.healthy and not _among(trace, cut)}
    return ModelRuns(label, dict(sorted(broken.items())), twins, tuple(band.values()), n_growing)


def _among(trace: Trace, others: Sequence[Trace]) -> bool:
    return any(trace is other for other in others)


def _is_asked(trace: Trace, asked: Asked) -> bool:
    run = trace.provenance
    same = run.fault == asked.fault and run.strength == asked.strength
    return same and run.seed in asked.onsets and run.onset == asked.onsets[run.seed]
