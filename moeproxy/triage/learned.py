"""What was learned from the benchmark, as files: fingerprints, units and calibration of both ways of judging."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path

import numpy as np
import pandas as pd

from moeproxy.errors import ComparisonError
from moeproxy.files import atomic_file
from moeproxy.places import data_dir
from moeproxy.triage.fingerprint import Units
from moeproxy.triage.library import Library

_FILES = {"beside healthy runs": "beside", "alone": "alone"}
_LABELS = ("fault", "model", "level", "seed")


def save_library(library: Library, folder: Path) -> None:
    """Write `<mode>.parquet` (a row a recorded run) and `<mode>.json` (units and calibration) into `folder`."""
    name = _FILES[library.mode]
    labels = {label: getattr(library, f"{label}_N") for label in _LABELS}
    # Half precision holds three digits: more than a fingerprint repeats from seed to seed.
    features = {f"f{index}": column.astype(np.float16) for index, column in enumerate(library.features_NF.T)}
    with atomic_file(folder / f"{name}.parquet") as temporary:
        pd.DataFrame({**labels, **features}).to_parquet(temporary, compression="zstd", index=False)
    stored = {
        "mode": library.mode,
        "signals": list(library.signals),
        "units": {signal: list(unit) for signal, unit in library.units.by_signal.items()},
        "floor": library.floor,
        "temperature": library.temperature,
        "farthest": library.farthest,
    }
    with atomic_file(folder / f"{name}.json") as temporary:
        temporary.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")


def load_library(mode: str, folder: Path | None = None) -> Library:
    """Read the library of one way of judging, by default the shipped one.

    Raises:
        ComparisonError: a file is absent or no such file.
    """
    return _load(mode, folder or data_dir() / "triage")


@lru_cache(maxsize=4)
def _load(mode: str, folder: Path) -> Library:
    path = folder / f"{_FILES[mode]}.json"
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        table = pd.read_parquet(path.with_suffix(".parquet"))
        features = table[[name for name in table if str(name).startswith("f") and str(name)[1:].isdigit()]]
        return Library(
            mode=stored["mode"],
            signals=tuple(stored["signals"]),
            units=Units({signal: tuple(unit) for signal, unit in stored["units"].items()}),
            features_NF=features.to_numpy(np.float64),
            floor=stored["floor"],
            temperature=stored["temperature"],
            farthest=stored["farthest"],
            **{f"{label}_N": table[label].to_numpy() for label in _LABELS},
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ComparisonError(
            "no fingerprints of known faults",
            where=path,
            expected="files of moeproxy.triage.learn",
            remedy="python -m moeproxy.triage.learn",
        ) from error
