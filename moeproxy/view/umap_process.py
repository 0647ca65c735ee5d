"""The process that computes one UMAP layout: python -m moeproxy.view.umap_process GIVEN.npz XY.npy."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from moeproxy.files import atomic_file


def embed(matrix: np.ndarray, start_N2: np.ndarray, *, precomputed: bool, seed: int) -> np.ndarray:
    """Return the UMAP layout xy_N2 of distances (`precomputed`) or feature vectors, from a first layout."""
    with warnings.catch_warnings():
        # UMAP warns that a fixed seed means one thread, and that a distance matrix cannot be inverted: both meant.
        warnings.simplefilter("ignore")
        import umap

        start: Any = 10.0 * start_N2 / max(float(np.abs(start_N2).max()), 1e-12)
        mapper = umap.UMAP(
            n_neighbors=min(15, len(matrix) - 1),
            metric="precomputed" if precomputed else "euclidean",
            init=start,
            random_state=seed,
        )
        return np.asarray(mapper.fit_transform(matrix), dtype=np.float32)


def main() -> None:
    """Read the one file and write the other."""
    given, made = map(Path, sys.argv[1:3])
    with np.load(given, allow_pickle=False) as stored:
        settings = {"precomputed": bool(stored["precomputed"]), "seed": int(stored["seed"])}
        matrix, start_N2 = stored["matrix"], stored["start"]
    with atomic_file(made) as temporary:
        np.save(temporary, embed(matrix, start_N2, **settings))


if __name__ == "__main__":
    main()
