"""Notebook 07 in JupyterLab: Run All, a kill by its button, and a kernel that ends takes all with it."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import expect

from moeproxy.recovery import read_events
from tests.browser.driver import TIMEOUT_MS, Lab
from tests.browser.looking import NAMELESS, colours
from tests.recovery.processes import gone, running

pytestmark = [pytest.mark.browser, pytest.mark.job, pytest.mark.kill]

NOTEBOOK = "notebooks/07_recovery.ipynb"
BEGIN = """
from moeproxy.view.apps.recovery import RecoveryPanel
panel = RecoveryPanel("../out/recovery", steps=300)
panel.begin()
"""
WIDTHS = (1280, 800)
# Steps of the curve, and for each part of an outage whose bars there are, as plotly.js holds them.
_STEPS = "plot => Array.from(plot.data[0].customdata)"
_AWAY = "plot => plot.data.filter(t => ['detect', 'restart', 'reconnect'].includes(t.name)).map(t => Array.from(t.y))"
_PLOT = 'document.querySelector(".jupyter-widgets .js-plotly-plot")'


def test_recovery(lab: Lab, shots: Path) -> None:
    pytest.importorskip("ray", reason="needs the extra: pip install 'moeproxy[recovery]'")
    lab.open(NOTEBOOK)
    lab.run_all()
    assert lab.cell_errors() == []
    lab.scroll_to(lab.cell_with("RecoveryPanel("))
    figure = lab.page.locator(".jupyter-widgets .js-plotly-plot")
    button = lab.page.get_by_role("button", name="Kill rollout-1")
    expect(button).to_be_enabled(timeout=TIMEOUT_MS)
    button.click()
    # Its states follow one another too fast to be caught; its bar stays, and the curve runs on.
    lab.page.wait_for_function(f"() => ({_AWAY})({_PLOT})[0].includes('rollout-1')", timeout=TIMEOUT_MS)
    steps = len(figure.evaluate(_STEPS))
    lab.page.wait_for_function(f"steps => ({_STEPS})({_PLOT}).length > steps + 3", arg=steps, timeout=TIMEOUT_MS)
    lab.page.screenshot(path=shots / "recovery-running.png")
    lab.page.get_by_role("button", name="Stop").click()
    expect(lab.page.get_by_role("button", name="Start the job")).to_be_enabled(timeout=TIMEOUT_MS)
    drawn = figure.evaluate(_STEPS)
    assert drawn == list(range(1, len(drawn) + 1))  # none is missing from the curve, and none there twice
    detect, restart, reconnect = figure.evaluate(_AWAY)
    assert detect[:2] == ["trainer", "rollout-1"]
    assert detect == restart == reconnect
    meters = lab.page.get_by_role("table", name="Effective training time", exact=True).get_by_role("meter")
    measured, _, everything = (float(meter.get_attribute("value") or "nan") for meter in meters.all())
    assert 0 < everything < measured < 1
    board = lab.page.get_by_role("table", name="Members of the job")
    assert [row.inner_text().split()[-1] for row in board.get_by_role("row").all()[1:5]] == ["1", "0", "1", "0"]
    for width in WIDTHS:
        lab.page.set_viewport_size({"width": width, "height": 1300})
        lab.reload(NOTEBOOK)  # a figure takes the width that it finds
        lab.scroll_to(lab.cell_with("RecoveryPanel("))
        lab.page.wait_for_timeout(900)
        lab.page.screenshot(path=shots / f"recovery-{width}.png")
        assert colours(figure) > 50
        lab.scroll_to(lab.cell_with("panel.calculator"))
        lab.page.wait_for_timeout(500)
        lab.page.screenshot(path=shots / f"recovery-calculator-{width}.png")
    panel = lab.page.locator(".jp-OutputArea-output").filter(has=figure).first
    assert NAMELESS.findall(panel.aria_snapshot()) == []

    table = lab.page.get_by_role("table", name="Expected effective training time")
    before = table.inner_text()
    lab.page.get_by_role("slider", name="trainer faults a step").focus()
    for _ in range(5):
        lab.page.keyboard.press("ArrowRight")
    expect(table).not_to_have_text(before)
    assert lab.problems == []
    assert lab.foreign == []


def test_a_kernel_that_is_shut_down_takes_its_job_with_it(lab: Lab) -> None:
    pytest.importorskip("ray", reason="needs the extra: pip install 'moeproxy[recovery]'")
    lab.open(NOTEBOOK)
    lab.execute(BEGIN)
    assert lab.execute("print(panel.wait_for(1))") == "True"
    folder = Path(lab.execute("print(panel.job.folder)"))
    started = {int(event.info["pid"]) for event in read_events(folder) if event.event == "start"}
    assert len(started) >= 4
    lab.server.stop_kernels()
    assert not gone(lambda: {pid for pid in started if running(pid)}, 30)
