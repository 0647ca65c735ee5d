"""A slider with a name: ipywidgets' own sliders cannot be named to a screen reader.

The handle of an ipywidgets 8 slider carries no accessible name (axe: aria-input-field-name, serious), and
its description is a label for nothing. The browser's own range input has a name, arrow, page, home and end
keys, and a readout that is announced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anywidget
import traitlets

_ESM = """
function render({ model, el }) {
  const label = document.createElement("label");
  label.className = "moeproxy-slider";
  const name = document.createElement("span");
  const range = document.createElement("input");
  const readout = document.createElement("output");
  range.type = "range"; range.min = 0; range.step = 1;
  // JupyterLab takes arrow keys for its own commands unless the focused element itself says no.
  range.setAttribute("data-lm-suppress-shortcuts", "true");
  label.append(name, range, readout);
  el.append(label);
  const draw = () => {
    const options = model.get("options"), index = model.get("index");
    name.textContent = model.get("label");
    range.max = options.length - 1;
    range.value = index;
    range.setAttribute("aria-label", model.get("label"));
    range.setAttribute("aria-valuetext", String(options[index]));
    readout.textContent = String(options[index]);
  };
  range.addEventListener("input", () => {
    model.set("index", Number(range.value));
    model.save_changes();
    draw();
  });
  model.on("change", draw);
  draw();
  return () => model.off("change", draw);
}
export default { render };
"""

_CSS = """
.moeproxy-slider { display: flex; flex-wrap: wrap; align-items: center; gap: 8px; padding-left: 2px; }
.moeproxy-slider > span { width: 150px; }
.moeproxy-slider input { flex: 1 1 220px; min-width: 220px; }
.moeproxy-slider output { min-width: 3em; font-variant-numeric: tabular-nums; }
"""


class NamedSlider(anywidget.AnyWidget):
    """A slider over a list of numbers, with an accessible name.

    Args:
        options: the numbers that can be chosen, ascending.
        value: the one chosen at first.
        label: the name, both shown and spoken.
    """

    _esm = _ESM
    _css = _CSS
    options = traitlets.List(traitlets.Union([traitlets.Int(), traitlets.Float()])).tag(sync=True)
    index = traitlets.Int(0).tag(sync=True)
    label = traitlets.Unicode("").tag(sync=True)

    def __init__(self, options: Sequence[float], value: float, label: str) -> None:
        super().__init__(options=list(options), index=list(options).index(value), label=label)

    @property
    def value(self) -> Any:
        """The number chosen."""
        return self.options[self.index]

    @value.setter
    def value(self, value: float) -> None:
        self.index = self.options.index(value)

    @traitlets.validate("index")
    def _inside(self, proposal: traitlets.Bunch) -> int:
        # A browser may send anything; an index outside would fail later and out of sight.
        return min(max(int(proposal["value"]), 0), max(len(self.options) - 1, 0))
