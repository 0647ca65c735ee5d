"""The proxy panel in JupyterLab, used by keyboard: what it draws, says, builds and remembers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest
from playwright.sync_api import expect

import moeproxy
from moeproxy.proxy.cluster import METHODS
from tests import tiny
from tests.browser.driver import TIMEOUT_MS, Lab
from tests.browser.looking import NAMELESS, colours, drawn, status
from tests.browser.server import LabServer

pytestmark = [pytest.mark.browser, pytest.mark.slow]

CELL = """from moeproxy import ExpertProfile
from moeproxy.view.apps.proxy import ProxyPanel
panel = ProxyPanel("model", ExpertProfile.load("profile.npz"), out="proxies", n_keep=16)
panel"""
NOTEBOOK = "panel/panel.ipynb"


@pytest.fixture(scope="module")
def notebook(server: LabServer) -> str:
    folder = server.root / "panel"
    folder.mkdir()
    checkpoint = _thirty_two_experts(folder / "model")
    moeproxy.profile(checkpoint, tiny.TEXTS * 8).save(folder / "profile.npz")
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
    cell = nbformat.v4.new_code_cell(CELL)
    nbformat.write(nbformat.v4.new_notebook(cells=[cell], metadata=kernel), folder / "panel.ipynb")
    return NOTEBOOK


def _thirty_two_experts(path: Path) -> Path:
    changes = {"num_experts": 32, "num_experts_per_tok": 4, "num_hidden_layers": 4}
    return tiny.save(tiny.qwen3_moe(**changes), path)


def _press(lab: Lab, key: str, times: int) -> None:
    for _ in range(times):
        lab.page.keyboard.press(key)


def _expect_drawn(lab: Lab, kept: int) -> dict[str, Any]:
    expect(lab.page.locator(".gtitle")).to_contain_text(f"{kept} of 32 experts per layer", timeout=20_000)
    found = drawn(lab.page.locator(".js-plotly-plot"))
    assert found["kept"] == [kept] * 4
    return found


def test_panel_by_keyboard(lab: Lab, notebook: str, shots: Path) -> None:
    lab.open(notebook)
    lab.run_all()
    assert lab.cell_errors() == []
    figure = lab.page.locator(".js-plotly-plot")
    expect(figure.locator(".main-svg").first).to_be_visible(timeout=TIMEOUT_MS)
    before = _expect_drawn(lab, 16)

    # The slider, by its name and the arrow keys: a new clustering, so new data and not only a new title.
    lab.page.get_by_role("slider", name="Experts kept per layer").focus()
    _press(lab, "ArrowLeft", 6)
    after = _expect_drawn(lab, 10)
    assert after["sizes"][0] == pytest.approx(before["sizes"][0])
    assert after["sizes"][1] < before["sizes"][1]
    assert lab.execute("print(panel.plan.n_keep)") == "10"

    # The same by typing, and the other two controls by their names.
    box = lab.page.get_by_role("spinbutton", name="or type a count")
    box.fill("8")
    box.press("Tab")
    _expect_drawn(lab, 8)
    lab.page.get_by_role("combobox", name="Layer shown below").select_option("2")
    expect(status(lab, "Layer 2 keeps experts")).to_be_visible()
    lab.page.get_by_role("combobox", name="Method").select_option(label=f"first: {METHODS['first']}")
    expect(lab.page.locator(".gtitle")).to_contain_text("method first")

    assert colours(figure) > 200
    lab.page.screenshot(path=shots / "panel.png")
    assert NAMELESS.findall(lab.page.locator(".jp-OutputArea-output").first.aria_snapshot()) == []
    assert lab.problems == []
    assert lab.foreign == []


def test_panel_builds_shows_errors_and_survives_a_reload(lab: Lab, notebook: str, shots: Path) -> None:
    lab.open(notebook)
    lab.run_all()
    slider = lab.page.get_by_role("slider", name="Experts kept per layer")
    slider.focus()
    _press(lab, "Home", 1)
    _expect_drawn(lab, 4)

    build = lab.page.get_by_role("button", name="Build this proxy", exact=True)
    build.click()
    expect(status(lab, "reloads equal")).to_be_visible(timeout=TIMEOUT_MS)
    assert lab.execute("print(panel.proxy.path.name, panel.job.state)") == "model-cluster-4 done"
    expect(build).to_be_enabled()
    build.click()
    expect(status(lab, "exists already")).to_be_visible()
    lab.page.screenshot(path=shots / "panel-error.png")

    # A page that attaches later is given the widgets' state as of now, not as of their making.
    lab.reload(notebook)
    figure = lab.page.locator(".js-plotly-plot")
    expect(figure.locator(".main-svg").first).to_be_visible(timeout=TIMEOUT_MS)
    _expect_drawn(lab, 4)
    assert colours(figure) > 200
    expect(slider).to_have_value("0")
    expect(status(lab, "exists already")).to_be_visible()
    slider.focus()
    _press(lab, "End", 1)
    _expect_drawn(lab, 32)
    assert lab.problems == []
    assert lab.foreign == []
