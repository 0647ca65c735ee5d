"""Compute the UMAP layouts that come with moeproxy: every layer and all layers, equal weights and single views.

python -m moeproxy.view.expert_map --out data/maps
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from moeproxy.experts.checkpoint import Checkpoint
from moeproxy.experts.profile import profile
from moeproxy.experts.statistics import ExpertProfile
from moeproxy.files import provenance
from moeproxy.lab.pruning_study import calibration_texts
from moeproxy.proxy.similarity import distances
from moeproxy.view.expert_layout import ExpertMaps, LayerFeatures, layout_key, pca_layout, pca_of_features
from moeproxy.view.umap_process import embed

WEIGHTS = ((1, 1, 1, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1))
MODELS = ("qwen3-moe-tiny", "deepseek-v3-tiny")


def compute_maps(
    statistics: ExpertProfile,
    *,
    weights: Sequence[tuple[int, ...]] = WEIGHTS,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> ExpertMaps:
    """Return UMAP layouts of every layer and of all layers, for each of the view weights.

    Args:
        statistics: a profile with the choices of its tokens.
        weights: of the router, co-activation, context and output views.
        seed: of UMAP.
        progress: called with one line a layout.

    Raises:
        MoeproxyError: UMAP failed.
    """
    views, whole, xy = distances(statistics, output=True), LayerFeatures.of(statistics), {}
    for four in weights:
        for layer in (*statistics.moe_layers, None):
            if layer is None:
                features_NX = whole.weigh(four)
                start_N2 = pca_of_features(features_NX)
                # In this process: each new one would compile UMAP again.
                found = embed(features_NX, start_N2, precomputed=False, seed=seed)
            else:
                fused_EE = views.fuse(four)[statistics.moe_layers.index(layer)]
                found = embed(fused_EE, pca_layout(fused_EE), precomputed=True, seed=seed)
            xy[layout_key(layer, four)] = found
            if progress:
                progress(f"layer {'all' if layer is None else layer}, weights {four}")
    settings = {"seed": seed, "profile": dict(statistics.provenance)}
    return ExpertMaps(statistics.checkpoint_fingerprint, xy, provenance(**settings))


def main() -> None:
    """Command line: profile each shipped model as the notebooks do, and write its layouts."""
    from tqdm.auto import tqdm

    parser = argparse.ArgumentParser(description="UMAP layouts of the shipped models' experts.")
    parser.add_argument("--models", type=Path, default=Path("data/models"))
    parser.add_argument("--out", type=Path, default=Path("data/maps"))
    options = parser.parse_args()
    for name in MODELS:
        checkpoint = Checkpoint.open(options.models / name)
        statistics = profile(checkpoint, calibration_texts(0), batch_size=200)
        compute_maps(statistics, progress=tqdm.write).save(options.out / f"{name}.npz")


if __name__ == "__main__":
    main()
