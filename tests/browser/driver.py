"""Drive JupyterLab through its own application object.

What the page shows is no sign of readiness: the execution indicator says "idle" before there is a kernel, and
Run All then opens a "Select Kernel" dialog instead of running. And cells outside the window have no elements.
"""

from __future__ import annotations

from typing import Any

from playwright.sync_api import Page

from tests.browser.server import LabServer

TIMEOUT_MS = 180_000

_READY = """async path => {
  const started = Date.now();
  const pause = () => {
    const dialog = document.querySelector(".jp-Dialog");
    if (Date.now() - started > 120000) throw new Error("not ready; dialog: " + (dialog && dialog.innerText));
    return new Promise(done => setTimeout(done, 50));
  };
  const app = window.jupyterapp;
  await app.restored;
  let panel = null;
  while (!panel) {
    const shown = app.shell.currentWidget;
    if (shown && shown.context && shown.context.path === path) panel = shown; else await pause();
  }
  await panel.context.ready;
  for (;;) {
    const session = panel.context.sessionContext.session, kernel = session && session.kernel;
    if (kernel) {
      if (kernel.connectionStatus === "connected" && kernel.status === "idle") return kernel.id;
    }
    await pause();
  }
}"""
_COMMAND = """async ([name, limit]) => {
  const error = new Error(`${name} took over ${limit} ms`);
  const late = new Promise((_, fail) => setTimeout(() => fail(error), limit));
  await Promise.race([window.jupyterapp.commands.execute(name), late]);
}"""
_CELLS = "() => window.jupyterapp.shell.currentWidget.content.model.sharedModel.cells.map(cell => cell.toJSON())"
_EXECUTE = """async code => {
  const kernel = window.jupyterapp.shell.currentWidget.context.sessionContext.session.kernel;
  const future = kernel.requestExecute({ code, store_history: false });
  let out = "";
  future.onIOPub = message => {
    const { header, content } = message;
    if (header.msg_type === "stream") out += content.text;
    if (header.msg_type === "error") out += `error: ${content.ename}: ${content.evalue}`;
  };
  await future.done;
  return out;
}"""
_SCROLL = """index => {
  const notebook = window.jupyterapp.shell.currentWidget.content;
  notebook.activeCellIndex = index;
  return notebook.scrollToItem(index, "start");
}"""


# anywidget gives plotly's 5 MB two seconds to load, which a busy machine does not always keep. The figure is whole all
# the same, since its first message holds everything, and every test looks whether it follows the controls.
_SLOW = "[anywidget] Failed to initialize model."


class Lab:
    """One JupyterLab page with one notebook.

    Attributes:
        problems: uncaught exceptions and console errors of the page, as text.
        foreign: addresses asked of any other host.
    """

    def __init__(self, page: Page, server: LabServer) -> None:
        self.page, self.server = page, server
        self.problems: list[str] = []
        self.foreign: list[str] = []
        page.set_default_timeout(60_000)
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("console", lambda message: self._note(message.type, message.text))
        page.on("request", lambda request: self._check_host(request.url))
        page.on("websocket", lambda socket: self._check_host(socket.url))

    def open(self, path: str) -> None:
        """Open a notebook and wait until its kernel takes work."""
        self.page.goto(self.server.page(path), timeout=TIMEOUT_MS)
        self._wait_until_ready(path)

    def reload(self, path: str) -> None:
        """Save, then load the page anew, whose notebook shows a widget; the kernel goes on living.

        JupyterLab waits four seconds for the kernel to send its widgets and then shows "model not found". On a busy
        machine that is too short now and then, and a reader would reload once more.
        """
        self.command("docmanager:save")
        for _ in range(3):
            self.problems.clear()
            self.page.reload(timeout=TIMEOUT_MS)
            self._wait_until_ready(path)
            lost = self.page.get_by_text("model not found")
            self.page.locator(".jupyter-widgets").or_(lost).first.wait_for(timeout=TIMEOUT_MS)
            if not lost.count():
                return

    def run_all(self, timeout_ms: int = TIMEOUT_MS) -> None:
        """Run all cells and wait for the last."""
        self.command("notebook:run-all-cells", timeout_ms)

    def command(self, name: str, timeout_ms: int = TIMEOUT_MS) -> None:
        """Execute a JupyterLab command and wait for its end."""
        self.page.evaluate(_COMMAND, [name, timeout_ms])

    def cells(self) -> list[dict[str, Any]]:
        """All cells with their outputs, on screen or not."""
        return self.page.evaluate(_CELLS)

    def cell_errors(self) -> list[tuple[int, str, str]]:
        """Index, exception type and message of every cell that failed."""
        return [
            (index, output["ename"], output["evalue"])
            for index, cell in enumerate(self.cells())
            for output in cell.get("outputs", [])
            if output["output_type"] == "error"
        ]

    def execute(self, code: str) -> str:
        """Run code in the kernel without a cell; return what it wrote."""
        return self.page.evaluate(_EXECUTE, code).strip()

    def scroll_to(self, index: int) -> None:
        """Bring a cell to the top of the window."""
        self.page.evaluate(_SCROLL, index)

    def cell_with(self, text: str) -> int:
        """Index of the first code cell whose source holds `text`."""
        sources = [cell["source"] if cell["cell_type"] == "code" else "" for cell in self.cells()]
        return next(index for index, source in enumerate(sources) if text in "".join(source))

    def _wait_until_ready(self, path: str) -> None:
        # A plain predicate: an asynchronous one is a promise, which counts as true at once.
        self.page.wait_for_function("() => Boolean(window.jupyterapp)", timeout=TIMEOUT_MS)
        self.page.evaluate(_READY, path)

    def _note(self, kind: str, text: str) -> None:
        if kind == "error" and text != _SLOW:
            self.problems.append(text)

    def _check_host(self, url: str) -> None:
        own = (self.server.base, self.server.base.replace("http", "ws", 1), "data:", "blob:")
        if not url.startswith(own):
            self.foreign.append(url)
