"""Write a proxy: the same checkpoint with only the planned experts, appearing complete or not at all."""

from __future__ import annotations

import errno
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moeproxy.errors import ProxyError
from moeproxy.experts.checkpoint import Checkpoint, html_table
from moeproxy.experts.shards import INDEX_NAME
from moeproxy.files import atomic_dir
from moeproxy.proxy.check import CheckReport, check_paths, prune_in_memory
from moeproxy.proxy.plan import KeepPlan, check_count
from moeproxy.proxy.rewrite import Copy, planned_copies, write_shard

__all__ = ["KEEP_MAP", "CheckReport", "Proxy", "build", "check", "prune_in_memory"]

KEEP_MAP = "keep_map.json"
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack"}


@dataclass(frozen=True)
class Proxy:
    """A proxy checkpoint on disk.

    Attributes:
        path: its directory.
        source: directory of the original.
        plan: the experts it keeps.
        n_params: number of weights.
        nbytes: bytes of weights.
        check: result of the reload check, None before `check`.
    """

    path: Path
    source: Path
    plan: KeepPlan
    n_params: int
    nbytes: int
    check: CheckReport | None = None

    def __repr__(self) -> str:
        checked = f", {self.check.verdict}" if self.check else ", not checked"
        size = f"{self.n_params:,} parameters, {self.nbytes / 1e6:,.1f} MB"
        return f"Proxy({self.path.name}: {self.plan.n_keep} experts by {self.plan.method}, {size}{checked})"

    def _repr_html_(self) -> str:
        rows = {
            "directory": self.path.name, "made from": self.source.name, "experts kept per layer": self.plan.n_keep,
            "chosen by": self.plan.method, "parameters": f"{self.n_params:,}",
            "weights": f"{self.nbytes / 1e6:,.1f} MB", "check": self.check.verdict if self.check else "not run",
        }  # fmt: skip
        return html_table("Proxy", rows)


