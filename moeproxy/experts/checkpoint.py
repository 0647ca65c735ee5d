"""Checkpoint: a model directory's config, layers and bytes, read from metadata alone."""

from __future__ import annotations

import hashlib
import html
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from moeproxy.errors import CheckpointError
from moeproxy.experts.config import Counts, parse_config, read_config
from moeproxy.experts.families import FAMILIES, Family, Sliced, family_of, lookup, tail_of
from moeproxy.experts.locate import model_directory, model_name
from moeproxy.experts.places import Place, is_mtp_name, layer_of, place_of
from moeproxy.experts.shards import Shard, TensorInfo, check_index, read_shard, shard_paths


@dataclass(frozen=True)
class Checkpoint:
    """A Mixture-of-Experts checkpoint directory; holds no weights.

    Attributes:
        path: the directory.
        config: parsed `config.json`.
        family: the row of the family table that describes its layout.
        n_layers: number of decoder layers.
        moe_layers: layers that have experts, ascending.
        n_experts: routed experts a layer (E).
        top_k: experts a token (K).
        n_group: number of expert groups, None without group-limited routing.
        topk_group: groups a token may use, None without group-limited routing.
        tensors: name -> file, dtype, shape, offset, bytes.
        places: name -> what the tensor is, for tensors with an expert axis.
        shards: weight files in order, with headers.
        fingerprint: SHA-256 over config, headers and sizes (not over weight values).

    Example:
        >>> checkpoint = Checkpoint.open("data/models/qwen3_moe")
        >>> checkpoint.n_experts, checkpoint.top_k
        (32, 4)
    """

    path: Path
    config: Mapping[str, Any]
    family: Family
    n_layers: int
    moe_layers: tuple[int, ...]
    n_experts: int
    top_k: int
    n_group: int | None
    topk_group: int | None
    tensors: Mapping[str, TensorInfo]
    places: Mapping[str, Place] = field(repr=False)
    shards: tuple[Shard, ...] = field(repr=False)
    fingerprint: str = ""

    @classmethod
    def open(cls, path: str | Path) -> Checkpoint:
        """Read a checkpoint directory's config and safetensors headers and check that they agree.

        Args:
            path: a model directory, or the folder that a hub cache keeps for a model; `~` is the home directory.

        Raises:
            CheckpointError: no checkpoint, pickled weights, a dense or unknown model, a truncated shard, or a number
                of experts or layers that disagrees with the weights; the message names the file and the remedy.
        """
        directory = model_directory(path)
        raw = read_config(directory)
        config = parse_config(raw, directory / "config.json")
        family = _family(config, directory)
        shards = tuple(read_shard(file) for file in shard_paths(directory))
        tensors = _merge(shards)
        check_index(directory, tensors)
        counts = Counts.read(config, family, directory / "config.json")
        places = _places(tensors, family, counts.n_layers)
        layers = _moe_layers(places, counts.n_layers, directory)
        checkpoint = cls(
            path=directory,
            config=config,
            family=family,
            moe_layers=layers,
            tensors=tensors,
            places=places,
            shards=shards,
            fingerprint=_fingerprint(raw, shards),
            **vars(counts),
        )
        _check_weights(checkpoint)
        _check_extra(checkpoint)
        return checkpoint

    @property
    def name(self) -> str:
        """What to call the model: its folder's name, or org/name for a snapshot of a hub cache."""
        return model_name(self.path)

    @property
    def n_params(self) -> int:
        """Number of weights in all files."""
        return sum(info.n_params for info in self.tensors.values())

    @property
    def nbytes(self) -> int:
        """Bytes of weights in all files, without headers."""
        return sum(info.nbytes for info in self.tensors.values())

    @property
    def extra_layers(self) -> tuple[int, ...]:
        """Layers with experts beyond the config's layer count: multi-token-prediction heads.

        Heads with a prefix of their own (`mtp.layers.0`) are numbered on from the decoder's last layer.
        """
        found = {p.layer for p in self.places.values() if p.kind in _PARTS and p.layer >= self.n_layers}
        return tuple(sorted(found))

    def is_extra(self, name: str) -> bool:
        """Whether a tensor belongs to a multi-token-prediction layer, with experts or without."""
        layer = layer_of(name, self.family)
        return is_mtp_name(name) or (layer is not None and layer >= self.n_layers)

    def tail(self, rule: Sliced) -> int:
        """Rows after the experts' that a sliced tensor always keeps."""
        return tail_of(rule.tail, self.config)

    @property
    def each_tail(self) -> int:
        """Experts after the routed ones that have tensors of their own and always stay."""
        return tail_of(self.family.each_tail, self.config)

    def __repr__(self) -> str:
        groups = f", {self.n_group} groups" if self.n_group and self.n_group > 1 else ""
        layers = f"{len(self.moe_layers)} of {self.n_layers} layers with {self.n_experts} experts"
        model = f"{self.name}: {self.family.model_type}"
        return f"Checkpoint({model}, {layers}, top-{self.top_k}{groups}, {self.n_params:,} parameters)"

    def _repr_html_(self) -> str:
        rows = {
            "model": self.name,
            "model type": self.family.model_type,
            "router": self.family.router_kind,
            "layers with experts": f"{len(self.moe_layers)} of {self.n_layers}",
            "experts per layer": self.n_experts,
            "experts per token": self.top_k,
            "expert groups": self.n_group or "none",
            "parameters": f"{self.n_params:,}",
            "weights": f"{self.nbytes / 1e6:,.1f} MB",
            "files": len(self.shards),
            "fingerprint": self.fingerprint[:12],
        }
        return html_table("Checkpoint", rows)


