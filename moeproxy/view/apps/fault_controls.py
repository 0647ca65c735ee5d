"""The controls of the fault panel: fault, strength, onset, seeds, models, steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ipywidgets as widgets

from moeproxy.errors import MoeproxyError
from moeproxy.lab.faults import FAULTS, fault
from moeproxy.view.apps.fault_runs import Asked
from moeproxy.view.apps.fault_text import family_options, fault_options
from moeproxy.view.apps.recordings import Recordings
from moeproxy.view.apps.slider import NamedSlider
from moeproxy.view.apps.ui import Status

NO_MODEL = ""
_MOST_SEEDS = 20
_WIDE = {"description_width": "initial"}


class FaultControls:
    """Widgets that together ask one question.

    A change of fault goes to the strongest recorded strength, and to the recorded seeds and onsets.

    Args:
        recordings: what is recorded.
        fault_id: fault chosen at first.
        models: labels that can be chosen beside the original.
        status: told when something typed is impossible.
        on_change: called without arguments after any change.

    Raises:
        FaultError: no such fault.
    """

    def __init__(
        self,
        recordings: Recordings,
        fault_id: str,
        models: tuple[str, ...],
        status: Status,
        on_change: Callable[[], None],
    ) -> None:
        self._recordings, self._on_change = recordings, on_change
        self._recorded = recordings.faults()
        first = fault(fault_id)
        self.family = _dropdown("Family", family_options(), first.family, "290px")
        self.fault = _dropdown("Fault", fault_options(first.family, self._recorded), first.id, "430px")
        self.strength = NamedSlider([100], 100, "Strength in %")
        self.as_recorded = widgets.Checkbox(description="Onset as recorded", value=True, indent=False)
        self.as_recorded.layout.width = "170px"
        self._put = min(20, recordings.settings.steps)
        self.onset = NamedSlider(list(range(1, recordings.settings.steps + 1)), self._put, "Onset, step")
        self.seeds = widgets.Text(value="0", description="Seeds", continuous_update=False, style=_WIDE)
        self.seeds.layout.width = "170px"
        self.steps = widgets.BoundedIntText(description="Steps of a live run", min=1, max=100_000, style=_WIDE)
        self.steps.layout.width = "210px"
        self.steps.value = recordings.settings.steps
        chosen = [(label, label) for label in models]
        self.proxy = _dropdown("Proxy", chosen, chosen[0][1], "220px")
        self.second = _dropdown("and also", [("no other", NO_MODEL), *chosen], NO_MODEL, "220px")
        shown = [("live runs where there are any", True), ("recorded runs only", False)]
        self.shown = _dropdown("Show", shown, True, "270px")
        self._fit_fault()
        self._connect(status.guard)

    def asked(self) -> Asked:
        """Return the question.

        Raises:
            MoeproxyError: the seeds are no numbers.
        """
        others = dict.fromkeys(str(box.value) for box in (self.proxy, self.second) if box.value != NO_MODEL)
        onsets = {seed: self._onset(seed) for seed in parse_seeds(str(self.seeds.value))}
        return Asked(
            str(self.fault.value),
            self.strength.value / 100,
            onsets,
            ("original", *others),
            int(self.steps.value),
            bool(self.shown.value),
        )

    def choose(self, fault_id: str) -> None:
        """Choose a fault, as a user would.

        Raises:
            FaultError: no such fault.
        """
        item = fault(fault_id)
        self.family.value = item.family
        self.fault.value = item.id

    def _onset(self, seed: int) -> int:
        recorded = self._recordings.onsets(str(self.fault.value), self.strength.value / 100)
        chosen: int = self.onset.value
        return recorded.get(seed, chosen) if self.as_recorded.value else chosen

    def _connect(self, guard: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self.family.observe(guard(self._family_changed), "value")
        self.fault.observe(guard(lambda _: self._fit_fault()), "value")
        self.strength.observe(guard(lambda _: self._fit_strength()), "index")
        self.steps.observe(guard(lambda _: self._fit_steps()), "value")
        self.seeds.observe(guard(self._seeds_typed), "value")
        self.onset.observe(guard(self._onset_moved), "index")
        for slider in (self.strength, self.onset):
            slider.observe(lambda _: self._on_change(), "index")
        for control in (self.fault, self.steps, self.as_recorded, self.proxy, self.second, self.shown):
            control.observe(lambda _: self._on_change(), "value")

    def _family_changed(self, _: Any) -> None:
        options = fault_options(str(self.family.value), self._recorded)
        if FAULTS[str(self.fault.value)].family != self.family.value:
            self.fault.options = options  # goes to the first of them

    def _fit_fault(self) -> None:
        """Offer strengths in steps of 5 % and the recorded ones; go to the strongest recorded one."""
        recorded = [round(100 * value) for value in self._recordings.strengths(str(self.fault.value))]
        options = sorted({*range(5, 101, 5), *recorded})
        with self.strength.hold_sync():
            self.strength.options = options
            self.strength.value = max(recorded, default=100)
        self._fit_strength()
        self._fit_steps()

    def _fit_strength(self) -> None:
        """Go to the recorded seeds and their onsets, if there are any."""
        onsets = self._recordings.onsets(str(self.fault.value), self.strength.value / 100)
        self.as_recorded.disabled = not onsets
        self.as_recorded.value = bool(onsets)
        if onsets:
            self.seeds.value = ", ".join(map(str, onsets))
            self._put_onset(next(iter(onsets.values())))

    def _fit_steps(self) -> None:
        steps = max(int(self.steps.value), self._recordings.settings.steps)
        with self.onset.hold_sync():
            before, self.onset.options = self.onset.value, list(range(1, steps + 1))
            self._put_onset(before)

    def _put_onset(self, step: int) -> None:
        self._put = min(step, self.onset.options[-1])
        self.onset.value = self._put

    def _onset_moved(self, _: Any) -> None:
        if self.onset.value != self._put:  # by the reader
            self.as_recorded.value = False

    def _seeds_typed(self, _: Any) -> None:
        parse_seeds(str(self.seeds.value))
        self._on_change()


def parse_seeds(text: str) -> tuple[int, ...]:
    """Return seeds typed as "0, 1, 5-7", ascending.

    Raises:
        MoeproxyError: a part is no number or range, or there is none.
    """
    seeds: set[int] = set()
    for part in filter(None, (part.strip() for part in text.split(","))):
        low, dash, high = part.partition("-")
        if not low.strip().isdecimal() or (dash and not high.strip().isdecimal()):
            raise MoeproxyError(f"{part!r} is no seed", expected="numbers and ranges, as in 0, 1, 5-7")
        first, last = int(low), int(high if dash else low)
        seeds |= set(range(first, min(last, first + _MOST_SEEDS) + 1))
    if not 0 < len(seeds) <= _MOST_SEEDS:
        found = f"more than {_MOST_SEEDS}" if seeds else "no"
        raise MoeproxyError(f"{found} seeds", expected=f"1 to {_MOST_SEEDS}, as in 0, 1, 5-7")
    return tuple(sorted(seeds))


def _dropdown(name: str, options: list[tuple[str, Any]], value: Any, width: str) -> widgets.Dropdown:
    return widgets.Dropdown(
        options=options, value=value, description=name, style=_WIDE, layout=widgets.Layout(width=width)
    )
