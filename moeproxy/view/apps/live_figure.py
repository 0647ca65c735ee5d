"""A figure in a panel that several threads change, and that a page which attaches later sees as it is."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import plotly.graph_objects as go
from plotly.basedatatypes import Undefined


class WholeFigureWidget(go.FigureWidget):
    """A FigureWidget that the front end is told of once it has its data, and of every change after that.

    Plotly's own opens its channel while it is still empty and sends data and layout as later messages. The front end
    waits two seconds for plotly's code (5 MB) and drops what comes in between when the code takes longer, so on a busy
    machine the figure stayed empty for good (anywidget 0.11, seen in JupyterLab under load).

    Plotly sends a change as a trait that it sets and unsets at once. While ipywidgets takes in a message of the page
    (`set_state`: a zoom, a new size), it holds back what happens to traits and keeps the last value only, so a change
    made in another thread meanwhile was never sent (15 of 400 beside a page that zooms all the time). Both go through
    one lock here.
    """

    _complete = False

    def __init__(self, figure: go.Figure) -> None:
        self._change_lock = threading.RLock()
        super().__init__(figure)
        self._complete = True
        self.open()

    @property
    def lock(self) -> threading.RLock:
        """Held while a message is taken in; who changes the figure from another thread holds it too."""
        return self._change_lock

    def set_state(self, sync_data: dict[str, Any]) -> None:
        """Take in what the page says, between two changes."""
        with self._change_lock:
            super().set_state(sync_data)

    def open(self) -> None:
        """Open the channel to the front end, with the whole figure as the first message."""
        if self._complete:
            super().open()


class LiveFigure:
    """A FigureWidget and the lock that every change to it goes through.

    Args:
        figure: the complete figure. FigureWidget copies its state when it is made, and a front end that
            attaches later (a reloaded page) sees that copy only, so `change` renews it.
    """

    def __init__(self, figure: go.Figure) -> None:
        self.widget = WholeFigureWidget(figure)
        self._lock = self.widget.lock

    @contextmanager
    def change(self) -> Iterator[Any]:
        """Yield the widget under the lock; all changes reach the screen together."""
        with self._lock:
            with self.widget.batch_update():
                yield self.widget
            self._renew()

    def show(self, traces: Sequence[dict[str, Any]], layout: dict[str, Any], titles: Sequence[str]) -> None:
        """Change every trace, the layout, and what stands above each panel, all at once."""
        with self.change() as figure:
            for trace, new in zip(figure.data, traces, strict=True):
                trace.update(new, overwrite=False)
            figure.update_layout(layout)
            for annotation, text in zip(figure.layout.annotations, titles, strict=True):
                annotation.text = text

    def _renew(self) -> None:
        """Renew the copy that a reloaded page is given.

        Not by `_repr_mimebundle_`, which does it as a side effect: its `deepcopy` turns plotly's mark for "undefined",
        which a drawn selection box brings along, into an object that cannot be sent. And the page at hand has all the
        changes already, so the copy is put where `get_state` finds it, without a message that would double the bytes.
        """
        self.widget._trait_values["_widget_layout"] = _defined(self.widget._layout_obj._props)
        self.widget._trait_values["_widget_data"] = _defined(self.widget._data)


def _defined(value: Any) -> Any:
    """Return a copy of nested dicts and lists without plotly's "undefined"; arrays are shared, as none is changed."""
    if isinstance(value, dict):
        return {key: _defined(item) for key, item in value.items() if item is not Undefined}
    if isinstance(value, list | tuple):
        if value and isinstance(value[0], int | float | str):
            return value  # plain data, which can be long
        return [_defined(item) for item in value if item is not Undefined]
    return value
