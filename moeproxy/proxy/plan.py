"""KeepPlan: which experts of each layer a proxy keeps, and which kept expert stands for each dropped one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Float, Int

from moeproxy.errors import ProxyError
from moeproxy.experts.checkpoint import Checkpoint, html_table
from moeproxy.experts.statistics import ExpertProfile
from moeproxy.files import atomic_file

# Plans that merge have a format of their own: a reader that does not know of merging must refuse them.
FORMAT, MERGING_FORMAT = 1, 2
Mtp = Literal["drop", "prune"]


@dataclass(frozen=True)
class KeepPlan:
    """The experts a proxy keeps in every MoE layer.

    Attributes:
        method: how they were chosen.
        n_keep: experts kept in each layer.
        keep: decoder layer -> old expert ids, ascending; new expert i of that layer is old expert
            keep[layer][i].
        label_LE: int64, for every old expert the new id of the expert that represents it, -1 where the method
            groups nothing; rows follow the ascending layers of `keep`.
        weights: view weights (router, co-activation, context; output too where it has a weight) if clustered.
        seed: seed of the method.
        checkpoint_fingerprint: the checkpoint the ids belong to.
        provenance: versions, command, time, settings.
        merge_LE: float64, share of each old expert in the mean of its cluster, whose kept slot holds that mean; the
            shares of a cluster sum to 1. None where kept experts stay as they are.
    """

    method: str
    n_keep: int
    keep: Mapping[int, tuple[int, ...]]
    label_LE: Int[np.ndarray, "L E"] = field(compare=False)
    weights: tuple[float, ...] | None
    seed: int
    checkpoint_fingerprint: str
    provenance: Mapping[str, Any] = field(default_factory=dict, compare=False)
    merge_LE: Float[np.ndarray, "L E"] | None = field(default=None, compare=False)

    def label_of(self, layer: int) -> Int[np.ndarray, " E"]:
        """Row of `label_LE` of a decoder layer."""
        return self.label_LE[sorted(self.keep).index(layer)]

    def members_of(self, layer: int) -> list[list[tuple[int, float]]] | None:
        """(old expert, share) of every new expert's mean, in a decoder layer; None where nothing is merged."""
        if self.merge_LE is None:
            return None
        share_E, label_E = self.merge_LE[sorted(self.keep).index(layer)], self.label_of(layer)
        in_mean = [np.flatnonzero((label_E == new) & (share_E > 0)) for new in range(self.n_keep)]
        return [[(int(e), float(share_E[e])) for e in experts] for experts in in_mean]

    def save(self, path: str | Path) -> Path:
        """Write the plan as JSON, complete or not at all; return its path."""
        target = Path(path)
        try:
            with atomic_file(target) as temporary:
                temporary.write_text(self.to_json(), "utf-8")
        except OSError as error:
            found = f"the keep plan cannot be written ({error.strerror or error})"
            remedy = "choose a path you may write to, with space left"
            raise ProxyError(found, remedy=remedy, where=target) from error
        return target

    def to_json(self) -> str:
        """The plan as JSON text; `keep` is the keep map {layer: [old expert ids]}."""
        stored = {
            "format": FORMAT if self.merge_LE is None else MERGING_FORMAT,
            "method": self.method,
            "n_keep": self.n_keep,
            "keep": {str(layer): list(ids) for layer, ids in self.keep.items()},
            "label": self.label_LE.tolist(),
            "weights": self.weights,
            "seed": self.seed,
            "checkpoint_fingerprint": self.checkpoint_fingerprint,
            "provenance": dict(self.provenance),
        }
        if self.merge_LE is not None:
            stored["merge"] = self.merge_LE.tolist()
        return json.dumps(stored) + "\n"

    @classmethod
    def load(cls, path: str | Path) -> KeepPlan:
        """Read a plan that `save` wrote; raises ProxyError if the file is missing, cut off or of another
        format."""
        try:
            return _from_json(json.loads(Path(path).read_text("utf-8")))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ProxyError(
                "the keep plan cannot be read: the file is missing, cut off or no plan",
                expected=f"JSON of format {FORMAT} or {MERGING_FORMAT} written by KeepPlan.save",
                remedy="run moeproxy.select again and save the result",
                where=path,
            ) from error

    def __repr__(self) -> str:
        n_experts = self.label_LE.shape[1]
        return f"KeepPlan({self.method}: {self.n_keep} of {n_experts} experts in {len(self.keep)} layers)"

    def _repr_html_(self) -> str:
        rows: dict[str, object] = {"method": self.method, "kept per layer": self.n_keep, "seed": self.seed}
        rows |= {f"layer {layer}": ", ".join(map(str, ids)) for layer, ids in self.keep.items()}
        return html_table("Keep plan", rows)


