"""Emulation: what one rank of a cluster sees in a step, as a result object. Needs no torch."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from moeproxy.errors import ScaleError
from moeproxy.files import atomic_file
from moeproxy.scale.collectives import Collective

FORMAT = 1
CATEGORIES = ("parameters", "gathered", "gradients", "optimizer", "activations", "communication")
"""Shards of weights and buffers; whole weights while FSDP has them gathered; gradients; optimizer state and its
temporaries; activations, logits and other temporaries; buffers of collectives."""


@dataclass(frozen=True)
class Holder:
    """What was alive at the peak, by kind and the module in which it was made.

    Args:
        category: one of `CATEGORIES`.
        module: where it was made; empty for what lived before the step.
        nbytes, tensors: how much and how many.
    """

    category: str
    module: str
    nbytes: int
    tensors: int


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind and size in a phase.

    Args:
        op, group, nbytes, phase: as in `Collective`.
        count: how many.
    """

    op: str
    group: int
    nbytes: int
    phase: str
    count: int


@dataclass(frozen=True, eq=False)
class Emulation:
    """One rank's step in a world of which only this rank exists.

    Attributes:
        program: `GRPOProgram.to_dict()`.
        world, ep, rank: where the rank is.
        level: "fake", "exec" or "replay"; "real" for a rank of a real run measured alike.
        routing: where the numbers of routed rows come from.
        peak_bytes: most live tensor bytes at once, of what torch allocates; see `scratch_bytes` for the rest.
        peak: bytes at the peak by category.
        peak_phase, peak_module: where in the step, and the innermost module.
        holders: the largest parts of the peak, by category and module.
        phases: names; `phase_P` counts in them.
        timeline_PC: live bytes by category along the step, each point the fullest moment of its stretch.
        phase_P: phase of each point.
        traffic: collectives, equal ones together.
        flops: floating-point operations by phase (`moeproxy.scale.flops` says what counts).
        scratch_bytes: most memory that a communication backend takes beside tensors: for gloo the largest buffer of an
            all-gather or reduce-scatter once more (measured); for NCCL not known.
        whole_bytes: the peak with that memory counted while a collective runs, by backend; None where not known.
        allocator_bytes: peak by torch's own allocator events of real steps, smallest first; empty for "fake".
        seconds: wall time of real steps; empty for "fake".
        losses, logprobs, weights: loss and mean log-prob of each step and SHA-256 of the final weights, where a run was
            replayed or recorded.
        differs: which of these a replay did not reproduce bit for bit.
        full_shards: whether the rank's shard of every weight is as large as rank 0's; not so for the last ranks where a
            weight cannot be cut evenly. False in files of earlier versions, which did not tell.
        rss_bytes, wall_seconds: what the emulation itself cost.
        provenance: versions, command, machine, time.
    """

    program: Mapping[str, Any]
    world: int
    ep: int
    rank: int
    level: str
    routing: str
    peak_bytes: int
    peak: Mapping[str, int]
    peak_phase: str
    peak_module: str
    holders: tuple[Holder, ...]
    phases: tuple[str, ...]
    timeline_PC: Int[np.ndarray, "P C"]
    phase_P: Int[np.ndarray, " P"]
    traffic: tuple[Traffic, ...]
    flops: Mapping[str, int]
    scratch_bytes: Mapping[str, int | None]
    whole_bytes: Mapping[str, int | None] = field(default_factory=dict)
    allocator_bytes: tuple[int, ...] = ()
    seconds: tuple[float, ...] = ()
    losses: tuple[float, ...] = ()
    logprobs: tuple[float, ...] = ()
    weights: str = ""
    differs: tuple[str, ...] = ()
    full_shards: bool = False
    rss_bytes: int = 0
    wall_seconds: float = 0.0
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @property
    def communicated(self) -> int:
        """Bytes of all collectives of the step (the larger side of each)."""
        return sum(item.nbytes * item.count for item in self.traffic)

    def save(self, path: str | Path) -> Path:
        """Write one JSON file, complete or not at all; return its path."""
        target = Path(path)
        stored = {name: _plain(getattr(self, name)) for name in _NAMES} | {"format": FORMAT}
        with atomic_file(target) as temporary:
            temporary.write_text(json.dumps(stored), encoding="utf-8")
        return target

    @classmethod
    def load(cls, path: str | Path) -> Emulation:
        """Read what `save` wrote.

        Raises:
            ScaleError: the file is missing, cut off, or no emulation.
        """
        try:
            stored = json.loads(Path(path).read_text(encoding="utf-8"))
            if stored.pop("format") != FORMAT:
                raise ValueError("another format version")
            stored["holders"] = tuple(Holder(**item) for item in stored["holders"])
            stored["traffic"] = tuple(Traffic(**item) for item in stored["traffic"])
            for name in ("phases", "allocator_bytes", "seconds", "losses", "logprobs", "differs"):
                stored[name] = tuple(stored.get(name, ()) if name == "differs" else stored[name])
            columns = len(CATEGORIES)
            stored["timeline_PC"] = np.array(stored["timeline_PC"], np.int64).reshape(-1, columns)
            stored["phase_P"] = np.array(stored["phase_P"], np.int64)
            return cls(**stored)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ScaleError(
                f"no emulation can be read ({error!r})", where=path, remedy="emulate again and save the result"
            ) from error

    def __repr__(self) -> str:
        where = f"rank {self.rank} of {self.world}, ep {self.ep}, {self.level}"
        differs = f"; differs from the recording: {', '.join(self.differs)}" if self.differs else ""
        return f"Emulation({where}, {self.routing}; peak {gib(self.peak_bytes)} in {self.peak_phase}{differs})"

    def _repr_html_(self) -> str:
        rows = [(name, gib(self.peak[name])) for name in CATEGORIES]
        rows += [
            ("peak", gib(self.peak_bytes)),
            ("arises in", f"{self.peak_phase}, {self.peak_module or 'outside any module'}"),
            ("routing", self.routing),
            *([("differs from the recording", ", ".join(self.differs))] if self.differs else []),
            ("collectives", f"{sum(t.count for t in self.traffic)}, {gib(self.communicated)}"),
            *((f"scratch of {name}, apart", gib(size)) for name, size in self.scratch_bytes.items()),
            *((f"peak with {name}'s scratch", gib(size)) for name, size in self.whole_bytes.items()),
        ]
        cells = "".join(f"<tr><th>{html.escape(k)}</th><td>{html.escape(v)}</td></tr>" for k, v in rows)
        head = html.escape(f"rank {self.rank} of {self.world}, ep {self.ep}, {self.level}")
        return f"<table><caption>Emulation: {head}</caption>{cells}</table>"


