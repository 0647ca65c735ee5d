"""Write a proxy: the same checkpoint with only the planned experts, appearing complete or not at all."""

from __future__ import annotations

import errno
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from moeproxy.errors import ProxyError
from moeproxy.experts.checkpoint import Checkpoint, html_table
from moeproxy.experts.families import lookup
from moeproxy.experts.shards import INDEX_NAME
from moeproxy.files import atomic_dir
from moeproxy.proxy.check import CheckReport, check_paths, prune_in_memory
from moeproxy.proxy.merge import check_mergeable
from moeproxy.proxy.module_names import renumber_modules
from moeproxy.proxy.plan import KeepPlan, Mtp, check_count
from moeproxy.proxy.rewrite import planned_copies
from moeproxy.proxy.shard_writer import write_shard
from moeproxy.proxy.side_files import copy_side_files, edited_config, write_index

__all__ = ["KEEP_MAP", "CheckReport", "Proxy", "build", "check", "prune_in_memory"]

KEEP_MAP = "keep_map.json"


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

    @classmethod
    def open(cls, path: str | Path, source: str | Path) -> Proxy:
        """Open a proxy that `build` wrote from `source`.

        Raises:
            CheckpointError: the directory is no checkpoint.
            ProxyError: it has no readable keep map, so it is no proxy.
        """
        written, plan = Checkpoint.open(path), KeepPlan.load(Path(path) / KEEP_MAP)
        return cls(written.path, Path(source), plan, written.n_params, written.nbytes)

    def __repr__(self) -> str:
        checked = f", {self.check.verdict}" if self.check else ", not checked"
        size = f"{self.n_params:,} parameters, {self.nbytes / 1e6:,.1f} MB"
        return f"Proxy({self.path.name}: {self.plan.n_keep} experts by {self.plan.method}, {size}{checked})"

    def _repr_html_(self) -> str:
        rows = {
            "directory": self.path.name,
            "made from": self.source.name,
            "experts kept per layer": self.plan.n_keep,
            "chosen by": self.plan.method,
            "parameters": f"{self.n_params:,}",
            "weights": f"{self.nbytes / 1e6:,.1f} MB",
            "check": self.check.verdict if self.check else "not run",
        }
        return html_table("Proxy", rows)


