"""One report from result objects: HTML page, Markdown and JSON with the same numbers, and images for print."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from moeproxy.view.document import Document
from moeproxy.view.render_html import render_html
from moeproxy.view.render_text import render_json, render_markdown
from moeproxy.view.report_files import check_folder, unchanged, write_files
from moeproxy.view.report_images import FOLDER, Images, make_images
from moeproxy.view.report_input import ReportInput
from moeproxy.view.sections import compose
from moeproxy.view.style import counted

__all__ = ["ReportInput", "check_place", "compose", "write_document", "write_report"]

PAGE = "index.html"
_NAMES = ("report.json", "report.md", PAGE)


def write_report(result: ReportInput, out: str | Path, *, images: bool = False) -> Path:
    """Write `out/report/index.html`, `report.md` and `report.json`; return the path of the page.

    Each file appears complete or not at all; an older report is replaced, unless somebody has edited it.

    Args:
        result: what to report.
        out: directory for results.
        images: whether every figure is written for print too, where kaleido and a browser are there.

    Raises:
        MoeproxyError: the directory cannot be written, or something there would be lost.

    Example:
        >>> write_report(ReportInput(comparisons=compare_all(traces)), "out")
        PosixPath('out/report/index.html')
    """
    return write_document(compose(result), Path(out) / "report", images=images)


def write_document(
    document: Document,
    folder: str | Path,
    *,
    images: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Write a report into a folder of its own; return the path of the page.

    Args:
        document: of `compose`.
        folder: made if need be; what else lies in it stays.
        images: whether every figure is written for print too (SVG, PDF, PNG in `figures/`), where kaleido and a browser
            are there; without them the page says how to get images. Images of an earlier report are removed where there
            are no new ones, since they show something else; the page says so.
        progress: called with (done, total) after every image.

    Raises:
        MoeproxyError: the folder cannot be written, or a file in it was edited or is not of a report.
    """
    place = Path(folder)
    check_place(place)
    drawn = _without_earlier(make_images(document, progress) if images else Images(), place)
    texts = {
        "report.json": render_json(document, drawn),
        "report.md": render_markdown(document, drawn),
        PAGE: render_html(document, drawn),
    }
    write_files(place, {name: text.encode() for name, text in texts.items()} | dict(drawn.files))
    return place / PAGE


def _without_earlier(drawn: Images, folder: Path) -> Images:
    """Say how many images of an earlier report go though no new ones come: they are of that report's figures."""
    gone = [name for name in unchanged(folder) if name.startswith(f"{FOLDER}/")]
    if drawn.files or not gone:
        return drawn
    said = f"{counted(len(gone), 'image')} of an earlier report, of its figures, removed from this folder."
    return replace(drawn, words=f"{drawn.words} {said}".strip())


def check_place(folder: str | Path) -> None:
    """Raise what `write_document` would because of what lies in the folder, before the work of a report.

    Raises:
        MoeproxyError: it is no folder, or a file in it was edited or is not of a report.
    """
    check_folder(Path(folder), _NAMES)