def html_table(caption: str, rows: Mapping[str, object]) -> str:
    """Return a two-column HTML table with a caption, everything escaped."""
    body = "".join(
        f"<tr><th scope='row' style='text-align:left'>{html.escape(name)}</th>"
        f"<td style='text-align:left'>{html.escape(str(value))}</td></tr>"
        for name, value in rows.items()
    )
    return f"<table><caption>{html.escape(caption)}</caption><tbody>{body}</tbody></table>"


def _merge(shards: tuple[Shard, ...]) -> dict[str, TensorInfo]:
    merged: dict[str, TensorInfo] = {}
    for shard in shards:
        twice = merged.keys() & shard.tensors.keys()
        if twice:
            raise CheckpointError(
                f"tensor '{min(twice)}' is also in {merged[min(twice)].file}",
                expected="every tensor in one shard only",
                remedy="remove stale weight files from the directory, or restore its index",
                where=shard.path,
            )
        merged.update(shard.tensors)
    return merged


_PARTS = ("router", "stacked", "each", "ids")


def _family(config: Mapping[str, Any], directory: Path) -> Family:
    """The family's row; for a model type without one, the error says which tensors look like experts."""
    where = str(directory / "config.json")
    shapes = None
    if config.get("model_type") not in FAMILIES:
        with suppress(CheckpointError):  # an unreadable shard hides what it holds, not that the type is unknown
            tensors = _merge(tuple(read_shard(file) for file in shard_paths(directory)))
            shapes = {name: info.shape for name, info in tensors.items()}
    return family_of(config, where, shapes)


def _places(tensors: Mapping[str, TensorInfo], family: Family, n_layers: int) -> dict[str, Place]:
    """What each tensor with an expert axis is; tensors that may have one are kept in as unknown."""
    found = {name: place for name in tensors if (place := place_of(name, family))}
    found = {n: replace(p, layer=p.layer + n_layers) if p.mtp and p.layer >= 0 else p for n, p in found.items()}
    with_experts = {place.layer for place in found.values() if place.kind in _PARTS} | {-1}
    return {name: p for name, p in found.items() if p.kind != "unknown" or p.layer in with_experts}


def _moe_layers(places: Mapping[str, Place], n_layers: int, directory: Path) -> tuple[int, ...]:
    routers = {place.layer for place in places.values() if place.kind == "router"}
    experts = {place.layer for place in places.values() if place.kind in ("stacked", "each")}
    if odd := routers ^ experts:
        has, lacks = ("a router", "experts") if min(odd) in routers else ("experts", "a router")
        raise CheckpointError(
            f"layer {min(odd)} has {has} but no {lacks.removeprefix('a ')} in the weights",
            expected="router and experts for every MoE layer",
            remedy="check that all shards are there and belong to the same model",
            where=directory,
        )
    layers = tuple(sorted(layer for layer in routers if layer < n_layers))
    if not layers:
        raise CheckpointError(
            "the weights hold no layer with experts",
            expected="router and expert tensors as the config's model type has them",
            remedy="check that weights and config.json belong together",
            where=directory,
        )
    return layers


