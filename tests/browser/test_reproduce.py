"""Notebook 03 in JupyterLab: Run All, another fault by keyboard, then a live run that is started and stopped."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Locator, expect

from tests.browser.driver import TIMEOUT_MS, Lab
from tests.browser.looking import NAMELESS, colours, status

pytestmark = [pytest.mark.browser, pytest.mark.slow]

NOTEBOOK = "notebooks/03_reproduce.ipynb"
# The original's broken line of the first panel: policy loss.
_BROKEN = "plot => Array.from(plot.data[2].y)"
_GROWS = "() => Array.from(document.querySelector('.js-plotly-plot').data[2].y).some(value => Number.isFinite(value))"
_WIDER = "before => document.querySelector('.js-plotly-plot')._fullLayout.width > before"
_WIDTH = "plot => plot._fullLayout.width"


def _shown(lab: Lab, figure: Locator, words: str) -> list[float]:
    expect(figure.locator(".gtitle")).to_contain_text(words, timeout=TIMEOUT_MS)
    lab.page.wait_for_timeout(500)
    return figure.evaluate(_BROKEN)


def test_reproduce(lab: Lab, shots: Path) -> None:
    lab.open(NOTEBOOK)
    lab.run_all()
    assert lab.cell_errors() == []
    lab.scroll_to(lab.cell_with("FaultPanel("))
    figure = lab.page.locator(".jupyter-widgets .js-plotly-plot")
    loud = _shown(lab, figure, "rollout_logp_precision, strength 1")
    assert len(loud) >= 60, "three seeds of different onsets, laid over each other by the onset"
    lab.page.screenshot(path=shots / "reproduce.png")

    # By keyboard: another family, one of its faults, then another strength.
    lab.page.get_by_role("combobox", name="Family").select_option("OD: Optimisation")
    lab.page.get_by_role("combobox", name="Fault", exact=True).select_option("update_freeze: Actor update omission")
    frozen = _shown(lab, figure, "update_freeze, strength 1")
    assert frozen != loud
    expect(figure.get_by_text("update norm (should fall)")).to_be_visible()
    expect(status(lab, "Verdict")).to_contain_text("cluster-16", timeout=TIMEOUT_MS)
    expect(lab.page.get_by_role("region", name="Does the proxy show the same failure?")).to_contain_text("random-16")
    strength = lab.page.get_by_role("slider", name="Strength in %")
    strength.focus()
    for _ in range(10):
        lab.page.keyboard.press("ArrowLeft")
    _shown(lab, figure, "update_freeze, strength 0.5")
    lab.page.keyboard.press("ArrowLeft")
    expect(status(lab, "update_freeze is recorded at strength 0.5 and 1")).to_be_visible(timeout=TIMEOUT_MS)

    # The figure is as wide as its cell, whatever the side bar does.
    wide = figure.evaluate(_WIDTH)
    lab.command("application:toggle-left-area")
    lab.page.wait_for_function(
        "before => document.querySelector('.js-plotly-plot')._fullLayout.width > before", arg=wide
    )

    # A live run: short, of one seed, seen growing, then stopped.
    for name, value in (("Seeds", "0"), ("Steps of a live run", "40")):
        box = lab.page.get_by_role("textbox" if name == "Seeds" else "spinbutton", name=name)
        box.fill(value)
        box.press("Tab")
    expect(figure.locator(".gtitle")).to_contain_text("seed 0", timeout=TIMEOUT_MS)
    run = lab.page.get_by_role("button", name="Run live", exact=True)
    run.focus()
    lab.page.keyboard.press("Space")
    expect(run).to_be_disabled()
    expect(status(lab, "steps, ").first).to_be_visible(timeout=TIMEOUT_MS)
    expect(status(lab, "1 not finished").first).to_be_visible(timeout=TIMEOUT_MS)
    assert lab.execute("print(panel.job.state)") == "running", "the kernel answers while runs are trained"
    lab.page.wait_for_function(_GROWS, timeout=TIMEOUT_MS)
    assert sum(value is not None for value in figure.evaluate(_BROKEN)) <= 40
    lab.page.screenshot(path=shots / "reproduce-live.png")
    lab.page.get_by_role("button", name="Stop", exact=True).click()
    expect(status(lab, "stopped. Finished runs, and the steps of the others")).to_be_visible(timeout=TIMEOUT_MS)
    expect(run).to_be_enabled()
    assert lab.execute("import pathlib; print(len(list(pathlib.Path(out).glob('*.partial'))) > 0)") == "True"

    assert colours(figure) > 200
    lab.page.get_by_role("region", name="Means from the onset on").scroll_into_view_if_needed()
    lab.page.wait_for_timeout(700)
    lab.page.screenshot(path=shots / "reproduce-stopped.png")
    assert NAMELESS.findall(lab.page.locator(".jp-OutputArea-output").first.aria_snapshot()) == []
    assert lab.problems == []
    assert lab.foreign == []
