"""Measure a down-sampled figure of a log against one that holds every point: bytes sent, and time from zoom to redraw.

    python benchmarks/plots.py [--points 1000000] [--zooms 7]

Both figures show the same two signals, and both sides alternate in one run. Sizes are those of the messages as a
kernel packs them. The time from a zoom to the redraw is, for the down-sampled figure, the choice of points, the packing
of the message (without the short wait that lets a burst of zooms settle) and the drawing in a browser; for the full
figure it is the drawing alone, as nothing is sent. Without Chromium the drawing is left out and only the kernel's part
is shown. Machines are noisy: read the ratios. No test depends on these numbers.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from ipywidgets.widgets.widget import _remove_buffers
from jupyter_client.session import json_packer
from plotly.io import to_json
from plotly.offline import get_plotlyjs

from moeproxy.traces.trace import RunInfo, Trace
from moeproxy.view.apps.log_zoom import ZoomFigure
from moeproxy.view.apps.ui import LiveFigure, Status
from moeproxy.view.figures_log import values, whole_figure
from moeproxy.view.log_view import LogView, log_view

SIGNALS = ("reward_mean", "grad_norm")
# Draws a figure anew and waits for the second frame after it: the first one may still show the old picture.
_DRAW = """async text => {
  const figure = JSON.parse(text), started = performance.now();
  await Plotly.react("plot", figure.data, figure.layout);
  await new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)));
  return performance.now() - started;
}"""
_ZOOM = """async range => {
  const started = performance.now();
  await Plotly.relayout("plot", {"xaxis.range": range});
  await new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)));
  return performance.now() - started;
}"""


def made_up(points: int) -> Trace:
    """Return a run of so many steps: a wandering reward and a noisy gradient norm with a spike and a NaN."""
    rng = np.random.default_rng(0)
    norm_S = np.exp(rng.normal(size=points))
    norm_S[points // 3], norm_S[points // 2] = 1e4, np.nan
    columns = {"reward_mean": np.cumsum(rng.normal(size=points)) / 1000, "grad_norm": norm_S}
    return Trace(pd.DataFrame(columns, index=np.arange(points)), None, RunInfo("run", "original", 0, 0))


def full_figure(view: LogView) -> go.Figure:
    """Return the same figure with every point."""
    figure = whole_figure(LogView(view.runs, view.signals))
    for row, name in enumerate(view.signals):
        series = view.runs[0].series[name]
        figure.data[8 + 10 * row].update(x=series.steps_S.astype(float), y=series.values_S)
    return figure


def packed(state: dict[str, Any]) -> int:
    """Return how many bytes a widget's message has: its JSON and its buffers, without plotly's own code."""
    known = {name: value for name, value in state.items() if name not in ("_esm", "_css")}
    bare, _, buffers = _remove_buffers(known)
    return len(json_packer(bare)) + sum(memoryview(buffer).nbytes for buffer in buffers)


def ranges(points: int, count: int) -> list[tuple[float, float]]:
    """Return parts to look at: a half, a quarter and so on, each at another place."""
    rng = np.random.default_rng(1)
    widths = [points / 2 ** (1 + number % 12) for number in range(count)]
    return [(start, start + width) for width in widths for start in [float(rng.uniform(0, points - width))]]


class Listener:
    """Counts the bytes of a figure's messages, packed as a kernel does."""

    def __init__(self, figure: LiveFigure) -> None:
        self.sent = 0
        figure.widget.comm.publish_msg = self._publish

    def _publish(self, *_: Any, data: Any = None, buffers: Any = None, **__: Any) -> None:
        self.sent += len(json_packer(data)) + sum(memoryview(buffer).nbytes for buffer in buffers or ())


def zoomed(figure: ZoomFigure, listener: Listener, seen: tuple[float, float]) -> tuple[float, int]:
    """Return milliseconds from a zoom to the last packed message, and how many bytes were sent."""
    listener.sent, figure.seen = 0, seen
    started = time.perf_counter()
    figure._fill()
    return 1000 * (time.perf_counter() - started), listener.sent


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Return milliseconds that `work` takes, and what it returns."""
    started = time.perf_counter()
    result = work()
    return 1000 * (time.perf_counter() - started), result


def say(what: str, ours: float, full: float, unit: str) -> None:
    """Print one line."""
    sys.stdout.write(f"{what:<46} {ours:10.1f} {unit:<3} full {full:10.1f} {unit:<3} ratio {ours / full:8.4f}\n")
    sys.stdout.flush()


def in_browser(view: LogView, full: go.Figure, seen: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return milliseconds of drawing each part, down-sampled and full, in a real browser; [] without one."""
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        return []
    from playwright.sync_api import sync_playwright

    arguments = ["--disable-dev-shm-usage", *([] if os.geteuid() else ["--no-sandbox"])]
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        page_file = Path(folder) / "page.html"
        page_file.write_text(f"<script>{get_plotlyjs()}</script><div id='plot' style='width:1000px'></div>")
        browser = playwright.chromium.launch(executable_path=chromium, args=arguments)
        pages = [browser.new_page() for _ in range(2)]
        for page, figure in zip(pages, (whole_figure(view), full), strict=True):
            page.set_default_timeout(300_000)
            page.goto(page_file.as_uri())
            first_ms = page.evaluate(_DRAW, to_json(figure))
            sys.stdout.write(f"first drawing: {first_ms:.0f} ms\n")
        taken = []
        for part in seen:
            figure = whole_figure(view)
            for trace, new in zip(figure.data, values(view, part), strict=True):
                trace.update(new)
            figure.update_xaxes(range=part, autorange=False)
            ours = pages[0].evaluate(_DRAW, to_json(figure))
            taken.append((ours, pages[1].evaluate(_ZOOM, list(part))))
        browser.close()
    return taken


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=1_000_000)
    parser.add_argument("--zooms", type=int, default=7)
    options = parser.parse_args()
    view = log_view([made_up(options.points)], SIGNALS)
    ZoomFigure(LogView(), Status())  # what the first widget of a process loads is nobody's
    ours_ms, ours = timed(lambda: ZoomFigure(view, Status()))
    full_ms, full = timed(lambda: LiveFigure(full_figure(view)))
    say("making the figure", ours_ms, full_ms, "ms")
    say("bytes of the figure", packed(ours.widget.get_state()) / 1e3, packed(full.widget.get_state()) / 1e3, "kB")
    seen = ranges(options.points, options.zooms)
    listener = Listener(ours)
    zoomed(ours, listener, seen[0])  # fills caches
    kernel = [zoomed(ours, listener, part) for part in seen]
    spent_ms = statistics.median(ms for ms, _ in kernel)
    kilobytes = statistics.median(sent for _, sent in kernel) / 1e3
    sys.stdout.write(f"after a zoom, in the kernel: {spent_ms:.0f} ms, {kilobytes:.0f} kB sent (medians)\n")
    drawn = in_browser(view, full_figure(view), seen)
    if not drawn:
        sys.stdout.write("no Chromium: the drawing was not measured\n")
        return
    whole = [ms + mine for (ms, _), (mine, _) in zip(kernel, drawn, strict=True)]
    say("zoom to redraw (median)", statistics.median(whole), statistics.median(theirs for _, theirs in drawn), "ms")
    say("zoom to redraw (slowest)", max(whole), max(theirs for _, theirs in drawn), "ms")


if __name__ == "__main__":
    main()