def build(
    checkpoint: Checkpoint | str | Path,
    plan: KeepPlan,
    out: str | Path,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> Proxy:
    """Write the proxy that `plan` describes to the new directory `out`.

    Shard by shard, tensor by tensor: memory stays flat whatever the checkpoint's size. The config is the source's,
    byte for byte, but for the expert counts; tokenizer and other side files are copied; `keep_map.json` holds the
    plan. The directory appears by one rename after everything is on disk.

    Args:
        checkpoint: the original, opened or its directory.
        plan: experts to keep, chosen on this checkpoint.
        out: directory to create; must not exist.
        progress: called with (bytes written, bytes in all).

    Raises:
        ProxyError: a plan of another checkpoint, an impossible count, an existing or unwritable directory, a full
            disk, NaN weights; nothing is left behind and nothing overwritten.

    Example:
        >>> proxy = check(build("data/models/qwen3_moe", plan, "out/proxy-16"))
    """
    opened = checkpoint if isinstance(checkpoint, Checkpoint) else Checkpoint.open(checkpoint)
    target = Path(out)
    _check_plan(opened, plan)
    try:
        with atomic_dir(target) as temporary:
            n_params, nbytes = _write_all(opened, plan, temporary, progress)
    except FileExistsError as error:
        raise _exists(target) from error
    except OSError as error:
        raise _unwritable(target, error) from error
    return Proxy(target, opened.path, plan, n_params, nbytes)


def check(proxy: Proxy, *, seed: int = 0, tolerance: float = 1e-5) -> Proxy:
    """Reload the proxy with transformers and compare its logits with the original pruned in memory.

    Returns the proxy with its `CheckReport`, which holds the largest absolute difference.

    Raises:
        ProxyError: the logits differ by more than `tolerance` or are not finite.
    """
    return replace(proxy, check=check_paths(proxy.source, proxy.path, proxy.plan, seed=seed, tolerance=tolerance))


def _check_plan(checkpoint: Checkpoint, plan: KeepPlan) -> None:
    check_count(checkpoint, plan.n_keep)
    if plan.checkpoint_fingerprint != checkpoint.fingerprint:
        raise ProxyError(
            "the keep plan was made for another checkpoint (fingerprints differ)",
            expected=f"a plan for {checkpoint.fingerprint[:12]}, got {plan.checkpoint_fingerprint[:12]}",
            remedy="profile this checkpoint and select experts again",
            where=checkpoint.path,
        )
    if checkpoint.extra_layers:
        raise ProxyError(
            f"the checkpoint has multi-token-prediction layers with experts ({list(checkpoint.extra_layers)})",
            expected="experts in the decoder layers only",
            remedy="remove these layers and set num_nextn_predict_layers to 0 first",
            where=checkpoint.path,
        )
    _check_ids(checkpoint, plan)


def _check_ids(checkpoint: Checkpoint, plan: KeepPlan) -> None:
    size = checkpoint.n_experts // (checkpoint.n_group or 1)
    share = plan.n_keep // (checkpoint.n_group or 1)
    for layer in checkpoint.moe_layers:
        ids = plan.keep.get(layer, ())
        sound = len(ids) == plan.n_keep and list(ids) == sorted(set(ids)) and 0 <= ids[0] <= ids[-1] < checkpoint.n_experts
        if not sound or [i // size for i in ids] != [i // share for i in range(plan.n_keep)]:
            raise ProxyError(
                f"the keep plan is wrong for layer {layer}: {list(ids)}",
                expected=f"{plan.n_keep} ascending ids below {checkpoint.n_experts}, the same number in every group",
                remedy="use a plan that moeproxy.select made",
            )


def _write_all(
    checkpoint: Checkpoint, plan: KeepPlan, folder: Path, progress: Callable[[int, int], None] | None
) -> tuple[int, int]:
    """Write everything into `folder`; return parameters and bytes."""
    jobs = [(shard, planned_copies(checkpoint, plan, shard)) for shard in checkpoint.shards]
    jobs = [(shard, copies) for shard, copies in jobs if copies]
    total = sum(copy.nbytes for _, copies in jobs for copy in copies)
    done = 0

    def moved(size: int) -> None:
        nonlocal done
        done += size
        if progress:
            progress(done, total)

    _copy_side_files(checkpoint.path, folder)
    text = (checkpoint.path / "config.json").read_text("utf-8")
    (folder / "config.json").write_text(edited_config(text, checkpoint, plan.n_keep), "utf-8")
    (folder / KEEP_MAP).write_text(plan.to_json(), "utf-8")
    for shard, copies in jobs:
        write_shard(shard, copies, folder / shard.path.name, moved)
    copies = [copy for _, group in jobs for copy in group]
    if (checkpoint.path / INDEX_NAME).is_file():
        _write_index(checkpoint, {s.path.name: group for s, group in jobs}, folder)
    return sum(copy.n_params for copy in copies), total


def _copy_side_files(source: Path, folder: Path) -> None:
    """Tokenizer, generation config, licence, remote code: everything but weights, config, index and keep map."""
    skipped = {"config.json", INDEX_NAME, KEEP_MAP}
    for item in sorted(source.iterdir()):
        weight = item.suffix in _WEIGHTS or item.name.endswith(".index.json")
        if item.is_file() and item.name not in skipped and not weight and not item.name.startswith("."):
            shutil.copyfile(item, folder / item.name)


def _write_index(checkpoint: Checkpoint, groups: dict[str, list[Copy]], folder: Path) -> None:
    old = json.loads((checkpoint.path / INDEX_NAME).read_text("utf-8"))
    copies = [copy for group in groups.values() for copy in group]
    sizes: dict[str, Any] = {"total_size": sum(copy.nbytes for copy in copies)}
    if "total_parameters" in old.get("metadata", {}):
        sizes["total_parameters"] = sum(copy.n_params for copy in copies)
    weight_map = {copy.name: file for file, group in groups.items() for copy in group}
    new = {"metadata": {**old.get("metadata", {}), **sizes}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX_NAME).write_text(json.dumps(new, indent=2) + "\n", "utf-8")


def edited_config(text: str, checkpoint: Checkpoint, n_keep: int) -> str:
    """Return the config text with every expert count set to `n_keep`, all other bytes kept.

    transformers rewrites keys when it saves a config, and older versions then load wrong logits; so the text is
    edited, not parsed and dumped. If the edit does not parse to exactly the wanted config, it is dumped after all.
    """
    family = checkpoint.family
    wanted = json.loads(text)
    part = wanted[family.config_path] if family.config_path else wanted
    present = [key for key in family.count_keys if part.get(key) is not None]
    added = [key for key in family.write_keys if key not in present]
    edited = text
    for key in present:
        part[key] = n_keep
        extra = "".join(rf', "{name}": {n_keep}' for name in added) if key == present[0] else ""
        edited = re.sub(rf'("{key}"\s*:\s*){checkpoint.n_experts}\b', rf"\g<1>{n_keep}{extra}", edited)
    part |= {key: n_keep for key in added}
    try:
        same = json.loads(edited, object_pairs_hook=_unique) == wanted
    except ValueError:
        same = False
    return edited if same else json.dumps(wanted, indent=2) + "\n"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) != len(pairs):
        raise ValueError("a key occurs twice")
    return dict(pairs)


def _exists(target: Path) -> ProxyError:
    return ProxyError(
        "the output directory exists already",
        expected="a path where nothing is yet",
        remedy="choose another path, or remove the old proxy yourself",
        where=target,
    )


def _unwritable(target: Path, error: OSError) -> ProxyError:
    if error.errno == errno.ENOSPC:
        found, remedy = "the disk is full", "free space or choose a path on another disk"
    elif error.errno in (errno.EEXIST, errno.ENOTEMPTY):
        return _exists(target)
    else:
        found, remedy = f"the proxy cannot be written ({error.strerror or error})", "choose a path you may write to"
    return ProxyError(found, expected="a writable path with enough space", remedy=remedy, where=target)
