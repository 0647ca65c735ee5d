"""Notebook 06 in JupyterLab: Run All, then more ranks, a skew and bad input by keyboard."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from playwright.sync_api import Locator, expect

from tests.browser.driver import TIMEOUT_MS, Lab
from tests.browser.looking import NAMELESS, colours, status

pytestmark = [pytest.mark.browser, pytest.mark.slow]

NOTEBOOK = "notebooks/06_scale.ipynb"
SHORT = "notebooks/06_short.ipynb"
KEPT = 32
"""Experts of the proxy; 48 by default."""
# Bars of the original's and the proxy's ranks, as plotly.js holds them, and how many courses have points.
_PEAKS = """plot => {
  const bars = plot.data.filter(trace => trace.type === "bar").map(trace => Array.from(trace.x));
  return bars[0].map((_, rank) => bars.reduce((sum, bar) => sum + bar[rank], 0));
}"""
_PLOT = 'document.querySelector(".jupyter-widgets .js-plotly-plot")'
_COURSES = "plot => plot.data.slice(6, 10).filter(trace => trace.x.length > 100).length"


def shorten(root: Path) -> None:
    """Write a copy that emulates one layer, not four: the notebook's own numbers are checked without a browser.

    With another proxy than by default its last cell does not compare numbers, which are of four layers.
    """
    notebook = nbformat.read(root / NOTEBOOK, as_version=4)
    cell = next(cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", []))
    cell.source += f"\nn_keep = {KEPT}\nimport moeproxy.view.apps.scale as code\ncode.SLICE = 1"
    nbformat.write(notebook, root / SHORT)


def narrowed(lab: Lab, figure: Locator, shots: Path, width: int) -> None:
    """Look at the panel in a window of another width: nothing may stand out of its cell."""
    lab.page.set_viewport_size({"width": width, "height": 1300})
    lab.scroll_to(lab.cell_with("ScalePanel("))
    lab.page.wait_for_timeout(700)
    lab.page.screenshot(path=shots / f"scale-{width}.png")
    lab.page.get_by_role("region", name="Fewest H100").scroll_into_view_if_needed()
    lab.page.wait_for_timeout(300)
    lab.page.screenshot(path=shots / f"scale-{width}-tables.png")
    panel = lab.page.locator(".jp-OutputArea-output").filter(has=figure).first
    assert panel.evaluate("cell => cell.scrollWidth - cell.clientWidth") <= 1, width


def test_scale(lab: Lab, shots: Path) -> None:
    shorten(lab.server.root)
    lab.open(SHORT)
    lab.run_all()
    assert lab.cell_errors() == []
    lab.scroll_to(lab.cell_with("ScalePanel("))
    figure = lab.page.locator(".jupyter-widgets .js-plotly-plot")
    expect(figure.get_by_text("Memory over the step, the first 1 of 48 layers, emulated")).to_be_visible(
        timeout=TIMEOUT_MS
    )
    assert figure.evaluate(_COURSES) == 2
    assert colours(figure) > 100
    lab.page.wait_for_timeout(700)
    lab.page.screenshot(path=shots / "scale-padded.png")
    before = figure.evaluate(_PEAKS)

    # By keyboard: each arrow key doubles the expert-parallel ranks, and the padding goes away.
    lab.page.get_by_role("slider", name="Expert-parallel ranks", exact=True).focus()
    for _ in range(4):
        lab.page.keyboard.press("ArrowRight")
    expect(lab.page.get_by_role("spinbutton", name="Expert-parallel ranks =")).to_have_value("16")
    lab.page.wait_for_function(f"limit => Math.max(...({_PEAKS})({_PLOT})) < limit", arg=0.7 * max(before))
    lab.page.get_by_role("combobox", name="Routing").select_option(index=1)
    expect(lab.page.get_by_role("region", name="Emulated: the first 1 of 48 layers")).to_contain_text(
        f"proxy-{KEPT}, rank 15 (hottest)", timeout=TIMEOUT_MS
    )
    expect(figure.get_by_text("the first 1 of 48 layers, emulated").first).to_be_visible()
    assert figure.evaluate(_COURSES) == 4
    expect(status(lab, "does not fit. Each of these alone would do")).to_contain_text("recompute activations")
    lab.page.wait_for_timeout(700)
    lab.page.screenshot(path=shots / "scale-skewed.png")

    lab.page.get_by_role("spinbutton", name="Expert-parallel ranks =").fill("12")
    lab.page.keyboard.press("Enter")
    expect(status(lab, "does not divide a world of 1024")).to_contain_text("1, 2, 4, 8, 16")
    panel = lab.page.locator(".jp-OutputArea-output").filter(has=figure).first
    assert NAMELESS.findall(panel.aria_snapshot()) == []
    lab.page.get_by_role("region", name="Fewest H100").scroll_into_view_if_needed()
    lab.page.wait_for_timeout(700)
    lab.page.screenshot(path=shots / "scale-planner.png")

    alone = lab.page.get_by_role("region", name="Ranks of 2 run alone, 10 steps")
    alone.scroll_into_view_if_needed()
    expect(alone).to_contain_text("bitwise equal")
    expect(alone).not_to_contain_text("DIFFERENT")
    lab.page.get_by_role("combobox", name="Rank to run alone").select_option("1")
    lab.page.get_by_role("button", name="Record two ranks, run one alone").click()
    expect(status(lab, "Rank 1 ran alone.")).to_be_visible(timeout=TIMEOUT_MS)
    expect(alone.get_by_role("row")).to_have_count(3)
    lab.page.wait_for_timeout(700)
    lab.page.screenshot(path=shots / "scale-replay.png")
    for width in (1280, 800):
        narrowed(lab, figure, shots, width)
    assert lab.problems == []
    assert lab.foreign == []
