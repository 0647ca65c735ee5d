"""Chromium and a JupyterLab server for the browser tests."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, sync_playwright

from tests.browser.driver import Lab
from tests.browser.server import LabServer, lab_server
from tests.notebooks.running import ROOT, copy_of

SHOTS = ROOT / "out" / "browser"
_NAMES = ("chromium", "chromium-browser", "google-chrome")
# Chromium refuses its sandbox as root, and WebGL needs a software renderer where there is no GPU.
_ARGUMENTS = ["--disable-dev-shm-usage", "--use-angle=swiftshader", "--enable-unsafe-swiftshader"]


def _chromium() -> str | None:
    named = os.environ.get("CHROMIUM")
    return named or next(filter(None, map(shutil.which, _NAMES)), None)


@pytest.fixture(scope="session")
def chromium() -> str:
    """Path of a Chromium; without one the test is skipped, in CI it fails."""
    found = _chromium()
    if found is None:
        reason = "no chromium found: apt-get install chromium, or set CHROMIUM to its path"
        if os.environ.get("CI"):
            pytest.fail(f"{reason} (browser tests may not skip in CI)")
        pytest.skip(reason)
    return found


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Browser]:
    """One browser a file; playwright keeps an event loop running that tests elsewhere must not meet.

    No reader acts faster than ten times a second, and JupyterLab keeps no order between what two widgets say at once.
    """
    sandbox = [] if os.geteuid() else ["--no-sandbox"]
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=chromium, args=[*_ARGUMENTS, *sandbox], slow_mo=100)
        yield launched
        launched.close()


@pytest.fixture(scope="session")
def server(chromium: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LabServer]:
    """A server on a copy of the notebooks: JupyterLab saves into what it opens."""
    root, home = tmp_path_factory.mktemp("root"), tmp_path_factory.mktemp("home")
    copy_of(ROOT / "notebooks", root)
    with lab_server(root, home) as running:
        yield running


@pytest.fixture(scope="session")
def shots() -> Path:
    """Folder that screenshots go to."""
    SHOTS.mkdir(parents=True, exist_ok=True)
    return SHOTS


@pytest.fixture
def lab(server: LabServer, browser: Browser, shots: Path, request: pytest.FixtureRequest) -> Iterator[Lab]:
    """A fresh page, 1400 pixels wide; a picture of its end is kept under out/browser."""
    context = browser.new_context(viewport={"width": 1400, "height": 1300})
    page = context.new_page()
    yield Lab(page, server)
    page.screenshot(path=shots / f"{request.node.name}.png")
    context.close()
    server.stop_kernels()
