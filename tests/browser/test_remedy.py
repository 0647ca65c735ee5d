"""Notebook 05 in JupyterLab: Run All, another failure and remedy by keyboard, then a live trial started and stopped."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.browser.driver import TIMEOUT_MS, Lab
from tests.browser.looking import NAMELESS, colours, status

pytestmark = [pytest.mark.browser, pytest.mark.slow]

NOTEBOOK = "notebooks/05_remedy.ipynb"
_TREATED = "plot => Array.from(plot.data[2].y).filter(Number.isFinite).length"  # of the first panel: reward
_BARS = "plot => Array.from(plot.data[plot.data.length - 1].y)"


def test_remedy(lab: Lab, shots: Path) -> None:
    lab.open(NOTEBOOK)
    lab.run_all()
    assert lab.cell_errors() == []
    lab.scroll_to(lab.cell_with("RemedyPanel("))
    page = lab.page
    figure = page.locator(".jupyter-widgets .js-plotly-plot")
    expect(figure.locator(".gtitle")).to_contain_text("kl_explosion on original", timeout=TIMEOUT_MS)
    page.get_by_role("combobox", name="Model").select_option("cluster-16")
    expect(figure.locator(".gtitle")).to_contain_text("kl_explosion on cluster-16", timeout=TIMEOUT_MS)
    expect(figure.locator(".gtitle")).to_contain_text("without and with lower_rate")
    assert figure.evaluate(_BARS)[:2] == ["none", "lower_rate"]
    assert figure.evaluate(_TREATED) == 60
    assert colours(figure) > 100
    page.wait_for_timeout(700)
    page.screenshot(path=shots / "remedy.png")
    figure.screenshot(path=shots / "remedy-figure.png")

    # By keyboard: another failure, and a remedy that was rolled back.
    failure = page.get_by_role("combobox", name="Failure")
    option = failure.locator("option", has_text="tool_call_error:").inner_text()
    failure.select_option(option)
    expect(figure.locator(".gtitle")).to_contain_text("tool_call_error on cluster-16", timeout=TIMEOUT_MS)
    expect(page.get_by_text("Likely causes:")).to_be_visible(timeout=TIMEOUT_MS)
    page.get_by_role("combobox", name="Show").select_option("retry_calls (rolled back, no better)")
    expect(figure.locator(".gtitle")).to_contain_text("with retry_calls", timeout=TIMEOUT_MS)
    expect(page.get_by_role("region", name="What was tried against tool_call_error")).to_contain_text("local_tool")
    page.get_by_text("Candidate remedies for tool_call_error").first.click()
    page.screenshot(path=shots / "remedy-rolled-back.png")
    page.get_by_role("button", name="Try live").scroll_into_view_if_needed()
    page.screenshot(path=shots / "remedy-table.png")

    # A live trial of one remedy: the kernel answers meanwhile, and Stop ends it.
    page.get_by_role("listbox", name="Try these").select_option("local tool")
    page.get_by_role("button", name="Try live").press("Enter")
    expect(status(lab, "Preparing the runs of tool_call_error on cluster-16")).to_be_visible(timeout=TIMEOUT_MS)
    assert lab.execute("print(panel.job.state)") == "running"
    page.get_by_role("button", name="Stop", exact=True).press("Enter")
    expect(status(lab, "Try live: stopped.")).to_be_visible(timeout=TIMEOUT_MS)
    assert lab.execute("print(panel.job.state)") == "cancelled"

    assert NAMELESS.findall(page.locator(".jp-OutputArea-output").first.aria_snapshot()) == []
    assert lab.problems == []
    assert lab.foreign == []
