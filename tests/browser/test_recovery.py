"""Notebook 07 in JupyterLab: Run All, a kill by its button meanwhile, and a kernel that ends takes all with it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from playwright.sync_api import expect

from moeproxy.recovery import read_events
from tests.browser.driver import TIMEOUT_MS, Lab
from tests.browser.looking import NAMELESS, colours, status

pytestmark = [pytest.mark.browser, pytest.mark.kill]

NOTEBOOK = "notebooks/07_recovery.ipynb"
WIDTHS = (1400, 1200, 800)
_RUN_ALL = "() => { window.ran = window.jupyterapp.commands.execute('notebook:run-all-cells'); }"
# Points of the curve, and for each part of an outage whose bars there are, as plotly.js holds them.
_POINTS = "plot => plot.data[0].x.length"
_AWAY = "plot => plot.data.filter(t => ['detect', 'restart', 'reconnect'].includes(t.name)).map(t => Array.from(t.y))"
_PLOT = 'document.querySelector(".jupyter-widgets .js-plotly-plot")'


def test_recovery(lab: Lab, shots: Path) -> None:
    pytest.importorskip("ray", reason="needs the extra: pip install 'moeproxy[recovery]'")
    lab.open(NOTEBOOK)
    lab.page.evaluate(_RUN_ALL)  # not awaited: the reader acts while the cells run
    lab.scroll_to(lab.cell_with("RecoveryPanel("))
    figure = lab.page.locator(".jupyter-widgets .js-plotly-plot")
    expect(status(lab, "Step 1")).to_be_visible(timeout=TIMEOUT_MS)  # also 10 to 19, on a machine that is quick
    lab.page.screenshot(path=shots / "recovery-running.png")
    button = lab.page.get_by_role("button", name="Kill rollout-1")
    expect(button).to_be_enabled(timeout=TIMEOUT_MS)
    button.click()
    # Its states follow one another too fast to be caught; its bar stays.
    lab.page.wait_for_function(f"() => ({_AWAY})({_PLOT})[0].includes('rollout-1')", timeout=TIMEOUT_MS)
    lab.page.screenshot(path=shots / "recovery-killed.png")
    expect(status(lab, "The job has ended: finished")).to_be_visible(timeout=TIMEOUT_MS)
    lab.page.evaluate("() => window.ran")
    assert lab.cell_errors() == []
    assert figure.evaluate(_POINTS) == 60  # no step is missing from the curve, and none there twice
    detect, restart, reconnect = figure.evaluate(_AWAY)
    assert {"trainer", "rollout-1"} <= set(detect)
    assert detect == restart == reconnect
    meters = lab.page.get_by_role("table", name="Effective training time", exact=True).get_by_role("meter")
    measured, _, everything = (float(meter.get_attribute("value") or "nan") for meter in meters.all())
    assert 0 < everything < measured < 1
    board = lab.page.get_by_role("table", name="Members of the job")
    assert [row.inner_text().split()[-1] for row in board.get_by_role("row").all()[1:5]] == ["1", "0", "1", "0"]
    for width in WIDTHS:
        lab.page.set_viewport_size({"width": width, "height": 1300})
        lab.scroll_to(lab.cell_with("RecoveryPanel("))
        lab.page.wait_for_timeout(900)
        lab.page.screenshot(path=shots / f"recovery-{width}.png")
        assert colours(figure) > 50
        lab.scroll_to(lab.cell_with("panel.calculator"))
        lab.page.wait_for_timeout(500)
        lab.page.screenshot(path=shots / f"recovery-calculator-{width}.png")
    panel = lab.page.locator(".jp-OutputArea-output").filter(has=figure).first
    assert NAMELESS.findall(panel.aria_snapshot()) == []

    # The slider by keyboard; then another job, and a kernel that is shut down while it runs.
    table = lab.page.get_by_role("table", name="Expected effective training time")
    before = table.inner_text()
    lab.page.get_by_role("slider", name="trainer faults a step").focus()
    for _ in range(5):
        lab.page.keyboard.press("ArrowRight")
    expect(table).not_to_have_text(before)
    lab.execute("panel.begin()")
    assert lab.execute("print(panel.wait_for(1))") == "True"
    folder = Path(lab.execute("print(panel.job.folder)"))
    started = {int(event.info["pid"]) for event in read_events(folder) if event.event == "start"}
    assert len(started) >= 4
    lab.server.stop_kernels()
    deadline = time.monotonic() + 30
    while (left := {pid for pid in started if _up(pid)}) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left
    assert lab.problems == []
    assert lab.foreign == []


def _up(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (OSError, IndexError):
        return False
