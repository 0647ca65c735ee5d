"""Notebook 01 in JupyterLab: Run All, then a reader with keyboard and mouse."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from playwright.sync_api import Locator, expect

from tests.browser.driver import TIMEOUT_MS, Lab
from tests.browser.looking import NAMELESS, colours, status

pytestmark = [pytest.mark.browser, pytest.mark.slow]

NOTEBOOK = "notebooks/01_experts.ipynb"
_PLACES = "plot => Array.from(plot.data[3].x).concat(Array.from(plot.data[3].y))"
# Where in the window the expert lies that has most room around it.
_WHERE = """plot => {
  const { xaxis, yaxis } = plot._fullLayout, frame = plot.getBoundingClientRect(), { x, y } = plot.data[3];
  const left = Array.from(x, value => frame.left + xaxis._offset + xaxis.l2p(value));
  const top = Array.from(y, value => frame.top + yaxis._offset + yaxis.l2p(value));
  const room = left.map((_, i) => Math.min(...left.map((_, j) =>
    i === j ? Infinity : Math.hypot(left[i] - left[j], top[i] - top[j]))));
  const best = room.indexOf(Math.max(...room));
  return [left[best], top[best], best];
}"""
_TITLE = "16 of 32 experts kept"


def _box_around_everything(lab: Lab, figure: Locator) -> None:
    area = figure.locator(".nsewdrag").first.bounding_box()
    assert area is not None
    left, top = area["x"] + 3, area["y"] + 3
    lab.page.mouse.move(left, top)
    lab.page.mouse.down()
    lab.page.mouse.move(left + area["width"] / 2, top + area["height"] / 2)
    lab.page.mouse.move(left + area["width"] - 6, top + area["height"] - 6)
    lab.page.mouse.up()


def test_expert_map(lab: Lab, shots: Path) -> None:
    lab.open(NOTEBOOK)
    lab.run_all()
    assert lab.cell_errors() == []
    lab.scroll_to(lab.cell_with("ExpertPanel("))
    figure = lab.page.locator(".jupyter-widgets .js-plotly-plot")
    expect(figure.locator(".main-svg").first).to_be_visible(timeout=TIMEOUT_MS)
    expect(figure.get_by_text(re.compile(f"Layer 0: {_TITLE}"))).to_be_visible(timeout=TIMEOUT_MS)
    lab.page.wait_for_timeout(700)
    lab.page.screenshot(path=shots / "experts.png")

    # By keyboard: another count, another layer, one view alone (its UMAP is stored), then weights without a UMAP.
    lab.page.get_by_role("slider", name="Layer", exact=True).focus()
    lab.page.keyboard.press("ArrowRight")
    expect(figure.get_by_text(f"Layer 1: {_TITLE} (UMAP)")).to_be_visible(timeout=20_000)
    lab.page.get_by_role("slider", name="Weight: expert output").focus()
    lab.page.keyboard.press("ArrowRight")
    expect(figure.get_by_text(f"Layer 1: {_TITLE} (PCA)")).to_be_visible(timeout=20_000)
    lab.page.get_by_role("textbox", name="Select experts").fill("2:0-2, 3:7")
    lab.page.keyboard.press("Tab")
    expect(lab.page.get_by_role("region", name="Experts selected (4)")).to_be_visible(timeout=20_000)

    # By mouse: a click on an expert puts it into the selection, another takes it out.
    x, y, clicked = figure.evaluate(_WHERE)
    for selected in ("True", "False"):
        lab.page.mouse.click(x, y)
        count = 5 if selected == "True" else 4
        expect(lab.page.get_by_role("region", name=f"Experts selected ({count})")).to_be_visible(timeout=20_000)
        assert lab.execute(f"print((1, {clicked}) in panel.selected)") == selected
        lab.page.wait_for_timeout(500)  # a second click at once would be a double click, which selects nothing

    # By mouse: a box over the whole map selects every expert of the layer; a button keeps one for certain.
    before = figure.evaluate(_PLACES)
    _box_around_everything(lab, figure)
    expect(lab.page.get_by_role("region", name="Experts selected (32)")).to_be_visible(timeout=20_000)
    assert lab.execute("print(len(panel.selected), {where for where, _ in panel.selected})") == "32 {1}"
    lab.page.get_by_role("combobox", name="Map shows").select_option("all layers")
    expect(figure.get_by_text(f"All layers: {_TITLE} (PCA)")).to_be_visible(timeout=20_000)
    assert len(figure.evaluate(_PLACES)) == 4 * len(before)
    lab.page.get_by_role("button", name="Always drop", exact=True).click()
    expect(status(lab, "drop_always leaves 0 experts")).to_be_visible()
    lab.page.screenshot(path=shots / "experts-all-layers.png")
    lab.page.get_by_role("button", name="Clear selection", exact=True).click()
    expect(lab.page.get_by_role("region", name="Experts of the layer")).to_be_visible(timeout=20_000)

    job = lab.page.get_by_role("button", name="Compute UMAP", exact=True)
    job.click()
    lab.page.get_by_role("button", name="Cancel", exact=True).click()
    expect(status(lab, "cancelled, nothing was kept")).to_be_visible(timeout=20_000)

    assert colours(figure) > 200
    lab.page.get_by_text("Predicted damage in every layer, as a table").click()
    lab.page.wait_for_timeout(700)
    lab.page.screenshot(path=shots / "experts-end.png")
    assert NAMELESS.findall(lab.page.locator(".jp-OutputArea-output").nth(1).aria_snapshot()) == []
    assert lab.problems == []
    assert lab.foreign == []
