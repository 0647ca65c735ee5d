"""Find the model directory behind a path: `~`, a hub cache with its snapshots, or the directory itself."""

from __future__ import annotations

from pathlib import Path

from moeproxy.errors import CheckpointError

_CACHE_PREFIX = "models--"


def model_directory(path: str | Path) -> Path:
    """Return the directory that holds config.json: `path` itself, or the snapshot that a hub cache folder points to.

    A cache folder (`models--org--name`) keeps one folder a revision under `snapshots`, whose files are links into
    `blobs`; its `refs/main` names the revision in use.

    Raises:
        CheckpointError: a cache folder without a snapshot, or with several and no `refs/main`.
    """
    directory = Path(path).expanduser()
    snapshots = directory / "snapshots"
    if (directory / "config.json").exists() or not snapshots.is_dir():
        return directory
    main = directory / "refs" / "main"
    if main.is_file():
        named = snapshots / main.read_text("utf-8").strip()
        if named.is_dir():
            return named
    found = sorted(item for item in snapshots.iterdir() if item.is_dir())
    if len(found) == 1:
        return found[0]
    raise CheckpointError(
        f"the cache folder has {len(found)} snapshots" + ("" if not found else " and refs/main names none of them"),
        expected="one snapshot, or a refs/main that names one",
        remedy="finish the download"
        if not found
        else f"name one of them: {', '.join(item.name for item in found[:4])}",
        where=directory,
    )


def model_name(directory: Path) -> str:
    """Return what to call the model in a directory: org/name for a snapshot of a hub cache, else the folder's name."""
    repository = directory.parent.parent.name
    if directory.parent.name == "snapshots" and repository.startswith(_CACHE_PREFIX):
        return repository.removeprefix(_CACHE_PREFIX).replace("--", "/")
    return directory.name
