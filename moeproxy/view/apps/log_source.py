"""Where a log comes from: a path that is typed, or a file that is uploaded."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ipywidgets as widgets

from moeproxy.errors import TraceError
from moeproxy.files import atomic_file
from moeproxy.view.apps.ui import Status

_UNSAFE = re.compile(r"[^\w.\-+ ]+")
_TRIES = 1000


class LogSource:
    """A field for a path, a list of examples, and a button to upload.

    Args:
        path: in the field at first.
        examples: folder of logs to choose from; it need not exist.
        uploads: folder that uploaded files go to; nothing in it is ever overwritten.
        status: told when an upload fails.
        on_choice: called without arguments once an example or an uploaded file stands in the field.
    """

    def __init__(
        self, path: Path, examples: Path, uploads: Path, status: Status, on_choice: Callable[[], None]
    ) -> None:
        self._uploads, self._on_choice = uploads, on_choice
        files = sorted(file for file in examples.glob("*") if file.suffix != ".md")
        self.example = widgets.Dropdown(options=[("–", ""), *((file.name, str(file)) for file in files)])
        self.example.description, self.example.style.description_width = "or an example", "initial"
        self.example.layout.width = "330px"
        self.example.observe(status.guard(self._chosen), "value")
        self.text = widgets.Text(value=str(path), description="Log", placeholder="path of a file or a folder")
        self.text.style.description_width = "initial"
        self.text.layout.width = "520px"
        self.upload = widgets.FileUpload(description="or upload one", multiple=False)
        self.upload.layout.width = "auto"
        self.upload.observe(status.guard(self._uploaded), "value")

    @property
    def path(self) -> Path:
        """What the field says.

        Raises:
            TraceError: nothing.
        """
        text = str(self.text.value).strip()
        if not text:
            raise TraceError("no path", expected="the path of a log, or of a folder of logs")
        return Path(text).expanduser()

    def _chosen(self, change: Any) -> None:
        if change["new"]:
            self.text.value = change["new"]
            self._on_choice()

    def _uploaded(self, change: Any) -> None:
        if change["new"]:
            (file,) = change["new"]
            self.text.value = str(keep(file["name"], bytes(file["content"]), self._uploads))
            self._on_choice()


def keep(name: str, content: bytes, folder: Path) -> Path:
    """Write an uploaded file into a folder and return its path.

    A file that is there already is not written again when it is the same, and stays when it is another.

    Raises:
        TraceError: a thousand others have the same name.
    """
    safe = _UNSAFE.sub("-", Path(name.replace("\\", "/")).name).lstrip(".") or "log"
    stem, dot, ending = safe.partition(".")
    for number in range(1, _TRIES):
        target = folder / (safe if number == 1 else f"{stem}-{number}{dot}{ending}")
        if not target.exists():
            with atomic_file(target) as temporary:
                temporary.write_bytes(content)
            return target
        if target.is_file() and target.read_bytes() == content:
            return target
    raise TraceError(f"{_TRIES} files of the name {safe!r}", where=folder, remedy="remove some, or give the log's path")