def _from_json(stored: dict[str, Any]) -> KeepPlan:
    merges = "merge" in stored
    if stored["format"] != (MERGING_FORMAT if merges else FORMAT):
        raise ValueError(f"format {stored['format']}")
    weights = stored["weights"]
    return KeepPlan(
        method=stored["method"],
        n_keep=stored["n_keep"],
        keep={int(layer): tuple(ids) for layer, ids in stored["keep"].items()},
        label_LE=np.asarray(stored["label"], dtype=np.int64),
        weights=None if weights is None else tuple(weights),
        seed=stored["seed"],
        checkpoint_fingerprint=stored["checkpoint_fingerprint"],
        provenance=stored["provenance"],
        merge_LE=np.asarray(stored["merge"], dtype=np.float64) if merges else None,
    )


def allowed_counts(source: ExpertProfile | Checkpoint, *, expert_parallel: int = 1) -> list[int]:
    """Numbers of experts a proxy of this model can have, ascending, the original's included.

    At least top-k; with group-limited routing a multiple of the number of groups, each group large enough for
    the router to score (two where it sums the best two), and top-k within the chosen groups. One number for
    all layers, since no runtime loads a different number in each.

    Args:
        source: a profile or a checkpoint.
        expert_parallel: ranks that experts are spread over; the number must divide evenly among them.

    Raises:
        ProxyError: `expert_parallel` is below 1.
    """
    if expert_parallel < 1:
        raise ProxyError(f"expert_parallel is {expert_parallel}", expected="1 or more", remedy="use 1 for one rank")
    return [count for count in _counts(source) if count % expert_parallel == 0]


def _counts(source: ExpertProfile | Checkpoint) -> list[int]:
    smallest = source.min_group if isinstance(source, ExpertProfile) else source.family.min_group
    return possible_counts(source.n_experts, source.top_k, source.n_group, source.topk_group, smallest)


def possible_counts(
    n_experts: int, top_k: int, n_group: int | None, topk_group: int | None, min_group: int
) -> list[int]:
    """Numbers of experts a proxy can have, from the counts alone; see `allowed_counts`."""
    groups, chosen = n_group or 1, topk_group or 1
    if groups == 1:
        # A single group that must score its best two still needs two experts.
        return list(range(max(top_k, min_group), n_experts + 1))
    sizes = range(min_group, n_experts // groups + 1)
    return [groups * size for size in sizes if top_k <= chosen * size]


def check_count(source: ExpertProfile | Checkpoint, n_keep: int, *, expert_parallel: int = 1) -> None:
    """Raise ProxyError, listing the possible counts, if a proxy cannot keep `n_keep` experts a layer."""
    counts = allowed_counts(source, expert_parallel=expert_parallel)
    if isinstance(n_keep, bool) or not isinstance(n_keep, int | np.integer) or n_keep not in counts:
        reason = f"of {source.n_experts}, top-{source.top_k}"
        if source.n_group and source.n_group > 1:
            reason += f", {source.n_group} groups of which {source.topk_group} are used"
        if expert_parallel > 1:
            reason += f", spread over {expert_parallel} ranks"
        raise ProxyError(
            f"a proxy cannot keep {n_keep} experts per layer ({reason})",
            expected=f"one of {_listed(counts)}" if counts else "fewer ranks: no count divides evenly",
            remedy="choose one of these counts",
        )


def _listed(counts: list[int]) -> str:
    if len(counts) > 12 and counts == list(range(counts[0], counts[-1] + 1)):
        return f"{counts[0]} to {counts[-1]}"
    return ", ".join(map(str, counts))
