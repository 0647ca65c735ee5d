"""Notebook 08 in JupyterLab: Run All, edit the actions by keyboard, write, open the page that was written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.browser.driver import TIMEOUT_MS, Lab
from tests.browser.looking import NAMELESS, colours, status

pytestmark = [pytest.mark.browser, pytest.mark.slow]

NOTEBOOK = "notebooks/08_postmortem.ipynb"


def test_postmortem(lab: Lab, shots: Path) -> None:
    lab.open(NOTEBOOK)
    lab.run_all()
    assert lab.cell_errors() == []
    lab.scroll_to(lab.cell_with("PostmortemPanel("))
    expect(status(lab, "Written: ")).to_contain_text("postmortem/index.html", timeout=TIMEOUT_MS)
    picture = lab.page.get_by_role("img", name="Timeline of verl_console, steps 1 to 60")
    expect(picture).to_be_visible(timeout=TIMEOUT_MS)
    assert colours(picture) > 50
    lab.page.wait_for_timeout(700)
    lab.page.screenshot(path=shots / "postmortem.png")
    picture.screenshot(path=shots / "postmortem-timeline.png")

    # Another action, by keyboard, and a recorded run instead of the log.
    lab.page.get_by_role("button", name="Add an action").focus()
    lab.page.keyboard.press("Space")
    lab.page.get_by_role("textbox", name="4. step").fill("20")
    lab.page.get_by_role("textbox", name="4. what").fill("<script>alert(1)</script>")
    lab.page.get_by_role("combobox", name="4. kind").select_option("run again")
    lab.page.get_by_role("button", name="Remove 1").click()
    expect(lab.page.get_by_role("textbox", name="3. what")).to_have_value("<script>alert(1)</script>")
    lab.page.get_by_role("combobox", name="Write up").select_option("a recorded run")
    lab.page.get_by_role("combobox", name="Model").select_option("cluster-16")
    lab.page.get_by_role("checkbox", name="figures for print").uncheck()
    lab.page.get_by_role("textbox", name="Folder").fill("../out/recorded")
    lab.page.get_by_role("button", name="Write the report").click()
    expect(status(lab, "Written: ../out/recorded")).to_be_visible(timeout=TIMEOUT_MS)
    lab.page.screenshot(path=shots / "postmortem-recorded.png")

    # The link of the panel leads to the page; the page itself works without the server and runs no script of a note.
    link = lab.page.get_by_role("link", name="page", exact=True).first
    expect(link).to_be_visible()
    assert lab.execute("print((panel.page.parent / 'report.json').is_file())") == "True"
    source, where = lab.execute("print(panel.page.resolve().as_uri(), panel.page.resolve().parent)").split()
    page = lab.page.context.new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("dialog", lambda dialog: pytest.fail(f"a script of a note ran: {dialog.message}"))
    page.goto(source)
    figure = page.locator("#plot-1")
    expect(figure.locator(".main-svg").first).to_be_visible()
    assert colours(figure) > 20
    page.screenshot(path=shots / "postmortem-page.png", full_page=True)
    assert all(url.startswith(("file:", "data:", "blob:")) for url in asked)
    data = json.loads((Path(where) / "report.json").read_text())
    assert [action["text"] for action in data["actions"]][-1] == "<script>alert(1)</script>"
    assert data["incidents"][0]["healthy_runs"] >= 6
    page.close()

    assert NAMELESS.findall(lab.page.locator(".jp-OutputArea-output").first.aria_snapshot()) == []
    assert lab.problems == []
    assert lab.foreign == []
