"""The panel of notebooks 00 and 02: choose how many experts to keep, see the cost, build the proxy, measure it."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ipywidgets as widgets

from moeproxy.errors import ProxyError
from moeproxy.experts.checkpoint import Checkpoint
from moeproxy.experts.profile import ExpertProfile
from moeproxy.proxy.build import Mtp, Proxy, build, check
from moeproxy.proxy.cluster import METHODS, allowed_counts, select
from moeproxy.proxy.cost import cost
from moeproxy.proxy.damage import damage
from moeproxy.proxy.fidelity import Fidelity, fidelity
from moeproxy.proxy.plan import KeepPlan
from moeproxy.proxy.protect import Wish
from moeproxy.proxy.similarity import WEIGHTS, check_weights, distances
from moeproxy.proxy.stability import Stability, stability
from moeproxy.view.apps.counts import CountControl
from moeproxy.view.apps.live_figure import LiveFigure
from moeproxy.view.apps.opening import open_profiled
from moeproxy.view.apps.proxy_figure import PanelState, describe, layer_title, proxy_figure, size_table, title, values
from moeproxy.view.apps.tables import LiveTable
from moeproxy.view.apps.ui import Job, Redraw, Report, Status, TimeLeft
from moeproxy.view.figures_fidelity import damage_table, fidelity_table, stability_table

_RESAMPLES = 20


class ProxyPanel:
    """Controls, one live figure, and background jobs that build what is shown and ask how stable the choice is.

    A move of a control clusters anew from the saved profile; the model itself is touched by the build alone.

    Args:
        checkpoint: the original, opened or its directory.
        profile: its calibration profile.
        out: folder that built proxies go to, as NAME-METHOD-COUNT; made when needed.
        n_keep: experts kept at first; half of them, or the nearest possible count, when not given.
        method: a key of `moeproxy.proxy.cluster.METHODS`.
        seed: seed of the methods that draw.
        weights, keep_always, drop_always: as in `moeproxy.select`.
        mtp: what becomes of multi-token-prediction layers, as in `moeproxy.build`.
        texts: texts on which a built proxy is held against its original; without them that is left out.
        prompts: the beginnings of the texts that are not to be predicted, as in `fidelity`.
        score: a measure of a loaded model that goes into the same table, such as a task's accuracy.

    Raises:
        ProfileError: the profile was made from another checkpoint.
        ProxyError: an unknown `method`, `n_keep` that is no whole number, or weights or wishes that are impossible.

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
        weights: Sequence[float | int] = WEIGHTS,
        keep_always: Wish | None = None,
        drop_always: Wish | None = None,
        mtp: Mtp | None = None,
        texts: Sequence[str] | None = None,
        prompts: Sequence[str] | None = None,
        score: Callable[[Any], float] | None = None,
    ) -> None:
        _check_method(method)
        self.checkpoint = open_profiled(checkpoint, profile)
        self.profile, self.out, self.seed = profile, Path(out), seed
        self.texts, self.prompts, self.score = texts, prompts, score
        self.mtp: Mtp | None = mtp
        self._choice: dict[str, Any] = {"weights": weights, "keep_always": keep_always, "drop_always": drop_always}
        self._views = distances(profile, output=len(check_weights(weights)) == 4)
        self._plans: dict[tuple[str, int], KeepPlan] = {}
        self._lock = threading.Lock()
        self.fidelity: Fidelity | None = None
        self.stability: Stability | None = None
        self.summary, self.status = Status(), Status()
        self.size_table, self.damage_table = LiveTable(), LiveTable(400, folded=True)
        self.fidelity_table, self.stability_table = LiveTable(), LiveTable(400)
        self._redraw = Redraw(self._draw, self.status)
        self._make_controls(n_keep, method)
        self.state = self._read_controls()
        self.figure = LiveFigure(proxy_figure(self.state))
        self.job = Job(self._build, "Build this proxy", status=self.status)
        self.stability_job = Job(self._check_stability, "Check stability", cancel="Cancel check", status=self.status)
        self._tell()
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

    @property
    def counts(self) -> list[int]:
        """The counts that can be chosen."""
        return self.count.counts

    def choose(self, n_keep: int) -> None:
        """Move the slider to a count, as a user would; an impossible one becomes the nearest possible."""
        self.count.choose(n_keep)

    def settle(self, timeout_s: float = 30.0) -> bool:
        """Wait until the figure shows what the controls say; return whether it does."""
        return self._redraw.settle(timeout_s)

    def _make_controls(self, n_keep: int | None, method: str) -> None:
        self.count = CountControl(allowed_counts(self.profile), n_keep, self.status, self._redraw)
        wide = {"description_width": "initial"}
        self.method = widgets.Dropdown(
            options=[(f"{name}: {text}", name) for name, text in METHODS.items()],
            value=method,
            description="Method",
            style=wide,
            layout=widgets.Layout(width="620px"),
        )
        self.layer = widgets.Dropdown(
            options=[(str(layer), layer) for layer in self.profile.moe_layers],
            value=self.profile.moe_layers[0],
            description="Layer shown below",
            style=wide,
            layout=widgets.Layout(width="220px"),
        )

    def _connect(self) -> None:
        self.method.observe(lambda _: self._redraw(), "value")
        self.layer.observe(lambda _: self._redraw(), "value")

    def _read_controls(self) -> PanelState:
        plan = self._plan(self.method.value, self.count.value)
        predicted = cost(self.checkpoint, plan.n_keep, mtp=self.mtp or "prune")
        layer: Any = self.layer.value
        predicted_damage = damage(self.profile, plan, self._views)
        return PanelState(self.profile, plan, layer, cost(self.checkpoint), predicted, predicted_damage)

    def _plan(self, method: Any, n_keep: int) -> KeepPlan:
        with self._lock:
            if (method, n_keep) not in self._plans:
                options = {"method": method, "seed": self.seed, "views": self._views, **self._choice}
                self._plans[method, n_keep] = select(self.profile, n_keep, **options)
            return self._plans[method, n_keep]

    def _draw(self) -> None:
        self.state = state = self._read_controls()
        with self.figure.change() as figure:
            for trace, new in zip(figure.data, values(state), strict=True):
                trace.update(new)
            figure.layout.title.text = title(state)
            figure.layout.annotations[1].text = layer_title(state)
        self._tell()

    def _tell(self) -> None:
        """Say in words and in tables what the figure shows."""
        self.summary.say(describe(self.state))
        self.size_table.show(size_table(self.state), "Predicted size")
        self.damage_table.show(damage_table(self.state.damage), "Predicted damage in every layer")

    def _build(self, report: Report) -> Proxy:
        self.settle()
        plan, left = self.plan, TimeLeft("MB", 1e-6)
        target = self.out / f"{self.checkpoint.path.name}-{plan.method}-{plan.n_keep}"
        written_share = 0.3 if self.texts else 0.6  # of the progress bar; check and fidelity take the rest

        def written(done: int, total: int) -> None:
            report(written_share * done / max(total, 1), f"Writing {target.name}: {left(done, total)}.")

        made = [folder for folder in target.parents if not folder.exists()]
        proxy = build(self.checkpoint, plan, target, mtp=self.mtp, progress=written)
        with _removed_on_failure(target, made):
            report(written_share, f"Checking {target.name} by reloading it.")
            proxy = check(proxy)
            report(0.6, f"{target.name} reloads equal.")
            if self.texts:
                self._measure(proxy, report)
        verdict = proxy.check.verdict if proxy.check else ""
        self.status.say(f"{target.name}: {proxy.n_params:,} parameters, {verdict}")
        return proxy

    def _measure(self, proxy: Proxy, report: Report) -> None:
        left = TimeLeft("passes of texts")

        def passed(done: int, total: int) -> None:
            report(
                0.6 + 0.4 * done / max(total, 1),
                f"Holding {proxy.path.name} against its original: {left(done, total)}.",
            )

        options = {"prompts": self.prompts, "score": self.score, "progress": passed}
        found = fidelity(self.checkpoint, proxy, self.texts or (), **options)
        self.fidelity = found
        self.fidelity_table.show(fidelity_table(found), f"Fidelity of {proxy.path.name}")

    def _check_stability(self, report: Report) -> Stability:
        self.settle()
        plan, left = self.plan, TimeLeft("resamples")

        def resampled(done: int, total: int) -> None:
            report(done / max(total, 1), f"Choosing again on resampled texts: {left(done, total)}.")

        options = {"method": plan.method, "seed": self.seed, **self._choice}
        found = stability(self.profile, plan.n_keep, n_resamples=_RESAMPLES, progress=resampled, **options)
        self.stability = found
        name = f"Stability of {plan.method}, {plan.n_keep} experts: {found.measure}, {found.n_resamples} resamples"
        self.stability_table.show(stability_table(found), name)
        self.status.say(
            f"{found.measure[0].upper()}{found.measure[1:]}: {found.agreement_mean_L.mean():.2f} on average."
        )
        return found

    def _arrange(self) -> widgets.VBox:
        rows = widgets.Layout(flex_flow="row wrap", align_items="center", grid_gap="4px 24px")
        choice = widgets.Box([self.count.slider, self.count.box, self.layer], layout=rows)
        jobs = widgets.Box([self.job.widget, self.stability_job.widget], layout=rows)
        parts = [choice, self.method, self.figure.widget, self.summary.widget, self.size_table.widget]
        parts += [self.damage_table.widget, jobs, self.status.widget]
        parts += [self.fidelity_table.widget, self.stability_table.widget]
        return widgets.VBox(parts)

    def _repr_mimebundle_(self, **options: Any) -> Any:
        return self.widget._repr_mimebundle_(**options)


def _check_method(method: str) -> None:
    if method not in tuple(METHODS):
        raise ProxyError(
            f"method {method!r} is unknown", expected=f"one of {', '.join(METHODS)}", remedy="pass one of these methods"
        )


@contextmanager
def _removed_on_failure(target: Path, made: Sequence[Path]) -> Iterator[None]:
    """Remove `target` and those folders of `made` that are empty if anything is raised, a cancellation too.

    To be entered only once `target` was written: what somebody else put there before is not ours to remove.
    """
    try:
        yield
    except BaseException:
        shutil.rmtree(target, ignore_errors=True)  # it would be in the way of the next attempt
        for folder in made:
            with suppress(OSError):  # somebody else uses it by now
                folder.rmdir()
        raise