def build(
    checkpoint: Checkpoint | str | Path,
    plan: KeepPlan,
    out: str | Path,
    *,
    mtp: Mtp | None = None,
    mtp_from: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Proxy:
    """Write the proxy that `plan` describes to the new directory `out`.

    Shard by shard, tensor by tensor: memory stays flat whatever the checkpoint's size. The config is the
    source's, byte for byte, but for the expert counts (and experts that a quantisation config names by number);
    tokenizer and other side files are copied;
    `keep_map.json` holds the plan. The directory appears by one rename after everything is on disk. A plan that merges
    experts has them averaged on the way, in float32, a piece of one tensor at a time.

    Only what goes into the proxy is read, so NaN in a dropped expert does not stop the build: `profile` refuses it.

    Args:
        checkpoint: the original, opened or its directory.
        plan: experts to keep, chosen on this checkpoint.
        out: directory to create; must not exist.
        mtp: what becomes of multi-token-prediction layers, which are not profiled: "drop" leaves them out and sets
            their number in the config to 0; "prune" keeps in them the experts that layer `mtp_from` keeps. Must be
            given if such layers have experts, since at full width they would not fit the config.
        mtp_from: decoder layer for "prune"; the last one with experts if None.
        progress: called with (bytes written, bytes in all).

    Raises:
        ProxyError: a plan of another checkpoint, an impossible count, multi-token-prediction layers without a
            choice, experts to be merged that are quantised, an existing or unwritable directory, a full disk, NaN in
            weights that are kept; nothing is left behind and nothing overwritten.

    Example:
        >>> proxy = check(build("data/models/qwen3_moe", plan, "out/proxy-16"))
    """
    opened = checkpoint if isinstance(checkpoint, Checkpoint) else Checkpoint.open(checkpoint)
    target = Path(out)
    _check_plan(opened, plan)
    extra = _check_mtp(opened, mtp, mtp_from)
    if opened.extra_layers:
        plan = replace(plan, provenance={**plan.provenance, "mtp": mtp, "mtp_from": extra})
    made = [parent for parent in target.parents if not parent.exists()]
    try:
        with atomic_dir(target) as temporary:
            n_params, nbytes = _write_all(opened, plan, extra, temporary, progress)
    except FileExistsError as error:
        raise (_exists(target) if target.exists() else _unwritable(target, error)) from error
    except OSError as error:
        raise _unwritable(target, error) from error
    finally:
        if not target.exists():
            _remove_empty(made)
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
    _check_ids(checkpoint, plan)
    if plan.merge_LE is not None:
        check_mergeable(checkpoint)
        _check_shares(plan)


def _check_mtp(checkpoint: Checkpoint, mtp: Mtp | None, mtp_from: int | None) -> int | None:
    """Layer whose experts the multi-token-prediction layers keep; None to leave those layers out."""
    if mtp not in (None, "drop", "prune"):
        raise ProxyError(f"mtp is {mtp!r}", expected="'drop', 'prune' or None", remedy="choose one")
    if not checkpoint.extra_layers:
        return None
    if mtp is None:
        layers = ", ".join(map(str, checkpoint.extra_layers))
        raise ProxyError(
            f"the checkpoint has multi-token-prediction layers with experts ({layers}), which no profile covers",
            expected="a choice of what becomes of them",
            remedy="pass mtp='drop' to leave them out, or mtp='prune' to keep in them the experts that the last "
            "layer keeps (another layer: mtp_from=...)",
            where=checkpoint.path,
        )
    if mtp == "drop":
        return None
    layer = checkpoint.moe_layers[-1] if mtp_from is None else mtp_from
    if layer not in checkpoint.moe_layers:
        raise ProxyError(
            f"mtp_from is layer {layer}, which has no experts",
            expected=f"one of {', '.join(map(str, checkpoint.moe_layers))}",
            remedy="choose a layer with experts",
        )
    return layer


def _check_ids(checkpoint: Checkpoint, plan: KeepPlan) -> None:
    for layer in checkpoint.moe_layers:
        ids = plan.keep.get(layer, ())
        if not _sound(ids, plan.n_keep, checkpoint.n_experts, checkpoint.n_group or 1):
            raise ProxyError(
                f"the keep plan is wrong for layer {layer}: {list(ids)}",
                expected=f"{plan.n_keep} ascending ids of {checkpoint.n_experts}, as many from every group",
                remedy="use a plan that moeproxy.select made",
            )


def _check_shares(plan: KeepPlan) -> None:
    """Every new expert is the mean of experts of its own cluster, with shares that sum to 1."""
    for layer in plan.keep:
        for new, group in enumerate(plan.members_of(layer) or []):
            total = sum(share for _, share in group)
            if not abs(total - 1) < 1e-6:
                raise ProxyError(
                    f"the shares of merged experts are wrong: those of expert {new} in layer {layer} sum to {total}",
                    expected="shares of a cluster's members that sum to 1",
                    remedy="use a plan that moeproxy.select made",
                )


def _sound(ids: tuple[int, ...], n_keep: int, n_experts: int, n_group: int) -> bool:
    """Whether ids are ascending, in range, `n_keep` in number and the same number of each group."""
    if len(ids) != n_keep or list(ids) != sorted(set(ids)) or ids[0] < 0 or ids[-1] >= n_experts:
        return False
    groups = [i // (n_experts // n_group) for i in ids]
    return groups == [i // (n_keep // n_group) for i in range(n_keep)]


def _write_all(
    checkpoint: Checkpoint,
    plan: KeepPlan,
    mtp_from: int | None,
    folder: Path,
    progress: Callable[[int, int], None] | None,
) -> tuple[int, int]:
    """Write everything into `folder`; return parameters and bytes."""
    jobs = [(shard, planned_copies(checkpoint, plan, shard, mtp_from)) for shard in checkpoint.shards]
    jobs = [(shard, copies) for shard, copies in jobs if copies]
    total = sum(copy.nbytes for _, copies in jobs for copy in copies)
    done = 0

    def moved(size: int) -> None:
        nonlocal done
        done += size
        if progress:
            progress(done, total)

    copy_side_files(checkpoint.path, folder, skip=[KEEP_MAP])
    text = (checkpoint.path / "config.json").read_bytes().decode("utf-8-sig")
    zeroed = _mtp_keys(checkpoint) if checkpoint.extra_layers and mtp_from is None else []
    renumber = partial(renumber_modules, checkpoint=checkpoint, plan=plan, mtp_from=mtp_from)
    (folder / "config.json").write_bytes(edited_config(text, checkpoint, plan.n_keep, zeroed, renumber).encode())
    (folder / KEEP_MAP).write_text(plan.to_json(), "utf-8")
    for shard, copies in jobs:
        write_shard(shard, copies, folder / shard.path.name, moved)
    if (checkpoint.path / INDEX_NAME).is_file():
        write_index(checkpoint, {shard.path.name: copies for shard, copies in jobs}, folder)
    return sum(copy.n_params for _, copies in jobs for copy in copies), total


def _mtp_keys(checkpoint: Checkpoint) -> list[str]:
    """Config keys that state a number of multi-token-prediction layers."""
    return [key for key in checkpoint.family.mtp_keys if lookup(checkpoint.config, key)]


def _remove_empty(folders: list[Path]) -> None:
    """Remove directories that were made for an output that did not come about, deepest first."""
    for folder in folders:
        with suppress(OSError):  # not made, or somebody else uses it by now
            folder.rmdir()


def _exists(target: Path) -> ProxyError:
    return ProxyError(
        "the output directory exists already",
        expected="a path where nothing is yet",
        remedy="choose another path, or remove the old proxy yourself",
        where=target,
    )


def _unwritable(target: Path, error: OSError) -> ProxyError:
    if error.errno == errno.ENOTEMPTY:  # somebody else finished the same output meanwhile
        return _exists(target)
    found, remedy = (
        f"the proxy cannot be written ({error.strerror or error})",
        "choose a path you may write to",
    )
    if error.errno == errno.ENOSPC:
        found, remedy = "the disk is full", "free space or choose a path on another disk"
    return ProxyError(found, expected="a writable path with enough space", remedy=remedy, where=target)
