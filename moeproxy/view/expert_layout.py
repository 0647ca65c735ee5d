"""Where experts lie on a map: classical scaling at once, UMAP in a process of its own, and stored layouts.

A layout is xy_N2: one point an expert, N = E for one layer, L * E (layer by layer) for all layers.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy import sparse

from moeproxy.errors import MoeproxyError
from moeproxy.experts.checkpoint import html_table
from moeproxy.experts.statistics import ExpertProfile
from moeproxy.files import atomic_file
from moeproxy.places import data_dir

FORMAT = 1
Report = Callable[[float, str], None]
Key = tuple[int | None, tuple[float, float, float, float]]
_PROJECTED = 64  # columns a view; enough for a picture, and 6,144 experts stay within a slider's budget
_SAMPLED = 4096  # tokens that the meetings of experts are counted on
_TYPICAL_S = 15.0  # of a first UMAP, which compiles; it only shapes the progress bar


def layout_key(layer: int | None, weights: Sequence[float | int]) -> Key:
    """Return what a stored layout is found by: decoder layer (None: all) and weights that sum to one."""
    four = np.zeros(4)
    four[: len(weights)] = weights
    a, b, c, d = np.round(four / max(four.sum(), 1e-12), 3).tolist()
    return layer, (a, b, c, d)


def pca_layout(distance_EE: Float[np.ndarray, "E E"]) -> Float[np.ndarray, "E 2"]:
    """Return the two leading coordinates of classical scaling (Torgerson 1952), the PCA of a distance matrix.

    Each column's sign is chosen so that its largest coordinate is positive: a picture does not flip between runs.
    """
    square_EE = np.asarray(distance_EE, dtype=np.float64) ** 2
    row_E = square_EE.mean(axis=1)
    gram_EE = -0.5 * (square_EE - row_E[:, None] - row_E + row_E.mean())
    value_E, vector_EE = np.linalg.eigh(gram_EE)
    xy_E2 = np.zeros((len(gram_EE), 2))
    top = min(2, len(value_E))
    xy_E2[:, :top] = (vector_EE * np.sqrt(np.maximum(value_E, 0)))[:, ::-1][:, :top]
    return _upright(xy_E2).astype(np.float32)


@dataclass(frozen=True)
class LayerFeatures:
    """One vector a view for every expert of every layer (N = L * E), comparable across layers.

    The co-activation counts that `distances` uses live within one layer. Across layers the view is: with which
    experts of all layers do an expert's tokens meet (from `choices_TLK`). Router rows, contexts and outputs are
    centred by layer, or the map would show nothing but the layers. Each view is projected at random to 64 columns and
    scaled to length 1. Made once: a move of a weight only weighs them anew.

    Attributes:
        router_NX, context_NX, output_NX: unit vectors, zeros for experts of which nothing is known.
        meeting_NX: the same of the co-activation view; None where the profile kept no choices.
    """

    router_NX: Float[np.ndarray, "N X1"]
    meeting_NX: Float[np.ndarray, "N X2"] | None
    context_NX: Float[np.ndarray, "N X3"]
    output_NX: Float[np.ndarray, "N X4"]

    @classmethod
    def of(cls, profile: ExpertProfile) -> LayerFeatures:
        """Make the vectors of a profile."""
        rng = np.random.default_rng(0)
        router, context, output = (
            _unit(_projected(_centred(vectors_LED, profile), rng))
            for vectors_LED in (profile.router_LED, profile.context_LED, profile.output_LED)
        )
        meeting = _unit(_meetings(profile, rng)) if len(profile.choices_TLK) else None
        return cls(router, meeting, context, output)

    def weigh(self, weights: Sequence[float | int]) -> Float[np.ndarray, "N X"]:
        """Return vectors whose squared distance is twice the weighted sum of the views' cosine distances.

        Raises:
            MoeproxyError: only co-activation has a weight, and the profile kept no choices.
        """
        _, four = layout_key(None, weights)
        if four[1] == sum(four) and self.meeting_NX is None:
            raise MoeproxyError(
                "co-activation across layers needs the choices of every token, which this profile did not keep",
                expected="a profile with keep_choices=True",
                remedy="profile again with keep_choices=True, or give another view a weight",
            )
        views = zip(four, (self.router_NX, self.meeting_NX, self.context_NX, self.output_NX), strict=True)
        parts = [np.sqrt(weight) * view_NX for weight, view_NX in views if weight > 0 and view_NX is not None]
        return np.concatenate(parts, axis=1).astype(np.float32)


def pca_of_features(features_NX: Float[np.ndarray, "N X"]) -> Float[np.ndarray, "N 2"]:
    """Return the two leading principal components, signs as in `pca_layout`."""
    centred_NX = features_NX - features_NX.mean(axis=0)
    _, vector_XX = np.linalg.eigh((centred_NX.T @ centred_NX).astype(np.float64))
    xy_N2 = np.zeros((len(centred_NX), 2))
    top = min(2, vector_XX.shape[1])
    xy_N2[:, :top] = centred_NX @ vector_XX[:, ::-1][:, :top]
    return _upright(xy_N2).astype(np.float32)


def umap_layout(
    matrix: Float[np.ndarray, "N X"],
    *,
    precomputed: bool,
    seed: int = 0,
    report: Report | None = None,
) -> Float[np.ndarray, "N 2"]:
    """Return a UMAP layout (arXiv 1802.03426), made in a process of its own.

    UMAP cannot be interrupted, and compiling it for the first time takes many seconds; a process can be ended.

    Args:
        matrix: distances (N, N) if `precomputed`, else feature vectors.
        precomputed: which of the two.
        seed: of UMAP; the same seed gives the same layout on the same machine.
        report: called ten times a second with a guessed share and a text; what it raises ends the process.

    Raises:
        MoeproxyError: UMAP failed; its last words are quoted.
    """
    start_N2 = pca_layout(matrix) if precomputed else pca_of_features(matrix)
    with tempfile.TemporaryDirectory() as folder:
        given, made = Path(folder) / "given.npz", Path(folder) / "xy.npy"
        np.savez(given, matrix=matrix, start=start_N2, precomputed=precomputed, seed=seed)
        command = [sys.executable, "-m", "moeproxy.view.umap_process", str(given), str(made)]
        with (Path(folder) / "log").open("w+") as log:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            try:
                _wait(process, report)
            finally:
                process.kill()  # nothing happens if it has ended
                process.wait()
            log.seek(0)
            if process.returncode != 0 or not made.exists():
                last = log.read().strip().rpartition("\n")[2]
                raise MoeproxyError(f"UMAP failed: {last}", remedy="use the PCA layout, or other weights")
        return np.load(made, allow_pickle=False)


def _wait(process: subprocess.Popen[bytes] | subprocess.Popen[str], report: Report | None) -> None:
    start_s = time.monotonic()
    while process.poll() is None:
        passed_s = time.monotonic() - start_s
        if report:
            report(passed_s / (passed_s + _TYPICAL_S), f"UMAP is computing: {passed_s:.0f} s so far.")
        time.sleep(0.1)


@dataclass(frozen=True)
class ExpertMaps:
    """Stored UMAP layouts of one checkpoint.

    Attributes:
        checkpoint_fingerprint: of the checkpoint whose experts are laid out.
        xy: layouts by `layout_key`.
        provenance: versions, command, time, settings.
    """

    checkpoint_fingerprint: str
    xy: Mapping[Key, Float[np.ndarray, "N 2"]] = field(compare=False)
    provenance: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def find(self, layer: int | None, weights: Sequence[float | int]) -> Float[np.ndarray, "N 2"] | None:
        """Return the layout of a layer (None: of all) with these view weights, or None."""
        return self.xy.get(layout_key(layer, weights))

    def save(self, path: str | Path) -> Path:
        """Write one `.npz` file, complete or not at all; return its path."""
        target = Path(path)
        facts = {"format": FORMAT, "fingerprint": self.checkpoint_fingerprint, "provenance": dict(self.provenance)}
        facts["keys"] = [[layer, list(weights)] for layer, weights in self.xy]
        arrays: dict[str, Any] = {f"xy_{i}": np.float32(xy_N2) for i, xy_N2 in enumerate(self.xy.values())}
        arrays["facts"] = np.array(json.dumps(facts))
        with atomic_file(target) as temporary, temporary.open("wb") as stream:
            np.savez_compressed(stream, **arrays)
        return target

    @classmethod
    def load(cls, path: str | Path) -> ExpertMaps:
        """Read layouts that `save` wrote; raises MoeproxyError if the file is missing, damaged or of another format."""
        try:
            with open(path, "rb") as stream, np.load(stream, allow_pickle=False) as stored:
                facts = json.loads(str(stored["facts"]))
                if facts["format"] != FORMAT:
                    raise ValueError("format")
                keys = [layout_key(layer, weights) for layer, weights in facts["keys"]]
                xy = {key: stored[f"xy_{i}"] for i, key in enumerate(keys)}
            return cls(facts["fingerprint"], xy, facts["provenance"])
        except (OSError, EOFError, KeyError, TypeError, ValueError, zipfile.BadZipFile) as error:
            raise MoeproxyError(
                "the expert maps cannot be read: the file is missing, damaged or of another format",
                expected=f"layouts of format {FORMAT}",
                remedy="make them again with python -m moeproxy.view.expert_map",
                where=path,
            ) from error

    def __repr__(self) -> str:
        return f"ExpertMaps({len(self.xy)} layouts of checkpoint {self.checkpoint_fingerprint[:12]})"

    def _repr_html_(self) -> str:
        layers = sorted({-1 if layer is None else layer for layer, _ in self.xy})
        rows = {
            "checkpoint": self.checkpoint_fingerprint[:12],
            "layouts": len(self.xy),
            "layers": ", ".join("all" if layer < 0 else str(layer) for layer in layers),
        }
        return html_table("Expert maps", rows)


def shipped_maps(fingerprint: str) -> ExpertMaps:
    """Return the layouts that come with moeproxy for a checkpoint; without any, or without data, an empty set."""
    try:
        paths = sorted((data_dir() / "maps").glob("*.npz"))
    except MoeproxyError:
        paths = []
    found = (maps for maps in map(ExpertMaps.load, paths) if maps.checkpoint_fingerprint == fingerprint)
    return next(found, ExpertMaps(fingerprint, {}))


def _centred(vectors_LED: np.ndarray, profile: ExpertProfile) -> np.ndarray:
    share_LE = profile.load_LE / np.maximum(profile.load_LE.sum(axis=1, keepdims=True), 1)
    mean_LD = np.einsum("le,led->ld", share_LE, vectors_LED)
    # An unused expert has no context and no output: it lies at the mean, not opposite to it.
    known_LE = np.abs(vectors_LED).max(axis=2) > 0
    centred_LED = (vectors_LED - mean_LD[:, None]) * known_LE[..., None]
    return centred_LED.reshape(-1, vectors_LED.shape[2])


def _meetings(profile: ExpertProfile, rng: np.random.Generator) -> np.ndarray:
    """How often each expert's tokens go to each expert of every layer, the latter projected to 64 columns."""
    n_layers, n_experts = profile.load_LE.shape
    chosen_TLK = profile.choices_TLK[:: max(len(profile.choices_TLK) // _SAMPLED, 1)].astype(np.int64)
    # A slot without a routed expert (families with skip or zero experts) would count for another layer.
    known = (chosen_TLK >= 0) & (chosen_TLK < n_experts)
    place_TLK = chosen_TLK + n_experts * np.arange(n_layers)[:, None]
    token = np.nonzero(known)[0]
    shape = (len(chosen_TLK), n_layers * n_experts)
    chosen_TN = sparse.csr_array((np.ones(len(token), np.float32), (token, place_TLK[known])), shape=shape)
    random_NP = rng.standard_normal((shape[1], _PROJECTED), dtype=np.float32)
    return chosen_TN.T @ (chosen_TN @ random_NP)


def _projected(vectors_NX: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    if vectors_NX.shape[1] <= _PROJECTED:
        return vectors_NX
    random_XP = rng.standard_normal((vectors_NX.shape[1], _PROJECTED), dtype=np.float32)
    return vectors_NX.astype(np.float32) @ random_XP


def _unit(vectors_NX: np.ndarray) -> np.ndarray:
    length_N1 = np.linalg.norm(vectors_NX, axis=1, keepdims=True)
    return vectors_NX / np.where(length_N1 > 0, length_N1, 1)


def _upright(xy_N2: np.ndarray) -> np.ndarray:
    largest_2 = xy_N2[np.abs(xy_N2).argmax(axis=0), [0, 1]]
    return xy_N2 * np.where(largest_2 < 0, -1, 1)
