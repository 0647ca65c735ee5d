"""Notebook 02 in JupyterLab: Run All, then choose, build and measure by keyboard."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.browser.driver import TIMEOUT_MS, Lab
from tests.browser.looking import NAMELESS, colours, drawn, status

pytestmark = [pytest.mark.browser, pytest.mark.slow]

NOTEBOOK = "notebooks/02_build_proxy.ipynb"


def test_build_proxy(lab: Lab, shots: Path) -> None:
    lab.open(NOTEBOOK)
    lab.run_all()
    assert lab.cell_errors() == []
    lab.scroll_to(lab.cell_with("ProxyPanel("))
    figure = lab.page.locator(".jupyter-widgets .js-plotly-plot")
    expect(figure.locator(".gtitle")).to_contain_text("16 of 32 experts", timeout=TIMEOUT_MS)
    before = drawn(figure)
    lab.page.get_by_role("slider", name="Experts kept per layer").focus()
    for _ in range(8):
        lab.page.keyboard.press("ArrowLeft")
    expect(figure.locator(".gtitle")).to_contain_text("8 of 32 experts", timeout=TIMEOUT_MS)
    after = drawn(figure)
    assert after["kept"] == [8] * 4
    assert after["sizes"][1] < before["sizes"][1]
    expect(lab.page.get_by_role("region", name="Predicted size")).to_contain_text("31%")
    assert colours(figure) > 200
    lab.page.wait_for_timeout(700)
    lab.page.screenshot(path=shots / "build.png")

    # A button is pressed with the space bar; the second one is the next but one stop of the tab key.
    lab.page.get_by_role("button", name="Build this proxy", exact=True).focus()
    lab.page.keyboard.press("Space")
    expect(lab.page.get_by_role("region", name="Fidelity of qwen3-moe-tiny-cluster-8")).to_be_visible(
        timeout=TIMEOUT_MS
    )
    expect(status(lab, "reloads equal")).to_be_visible()
    lab.page.get_by_role("button", name="Check stability", exact=True).focus()
    lab.page.keyboard.press("Space")
    expect(lab.page.get_by_role("region", name="Stability of cluster, 8 experts")).to_be_visible(timeout=TIMEOUT_MS)
    lab.page.get_by_role("region", name="Stability of cluster").scroll_into_view_if_needed()
    lab.page.wait_for_timeout(700)
    lab.page.screenshot(path=shots / "build-measured.png")
    assert NAMELESS.findall(lab.page.locator(".jp-OutputArea-output").nth(1).aria_snapshot()) == []
    for source, name in {"figures.fidelity": "build-fidelity", "figures.stability": "build-stability"}.items():
        lab.scroll_to(lab.cell_with(source))
        lab.page.wait_for_timeout(700)
        lab.page.screenshot(path=shots / f"{name}.png")
    assert lab.problems == []
    assert lab.foreign == []
