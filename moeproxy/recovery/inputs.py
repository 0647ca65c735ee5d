"""Refusals of what cannot work, before any process starts: numbers, models and folders that a user gives."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from moeproxy.errors import CheckpointError, RecoveryError


def whole(name: str, value: Any, least: int = 0) -> None:
    """Refuse what is no whole number of at least `least`.

    Raises:
        RecoveryError: so it is.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise RecoveryError(f"{name} is {value!r}", expected=f"a whole number, at least {least}")


def yes_or_no(name: str, value: Any) -> None:
    """Refuse what is neither True nor False, such as "no".

    Raises:
        RecoveryError: so it is.
    """
    if not isinstance(value, bool):
        raise RecoveryError(f"{name} is {value!r}", expected="True or False")


def positive(name: str, value: Any, *, zero: bool = False, endless: bool = False) -> None:
    """Refuse what is no number above 0, such as a string or NaN.

    Args:
        name: for the message.
        value: what was given.
        zero: whether 0 is one, too.
        endless: whether infinity is one, too.

    Raises:
        RecoveryError: so it is.
    """
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not (value > 0 or (zero and value == 0)) or not (endless or _finite(value)):
        raise RecoveryError(f"{name} is {value!r}", expected=f"a number, {'0 or more' if zero else 'more than 0'}")


def _finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number that no float can hold
        return False


def usable_model(model: Any) -> None:
    """Refuse what is no directory of a checkpoint.

    Raises:
        RecoveryError: it has no readable `config.json`, or no weights, or weights that are cut off or missing.
    """
    problem = "a model that is no path"
    if isinstance(model, (str, Path)):
        problem = _problem(Path(model))
    if problem:
        raise RecoveryError(
            problem,
            where=str(model),
            expected="the directory of a checkpoint: config.json and *.safetensors",
            remedy="correct the path; the testbed's models lie in data_dir() / 'models' (moeproxy.places)",
        )


def _problem(model: Path) -> str:
    if not model.is_dir():
        return "no such directory"
    try:
        if not isinstance(json.loads((model / "config.json").read_text(encoding="utf-8")), dict):
            return "its config.json is no JSON object"
    except (OSError, ValueError) as error:
        return f"no readable config.json ({error})"
    if not any(model.glob("*.safetensors")):
        return "it holds no weights"
    from moeproxy.experts.shards import check_index, read_shard, shard_paths

    try:
        tensors: dict[str, Any] = {}
        for path in shard_paths(model):
            tensors |= read_shard(path).tensors
        check_index(model, tensors)
    except CheckpointError as error:
        return f"weights that cannot be read ({error})"
    return ""


def usable_folder(folder: Path) -> None:
    """Make a job's folder, and refuse one that another job, or anything else, is in.

    Raises:
        RecoveryError: it is not empty, no folder, or cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        empty = not any(folder.iterdir())
    except OSError as error:
        raise RecoveryError(
            f"no folder for a job ({error.strerror})",
            where=folder,
            expected="a folder that is new or empty",
            remedy="choose another one",
        ) from error
    if not empty:
        raise RecoveryError("the folder is not empty", where=folder, remedy="give each job a new one")
    if not os.access(folder, os.W_OK):
        raise RecoveryError("the folder cannot be written", where=folder, remedy="choose another one")