def _check_weights(checkpoint: Checkpoint) -> None:
    """Every tensor with an expert axis has the rows, and every expert the tensors, that the config says."""
    each: dict[tuple[int, str], set[int]] = {}
    for name, place in checkpoint.places.items():
        if place.kind == "each":
            each.setdefault((place.layer, place.rest), set()).add(place.expert or 0)
        elif place.kind == "unknown":
            _check_unknown(checkpoint, name, place)
        elif place.kind != "ids":
            _check_rows(checkpoint, name, place)
    routed = set(range(checkpoint.n_experts))
    with_tail = set(range(checkpoint.n_experts + checkpoint.each_tail))
    for (layer, rest), found in each.items():
        if found not in (routed, with_tail):
            what = f"layer {layer} has '{rest}' for {len(found)} experts (highest {max(found)})"
            raise _disagrees(checkpoint, what)


def _check_unknown(checkpoint: Checkpoint, name: str, place: Place) -> None:
    """Refuse a tensor that the row does not name if an axis of it may count experts."""
    if place.layer < 0 or checkpoint.n_experts in checkpoint.tensors[name].shape:
        raise _unlisted(checkpoint, name)


def _check_rows(checkpoint: Checkpoint, name: str, place: Place) -> None:
    info, rule = checkpoint.tensors[name], place.rule or Sliced(name)
    rows = info.shape[rule.axis] - checkpoint.tail(rule) if len(info.shape) > rule.axis else 0
    wrong = rows % checkpoint.n_experts if place.kind == "stacked" else rows != checkpoint.n_experts
    if wrong or rows <= 0:
        raise _disagrees(checkpoint, f"'{name}' {list(info.shape)} in {info.file} has {rows} expert rows")


def _check_extra(checkpoint: Checkpoint) -> None:
    """Layers numbered on from the decoder's are prediction heads only if the config says that there are some."""
    numbered = {p.layer for p in checkpoint.places.values() if not p.mtp and p.layer >= checkpoint.n_layers}
    stated = max((lookup(checkpoint.config, key) or 0 for key in checkpoint.family.mtp_keys), default=0)
    if len(numbered) > stated:
        raise CheckpointError(
            f"the weights have experts in layer {max(numbered)}, but the config says {checkpoint.n_layers} layers and "
            f"{stated or 'no'} multi-token-prediction layers",
            expected="as many layers in config and weights",
            remedy=f"correct {checkpoint.family.layer_keys[0]} or {checkpoint.family.mtp_keys[0]} in config.json",
            where=checkpoint.path / "config.json",
        )


def _unlisted(checkpoint: Checkpoint, name: str) -> CheckpointError:
    info = checkpoint.tensors[name]
    return CheckpointError(
        f"tensor '{name}' {list(info.shape)} may have an expert axis, which the family table does not list",
        expected=f"only the tensors listed for {checkpoint.family.model_type}",
        remedy="add it to the family's row in moeproxy/experts/family_rows (router, stacked, also_blocks or shared)",
        where=checkpoint.path / info.file,
    )


def _disagrees(checkpoint: Checkpoint, what: str) -> CheckpointError:
    return CheckpointError(
        f"the config says {checkpoint.n_experts} experts but {what}",
        expected="the same number of experts in config and weights",
        remedy=f"correct {checkpoint.family.count_keys[0]} in config.json, or restore the matching weights",
        where=checkpoint.path / "config.json",
    )


def _fingerprint(raw_config: bytes, shards: tuple[Shard, ...]) -> str:
    digest = hashlib.sha256(raw_config)
    for shard in shards:
        digest.update(f"\0{shard.path.name}\0{shard.size}\0".encode())
        digest.update(shard.header)
    return digest.hexdigest()
