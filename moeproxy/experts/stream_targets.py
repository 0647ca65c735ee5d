"""Which stored tensors make up which weight of a model, by transformers' conversion tables."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moeproxy.experts.checkpoint import Checkpoint


@dataclass
class Target:
    """A weight of the model and what it is made of.

    Attributes:
        name: name in the model's state dict (of several that one conversion makes, the first).
        shape: its shape.
        dtype: its dtype in the model.
        mapping: transformers' conversions of this model.
        converter: the conversion that makes it, None for a tensor that is stored as it is.
        sources: pattern that matched and stored name, in the order in which transformers would add them.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    mapping: list[Any] = field(repr=False)
    converter: Any = None
    sources: list[tuple[str, str]] = field(default_factory=list)

    @property
    def is_plain(self) -> bool:
        """Stored as one tensor that needs no conversion."""
        return self.converter is None

    @property
    def is_fused(self) -> bool:
        """Stored as one tensor an expert: those of an expert one below the other, the experts stacked."""
        from transformers.core_model_loading import Concatenate, MergeModulelist

        if self.converter is None or len(self.converter.target_patterns) != 1 or not self._complete:
            return False
        steps = [(type(step), step.dim) for step in self.converter.operations if hasattr(step, "dim")]
        if len(steps) != len(self.converter.operations):
            return False
        stack, join = (MergeModulelist, 0), (Concatenate, 1)
        return steps == [stack, join] or (steps == [stack] and len(self.converter.source_patterns) == 1)

    @property
    def _complete(self) -> bool:
        """Every pattern has matched one tensor for each expert."""
        counts = [len(names) for names in self._by_pattern().values()]
        return len(counts) == len(self.converter.source_patterns) and set(counts) == {self.shape[0]}

    def places(self, value: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Stored names and the part of the weight that each fills; for plain and fused weights."""
        if self.is_plain:
            yield self.sources[0][1], value
            return
        rows = value.shape[1] // len(self.converter.source_patterns)
        by_pattern = self._by_pattern()
        for expert in range(value.shape[0]):
            for part, pattern in enumerate(self.converter.source_patterns):
                yield by_pattern[pattern][expert], value[expert, part * rows : (part + 1) * rows]

    @property
    def made(self) -> set[str]:
        """Every name that the conversion makes."""
        if self.converter is None:
            return {self.name}
        first = self.converter.target_patterns[0]
        return {self.name.replace(first, other) for other in self.converter.target_patterns}

    def _by_pattern(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for pattern, name in self.sources:
            found.setdefault(pattern, []).append(name)
        return found


def targets_of(model: Any, checkpoint: Checkpoint) -> list[Target]:
    """Every weight of the model that the checkpoint has something for; stored tensors it does not use are left out."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key

    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    state, plan = model.state_dict(), _dtype_plan(model)
    found: dict[str, Target] = {}
    for stored in sorted(checkpoint.tensors, key=dot_natural_key):
        name, pattern = _renamed(stored, renamings, converters, model.base_model_prefix, state)
        if name in state:
            dtype = next((kind for part, kind in plan if part.search(name)), state[name].dtype)
            target = Target(name, tuple(state[name].shape), dtype, mapping, by_pattern.get(pattern or ""))
            found.setdefault(name, target).sources.append((pattern or stored, stored))
    return list(found.values())


def _renamed(
    stored: str, renamings: list[Any], converters: list[Any], prefix: str, state: dict[str, Tensor]
) -> tuple[str, str | None]:
    """Name in memory of a stored tensor, and the pattern of the conversion it takes part in."""
    from transformers.core_model_loading import rename_source_key

    name, pattern = rename_source_key(stored, renamings, converters, prefix, state)
    if name not in state and stored in state:  # saved under the names in memory already
        return rename_source_key(stored, [], [], prefix, state)
    return name, pattern


def _dtype_plan(model: Any) -> list[tuple[re.Pattern[str], torch.dtype]]:
    """Parts of the model that stay in another dtype than the rest, by pattern of their names."""
    plan = model._get_dtype_plan(model.config.dtype)
    return [(re.compile(part.replace("*", ".*")), kind) for part, kind in plan.items()]


def missing_names(model: Any, targets: list[Target]) -> set[str]:
    """Weights of the base model that nothing is stored for, but for those that the family allows to be missing."""
    made = {name for target in targets for name in target.made}
    head = model.get_output_embeddings()
    without = {f"{name}." for name, module in model.named_modules() if module is head}
    allowed = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_missing or ()]
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    return {
        name
        for name in set(model.state_dict()) - made - tied
        if not name.startswith(tuple(without)) and not any(pattern.search(name) for pattern in allowed)
    }
