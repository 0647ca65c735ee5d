"""Everything of a checkpoint besides its weights: config, shard index, tokenizer and other files."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from moeproxy.errors import CheckpointError
from moeproxy.experts.checkpoint import Checkpoint
from moeproxy.experts.families import lookup
from moeproxy.experts.shards import INDEX_NAME
from moeproxy.proxy.rewrite import Copy

_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}


# These tell how the original was trained; beside a proxy they would describe another model. The keep map says where a
# proxy comes from.
_OF_THE_ORIGINAL = {"recipe.json", "trainer_state.json"}


def copy_side_files(source: Path, folder: Path, skip: Sequence[str] = ()) -> None:
    """Copy tokenizer, generation config, templates, licence, remote code.

    Not copied: weights, config, index, hidden files, records of the original's training, and `skip`.

    Raises:
        CheckpointError: a file of the source cannot be read.
    """
    for item in sorted(source.rglob("*")):
        relative = item.relative_to(source)
        weight = item.suffix in _WEIGHTS or item.name.endswith(".index.json")
        hidden = any(part.startswith(".") for part in relative.parts)
        if item.is_dir() or weight or hidden or relative.as_posix() in {"config.json", *_OF_THE_ORIGINAL, *skip}:
            continue
        try:
            data = item.read_bytes()
        except OSError as error:
            raise CheckpointError(
                f"the file cannot be read ({error.strerror})",
                remedy="make it readable or remove it from the checkpoint",
                where=item,
            ) from error
        (folder / relative).parent.mkdir(parents=True, exist_ok=True)
        (folder / relative).write_bytes(data)


def write_index(checkpoint: Checkpoint, groups: Mapping[str, Sequence[Copy]], folder: Path) -> None:
    """Write the shard index of the new files (file name -> its tensors) with recomputed sizes."""
    old = json.loads((checkpoint.path / INDEX_NAME).read_text("utf-8")).get("metadata") or {}
    copies = [copy for group in groups.values() for copy in group]
    sizes = {"total_size": sum(copy.nbytes for copy in copies)}
    if "total_parameters" in old:
        sizes["total_parameters"] = sum(copy.n_params for copy in copies)
    weight_map = {copy.name: file for file, group in groups.items() for copy in group}
    new = {"metadata": {**old, **sizes}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX_NAME).write_text(json.dumps(new, indent=2) + "\n", "utf-8")


def edited_config(
    text: str,
    checkpoint: Checkpoint,
    n_keep: int,
    zeroed: Sequence[str] = (),
    change: Callable[[dict[str, Any]], None] | None = None,
) -> str:
    """Return the config text with every expert count set to `n_keep` and `zeroed` keys to 0, all other bytes kept.

    `change` makes further changes to the parsed config, in place.

    transformers rewrites keys when it saves a config, and older versions then load wrong logits; so the text
    is edited, not parsed and dumped. If the edit does not parse to exactly the wanted config, it is dumped
    after all.
    """
    family = checkpoint.family
    wanted = json.loads(text)
    present = [key for key in family.count_keys if lookup(wanted, key) is not None]
    added = [key for key in family.write_keys if key not in present]
    for key, value in (dict.fromkeys([*present, *added], n_keep) | dict.fromkeys(zeroed, 0)).items():
        _set(wanted, key, value)
    if change:
        change(wanted)
    edited = text
    for key in present:
        extra = "".join(f', "{name}": {n_keep}' for name in added) if key == present[0] else ""
        edited = _replaced(edited, key, str(checkpoint.n_experts), f"{n_keep}{extra}")
    for key in zeroed:
        edited = _replaced(edited, key, r"\d+", "0")
    try:
        same = json.loads(edited, object_pairs_hook=_unique) == wanted
    except ValueError:
        same = False
    return edited if same else json.dumps(wanted, indent=2) + "\n"


def _set(config: dict[str, Any], key: str, value: int) -> None:
    """Set a dotted key; the nested configs on its way exist."""
    *parts, last = key.split(".")
    for part in parts:
        config = config[part]
    config[last] = value


def _replaced(text: str, key: str, old: str, new: str) -> str:
    """The text with the value of every key of that (last) name replaced, if it is `old` (a pattern)."""
    return re.sub(rf'("{key.rpartition(".")[2]}"\s*:\s*){old}\b', rf"\g<1>{new}", text)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) != len(pairs):
        raise ValueError("a key occurs twice")
    return dict(pairs)
