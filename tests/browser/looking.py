"""What the browser tests look at in a page."""

from __future__ import annotations

import io
import re
from typing import Any

from PIL import Image
from playwright.sync_api import Locator

from tests.browser.driver import Lab

# Controls that a screen reader cannot name, in the text form of the accessibility tree.
NAMELESS = re.compile(r"^\s*- (slider|spinbutton|combobox|button|textbox|progressbar)(?! \")", re.MULTILINE)

# Kept experts per layer as drawn, and the two bars of the size chart, as plotly.js holds them.
_DRAWN = """plot => ({
  kept: Array.from(plot.data[0].z, row => Array.from(row).filter(Number.isFinite).length),
  sizes: Array.from(plot.data[4].x),
})"""


def drawn(figure: Locator) -> dict[str, Any]:
    """The data of the panel's figure, not only its elements."""
    return figure.evaluate(_DRAWN)


def colours(figure: Locator) -> int:
    """Number of distinct colours painted: an empty canvas has a handful, whatever its elements say."""
    picture = Image.open(io.BytesIO(figure.screenshot())).convert("RGB")
    return len(picture.getcolors(maxcolors=1 << 24) or [])


def status(lab: Lab, words: str) -> Locator:
    """The status line that holds these words."""
    return lab.page.get_by_role("status").filter(has_text=words)
