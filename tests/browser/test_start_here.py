"""Notebook 00 in JupyterLab: Run All, then a reader's hand on the slider."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.browser.driver import TIMEOUT_MS, Lab
from tests.browser.looking import colours, drawn, status

pytestmark = [pytest.mark.browser, pytest.mark.slow]

NOTEBOOK = "notebooks/00_start_here.ipynb"
# A source that only the cell has, and what its picture is called.
PICTURES = {
    "expert_load": "start-load",
    "ProxyPanel(": "start-panel",
    "figures.overlay": "start-overlay",
    "figures.agreement": "start-agreement",
    "comparison = next": "start-verdict",
    "response_heatmap": "start-response",
}


def test_start_here(lab: Lab, shots: Path) -> None:
    lab.open(NOTEBOOK)
    lab.run_all(timeout_ms=500_000)
    assert lab.cell_errors() == []

    lab.scroll_to(lab.cell_with("ProxyPanel("))
    figure = lab.page.locator(".jupyter-widgets .js-plotly-plot")
    expect(figure.locator(".main-svg").first).to_be_visible(timeout=TIMEOUT_MS)
    # The frame is there before the data: the title is drawn last.
    expect(figure.locator(".gtitle")).to_contain_text("16 of 32 experts", timeout=TIMEOUT_MS)
    before = drawn(figure)
    assert before["kept"] == [16] * 4
    lab.page.get_by_role("slider", name="Experts kept per layer").focus()
    for _ in range(4):
        lab.page.keyboard.press("ArrowLeft")
    expect(figure.locator(".gtitle")).to_contain_text("12 of 32 experts", timeout=20_000)
    after = drawn(figure)
    assert after["kept"] == [12] * 4
    assert after["sizes"][1] < before["sizes"][1]
    expect(status(lab, "Layer 0 keeps experts")).to_be_visible()
    assert colours(figure) > 200

    for source, name in PICTURES.items():
        lab.scroll_to(lab.cell_with(source))
        lab.page.wait_for_timeout(700)  # let the scroll and the drawing settle, for a sharp picture
        lab.page.screenshot(path=shots / f"{name}.png")
    assert lab.problems == []
    assert lab.foreign == []
