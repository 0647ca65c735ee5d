"""The images of a report: every figure in print size, as SVG, PDF and PNG; or why there are none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from moeproxy.view.document import Document, Figure
from moeproxy.view.image_browser import DPI, ImageBrowser, NoImages
from moeproxy.view.print_layout import COLUMNS, LEAST_PT, Column, sheet
from moeproxy.view.svg_fonts import EMBEDDED, family

FOLDER = "figures"
"""Folder of the images, beside the page."""

FORMATS = ("svg", "pdf", "png")
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Image:
    """One image of a figure: path beside the page, format, and size on paper."""

    path: str
    format: str
    column: Column
    height_mm: float


@dataclass(frozen=True, eq=False)
class Images:
    """The images of a report.

    Args:
        of: images of every figure, by its number.
        files: content by path.
        words: what was made and how, or why nothing was.
    """

    of: Mapping[int, tuple[Image, ...]] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)
    words: str = ""


def figures_of(document: Document) -> list[Figure]:
    """Return the figures of a report in order; their numbers begin with 1."""
    return [block for section in document.sections for block in section.blocks if isinstance(block, Figure)]


def make_images(document: Document, progress: Progress | None = None) -> Images:
    """Return every figure of a report as SVG, PDF and PNG, single and double column.

    Without kaleido or a browser there are none, and the words say how to get them: an image that cannot be made must
    not cost the report.

    Args:
        document: the report.
        progress: called with (done, total) after every image.
    """
    figures = figures_of(document)
    try:
        with ImageBrowser() as browser:
            return _drawn(figures, browser, progress)
    except NoImages as error:
        return Images(words=f"No images were made: {error.found}. To get them: {error.remedy}, then write again.")


def _drawn(figures: list[Figure], browser: ImageBrowser, progress: Progress | None) -> Images:
    of: dict[int, tuple[Image, ...]] = {}
    files: dict[str, bytes] = {}
    for number, block in enumerate(figures, 1):
        for place, column in enumerate(COLUMNS, 1):
            made = sheet(block.figure, column, family())
            if made is not None:
                names = [f"{FOLDER}/figure-{number}-{column.name}.{ending}" for ending in FORMATS]
                files |= dict(zip(names, browser.draw(made), strict=True))
                found = [Image(n, e, column, made.height_mm) for n, e in zip(names, FORMATS, strict=True)]
                of[number] = (*of.get(number, ()), *found)
            if progress is not None:
                progress((number - 1) * len(COLUMNS) + place, len(figures) * len(COLUMNS))
    sizes = " and ".join(f"{column.mm:g} mm ({column.name} column)" for column in COLUMNS)
    words = (
        f"Every figure is beside this page for print: {sizes} wide, SVG, PDF and PNG ({DPI} dots an inch), type of "
        f"{LEAST_PT:g} points at least; one whose type would be smaller is made for a double column only. "
        f"{_font_words(browser.fonts)}"
    )
    return Images(of, files, words)


def _font_words(fonts: Iterable[str]) -> str:
    """Say where the fonts are, from what became of those of each SVG."""
    lacking = [said for said in fonts if not said.endswith(EMBEDDED)]
    if lacking:
        return (
            f"Fonts are in the PDF; in the SVG they are {', or '.join(lacking)}. There a program takes what it has of "
            f"{family()}."
        )
    return (
        f"Fonts are in the PDF, and in the SVG as a subset for browsers ({family()}); "
        "Inkscape and Illustrator take the installed one."
    )
