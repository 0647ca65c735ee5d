"""Where the shipped data lies."""

from __future__ import annotations

import os
from pathlib import Path

from moeproxy.errors import MoeproxyError


def data_dir() -> Path:
    """Return the directory of models and recorded runs: `MOEPROXY_DATA`, else `data` beside the package.

    Raises:
        MoeproxyError: there is no such directory.
    """
    chosen = os.environ.get("MOEPROXY_DATA")
    path = Path(chosen) if chosen else Path(__file__).resolve().parents[1] / "data"
    if not (path / "models").is_dir():
        raise MoeproxyError(
            "no models here",
            where=path,
            expected="the repository's data directory, with models/ and runs/",
            remedy="set MOEPROXY_DATA to it",
        )
    return path
