"""The panel of notebook 01: a map of the experts, their clusters, and what single experts do."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import ipywidgets as widgets
import numpy as np
import pandas as pd

from moeproxy.errors import MoeproxyError
from moeproxy.experts.checkpoint import Checkpoint
from moeproxy.experts.load import load_tokenizer
from moeproxy.experts.profile import ExpertProfile
from moeproxy.proxy.cluster import allowed_counts, select
from moeproxy.proxy.damage import damage
from moeproxy.proxy.plan import KeepPlan
from moeproxy.proxy.protect import forced_experts
from moeproxy.proxy.similarity import check_weights, distances, layer_index
from moeproxy.view.apps.counts import CountControl
from moeproxy.view.apps.live_figure import LiveFigure
from moeproxy.view.apps.opening import open_profiled
from moeproxy.view.apps.selection import Pick, parse, written
from moeproxy.view.apps.slider import NamedSlider
from moeproxy.view.apps.tables import LiveTable
from moeproxy.view.apps.ui import Job, Press, Redraw, Report, Status
from moeproxy.view.expert_details import LayerFacts, expert_table
from moeproxy.view.expert_layout import (
    ExpertMaps,
    LayerFeatures,
    layout_key,
    pca_layout,
    pca_of_features,
    shipped_maps,
    umap_layout,
)
from moeproxy.view.figures_expert_map import (
    EXPERTS,
    MapState,
    changes,
    describe,
    layout_values,
    map_figure,
    titles,
    values,
)
from moeproxy.view.figures_fidelity import damage_table

_VIEWS = ("router", "co-activation", "context", "expert output")
_WIDE = {"description_width": "initial"}


class ExpertPanel:
    """Controls, one live figure (map, distances, predicted damage), and a table of the experts selected.

    A move of a control clusters anew from the saved profile; the model is never touched.

    Args:
        checkpoint: the original, opened or its directory; read for its tokenizer alone.
        profile: its calibration profile.
        n_keep: experts kept at first; half of them, or the nearest possible count, when not given.
        layer: decoder layer shown at first, by default the first with experts.
        maps: stored UMAP layouts; by default those that come with moeproxy for this checkpoint.

    Raises:
        ProfileError: the profile was made from another checkpoint.
        ProxyError: `layer` has no experts, or `n_keep` is no whole number.

    Example:
        >>> panel = ExpertPanel("data/models/qwen3-moe-tiny", profile)
        >>> panel  # the last expression of a cell shows it
        >>> panel.pick("3, 17"); panel.keep_button.click(); panel.settle(); panel.keep_always
        {0: (3, 17)}
    """

    def __init__(
        self,
        checkpoint: Checkpoint | str | Path,
        profile: ExpertProfile,
        *,
        n_keep: int | None = None,
        layer: int | None = None,
        maps: ExpertMaps | None = None,
    ) -> None:
        self.checkpoint = open_profiled(checkpoint, profile)
        self.profile = profile
        self._views = distances(profile, output=True)
        self._umaps = dict((maps or shipped_maps(profile.checkpoint_fingerprint)).xy)
        self._pcas: dict[Any, np.ndarray] = {}
        self._facts: dict[int, LayerFacts] = {}
        self._kept: frozenset[Pick] = frozenset()
        self._dropped: frozenset[Pick] = frozenset()
        self._picked: frozenset[Pick] = frozenset()
        self.summary, self.status = Status(), Status()
        self.table, self.damage_table = LiveTable(), LiveTable(400, folded=True)
        self._redraw = Redraw(self._draw, self.status)
        first = profile.moe_layers[0] if layer is None else layer
        layer_index(profile, first)  # refuses a layer without experts
        self._make_controls(n_keep, first)
        self.state = self._read_controls()
        self.figure, self._drawn = LiveFigure(map_figure(self.state)), values(self.state)
        self.job = Job(self._compute_umap, "Compute UMAP", status=self.status, on_done=lambda _: self._redraw())
        self._tell()
        self._connect()
        self.widget = self._arrange()

    @property
    def plan(self) -> KeepPlan:
        """The plan that the figure shows."""
        return self.state.plan

    @property
    def weights(self) -> tuple[int, int, int, int]:
        """The sliders' weights of router, co-activation, context and expert output."""
        a, b, c, d = (slider.value for slider in self.weight_sliders)
        return a, b, c, d

    @property
    def selected(self) -> frozenset[Pick]:
        """The (layer, expert) pairs selected."""
        return self._picked

    @property
    def keep_always(self) -> dict[int, tuple[int, ...]]:
        """Experts kept in any case, by layer, as `moeproxy.select` takes them."""
        return _by_layer(self._kept)

    @property
    def drop_always(self) -> dict[int, tuple[int, ...]]:
        """Experts dropped in any case, by layer, as `moeproxy.select` takes them."""
        return _by_layer(self._dropped)

    def choose(self, n_keep: int) -> None:
        """Move the count slider, as a user would."""
        self.count.choose(n_keep)

    def pick(self, text: str) -> None:
        """Select experts by text, as a user would: "3, 17, 40-44"."""
        self.picker.value = text

    def settle(self, timeout_s: float = 30.0) -> bool:
        """Wait until the figure shows what the controls say; return whether it does."""
        return all(part.settle(timeout_s) for part in (*self._presses, self._redraw))

    def _make_controls(self, n_keep: int | None, layer: int) -> None:
        self.count = CountControl(allowed_counts(self.profile), n_keep, self.status, self._redraw)
        self.layer = NamedSlider(list(self.profile.moe_layers), layer, "Layer")
        steps, first = list(range(11)), (5, 5, 5, 0)
        names = zip(_VIEWS, first, strict=True)
        self.weight_sliders = tuple(NamedSlider(steps, start, f"Weight: {name}") for name, start in names)
        self.scope = _dropdown("Map shows", [("one layer", False), ("all layers", True)], "200px")
        self.layout = _dropdown("Layout", [("UMAP where computed, else PCA", True), ("PCA", False)], "310px")
        actions = [("selects it", "select"), ("always keeps it", "keep"), ("always drops it", "drop")]
        self.action = _dropdown("A click on an expert", actions, "300px")
        self.picker = widgets.Text(
            description="Select experts",
            placeholder="3, 17, 40-44",
            continuous_update=False,
            style=_WIDE,
            layout=widgets.Layout(width="340px"),
        )
        self.keep_button, self.drop_button, self.free_button, self.clear_button = (
            widgets.Button(description=text, layout=widgets.Layout(width="auto"))
            for text in ("Always keep", "Always drop", "Set free", "Clear selection")
        )

    def _connect(self) -> None:
        for control in (self.layer, *self.weight_sliders):
            control.observe(lambda _: self._redraw(), "index")
        for control in (self.scope, self.layout):
            control.observe(lambda _: self._redraw(), "value")
        guard = self.status.guard
        self.picker.observe(guard(self._typed), "value")
        self._presses = (
            Press(self.keep_button, lambda: self._force(self._picked, "keep"), self.status),
            Press(self.drop_button, lambda: self._force(self._picked, "drop"), self.status),
            Press(self.free_button, lambda: self._force(self._picked, "free"), self.status),
        )
        self.clear_button.on_click(guard(lambda _: self._select(frozenset())))
        experts: Any = self.figure.widget.data[EXPERTS]
        experts.on_selection(guard(lambda _, points, __: self._select(self._pairs(points.point_inds))))
        experts.on_deselect(guard(lambda *_: self._select(frozenset())))
        experts.on_click(guard(lambda _, points, __: self._clicked(self._pairs(points.point_inds))))

    def _pairs(self, places: Iterable[int]) -> frozenset[Pick]:
        return frozenset(self.state.pair(int(place)) for place in places)

    def _typed(self, _: Any) -> None:
        picks = parse(self.picker.value, self.layer.value, self.profile.moe_layers, self.profile.n_experts)
        if picks != self._picked:
            self._select(picks)
        else:
            self._redraw()  # the text before may have been refused

    def _select(self, picks: frozenset[Pick]) -> None:
        self._picked = picks
        if not picks:
            with self.figure.change() as figure:
                figure.layout.selections = ()  # the box that was drawn
        self.picker.value = written(picks, self.layer.value)
        self._redraw()

    def _clicked(self, picks: frozenset[Pick]) -> None:
        if self.action.value == "select":
            self._select(self._picked ^ picks)
            return
        already = self._kept if self.action.value == "keep" else self._dropped
        self._force(picks, "free" if picks <= already else str(self.action.value))

    def _force(self, picks: frozenset[Pick], what: str) -> None:
        if not picks:
            raise MoeproxyError("no expert is selected", remedy="draw a box on the map, or type numbers")
        kept, dropped = self._kept - picks, self._dropped - picks
        kept, dropped = (kept | picks if what == "keep" else kept), (dropped | picks if what == "drop" else dropped)
        # An impossible wish is refused here and leaves the panel as it was.
        forced_experts(self.profile, self.count.value, _by_layer(kept), _by_layer(dropped))
        self._kept, self._dropped = kept, dropped
        self._redraw()

    def _read_controls(self) -> MapState:
        layer, weights, everywhere = self.layer.value, self.weights, bool(self.scope.value)
        plan = select(
            self.profile,
            self.count.value,
            weights=weights,
            views=self._views,
            keep_always=self.keep_always,
            drop_always=self.drop_always,
        )
        fused_LEE = self._views.fuse(weights)
        fused_EE = fused_LEE[self.profile.moe_layers.index(layer)]
        xy_N2, layout = self._places(None if everywhere else layer, fused_EE)
        return MapState(
            self.profile,
            plan,
            damage(self.profile, plan, self._views),
            fused_EE,
            layer,
            everywhere,
            xy_N2,
            layout,
            self._picked,
            self._kept,
            self._dropped,
        )

    def _places(self, layer: int | None, fused_EE: np.ndarray) -> tuple[np.ndarray, str]:
        key = layout_key(layer, self.weights)
        if self.layout.value and key in self._umaps:
            return self._umaps[key], "UMAP"
        if key not in self._pcas:
            whole = layer is None
            self._pcas[key] = pca_of_features(self._features.weigh(self.weights)) if whole else pca_layout(fused_EE)
        return self._pcas[key], "PCA"

    def _compute_umap(self, report: Report) -> np.ndarray:
        layer, weights = (None if self.scope.value else self.layer.value), self.weights
        check_weights(weights)
        if layer is None:
            matrix = self._features.weigh(weights)
        else:
            matrix = self._views.fuse(weights)[self.profile.moe_layers.index(layer)]
        xy_N2 = umap_layout(matrix, precomputed=layer is not None, report=report)
        self._umaps[layout_key(layer, weights)] = xy_N2
        self.status.say("UMAP computed for " + ("all layers." if layer is None else f"layer {layer}."))
        return xy_N2

    def _draw(self) -> None:
        self.state = state = self._read_controls()
        drawn, self._drawn = self._drawn, values(state)
        with self.figure.change() as figure:
            # Only what differs: of all layers' experts, texts and places are most of the bytes, and seldom change.
            for trace, old, new in zip(figure.data, drawn, self._drawn, strict=True):
                trace.update(changes(old, new))
            figure.update_layout(layout_values(state))
            for annotation, text in zip(figure.layout.annotations, titles(state), strict=True):
                annotation.text = text
        self._tell()

    def _tell(self) -> None:
        """Say in words and in tables what the figure shows."""
        state = self.state
        self.summary.say(describe(state))
        picks = sorted(state.selected) or [(state.layer, e) for e in range(self.profile.n_experts)]
        self.table.show(
            self._rows(picks), f"Experts selected ({len(picks)})" if state.selected else "Experts of the layer"
        )
        self.damage_table.show(damage_table(state.damage), "Predicted damage in every layer")

    def _rows(self, picks: list[Pick]) -> pd.DataFrame:
        wishes = dict.fromkeys(self._kept, "always kept") | dict.fromkeys(self._dropped, "always dropped")
        fused_LEE = self._views.fuse(self.weights)
        parts = []
        for layer, experts in _by_layer(frozenset(picks)).items():
            if layer not in self._facts:
                self._facts[layer] = LayerFacts.of(self.profile, layer, self._decode)
            forced = {expert: wish for (where, expert), wish in wishes.items() if where == layer}
            fused_EE = fused_LEE[self.profile.moe_layers.index(layer)]
            parts.append(expert_table(self._facts[layer], self.plan, fused_EE, experts, forced))
        return pd.concat(parts)

    @cached_property
    def _features(self) -> LayerFeatures:
        return LayerFeatures.of(self.profile)  # when the map first shows all layers

    @cached_property
    def _decode(self) -> Callable[[int], str]:
        try:
            tokenizer = load_tokenizer(self.checkpoint)
        except MoeproxyError:
            return lambda token: f"token {token}"  # a table of numbers is better than none
        return lambda token: str(tokenizer.decode([token]))

    def _arrange(self) -> widgets.VBox:
        rows = widgets.Layout(flex_flow="row wrap", align_items="center", grid_gap="2px 24px")

        def line(*children: widgets.Widget) -> widgets.Box:
            return widgets.Box(list(children), layout=rows)

        return widgets.VBox(
            [
                line(self.count.slider, self.count.box),
                line(self.layer, self.scope),
                line(*self.weight_sliders),
                line(self.layout, self.job.widget),
                self.figure.widget,
                self.summary.widget,
                line(self.picker, self.action),
                line(self.keep_button, self.drop_button, self.free_button, self.clear_button, self.status.widget),
                self.table.widget,
                self.damage_table.widget,
            ]
        )

    def _repr_mimebundle_(self, **options: Any) -> Any:
        return self.widget._repr_mimebundle_(**options)


def _by_layer(picks: frozenset[Pick]) -> dict[int, tuple[int, ...]]:
    found: dict[int, tuple[int, ...]] = {}
    for layer, expert in sorted(picks):
        found[layer] = (*found.get(layer, ()), expert)
    return found


def _dropdown(name: str, options: list[tuple[str, Any]], width: str) -> widgets.Dropdown:
    return widgets.Dropdown(
        options=options, value=options[0][1], description=name, style=_WIDE, layout=widgets.Layout(width=width)
    )