_NAMES = tuple(item.name for item in fields(Emulation))


def gib(nbytes: int | None) -> str:
    """Return a size in a unit that suits it; "not known" for None."""
    if nbytes is None:
        return "not known"
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes} B"


def gathered(collectives: list[Collective]) -> tuple[Traffic, ...]:
    """Put equal collectives together, in order of first appearance."""
    counts: dict[tuple[str, int, int, str], int] = {}
    for one in collectives:
        key = (one.op, one.group, one.nbytes, one.phase)
        counts[key] = counts.get(key, 0) + 1
    return tuple(Traffic(*key, count) for key, count in counts.items())


def scratch(collectives: list[Collective]) -> dict[str, int | None]:
    """Return the most that backends take for themselves at a time, as far as it was measured.

    NCCL's channel buffers depend on topology and version and are not in torch's allocator.
    """
    return {"gloo": max((one.gloo_copy for one in collectives), default=0), "nccl": None}


def whole(collectives: list[Collective], peak: int) -> dict[str, int | None]:
    """Return the peak of tensors and of what backends take for themselves, together at every moment.

    Args:
        collectives: of the step, with what was alive meanwhile.
        peak: bytes of tensors alone.
    """
    return {"gloo": max([peak, *(one.live + one.gloo_copy for one in collectives)]), "nccl": None}


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, tuple):
        return [asdict(item) if isinstance(item, (Holder, Traffic)) else item for item in value]
    return dict(value) if isinstance(value, Mapping) else value
