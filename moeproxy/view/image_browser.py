"""One Chromium for all images of a report: plotly draws in it (kaleido), and it prints what was drawn.

Starting it takes seconds, a figure then well under one; so it is started once. It runs in a thread with an event loop
of its own, since a notebook's kernel has one already.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import struct
import tempfile
import threading
import zlib
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from moeproxy.errors import MoeproxyError
from moeproxy.view.print_layout import PX_PER_MM, Sheet
from moeproxy.view.svg_fonts import embed

HOW = "install Chromium or Chrome (Debian: apt-get install chromium) and kaleido (pip install kaleido)"
"""What to do to get images."""

_AGAIN = f"try again; if it goes on, {HOW}, in their newest versions"

DPI = 600
"""Resolution of PNG files: what journals ask for where a figure holds lines."""

_OPEN_S, _DRAW_S = 90.0, 120.0
_MM_PER_INCH = 25.4
_PNG_HEAD = 8 + 12 + 13
"""Bytes of a PNG file up to the end of its first chunk, IHDR: signature, frame of the chunk, content."""

_PAGE = (
    "<!DOCTYPE html><html><head><meta charset='utf-8'><style>*{{margin:0;padding:0}}@page{{margin:0}}"
    "svg{{display:block}}</style></head><body>{svg}</body></html>"
)


class NoImages(MoeproxyError):
    """Images cannot be made on this machine; everything else of a report can."""


class ImageBrowser:
    """A running Chromium that turns figures into SVG, PDF and PNG.

    `fonts` holds what became of the fonts of the SVGs that were drawn, in words, each once.

    Raises:
        NoImages: on entering, when kaleido or a browser is missing or does not start.

    Example:
        >>> with ImageBrowser() as browser:
        ...     svg, pdf, png = browser.draw(sheet(figure, SINGLE, family()))
    """

    def __enter__(self) -> ImageBrowser:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="images", daemon=True)
        self._thread.start()
        self._browser: Any = None
        self._tab: Any = None
        self.fonts: dict[str, None] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="moeproxy-images-", ignore_cleanup_errors=True)
        try:
            self._run(self._open(), _OPEN_S)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        self._end()

    def draw(self, made: Sheet) -> tuple[bytes, bytes, bytes]:
        """Return a figure as SVG, PDF and PNG, all from one drawing.

        Raises:
            NoImages: the browser failed or took too long.
        """
        return self._run(self._draw(made), _DRAW_S)

    def _run(self, work: Coroutine[Any, Any, Any], seconds: float) -> Any:
        task = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return task.result(seconds)
        except NoImages:
            raise
        except TimeoutError as error:
            task.cancel()
            raise NoImages(f"the browser did not answer within {seconds:.0f} s", remedy=_AGAIN) from error
        except Exception as error:
            raise NoImages(f"the browser failed ({type(error).__name__}: {_first(error)})", remedy=_AGAIN) from error

    async def _open(self) -> None:
        try:
            from kaleido import Kaleido
            from kaleido.errors import ChromeNotFoundError
        except ImportError as error:
            raise NoImages("kaleido is not installed", remedy=HOW) from error
        named = os.environ.get("CHROMIUM")
        place: dict[str, Any] = {"path": named} if named else {}
        try:
            self._browser = Kaleido(n=1, mathjax=False, timeout=_DRAW_S, **place)
        except ChromeNotFoundError as error:
            raise NoImages("no Chromium or Chrome was found", remedy=HOW) from error
        await self._browser.open()
        self._tab = await self._browser.create_tab(url="about:blank")
        await self._tab.send_command("Page.enable")

    async def _draw(self, made: Sheet) -> tuple[bytes, bytes, bytes]:
        wanted = {"format": "svg", "width": made.width_px, "height": made.height_px}
        drawn = await self._browser.calc_fig(made.figure.to_plotly_json(), opts=wanted)
        whole, said = embed(drawn.decode())
        self.fonts[said] = None
        svg = in_mm(whole, made)
        page = Path(self._folder.name) / "page.html"
        page.write_text(_PAGE.format(svg=svg), encoding="utf-8")
        loaded = self._tab.subscribe_once("Page.loadEventFired")
        await self._send("Page.navigate", url=page.as_uri())
        await loaded
        await self._send("Runtime.evaluate", expression="document.fonts.ready", awaitPromise=True)
        return svg.encode(), await self._pdf(made), await self._png(made)

    async def _pdf(self, made: Sheet) -> bytes:
        inches = {
            "paperWidth": made.column.mm / _MM_PER_INCH,
            # Half a pixel of room, or rounding would put the last line onto a second page.
            "paperHeight": (made.height_mm + 0.5 / PX_PER_MM) / _MM_PER_INCH,
        }
        none = dict.fromkeys(("marginTop", "marginBottom", "marginLeft", "marginRight"), 0)
        found = await self._send("Page.printToPDF", **inches, **none, printBackground=True, pageRanges="1")
        return base64.b64decode(found["data"])

    async def _png(self, made: Sheet) -> bytes:
        size = {"width": made.column.mm * PX_PER_MM, "height": made.height_mm * PX_PER_MM}
        clip = {"x": 0, "y": 0, **size, "scale": DPI / 96}
        found = await self._send("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        return with_resolution(base64.b64decode(found["data"]), DPI)

    async def _send(self, command: str, **parameters: Any) -> dict[str, Any]:
        answer = await self._tab.send_command(command, params=parameters)
        if "error" in answer:
            raise NoImages(f"the browser refused {command} ({answer['error'].get('message')})", remedy=_AGAIN)
        return answer["result"]

    def _end(self) -> None:
        if self._browser is not None:
            with contextlib.suppress(NoImages):
                self._run(self._browser.close(), _OPEN_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_OPEN_S)
        if not self._thread.is_alive():
            self._loop.close()
        self._folder.cleanup()


def in_mm(svg: str, made: Sheet) -> str:
    """Return an SVG whose size is that of its column on paper; what is drawn in it keeps its own units."""
    head, rest = svg[: svg.index(">")], svg[svg.index(">") :]
    size = f'width="{made.width_px}" height="{made.height_px}"'
    if size not in head:
        raise NoImages("plotly drew an SVG of another size", expected=size)
    return head.replace(size, f'width="{made.column.mm:g}mm" height="{made.height_mm:.2f}mm"', 1) + rest


def with_resolution(png: bytes, dpi: int) -> bytes:
    """Return a PNG file that says how large it is on paper (chunk pHYs; PNG specification, section 11.3.4.3).

    Args:
        png: without such a chunk, as Chromium writes it.
        dpi: dots an inch.
    """
    a_metre = round(dpi / _MM_PER_INCH * 1000)
    content = b"pHYs" + struct.pack(">IIB", a_metre, a_metre, 1)
    chunk = struct.pack(">I", len(content) - 4) + content + struct.pack(">I", zlib.crc32(content))
    return png[:_PNG_HEAD] + chunk + png[_PNG_HEAD:]


def _first(error: BaseException) -> str:
    return str(error).strip().split("\n")[0][:200]
