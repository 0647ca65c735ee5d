"""Write a report's files into a folder without ever taking something of somebody's: what was edited stays.

A list of the files with their hashes stays beside them. A file of the report that still is what was written may be
replaced; one that was edited, or that was never written by a report, makes the whole report refuse.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from moeproxy.errors import MoeproxyError
from moeproxy.files import atomic_file, sha256_file

LIST = "files.json"
"""Name of the list of files."""

_FORMAT = "moeproxy.report.files"
_OLD = {"index.html", "report.md", "report.json"}


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write the files of a report; those of an earlier one that it no longer has are removed, unless edited.

    Each file appears complete or not at all, and nothing is written when anything stands in the way.

    Args:
        folder: made if need be; other files in it stay.
        files: content by name; a name may hold one folder ("figures/1.svg").

    Raises:
        MoeproxyError: a file of that name was edited, or is not of a report; or the folder cannot be written.
    """
    try:
        before = _listed(folder)
        _check(folder, files, before)
        hashes = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
        # Both generations are known while files are replaced: a report that was cut short can be written again.
        both = {name: [*before.get(name, []), value] for name, value in hashes.items()}
        _write(folder / LIST, _text(both | _others(before, hashes)))
        for name, content in files.items():
            _write(folder / name, content)
        _remove(folder, _others(before, hashes))
        _write(folder / LIST, _text({name: [value] for name, value in hashes.items()}))
    except OSError as error:
        raise MoeproxyError(
            f"the report cannot be written ({error.strerror or error})",
            where=folder,
            expected="a writable directory with room for about 10 MB",
            remedy="choose another output directory or free some space",
        ) from error


def check_folder(folder: Path, names: Mapping[str, bytes] | tuple[str, ...]) -> None:
    """Raise what `write_files` would, before the work that makes the files.

    Raises:
        MoeproxyError: a file of one of these names was edited, or is not of a report.
    """
    try:
        _check(folder, names, _listed(folder))
    except OSError as error:
        raise MoeproxyError(f"the folder cannot be read ({error.strerror or error})", where=folder) from error


def unchanged(folder: Path) -> list[str]:
    """Return the names of an earlier report's files that still are what it wrote."""
    return [
        name
        for name, known in _listed(folder).items()
        if (folder / name).is_file() and sha256_file(folder / name) in known
    ]


def _listed(folder: Path) -> dict[str, list[str]]:
    """Return the hashes that each file of an earlier report may have."""
    path = folder / LIST
    if not path.is_file():
        return _without_list(folder)
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        if stored["format"] != _FORMAT:
            raise ValueError("another format")
        return {str(name): [str(one) for one in known] for name, known in stored["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise MoeproxyError(
            "a file of this name that is not the list of a report's files",
            where=path,
            remedy="write the report into another folder",
        ) from error


def _without_list(folder: Path) -> dict[str, list[str]]:
    """Reports had no list once: what they wrote is known by its JSON file."""
    path = folder / "report.json"
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(stored, dict) and stored.get("format") == "moeproxy.report":
            return {name: [sha256_file(folder / name)] for name in _OLD if (folder / name).is_file()}
    except (OSError, ValueError):
        pass
    return {}


def _check(folder: Path, files: Mapping[str, bytes] | tuple[str, ...], before: Mapping[str, list[str]]) -> None:
    for name in files:
        path = folder / name
        if not path.exists() and not path.is_symlink():
            continue
        if not path.is_file() or path.is_symlink() or sha256_file(path) not in before.get(name, []):
            what = "was changed after it was written" if name in before else "is not of a report"
            raise MoeproxyError(
                f"the file is there and {what}; it would be lost",
                where=path,
                remedy="move it away, or write the report into another folder",
            )


def _others(before: Mapping[str, list[str]], hashes: Mapping[str, str]) -> dict[str, list[str]]:
    return {name: known for name, known in before.items() if name not in hashes}


def _remove(folder: Path, files: Mapping[str, list[str]]) -> None:
    """Remove what an earlier report wrote and nobody changed; what was changed is somebody's now."""
    for name, known in files.items():
        path = folder / name
        if ".." not in Path(name).parts and path.is_file() and not path.is_symlink() and sha256_file(path) in known:
            path.unlink()


def _write(path: Path, content: bytes) -> None:
    with atomic_file(path) as temporary:
        temporary.write_bytes(content)


def _text(files: Mapping[str, list[str]]) -> bytes:
    return (json.dumps({"format": _FORMAT, "files": files}, indent=1, sort_keys=True) + "\n").encode()
