"""How many experts to keep: a slider over the possible counts, and a box to type one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import gcd
from numbers import Integral
from typing import Any

import ipywidgets as widgets

from moeproxy.errors import ProxyError
from moeproxy.view.apps.slider import NamedSlider
from moeproxy.view.apps.ui import Status


class CountControl:
    """A slider and a box that always show the same possible count.

    Args:
        counts: the possible counts, ascending.
        value: the one wanted at first, half of the largest if None; an impossible one becomes the nearest.
        status: told when a typed count is impossible.
        on_change: called without arguments after either was moved.

    Raises:
        ProxyError: `value` is no whole number.
    """

    def __init__(self, counts: Sequence[int], value: int | None, status: Status, on_change: Callable[[], None]) -> None:
        self.counts = list(counts)
        self._status, self._on_change = status, on_change
        first = self.nearest(self.counts[-1] // 2 if value is None else whole_count(value, self.counts))
        steps = [b - a for a, b in zip(self.counts, self.counts[1:], strict=False)]
        self.slider = NamedSlider(self.counts, first, "Experts kept per layer")
        self.box = widgets.BoundedIntText(
            value=first,
            min=self.counts[0],
            max=self.counts[-1],
            step=gcd(*steps) or 1,
            description="or type a count",
            style={"description_width": "initial"},
            layout=widgets.Layout(width="190px"),
        )
        self.slider.observe(status.guard(self._slider_moved), "index")
        self.box.observe(status.guard(self._box_changed), "value")

    @property
    def value(self) -> int:
        """The count chosen."""
        return self.slider.value

    def choose(self, count: int) -> None:
        """Move the slider to a count, as a user would; an impossible one becomes the nearest possible."""
        self.slider.value = self.nearest(count)

    def nearest(self, count: int) -> int:
        """The possible count nearest to `count`, the smaller of two."""
        return min(self.counts, key=lambda possible: (abs(possible - count), possible))

    def _slider_moved(self, _: Any) -> None:
        self.box.value = self.slider.value
        self._on_change()

    def _box_changed(self, _: Any) -> None:
        possible = self.nearest(self.box.value)
        if possible != self.box.value:
            self._status.say(f"{self.box.value} experts cannot be kept; {possible} is the nearest count that can.")
            self.box.value = possible
        self.slider.value = possible


def whole_count(value: object, counts: Sequence[int]) -> int:
    """Return `value` as an int.

    Raises:
        ProxyError: it is no whole number; `counts`, the possible ones, are listed.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ProxyError(
            f"the number of experts to keep is {value!r}, which is no whole number",
            expected=f"one of {', '.join(map(str, counts))}",
            remedy="pass n_keep as one of these counts, or leave it out",
        )
    return int(value)
