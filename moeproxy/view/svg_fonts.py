"""Fonts of exported figures: which file of this machine they come from, and a part of it put into an SVG.

A PDF holds the letters that it uses, since Chromium puts them there. An SVG holds text, so the font goes beside it as a
data URI in a style sheet: the glyphs that occur, as WOFF. Browsers use it, and so do programs built on one; Inkscape
and Illustrator take the installed font of that name instead (use the PDF there).
"""

from __future__ import annotations

import base64
import html
import io
import re
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

EMBEDDED = "embedded as a subset"
"""End of what is said of fonts that are in the SVG."""

WANTED = ("Arial", "Helvetica", "Liberation Sans", "DejaVu Sans")
"""Families that journals ask for; fontconfig gives the nearest that is installed."""

_TEXT = re.compile(r"<(?:text|tspan)\b[^>]*>([^<]*)")
_BOLD = re.compile(r"font-weight:\s*(?:bold|[6-9]00)|font-weight=\"(?:bold|[6-9]00)\"")
_RESTRICTED = 0x0002  # bit of OS/2.fsType: may not be embedded (OpenType specification, OS/2 table)


@dataclass(frozen=True)
class Face:
    """A font of this machine: family, file, number within the file, and whether it is bold."""

    family: str
    file: Path
    index: int
    bold: bool


@cache
def face(bold: bool = False) -> Face | None:
    """Return the font for figures; None where fontconfig is not there to ask."""
    if shutil.which("fc-match") is None:
        return None
    pattern = f"{','.join(WANTED)}{':bold' if bold else ''}"
    command = ["fc-match", "-f", "%{family[0]}\n%{file}\n%{index}", pattern]
    said = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30).stdout.split("\n")
    if len(said) != 3 or not Path(said[1]).is_file():
        return None
    return Face(said[0], Path(said[1]), int(said[2] or 0), bold)


def family() -> str:
    """Return the font family of exported figures."""
    found = face()
    return found.family if found else f"{', '.join(WANTED)}, sans-serif"


def embed(svg: str) -> tuple[str, str]:
    """Put the fonts of an SVG into it.

    Args:
        svg: with text in the family of `family`.

    Returns:
        the SVG, and what became of its fonts, in words.
    """
    faces = [face(), *([face(bold=True)] if _BOLD.search(svg) else [])]
    letters = {letter for text in _TEXT.findall(svg) for letter in html.unescape(text)}
    rules = []
    for one in faces:
        if one is None:
            return svg, "not embedded: fontconfig is not installed, so the font's file is not known"
        try:
            found = subset(one, letters)
        except ImportError:
            return svg, "not embedded: pip install fonttools"
        if found is None:
            return svg, f"not embedded: the licence bits of {one.family} forbid it"
        rules.append(_rule(one, found))
    style = f"<style>{''.join(rules)}</style>"
    place = svg.index(">", svg.index("<svg")) + 1
    return svg[:place] + style + svg[place:], f"{faces[0].family if faces[0] else ''}, {EMBEDDED}"


def subset(one: Face, letters: set[str]) -> bytes | None:
    """Return the glyphs of these letters as a WOFF font; None where the font's licence bits forbid to embed it.

    Raises:
        ImportError: fontTools is not installed.
    """
    from fontTools.subset import Options, Subsetter
    from fontTools.ttLib import TTFont

    options = Options(hinting=False, notdef_outline=True, name_IDs=[1, 2, 3, 4, 6], drop_tables=["FFTM", "DSIG"])
    with TTFont(one.file, fontNumber=one.index, recalcTimestamp=False) as font:
        rights: Any = font["OS/2"]
        if rights.fsType & 0x000F == _RESTRICTED:
            return None
        cutter = Subsetter(options)
        cutter.populate(unicodes=[ord(letter) for letter in letters | {" "}])
        cutter.subset(font)
        font.flavor = "woff"
        stream = io.BytesIO()
        font.save(stream, reorderTables=None)
    return stream.getvalue()


def _rule(one: Face, content: bytes) -> str:
    data = base64.b64encode(content).decode()
    weight = "bold" if one.bold else "normal"
    name = one.family.replace("\\", "").replace('"', "")
    source = f"url(data:font/woff;base64,{data}) format('woff')"
    return f'@font-face{{font-family:"{name}";font-weight:{weight};src:{source}}}'
