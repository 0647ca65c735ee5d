"""The panel of notebook 00: choose how many experts to keep, see which, build the proxy."""

from __future__ import annotations

import threading
from collections.abc import Callable
from math import gcd
from pathlib import Path
from typing import Any

import ipywidgets as widgets

from moeproxy.experts.checkpoint import Checkpoint
from moeproxy.experts.profile import ExpertProfile
from moeproxy.proxy.build import Proxy, build, check
from moeproxy.proxy.cluster import METHODS, allowed_counts, select
from moeproxy.proxy.cost import cost
from moeproxy.proxy.plan import KeepPlan
from moeproxy.view.apps.proxy_figure import PanelState, describe, layer_title, proxy_figure, title, values
from moeproxy.view.apps.slider import NamedSlider
from moeproxy.view.apps.ui import Debouncer, Job, LiveFigure, Report, Status

_BUILD_SHARE = 0.6  # of the progress bar; the reload check takes the rest


class ProxyPanel:
    """Controls, one live figure, and a background job that builds what is shown.

    A move of a control clusters anew from the saved profile; the model itself is touched by the build alone.

    Args:
        checkpoint: the original, opened or its directory.
        profile: its calibration profile.
        out: folder that built proxies go to, as NAME-METHOD-COUNT; made when needed.
        n_keep: experts kept at first; half of them, or the nearest possible count, when not given.
        method: a key of `moeproxy.proxy.cluster.METHODS`.
        seed: seed of the methods that draw.

    Example:
        >>> panel = ProxyPanel("data/models/qwen3-moe-tiny", profile, out="out/proxies")
        >>> panel  # the last expression of a cell shows it
        >>> panel.choose(8); panel.settle(); panel.plan
        KeepPlan(cluster: 8 of 32 experts in 4 layers)
    """

    def __init__(
        self,
        checkpoint: Checkpoint | str | Path,
        profile: ExpertProfile,
        *,
        out: str | Path,
        n_keep: int | None = None,
        method: str = "cluster",
        seed: int = 0,
    ) -> None:
        self.checkpoint = checkpoint if isinstance(checkpoint, Checkpoint) else Checkpoint.open(checkpoint)
        self.profile, self.out, self.seed = profile, Path(out), seed
        self.counts = allowed_counts(profile)
        self._plans: dict[tuple[str, int], KeepPlan] = {}
        self._lock = threading.Lock()
        self.summary, self.status = Status(), Status()
        self._make_controls(self._nearest(n_keep or profile.n_experts // 2), method)
        self.state = self._read_controls()
        self.summary.say(describe(self.state))
        self.figure = LiveFigure(proxy_figure(self.state))
        self.job = Job(self._build, "Build this proxy", status=self.status)
        self._redraw = Debouncer(self.status.guard(self._draw))
        self._connect()
        self.widget = self._arrange()

    @property
    def plan(self) -> KeepPlan:
        """The plan that the figure shows."""
        return self.state.plan

    @property
    def proxy(self) -> Proxy | None:
        """The proxy built last, checked; None before."""
        return self.job.result

    def choose(self, n_keep: int) -> None:
        """Move the slider to a count, as a user would; an impossible one becomes the nearest possible."""
        self.slider.value = self._nearest(n_keep)

    def settle(self, timeout_s: float = 30.0) -> bool:
        """Wait until the figure shows what the controls say; return whether it does."""
        return self._redraw.settle(timeout_s)

    def _make_controls(self, n_keep: int, method: str) -> None:
        self.slider = NamedSlider(self.counts, n_keep, "Experts kept per layer")
        steps = [b - a for a, b in zip(self.counts, self.counts[1:], strict=False)]
        wide = {"description_width": "initial"}
        self.box = widgets.BoundedIntText(
            value=n_keep,
            min=self.counts[0],
            max=self.counts[-1],
            step=gcd(*steps) or 1,
            description="or type a count",
            style=wide,
            layout=widgets.Layout(width="190px"),
        )
        self.method = widgets.Dropdown(
            options=[(f"{name}: {text}", name) for name, text in METHODS.items()],
            value=method,
            description="Method",
            style=wide,
            layout=widgets.Layout(width="520px"),
        )
        self.layer = widgets.Dropdown(
            options=[(str(layer), layer) for layer in self.profile.moe_layers],
            value=self.profile.moe_layers[0],
            description="Layer shown below",
            style=wide,
            layout=widgets.Layout(width="220px"),
        )

    def _connect(self) -> None:
        self.slider.observe(self.status.guard(self._slider_moved), "index")
        self.box.observe(self.status.guard(self._box_changed), "value")
        self.method.observe(lambda _: self._redraw(), "value")
        self.layer.observe(lambda _: self._redraw(), "value")

    def _slider_moved(self, _: Any) -> None:
        self.box.value = self.slider.value
        self._redraw()

    def _box_changed(self, _: Any) -> None:
        possible = self._nearest(self.box.value)
        if possible != self.box.value:
            self.status.say(f"{self.box.value} experts cannot be kept; {possible} is the nearest count that can.")
            self.box.value = possible
        self.slider.value = possible

    def _nearest(self, n_keep: int) -> int:
        return min(self.counts, key=lambda count: (abs(count - n_keep), count))

    def _read_controls(self) -> PanelState:
        plan = self._plan(self.method.value, self.slider.value)
        predicted = cost(self.checkpoint, plan.n_keep)
        layer: Any = self.layer.value
        return PanelState(self.profile, plan, layer, cost(self.checkpoint), predicted)

    def _plan(self, method: Any, n_keep: int) -> KeepPlan:
        with self._lock:
            if (method, n_keep) not in self._plans:
                self._plans[method, n_keep] = select(self.profile, n_keep, method=method, seed=self.seed)
            return self._plans[method, n_keep]

    def _draw(self) -> None:
        self.state = state = self._read_controls()
        with self.figure.change() as figure:
            for trace, new in zip(figure.data, values(state), strict=True):
                trace.update(new)
            figure.layout.title.text = title(state)
            figure.layout.annotations[1].text = layer_title(state)
        self.summary.say(describe(state))
        if self.status.is_error:
            self.status.say("Ready.")  # the error was about what is no longer shown

    def _build(self, report: Report) -> Proxy:
        self.settle()
        plan = self.plan
        target = self.out / f"{self.checkpoint.path.name}-{plan.method}-{plan.n_keep}"
        written = build(self.checkpoint, plan, target, progress=_as_share(report, f"writing {target.name}"))
        report(_BUILD_SHARE, f"checking {target.name} by reloading it")
        proxy = check(written)
        self.status.say(f"{target.name}: {proxy.n_params:,} parameters, {proxy.check.verdict if proxy.check else ''}")
        return proxy

    def _arrange(self) -> widgets.VBox:
        rows = widgets.Layout(flex_flow="row wrap", align_items="center", grid_gap="4px 24px")
        controls = widgets.Box([self.slider, self.box, self.method, self.layer], layout=rows)
        job = widgets.Box([self.job.widget, self.status.widget], layout=rows)
        return widgets.VBox([controls, self.figure.widget, self.summary.widget, job])

    def _repr_mimebundle_(self, **options: Any) -> Any:
        return self.widget._repr_mimebundle_(**options)


def _as_share(report: Report, text: str) -> Callable[[int, int], None]:
    """Return a progress callback (done, in all) that reports the writing part of the job."""

    def progress(done: int, total: int) -> None:
        report(_BUILD_SHARE * done / max(total, 1), text)

    return progress
