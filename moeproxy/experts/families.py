"""The table of MoE families: where each model type keeps router, experts, biases and counts.

The rows are data, in `family_rows/`; what a row says is documented with `Family`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moeproxy.errors import CheckpointError
from moeproxy.experts.family import Family, Sliced, lookup, tail_of
from moeproxy.experts.family_rows import ROWS
from moeproxy.experts.unknown import Shapes, counts_found, unknown_family

__all__ = ["FAMILIES", "Family", "Sliced", "family_of", "lookup", "tail_of"]

FAMILIES: Mapping[str, Family] = {row.model_type: row for row in ROWS}


def family_of(config: Mapping[str, Any], where: str = "", shapes: Shapes | None = None) -> Family:
    """Return the table row for a parsed `config.json`.

    Args:
        config: the parsed config.
        where: the file to name in an error.
        shapes: shape of every tensor by name, to say which of an unknown family's look like experts.

    Raises:
        CheckpointError: the config has no model type, is of a dense model, or of a family without a row.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise CheckpointError(
            "the config has no model_type",
            expected="a transformers config.json",
            remedy="point at the directory that save_pretrained or the model hub wrote",
            where=where,
        )
    if model_type in FAMILIES:
        return FAMILIES[model_type]
    if counts_found(config) or (shapes and any(".experts." in name for name in shapes)):
        raise unknown_family(config, shapes or {}, sorted(FAMILIES), where)
    raise CheckpointError(
        f"model type '{model_type}' is dense: it has no experts",
        expected="a Mixture-of-Experts model",
        remedy="choose a Mixture-of-Experts checkpoint: a dense model has nothing to prune and nothing to spread over "
        f"ranks. Known model types: {', '.join(sorted(FAMILIES))}",
        where=where,
    )
