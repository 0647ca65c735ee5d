"""Notebook 04 in JupyterLab: Run All, zoom by mouse, map columns and follow a growing log by keyboard."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Locator, expect

from tests.browser.driver import TIMEOUT_MS, Lab
from tests.browser.looking import NAMELESS, colours, status

pytestmark = [pytest.mark.browser, pytest.mark.slow]

NOTEBOOK = "notebooks/04_triage.ipynb"
_LONG = """
import json
with open("long.jsonl", "w") as stream:
    for step in range(50_000):
        norm = float("nan") if step == 40_000 else 50.0 if step == 17_777 else 1 + step % 7 / 7
        stream.write(json.dumps({"step": step, "actor/grad_norm": norm}) + "\\n")
"""
_GROW = """
with open("growing.jsonl", "a") as stream:
    for step in range({0}, {0} + 20):
        stream.write(json.dumps({{"step": step, "actor/grad_norm": 1.0 + step}}) + "\\n")
"""
_STEPS = "plot => Array.from(plot.data[8].x).filter(Number.isFinite)"
_NARROWER = """most => {
  const steps = Array.from(document.querySelector(".js-plotly-plot").data[8].x).filter(Number.isFinite);
  return steps.length > 0 && steps[steps.length - 1] - steps[0] < most;
}"""
_MORE = "least => document.querySelector('.js-plotly-plot').data[8].x.length > least"
# The figure is as wide as its cell, also after its height has changed.
_AS_WIDE = """() => {
  const plot = document.querySelector(".js-plotly-plot");
  return Math.abs(plot._fullLayout.width - plot.parentElement.clientWidth) < 20 && plot._fullLayout.width > 800;
}"""
_LAST = "last => Array.from(document.querySelector('.js-plotly-plot').data[8].x).includes(last)"


def _drag(lab: Lab, figure: Locator, start: float, stop: float) -> None:
    """Draw a zoom box over a part of the first panel, from end to end of its height."""
    area = figure.locator(".nsewdrag").first.bounding_box()
    assert area is not None
    middle = area["y"] + area["height"] / 2
    lab.page.mouse.move(area["x"] + start * area["width"], middle)
    lab.page.mouse.down()
    lab.page.mouse.move(area["x"] + (start + stop) / 2 * area["width"], middle + 2)
    lab.page.mouse.move(area["x"] + stop * area["width"], middle + 2)
    lab.page.mouse.up()


def _read(lab: Lab, path: str) -> None:
    lab.page.get_by_role("textbox", name="Log", exact=True).fill(path)
    lab.page.get_by_role("button", name="Read", exact=True).click()


def _reproduces(lab: Lab, figure: Locator, shots: Path) -> None:
    """The failing example is judged in its panel; by keyboard its cause is reproduced, and a live run is stopped."""
    page = lab.page
    page.get_by_role("combobox", name="Lay over it").select_option("nothing")
    page.get_by_role("combobox", name="or an example").select_option("trainer_state.json")
    expect(status(lab, "The run departs from step 15 on: 15 signals")).to_be_visible(timeout=TIMEOUT_MS)
    expect(figure.get_by_text("departs from here on")).to_be_visible(timeout=TIMEOUT_MS)
    expect(page.locator("summary").filter(has_text="1. nan_poison (One NaN gradient")).to_be_visible()
    expect(page.get_by_role("table", name="What departs")).to_contain_text("not finite at 46 steps")
    figure.scroll_into_view_if_needed()
    page.screenshot(path=shots / "logs-onset.png")
    page.get_by_role("textbox", name="Healthy runs").scroll_into_view_if_needed()
    page.screenshot(path=shots / "logs-verdict.png")
    page.get_by_role("button", name="Reproduce on the proxy").press("Enter")
    expect(status(lab, "cluster-16 shows the failure when nan_poison is injected")).to_be_visible(timeout=TIMEOUT_MS)
    page.get_by_role("button", name="Reproduce on the proxy").scroll_into_view_if_needed()
    page.screenshot(path=shots / "logs-reproduced.png")
    page.get_by_role("button", name="Lay the best match over the log").press("Enter")
    expect(figure.get_by_text("cluster-16, nan_poison").first).to_be_visible(timeout=TIMEOUT_MS)
    page.get_by_role("button", name="Run them live").press("Enter")
    expect(status(lab, "Running nan_poison")).to_be_visible(timeout=TIMEOUT_MS)
    assert lab.execute("print(panel.reproduce.live_job.state)") == "running", "the kernel answers meanwhile"
    page.get_by_role("button", name="Stop", exact=True).press("Enter")
    expect(status(lab, "Run them live: stopped.")).to_be_visible(timeout=TIMEOUT_MS)


def test_logs(lab: Lab, shots: Path) -> None:
    lab.open(NOTEBOOK)
    lab.run_all()
    assert lab.cell_errors() == []
    lab.scroll_to(lab.cell_with("LogPanel("))
    figure = lab.page.locator(".jupyter-widgets .js-plotly-plot")
    expect(figure.locator(".gtitle")).to_contain_text("4 signals, steps 1 to 60", timeout=TIMEOUT_MS)
    expect(figure.get_by_text("≠ defined differently in the two runs").first).to_be_visible()
    expect(status(lab, "Defined differently in the two runs")).to_contain_text("micro-batches")
    assert colours(figure) > 100
    lab.page.wait_for_timeout(700)
    lab.page.screenshot(path=shots / "logs.png")
    figure.screenshot(path=shots / "logs-figure.png")

    _reproduces(lab, figure, shots)

    # A long log: few points are sent, a zoom by mouse brings the exact ones, a double click the whole again.
    lab.page.get_by_role("combobox", name="Lay over it").select_option("nothing")
    lab.execute(_LONG)
    _read(lab, "long.jsonl")
    expect(figure.locator(".gtitle")).to_contain_text("steps 0 to 49,999", timeout=TIMEOUT_MS)
    lab.page.wait_for_function(_MORE, arg=1000)
    whole = figure.evaluate(_STEPS)
    assert len(whole) < 2100
    assert 17_777 in whole
    expect(figure.get_by_text("NaN (1)")).to_be_visible()
    lab.page.wait_for_function(_AS_WIDE)
    figure.scroll_into_view_if_needed()
    lab.page.screenshot(path=shots / "logs-long.png")
    _drag(lab, figure, 0.5, 0.53)
    lab.page.wait_for_function(_NARROWER, arg=2500)  # of 50,000 steps 1,500 are asked for, with a margin on each side
    part = figure.evaluate(_STEPS)
    assert len(part) > 20
    assert part == list(range(int(part[0]), int(part[-1]) + 1)), "every step of the part is there"
    low, high = figure.evaluate("plot => plot._fullLayout.xaxis.range")
    assert part[0] <= low < high <= part[-1]
    lab.page.screenshot(path=shots / "logs-zoomed.png")
    area = figure.locator(".nsewdrag").first.bounding_box()
    assert area is not None
    lab.page.wait_for_timeout(500)  # the end of the drag must not count as the first click
    lab.page.mouse.dblclick(area["x"] + area["width"] / 2, area["y"] + area["height"] / 2)
    lab.page.wait_for_function(_MORE, arg=1900)
    assert figure.evaluate(_STEPS) == whole
    low, high = figure.evaluate("plot => plot._fullLayout.xaxis.range")
    assert low <= 0
    assert high >= 49_999

    # A growing log.
    lab.execute(_GROW.format(0))
    _read(lab, "growing.jsonl")
    expect(figure.locator(".gtitle")).to_contain_text("steps 0 to 19", timeout=TIMEOUT_MS)
    follow = lab.page.get_by_role("button", name="Follow", exact=True)
    follow.focus()
    lab.page.keyboard.press("Space")
    expect(status(lab, "Following growing.jsonl: 20 rows")).to_be_visible(timeout=TIMEOUT_MS)
    lab.execute(_GROW.format(20))
    expect(figure.locator(".gtitle")).to_contain_text("steps 0 to 39", timeout=TIMEOUT_MS)
    lab.page.wait_for_function(_LAST, arg=39)
    assert lab.execute("print(panel.following.running)") == "True", "the kernel answers meanwhile"
    follow.click()

    # Unknown names, by keyboard: the lists are prefilled; a log without metrics shows words and no plot.
    lab.page.get_by_role("combobox", name="or an example").select_option("own_columns.csv")
    column = lab.page.get_by_role("combobox", name="gnorm")
    expect(column).to_be_visible(timeout=TIMEOUT_MS)
    expect(figure).to_be_hidden()
    lab.page.get_by_role("combobox", name="kl_to_ref").select_option("kl")
    lab.page.screenshot(path=shots / "logs-mapping.png")
    lab.page.get_by_role("button", name="Apply the mapping").click()
    expect(figure.get_by_text("kl_to_ref")).to_be_visible(timeout=TIMEOUT_MS)
    lab.page.get_by_role("combobox", name="or an example").select_option("crashed_before_step_1.log")
    expect(status(lab, "No metric in this log")).to_contain_text("IndexError", timeout=TIMEOUT_MS)
    expect(figure).to_be_hidden()
    lab.page.screenshot(path=shots / "logs-crashed.png")

    assert NAMELESS.findall(lab.page.locator(".jp-OutputArea-output").first.aria_snapshot()) == []
    assert lab.problems == []
    assert lab.foreign == []
