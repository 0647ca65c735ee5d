"""A whole number: a slider over usual values, and a box to type any other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ipywidgets as widgets

from moeproxy.view.apps.slider import NamedSlider
from moeproxy.view.apps.ui import Status

MOST = 10_000_000


class NumberControl:
    """A slider and a box that always show the same number.

    A typed number takes its place among the slider's; whether it makes sense is for the caller to say.

    Args:
        name: what the slider is called, seen and spoken; the box is called "name =".
        options: the usual values, ascending.
        value: the first one.
        status: told of errors in callbacks.
        on_change: called without arguments after either was moved.
        least: the smallest number that can be typed.
    """

    def __init__(
        self,
        name: str,
        options: Sequence[int],
        value: int,
        status: Status,
        on_change: Callable[[], None],
        *,
        least: int = 1,
    ) -> None:
        self._usual, self._on_change = list(options), on_change
        self.slider = NamedSlider(sorted({*options, value}), value, name)
        self.box = widgets.BoundedIntText(
            value=value,
            min=least,
            max=MOST,
            description=f"{name} =",
            style={"description_width": "0px"},  # the slider beside it shows the name; screen readers need both
            layout=widgets.Layout(width="96px"),
        )
        self.slider.observe(status.guard(self._slider_moved), "index")
        self.box.observe(status.guard(self._typed), "value")
        self.slider.layout.max_width = "calc(100% - 4px)"  # its margins; otherwise a narrow cell cuts its name
        beside = widgets.Layout(flex_flow="row wrap", align_items="center", max_width="100%")
        self.widget = widgets.Box([self.slider, self.box], layout=beside)

    @property
    def value(self) -> int:
        """The number chosen."""
        return self.slider.value

    def choose(self, value: int) -> None:
        """Set the number, as a user would by typing it."""
        self.box.value = value

    def offer(self, options: Sequence[int], value: int) -> None:
        """Take other usual values, and one of them or another as the number."""
        self._usual = list(options)
        self._set(value)
        self.box.value = value

    def _set(self, value: int) -> None:
        options = sorted({*self._usual, value})
        with self.slider.hold_trait_notifications():
            self.slider.options = options
            self.slider.index = options.index(value)

    def _slider_moved(self, _: Any) -> None:
        self.box.value = self.slider.value
        self._on_change()

    def _typed(self, _: Any) -> None:
        if self.box.value != self.slider.value:
            place = self.slider.index
            self._set(self.box.value)
            if self.slider.index == place:  # another number at the same place: the slider saw no move
                self._on_change()
