"""The panel of notebook 08: choose a run that went wrong, say what was done, write the report."""

from __future__ import annotations

import base64
import html
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import ipywidgets as widgets

from moeproxy.errors import MoeproxyError
from moeproxy.places import data_dir
from moeproxy.view.actions import Action
from moeproxy.view.apps.postmortem_actions import ActionTable
from moeproxy.view.apps.postmortem_source import IncidentSource, lines_of
from moeproxy.view.apps.ui import Job, Report, Status
from moeproxy.view.document import Document
from moeproxy.view.gather import Words, gather, load_results
from moeproxy.view.report import check_place, compose, write_document
from moeproxy.view.report_images import figures_of
from moeproxy.view.style import describe

EXAMPLE = "verl_console.log"
"""Log of `data/logs` that is written up when none is given."""

PREVIEWS = 2
"""Figures that are shown in the panel once images of them exist."""

_STYLE = {"description_width": "initial"}


class PostmortemPanel:
    """A run, what its authors did about it, and a button that writes the report.

    Args:
        path: log to begin with, by default a shipped one.
        out: folder of the report; nothing in it that somebody edited is overwritten.
        title, authors, notes: of the report.
        actions: what was done and seen, to begin with.
        results: saved results that belong in it: reproductions, remedies, comparisons, a study, traces.

    Example:
        >>> panel = PostmortemPanel("train.log", out="postmortem")
        >>> panel  # the last expression of a cell shows it
        >>> panel.write()
        PosixPath('postmortem/index.html')
    """

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        out: str | Path = "out/postmortem",
        title: str = "",
        authors: str = "",
        notes: str = "",
        actions: Sequence[Action] = (),
        results: Sequence[str | Path] = (),
    ) -> None:
        self.document: Document | None = None
        self.page: Path | None = None
        self.status = Status("Choose a run, then write the report.")
        first = Path(path) if path is not None else data_dir() / "logs" / EXAMPLE
        self.source = IncidentSource(first, Path(out), self.status)
        self.title = _field(widgets.Text(value=title, placeholder="Postmortem: name of the run"), "Title", "700px")
        self.authors = _field(widgets.Text(value=authors), "Authors", "700px")
        self.notes = _field(widgets.Textarea(value=notes, rows=4), "Notes", "700px")
        self.actions = ActionTable(actions, self.status)
        saved = "\n".join(map(str, results))
        self.results = _field(widgets.Textarea(value=saved, rows=2), "Saved results", "700px")
        self.results.placeholder = "files of reproductions, remedies, comparisons, a study; one a line"
        self.folder = _field(widgets.Text(value=str(out)), "Folder", "520px")
        self.images = widgets.Checkbox(value=True, description="figures for print (SVG, PDF, PNG)", indent=False)
        self.job = Job(self._work, "Write the report", status=self.status, on_done=self._done)
        self.said, self.links, self.pictures = widgets.HTML(), widgets.Output(), widgets.HTML()
        self.widget = self._arrange()

    def write(self, timeout_s: float = 300.0) -> Path:
        """Write the report, as the button does, wait for it, and return the path of the page.

        Raises:
            MoeproxyError: it was not written; the status line says why.
        """
        self.job.start()
        if self.job.join(timeout_s) != "done" or self.page is None:
            raise MoeproxyError(f"no report: {self.status.text}", where=str(self.folder.value))
        return self.page

    def _work(self, report: Report) -> tuple[Document, Path]:
        folder = self._place()
        check_place(folder)
        words = Words(self.title.value, self.authors.value, self._notes(), self.actions.actions)
        report(0.02, "Reading the saved results.")
        more = load_results(Path(line).expanduser() for line in lines_of(self.results.value))
        report(0.05, "Reading and judging the run.")
        document = compose(gather([*self.source.open(), *more], words))
        report(0.3, "Writing the report.")

        def drawn(done: int, total: int) -> None:
            report(0.3 + 0.65 * done / total, f"Drawing: {done} of {total} images.")

        page = write_document(document, folder, images=self.images.value, progress=drawn)
        return document, page

    def _done(self, result: tuple[Document, Path]) -> None:
        self.document, self.page = result
        self.status.say(f"Written: {self.page}")
        self.said.value = _lead(self.document)
        self.links.outputs = ({"output_type": "display_data", "metadata": {}, "data": _links(self.page)},)
        self.pictures.value = _pictures(self.document, self.page.parent)

    def _place(self) -> Path:
        text = str(self.folder.value).strip()
        if not text:
            raise MoeproxyError("no folder", expected="the folder that the report goes to")
        return Path(text).expanduser()

    def _notes(self) -> tuple[str, ...]:
        return tuple(part.strip() for part in str(self.notes.value).split("\n\n") if part.strip())

    def _arrange(self) -> widgets.VBox:
        rows = widgets.Layout(flex_flow="row wrap", align_items="center", grid_gap="2px 20px")
        heading = "<div style='font-weight:600;line-height:1.6'>What you did and saw, in order of time</div>"
        return widgets.VBox(
            [
                self.source.widget,
                self.title,
                self.authors,
                self.notes,
                widgets.HTML(heading),
                self.actions.widget,
                self.results,
                widgets.Box([self.folder, self.images], layout=rows),
                self.job.widget,
                self.status.widget,
                self.said,
                self.links,
                self.pictures,
            ]
        )

    def _repr_mimebundle_(self, **options: Any) -> Any:
        return self.widget._repr_mimebundle_(**options)


def _lead(document: Document) -> str:
    """Return what came out, as a list."""
    items = "".join(f"<li>{html.escape(sentence)}</li>" for sentence in document.lead)
    style = "max-width:950px;line-height:1.4;border-left:3px solid currentColor;padding-left:8px"
    return (
        f"<div style='{style}'><b>{html.escape(document.title)}</b><ul style='margin:2px 0 2px 18px'>{items}</ul></div>"
    )


def _links(page: Path) -> dict[str, str]:
    """Return links relative to the notebook, which JupyterLab opens in tabs of its own."""
    names = {"index.html": "page", "report.md": "Markdown", "report.json": "JSON", "figures": "figures for print"}
    here = [(name, said) for name, said in names.items() if (page.parent / name).exists()]
    links = [f"[{said}]({quote(os.path.relpath(page.parent / name))})" for name, said in here]
    hint = "In JupyterLab press *Trust HTML* to see the page's figures, or open the file in a browser."
    return {"text/markdown": f"{' · '.join(links)}. {hint}", "text/plain": str(page)}


def _pictures(document: Document, folder: Path) -> str:
    """Return the first figures as pictures with their text alternatives; "" where there are no images."""
    found = []
    for number, block in enumerate(figures_of(document)[:PREVIEWS], 1):
        path = folder / "figures" / f"figure-{number}-double.svg"
        if path.is_file():
            data = base64.b64encode(path.read_bytes()).decode()
            alt = html.escape(describe(block.figure), quote=True)
            style = "width:100%;max-width:900px;display:block"
            found.append(f"<img alt=\"{alt}\" src='data:image/svg+xml;base64,{data}' style='{style}'>")
            found.append(
                f"<p style='max-width:900px;line-height:1.4'>Figure {number}. {html.escape(block.caption)}</p>"
            )
    return "".join(found)


def _field(made: Any, name: str, width: str) -> Any:
    made.description, made.style = name, _STYLE
    made.layout.width = width
    return made
