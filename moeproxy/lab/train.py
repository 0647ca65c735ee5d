"""Train one run from a file of settings: what `accelerate launch` starts on every process.

    python -m moeproxy.lab.train --spec spec.json --out trace.parquet
    accelerate launch --num_processes 8 -m moeproxy.lab.train --spec spec.json --out trace.parquet

The file holds what `RunSpec.to_dict` gives; keys that are left out have their defaults.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from moeproxy.errors import LabError, MoeproxyError
from moeproxy.lab.run import run
from moeproxy.lab.settings import Application, GRPOSettings, Injection, RunSpec


def read_spec(path: Path) -> RunSpec:
    """Read a run from JSON: `model` is needed, all other keys of `RunSpec.to_dict` have defaults.

    Raises:
        LabError: the file is missing or no such object, or a key is unknown.
    """
    try:
        stored: Any = json.loads(Path(path).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise LabError(f"no readable settings ({error})", where=path, expected="a JSON object") from error
    if not isinstance(stored, dict) or "model" not in stored:
        raise LabError("no model is named", where=path, expected='a JSON object with the key "model"')
    _check_keys(stored, RunSpec, path)
    _check_keys(stored.get("settings", {}), GRPOSettings, path)
    for injection in (stored.get("injection"), *stored.get("further", ())):
        _check_keys(injection or {}, Injection, path)
    for application in stored.get("remedies", ()):
        _check_keys(application, Application, path)
    defaults = RunSpec(Path(stored["model"])).to_dict()
    return RunSpec.from_dict({**defaults, **stored})


def _check_keys(stored: dict[str, Any], kind: type, path: Path) -> None:
    known = [item.name for item in fields(kind)]
    if unknown := sorted(set(stored) - set(known)):
        raise LabError(f"unknown key {unknown[0]!r}", where=path, expected=f"one of {', '.join(known)}")


def main() -> None:
    """Command line: train and write the trace; of several processes the first writes."""
    parser = argparse.ArgumentParser(description="Train one GRPO run from a file of settings.")
    parser.add_argument("--spec", type=Path, required=True, help="JSON of a RunSpec")
    parser.add_argument("--out", type=Path, required=True, help="where the trace goes")
    options = parser.parse_args()
    try:
        _train(options.spec, options.out)
    except MoeproxyError as error:
        sys.exit(f"moeproxy: {error}")


def _train(settings: Path, out: Path) -> None:
    from tqdm.auto import tqdm

    spec = read_spec(settings)
    first = int(os.environ.get("RANK", "0")) == 0
    if first and out.exists():
        raise LabError("exists already", where=out, remedy="remove it or choose another --out")
    with tqdm(total=spec.settings.steps, disable=not first, unit="step") as bar:

        def show(_step: int, _steps: int, _row: dict[str, float]) -> None:
            bar.update()

        trace = run(spec, progress=show)
    if first:
        trace.save(out)


if __name__ == "__main__":
    main()
